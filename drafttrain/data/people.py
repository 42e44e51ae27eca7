"""Prompts as people ask them: patterns of our own, their gaps filled by chance.

The patterns are in `drafttrain/data/people/`, one file a kind of task, with lists of what may fill
their gaps; lists that several kinds take are in files without a kind. Every fifth pattern is held
out: its prompts are never among those for training. Follow-up turns are shared out likewise.

A row depends on the seed, on the settings and on its number, not on how many rows are asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from drafttrain.checks import integer, shown
from drafttrain.data.numbered import Prompts
from drafttrain.data.prompts import MOST_ROWS, Watch, unwatched
from drafttrain.data.shapes import Prompt
from drafttrain.data.voices import VOICES, Part, spoken
from drafttrain.errors import InputError

FOLDER = Path(__file__).parent / "people"
KINDS = (
    "advice",
    "roleplay",
    "reasoning",
    "maths",
    "code_writing",
    "code_explaining",
    "extraction",
    "humanities",
    "science",
    "translation",
    "summaries",
    "passages",
    "closed",
)
TALK = "talk"
"""Kind of the rows whose user turns the target writes too."""
HELD_OUT_EVERY = 5
"""Of the patterns, and of the first rows, every fifth is held out."""
TURNS = 3
_REDRAWS = 40
_GAP = re.compile(r"\{([a-z][a-z0-9_]*)\}")
_QUOTED = re.compile(r"```.*?```|`[^`\n]*`|\"[^\"\n]*\"|“[^”\n]*”", re.DOTALL)
_LONG = 80
"""Characters from which on what fills a gap is kept as it is, whatever the voice."""


@dataclass(frozen=True)
class Kind:
    """A file of patterns, with the lists that several kinds share."""

    name: str
    patterns: tuple[str, ...]
    follow_ups: tuple[str, ...]
    slots: dict[str, tuple[str, ...]]
    numbers: dict[str, range]
    verbatim: frozenset[str]
    """Gaps whose text no voice changes."""
    english: bool = True
    """Are all requests in English? Others get no English greeting."""

    def side(self, held_out: bool) -> tuple[list[str], list[str]]:
        """Patterns and follow-ups of one side of the split."""
        sides = []
        for listed in (self.patterns, self.follow_ups):
            last = HELD_OUT_EVERY - 1
            sides.append(
                [one for i, one in enumerate(listed) if (i % HELD_OUT_EVERY == last) is held_out]
            )
        return sides[0], sides[1]

    def base(self, gap: str) -> str | None:
        """The list that fills a gap: its own, or for city2 that of city; None if there is none."""
        for name in (gap, gap.rstrip("0123456789")):
            if name in self.slots or name in self.numbers:
                return name
        return None


@dataclass
class Filled:
    """Values of the gaps of one conversation; a gap has the same value in all of its turns."""

    kind: Kind
    chance: random.Random
    values: dict[str, str] = dataclasses.field(default_factory=dict)

    def value(self, gap: str, base: str) -> str:
        if gap not in self.values:
            if base in self.kind.numbers:
                self.values[gap] = str(self.chance.choice(self.kind.numbers[base]))
            else:
                # Two gaps of one list have unlike values.
                taken = {v for g, v in self.values.items() if self.kind.base(g) == base}
                listed = self.kind.slots[base]
                free = [one for one in listed if one not in taken] or listed
                self.values[gap] = self.chance.choice(free)
        return self.values[gap]

    def parts(self, pattern: str) -> list[Part]:
        """A pattern, filled, as the parts that a voice may change and those that it may not."""
        quoted = [match.span() for match in _QUOTED.finditer(pattern)]
        parts: list[Part] = []
        end = 0
        for match in _GAP.finditer(pattern):
            base = self.kind.base(match.group(1))
            if base is None:
                continue
            parts += _cut(pattern, end, match.start(), quoted)
            value = self.value(match.group(1), base)
            kept = (
                base in self.kind.verbatim
                or len(value) >= _LONG
                or "\n" in value
                or any(start <= match.start() < stop for start, stop in quoted)
            )
            if parts and not parts[-1][1]:
                parts[-1] = (_article(parts[-1][0], value), False)
            if not parts and not kept:
                value = value[:1].upper() + value[1:]
            parts.append((value, kept))
            end = match.end()
        return _merged([*parts, *_cut(pattern, end, len(pattern), quoted)])


def _cut(text: str, start: int, end: int, quoted: Sequence[tuple[int, int]]) -> list[Part]:
    """A stretch of a pattern without gaps, in parts: quoted ones and others."""
    edges = sorted({start, end, *(edge for span in quoted for edge in span if start < edge < end)})
    return [
        (text[a:b], any(first <= a < last for first, last in quoted))
        for a, b in itertools.pairwise(edges)
    ]


def _merged(parts: list[Part]) -> list[Part]:
    """Neighbours of one sort as one part; none is empty."""
    found: list[Part] = []
    for text, kept in parts:
        if found and found[-1][1] is kept:
            found[-1] = (found[-1][0] + text, kept)
        elif text:
            found.append((text, kept))
    return found


def _article(before: str, value: str) -> str:
    """`before` with its a or an as the value asks for."""
    match = re.search(r"\b([Aa])n? $", before)
    if match is None or not value[:1].isalpha():
        return before
    silent = re.match(r"hour|honest|heir|hono", value, re.IGNORECASE)
    spoken_y = re.match(r"uni|use|usu|uti|eu|one\b|once", value, re.IGNORECASE)
    vowel = bool(silent) or (value[0].lower() in "aeiou" and not spoken_y)
    return before[: match.start()] + match.group(1) + ("n " if vowel else " ")


# --- the files ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def catalogue() -> tuple[dict[str, Kind], str]:
    """Every kind by its name, and a digest of the files' content."""
    found, digest = {}, hashlib.sha256()
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for path in sorted(FOLDER.glob("*.yaml")):
        content = path.read_bytes()
        digest.update(path.name.encode() + b"\0" + content + b"\0")
        found[path.stem] = yaml.load(content, Loader=loader)
    shared = [part for name, part in found.items() if "kind" not in part or name == "passages"]
    kinds = {name: _kind(part, shared) for name, part in found.items() if part.get("kind") in KINDS}
    return {name: kinds[name] for name in KINDS if name in kinds}, digest.hexdigest()


def _kind(part: dict[str, Any], shared: list[dict[str, Any]]) -> Kind:
    slots: dict[str, tuple[str, ...]] = {}
    verbatim: set[str] = set()
    numbers: dict[str, range] = {}
    for own in (*shared, part):
        verbatim.update(own.get("verbatim") or ())
        for name, listed in (own.get("slots") or {}).items():
            slots[name] = tuple(str(one).strip("\n") for one in listed)
        for name, limits in (own.get("numbers") or {}).items():
            if isinstance(limits, list):
                limits = {"from": limits[0], "to": limits[1]}
            numbers[name] = range(limits["from"], limits["to"] + 1, limits.get("step", 1))
    return Kind(
        part["kind"],
        tuple(str(one).strip() for one in part["patterns"]),
        tuple(str(one).strip() for one in part["follow_ups"]),
        slots,
        numbers,
        frozenset(verbatim),
        part.get("english", True),
    )


# --- the sources ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PeoplePrompts:
    """Prompts of the patterns, all kinds in turn."""

    kinds: Any = None
    """Kinds of task; None takes all."""
    turns: Any = (1, 1, 1, 1, 2, 3)
    """User turns of a conversation, drawn; repeat a value to weight it."""
    voices: Any = ("plain", "plain", "plain", "terse", "polite", "sloppy", "lower", "bare")
    """How it is typed, drawn likewise."""
    seed: int = 0
    held_out: int = 0
    """How many rows are of held-out patterns: every fifth, up to this number."""

    def __post_init__(self) -> None:
        integer("prompts.seed", self.seed)
        if self.kinds is not None:
            _some_of("prompts.kinds", self.kinds, KINDS, "null takes all")
            object.__setattr__(self, "kinds", tuple(dict.fromkeys(self.kinds)))
        _some_of("prompts.voices", self.voices, tuple(VOICES), "repeat one to weight it")
        _some_of("prompts.turns", self.turns, range(1, TURNS + 1), "repeat one to weight it")
        integer("prompts.held_out", self.held_out)

    def holding_out(self, held_out: int) -> PeoplePrompts:
        """The same with this number of rows held out."""
        return dataclasses.replace(self, held_out=held_out)

    def read(self, limit: int | None, watch: Watch = unwatched) -> Prompts:
        """Rows 0 to limit - 1. Raises InputError if there is no limit, or if the patterns do not
        give that many unlike prompts."""
        if limit is None:
            raise InputError("prompts of patterns never end by themselves: give rows=<number>")
        if limit > MOST_ROWS:
            raise InputError(f"rows={limit}: at most {MOST_ROWS} rows make a set")
        return Drawing(self).rows(limit, watch)

    def identity(self) -> dict[str, Any]:
        """Equal for equal rows."""
        return {
            "kind": "people",
            "seed": self.seed,
            "kinds": list(self.kinds or KINDS),
            "turns": list(self.turns),
            "voices": list(self.voices),
            "held_out": self.held_out,
            "sha256": catalogue()[1],
        }

    def apart(self, row: int) -> bool:
        """Is a row held out?"""
        block, place = divmod(row, HELD_OUT_EVERY)
        return place == HELD_OUT_EVERY - 1 and block < self.held_out

    def place(self, row: int) -> tuple[bool, int]:
        """Is a row held out, and its number among those of its side."""
        before = min(row // HELD_OUT_EVERY, self.held_out)
        return (True, before) if self.apart(row) else (False, row - before)

    def kind(self, row: int) -> tuple[str, int]:
        """A row's kind, and its number among the rows of this kind on its side."""
        held_out, number = self.place(row)
        return self._in_turn(list(self.kinds or KINDS), held_out, number)

    def _in_turn(self, kinds: list[str], held_out: bool, number: int) -> tuple[str, int]:
        """Kinds in rounds, each in an order of its own."""
        turn, place = divmod(number, len(kinds))
        random.Random(f"{self.seed}/{held_out}/{turn}/kinds").shuffle(kinds)
        return kinds[place], turn


@dataclass(frozen=True, kw_only=True)
class Mixture(PeoplePrompts):
    """Prompts of the patterns, and conversations both of whose sides the target writes."""

    people: float = 0.6
    """Share of the former in the rows for training. Held-out rows take the kinds in turn, the
    target's own talk as one of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        share = self.people
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
            raise InputError(
                f"prompts.people={shown(share)}: needs a share above 0 and below 1; only people's "
                "prompts are prompts=people, only the target's own talk is prompts=self"
            )

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "kind": "mixture", "people": self.people}

    def kind(self, row: int) -> tuple[str, int]:
        held_out, number = self.place(row)
        kinds = list(self.kinds or KINDS)
        if held_out:
            return self._in_turn([*kinds, TALK], held_out, number)
        before, after = (math.floor(n * self.people) for n in (number, number + 1))
        return (TALK, number - before) if after == before else self._in_turn(kinds, False, before)


def _some_of(name: str, given: Any, known: Sequence[Any], hint: str) -> None:
    """Raise InputError unless it is a list, not empty, of known values."""
    listed = ", ".join(map(str, known))
    if not isinstance(given, list | tuple) or not given:
        raise InputError(f"{name}={shown(given)}: needs a list of some of {listed}; {hint}")
    for one in given:
        if isinstance(one, bool) or not isinstance(one, int | str) or one not in known:
            raise InputError(f"{name}: {shown(one)} is none of {listed}")


class Drawing:
    """Rows one after the other; a prompt that has come before is drawn again."""

    def __init__(self, settings: PeoplePrompts) -> None:
        self.settings, self.kinds = settings, catalogue()[0]
        self.seen: set[str] = set()
        self.redrawn = 0
        self.used_up: dict[str, set[str]] = {}

    def rows(self, limit: int, watch: Watch) -> Prompts:
        settings = self.settings
        found = Prompts([], source=settings.identity(), apart=settings.apart)
        for row, _ in watch((row, None) for row in range(limit)):
            name, number = settings.kind(row)
            found.category[row] = name
            held_out = settings.apart(row)
            found.rows.append((row, None if name == TALK else self.draw(name, held_out, number)))
        if self.redrawn:
            found.notes.append(f"{self.redrawn} prompts had come before and were drawn again")
        for name, patterns in self.used_up.items():
            found.notes.append(
                f"{name}: {len(patterns)} patterns give no prompt that had not come before; other "
                "patterns took their place"
            )
        return found

    def draw(self, name: str, held_out: bool, number: int) -> Prompt:
        """The prompt of this number of a kind, on one side of the split.

        Patterns come in rounds, each in an order of its own.
        """
        kind = self.kinds[name]
        patterns, follow_ups = kind.side(held_out)
        spent = self.used_up.get(name, set())
        start = f"{self.settings.seed}/{name}/{held_out}"
        turn, place = divmod(number, len(patterns))
        order = list(range(len(patterns)))
        random.Random(f"{start}/{turn}/patterns").shuffle(order)
        for index in (*order[place:], *order[:place]):
            pattern = patterns[index]
            for attempt in range(_REDRAWS if pattern not in spent else 0):
                chance = random.Random(f"{start}/{number}/{index}/{attempt}")
                filled = Filled(kind, chance)
                parts = filled.parts(pattern)
                text = "".join(text for text, _ in parts)
                if text in self.seen:
                    continue
                self.seen.add(text)
                self.redrawn += attempt > 0
                return self.said(filled, parts, follow_ups)
            self.used_up.setdefault(name, set()).add(pattern)
            spent = self.used_up[name]
        raise InputError(
            f"kind {name}: its patterns give no more than {number} unlike prompts"
            f"{' for the held-out rows' * held_out}: ask for fewer rows, or for more kinds"
        )

    def said(self, filled: Filled, parts: list[Part], follow_ups: list[str]) -> Prompt:
        """All user turns, in one voice."""
        chance = filled.chance
        voice = chance.choice(self.settings.voices)
        if voice == "polite" and not filled.kind.english:
            voice = "plain"
        more = chance.sample(follow_ups, chance.choice(self.settings.turns) - 1)
        turns = [spoken(parts, voice, chance)]
        turns += [spoken(filled.parts(pattern), voice, chance, later=True) for pattern in more]
        return Prompt(tuple(turns))
