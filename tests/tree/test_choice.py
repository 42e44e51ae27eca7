"""Which trees are worth trying, given measured rates."""

from __future__ import annotations

import itertools

import pytest

from drafttrain.tree.choice import CALIBRATION, candidates, known
from drafttrain.tree.search import expected_tokens
from drafttrain.tree.topology import Tree


def test_only_rates_that_were_counted_are_used() -> None:
    assert known([[0.5, 0.2, None, 0.1], [0.4, 0.0], [0.0, 0.0], [0.3]]) == [[0.5, 0.2], [0.4, 0.0]]
    assert known([[None]]) == [] and known([]) == []
    assert sum(known([[0.9, 0.3]])[0]) == pytest.approx(1.0)


def test_the_best_tree_of_every_size_is_among_the_candidates() -> None:
    rates = [[0.6, 0.2, 0.1], [0.5, 0.2], [0.4]]
    found = candidates(rates, [1, 3, 4])
    assert {Tree.chain(1), Tree.chain(2), Tree.chain(3)} <= set(found) and len(set(found)) == len(
        found
    )
    paths = [
        path
        for depth in (1, 2, 3)
        for path in itertools.product(*(range(len(row)) for row in rates[:depth]))
    ]
    for size in (1, 3, 4):
        best = 0.0
        for some in itertools.combinations(paths, size):
            whole = set(some) | {()}
            if all(
                path[:-1] in whole and (not path[-1] or (*path[:-1], path[-1] - 1) in whole)
                for path in some
            ):
                best = max(best, expected_tokens(Tree.from_paths(some), rates))
        assert max(
            expected_tokens(tree, rates) for tree in found if tree.size == size
        ) == pytest.approx(best)


def test_the_calibration_tree() -> None:
    assert (
        CALIBRATION.size == 42 and CALIBRATION.max_depth == 7 and len(CALIBRATION.children(-1)) == 8
    )
