"""Tree shapes: builders, refusals, and masks equal to their brute-force twins."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from drafttrain.errors import InputError
from drafttrain.tree.topology import Tree, ancestor_mask, children_of, depths_of

SHAPES = [
    Tree.chain(0),
    Tree.chain(1),
    Tree.chain(5),
    Tree.expansion([2, 2, 1]),
    Tree.eagle1_static(),
]


def line(parents: list[int], node: int) -> list[int]:
    """A node and its ancestors, the anchor left out."""
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found


def random_parents(b: int, n: int) -> Tensor:
    """(b n) any valid numbering, not only breadth first."""
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(b, n, generator=generator) * (torch.arange(n) + 1)).long() - 1


def test_chain() -> None:
    tree = Tree.chain(3)
    assert tree.parents == (-1, 0, 1)
    assert tree.ranks == (0, 0, 0)
    assert tree.depths == (1, 2, 3)
    assert (tree.size, tree.max_depth, tree.max_children, tree.is_chain) == (3, 3, 1, True)
    assert Tree.chain(0).levels() == []
    assert (Tree.chain(0).size, Tree.chain(0).max_depth, Tree.chain(0).max_children) == (0, 0, 0)


def test_expansion_has_the_published_number_of_nodes() -> None:
    tree = Tree.expansion([2, 2, 1])
    assert (tree.size, len(tree.leaves), tree.max_children) == (10, 4, 2)
    assert tree.parents == (-1, -1, 0, 0, 1, 1, 2, 3, 4, 5)
    assert tree.ranks == (0, 1, 0, 1, 0, 1, 0, 0, 0, 0)
    tree = Tree.expansion([1, 1, 3, 1, 1, 1, 1, 1])
    assert (tree.size, len(tree.leaves), tree.max_depth) == (20, 3, 8)


def test_paths_are_sorted_breadth_first() -> None:
    paths = [[1, 0], [0, 1], [1], [0, 0, 0], [0], [0, 0]]
    tree = Tree.from_paths(paths)
    assert tree.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
    assert tree.parents == (-1, -1, 0, 0, 1, 2)
    assert tree.ranks == (0, 1, 0, 1, 0, 0)
    assert tree.levels() == [(0, 1), (2, 3, 4), (5,)]
    assert tree.children(-1) == (0, 1)
    assert tree.children(0) == (2, 3)
    assert tree.children(5) == ()
    assert tree == Tree.from_paths(reversed(paths))
    assert hash(tree) == hash(Tree(tree.parents))


@pytest.mark.parametrize("tree", SHAPES[1:])
def test_paths_read_back(tree: Tree) -> None:
    assert Tree.from_paths(tree.paths) == tree


@pytest.mark.field("F42")
@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ([], "at least one path"),
        ([[]], r"path \[\] is the anchor"),
        ([[0], [1], [0]], r"path \[0\] is given twice"),
        ([[0], [1, 0]], r"path \[1, 0\] has no parent: add \[1\]"),
        ([[0], [2]], r"path \[2\] skips a rank: add \[1\]"),
        ([[0], [0, 1]], r"path \[0, 1\] skips a rank: add \[0, 0\]"),
        ([[0], [-1]], r"path \[-1\] needs integer ranks"),
        ([[0], [0.5]], r"path \[0.5\] needs integer ranks"),
    ],
)
def test_wrong_paths_are_refused_by_name(paths: list[list[int]], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Tree.from_paths(paths)


def test_other_wrong_shapes_are_refused() -> None:
    with pytest.raises(InputError, match="node 1 has parent 1"):
        Tree((-1, 1))
    with pytest.raises(InputError, match="breadth first"):
        Tree((-1, 0, -1))
    with pytest.raises(InputError, match="chain length is -1"):
        Tree.chain(-1)
    for widths in ([], [2, 0], 5, None, "22", [1.5], ["a"], [True]):
        with pytest.raises(InputError, match="expansion widths"):
            Tree.expansion(widths)  # type: ignore[arg-type]
    for huge in (
        lambda: Tree.chain(10**30),
        lambda: Tree.expansion([10**30]),
        lambda: Tree.expansion([1000, 1000, 1000, 1000]),
    ):
        with pytest.raises(InputError, match="at most 1024 can be checked"):
            huge()
    for name in ("octopus", ["mc_sim_7b_63"], None):
        with pytest.raises(InputError, match="no Medusa tree"):
            Tree.medusa(name)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="depth cap"):
        Tree.chain(2).capped(-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Tree.chain(2).parents = ()  # type: ignore[misc]


def test_eagle1_has_its_published_shape() -> None:
    tree = Tree.eagle1_static()
    assert tree.size == 25
    assert [len(level) for level in tree.levels()] == [4, 8, 8, 3, 2]
    assert len(tree.leaves) == 15
    assert [max(tree.ranks[node] for node in level) + 1 for level in tree.levels()] == [
        4,
        3,
        3,
        3,
        2,
    ]
    assert (tree.max_depth, tree.max_children, tree.is_chain) == (5, 4, False)
    assert tree.paths[-2:] == ((0, 0, 0, 0, 0), (0, 0, 0, 0, 1))


@pytest.mark.parametrize(
    ("name", "levels", "leaves", "ranks"),
    [
        ("mc_sim_7b_63", [10, 28, 23, 2], 42, [10, 10, 10, 2]),
        ("vicuna_7b_stage2", [10, 23, 23, 7], 42, [10, 10, 9, 4]),
    ],
)
def test_medusas_trees_have_their_published_shapes(
    name: str, levels: list[int], leaves: int, ranks: list[int]
) -> None:
    tree = Tree.medusa(name)
    assert tree.size == 63 and len(tree.leaves) == leaves
    assert [len(level) for level in tree.levels()] == levels
    assert [max(tree.ranks[node] for node in level) + 1 for level in tree.levels()] == ranks
    assert Tree.medusa() == Tree.medusa("mc_sim_7b_63")
    with pytest.raises(InputError, match="give one of mc_sim_7b_63"):
        Tree.medusa("octopus")


def test_a_tree_says_what_it_is() -> None:
    titles = {tree: (tree.kind, tree.title) for tree in SHAPES}
    assert titles[Tree.chain(0)] == ("plain", "plain") and titles[Tree.chain(5)] == (
        "chain",
        "chain 5",
    )
    assert titles[Tree.eagle1_static()] == ("static", "static 25")
    for tree in SHAPES:
        assert tree.can_draw and tree.reads == tree.size
        assert tree.within(2) == tree.capped(2) and tree.within(9) is tree
        assert Tree.from_paths(tree.spec()) == tree if tree.size else tree.spec() == []


@pytest.mark.parametrize("tree", SHAPES)
def test_capped_keeps_the_shallow_nodes_and_their_numbers(tree: Tree) -> None:
    for depth in range(7):
        short = tree.capped(depth)
        assert short.parents == tree.parents[: short.size]
        assert short.size == sum(own <= depth for own in tree.depths)
        assert short.max_depth == min(depth, tree.max_depth)


@pytest.mark.parametrize("tree", SHAPES)
def test_mask_of_a_tree(tree: Tree) -> None:
    mask = tree.ancestor_mask()
    assert mask.shape == (tree.size + 1, tree.size + 1)
    assert mask.dtype == torch.bool
    assert mask[:, 0].all()
    assert mask[0].sum() == 1
    for node in range(tree.size):
        seen = mask[node + 1].nonzero()[:, 0].tolist()
        assert seen == sorted([0, *(other + 1 for other in line(list(tree.parents), node))])


def test_per_row_helpers_equal_their_brute_force_twins() -> None:
    parents = random_parents(40, 9)
    mask, depths, children = ancestor_mask(parents), depths_of(parents), children_of(parents)
    for deepest in (int(depths.max()), 9):
        assert torch.equal(depths_of(parents, deepest), depths)
        assert torch.equal(ancestor_mask(parents, deepest), mask)
    assert mask.shape == (40, 10, 10)
    for row, tree in enumerate(parents.tolist()):
        for node in range(9):
            up = line(tree, node)
            assert depths[row, node] == len(up)
            assert mask[row, node + 1].nonzero()[:, 0].tolist() == sorted(
                [0, *(other + 1 for other in up)]
            )
        assert mask[row, 0].tolist() == [True] + [False] * 9
        for node in range(-1, 9):
            expected = [child for child, parent in enumerate(tree) if parent == node]
            assert children[row, node + 1].tolist() == expected + [-1] * (
                children.shape[-1] - len(expected)
            )
    assert children.shape[-1] == max(
        row.count(node) for row in parents.tolist() for node in range(-1, 9)
    )


def test_per_row_helpers_take_empty_trees() -> None:
    nothing = torch.empty(3, 0, dtype=torch.int64)
    assert depths_of(nothing).shape == (3, 0)
    assert ancestor_mask(nothing).tolist() == [[[True]]] * 3
    assert children_of(nothing).shape == (3, 1, 0)
