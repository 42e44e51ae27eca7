"""The optimiser and its rate. The rate only depends on the number of updates, so a resumed run goes
on where it was; a schedule that ends by the clock also on the seconds of training until then."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drafttrain.checks import integer, number, shown
from drafttrain.errors import InputError
from drafttrain.later import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of every weight."""
MOMENTUM = ("momentum_buffer",)
"""What Muon does."""
LEAST_EPS = 1e-20
"""Below it a gradient whose square is 0 in float32 would be divided by next to nothing."""
SCHEDULES = ("cosine", "linear", "constant")
CLOCK = "clock"
"""As the horizon: the schedule ends when `trainer.max_minutes` does."""
ADJUSTMENTS = ("match_rms_adamw", "original")
MOST_NS_STEPS = 99
"""Of Newton-Schulz; `torch.optim.Muon` takes no more."""


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
    horizon: int | str | None
    """Updates at which the schedule ends; None is the run's last one. CLOCK is the run's end,
    whichever of clock and updates is nearer to it: shares of the run are then of its minutes."""
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
        if self.horizon != CLOCK:
            null = f"the run's last update, or {CLOCK} for the end of trainer.max_minutes"
            integer("optim.horizon", self.horizon, 1, null=null)
        for name in ("clip_norm", "clip_value"):
            number(f"optim.{name}", getattr(self, name), above=0, null="no clipping")

    def resolve(self, updates: int | None, seconds: float | None = None) -> Rate:
        """The schedule of a run.

        Args:
            updates: of all of it; None is a run that only a clock ends.
            seconds: its limit of time; None is none.
        Raises: InputError if the schedule or its warm-up needs a limit and there is none.
        """
        if self.horizon == CLOCK:
            if seconds is None:
                raise InputError(
                    f"optim.horizon={CLOCK} ends the schedule when trainer.max_minutes does, and "
                    "that is null: give trainer.max_minutes, or optim.horizon=null"
                )
            return Rate(self.schedule, self.warmup, updates, self.end_factor, seconds)
        assert not isinstance(self.horizon, str)
        end = self.horizon or updates
        if end is None and (self.schedule != "constant" or 0 < self.warmup < 1):
            raise InputError(
                f"optim.schedule={self.schedule}, warmup={self.warmup} count updates, and "
                "trainer.max_minutes does not say how many there will be: give "
                f"optim.horizon={CLOCK}, trainer.max_epochs, trainer.max_steps or a number as "
                "optim.horizon, or a constant schedule with warmup in updates"
            )
        warmup = round(self.warmup * (end or 0)) if self.warmup < 1 else int(self.warmup)
        if self.schedule == "constant":
            return Rate("constant", warmup, None, 1.0)
        return Rate(self.schedule, warmup, end, self.end_factor)

    def optimiser(
        self, groups: Sequence[dict[str, Any]], drafter: nn.Module
    ) -> torch.optim.Optimizer:
        """
        Args:
            groups: what is trained, the drafter's weights among it.
        """
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

    def check_installed(self) -> None:
        """Raise InputError where the installed torch lacks it."""

    def describe(self, drafter: nn.Module) -> str:
        """What which weights are trained by, in words; empty where it is the same for all."""
        return ""

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


@dataclass(frozen=True, kw_only=True)
class Muon(AdamW):
    """Muon (Jordan et al. 2024) as `torch.optim.Muon` has it, for the drafter's matrices: the step
    is the momentum, brought near the nearest orthogonal matrix. AdamW trains all else, by the
    inherited settings. Which weights are matrices here: `training.muon.matrices`."""

    rest_factor: float
    """The rate of all else over `lr`."""
    matrix_decay: float
    """Weight decay of the matrices, times `lr`; `weight_decay` is that of all else."""
    momentum: float
    """Share of the earlier momentum that is kept at each update."""
    ns_steps: int
    """Iterations of Newton-Schulz."""
    adjust_lr_fn: str
    """How the step depends on a matrix's shape: match_rms_adamw multiplies by 0.2 sqrt(larger
    side), which makes it about as large as AdamW's; original by sqrt(rows / columns), where rows
    are more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        number("optim.rest_factor", self.rest_factor, above=0)
        number("optim.matrix_decay", self.matrix_decay)
        number("optim.momentum", self.momentum)
        if self.momentum >= 1:
            raise InputError(f"optim.momentum={self.momentum}: needs a number from 0 to below 1")
        integer("optim.ns_steps", self.ns_steps, 1, MOST_NS_STEPS)
        if self.adjust_lr_fn not in ADJUSTMENTS:
            raise InputError(
                f"optim.adjust_lr_fn={shown(self.adjust_lr_fn)}: give one of "
                f"{', '.join(ADJUSTMENTS)}"
            )

    def check_installed(self) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise InputError(
                f"optim=muon needs torch 2.9 or later, this is {torch.__version__}: install a "
                "later one, or set optim=adamw"
            )

    def optimiser(
        self, groups: Sequence[dict[str, Any]], drafter: nn.Module
    ) -> torch.optim.Optimizer:
        from drafttrain.training.muon import Both, matrices, split

        own, rest = split(groups, matrices(drafter))
        for group in rest:
            group["factor"] = group.get("factor", 1.0) * self.rest_factor
        muon = torch.optim.Muon(
            own,
            lr=self.lr,
            weight_decay=self.matrix_decay,
            momentum=self.momentum,
            ns_steps=self.ns_steps,
            adjust_lr_fn=self.adjust_lr_fn,
        )
        return Both(muon, super().optimiser(rest, drafter) if rest else None)

    def describe(self, drafter: nn.Module) -> str:
        from drafttrain.training.muon import matrices, words

        return words(drafter, matrices(drafter))


def moments_of(group: Mapping[str, Any]) -> tuple[str, ...]:
    """What an optimiser keeps of every weight of a group, by the group's settings."""
    return MOMENTUM if "ns_steps" in group else MOMENTS


@dataclass(frozen=True)
class Rate:
    """Factor on the rate of every update."""

    schedule: str
    warmup: float
    """Updates; where the clock counts and it is below 1, a share of the run."""
    end: int | None
    end_factor: float
    clock: float | None = None
    """Seconds of training at which the schedule ends; None counts updates only."""

    def __call__(self, update: int, seconds: float = 0.0) -> float:
        """Factor of the update with this number, from 0; 1 on the last of the warm-up, `end_factor`
        on the last of all.

        Args:
            seconds: of training until then.
        """
        if self.clock is not None:
            return self._by_clock(update, seconds, self.clock)
        if update < self.warmup:
            return (update + 1) / self.warmup
        if self.end is None:
            return 1.0
        return self._fallen((update + 1 - self.warmup) / max(1, self.end - self.warmup))

    def _by_clock(self, update: int, seconds: float, limit: float) -> float:
        done = max(seconds / limit, 0.0 if self.end is None else (update + 1) / self.end)
        if self.warmup >= 1:
            return min(1.0, (update + 1) / self.warmup, self._fallen(done))
        if done < self.warmup:
            return done / self.warmup
        return self._fallen((done - self.warmup) / (1 - self.warmup))

    def _fallen(self, done: float) -> float:
        """After a share of the schedule that follows the warm-up."""
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, done)
        left = 1 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.end_factor + (1 - self.end_factor) * left

    def shortfall(self, updates: int | None) -> str:
        """How a run of that many updates misses the rate that is set, in words; empty where it
        comes near it. Without a number of updates, what it lacks is not known."""
        if updates is None or self.clock is not None:
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
            **({} if self.clock is None else {"clock": self.clock}),
        }
