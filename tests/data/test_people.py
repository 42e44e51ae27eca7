"""Prompts of patterns: seeded, balanced, and no pattern on both sides of the split."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest

from drafttrain.data.people import (
    KINDS,
    TALK,
    Drawing,
    Filled,
    Kind,
    Mixture,
    PeoplePrompts,
    catalogue,
)
from drafttrain.data.prompts import Prompts
from drafttrain.data.voices import VOICES, Part, spoken
from drafttrain.errors import InputError

ROWS = 780
GAP = re.compile(r"\{[a-z][a-z0-9_]*\}")


def drawn(rows: int = ROWS, **settings: Any) -> Prompts:
    return PeoplePrompts(**{"held_out": 100, **settings}).read(rows)


def test_the_same_seed_gives_the_same_prompts_however_many_are_asked_for() -> None:
    found = drawn()
    assert drawn(130).rows == found.rows[:130] and drawn().rows == found.rows
    other = drawn(130, seed=1)
    assert sum(a == b for a, b in zip(other.rows, found.rows, strict=False)) < 5
    assert found.source == drawn(13).source != other.source


def test_no_prompt_comes_twice() -> None:
    firsts = [prompt.users[0] for _, prompt in drawn().rows if prompt is not None]
    assert len(set(firsts)) == len(firsts) == ROWS


def test_kinds_are_balanced_on_both_sides() -> None:
    found = drawn()
    assert found.apart is not None
    held_out = [row for row in range(ROWS) if found.apart(row)]
    assert len(held_out) == 100 and held_out[:2] == [4, 9]
    for rows in (held_out, [row for row in range(ROWS) if not found.apart(row)]):
        counts = Counter(found.category[row] for row in rows)
        assert set(counts) == set(KINDS) and max(counts.values()) - min(counts.values()) <= 1
    # A fifth at most, at any length: what is not held out may be trained on.
    assert sum(map(found.apart, range(60))) == 12


@pytest.mark.parametrize("name", KINDS)
def test_no_pattern_or_follow_up_is_on_both_sides(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: dict[bool, set[str]] = {True: set(), False: set()}
    held_out = False

    def parts(self: Filled, pattern: str) -> list[Part]:
        used[held_out].add(pattern)
        return real(self, pattern)

    real = Filled.parts
    monkeypatch.setattr(Filled, "parts", parts)
    drawing = Drawing(PeoplePrompts(turns=[3]))
    for held_out in (True, False):
        for number in range(60):
            drawing.draw(name, held_out, number)
    assert not used[True] & used[False]
    kind = catalogue()[0][name]
    assert used[True] | used[False] == {*kind.patterns, *kind.follow_ups}
    assert kind.patterns[4] in used[True] and kind.patterns[9] in used[True]


@pytest.mark.parametrize("name", KINDS)
def test_patterns_are_many_unlike_and_fill_without_a_gap(name: str) -> None:
    kind = catalogue()[0][name]
    assert len(kind.patterns) >= 40 and len({p.lower() for p in kind.patterns}) == len(
        kind.patterns
    )
    assert len(kind.follow_ups) >= 12
    for seed in range(3):
        for pattern in (*kind.patterns, *kind.follow_ups):
            for gap in GAP.findall(pattern):
                assert kind.base(gap[1:-1]), (pattern, gap)
            parts = Filled(kind, random.Random(seed)).parts(pattern)
            assert "".join(text for text, _ in parts).strip()
            assert not GAP.search("".join(text for text, kept in parts if not kept))


@pytest.mark.parametrize("voice", VOICES)
@pytest.mark.parametrize("name", ["passages", "summaries", "code_explaining", "extraction"])
def test_a_voice_leaves_texts_and_code_as_they_are(voice: str, name: str) -> None:
    kind = catalogue()[0][name]
    for number, pattern in enumerate(kind.patterns):
        filled = Filled(kind, random.Random(number))
        parts = filled.parts(pattern)
        text = spoken(parts, voice, random.Random(number))
        for part, kept in parts:
            assert not kept or part.strip() in text
        for gap in ("passage", "code", "text", "list", "messy"):
            if gap in filled.values:
                assert filled.values[gap].strip() in text


PARTS: list[Part] = [
    ("Could you please tell me what this means? It says ", False),
    ('"Please, WHY?"', True),
    (" and I don't know whether that is right.", False),
]


@pytest.mark.parametrize(
    ("voice", "text"),
    [
        ("plain", "".join(text for text, _ in PARTS)),
        (
            "terse",
            'Tell me what this means? It says "Please, WHY?" and I don\'t know whether that is '
            "right",
        ),
        (
            "lower",
            'could you please tell me what this means? it says "Please, WHY?" and i don\'t know '
            "whether that is right",
        ),
        (
            "bare",
            'Could you please tell me what this means It says "Please, WHY?" and I don\'t know '
            "whether that is right",
        ),
    ],
)
def test_voices(voice: str, text: str) -> None:
    assert spoken(PARTS, voice, random.Random(0)) == text


def test_haste_and_politeness() -> None:
    plain = spoken(PARTS, "plain", random.Random(0))
    hasty = {spoken(PARTS, "sloppy", random.Random(seed)) for seed in range(20)}
    assert len(hasty) > 15 and plain not in hasty
    assert all('"Please, WHY?"' in text and text.startswith("c") for text in hasty)
    for seed in range(20):
        polite = spoken(PARTS, "polite", random.Random(seed))
        assert plain in polite and len(polite) > len(plain)
        later = spoken(PARTS, "polite", random.Random(seed), later=True)
        assert later.startswith(plain)


def test_one_to_three_turns_in_one_conversation() -> None:
    turns = Counter(len(prompt.users) for _, prompt in drawn().rows if prompt is not None)
    assert set(turns) == {1, 2, 3} and 0.5 < turns[1] / ROWS < 0.8
    assert {len(p.users) for _, p in drawn(26, turns=[2]).rows if p is not None} == {2}


def test_gaps_of_one_list_differ_and_articles_fit() -> None:
    kind = catalogue()[0]["reasoning"]
    for seed in range(30):
        filled = Filled(kind, random.Random(seed))
        text = "".join(
            part for part, _ in filled.parts("{city}, {city2}, {city3} {city}: a {animal}.")
        )
        assert len({filled.values[gap] for gap in ("city", "city2", "city3")}) == 3
        assert text.count(filled.values["city"]) == 2
        assert ("an " if filled.values["animal"][0] in "aeiou" else " a ") in text


def test_kinds_that_are_chosen() -> None:
    assert set(drawn(20, kinds=["maths", "science"]).category.values()) == {"maths", "science"}


def test_what_is_used_up_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = (*"abcde", "{x}")
    small = Kind("maths", patterns, ("more",) * 12, {"x": ("1", "2")}, {}, frozenset())
    monkeypatch.setattr("drafttrain.data.people.catalogue", lambda: ({"maths": small}, "0"))
    settings: dict[str, Any] = {"kinds": ["maths"], "held_out": 0, "turns": [1]}
    settings["voices"] = ["plain"]
    found = drawn(6, **settings)
    assert sorted(prompt.users[0].lower() for _, prompt in found.rows if prompt) == [
        *("1", "2", "a", "b", "c", "d")
    ]
    assert any(note.startswith("maths: ") and "took their place" in note for note in found.notes)
    with pytest.raises(InputError, match="kind maths: its patterns give no more than 6 unlike"):
        drawn(7, **settings)


def test_a_mixture() -> None:
    source = Mixture(people=0.6).holding_out(98)
    found = source.read(ROWS)
    assert found.apart is not None
    own = {row for row, prompt in found.rows if prompt is None}
    assert own == {row for row, kind in found.category.items() if kind == TALK}
    train = [row for row in range(ROWS) if not found.apart(row)]
    assert len(own & set(train)) / len(train) == pytest.approx(0.4, abs=0.002)
    held_out = Counter(kind for row, kind in found.category.items() if found.apart(row))
    assert set(held_out.values()) == {7} and len(held_out) == len(KINDS) + 1
    assert source.read(100).rows == found.rows[:100]
    assert found.source != Mixture(people=0.5).holding_out(98).identity()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kinds": ["poetry"]}, "prompts.kinds: poetry is none of advice, "),
        ({"kinds": []}, "prompts.kinds=.*: needs a list of some of"),
        ({"kinds": "maths"}, "prompts.kinds=maths: needs a list"),
        ({"voices": ["angry"]}, "prompts.voices: angry is none of plain, terse"),
        ({"turns": [0]}, "prompts.turns: 0 is none of 1, 2, 3"),
        ({"turns": [True]}, "prompts.turns: .* is none of 1, 2, 3"),
        ({"seed": -1}, "prompts.seed"),
        ({"people": 0}, "prompts.people=0: needs a share above 0 and below 1"),
        ({"people": 1.0}, "only people's prompts are prompts=people"),
        ({"people": float("nan")}, "prompts.people=nan: needs a share"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Mixture(**settings)


def test_rows_must_be_said() -> None:
    with pytest.raises(InputError, match="give rows=<number>"):
        PeoplePrompts().read(None)
    with pytest.raises(InputError, match="at most"):
        PeoplePrompts().read(10**9)
