"""Rules that give up the target's distribution for longer runs. What they write is labelled
approximate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from drafttrain.decoding.rules.shared import check, deepest, path_to
from drafttrain.errors import InputError
from drafttrain.flow import Acceptance, Proposal, Sampling
from drafttrain.later import torch
from drafttrain.tree.topology import children_of, depths_of

if TYPE_CHECKING:
    from torch import Tensor

EPSILON, DELTA = 0.09, 0.3
"""Medusa's thresholds (Cai et al. 2024, arXiv:2401.10774, section 3.3.2): delta is the root of
epsilon."""


def typical(
    p: Tensor, proposal: Proposal, u: Tensor, *, epsilon: float = EPSILON, delta: float = DELTA
) -> Acceptance:
    """Keep a drafted token whose target probability is above min(epsilon, delta exp(-H)), H the
    entropy of its distribution in nats.

    A token must be likely outright, or likely enough where the target itself is undecided. The
    longest path of such tokens wins, among equals the one with the largest product of
    probabilities, then the lowest index. The token after it is the target's argmax: the rule uses
    no chance, and its text does not have the target's distribution.

    Cai et al. 2024 (Medusa, arXiv:2401.10774), section 2.3.1, as the public code does by default.
    Departs from it: nowhere; the first token of an answer, drawn by the decoding loop before any
    draft, is not up to a rule.

    Args:
        p: (b n+1 v) target probabilities.
        proposal: any tree, drawn in any way; rows may differ in shape; q is not read.
        u: (b n+1) uniform numbers; none is used.
        epsilon, delta: at least 0. Lower values keep more and stray further.
    Returns: accepted path, count, and the argmax after it.
    Raises: InputError if shapes disagree or a threshold is negative.
    """
    check_thresholds(epsilon, delta)
    b, n = check("typical", p, proposal, u, samplings=tuple(Sampling), reads_q=False)
    tokens, parents = proposal.tokens, proposal.parents
    children = children_of(parents)  # b n+1 k
    depths = depths_of(parents)  # b n
    # log probability of the path to each node reached
    score = p.new_full((b, n + 1), -math.inf, dtype=torch.float64)
    score[:, 0] = 0
    for node in range(n):  # the anchor is row 0, and a parent's index is below its children's
        live = ((score[:, node] > -math.inf) & (children[:, node] >= 0).any(-1)).nonzero()[:, 0]
        if not len(live):
            continue
        probs = p[live, node].double()  # rows v
        threshold = (-torch.special.entr(probs).sum(-1)).exp().mul(delta).clamp(max=epsilon)
        there = children[live, node]  # rows k
        rows, ranks = (there >= 0).nonzero(as_tuple=True)
        child = there[rows, ranks]
        chance = probs[rows, tokens[live[rows], child]]
        passes = chance > threshold[rows]
        rows, child, chance = live[rows[passes]], child[passes], chance[passes]
        score[rows, child + 1] = score[rows, node] + chance.log()
    reached = torch.where(score[:, 1:] > -math.inf, depths, 0)  # b n
    count = reached.amax(1) if n else tokens.new_zeros(b)
    best = score.masked_fill(torch.nn.functional.pad(reached, (1, 0)) < count[:, None], -math.inf)
    leaf = best.argmax(1) - 1  # b, the first of equals; -1 is the anchor
    rows = torch.arange(b, device=p.device)
    path = path_to(leaf, count, parents, deepest(depths))
    return Acceptance(path, count, p[rows, leaf + 1].argmax(-1))


def check_thresholds(epsilon: float, delta: float) -> None:
    """Raise InputError unless both are finite numbers of at least 0."""
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if not (value >= 0 and math.isfinite(value)):
            raise InputError(
                f"rule typical has {name} {value}, needs a finite number of at least 0"
            )
