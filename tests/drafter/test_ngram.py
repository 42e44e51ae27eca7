"""Prompt lookup: known texts with the drafts that they must lead to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from drafttrain.drafter.ngram import NGram
from drafttrain.errors import InputError
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Tree
from tests.drafter.copying import drafts, propose, rows_of
from tests.drafter.make import make
from tests.messages import said


@pytest.fixture(scope="module")
def target() -> Target:
    return load.tiny()


CHAIN, PAIR, WIDE = Tree.chain(4), Tree.expansion([2, 1]), Tree.expansion([3, 1])
CASES: dict[str, tuple[dict[str, Any], list[int], Tree, list[tuple[int, int]]]] = {
    "copied on": ({}, [1, 2, 3, 4, 5, 6, 9, 1, 2], CHAIN, [(3, -1), (4, 0), (5, 1), (6, 2)]),
    "no match": ({}, [1, 2, 3, 4, 5], CHAIN, []),
    "one token": ({}, [1], CHAIN, []),
    "up to the end of the text": ({}, [7, 8, 7], CHAIN, [(8, -1), (7, 0)]),
    "the first token of the prompt counts": ({}, [7, 8, 9, 7], Tree.chain(1), [(8, -1)]),
    # 2 is followed by 9 most recently, but 1 2 by 3 and 0 1 2 by 4.
    "longest wins": ({}, [0, 1, 2, 4, 5, 1, 2, 3, 5, 2, 9, 0, 1, 2], Tree.chain(1), [(4, -1)]),
    "shorter ones fill": ({}, [0, 1, 2, 4, 5, 1, 2, 3, 5, 2, 9, 0, 1, 2], WIDE,
                          [(4, -1), (3, -1), (9, -1), (5, 0), (5, 1), (0, 2)]),
    "no shorter ones": ({"min_ngram": 3}, [0, 1, 2, 4, 5, 1, 2, 3, 5, 2, 9, 0, 1, 2], WIDE,
                        [(4, -1), (5, 0)]),
    "none of that length": ({"min_ngram": 2}, [5, 6, 5], CHAIN, []),
    "longest is bounded": ({"max_ngram": 1}, [1, 2, 4, 3, 2, 9, 1, 2], Tree.chain(1), [(9, -1)]),
    "recent": ({"prefer": "recent"}, [1, 3, 1, 3, 1, 4, 1], PAIR,
               [(4, -1), (3, -1), (1, 0), (1, 1)]),
    "frequent": ({}, [1, 3, 1, 3, 1, 4, 1], PAIR, [(3, -1), (4, -1), (1, 0), (1, 1)]),
    "frequent, the longest first": ({}, [2, 3, 2, 3, 1, 2, 4, 1, 2], PAIR,
                                    [(4, -1), (3, -1), (1, 0), (1, 1)]),
    "frequent, the recent of equals": ({}, [1, 3, 1, 4, 1], PAIR,
                                       [(4, -1), (3, -1), (1, 0), (1, 1)]),
    "few places": ({"occurrences": 1}, [1, 3, 5, 1, 4, 1], PAIR, [(4, -1), (1, 0)]),
    # Both continuations of 1 start with 2, and part after it.
    "branches deeper": ({"max_ngram": 1}, [1, 2, 3, 1, 2, 4, 1], Tree.expansion([2, 2]),
                        [(2, -1), (4, 0), (3, 0)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_a_text_leads_to(target: Target, name: str) -> None:
    settings, text, tree, expected = CASES[name]
    assert drafts(make(NGram, target, **settings), text, tree) == expected


def followed(text: Sequence[int], most: int, least: int) -> list[tuple[int, int]]:
    """Every place after an earlier match: (longest match, place), the longest and then the latest
    first."""
    longest: dict[int, int] = {}
    for n in range(least, min(most, len(text)) + 1):
        for place in range(n, len(text)):
            if list(text[place - n : place]) == list(text[-n:]):
                longest[place] = n
    return sorted(((n, place) for place, n in longest.items()), reverse=True)


def test_a_level_is_that_of_a_brute_force_search(target: Target) -> None:
    chance = random.Random(0)
    for _ in range(300):
        text = [chance.randrange(4) for _ in range(chance.randint(1, 40))]
        most = chance.randint(1, 4)
        least = chance.randint(1, most)
        found = drafts(
            make(NGram, target, max_ngram=most, min_ngram=least, prefer="recent", occurrences=99),
            text,
            Tree.expansion([4]),
        )
        expected = list(dict.fromkeys(text[place] for _, place in followed(text, most, least)))
        assert [token for token, _ in found] == expected, (text, most, least)


def test_nodes_keep_their_numbers_in_the_shape(target: Target) -> None:
    tree = Tree.expansion([3, 2])
    found = propose(make(NGram, target, max_ngram=1), [[1, 2, 3, 1, 2, 4, 1]], tree)
    assert found.places is not None and rows_of(found) == [[(2, -1), (4, 0), (3, 0)]]
    assert found.places.tolist() == [[0, 3, 4]]
    assert all(
        tree.depths[place] == depth
        for place, depth in zip(found.places[0].tolist(), [1, 2, 2], strict=True)
    )


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_ngram": 0}, "max_ngram=0"),
        ({"min_ngram": 1.5}, "min_ngram=1.5"),
        ({"max_ngram": True}, "max_ngram=True"),
        ({"max_ngram": 65}, "max_ngram=65"),
        ({"min_ngram": 4}, "min_ngram=4"),
        ({"prefer": "rare"}, "prefer=rare"),
        ({"occurrences": 0}, "occurrences=0"),
    ],
)
def test_bad_settings_are_refused(target: Target, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        make(NGram, target, **settings)


def test_what_it_cannot_fill_is_refused(target: Target) -> None:
    with pytest.raises(InputError, match=said("drafter.other_tree")):
        make(NGram, target).check(Dynamic(depth=2, top_k=2, total=4))
