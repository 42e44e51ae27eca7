"""Sharing a budget of drafts: what smaller trees would have kept is counted exactly, and the greedy
choice is a good one."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from drafttrain.errors import InputError
from drafttrain.tree.choice import SHARING
from drafttrain.tree.forest import forest
from drafttrain.tree.share import Followed, Path, candidate_forests, expected, for_one, kept, shared
from drafttrain.tree.topology import Tree

ROUNDS: list[Followed] = [
    *[((0, 0), ())] * 5,  # the first member was followed for two drafts
    *[((0,), (0, 0, 0))] * 4,  # both were, the second for longer
    *[((), (1,))] * 3,  # the second member's other child
    ((), ()),
]


def test_a_round_keeps_what_the_furthest_tree_keeps() -> None:
    assert kept([{(0,)}, set()], Counter(ROUNDS)) == 9
    assert kept([{(0,), (0, 0)}, {(0,)}], Counter(ROUNDS)) == 14
    assert kept([{(0,)}, {(0,), (0, 0), (0, 0, 0)}], Counter(ROUNDS)) == 5 + 12
    assert expected([Tree.chain(2), Tree.chain(3)], ROUNDS) == pytest.approx(1 + (10 + 12) / 13)


def test_the_largest_gain_for_a_node_goes_first() -> None:
    assert shared(ROUNDS, 1).trees == (Tree.chain(1), Tree.chain(0))
    assert shared(ROUNDS, 2).trees == (Tree.chain(2), Tree.chain(0))
    # Three nodes add 8 by going deeper with the second member; its second child, with the sibling
    # before it, adds 3 for 2.
    assert shared(ROUNDS, 5).trees == (Tree.chain(2), Tree.chain(3))
    assert shared(ROUNDS, 6).trees == (
        Tree.chain(2),
        Tree.from_paths([[0], [1], [0, 0], [0, 0, 0]]),
    )
    assert shared(ROUNDS, 100).size == 6, "a node that adds nothing is not given away"


def test_a_member_that_adds_nothing_gets_nothing() -> None:
    twins: list[Followed] = [((0, 0), (0, 0)), ((0,), (0,)), ((), ())]
    assert shared(twins, 4).trees == (Tree.chain(2), Tree.chain(0))
    assert shared([((), ())] * 3, 4).size == 0


def test_what_is_worth_measuring() -> None:
    assert for_one(ROUNDS, 3, 1).trees == (Tree.chain(0), Tree.chain(3))
    found = candidate_forests(ROUNDS, [1, 3])
    assert found == [forest([1, 0]), forest([0, 1]), forest([2, 0]), forest([0, 3])], "each once"
    assert candidate_forests([((), ())], [2]) == []


def best_of(rounds: list[Followed], nodes: int) -> int:
    """By trying every pair of trees."""
    paths: list[Path] = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
    trees = []
    for size in range(len(paths) + 1):
        for some in map(set, itertools.combinations(paths, size)):
            if all(
                (p[:-1] in some or len(p) == 1) and (not p[-1] or (*p[:-1], p[-1] - 1) in some)
                for p in some
            ):
                trees.append(some)
    counts = Counter(rounds)
    return max(kept([a, b], counts) for a in trees for b in trees if len(a) + len(b) <= nodes)


def test_the_choice_is_close_to_the_best() -> None:
    chance = random.Random(0)
    ends: list[Path] = [(), (), (0,), (1,), (0, 0), (0, 0), (0, 1), (1, 0)]
    for _ in range(12):
        rounds = [(chance.choice(ends), chance.choice(ends)) for _ in range(30)]
        for nodes in (1, 3, 5):
            found = shared(rounds, nodes)
            assert found.size <= nodes
            assert kept(
                [set(tree.paths) for tree in found.trees], Counter(rounds)
            ) >= 0.85 * best_of(rounds, nodes)  # type: ignore[attr-defined]


def test_what_cannot_be_shared() -> None:
    with pytest.raises(InputError, match="no round was decoded"):
        shared([], 4)
    for nodes in (0, 1.5, True):
        with pytest.raises(InputError, match="nodes to share"):
            shared(ROUNDS, nodes)  # type: ignore[arg-type]


def test_the_tree_that_members_are_compared_in() -> None:
    assert SHARING.size == 17 and SHARING.max_depth == 8 and SHARING.max_children == 4
