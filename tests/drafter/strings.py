"""Every short string of some texts, to compare an automaton with."""

from __future__ import annotations

from collections.abc import Sequence

from drafttrain.drafter.automaton import SuffixAutomaton


def strings(texts: Sequence[Sequence[int]], longest: int) -> dict[tuple[int, ...], list[int]]:
    """Every string of at most that many tokens, with the places of its last token, counted over all
    texts."""
    found: dict[tuple[int, ...], list[int]] = {}
    offset = 0
    for text in texts:
        for end in range(1, len(text) + 1):
            for start in range(max(0, end - longest), end):
                found.setdefault(tuple(text[start:end]), []).append(offset + end - 1)
        offset += len(text)
    return found


def state_of(automaton: SuffixAutomaton, string: Sequence[int]) -> int | None:
    state = 0
    for token in string:
        if token not in automaton.next[state]:
            return None
        state = automaton.next[state][token]
    return state
