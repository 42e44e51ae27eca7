"""Trees worth trying, made from how often a child of each rank was the accepted one at each
depth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from drafttrain.tree.search import sequoia
from drafttrain.tree.topology import Tree

CALIBRATION = Tree.from_counts(
    {
        (): 8,
        (0,): 4, (1,): 4, (2,): 2, (3,): 2,
        (0, 0): 4, (0, 1): 2, (1, 0): 2,
        (0, 0, 0): 4, (0, 0, 1): 2,
        (0, 0, 0, 0): 3,
        (0, 0, 0, 0, 0): 3,
        (0, 0, 0, 0, 0, 0): 2,
    }
)  # fmt: skip
"""42 nodes, wide at the top and seven deep: rates are counted in it."""
SHARING = Tree.from_counts(
    {
        (): 4,
        (0,): 3,
        (1,): 1,
        (0, 0): 2,
        (0, 1): 1,
        (0, 0, 0): 2,
        **{(0,) * k: 1 for k in range(4, 8)},
    }
)
"""17 nodes, eight deep: what each member of an ensemble adds is counted in it. Narrower, since
every member grows one."""


def known(rates: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """The part of measured rates that a search can use: ranks before the first that no round
    offered, depths before the first at which nothing was accepted."""
    found: list[list[float]] = []
    for row in rates:
        kept: list[float] = []
        for rate in row:
            if rate is None:
                break
            kept.append(rate)
        if not sum(kept):
            break
        # Ranks are counted over different parents, so that few counts may add up to more than 1.
        excess = max(1.0, sum(kept))
        found.append([rate / excess for rate in kept])
    return found


def candidates(rates: Sequence[Sequence[float]], sizes: Iterable[int]) -> list[Tree]:
    """Chains as long as the rates reach, and for every size and depth the tree that emits most
    tokens a pass (Sequoia)."""
    found: dict[Tree, None] = {Tree.chain(k): None for k in range(1, len(rates) + 1)}
    for nodes in sizes:
        for depth in range(1, min(nodes, len(rates)) + 1):
            rows = [list(row) for row in rates[:depth]]
            if (
                sum(math.prod(len(row) for row in rows[: level + 1]) for level in range(depth))
                >= nodes
            ):
                found[sequoia(rows, nodes, depth)] = None
    return list(found)
