"""How likely the children of a node are kept, given the token that the text goes on with: `ratio`,
`block`, `multi_step` and `k_seq`, whose drafts are drawn.

At a node, p is the target's distribution and its children are drawn from q. Let m_j(v) be the
chance, over draws and uniform numbers, that the node's j-th child is the one kept *and* is v. The
rule is exact: a v comes with chance p(v) in all, from a child or as the correction. So of the texts
that go on with y, the share m_j(y) / p(y) kept it as child j; and one of the children is kept with
chance sum_j sum_v m_j(v), whatever the text goes on with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drafttrain.decoding.rules.spectr import kept_of, overlap, smallest_rho
from drafttrain.flow import Sampling
from drafttrain.later import torch
from drafttrain.nn.sampling import draw, untried

if TYPE_CHECKING:
    from torch import Tensor


def masses(
    rule: str, p: Tensor, q: Tensor, tokens: Tensor, k: int, sampling: Sampling, u: Tensor
) -> tuple[Tensor, Tensor]:
    """What a rule keeps of one node's k children.

    Args:
        rule: the name of one that judges drawn drafts; `block` is given q over its share, see
            `share_after`.
        p, q: (b v) float64.
        tokens: (b) int64, what the text goes on with.
        u: (b k-1) uniform numbers. Read under Sampling.WOR only, where what a child is drawn from
            depends on which children were refused before it.
    Returns: (b k) m_j of the token; (b) the chance that one of the children is kept. Under
    Sampling.WOR both are given the refused children that u draws, and right on average over u.
    """
    if rule == "k_seq":
        return _together(p, q, tokens, k)
    return _one_by_one(p, q, tokens, k, u if sampling is Sampling.WOR else None)


def share_after(share: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """b_i of `block` after a kept token, from b_{i-1} and the token's two probabilities, (b) each.

    Block verification keeps at least i drafts, and these are y_1..y_i, with chance q(y_1..y_i) b_i
    (Sun et al. 2024, arXiv:2403.10444, the lemma to Theorem 1). Over p(y_1..y_i) that is the share
    of the texts y_1..y_i in which it did: a product over places of min(1, (q(y_j) / b_{j-1}) /
    p(y_j)). So a place is that of `ratio` with q / b_{j-1} for q, and sum_v min(p, q / b_{j-1}) is
    its chance. What follows y_1..y_i does not depend on whether all i were kept: from there v comes
    as a kept draft with q(y_1..y_i) min(q(v), b_i p(v)), as the correction with q(y_1..y_i) max(0,
    b_i p(v) - q(v)), in all with a constant times p(v).
    """
    return torch.where(q > 0, (share * p / q).clamp(max=1), 1.0)


def _one_by_one(
    p: Tensor, q: Tensor, tokens: Tensor, k: int, u: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Child after child, each against what the earlier ones left.

    With r the part of p that is left, not made to add up to 1, c its sum (the chance that all
    earlier children were refused), and d what this child is drawn from: m = min(r, c d), and r - m
    is left. A refused child is v with chance c d(v) - m(v) over its sum; d of independent children
    does not depend on it. For whatever refused children, the m_j(v) and what is left in the end
    add up to p(v): the share m_j / p is never above 1.
    """
    left, refused = p, tokens.new_empty(len(tokens), 0)
    found, total = [], p.new_zeros(len(p))
    for rank in range(k):
        drawn_from = left.sum(-1, keepdim=True) * (q if u is None else untried(q, refused))
        mass = torch.minimum(left, drawn_from)
        found.append(mass.gather(1, tokens[:, None])[:, 0])
        total = total + mass.sum(-1)
        left = left - mass
        if u is not None and rank < k - 1:
            weights = drawn_from - mass
            # Where no child is ever refused, nothing is left of p, and any token does.
            never = ~(weights.sum(-1, keepdim=True) > 0)
            token = draw(torch.where(never, q, weights), u[:, rank])
            refused = torch.cat((refused, token[:, None]), 1)
    return torch.stack(found, 1), total


def _together(p: Tensor, q: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """SpecTr's: each of the children passes with chance beta, then it is v with min(q(v), p(v) /
    rho) / beta; the first that passes is kept."""
    count = torch.full_like(tokens, k)
    rho = smallest_rho(p, q, count)
    beta = overlap(p, q, rho)
    at = tokens[:, None]
    passes = torch.minimum(q.gather(1, at), p.gather(1, at) / rho[:, None])  # b 1
    earlier = (1 - beta[:, None]) ** torch.arange(k, device=p.device)
    return passes * earlier, kept_of(beta, count)
