"""SpecTr's rule for several independent drafts of one place: no residual in between, one common
discount instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drafttrain.decoding.rules.shared import check, deepest, refuse_undrawable
from drafttrain.errors import InputError
from drafttrain.flow import Acceptance, Proposal, Sampling
from drafttrain.later import torch
from drafttrain.nn.sampling import draw
from drafttrain.tree.topology import children_of, depths_of

if TYPE_CHECKING:
    from torch import Tensor

_HALVINGS = 24


def k_seq(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """Keep the first of k independent children x that passes with probability min(1, p(x) / (rho
    q(x))), the same rho for all.

    With beta = sum_x min(q, p / rho), one child stays with probability P = 1 - (1 - beta)^k; where
    none does, the token comes from norm(p - min(q, p / rho) P / beta). That is no distribution
    unless P <= rho beta; `smallest_rho` finds, for each node and its own k, the least rho that
    allows it. Children of a kept node are judged in the same way.

    Exact for the target's distribution: Sun et al. 2023 (SpecTr, arXiv:2310.15141), section 4 and
    Algorithm 2. Departs from it: applied at every node of a tree, not to complete drafts; where
    rounding leaves the residual empty, the token is drawn from p and counted in `fallbacks`. Keeps
    a little more than `multi_step` with independent children, less than `multi_step` without
    replacement.

    Args:
        p: (b n+1 v) target probabilities.
        proposal: any tree under Sampling.IID whose siblings share a row of q; rows may differ in
            shape.
        u: (b n+1) uniform numbers; u[:, i] judges node i.
    Returns: accepted path, count, and the token drawn from the last residual, or after a leaf from
    p.
    Raises: InputError on other drafts, or siblings of different rows of q; ValueError if a drafted
    token has q = 0.
    """
    b, n = check("k_seq", p, proposal, u, samplings=(Sampling.IID,))
    tokens = proposal.tokens
    u = u.to(p.device, torch.float64)
    table = children_of(proposal.parents)  # b n+1 k
    _refuse_several_rows(proposal, table)
    width = deepest(depths_of(proposal.parents))
    path = tokens.new_full((b, width), -1)
    node = tokens.new_full((b,), -1)
    residual = p[:, 0].to(torch.float64, copy=True)  # b v
    live = torch.arange(b, device=p.device)
    fallbacks = 0
    for step in range(width):
        children = table[live, node[live] + 1]  # rows k
        inner = children[:, 0] >= 0
        live, children = live[inner], children[inner]
        if not len(live):
            break
        assert proposal.q is not None and proposal.q_rows is not None
        q = proposal.q[live, proposal.q_rows[live, children[:, 0]]].double()
        present, children = children >= 0, children.clamp(min=0)
        place = live[:, None], children  # rows k
        passes, rest, empty = _try(residual[live], q, tokens[place], present, u[place])
        keep = passes.any(1)
        residual[live[~keep]] = torch.where(empty[:, None], residual[live[~keep]], rest)
        fallbacks += int(empty.sum())
        first = passes.int().argmax(1, keepdim=True)
        live, child = live[keep], children.gather(1, first)[keep, 0]
        node[live] = child
        path[live, step] = child
        residual[live] = p[live, child + 1].double()
    return Acceptance(path, (path >= 0).sum(1), draw(residual, u[:, n]), fallbacks)


def _try(
    p: Tensor, q: Tensor, tokens: Tensor, present: Tensor, u: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Try the children of one node of every row.

    Args:
        p, q: (b v) what is left of the target's probabilities, and those the children were drawn
            from.
        tokens, present, u: (b k) of the children, those that are there, and their numbers.
    Returns: (b k) bool, those that pass; of the rows where none does, (r v) what is left of p, and
        (r) bool where that is nothing.
    """
    drafted = q.gather(1, tokens)
    refuse_undrawable(drafted[present], tokens[present])
    rho = smallest_rho(p, q, present.sum(1))[:, None]
    passes = present & (u < p.gather(1, tokens) / (rho * drafted))
    none = ~passes.any(1)
    left = _left(p[none], q[none], rho[none], present[none].sum(1, keepdim=True))
    return passes, *left


def smallest_rho(p: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The least rho in [1, k] with 1 - (1 - beta)^k <= rho beta, beta = sum_x min(q, p / rho): what
    `k_seq` needs.

    Found by halving, and the upper end is given: a larger rho keeps a little less (here by at most
    k / 2^24 of rho), a smaller one would not be exact.

    Args:
        p, q: (b v) float64.
        k: (b) number of drafts.
    Returns: (b) float64.
    """

    def enough(rho: Tensor) -> Tensor:
        beta = overlap(p, q, rho)
        return kept_of(beta, k) <= rho * beta

    low = torch.ones_like(p[:, 0])
    high = torch.where(enough(low), low, k.double())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fits = enough(middle)
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    return high


def overlap(p: Tensor, q: Tensor, rho: Tensor) -> Tensor:
    """(b) beta: the probability that one draft passes; rounded probabilities may add up to a
    little more than 1."""
    return torch.minimum(q, p / rho[:, None]).sum(-1).clamp(max=1)


def kept_of(beta: Tensor, k: Tensor) -> Tensor:
    """(b) P: the probability that one of k drafts passes."""
    return 1 - (1 - beta) ** k


def _left(p: Tensor, q: Tensor, rho: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """What of p the drafts do not give, (b v), and (b) bool where nothing is left."""
    passed = torch.minimum(q, p / rho)  # b v
    beta = passed.sum(-1, keepdim=True).clamp(max=1)
    share = torch.where(beta > 0, kept_of(beta, k) / beta, 0)
    rest = (p - passed * share).clamp_(min=0)
    return rest, ~(rest.sum(-1) > 0)


def _refuse_several_rows(proposal: Proposal, table: Tensor) -> None:
    if not table.numel():
        return
    assert proposal.q_rows is not None
    drawn = proposal.q_rows.gather(1, table.clamp(min=0).flatten(1)).reshape(table.shape)
    if bool(((table >= 0) & (drawn != drawn[..., :1])).any()):
        raise InputError(
            "rule k_seq needs siblings drawn from one distribution, these have different rows of "
            "q, as from several drafters: use multi_step"
        )
