"""Acceptance rules measured by chance: complete rounds from tables of distributions, many at once,
and how often each text came out.

A round is a row of the batch. Every seed has a generator and rows of its own, whose numbers do not
depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from drafttrain.flow import Acceptance, Proposal, Sampling
from drafttrain.nn.sampling import draw, draw_without_replacement
from drafttrain.tree.topology import Tree

TARGET = torch.tensor(
    [[0.2, 0.3, 0.4, 0.1], [0.5, 0.1, 0.2, 0.2], [0.1, 0.6, 0.1, 0.2], [0.25, 0.25, 0.2, 0.3]]
)
DRAFT = torch.tensor(
    [[0.5, 0.2, 0.2, 0.1], [0.2, 0.4, 0.3, 0.1], [0.3, 0.3, 0.3, 0.1], [0.1, 0.2, 0.3, 0.4]]
)
OTHER_DRAFT = torch.tensor(
    [[0.1, 0.1, 0.5, 0.3], [0.4, 0.1, 0.1, 0.4], [0.1, 0.3, 0.4, 0.2], [0.25, 0.25, 0.25, 0.25]]
)
CLOSE_DRAFT = torch.cat((torch.tensor([[0.3, 0.2, 0.2, 0.3]]), DRAFT[1:]))
"""Distributions of the next token by the last one. Under the close one a block's weights shrink a
residual without emptying it."""
TEXTS = (TARGET[0][:, None, None] * TARGET[:, :, None] * TARGET[None]).flatten().double()
"""(64) the target's distribution of the three tokens after token 0."""
TEXTS = TEXTS / TEXTS.sum()

Uniform = Callable[[int], Tensor]
"""k -> (rows k) uniform numbers."""
Round = Callable[[Tensor, Uniform], tuple[Tensor, Acceptance]]
"""(last token of each row, uniform numbers) -> (drafted tokens, what a rule kept of them)."""
Rule = Callable[[Tensor, Proposal, Tensor], Acceptance]


def grow(
    tree: Tree, sampling: Sampling, last: Tensor, uniform: Uniform, draft: Tensor = DRAFT
) -> Proposal:
    """Fill a tree from a draft table for rows whose last tokens are `last`."""
    text = torch.cat((last[:, None], last.new_zeros(len(last), tree.size)), 1)
    for node in range(-1, tree.size):
        children = tree.children(node)
        if not children:
            continue
        q = draft[text[:, node + 1]]
        u = uniform(len(children))
        if sampling is Sampling.ONE_HOT:
            drawn = q.argsort(dim=-1, descending=True, stable=True)[:, : len(children)]
        elif sampling is Sampling.WOR:
            drawn = draw_without_replacement(q, u)
        else:
            drawn = torch.stack([draw(q, u[:, j]) for j in range(len(children))], 1)
        text[:, [child + 1 for child in children]] = drawn
    parents = torch.tensor(tree.parents).expand(len(last), -1)
    return Proposal(text[:, 1:], parents, sampling, draft[text], parents + 1)


def grow_by_two(sampling: Sampling, last: Tensor, uniform: Uniform) -> Proposal:
    """Two children by one drafter, then two by another, which may repeat the first one's tokens."""
    distributions = torch.stack((DRAFT[last], OTHER_DRAFT[last]), 1)  # b r v
    u = uniform(4)
    if sampling is Sampling.WOR:
        drawn = [
            draw_without_replacement(distributions[:, r], u[:, 2 * r : 2 * r + 2]) for r in range(2)
        ]
        tokens = torch.cat(drawn, 1)
    else:
        tokens = torch.stack([draw(distributions[:, j // 2], u[:, j]) for j in range(4)], 1)
    rows = torch.tensor([0, 0, 1, 1]).expand(len(last), -1)
    return Proposal(tokens, torch.full_like(rows, -1), sampling, distributions, rows)


def judged(
    rule: Rule, proposal: Proposal, last: Tensor, uniform: Uniform
) -> tuple[Tensor, Acceptance]:
    p = TARGET[torch.cat((last[:, None], proposal.tokens), 1)]
    return proposal.tokens, rule(p, proposal, uniform(proposal.size + 1))


def rounds(
    rule: Rule,
    tree: Tree,
    sampling: Sampling,
    change: Callable[[Proposal], Proposal] = lambda found: found,
    draft: Tensor = DRAFT,
) -> Round:
    return lambda last, uniform: judged(
        rule, change(grow(tree, sampling, last, uniform, draft)), last, uniform
    )


def rounds_by_two(
    rule: Rule, sampling: Sampling, change: Callable[[Proposal], Proposal] = lambda found: found
) -> Round:
    return lambda last, uniform: judged(
        rule, change(grow_by_two(sampling, last, uniform)), last, uniform
    )


def three_tokens(one_round: Round, seeds: Sequence[int], rows: int) -> Tensor:
    """(seeds 64) how often each text of three tokens was written after token 0, by as many rounds
    as it takes."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    total = len(seeds) * rows
    text = torch.zeros(total, 16, dtype=torch.int64)
    length = torch.ones(total, dtype=torch.int64)
    while True:
        live = (length < 4).nonzero()[:, 0]
        if not len(live):
            break

        def uniform(k: int, live: Tensor = live) -> Tensor:
            drawn = [
                torch.rand(rows, k, generator=generator, dtype=torch.float64)
                for generator in generators
            ]
            return torch.cat(drawn)[live]

        tokens, kept = one_round(text[live, length[live] - 1], uniform)
        for step in range(kept.path.shape[1]):
            here = kept.count > step
            text[live[here], length[live[here]] + step] = tokens[here, kept.path[here, step]]
        text[live, length[live] + kept.count] = kept.next_token
        length[live] += kept.count + 1
    code = (text[:, 1:4] * torch.tensor([16, 4, 1])).sum(1) + 64 * torch.arange(total).div(
        rows, rounding_mode="floor"
    )
    return code.bincount(minlength=64 * len(seeds)).reshape(-1, 64)


def p_values(counts: Tensor) -> np.ndarray:
    """(seeds) by chi-square: chance that the target's distribution writes texts as unlike it as
    these."""
    expected = TEXTS.numpy()[None] * counts.sum(1, keepdim=True).numpy()
    return stats.chisquare(counts.numpy(), expected, axis=1).pvalue


def p_value(one_round: Round, rows: int, seed: int = 0) -> float:
    return float(p_values(three_tokens(one_round, [seed], rows))[0])


def total_variation(counts: Tensor) -> float:
    return float((counts.double() / counts.sum() - TEXTS).abs().sum()) / 2


def largest_variation(rows: int, level: float) -> float:
    """What the total variation of that many texts, written by the target itself, stays below with
    this probability."""
    shares = np.random.default_rng(0).multinomial(rows, TEXTS.numpy(), 50_000) / rows
    return float(np.quantile(np.abs(shares - TEXTS.numpy()).sum(1) / 2, level))
