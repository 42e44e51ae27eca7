"""Trees of drafts that are copied from text: which of the continuations at hand become which nodes.

A source ranks the continuations of a place in the text. Nothing is drawn and nothing is made up:
where it knows of no further continuation, a node stays out, with all that would follow it.

- A fixed shape: the node of rank r takes its parent's continuation of rank r. A chain thus takes
  the first one each time.
- A chain that ends by confidence: the first continuation each time, before the first whose share is
  below the threshold.
- Dynamic: the `total` nodes whose shares on the path to them have the largest product, at most
  `top_k` of a parent and `depth` deep; among equals the shallower, then the one found earlier.
  Reading costs nothing here, so that, unlike with a drafter that must be asked
  (`drafttrain.tree.dynamic`), no level is cut while growing.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from drafttrain.flow import Proposal, Sampling
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Growth, Tree


class Continuations(Protocol):
    """Text that knows what followed a place in it."""

    def children(self, node: Any, most: int) -> list[tuple[int, float, Any]]:
        """At most `most` different tokens that followed, the best first: (token, its share among
        all that followed, the place after it)."""
        ...


@dataclass(frozen=True)
class Copied:
    """One row's tree, parents before children."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Numbers of the nodes in the shape that was to be filled; for a shape made here, their own."""

    def add(self, token: int, parent: int, place: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.places.append(place)
        return len(self.tokens) - 1


def copied(source: Continuations, root: Any, tree: Growth) -> Copied:
    """Fill a tree of any kind from the continuations of `root`; None has none."""
    if root is None:
        return Copied()
    if isinstance(tree, Tree):
        return _fill(source, root, tree)
    if isinstance(tree, Confident):
        return _chain(source, root, tree)
    if isinstance(tree, Dynamic):
        return _best(source, root, tree)
    raise TypeError(f"no way to copy text into a {type(tree).__name__} is known")


def _fill(source: Continuations, root: Any, tree: Tree) -> Copied:
    found, wanted = Copied(), _children_wanted(tree)
    ranked = {-1: source.children(root, wanted[0])} if tree.size else {}
    number = {-1: -1}
    for place, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
        known = ranked.get(parent, ())
        if rank >= len(known):
            continue
        token, _, below = known[rank]
        number[place] = found.add(token, number[parent], place)
        if wanted[place + 1]:
            ranked[place] = source.children(below, wanted[place + 1])
    return found


@lru_cache(maxsize=256)
def _children_wanted(tree: Tree) -> tuple[int, ...]:
    """Children of the anchor, of node 0, of node 1, ..."""
    counts = [0] * (tree.size + 1)
    for parent in tree.parents:
        counts[parent + 1] += 1
    return tuple(counts)


def _chain(source: Continuations, root: Any, tree: Confident) -> Copied:
    found, at = Copied(), root
    for k in range(tree.k):
        best = source.children(at, 1)
        if not best or best[0][1] < tree.stop_below:
            break
        token, _, at = best[0]
        found.add(token, k - 1, k)
    return found


def _best(source: Continuations, root: Any, tree: Dynamic) -> Copied:
    found, order = Copied(), 0
    waiting: list[tuple[float, int, int, int, int, Any]] = []

    def offer(node: Any, value: float, depth: int, parent: int) -> None:
        nonlocal order
        for token, share, below in source.children(node, tree.top_k):
            heapq.heappush(waiting, (-value * share, depth, order, token, parent, below))
            order += 1

    offer(root, 1.0, 1, -1)
    while waiting and len(found.tokens) < tree.total:
        minus_value, depth, _, token, parent, below = heapq.heappop(waiting)
        node = found.add(token, parent, len(found.tokens))
        if depth < tree.depth:
            offer(below, -minus_value, depth + 1, node)
    return found


def proposal_of(rows: Sequence[Copied], device: torch.device) -> Proposal:
    """Rows of their own sizes as one proposal, as wide as the largest."""
    counts = [len(row.tokens) for row in rows]
    n = max(counts, default=0)
    padded = [
        [
            values + [filler] * (n - len(values))
            for values, filler in ((row.tokens, 0), (row.parents, -1), (row.places, 0))
        ]
        for row in rows
    ]
    packed: Tensor = (
        torch.tensor(padded, dtype=torch.int64).reshape(len(rows), 3, n).to(device)
    )  # b 3 n
    tokens, parents, places = packed.unbind(1)
    return Proposal(
        tokens,
        parents,
        Sampling.ONE_HOT,
        counts=torch.tensor(counts, dtype=torch.int64, device=device),
        places=places,
    )
