"""How a round is counted: what was drafted for a row, and how far it was accepted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.flow import Acceptance, Proposal, Tally


@dataclass(frozen=True)
class Drafts:
    """What one round drafted for one row, down to the depth that the row can use."""

    size: int
    has_next: bool
    """Whether the last accepted node, or the anchor, has children."""
    nodes: tuple[int, ...]
    """The accepted ones, also those that a stop token or the limit cuts off."""


def usable_drafts(
    proposal: Proposal, depths: Tensor, accepted: Acceptance, use: Tensor
) -> tuple[Tensor, Tensor]:
    """What every row's own tree holds down to the depth that the row can use.

    Args:
        depths: (b n) of the nodes.
        use: (b) deepest draft that could still be emitted.
    Returns: (b) int64 nodes; (b) bool, whether the last accepted one, or the anchor, has children
        there.
    """
    usable = depths <= use[:, None]  # b n
    if proposal.counts is not None:
        usable &= torch.arange(proposal.size, device=depths.device) < proposal.counts[:, None]
    path = torch.nn.functional.pad(accepted.path, (1, 0), value=-1)  # b 1+k, the anchor first
    last = path.gather(1, accepted.count[:, None])  # b 1
    return usable.sum(1), (usable & (proposal.parents == last)).any(1)


def count(
    tally: Tally, depth: int, *, drafted: int, accepted: int, emitted: int, refused: bool
) -> None:
    """Count one round of one row.

    Args:
        depth: deepest place that this row's plan and limit allow.
        refused: whether a node after the accepted ones was drafted and refused.
    """
    tally.rounds += 1
    tally.drafted += drafted
    tally.accepted += accepted
    tally.emitted += emitted
    for counts in (tally.offered, tally.kept):
        counts.extend([0] * (depth - len(counts)))
    for k in range(depth):
        if k < accepted:
            tally.offered[k] += 1
            tally.kept[k] += 1
        elif k == accepted and refused:
            tally.offered[k] += 1
