"""Rules for trees, child after child against what the earlier ones left of the target's
distribution (multi-step residual)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drafttrain.decoding.rules.shared import check, deepest, minus, norm, refuse_undrawable
from drafttrain.flow import Acceptance, Proposal, Sampling
from drafttrain.later import torch
from drafttrain.nn.sampling import draw, untried
from drafttrain.tree.topology import children_of, depths_of

if TYPE_CHECKING:
    from torch import Tensor


def multi_step(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """Judge the children of a node one after the other, each against what the earlier ones left of
    the target's distribution.

    With R = p at first: keep child c with probability min(1, R(c) / d(c)), else R = norm(max(0, R -
    d)) and go on; where no child stays, draw from R. Under Sampling.IID d is q, also for a repeated
    token (which is refused again and still changes R). Under Sampling.WOR d is q without the
    earlier siblings of the same row of q, renormalised; once they hold all of q, d is uniform over
    the tokens not tried.

    Several drafters: each child names its own drafter's row of q, and children of different rows
    count as drawn separately, even if their tokens are equal; one that repeats another's path leads
    on to that one's children (`Proposal.merged_into`). Which drafter's child comes first must not
    depend on the tokens.

    Exact for the target's distribution: Miao et al. 2023 (arXiv:2305.09781), Algorithm 2,
    VerifyStochastic; without replacement: Chen et al. 2024 (arXiv:2402.12374), Algorithm 2. Departs
    from the first: siblings are judged in index order, not in an order drawn each time. From both:
    where rounding leaves the residual empty, the remaining siblings are dropped, the token is
    drawn from p, and `fallbacks` counts it.

    Args:
        p: (b n+1 v) target probabilities.
        proposal: any tree, rows may differ in shape; Sampling.IID or Sampling.WOR, with q.
        u: (b n+1) uniform numbers; u[:, i] judges node i.
    Returns: accepted path, count, and the token drawn from the last residual, or after a leaf from
    p.
    Raises: InputError on other drafts; ValueError if a judged token has d = 0, as a repeated
    sibling has under Sampling.WOR.
    """
    check("multi_step", p, proposal, u, samplings=(Sampling.IID, Sampling.WOR))
    return _walk(p, proposal, u)


def one_hot(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """Keep child c with probability R(c), R = p at first; else R(c) = 0, renormalise, go on; at the
    end draw R.

    This is `multi_step` with a point mass for each d: exact for the target's distribution if the
    drafted tokens are a function of only the committed text (argmax, top-k, n-gram), whatever the
    drafter's own probabilities were. A node keeps one of its children with the target's probability
    of all of them. Miao et al. 2023 (arXiv:2305.09781), Algorithm 2. Departs from it: as
    `multi_step` does.

    Args:
        p: (b n+1 v) target probabilities.
        proposal: any tree under Sampling.ONE_HOT; rows may differ in shape, q is not read.
        u: (b n+1) uniform numbers; u[:, i] judges node i.
    Returns: accepted path, count, and the token drawn from the last residual, or after a leaf from
    p.
    Raises: InputError on other drafts.
    """
    check("one_hot", p, proposal, u, samplings=(Sampling.ONE_HOT,))
    return _walk(p, proposal, u)


def _walk(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """Descend from the anchor, every row at its own node; only rows that still have a child to
    judge take part."""
    tokens, sampling = proposal.tokens, proposal.sampling
    b, n = tokens.shape
    u = u.to(p.device, torch.float64)
    table = children_of(proposal.parents)  # b n+1 k
    width = deepest(depths_of(proposal.parents))
    path = tokens.new_full((b, width), -1)
    node = tokens.new_full((b,), -1)
    residual = p[:, 0].to(torch.float64, copy=True)  # b v
    live = torch.arange(b, device=p.device)  # rows whose last node was accepted
    fallbacks = 0
    for step in range(width):
        moved = []
        for rank in range(table.shape[-1]):
            # rows rank+1, all present if the last one is
            siblings = table[live, node[live] + 1, : rank + 1]
            present = siblings[:, rank] >= 0
            live, siblings = live[present], siblings[present]
            if not len(live):
                break
            child = siblings[:, rank]
            token = tokens[live, child]
            here = residual[live]  # rows v
            wanted = here.gather(1, token[:, None])[:, 0]
            if sampling is Sampling.ONE_HOT:
                rest, empty = norm(here.scatter(1, token[:, None], 0.0))
                keep = u[live, child] < wanted
            else:
                drawn_from = _drawn_from(proposal, live, siblings)
                drafted = drawn_from.gather(1, token[:, None])[:, 0]
                refuse_undrawable(drafted, token)
                rest, empty = minus(here, drawn_from)
                keep = u[live, child] < wanted / drafted
            residual[live] = rest
            # After an accepted child its own distribution counts; a residual emptied by rounding is
            # replaced by the distribution after its node.
            empty = empty & ~keep
            fallbacks += int(empty.sum())
            goal = child if proposal.merged_into is None else proposal.merged_into[live, child]
            node[live[keep]] = goal[keep]
            path[live[keep], step] = goal[keep]
            new = live[keep | empty]
            residual[new] = p[new, node[new] + 1].double()
            moved.append(live[keep])
            live = live[~(keep | empty)]
        live = torch.cat(moved) if moved else live[:0]
        if not len(live):
            break
    return Acceptance(path, (path >= 0).sum(1), draw(residual, u[:, n]), fallbacks)


def _drawn_from(proposal: Proposal, live: Tensor, siblings: Tensor) -> Tensor:
    """(rows v) the distribution that the last of some siblings was drawn from.

    Args:
        live: (rows) of the batch.
        siblings: (rows rank+1) nodes, in the order of the draw.
    """
    assert proposal.q is not None and proposal.q_rows is not None
    before, child = siblings[:, :-1], siblings[:, -1]
    q_rows = proposal.q_rows
    found = proposal.q[live, q_rows[live, child]].double()  # rows v
    if proposal.sampling is not Sampling.WOR:
        return found
    together = q_rows[live[:, None], before] == q_rows[live, child][:, None]
    return untried(found, torch.where(together, proposal.tokens[live[:, None], before], -1))
