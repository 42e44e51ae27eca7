"""Fixed trees made from measured rates: Sequoia's dynamic programme and Medusa's greedy choice.

They measure different things. Sequoia asks how often the child of some rank is *the accepted one*,
given that its parent was accepted: right for drafters that read what they drafted. Medusa asks how
often a head's j-th choice is right, whatever the other heads chose: right for heads that all read
one position.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from drafttrain.errors import InputError
from drafttrain.tree.files import table
from drafttrain.tree.topology import Tree, check_size

Path = tuple[int, ...]
Rates = str | Sequence[float] | Sequence[Sequence[float]]
"""Given as they are, or as the name of a file that holds them."""


def sequoia(rates: Rates, nodes: int, depth: int | None = None) -> Tree:
    """The tree that emits most tokens a pass, of all trees with that many nodes.

    With T[n, d, b] the best sum of path products over n nodes, root included, d levels and b
    children of the root:

        T[n, d, b] = max over m of T[n - m, d, b - 1] + p_b * max over j of T[m, d - 1, j]

    Chen et al. 2024 (arXiv:2402.12374), Algorithm 1 and appendix F.1.1. Departs from it: p may
    differ by depth; of equally good trees the one whose later children have fewer descendants is
    taken.

    Args:
        rates: how often the child of each rank is the accepted one, given that its parent was; one
            list for all depths, or one for each, the anchor's children first. A node has at most as
            many children as its list has entries.
        nodes: drafted nodes, the anchor not counted.
        depth: deepest node; None is as deep as there are lists, or no bound for a single list.
    Raises: InputError for rates that cannot be, or more nodes than fit.
    """
    rows = table(rates, "rates")
    for row in rows:
        if sum(row) > 1 + 1e-6:
            raise InputError(
                f"rates {row} add up to {sum(row):g}: at most one child is the accepted one, so at "
                "most to 1"
            )
    if type(nodes) is not int or nodes < 1:
        raise InputError(f"tree.nodes is {nodes!r}, needs an integer of at least 1")
    check_size(nodes)
    if depth is not None and (type(depth) is not int or depth < 1):
        raise InputError(f"tree.depth is {depth!r}, needs an integer of at least 1, or null")
    if depth is None and len(rows) == 1:
        if len(rows[0]) == 1:
            return Tree.chain(nodes)
        return Tree.from_paths(_best(rows, nodes + 1, endless=True))
    depth = min(nodes, len(rows) if depth is None else depth)
    if 1 < len(rows) < depth:
        raise InputError(
            f"tree.depth is {depth}, rates are given for {len(rows)} depths: give as many, or a "
            "single list"
        )
    rows = rows * depth if len(rows) == 1 else rows[:depth]
    room = sum(math.prod(len(row) for row in rows[: level + 1]) for level in range(depth))
    if room < nodes:
        raise InputError(
            f"tree.nodes is {nodes}, but {depth} levels of "
            f"{', '.join(str(len(row)) for row in rows)} children hold only {room}: give fewer "
            "nodes, more depth or more rates"
        )
    return Tree.from_paths(_best(rows, nodes + 1))


def _best(rows: list[list[float]], size: int, *, endless: bool = False) -> list[Path]:
    """Paths of the best tree of `size` nodes, root included, whose nodes at level i draw on
    rows[i].

    Args:
        endless: one row serves every level, however deep.
    """
    leaf = np.full(
        size + 1, -np.inf
    )  # best value of a subtree by size; where no deeper level is, it is a leaf
    leaf[1] = 1.0
    below = leaf
    counts: list[np.ndarray] = []  # by level and size: children of the root
    shares: list[
        np.ndarray
    ] = []  # by level, number of children and size: nodes of the last child's subtree
    for row in reversed(rows):
        values = leaf.copy()
        subtrees = values if endless else below
        partial = np.full((len(row) + 1, size + 1), -np.inf)
        partial[0, 1] = 1.0
        share = np.zeros((len(row) + 1, size + 1), dtype=int)
        for n in range(2, size + 1):
            for b, rate in enumerate(row, start=1):
                # Best sum with m nodes for the last child, m = 1 .. n-1.
                sums = partial[b - 1, n - 1 : 0 : -1] + _scaled(subtrees[1:n], rate)
                share[b, n] = 1 + int(sums.argmax())
                partial[b, n] = sums.max()
            values[n] = partial[:, n].max()
        below = values
        counts.insert(0, partial.argmax(0))
        shares.insert(0, share)
    paths: list[Path] = []
    todo: list[tuple[int, int, Path]] = [(0, size, ())]
    while todo:
        level, n, path = todo.pop()
        paths += [path] if path else []
        here = 0 if endless else level
        for b in range(int(counts[here][n]) if n > 1 else 0, 0, -1):
            m = int(shares[here][b, n])
            todo.append((level + 1, m, (*path, b - 1)))
            n -= m
    return paths


def _scaled(values: np.ndarray, rate: float) -> np.ndarray:
    """Values times a rate; what cannot be, -inf, stays so at rate 0 too."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(values), values * rate, -np.inf)


def sparse(accuracies: Rates, nodes: int) -> Tree:
    """The most likely paths, chosen one by one: always the best next sibling or first child of what
    is there already.

    A path is worth the product of its accuracies. Cai et al. 2024 (arXiv:2401.10774), section 2.3.3
    and its public code. Where accuracies do not rise with rank this takes the `nodes` largest
    products of all; where a later rank is more accurate than an earlier one it waits for that
    one, as there, since a tree has no gaps: sort them first.

    Args:
        accuracies: how often each head's j-th choice is the target's token; head i fills depth i.
            Hits are to be divided by the comparisons really made: dividing by a common count
            underrates the deeper heads.
        nodes: drafted nodes, the anchor not counted.
    Raises: InputError for accuracies that cannot be, or more nodes than fit.
    """
    heads = table(accuracies, "accuracies")
    room = sum(math.prod(len(head) for head in heads[: depth + 1]) for depth in range(len(heads)))
    if type(nodes) is not int or not 1 <= nodes <= room:
        raise InputError(
            f"tree.nodes is {nodes!r}, needs an integer from 1 to {room}, which is all that these "
            "heads fill"
        )
    check_size(nodes)
    chosen: list[Path] = []
    waiting: list[tuple[float, int, Path]] = []

    def offer(parent: float, path: Path) -> None:
        head = heads[len(path) - 1]
        if path[-1] < len(head):
            heapq.heappush(waiting, (-parent * head[path[-1]], len(path), path))

    worth: dict[Path, float] = {(): 1.0}
    offer(1.0, (0,))
    while len(chosen) < nodes:
        value, _, path = heapq.heappop(waiting)
        worth[path] = -value
        chosen.append(path)
        offer(worth[path[:-1]], (*path[:-1], path[-1] + 1))
        if len(path) < len(heads):
            offer(-value, (*path, 0))
    return Tree.from_paths(chosen)


def expected_tokens(tree: Tree, rates: Rates) -> float:
    """Tokens that a pass emits with this tree, bonus included: the sum of path products, root
    included (Prop. 3.4 there).

    Args:
        rates: as in `sequoia`; a rank or a depth without a rate counts 0.
    """
    rows = table(rates, "rates")

    def rate(depth: int, rank: int) -> float:
        row = rows[0] if len(rows) == 1 else rows[depth] if depth < len(rows) else []
        return row[rank] if rank < len(row) else 0.0

    return 1.0 + sum(
        math.prod(rate(depth, rank) for depth, rank in enumerate(path)) for path in tree.paths
    )
