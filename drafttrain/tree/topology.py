"""The shape of a token tree, apart from its tokens (Miao et al. 2023, SpecInfer, arXiv:2305.09781,
section 3).

Nodes are numbered from 0 with parents before children; the anchor, already chosen, is -1 as a
parent, and row 0 where it gets a row.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from drafttrain.errors import InputError
from drafttrain.later import torch

if TYPE_CHECKING:
    from torch import Tensor

MOST_NODES = 1024
"""Nodes of the largest tree: a target pass checks all of them at once."""


def check_size(nodes: int, where: str = "the tree") -> None:
    """Raise InputError if a tree has more nodes than one pass can check."""
    if nodes > MOST_NODES:
        raise InputError(
            f"{where}: {nodes} nodes are asked for, at most {MOST_NODES} can be checked in one pass"
        )


def check_room(tree: Growth, deepest: int | None, choices: int | None, where: str) -> None:
    """Raise InputError if a tree is deeper, or a node has more children, than a drafter can fill.

    Args:
        deepest, choices: its deepest node, and the tokens that it proposes from; None is no limit.
    """
    if deepest is not None and tree.max_depth > deepest:
        raise InputError(
            f"{where} is {tree.max_depth} deep, this drafter fills {deepest}: give a shallower tree"
        )
    if choices is not None and tree.max_children > choices:
        raise InputError(
            f"{where}: a node has {tree.max_children} children, this drafter proposes from "
            f"{choices} tokens: give a narrower tree, or train with a larger draft_vocab"
        )


class Growth(abc.ABC):
    """What a plan knows of its trees before a token is drafted: their budget, and whether their
    tokens may be drawn.

    A `Tree` is the growth whose shape is always the same. Other growths look at the drafter's
    probabilities to decide which nodes exist, so their trees differ by row and by round. What none
    of them may look at is a token that was *drawn*: which children exist, in which order they are
    checked and which are cut must be settled before, or the text no longer follows the target's
    distribution (what SpecInfer, section 4.3, takes for granted)."""

    can_draw: bool = True
    """Whether tokens may be drawn from the draft's distribution. False: they are its most likely
    ones, a function of the prefix only."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Most drafted nodes of a round, the anchor not counted: what the target checks in one
        pass."""

    @property
    @abc.abstractmethod
    def max_depth(self) -> int:
        """Depth of the deepest node that there can be; the anchor's children are at 1."""

    @property
    @abc.abstractmethod
    def max_children(self) -> int:
        """Most children of one node, the anchor included."""

    @property
    def reads(self) -> int:
        """Most drafted nodes that a drafter reads while growing: room in its cache."""
        return self.size

    @property
    def is_chain(self) -> bool:
        """Whether no node has a second child."""
        return self.max_children <= 1

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """ "plain" (no drafts), "chain", "static", "dynamic" or "forest"."""

    @property
    def title(self) -> str:
        """A short name for tables, with the budget."""
        return f"{self.kind} {self.size}" if self.size else self.kind

    @abc.abstractmethod
    def capped(self, depth: int) -> Growth:
        """The same growth with no node deeper than `depth`. Depth 0 leaves none."""

    def within(self, depth: int) -> Growth:
        """What to grow where no row of a batch can use a node deeper than `depth`.

        A row's nodes down to its own depth must not depend on it, since `depth` is that of the row
        with the most room. A growth that cannot stop early without becoming another one stays
        as it is.
        """
        return self if depth > 0 else Tree(())

    @abc.abstractmethod
    def spec(self) -> object:
        """Plain JSON values that say all of it, as a package's plan stores them."""


@dataclass(frozen=True)
class Tree(Growth):
    """A fixed tree shape, numbered breadth first: by depth, then parent, then rank among
    siblings."""

    parents: tuple[int, ...]
    """Parent of each node, -1 = anchor. Breadth-first order means that this never falls."""

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise InputError(
                    f"node {node} has parent {parent}, needs -1 (anchor) or an earlier node"
                )
            if node and parent < self.parents[node - 1]:
                raise InputError(
                    f"node {node} has parent {parent} after parent {self.parents[node - 1]}: sort "
                    "nodes breadth first"
                )

    @classmethod
    def chain(cls, k: int) -> Tree:
        """k nodes, each the only child of the one before; k = 0 is the empty proposal of plain
        decoding."""
        if type(k) is not int or k < 0:
            raise InputError(f"chain length is {str(k)[:40]}, needs an integer of at least 0")
        check_size(k)
        return cls(tuple(range(-1, k - 1)))

    @classmethod
    def expansion(cls, widths: Sequence[int]) -> Tree:
        """Every node at depth i gets widths[i] children, the anchor at depth 0 (SpecInfer, section
        3)."""
        listed = isinstance(widths, Sequence) and not isinstance(widths, str)
        if (
            not listed
            or not widths
            or not all(type(width) is int and width >= 1 for width in widths)
        ):
            raise InputError(
                f"expansion widths are {str(widths)[:80]}, needs one width of at least 1 per "
                "depth, such as [2, 2, 1]"
            )
        parents: list[int] = []
        level = [-1]
        for width in widths:
            first = len(parents)
            check_size(first + len(level) * width)
            parents += [node for node in level for _ in range(width)]
            level = list(range(first, len(parents)))
        return cls(tuple(parents))

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> Tree:
        """Read a tree from the ranks on the path to each node, in any order.

        [[0], [1], [0, 0]] is two children of the anchor and one child of the first.

        Raises: InputError naming the path, if one is empty, repeated, or lacks its parent or an
        earlier sibling.
        """
        given = [tuple(path) for path in paths]
        if not given:
            raise InputError("a tree needs at least one path, such as [0]; got none")
        known: set[tuple[int, ...]] = set()
        for path in given:
            if not path:
                raise InputError("path [] is the anchor, which every tree has: leave it out")
            if any(not isinstance(rank, int) or rank < 0 for rank in path):
                raise InputError(f"path {list(path)} needs integer ranks of at least 0")
            if path in known:
                raise InputError(f"path {list(path)} is given twice: name each node once")
            known.add(path)
        for path in given:
            if len(path) > 1 and path[:-1] not in known:
                raise InputError(f"path {list(path)} has no parent: add {list(path[:-1])}")
            if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in known:
                raise InputError(
                    f"path {list(path)} skips a rank: add {[*path[:-1], path[-1] - 1]}"
                )
        order = sorted(given, key=lambda path: (len(path), path))
        index = {path: node for node, path in enumerate(order)}
        return cls(tuple(index.get(path[:-1], -1) for path in order))

    @classmethod
    def from_counts(cls, counts: Mapping[tuple[int, ...], int]) -> Tree:
        """Read a tree from the number of children of every node that has some: {path of ranks:
        children}."""
        return cls.from_paths(
            [(*path, rank) for path, count in counts.items() for rank in range(count)]
        )

    @classmethod
    def eagle1_static(cls) -> Tree:
        """The 25 nodes that EAGLE-1 drafts by default.

        Li et al. 2024 (arXiv:2401.15077); child counts as in its public code, v1 branch,
        model/choices.py.
        """
        return cls.from_counts(_EAGLE1)

    @classmethod
    def medusa(cls, name: str = "mc_sim_7b_63") -> Tree:
        """The 63 nodes of a published Medusa tree; `mc_sim_7b_63` is the one it drafts unless asked
        otherwise.

        Cai et al. 2024 (arXiv:2401.10774); child counts as in its public code,
        medusa/model/medusa_choices.py.
        """
        if not isinstance(name, str) or name not in _MEDUSA:
            raise InputError(
                f"there is no Medusa tree {str(name)[:80]!r}: give one of {', '.join(_MEDUSA)}"
            )
        return cls.from_counts(_MEDUSA[name])

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
    def kind(self) -> str:
        return "plain" if not self.size else "chain" if self.is_chain else "static"

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
        """The tree without nodes deeper than `depth`; those that stay keep their numbers. Depth 0
        leaves none."""
        if depth < 0:
            raise InputError(f"depth cap is {depth}, needs at least 0")
        return Tree(
            tuple(
                parent
                for parent, own in zip(self.parents, self.depths, strict=True)
                if own <= depth
            )
        )

    def within(self, depth: int) -> Tree:
        return self if depth >= self.max_depth else self.capped(depth)

    def spec(self) -> list[list[int]]:
        return [list(path) for path in self.paths]

    def ancestor_mask(self) -> Tensor:
        """(n+1 n+1) bool: row i+1, node i, sees the anchor (column 0), its ancestors and itself;
        row 0 sees itself."""
        return ancestor_mask(torch.tensor([self.parents], dtype=torch.int64).reshape(1, self.size))[
            0
        ]


def _with_anchor(parents: Tensor) -> Tensor:
    """b n -> b (n+1): parents as row numbers, the anchor in front as its own parent."""
    return torch.nn.functional.pad(parents + 1, (1, 0), value=0)


def depths_of(parents: Tensor, deepest: int | None = None) -> Tensor:
    """Depth of each node of each row's tree.

    Args:
        parents: (b n) int64, -1 = anchor, a parent's index below its children's.
        deepest: no node is deeper; who knows it spares a device the question after every level.
    Returns: (b n) int64; the anchor's children are at 1.
    """
    above = _with_anchor(parents)  # b n+1
    at = above[:, 1:]
    depths = torch.ones_like(parents)
    level = 1
    while level < deepest if deepest is not None else bool((at > 0).any()):
        depths += at > 0
        at = above.gather(1, at)
        level += 1
    return depths


def ancestor_mask(parents: Tensor, deepest: int | None = None) -> Tensor:
    """Who sees whom in each row's tree: a node sees the anchor, its ancestors and itself
    (SpecInfer, Definition 4.1).

    Args:
        parents: (b n) int64, -1 = anchor, a parent's index below its children's.
        deepest: as in `depths_of`.
    Returns: (b n+1 n+1) bool, the anchor at row and column 0.
    """
    above = _with_anchor(parents)  # b n+1
    b, size = above.shape
    at = torch.arange(size, device=parents.device).expand(b, size)
    mask = torch.zeros((b, size, size), dtype=torch.bool, device=parents.device)
    mask[:, :, 0] = True
    if deepest is None:
        deepest = int(depths_of(parents).max()) if parents.numel() else 0
    for _ in range(deepest):
        mask.scatter_(2, at[:, :, None], True)
        at = above.gather(1, at)
    return mask


def children_of(parents: Tensor) -> Tensor:
    """Children of each node of each row's tree, in index order.

    Args:
        parents: (b n) int64, -1 = anchor.
    Returns: (b n+1 k) int64, row i+1 for node i, row 0 for the anchor, k the most children of any
    node; padded with -1.
    """
    b, n = parents.shape
    ranks = (parents[:, :, None] == parents[:, None, :]).tril(-1).sum(-1)  # b n
    k = int(ranks.max()) + 1 if parents.numel() else 0
    table = parents.new_full((b, (n + 1) * k), -1)
    nodes = torch.arange(n, device=parents.device).expand(b, n)
    return table.scatter_(1, (parents + 1) * k + ranks, nodes).reshape(b, n + 1, k)


_EAGLE1 = {
    (): 4,
    (0,): 3, (1,): 2, (2,): 2, (3,): 1,
    (0, 0): 3, (0, 1): 2, (0, 2): 2, (1, 0): 1,
    (0, 0, 0): 3,
    (0, 0, 0, 0): 2,
}  # fmt: skip

_MEDUSA = {
    "mc_sim_7b_63": {
        (): 10,
        (0,): 10, (1,): 7, (2,): 3, (3,): 2, (4,): 1, (5,): 1, (6,): 1, (7,): 1, (8,): 1, (9,): 1,
        (0, 0): 10, (0, 1): 3, (0, 2): 2, (0, 3): 1, (0, 4): 1, (0, 5): 1, (0, 6): 1, (0, 7): 1,
        (1, 0): 2, (2, 0): 1,
        (0, 0, 0): 2,
    },
    "vicuna_7b_stage2": {
        (): 10,
        (0,): 10, (1,): 5, (2,): 2, (3,): 2, (4,): 1, (5,): 1, (6,): 1, (7,): 1,
        (0, 0): 9, (0, 1): 4, (0, 2): 2, (0, 3): 1, (0, 4): 1, (0, 5): 1,
        (1, 0): 3, (1, 1): 1, (2, 0): 1,
        (0, 0, 0): 4, (0, 0, 1): 1, (0, 0, 2): 1, (0, 1, 0): 1,
    },
}  # fmt: skip
