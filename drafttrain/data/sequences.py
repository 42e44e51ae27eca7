"""Which rows share a sequence, where rows are joined into sequences of one length."""

from __future__ import annotations

import bisect
import random
from collections.abc import Sequence

from drafttrain.data.datamodule import EpochSampler, length_classes

_FINE = 1.02
"""Rows whose lengths differ by less than this factor take each other's places; it bounds what that
leaves unfilled."""


class PackedSampler(EpochSampler):
    """Batches of rows that are joined into sequences of one length (`ConversationData.joined`),
    otherwise as `EpochSampler`.

    Rows that share a sequence differ from epoch to epoch, while the lengths that do stay: each row
    of a class of like lengths takes any place of that class. So every epoch has the same sequences
    in number, filled to about the same share.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        sequence: int,
        sequences: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        accumulate: int = 1,
    ) -> None:
        """Say how rows become sequences.

        Args:
            lengths: tokens of each row, at most `sequence`.
            sequence: tokens of a sequence; sequences: of a batch.
            accumulate: batches of an update on each process.
        """
        super().__init__(
            lengths, batch_tokens=sequence, seed=seed, rank=rank, world=world, accumulate=accumulate
        )
        self.sequence = sequence
        self._classes = length_classes(lengths, _FINE)
        self._bins = fill(self._classes, sequence)
        self.filled = sum(lengths) / (len(self._bins) * sequence)
        """Share of the sequences that rows take."""
        self._sizes = [
            len(self._bins[i : i + sequences]) for i in range(0, len(self._bins), sequences)
        ]

    def _updates(self, epoch: int) -> list[list[list[int]]]:
        chance = random.Random(f"{self.seed}/{epoch}/batches")
        waiting: dict[int, list[int]] = {}
        for i, width in enumerate(self._classes):
            waiting.setdefault(width, []).append(i)
        for rows in waiting.values():
            chance.shuffle(rows)
        sequences = [[waiting[width].pop() for width in widths] for widths in self._bins]
        for rows in sequences:
            chance.shuffle(rows)
        chance.shuffle(sequences)
        batches, start = [], 0
        for size in self._sizes:
            batches.append([row for rows in sequences[start : start + size] for row in rows])
            start += size
        return self._shuffled(batches, chance)


def fill(widths: Sequence[int], size: int) -> list[list[int]]:
    """Put things of some widths into bins of one size: the widest first, each where the least room
    is left (best fit decreasing).

    Returns: the widths in each bin.
    """
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    """Those that bins have, ascending."""
    for width in sorted(widths, reverse=True):
        place = bisect.bisect_left(rooms, width)
        if place == len(rooms):
            number, room = len(bins), size
            bins.append([])
        else:
            room = rooms[place]
            number = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        bins[number].append(width)
        left = room - width
        if left not in by_room:
            by_room[left] = []
            bisect.insort(rooms, left)
        by_room[left].append(number)
    return bins
