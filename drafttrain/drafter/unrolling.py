"""What drafters that learn by `drafttrain.nn.unrolled` have in common: their labels, and what they
say of every step."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.drafter.borrowing import BorrowsHead, DraftVocabulary, best_ids
from drafttrain.drafter.growing import Recurrent
from drafttrain.flow import Batch, Features, Loss
from drafttrain.nn.mixture import Mixture, is_best, mixed_rows, no_goal, teacher_goal
from drafttrain.tree.candidates import Candidates


@dataclass(frozen=True)
class Labels:
    """The supervised tokens that step 0 reaches, which are all that any step does."""

    where: tuple[Tensor, Tensor]
    """(t) sequence and (t) place of each."""
    ids: Tensor
    """(t) int64"""
    valid: Tensor
    """(t k) bool, where a row of each step reaches it."""

    @classmethod
    def of(cls, batch: Batch, steps: int, device: torch.device) -> Labels:
        """Those of a batch: step j reads the place j + 2 before the label, of the same row."""
        ids = batch.input_ids.to(device)
        sequence, place = batch.labels(2).to(device).nonzero(as_tuple=True)
        own = batch.positions.to(device).expand(len(ids), -1)[sequence, place]
        valid = torch.stack([own >= 2 + step for step in range(steps)], 1)
        return cls((sequence, place), ids[sequence, place], valid)

    def before(self, values: Tensor, device: torch.device) -> Tensor:
        """(b s d) of the target -> (t d) at the places that the labels follow."""
        sequence, place = self.where
        return values.to(device)[sequence, place - 1]


def accuracy_names(steps: int) -> tuple[str, ...]:
    """`accuracy` of the first step, `accuracy_2` and so on of the others."""
    return ("accuracy", *(f"accuracy_{step}" for step in range(2, steps + 1)))


def accuracies(hits: Tensor, labels: Labels) -> dict[str, tuple[Tensor, Tensor]]:
    """How often each step finds the label most likely, by notes of `is_best`, (t k). Labels
    outside the draft vocabulary cannot be chosen, so they count as misses."""
    right, of = (hits * labels.valid).sum(0).float(), labels.valid.sum(0).float()
    pairs = zip(right.unbind(), of.unbind(), strict=True)
    return dict(zip(accuracy_names(hits.shape[1]), pairs, strict=True))


def guesses_of(
    drafter: DraftVocabulary,
    read: Tensor,
    labels: Labels,
    head: Callable[[Tensor], Tensor],
    chunk: int,
    batch: Batch,
) -> Tensor:
    """(t k d) what the head reads -> (b s k) int64, depth j + 1 by step j; -1 where none is
    made."""
    steps, (sequence, place) = read.shape[1], labels.where
    found = torch.full((*batch.input_ids.shape, steps), -1, dtype=torch.int64, device=read.device)
    for step in range(steps):
        ids = best_ids(drafter, read[:, step], head, chunk)
        found[sequence, place, step] = torch.where(labels.valid[:, step], ids, -1)
    return found


class Unrolls(BorrowsHead, Recurrent):
    """Learns all of its steps at once, by losses over the vocabulary: step j reads its own output
    of step j - 1. Its head is its own, or the target's, frozen."""

    mixture: Mixture
    lm_head: nn.Linear | None

    @abc.abstractmethod
    def aligned(self, batch: Batch, features: Features) -> tuple[Tensor, Labels]:
        """What the head reads for every label: (t k d) with grad, a row for each step; and the
        labels."""

    @property
    def loss_parts(self) -> tuple[str, ...]:
        return (*self.mixture.names, *accuracy_names(self.config.steps))

    def loss(
        self, batch: Batch, features: Features, *, generator: torch.Generator | None = None
    ) -> Loss:
        """Sum over steps of their weight times their loss, over the labels that each reaches; its
        count is of the labels that the first one has."""
        read, labels = self.aligned(batch, features)
        goal: Any = no_goal
        if self.mixture.reads_target_probs:
            assert features.last_hidden is not None
            goal = teacher_goal(labels.before(features.last_hidden, read.device), self.head)
        found = mixed_rows(
            read,
            self.to_draft_ids(labels.ids),
            self.logits,
            self.mixture.terms,
            goal=goal,
            note=is_best,
            weights=labels.valid * torch.tensor(self.config.step_weights, device=read.device),
            valid=labels.valid,
            trained=[] if self.lm_head is None else [self.lm_head.weight],
            chunk=self.config.chunk,
        )
        sums, count = found.sums.sum(0).unbind(), labels.valid.sum().float()
        parts = {name: (one, count) for name, one in zip(self.mixture.names, sums, strict=True)}
        parts |= accuracies(found.noted, labels)
        return Loss(found.total.float(), parts["accuracy"][1], parts)

    @torch.no_grad()
    def guesses(self, batch: Batch, features: Features) -> Tensor:
        """Depth k is step k - 1, which has read its own output since the prefix ended."""
        read, labels = self.aligned(batch, features)
        return guesses_of(self, read, labels, self.logits, self.config.chunk, batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """(... d) what the head reads -> (... w)."""
        if self.lm_head is None:
            return self.head(hidden)
        out: Tensor = self.lm_head(hidden.to(self.dtype))
        return out

    def after(self, out: Tensor) -> Candidates:
        return self.candidates(self.logits(out))
