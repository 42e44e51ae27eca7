"""Medusa-2 (Cai et al. 2024, arXiv:2401.10774, sections 2.2.2 and 2.3.2): heads and target are
trained together.

The target learns only through an adapter. Its loss is self-distillation: KL(p_original ||
p_current) over the supervised tokens; the original is the same weights with the adapter off, so
there is no second model. To that comes lambda_0 times the loss of the heads, whose gradient reaches
the target through the hidden states that they read. Both sums are divided by the supervised tokens.

The target changes with every update, so its features cannot be kept: both passes are made again
for every batch.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafttrain.checks import integer, number, shown
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.heads import VocabularyHeads
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Loss
from drafttrain.nn import losses
from drafttrain.target.adapter import ALL, LARGEST_RANK, Trained, need_peft
from drafttrain.target.model import Target
from drafttrain.training.course import Course
from drafttrain.training.module import DraftModule, Source, loss_of
from drafttrain.training.optim import AdamW

RAMPS = ("constant", "sine")


@dataclass(frozen=True, kw_only=True)
class Joint:
    """How the target is trained together with the heads. `optim.lr` is the target's rate."""

    rank: int
    """Of the adapter; 0 is none: the target stays frozen, and only the heads learn."""
    alpha: float
    """What the adapter adds is scaled by alpha / rank."""
    dropout: float
    """On what the adapter reads, while it learns."""
    linears: str | Sequence[str]
    """Last parts of the names of the decoder layers' linears that get an adapter; `all` for all of
    them. The paper adapts the LM head too, which is borrowed frozen here."""
    lambda_0: float
    """Weight of the heads' loss."""
    ramp: str
    """constant, or sine: the weight of update u of n, from 0, is lambda_0 sin(pi / 2 * u / n)."""
    head_lr_factor: float
    """The rate of every head parameter over the target's. The public code multiplies that of
    weights and forgets biases."""
    chunk: int
    """Positions whose logits exist at one time in the loss of the target."""

    def __post_init__(self) -> None:
        integer("joint.rank", self.rank, 0, LARGEST_RANK)
        integer("joint.chunk", self.chunk, 1)
        for name in ("alpha", "lambda_0", "head_lr_factor", "dropout"):
            number(f"joint.{name}", getattr(self, name))
        if not (self.alpha > 0 and self.head_lr_factor > 0 and self.dropout < 1):
            raise InputError("joint needs alpha and head_lr_factor above 0, and dropout below 1")
        if self.ramp not in RAMPS:
            raise InputError(f"joint.ramp={self.ramp}: give one of {', '.join(RAMPS)}")
        names = (
            isinstance(self.linears, list | tuple)
            and self.linears
            and all(isinstance(one, str) for one in self.linears)
        )
        if self.linears != ALL and not names:
            raise InputError(
                f"joint.linears={shown(self.linears)}: give all, or a list of names such as "
                "[q_proj, v_proj]"
            )
        if self.rank:
            need_peft()

    def weight(self, update: int, updates: int | None) -> float:
        """Of the heads' loss in update `update`, from 0, of `updates`."""
        if self.ramp == "constant":
            return self.lambda_0
        assert updates is not None
        return self.lambda_0 * math.sin(math.pi / 2 * update / updates)

    def check(self, drafter: Drafter) -> None:
        """Raise InputError if such a drafter cannot be trained jointly."""
        if not isinstance(drafter, VocabularyHeads):
            raise InputError(
                "joint training teaches the target through heads on its last hidden state; "
                f"{type(drafter).__name__} has none: give drafter=medusa or drafter=hydra_heads, "
                "or joint=null"
            )

    def check_length(self, updates: int | None) -> None:
        """Raise InputError if the ramp needs the number of updates and there is none."""
        if self.ramp == "sine" and updates is None:
            raise InputError(
                "joint.ramp=sine counts updates, and trainer.max_minutes does not say how many "
                "there will be: give trainer.max_epochs or trainer.max_steps too, or "
                "joint.ramp=constant"
            )

    def adapter(self, target: Target, *, seed: int) -> Trained | None:
        """The adapter at its start, in the target's passes from now on."""
        if not self.rank:
            return None
        return Trained(
            target,
            rank=self.rank,
            alpha=self.alpha,
            dropout=self.dropout,
            linears=self.linears,
            seed=seed,
        )


def self_distillation(
    target: Target, hidden: Tensor, original: Tensor, batch: Batch, *, chunk: int
) -> tuple[Tensor, Tensor]:
    """Sum of KL(p_original || p_current) over the supervised tokens, and their number.

    Departs from the public code, which divides by all positions.

    Args:
        hidden: (b s d) the current last hidden states, with grad; original: (b s d) those of the
            original.
        chunk: positions whose logits exist at one time.
    Returns: () float32 sum with grad, () float32 count.
    """
    row, place = batch.loss_mask.to(hidden.device).nonzero(as_tuple=True)  # t
    row, place = row[place >= 1], place[place >= 1]
    before = (row, place - 1)
    total, _ = losses.over_vocabulary(
        hidden[before], original[before], target.head, losses.forward_kl, chunk=chunk
    )
    return total, total.new_tensor(float(len(row)))


class JointModule(DraftModule):
    """Trains heads and, through an adapter, the target. Only the adapter is a child, not the
    target.

    Args:
        adapter: None leaves the target frozen.
    """

    def __init__(
        self,
        drafter: Drafter,
        source: Source,
        optim: AdamW,
        course: Course,
        *,
        target: Target,
        adapter: Trained | None,
        joint: Joint,
        seed: int = 0,
        log_every: int = 10,
    ) -> None:
        super().__init__(drafter, source, optim, course, seed=seed, log_every=log_every)
        joint.check(drafter)
        joint.check_length(course.updates)
        self.target, self.joint = target, joint
        self.adapter = adapter

    def judge(self, batch: Batch) -> tuple[Loss, float]:
        weight = self.joint.weight(self.updates, self.course.updates)
        # Both passes are in the target's own precision.
        with torch.autocast(self.target.device.type, enabled=False):
            hidden, kl, count = self._distilled(batch)
        ready = time.perf_counter()
        features = Features(last_hidden=hidden)
        heads = loss_of(self.drafter, batch, features, self._generator())
        one = count.new_ones(())
        parts = {
            **heads.parts,
            "kl": (kl.detach(), count),
            "heads": (heads.total.detach(), heads.count),
            "lambda_0": (one * weight, one),
        }
        return Loss(kl + weight * heads.total, count, parts), ready

    def _distilled(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """(b s d) the current hidden states, their loss and the supervised tokens."""
        with torch.no_grad(), self.original():
            original = self.target.hidden(batch.input_ids)
        if self.adapter is None:
            count = (batch.loss_mask[:, 1:]).sum().float().to(original.device)
            return original, torch.zeros((), device=original.device), count
        with self._chance(), self.adapter.learning():
            hidden = self.target.hidden(batch.input_ids)
        return hidden, *self_distillation(
            self.target, hidden, original, batch, chunk=self.joint.chunk
        )

    def original(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.adapter is None else self.adapter.off()

    @contextlib.contextmanager
    def _chance(self) -> Iterator[None]:
        """Dropout draws from the global source: here its numbers depend on what `_generator`'s
        depend on, too."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self._noise_seed())
            yield

    def groups(self) -> list[dict[str, Any]]:
        (heads,) = super().groups()
        heads["factor"] = float(self.joint.head_lr_factor)
        return (
            [heads]
            if self.adapter is None
            else [{"params": list(self.adapter.parameters())}, heads]
        )
