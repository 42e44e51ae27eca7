"""The suffix automaton against counting every string of the text."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from drafttrain.drafter.automaton import SuffixAutomaton
from tests.drafter.strings import state_of, strings


def check(automaton: SuffixAutomaton, texts: Sequence[Sequence[int]], alphabet: int) -> None:
    known = strings(texts, automaton.longest)
    for string, ends in known.items():
        state = state_of(automaton, string)
        assert state is not None, string
        assert (automaton.count[state], automaton.latest[state]) == (len(ends), ends[-1]), string
        shortest = automaton.length[automaton.link[state]] + 1
        assert shortest <= len(string) <= automaton.length[state]
        if len(string) < automaton.longest:
            there = {token for token in range(alphabet) if (*string, token) in known}
            assert set(automaton.next[state]) == there, string


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8])
def test_counts_are_those_of_every_short_string(alphabet: int) -> None:
    chance = random.Random(alphabet)
    for longest in (1, 2, 3, 5, 99):
        text: list[int] = []
        automaton = SuffixAutomaton(longest)
        for _ in range(30):
            text.append(chance.randrange(alphabet))
            automaton.append(text[-1])
            check(automaton, [text], alphabet)
            assert automaton.end == state_of(automaton, text[-longest:])
            for limit in range(1, longest + 1):
                assert automaton.up_to(automaton.end, limit) == state_of(automaton, text[-limit:])
        assert automaton.size == len(text)


def test_repeated_and_periodic_texts() -> None:
    for text in ([0] * 40, [0, 1] * 20, [0, 1, 2, 0, 1] * 8, [0] * 10 + [1] + [0] * 10):
        automaton = SuffixAutomaton(6)
        for token in text:
            automaton.append(token)
        check(automaton, [text], 3)


def test_no_string_reaches_across_texts() -> None:
    chance = random.Random(0)
    for _ in range(40):
        texts = [[chance.randrange(3) for _ in range(chance.randint(1, 12))] for _ in range(4)]
        automaton = SuffixAutomaton(chance.randint(1, 6))
        for text in texts:
            automaton.start_text()
            for token in text:
                automaton.append(token)
        check(automaton, texts, 3)
    automaton = SuffixAutomaton(4)
    for text in ([1, 2], [3, 4]):
        automaton.start_text()
        for token in text:
            automaton.append(token)
    assert state_of(automaton, [2, 3]) is None and state_of(automaton, [3, 4]) is not None


def test_appending_takes_no_longer_in_a_long_text() -> None:
    """Steps, not seconds: the walk that counts is bounded, and states stay below two for each
    token."""
    steps = 0

    class Watched(list[int]):
        def __getitem__(self, place):  # type: ignore[no-untyped-def]
            nonlocal steps
            steps += 1
            return super().__getitem__(place)

    automaton = SuffixAutomaton(8)
    automaton.link = Watched(automaton.link)
    chance = random.Random(1)
    made = []
    for part in range(4):
        before = steps
        for _ in range(500):
            automaton.append(0 if part == 3 else chance.randrange(5))
        made.append(steps - before)
    assert max(made) < 500 * (8 + 6), made
    assert len(automaton.link) < 2 * automaton.size
