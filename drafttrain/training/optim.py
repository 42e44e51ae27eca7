"""The optimiser and its rate. The rate only depends on the number of updates, so a resumed run goes
on where it was."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drafttrain.checks import integer, number, shown
from drafttrain.errors import InputError
from drafttrain.later import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What the optimiser keeps of every weight."""
LEAST_EPS = 1e-20
"""Below it a gradient whose square is 0 in float32 would be divided by next to nothing."""
SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW with linear warm-up, then a schedule to `end_factor` of the rate; EAGLE-1's settings
    are those of `eagle1_paper`."""

    lr: float
    """The rate after warm-up."""
    betas: Sequence[float]
    eps: float
    weight_decay: float
    warmup: float
    """Updates of linear warm-up; below 1 it is a share of the run."""
    schedule: str
    """After warm-up: cosine, linear or constant."""
    end_factor: float
    """Share of `lr` that the schedule reaches on its last update."""
    horizon: int | None
    """Updates at which the schedule ends; None is the run's last one."""
    clip_norm: float | None
    """Largest norm of the gradient of all parameters together; None does not clip."""
    clip_value: float | None
    """Largest size of each gradient entry; None does not clip."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise InputError(f"optim.schedule={self.schedule}: give one of {', '.join(SCHEDULES)}")
        number("optim.lr", self.lr, above=0)
        pair = isinstance(self.betas, list | tuple) and len(self.betas) == 2
        if not pair or not all(type(beta) in (int, float) and 0 <= beta < 1 for beta in self.betas):
            raise InputError(
                f"optim.betas={shown(self.betas)}: needs two numbers from 0 to below 1"
            )
        number("optim.weight_decay", self.weight_decay)
        number("optim.eps", self.eps, above=0)
        if self.eps < LEAST_EPS:
            raise InputError(
                f"optim.eps={self.eps}: needs at least {LEAST_EPS}, since float32 rounds the "
                "squares of such gradients to 0; AdamW's own is 1e-8"
            )
        number("optim.end_factor", self.end_factor)
        if self.end_factor > 1:
            raise InputError(f"optim.end_factor={self.end_factor}: needs a share of lr from 0 to 1")
        number("optim.warmup", self.warmup)
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise InputError(
                f"optim.warmup={self.warmup}: needs an integer, in updates, or a share of the run "
                "below 1"
            )
        integer("optim.horizon", self.horizon, 1, null="the run's last update")
        for name in ("clip_norm", "clip_value"):
            number(f"optim.{name}", getattr(self, name), above=0, null="no clipping")

    def resolve(self, updates: int | None) -> Rate:
        """The schedule of a run of that many updates; None is a run that only a clock ends.

        Raises: InputError if the schedule or its warm-up needs the number of updates and there is
        none.
        """
        end = self.horizon or updates
        if end is None and (self.schedule != "constant" or 0 < self.warmup < 1):
            raise InputError(
                f"optim.schedule={self.schedule}, warmup={self.warmup} count updates, and "
                "trainer.max_minutes does not say how many there will be: give "
                "trainer.max_epochs, trainer.max_steps or optim.horizon too, or a constant "
                "schedule with warmup in updates"
            )
        warmup = round(self.warmup * (end or 0)) if self.warmup < 1 else int(self.warmup)
        if self.schedule == "constant":
            return Rate("constant", warmup, None, 1.0)
        return Rate(self.schedule, warmup, end, self.end_factor)

    def optimiser(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        # One pass over memory instead of a dozen.
        fused = all(p.device.type in ("cpu", "cuda") for group in groups for p in group["params"])
        betas = (self.betas[0], self.betas[1])
        return torch.optim.AdamW(
            list(groups),
            lr=self.lr,
            betas=betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=fused,
        )

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """() of the gradient of all parameters together. It is not finite where an entry is not,
        nor where the squares of the entries, which moments are made of, are too large."""
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def wide_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The same, float64: finite where all entries are, however large. Slower."""
        found = [
            torch.linalg.vector_norm(p.grad, dtype=torch.float64)
            for p in parameters
            if p.grad is not None
        ]
        return torch.linalg.vector_norm(torch.stack(found))

    def clip(self, parameters: Iterable[nn.Parameter], norm: Tensor) -> None:
        """Clip gradients whose norm is known, `wide_norm` where the other one is not finite."""
        parameters = list(parameters)
        if self.clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, self.clip_value)
            wide = norm.dtype == torch.float64
            norm = self.wide_norm(parameters) if wide else self.norm(parameters)
        if self.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, norm)


@dataclass(frozen=True)
class Rate:
    """Factor on the rate of every update."""

    schedule: str
    warmup: int
    end: int | None
    end_factor: float

    def __call__(self, update: int) -> float:
        """Factor of the update with this number, from 0; 1 on the last of the warm-up, `end_factor`
        on the last of all."""
        if update < self.warmup:
            return (update + 1) / self.warmup
        if self.end is None:
            return 1.0
        done = min(1.0, (update + 1 - self.warmup) / max(1, self.end - self.warmup))
        left = 1 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.end_factor + (1 - self.end_factor) * left

    def shortfall(self, updates: int | None) -> str:
        """How a run of that many updates misses the rate that is set, in words; empty where it
        comes near it. Without a number of updates, what a constant rate lacks is not known."""
        if updates is None:
            return ""
        highest = max(map(self, range(updates)))
        count = "the only update has" if updates == 1 else f"all {updates} updates have"
        if not highest:
            return f"{count} rate 0, and nothing is learned"
        if self.warmup > updates:
            return (
                f"warm-up of {self.warmup} updates is longer than the run of {updates}, whose rate "
                f"ends at {highest:.0%} of optim.lr"
            )
        return f"{count} at most {highest:.0%} of optim.lr" if highest < 0.5 else ""

    def facts(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule,
            "warmup": self.warmup,
            "end": self.end,
            "end_factor": self.end_factor,
        }
