"""Suffix decoding: known texts, a brute-force search over text and corpus, and the corpus
itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.data.conversations import Row, write_set
from drafttrain.drafter.suffix import Suffix
from drafttrain.errors import InputError
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.confident import Confident
from drafttrain.tree.copied import copied
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Growth, Tree
from tests.drafter import make as drafters
from tests.drafter.copying import TREES, drafts
from tests.drafter.make import make
from tests.messages import said


@pytest.fixture(scope="module")
def target() -> Target:
    return load.tiny()


CHAIN, PAIR = Tree.chain(4), Tree.expansion([2, 1])
CASES: dict[str, tuple[dict[str, Any], list[int], Growth, list[tuple[int, int]]]] = {
    "copied on": ({}, [1, 2, 3, 4, 5, 6, 9, 1, 2], CHAIN, [(3, -1), (4, 0), (5, 1), (6, 2)]),
    "no match": ({}, [1, 2, 3, 4, 5], CHAIN, []),
    "one token": ({}, [1], CHAIN, []),
    "the first token of the prompt counts": ({}, [7, 8, 9, 7], Tree.chain(1), [(8, -1)]),
    # 2 is followed by 9 twice, but 1 2 by 3, and the match goes on to the left.
    "longest wins": ({}, [2, 9, 2, 9, 1, 2, 3, 1, 2], Tree.chain(1), [(3, -1)]),
    "longest is bounded": ({"max_match": 1}, [2, 9, 2, 9, 1, 2, 3, 1, 2], PAIR,
                           [(9, -1), (3, -1), (1, 0), (1, 1)]),
    "too short a match": ({"min_match": 2}, [5, 6, 5], CHAIN, []),
    "most frequent": ({}, [1, 3, 1, 3, 1, 4, 1], PAIR, [(3, -1), (4, -1), (1, 0), (1, 1)]),
    "the latest of equals": ({}, [1, 3, 1, 4, 1], PAIR, [(4, -1), (3, -1), (1, 0), (1, 1)]),
    # After 1: 2 twice (then 3, 4), 5 once. After 1 2 each of 3, 4 once: 2 .67, 5 .33, and 2 4 and
    # 2 3 .33 each.
    "a budget": ({}, [1, 2, 3, 1, 2, 4, 1, 5, 1], Dynamic(depth=2, top_k=2, total=3),
                 [(2, -1), (5, -1), (4, 0)]),
    "sure enough": ({}, [1, 2, 3, 1, 2, 4, 1, 5, 1], Confident(k=4, stop_below=0.6), [(2, -1)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_a_text_leads_to(target: Target, name: str) -> None:
    settings, text, tree, expected = CASES[name]
    assert drafts(make(Suffix, target, **settings), text, tree) == expected


class Searched:
    """The definition, by looking through everything. A place is (number of the text, index of a
    token); texts: the corpus, then the row's own."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = [list(text) for text in texts]
        self.starts = [sum(map(len, self.texts[:n])) for n in range(len(self.texts))]

    def root(self, most: int, least: int) -> list[tuple[int, int]] | None:
        own = self.texts[-1]
        for n in range(min(most, len(own)), least - 1, -1):
            found = [
                (number, place)
                for number, text in enumerate(self.texts)
                for place in range(n, len(text))
                if text[place - n : place] == own[-n:]
            ]
            if found:
                return found
        return None

    def children(
        self, node: list[tuple[int, int]], most: int
    ) -> list[tuple[int, float, list[tuple[int, int]]]]:
        groups: dict[int, list[tuple[int, int]]] = {}
        for number, place in node:
            if place < len(self.texts[number]):
                groups.setdefault(self.texts[number][place], []).append((number, place))
        last = len(self.texts) - 1

        def rank(token: int) -> tuple[int, int, int]:
            own = [place for number, place in groups[token] if number == last]
            others = [
                self.starts[number] + place for number, place in groups[token] if number < last
            ]
            return len(groups[token]), max(own, default=-1), max(others, default=-1)

        total = sum(map(len, groups.values()))
        best = sorted(groups, key=rank, reverse=True)[:most]
        return [
            (t, len(groups[t]) / total, [(n, place + 1) for n, place in groups[t]]) for t in best
        ]


@pytest.mark.parametrize("with_corpus", [False, True], ids=["text", "text and corpus"])
def test_drafts_are_those_of_a_brute_force_search(target: Target, with_corpus: bool) -> None:
    """In texts of few different tokens, so that matches, ties and repetitions abound; after every
    single token."""
    chance = random.Random(0)
    drafted = 0
    for _ in range(60):
        alphabet, most = chance.randint(1, 5), chance.randint(1, 5)
        least = chance.randint(1, most)
        corpus = (
            [
                [chance.randrange(alphabet + 1) for _ in range(chance.randint(1, 15))]
                for _ in range(3)
            ]
            if with_corpus
            else []
        )
        settings: dict[str, Any] = {"max_match": most, "min_match": least, "deepest": 4}
        if with_corpus:
            settings |= {
                "corpus": "texts",
                "corpus_ids": [token for text in corpus for token in (*text, -1)],
            }
        row = make(Suffix, target, **settings).memory()
        text: list[int] = []
        for _ in range(30):
            text.append(chance.randrange(alphabet))
            row.append(text[-1])
            searched = Searched([*corpus, text])
            root = searched.root(most, least)
            for tree in TREES:
                found = copied(row, row.root(), tree)
                assert found == copied(searched, root, tree), (corpus, text, settings, tree.title)
                drafted += len(found.tokens)
    assert drafted > 1000


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_match": 0}, "max_match=0"),
        ({"min_match": 1.5}, "min_match=1.5"),
        ({"deepest": True}, "deepest=True"),
        ({"deepest": 10**9}, "deepest=1000000000"),
        ({"max_match": 1025}, "max_match=1025"),
        ({"min_match": 5, "max_match": 4}, "min_match=5"),
        ({"corpus": 3}, "corpus=3"),
        ({"corpus": "builtin:nothing"}, "builtin:nothing"),
        ({"corpus": "/nowhere"}, "/nowhere"),
        ({"corpus_tokens": 0}, "corpus_tokens=0"),
        ({"remember": -1}, "remember=-1"),
        ({"remember": 0.5}, "remember=0.5"),
        ({"remember": True}, "remember=True"),
        ({"remember": None}, "remember=None"),
        ({"remember": "1k"}, "remember=1k"),
        ({"remember": 10**8}, "remember=100000000"),
        ({"corpus_ids": [3]}, "corpus_ids"),
        ({"corpus": "x", "corpus_ids": [3, 400]}, "corpus_ids reach from 3"),
        ({"corpus": "x", "corpus_ids": [-2]}, "corpus_ids reach from -2"),
        ({"corpus": "x", "corpus_ids": torch.tensor([[3]])}, "corpus_ids are"),
        ({"corpus": "x", "corpus_ids": []}, "corpus_ids are"),
    ],
)
def test_bad_settings_are_refused(target: Target, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        make(Suffix, target, **settings)


def test_a_tree_deeper_than_what_is_counted_is_refused(target: Target) -> None:
    with pytest.raises(InputError, match=said("drafter.deeper_than_counted")):
        make(Suffix, target, deepest=4).check(Tree.chain(5))


def written(folder: Path, target: Target, rows: Sequence[Sequence[int]], held_out: int) -> Path:
    manifest = {"target": {"name": target.name, "fingerprint": target.fingerprint}}
    made = [Row(i, tuple(row), ((1, len(row)),), ("length",), 0.7) for i, row in enumerate(rows)]
    write_set(folder, made, manifest=manifest, held_out=held_out)
    return folder


def test_a_corpus_is_the_training_rows_of_a_set(target: Target, tmp_path: Path) -> None:
    """Held-out rows, on which a drafter is measured, are never in it."""
    rows = [[10 * n + i for i in range(5)] for n in range(1, 9)]
    folder = written(tmp_path / "set", target, rows, held_out=3)
    from drafttrain.data.conversations import HELD_OUT, TRAIN, read_set

    read = read_set(folder)
    kept = [read.row(i)[0].tolist() for i in read.indices(TRAIN)]
    away = [read.row(i)[0].tolist() for i in read.indices(HELD_OUT)]
    every = make(Suffix, target, corpus=str(folder))
    assert every.corpus_ids is not None
    assert (
        every.corpus_ids.tolist() == [token for row in kept for token in (*row, -1)]
        and len(away) == 3
    )
    for row in kept:
        assert drafts(every, [7, row[1]], Tree.chain(9)) == [
            (token, i - 1) for i, token in enumerate(row[2:])
        ]
    for row in away:
        assert drafts(every, [7, row[1]], Tree.chain(9)) == []
    two = make(Suffix, target, corpus=str(folder), corpus_tokens=14)
    assert two.corpus_ids is not None and two.corpus_ids.tolist() == [*kept[0], -1, *kept[1], -1]
    again = drafters.make(Suffix, target, **two.settings())
    assert again.settings() == two.settings()
    with pytest.raises(InputError, match="corpus="):
        make(Suffix, target, corpus=str(folder), corpus_tokens=4)
    with pytest.raises(InputError, match="corpus="):
        make(Suffix, load.tiny(seed=1), corpus=str(folder))
