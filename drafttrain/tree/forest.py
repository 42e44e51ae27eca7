"""A tree for each of several drafters that draft side by side (Miao et al. 2023, SpecInfer,
arXiv:2305.09781, section 3).

How the trees become one that the target checks: `drafttrain.tree.merge`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drafttrain.errors import InputError
from drafttrain.tree.topology import Growth, Tree


@dataclass(frozen=True)
class Forest(Growth):
    """One growth for each member of an ensemble, in their order; an empty tree leaves a member
    out."""

    trees: tuple[Growth, ...]

    def __post_init__(self) -> None:
        trees = self.trees
        if (
            not isinstance(trees, list | tuple)
            or not trees
            or not all(isinstance(tree, Growth) for tree in trees)
        ):
            raise InputError(
                f"trees are {str(trees)[:80]}, need a list with one tree for each member, such as "
                "[4, 3]"
            )
        if any(isinstance(tree, Forest) for tree in trees):
            raise InputError("trees hold trees of several members: give one tree for each member")
        object.__setattr__(self, "trees", tuple(trees))
        # Where some are drawn and others are the most likely ones, each stays what it was made by.
        object.__setattr__(
            self, "can_draw", any(tree.can_draw for tree in trees if tree.size) or not self.size
        )

    @property
    def size(self) -> int:
        return sum(tree.size for tree in self.trees)

    @property
    def max_depth(self) -> int:
        return max(tree.max_depth for tree in self.trees)

    @property
    def max_children(self) -> int:
        return sum(tree.max_children for tree in self.trees)

    @property
    def reads(self) -> int:
        return max(max(tree.size, tree.reads) for tree in self.trees)

    @property
    def kind(self) -> str:
        return "forest" if self.size else "plain"

    @property
    def title(self) -> str:
        return " + ".join(tree.title for tree in self.trees) if self.size else self.kind

    def capped(self, depth: int) -> Forest:
        return Forest(tuple(tree.capped(depth) for tree in self.trees))

    def within(self, depth: int) -> Forest:
        return Forest(tuple(tree.within(depth) for tree in self.trees))

    def spec(self) -> dict[str, Any]:
        return {"growth": "forest", "trees": [tree.spec() for tree in self.trees]}


def forest(trees: Sequence[Any]) -> Forest:
    """A forest as settings name it.

    Args:
        trees: for each member a number, which is a chain of that many drafts (0 leaves the member
            out); a list of paths of ranks such as [[0], [1], [0, 0]]; or a growth.
    """
    if not isinstance(trees, list | tuple):
        raise InputError(
            f"tree.trees is {str(trees)[:80]}, needs a list with one tree for each member, such as "
            "[4, 3]"
        )
    return Forest(tuple(_tree(tree) for tree in trees))


def _tree(given: Any) -> Growth:
    if isinstance(given, Growth):
        return given
    if isinstance(given, list | tuple):
        return Tree.from_paths(given) if given else Tree.chain(0)
    return Tree.chain(given)
