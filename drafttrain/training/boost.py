"""SpecInfer's collective boost-tuning (Miao et al. 2023, arXiv:2305.09781, section 3): several
small models, each fitted on what the earlier ones do not match yet, so that together they cover
more of the target's text.

    R_1 = all rows;  fit model s on R_s;  mark the rows of R_s whose reference it reproduces;
    R_{s+1} = R_s without these

A row's reference is what the target writes greedily behind the row's first prompt, an end token
counted. It is matched up to the first token that the model would write otherwise; that is read off
teacher-forced guesses, since up to there both texts are one.

The paper does not say how long references are, how many models there are, where they begin, which
rows are marked by which model, and when to stop; all of that is settled in `Boost`. Two
generalisations are here too: rows that count less the more of them is matched, and single tokens
that count as much as the earlier models' laws miss of the target's.
"""

from __future__ import annotations

import hashlib
import math
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from drafttrain.data.datamodule import ConversationData, collate
from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features
from drafttrain.nn.sampling import Policy
from drafttrain.target import generation
from drafttrain.target.model import Target
from drafttrain.training.checkpoint import read_checkpoint, write_checkpoint
from drafttrain.training.module import Source
from drafttrain.tree.choice import SHARING

MARKING = ("cross_fitted", "held_out", "fitted")
REMOVAL = ("hard", "soft", "token")
BEGIN = ("fresh", "previous")
MARKS = "marks.ckpt"
_WIDTH = 4096
"""Tokens of a batch, padding counted, that a model reads at once while it marks."""


@dataclass(frozen=True, kw_only=True)
class Boost:
    """How the models are fitted one after the other, and what they share at the end."""

    members: int
    """Models at most. The cost of checking grows with every one, and each adds less than the one
    before."""
    reference: int
    """n, the tokens of a reference; fewer where the target's answer ends."""
    match: int | None
    """m, the first tokens that must be alike for a row to count as covered; None is all n. With a
    share a of right tokens a match has a probability of about a^m: where no row is covered, the
    next model learns the same as this one."""
    marking: str
    """Which model marks a row. cross_fitted: one that was fitted without the row, as all are in
    `folds` parts. held_out: each model is fitted on half of what is left, marks the other half, and
    the next is fitted on what is left of that; the last takes all. fitted: the model itself, also
    where it knows a row by heart."""
    folds: int
    """Parts of `cross_fitted`, and as many further fits for each model but the last."""
    removal: str
    """hard: a covered row is taken away for good, as in the paper. soft: a row's weight is
    multiplied by exp(-eta x the share of its reference that was matched). token: a label weighs 1 -
    max over the models so far of sum_v min(p, q), its refusals."""
    eta: float
    """Of soft: the larger, the nearer to hard."""
    begin: str
    """fresh: every model begins with the same weights (a new network with those of its own seed).
    previous: with those of the model before it, whose blind spots it then inherits."""
    least_left: float
    """No further model is fitted once the rows that are left weigh less than this share of all
    rows."""
    least_gain: float
    """A model that raises the share of rows covered by any model by less than this is left out, and
    is the last."""
    nodes: int | None
    """Drafts that the members share, by what each adds on rows set aside (data.set_aside); a single
    member with as many is measured beside it. None: each member grows the tree of the
    configuration."""
    share_new_tokens: int
    """Tokens decoded behind each prompt of these rows, to see what each member adds."""

    def __post_init__(self) -> None:
        whole = {
            "members": 1,
            "reference": 1,
            "folds": 2,
            "share_new_tokens": SHARING.max_depth + 2,
        }
        for name, least in whole.items():
            _check_whole(name, getattr(self, name), least)
        for name in ("match", "nodes"):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), 1)
        if self.match is not None and self.match > self.reference:
            raise InputError(
                f"boost.match={self.match} is above boost.reference={self.reference}, the tokens "
                f"of a reference"
            )
        for name, known in (("marking", MARKING), ("removal", REMOVAL), ("begin", BEGIN)):
            if getattr(self, name) not in known:
                raise InputError(
                    f"boost.{name}={getattr(self, name)}: give one of {', '.join(known)}"
                )
        for name, most in (("eta", math.inf), ("least_left", 1), ("least_gain", 1)):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 <= value <= most
                or value == math.inf
            ):
                raise InputError(
                    f"boost.{name}={value}: needs a number of at least 0"
                    + (", at most 1" if most == 1 else "")
                )

    def check_kind(self, kind: type[Drafter]) -> None:
        """Raise InputError if drafters of this class cannot be fitted so."""
        if not kind.writes:
            raise InputError(
                f"boost: {kind.__name__} is no language model that could match a text by itself: "
                f"give drafter=ssm, or boost=null"
            )

    def check(self, drafter: Drafter) -> None:
        """Raise InputError if such drafters cannot be fitted so."""
        self.check_kind(type(drafter))
        if self.removal == "token":
            if not drafter.needs.last_hidden:
                raise InputError(
                    "boost.removal=token compares laws, this drafter's loss reads the text alone: "
                    "give the loss a divergence, "
                    "or removal=hard or soft"
                )
            if drafter.settings().get("on_policy"):
                raise InputError(
                    "boost.removal=token weighs the set's tokens, with drafter.on_policy others "
                    "are learned: set it to 0, or "
                    "removal=hard or soft"
                )


def _check_whole(name: str, value: object, least: int) -> None:
    if not (type(value) is int and value >= least):
        raise InputError(f"boost.{name}={value}: needs a whole number of at least {least}")


# --- references and matches -----------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """What the target writes greedily behind a prompt."""

    prompt: list[int]
    answer: list[int]

    def covered(self, matched: int, match: int | None) -> bool:
        """Are so many matched tokens enough? An answer that ends earlier is matched whole."""
        return matched >= (len(self.answer) if match is None else min(match, len(self.answer)))


def references(
    target: Target, data: ConversationData, tokens: int, *, slots: int = 16
) -> list[Reference]:
    """For each row its first prompt, and at most so many tokens of the target's greedy answer.

    Rows that were written greedily hold it; behind the prompts of others the target writes it now.
    """
    found: list[Reference | None] = []
    prompts: dict[int, list[int]] = {}
    for place, index in enumerate(data.indices):
        ids, mask = (value[: data.lengths[place]] for value in data.set.row(index))
        answer = mask[1:].nonzero()[:, 0] + 1
        start = int(answer[0])
        end = next((i for i in range(start, len(ids)) if not mask[i]), len(ids))
        found.append(
            Reference(ids[:start].tolist(), ids[start : min(end, start + tokens)].tolist())
        )
        if data.set.temperature[index] != 0:
            prompts[place] = ids[:start].tolist()

    def script(place: int, prompt: list[int]) -> generation.Script:
        room = max(1, min(tokens, target.context - len(prompt)))
        written = yield generation.Segment(prompt, room, Policy(), target.stop_ids)
        found[place] = Reference(prompt, written)

    if prompts:
        scripts = ((script(place, prompt), random.Random(0)) for place, prompt in prompts.items())
        capacity = max(map(len, prompts.values())) + tokens + 2
        for _ in generation.run(target, scripts, slots=min(slots, len(prompts)), capacity=capacity):
            pass
    return [one for one in found if one is not None]


def matched(drafter: Drafter, wanted: Sequence[Reference]) -> list[int]:
    """Tokens of each reference that the drafter would write by itself, up to the first that it
    would not."""
    lengths = [0] * len(wanted)
    sizes = [len(one.prompt) + len(one.answer) for one in wanted]
    drafter.eval()
    for group in _groups(sizes):
        rows = []
        for place in group:
            ids = torch.tensor(wanted[place].prompt + wanted[place].answer)
            rows.append((ids, torch.arange(len(ids)) >= len(wanted[place].prompt), place))
        batch = collate(rows)
        guesses = drafter.guesses(batch, Features())
        assert guesses is not None and guesses.shape[-1] == 1
        right = guesses[:, :, 0].cpu() == batch.input_ids  # b s
        for row, place in enumerate(group):
            own = right[row, len(wanted[place].prompt) : sizes[place]]
            lengths[place] = int(own.long().cumprod(0).sum())
    return lengths


def _groups(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Rows of like size, at most `_WIDTH` tokens together."""
    group: list[int] = []
    for place in sorted(range(len(sizes)), key=lambda place: sizes[place]):
        if group and (len(group) + 1) * sizes[place] > _WIDTH:
            yield group
            group = []
        group.append(place)
    if group:
        yield group


# --- what is left ---------------------------------------------------------------------------------


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
        """Every row, each with its whole weight."""
        return cls(list(range(len(data))), len(data))

    def part(self, data: ConversationData, places: Sequence[int] | None = None) -> ConversationData:
        """Some of the rows that are left, all unless said otherwise, with their weights."""
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
        """Let each label count what is missing of the target's law.

        Args:
            overlaps: (s) of rows, by their places: sum_v min(p, q) of the newest model.
        """
        weights = list(self.token_weights or [torch.ones(length) for length in data.lengths])
        for place, overlap in overlaps.items():
            # 1 - max over models is the least of what each of them misses.
            weights[place] = torch.minimum(weights[place], 1 - overlap).clamp(0, 1)
        return Left(self.places, self.total, token_weights=weights)

    def share(self, data: ConversationData) -> float:
        """Weight of what is left, of all rows' weight at first."""
        if self.token_weights is not None:
            masks = {place: data.row(place)[1] for place in self.places}
            left = sum(
                float((self.token_weights[place] * mask).sum()) for place, mask in masks.items()
            )
            return left / max(1, data.supervised)
        if self.row_weights is not None:
            return sum(self.row_weights[place] for place in self.places) / self.total
        return len(self.places) / self.total


# --- the procedure --------------------------------------------------------------------------------


class Overlapping(Protocol):
    """A drafter that can compare its law with the target's."""

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
    """Whose weights it begins with; None begins as every fit does."""
    member: bool
    """False: it marks rows and is thrown away."""


@dataclass
class Collective:
    """What came of it."""

    members: list[Drafter] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """For each model that was fitted what `line` and `Tuning.marked` tell; also for one that was
    left out."""
    ended: str = ""
    """Why there are no more."""
    marking: list[dict[str, Any]] = field(default_factory=list)
    """Facts of the fits that only marked rows."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What the procedure works with."""

    config: Boost
    data: ConversationData
    wanted: Sequence[Reference]
    """Of all rows."""
    reported: Sequence[Reference]
    """Those that coverage is reported on."""
    fit: Callable[[Fit], Drafter]
    """Makes a drafter: the same one whenever it is asked for the same fit, also in a later part of
    a run."""
    facts: Callable[[Fit], dict[str, Any]]
    """What a fit that was made took, as plain values."""
    source: Source
    """The target's features of the rows, where laws are compared."""
    seed: int
    folder: Path
    """Marks are kept in it, by member, for a later part of the run."""
    note: Callable[[int, Mapping[str, Any]], None]
    """Told the number of a model and its line, when it is fitted and again when rows were
    marked."""
    say: Callable[[str], None]

    def run(self) -> Collective:
        """Fit one model after the other."""
        config, left, found = self.config, Left.all_of(self.data), Collective()
        lengths: list[list[int]] = []
        for number in range(1, config.members + 1):
            last = number == config.members
            alone = not last and not self._can_be_marked(left.places)
            if alone and number == 1:
                raise InputError(
                    f"{len(left.places)} rows cannot be marked by models fitted without them: give "
                    f"more rows"
                )
            fitted, apart = left.places, list[int]()
            if config.marking == "held_out" and not last:
                fitted, apart = self._halves(left.places)
            begin = found.members[-1] if config.begin == "previous" and found.members else None
            here = left.part(self.data, fitted)
            self.say(
                f"member {number} of at most {config.members}: fitted on {len(here)} of "
                f"{left.total} rows"
            )
            member = self.fit(Fit(f"member-{number}", here, self.seed + number - 1, begin, True))
            lengths.append(matched(member, self.reported))
            row: dict[str, Any] = {
                "member": number,
                "rows": len(here),
                **line(lengths, self.reported, config.match),
            }
            found.rows.append(row)
            row["left_out"] = number > 1 and row["gain"] < config.least_gain
            self.note(number, row)
            if row["left_out"]:
                found.ended = f"member {number} adds {row['gain']:.1%} of the rows, less than {config.least_gain:.1%}: left out"
                break
            found.members.append(member)
            if last:
                found.ended = f"all of boost.members={config.members} are fitted"
                break
            if alone:
                found.ended = f"{len(left.places)} rows were left, which no model fitted without them could mark"
                break
            left = self._after(number, member, begin, left, apart, row, found)
            self.note(number, row)
            if not left.places or row["left"] < config.least_left:
                found.ended = (
                    f"{row['left']:.1%} of all weight is left, less than {config.least_left:.1%}"
                )
                if not left.places:
                    found.ended = "no row is left"
                break
        self.say(found.ended)
        return found

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
        """What is left once rows were marked; how many were is put into the model's line, what that
        took into what is found."""
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
                f"boost.match, or train longer"
            )
        return left

    def _marks(
        self, number: int, member: Drafter, begin: Drafter | None, left: Left, apart: list[int]
    ) -> dict[str, list[Any]]:
        """Places of the rows that were marked, tokens that were matched of each, where laws are
        compared their overlaps, and facts of the fits that were made for it."""
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
            job = Fit(
                f"member-{number}/fold-{fold + 1}", left.part(self.data, others), seed, begin, False
            )
            for name, values in self._marked_by(self.fit(job), hidden).items():
                found[name] += values
            found["fits"].append(self.facts(job))
        return found

    def _marked_by(self, drafter: Drafter, places: Sequence[int]) -> dict[str, list[Any]]:
        lengths = matched(drafter, [self.wanted[place] for place in places])
        overlaps = self._overlaps(drafter, places) if self.config.removal == "token" else []
        return {"places": list(places), "matched": lengths, "overlaps": overlaps, "fits": []}

    def _overlaps(self, drafter: Any, places: Sequence[int]) -> list[Tensor]:
        """(s) of each row: sum_v min(p, q) for its labels, 0 elsewhere."""
        model: Overlapping = drafter
        found = [torch.zeros(0)] * len(places)
        for group in _groups([self.data.lengths[place] for place in places]):
            batch = self.data.batch([places[i] for i in group])
            values = model.overlap(batch, self.source.features(batch)).cpu()
            for row, i in enumerate(group):
                found[i] = values[row, : self.data.lengths[places[i]]].clone()
        return found

    def _can_be_marked(self, places: Sequence[int]) -> bool:
        """Is there, where every row is marked by a model that was fitted without it, another row
        for that model?"""
        order = self._order()
        return (
            self.config.marking != "cross_fitted"
            or len({order[place] % self.config.folds for place in places}) > 1
        )

    # Chance ---------------------------------------------------------------------------------------
    def _order(self) -> list[int]:
        """Of all rows, each one's place in an order drawn once for the whole procedure."""
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
    """What the newest model is worth beside the earlier ones.

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
