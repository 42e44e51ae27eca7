"""What drafters that learn by `drafttrain.nn.unrolled` have in common: their labels, and what they
say of every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.drafter.borrowing import DraftVocabulary, best_ids
from drafttrain.flow import Batch


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


def accuracies(
    drafter: DraftVocabulary, choices: Tensor, labels: Labels
) -> dict[str, tuple[Tensor, Tensor]]:
    """How often each step's choice, (t k) places in the draft vocabulary, is the label. Labels
    outside the draft vocabulary cannot be chosen, so they count as misses."""
    hits = (drafter.to_target_ids(choices) == labels.ids[:, None]) & labels.valid
    pairs = zip(hits.sum(0).float().unbind(), labels.valid.sum(0).float().unbind(), strict=True)
    return dict(zip(accuracy_names(choices.shape[1]), pairs, strict=True))


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
