"""A tree for each of several drafters, counted as one budget."""

from __future__ import annotations

import pytest

from drafttrain.errors import InputError
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.forest import Forest, forest
from drafttrain.tree.topology import Tree

DYNAMIC = Dynamic(depth=4, top_k=3, total=6)


def test_counts_are_those_of_all_trees() -> None:
    found = Forest((Tree.expansion([3, 1]), DYNAMIC, Tree.chain(0)))
    assert (found.size, found.max_depth, found.max_children, found.reads) == (12, 4, 6, 9)
    assert (found.kind, found.title, found.is_chain, found.can_draw) == (
        "forest",
        "static 6 + dynamic 4x3x6 + plain",
        False,
        True,
    )
    assert not Forest((DYNAMIC, Tree.chain(0))).can_draw and forest([0, 3]).is_chain
    nothing = forest([0, 0])
    assert (nothing.kind, nothing.title, nothing.size, nothing.can_draw) == (
        "plain",
        "plain",
        0,
        True,
    )


def test_every_tree_is_cut_by_itself() -> None:
    found = Forest((Tree.chain(5), Confident(k=2, stop_below=0.1), DYNAMIC))
    assert found.within(3) == Forest((Tree.chain(3), Confident(k=2, stop_below=0.1), DYNAMIC))
    assert found.within(0).size == 0 and found.capped(1).max_depth == 1


def test_names_in_settings() -> None:
    assert forest([2, [[0], [1]], DYNAMIC, []]).trees == (
        Tree.chain(2),
        Tree.expansion([2]),
        DYNAMIC,
        Tree.chain(0),
    )
    assert forest([1, 2]) == forest([1, 2]) and hash(forest([1, 2])) == hash(forest([1, 2]))


@pytest.mark.parametrize(
    ("trees", "message"),
    [
        ([], "need a list with one tree"),
        ("4+4", "needs a list with one tree"),
        (None, "needs a list"),
        ([4, "x"], "chain length is x"),
        ([4, -1], "chain length is -1"),
        ([[[0], [2]]], "skips a rank"),
        ([forest([1]), 2], "trees of several members"),
    ],
)
def test_what_is_no_forest_is_refused(trees: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        forest(trees)  # type: ignore[arg-type]
