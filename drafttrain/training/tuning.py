"""Boost-tuning as a procedure: fit a model, mark the rows that it reproduces, fit the next on the
rest. Its settings: `drafttrain.training.boost`."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from drafttrain.data.datamodule import ConversationData
from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features
from drafttrain.training.boost import Boost
from drafttrain.training.checkpoint import read_checkpoint, write_checkpoint
from drafttrain.training.left import Left
from drafttrain.training.module import Source
from drafttrain.training.references import Reference, matched, similar_sizes

MARKS = "marks.ckpt"


class Overlapping(Protocol):
    """A drafter that can compare its distribution with the target's."""

    def overlap(self, batch: Batch, features: Features) -> Tensor:
        """(b s) for every label sum_v min(p, q), 0 elsewhere."""
        ...


@dataclass(frozen=True)
class Fit:
    """One fit of the procedure."""

    name: str
    """Of its folder: member-1, or member-1/fold-2."""
    data: ConversationData
    seed: int
    begin: Drafter | None
    """Whose weights it starts with; None starts as every fit does."""
    member: bool
    """False: it only marks rows, and is dropped afterwards."""


@dataclass
class Collective:
    """What the procedure found."""

    members: list[Drafter] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """For each model that was fitted, one that was left out too: what `line` returns, and how many
    rows were marked."""
    ended: str = ""
    """Why there are no more."""
    marking: list[dict[str, Any]] = field(default_factory=list)
    """Facts of the fits that only marked rows."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The procedure, and what it works with."""

    config: Boost
    data: ConversationData
    wanted: Sequence[Reference]
    """Of all rows."""
    reported: Sequence[Reference]
    """Those that coverage is reported on."""
    fit: Callable[[Fit], Drafter]
    """Makes a drafter: the same one for the same fit, also in a later part of a run."""
    facts: Callable[[Fit], dict[str, Any]]
    """What a fit took, as plain values."""
    source: Source
    """The target's features of the rows, where distributions are compared."""
    seed: int
    folder: Path
    """Keeps the marks, by member, for a later part of the run."""
    note: Callable[[int, Mapping[str, Any]], None]
    """Called with a model's number and line when it is fitted, and again when rows were marked."""
    say: Callable[[str], None]

    def run(self) -> Collective:
        """Fit one model after the other."""
        left, found = Left.all_of(self.data), Collective()
        lengths: list[list[int]] = []
        for number in range(1, self.config.members + 1):
            last = number == self.config.members
            unmarkable = not last and not self._can_be_marked(left.places)
            if unmarkable and number == 1:
                raise InputError(
                    f"{len(left.places)} rows cannot be marked by models fitted without them: give "
                    "more rows"
                )
            fitted, apart = left.places, list[int]()
            if self.config.marking == "held_out" and not last:
                fitted, apart = self._halves(left.places)
            begin = self._begin(found)
            member, row = self._fitted(number, left, fitted, begin, lengths)
            found.rows.append(row)
            found.ended = self._ended(number, row, left, unmarkable)
            if not row["left_out"]:
                found.members.append(member)
            if found.ended:
                break
            left = self._after(number, member, begin, left, apart, row, found)
            self.note(number, row)
            found.ended = self._exhausted(left, row)
            if found.ended:
                break
        self.say(found.ended)
        return found

    def _begin(self, found: Collective) -> Drafter | None:
        """Whose weights the next model starts with."""
        return found.members[-1] if self.config.begin == "previous" and found.members else None

    def _fitted(
        self,
        number: int,
        left: Left,
        places: list[int],
        begin: Drafter | None,
        lengths: list[list[int]],
    ) -> tuple[Drafter, dict[str, Any]]:
        """A model and its line; what it matches is added to `lengths`."""
        here = left.part(self.data, places)
        self.say(
            f"member {number} of at most {self.config.members}: fitted on {len(here)} of "
            f"{left.total} rows"
        )
        member = self.fit(Fit(f"member-{number}", here, self.seed + number - 1, begin, True))
        lengths.append(matched(member, self.reported))
        row: dict[str, Any] = {
            "member": number,
            "rows": len(here),
            **line(lengths, self.reported, self.config.match),
        }
        row["left_out"] = number > 1 and row["gain"] < self.config.least_gain
        self.note(number, row)
        return member, row

    def _ended(self, number: int, row: Mapping[str, Any], left: Left, unmarkable: bool) -> str:
        """Why a model that was just fitted is the last; empty where it may not be."""
        if row["left_out"]:
            return (
                f"member {number} adds {row['gain']:.1%} of the rows, less than "
                f"{self.config.least_gain:.1%}: left out"
            )
        if number == self.config.members:
            return f"all of boost.members={self.config.members} are fitted"
        if unmarkable:
            return (
                f"{len(left.places)} rows were left, which no model fitted without them could mark"
            )
        return ""

    def _exhausted(self, left: Left, row: Mapping[str, Any]) -> str:
        """Why too little is left for another model; empty where enough is."""
        if not left.places:
            return "no row is left"
        if row["left"] < self.config.least_left:
            return (
                f"{row['left']:.1%} of all weight is left, less than {self.config.least_left:.1%}"
            )
        return ""

    # Marks ----------------------------------------------------------------------------------------
    def _after(
        self,
        number: int,
        member: Drafter,
        begin: Drafter | None,
        left: Left,
        apart: list[int],
        row: dict[str, Any],
        found: Collective,
    ) -> Left:
        """What is left once rows were marked.

        How many were marked is put into the model's line, and the fits made for it into `found`.
        """
        folder = self.folder / f"member-{number}"
        if (folder / MARKS).exists():
            kept = read_checkpoint(folder / MARKS)
        else:
            kept = self._marks(number, member, begin, left, apart)
            write_checkpoint(folder / MARKS, kept)
        for fold in folder.glob("fold-*"):
            shutil.rmtree(fold)  # large, and of no further use
        found.marking += kept["fits"]
        marks: dict[int, int] = dict(zip(kept["places"], kept["matched"], strict=True))
        overlaps: dict[int, Tensor] = dict(zip(kept["places"], kept["overlaps"], strict=False))
        if self.config.marking == "held_out":
            left = Left(apart, left.total, left.row_weights, left.token_weights)
        if self.config.removal == "token":
            left = left.missing(overlaps, self.data)
        else:
            left = left.without(marks, self.wanted, self.config)
        covered = [
            self.wanted[place].covered(length, self.config.match) for place, length in marks.items()
        ]
        row |= {"marked": len(marks), "marked_covered": sum(covered), "left": left.share(self.data)}
        if self.config.removal == "hard" and not any(covered):
            self.say(
                f"member {number} covers no row, so that the next one learns the same: lower "
                "boost.match, or train longer"
            )
        return left

    def _marks(
        self, number: int, member: Drafter, begin: Drafter | None, left: Left, apart: list[int]
    ) -> dict[str, list[Any]]:
        """Places of the rows that were marked, the tokens matched of each, their overlaps where
        distributions are compared, and facts of the fits made for it."""
        if self.config.marking == "fitted":
            return self._marked_by(member, left.places)
        if self.config.marking == "held_out":
            return self._marked_by(member, apart)
        found: dict[str, list[Any]] = {"places": [], "matched": [], "overlaps": [], "fits": []}
        order = self._order()
        for fold in range(self.config.folds):
            hidden = [place for place in left.places if order[place] % self.config.folds == fold]
            others = [place for place in left.places if order[place] % self.config.folds != fold]
            if not hidden:
                continue
            self.say(
                f"member {number}: a model of {len(others)} rows marks the other {len(hidden)}"
            )
            seed = _seed(f"{self.seed}/{number}/{fold}")
            fold_fit = Fit(
                f"member-{number}/fold-{fold + 1}", left.part(self.data, others), seed, begin, False
            )
            for name, values in self._marked_by(self.fit(fold_fit), hidden).items():
                found[name] += values
            found["fits"].append(self.facts(fold_fit))
        return found

    def _marked_by(self, drafter: Drafter, places: Sequence[int]) -> dict[str, list[Any]]:
        lengths = matched(drafter, [self.wanted[place] for place in places])
        overlaps = self._overlaps(drafter, places) if self.config.removal == "token" else []
        return {"places": list(places), "matched": lengths, "overlaps": overlaps, "fits": []}

    def _overlaps(self, drafter: Any, places: Sequence[int]) -> list[Tensor]:
        """(s) of each row: sum_v min(p, q) for its labels, 0 elsewhere."""
        model: Overlapping = drafter
        found = [torch.zeros(0)] * len(places)
        for group in similar_sizes([self.data.lengths[place] for place in places]):
            batch = self.data.batch([places[i] for i in group])
            values = model.overlap(batch, self.source.features(batch)).cpu()
            for row, i in enumerate(group):
                found[i] = values[row, : self.data.lengths[places[i]]].clone()
        return found

    def _can_be_marked(self, places: Sequence[int]) -> bool:
        """Where every row is marked by a model fitted without it: is there another row for that
        model?"""
        order = self._order()
        return (
            self.config.marking != "cross_fitted"
            or len({order[place] % self.config.folds for place in places}) > 1
        )

    # Chance ---------------------------------------------------------------------------------------
    def _order(self) -> list[int]:
        """Of all rows, each one's place in an order drawn once for the procedure."""
        order = list(range(len(self.data)))
        random.Random(f"{self.seed}/rows").shuffle(order)
        return order

    def _halves(self, places: Sequence[int]) -> tuple[list[int], list[int]]:
        order = self._order()
        drawn = sorted(places, key=lambda place: order[place])
        middle = -(-len(drawn) // 2)
        return sorted(drawn[:middle]), sorted(drawn[middle:])


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") >> 1


def line(
    lengths: Sequence[Sequence[int]], reported: Sequence[Reference], match: int | None
) -> dict[str, Any]:
    """What the newest model is worth compared with the earlier ones.

    Args:
        lengths: for each model, itself last, the matched tokens of every reference.
    Returns: `coverage`, the share of references that it covers; `union`, that any model covers;
        `gain`, what union rose by; `overlap`, with each model, itself last, the share that both
        cover; `matched`, its mean matched tokens, `best_single` the most of any model, and
        `best_of_all`, the mean over references of the most that any model matches.
    """
    sets = [
        {place for place, one in enumerate(reported) if one.covered(own[place], match)}
        for own in lengths
    ]
    n = max(1, len(reported))
    means = [sum(own) / n for own in lengths]
    before, union = set().union(*sets[:-1]), set().union(*sets)
    return {
        "coverage": len(sets[-1]) / n,
        "union": len(union) / n,
        "gain": (len(union) - len(before)) / n,
        "overlap": [len(sets[-1] & other) / n for other in sets],
        "matched": means[-1],
        "best_single": max(means),
        "best_of_all": sum(map(max, zip(*lengths, strict=True))) / n,
    }
