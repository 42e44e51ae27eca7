"""The shape of a token tree, apart from its tokens (Miao et al. 2023, SpecInfer, arXiv:2305.09781, section 3).

Nodes are numbered from 0 with parents before children; the anchor, already chosen, is -1 as a parent, and row 0 where
it gets a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from drafttrain.errors import InputError


@dataclass(frozen=True)
class Tree:
    """A fixed tree shape, numbered breadth first: by depth, then parent, then rank among siblings."""

    parents: tuple[int, ...]
    """Parent of each node, -1 = anchor. Breadth-first order means that this never falls."""

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise InputError(f"node {node} has parent {parent}, needs -1 (anchor) or an earlier node")
            if node and parent < self.parents[node - 1]:
                raise InputError(
                    f"node {node} has parent {parent} behind parent {self.parents[node - 1]}: sort nodes breadth first"
                )

    @classmethod
    def chain(cls, k: int) -> Tree:
        """k nodes, each the only child of the one before; k = 0 is the empty proposal of plain decoding."""
        if type(k) is not int or k < 0:
            raise InputError(f"chain length is {k}, needs a whole number of at least 0")
        return cls(tuple(range(-1, k - 1)))

    @classmethod
    def expansion(cls, widths: Sequence[int]) -> Tree:
        """Every node at depth i gets widths[i] children, the anchor at depth 0 (SpecInfer, section 3)."""
        if not widths or min(widths) < 1:
            raise InputError(f"expansion widths are {list(widths)}, needs one width of at least 1 per depth")
        parents: list[int] = []
        level = [-1]
        for width in widths:
            first = len(parents)
            parents += [node for node in level for _ in range(width)]
            level = list(range(first, len(parents)))
        return cls(tuple(parents))

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> Tree:
        """Read a tree from the ranks on the way to each node, in any order.

        [[0], [1], [0, 0]] is two children of the anchor and one child of the first.

        Raises: InputError naming the path, if one is empty, repeated, or lacks its parent or an earlier sibling.
        """
        given = [tuple(path) for path in paths]
        if not given:
            raise InputError("a tree needs at least one path, such as [0]; got none")
        known: set[tuple[int, ...]] = set()
        for path in given:
            if not path:
                raise InputError("path [] is the anchor, which every tree has: leave it out")
            if any(not isinstance(rank, int) or rank < 0 for rank in path):
                raise InputError(f"path {list(path)} needs whole ranks of at least 0")
            if path in known:
                raise InputError(f"path {list(path)} is given twice: name each node once")
            known.add(path)
        for path in given:
            if len(path) > 1 and path[:-1] not in known:
                raise InputError(f"path {list(path)} has no parent: add {list(path[:-1])}")
            if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in known:
                raise InputError(f"path {list(path)} skips a rank: add {[*path[:-1], path[-1] - 1]}")
        order = sorted(given, key=lambda path: (len(path), path))
        index = {path: node for node, path in enumerate(order)}
        return cls(tuple(index.get(path[:-1], -1) for path in order))

    @classmethod
    def eagle1_static(cls) -> Tree:
        """The 25 nodes that EAGLE-1 drafts by default.

        Li et al. 2024 (arXiv:2401.15077); child counts as in its public code, v1 branch, model/choices.py.
        """
        counts = {
            (): 4,
            (0,): 3, (1,): 2, (2,): 2, (3,): 1,
            (0, 0): 3, (0, 1): 2, (0, 2): 2, (1, 0): 1,
            (0, 0, 0): 3,
            (0, 0, 0, 0): 2,
        }  # fmt: skip
        return cls.from_paths([(*path, rank) for path, count in counts.items() for rank in range(count)])

    @property
    def size(self) -> int:
        """Drafted nodes, the anchor not counted."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the anchor's children are at 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Place of each node among its siblings, from 0."""
        seen: dict[int, int] = {}
        ranks: list[int] = []
        for parent in self.parents:
            ranks.append(seen.get(parent, 0))
            seen[parent] = ranks[-1] + 1
        return tuple(ranks)

    @property
    def max_depth(self) -> int:
        return self.depths[-1] if self.parents else 0

    @property
    def max_children(self) -> int:
        """Most children of one node, the anchor included."""
        return max(self.ranks) + 1 if self.parents else 0

    @property
    def is_chain(self) -> bool:
        return self.max_children <= 1

    @property
    def leaves(self) -> tuple[int, ...]:
        """Nodes without children; the anchor is never one."""
        inner = set(self.parents)
        return tuple(node for node in range(self.size) if node not in inner)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Ranks from the anchor to each node: what `from_paths` reads."""
        paths: list[tuple[int, ...]] = []
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), rank))
        return tuple(paths)

    def children(self, node: int) -> tuple[int, ...]:
        """Children of a node, or of the anchor (-1), by rank."""
        return tuple(child for child, parent in enumerate(self.parents) if parent == node)

    def levels(self) -> list[tuple[int, ...]]:
        """Nodes of depth 1, of depth 2, ..., each in index order."""
        levels: list[list[int]] = [[] for _ in range(self.max_depth)]
        for node, depth in enumerate(self.depths):
            levels[depth - 1].append(node)
        return [tuple(level) for level in levels]

    def capped(self, depth: int) -> Tree:
        """The tree without nodes deeper than `depth`; those that stay keep their numbers. Depth 0 leaves none."""
        if depth < 0:
            raise InputError(f"depth cap is {depth}, needs at least 0")
        return Tree(tuple(parent for parent, own in zip(self.parents, self.depths, strict=True) if own <= depth))

    def ancestor_mask(self) -> Tensor:
        """(n+1 n+1) bool: row i+1, node i, sees the anchor (column 0), its ancestors and itself; row 0 sees itself."""
        return ancestor_mask(torch.tensor([self.parents], dtype=torch.int64).reshape(1, self.size))[0]


def _with_anchor(parents: Tensor) -> Tensor:
    """b n -> b (n+1): parents as row numbers, the anchor in front as its own parent."""
    return torch.nn.functional.pad(parents + 1, (1, 0), value=0)


def depths_of(parents: Tensor) -> Tensor:
    """Depth of each node of each row's tree.

    Args:
        parents: (b n) int64, -1 = anchor, a parent's index below its children's.
    Returns: (b n) int64; the anchor's children are at 1.
    """
    above = _with_anchor(parents)  # b n+1
    at = above[:, 1:]
    depths = torch.ones_like(parents)
    while bool((at > 0).any()):
        depths += at > 0
        at = above.gather(1, at)
    return depths


def ancestor_mask(parents: Tensor) -> Tensor:
    """Who sees whom in each row's tree: a node sees the anchor, its ancestors and itself (SpecInfer, Definition 4.1).

    Args:
        parents: (b n) int64, -1 = anchor, a parent's index below its children's.
    Returns: (b n+1 n+1) bool, the anchor at row and column 0.
    """
    above = _with_anchor(parents)  # b n+1
    b, size = above.shape
    at = torch.arange(size, device=parents.device).expand(b, size)
    mask = torch.zeros((b, size, size), dtype=torch.bool, device=parents.device)
    mask[:, :, 0] = True
    while bool((at > 0).any()):
        mask.scatter_(2, at[:, :, None], True)
        at = above.gather(1, at)
    return mask


def children_of(parents: Tensor) -> Tensor:
    """Children of each node of each row's tree, in index order.

    Args:
        parents: (b n) int64, -1 = anchor.
    Returns: (b n+1 k) int64, row i+1 for node i, row 0 for the anchor, k the most children of any node; padded with -1.
    """
    b, n = parents.shape
    ranks = (parents[:, :, None] == parents[:, None, :]).tril(-1).sum(-1)  # b n
    k = int(ranks.max()) + 1 if parents.numel() else 0
    table = parents.new_full((b, (n + 1) * k), -1)
    nodes = torch.arange(n, device=parents.device).expand(b, n)
    return table.scatter_(1, (parents + 1) * k + ranks, nodes).reshape(b, n + 1, k)
