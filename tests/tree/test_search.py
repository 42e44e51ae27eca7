"""Trees from measured rates: the published recursions against brute force, and their known
values."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from pathlib import Path

import pytest

from drafttrain.errors import InputError
from drafttrain.tree.search import expected_tokens, sequoia, sparse
from drafttrain.tree.topology import Tree

VECTOR = [0.7, 0.15, 0.06, 0.03]
DECAYED = [[rate * 0.85**depth for rate in VECTOR] for depth in range(8)]
HEADS = [[0.60, 0.11, 0.05, 0.03], [0.36, 0.11, 0.06, 0.04], [0.22, 0.10, 0.06, 0.04]]


@lru_cache(None)
def ordered(n: int) -> tuple[tuple, ...]:
    """All ordered trees of n nodes, root included, each as the tuple of its root's subtrees."""

    def forests(left: int) -> Iterator[tuple]:
        if left == 0:
            yield ()
        for first in range(1, left + 1):
            for tree in ordered(first):
                for rest in forests(left - first):
                    yield (tree, *rest)

    return tuple(forests(n - 1))


def paths(tree: tuple, above: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    for rank, child in enumerate(tree):
        yield (*above, rank)
        yield from paths(child, (*above, rank))


@pytest.mark.parametrize(
    ("rates", "nodes", "depth", "value"),
    [
        (VECTOR, 4, None, 2.77310),
        (VECTOR, 7, None, 3.20882),
        (VECTOR, 7, 3, 2.96650),
        (DECAYED, 4, 4, 2.47714),
        (DECAYED, 7, 7, 2.74620),
        (DECAYED, 7, 3, 2.71564),
    ],
)
def test_known_values_and_brute_force(
    rates: list, nodes: int, depth: int | None, value: float
) -> None:
    tree = sequoia(rates, nodes, depth)
    assert tree.size == nodes and tree.max_depth <= (depth or nodes)
    assert round(expected_tokens(tree, rates), 5) == value
    shapes = [Tree.from_paths(paths(shape)) for shape in ordered(nodes + 1)]
    allowed = [
        shape for shape in shapes if shape.max_depth <= (depth or nodes) and shape.max_children <= 4
    ]
    assert math.isclose(
        max(expected_tokens(shape, rates) for shape in allowed), expected_tokens(tree, rates)
    )


def test_known_shapes() -> None:
    assert sequoia(VECTOR, 4) == Tree.chain(4)
    assert sequoia(VECTOR, 7) == Tree.from_paths([[1], *([0] * depth for depth in range(1, 7))])
    assert sequoia(VECTOR, 7, 3) == Tree.from_paths(
        [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1]]
    )
    assert sequoia([0.9], 5) == Tree.chain(5)
    assert expected_tokens(Tree.chain(7), VECTOR) == pytest.approx(3.14117, abs=1e-5)


def test_random_rates_by_depth_and_zeros() -> None:
    draw = random.Random(0)
    for _ in range(12):
        rates = []
        for _ in range(4):
            row = [draw.random() * draw.choice((0, 1, 1)) for _ in range(3)]
            rates.append([rate / max(1.0, sum(row)) for rate in row])
        tree = sequoia(rates, 6)
        allowed = (Tree.from_paths(paths(shape)) for shape in ordered(7))
        best = max(
            expected_tokens(t, rates) for t in allowed if t.max_depth <= 4 and t.max_children <= 3
        )
        assert tree.size == 6 and math.isclose(expected_tokens(tree, rates), best)


def test_many_nodes_are_quick_and_deep_trees_are_built() -> None:
    assert sequoia([[0.6, 0.15, 0.08, 0.04]] * 10, 128).size == 128
    assert sequoia([0.999, 0.0001], 300).max_depth == 300


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([], 4), "need a list of numbers"),
        (([0.5, []], 4), "row \\[\\]|0.5"),
        (([0.5, 1.5], 4), "hold 1.5"),
        (([0.5, float("nan")], 4), "hold nan"),
        (([0.5, "x"], 4), "hold x"),
        (([0.8, 0.3], 4), "add up to 1.1"),
        ((VECTOR, 0), "tree.nodes is 0"),
        ((VECTOR, 4, 0), "tree.depth is 0"),
        (([[0.5]] * 2, 4, 3), "given for 2 depths"),
        (([[0.5, 0.1]] * 2, 7), "hold only 6"),
        (("nowhere.json", 4), "nowhere.json does not exist"),
    ],
)
def test_rates_that_cannot_be(arguments: tuple, said: str) -> None:
    with pytest.raises(InputError, match=said):
        sequoia(*arguments)


def test_rates_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "rates.json").write_text(json.dumps(DECAYED))
    assert sequoia(str(tmp_path / "rates.json"), 7, 3) == sequoia(DECAYED, 7, 3)
    (tmp_path / "odd.json").write_text("[[0.5, 2]]")
    with pytest.raises(InputError, match=r"odd\.json: rates hold 2"):
        sequoia(str(tmp_path / "odd.json"), 7)


def test_medusas_choice_is_the_largest_products() -> None:
    tree = sparse(HEADS, 9)
    assert set(tree.paths) == {(0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0), (0, 2), (3,)}
    assert round(expected_tokens(tree, HEADS) - 1, 5) == 1.19512
    worth = {
        path: math.prod(HEADS[depth][rank] for depth, rank in enumerate(path))
        for length in (1, 2, 3)
        for path in product(range(4), repeat=length)
    }
    for nodes in (1, 5, 20, 40):
        assert set(sparse(HEADS, nodes).paths) == set(
            sorted(worth, key=lambda path: -worth[path])[:nodes]
        )


def test_medusas_choice_agrees_with_the_programme_on_one_vector() -> None:
    assert expected_tokens(sparse([VECTOR] * 7, 7), VECTOR) == pytest.approx(
        expected_tokens(sequoia(VECTOR, 7), VECTOR)
    )


def test_a_later_rank_waits_behind_an_earlier_one() -> None:
    assert sparse([[0.5, 0.1, 0.2]], 2).paths == ((0,), (1,))


def test_trees_beyond_one_pass_are_not_searched_for() -> None:
    for search in (
        lambda: sequoia([0.5, 0.2], 10**9),
        lambda: sequoia([0.5], 10**9),
        lambda: sparse([[0.5] * 10] * 12, 10**9),
    ):
        with pytest.raises(InputError, match="at most 1024 can be checked"):
            search()
    with pytest.raises(InputError, match="rates hold 1000"):
        sequoia([10**400], 2)


@pytest.mark.parametrize("nodes", [0, 85, True, 2.0])
def test_more_nodes_than_heads_fill(nodes: int) -> None:
    with pytest.raises(InputError, match="from 1 to 84"):
        sparse(HEADS, nodes)
