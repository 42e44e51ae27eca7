"""What tests of drafters that copy text share: a text, and the tree that they draft after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafttrain.drafter.base import Committed
from drafttrain.drafter.retrieval import Retrieval
from drafttrain.flow import Features, Proposal
from drafttrain.nn.sampling import Policy
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Growth, Tree

Drafts = list[tuple[int, int]]
"""(token, parent) of each node."""
TREES: list[Growth] = [
    Tree.chain(4),
    Tree.expansion([3, 2, 1]),
    Tree.eagle1_static().capped(4),
    Dynamic(depth=4, top_k=3, total=9),
    Confident(k=4, stop_below=0.4),
]


def committed_of(rows: Sequence[Sequence[int]], *, new: bool) -> Committed:
    """What the loop gives: of new rows the first token apart, the anchor last; padding that nobody
    may read."""
    later = [list(row[new:]) for row in rows]
    width = max(map(len, later))
    tokens = torch.tensor([row + [299] * (width - len(row)) for row in later], dtype=torch.int64)
    first = torch.tensor([row[0] for row in rows]) if new else None
    return Committed(Features(), tokens, torch.tensor(list(map(len, later))), first=first)


def propose(drafter: Retrieval, rows: Sequence[Sequence[int]], tree: Growth) -> Proposal:
    return drafter.propose(
        drafter.open(len(rows), 0), committed_of(rows, new=True), tree, Policy(), None
    )


def rows_of(proposal: Proposal) -> list[Drafts]:
    assert proposal.counts is not None
    zipped = zip(
        proposal.counts.tolist(), proposal.tokens.tolist(), proposal.parents.tolist(), strict=True
    )
    return [
        list(zip(tokens[:count], parents[:count], strict=True)) for count, tokens, parents in zipped
    ]


def drafts(drafter: Retrieval, text: Sequence[int], tree: Growth) -> Drafts:
    (row,) = rows_of(propose(drafter, [text], tree))
    return row
