"""An acceptance rule applied to a batch whose rows may have drafted different numbers of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.decoding import rules
from drafttrain.flow import Acceptance, Proposal
from drafttrain.nn.sampling import Policy, draw


def judge(
    said: Tensor, proposal: Proposal, u: Tensor | None, policy: Policy, rule: str
) -> Acceptance:
    """Apply a rule to rows of one size at a time: a rule never sees padding, and a row's numbers
    depend only on its own size.

    Args:
        said: what the target says after the anchor (row 0) and after node i (row i + 1): at
            temperature 0 the token that it chooses, (b n+1), else logits, (b n+1 v).
        u: (b m) uniform numbers, of which each row reads its last ones, one more than its nodes;
            None at temperature 0.
        rule: its name.
    """
    sizes = [proposal.size] if proposal.counts is None else proposal.counts.unique().tolist()
    if proposal.counts is None or sizes == [proposal.size]:
        return _judge(said, proposal, u, policy, rule)
    path = proposal.tokens.new_full(proposal.tokens.shape, -1)
    count, following = torch.zeros_like(proposal.counts), torch.zeros_like(proposal.counts)
    fallbacks = 0
    for size in sizes:
        rows = (proposal.counts == size).nonzero()[:, 0]
        numbers = None if u is None else u[rows]
        part = proposal.part(rows, size)
        some = _judge(said[rows, : size + 1], part, numbers, policy, rule)
        path[rows, : some.path.shape[1]] = some.path
        count[rows], following[rows] = some.count, some.next_token
        fallbacks += some.fallbacks
    return Acceptance(path, count, following, fallbacks)


def _judge(
    said: Tensor, proposal: Proposal, u: Tensor | None, policy: Policy, rule: str
) -> Acceptance:
    """Apply a rule to a proposal without padding."""
    if policy.greedy:
        return rules.greedy(said, proposal)
    assert u is not None
    p = policy.probs(said)
    if not proposal.size:
        none = torch.zeros(len(p), dtype=torch.int64, device=p.device)
        return Acceptance(proposal.tokens, none, draw(p[:, 0], u[:, -1]))
    return rules.named(rule)(p, proposal, u[:, -(proposal.size + 1) :])
