"""The rows that no model covers yet: which the next model is fitted on, and their weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.data.datamodule import ConversationData
from drafttrain.training.boost import Boost
from drafttrain.training.references import Reference


@dataclass
class Left:
    """Which rows the next model is fitted on, and what they weigh."""

    places: list[int]
    """Of the rows, ascending."""
    total: int
    """Rows in all."""
    row_weights: list[float] | None = None
    """Of all rows; None is 1 for each."""
    token_weights: list[Tensor] | None = None
    """Of all rows, (s) float32; None is 1 for each."""

    @classmethod
    def all_of(cls, data: ConversationData) -> Left:
        """Every row, with its full weight."""
        return cls(list(range(len(data))), len(data))

    def part(self, data: ConversationData, places: Sequence[int] | None = None) -> ConversationData:
        """Some of the rows that are left, with their weights; None is all of them."""
        places = self.places if places is None else places
        if self.token_weights is not None:
            return data.part(places, [self.token_weights[place] for place in places])
        if self.row_weights is not None:
            return data.part(
                places,
                [torch.full((data.lengths[place],), self.row_weights[place]) for place in places],
            )
        return data.part(places)

    def without(self, marks: Mapping[int, int], wanted: Sequence[Reference], config: Boost) -> Left:
        """Take covered rows away, or let rows count less.

        Args:
            marks: matched tokens of rows, by their places; rows without one stay as they are.
        """
        if config.removal == "soft":
            weights = list(self.row_weights or [1.0] * self.total)
            for place, length in marks.items():
                weights[place] *= math.exp(-config.eta * length / len(wanted[place].answer))
            return Left(self.places, self.total, weights)
        kept = [
            p
            for p in self.places
            if p not in marks or not wanted[p].covered(marks[p], config.match)
        ]
        return Left(kept, self.total)

    def missing(self, overlaps: Mapping[int, Tensor], data: ConversationData) -> Left:
        """Let each label count what is missing of the target's distribution.

        Args:
            overlaps: (s) of rows, by their places: sum_v min(p, q) of the newest model.
        """
        weights = list(self.token_weights or [torch.ones(length) for length in data.lengths])
        for place, overlap in overlaps.items():
            # 1 - max over models is the least of what each of them misses.
            weights[place] = torch.minimum(weights[place], 1 - overlap).clamp(0, 1)
        return Left(self.places, self.total, token_weights=weights)

    def share(self, data: ConversationData) -> float:
        """Weight of what is left, as a share of all rows' weight at first."""
        if self.token_weights is not None:
            masks = {place: data.row(place)[1] for place in self.places}
            left = sum(
                float((self.token_weights[place] * mask).sum()) for place, mask in masks.items()
            )
            return left / max(1, data.supervised)
        if self.row_weights is not None:
            return sum(self.row_weights[place] for place in self.places) / self.total
        return len(self.places) / self.total
