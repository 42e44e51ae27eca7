"""Distributions and proposals that several tests of rules judge."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from drafttrain.flow import Acceptance, Proposal, Sampling
from drafttrain.nn.sampling import draw
from tests.decoding.exact import Vector, markov, vector

F = Fraction
P = vector(".2", ".3", ".4", ".1")
Q = vector(".5", ".2", ".2", ".1")
OTHER = vector(".1", ".1", ".5", ".3")
TOY_1 = (
    markov(
        vector(".5", ".3", ".2"),
        vector(".6", ".3", ".1"),
        vector(".2", ".5", ".3"),
        vector(".1", ".1", ".8"),
    ),
    markov(
        vector(".3", ".5", ".2"),
        vector(".4", ".4", ".2"),
        vector(".4", ".3", ".3"),
        vector(".3", ".3", ".4"),
    ),
)
TOY_2 = (
    markov(
        vector(".5", ".3", ".2"),
        vector(".6", ".3", ".1"),
        vector(".1", ".4", ".5"),
        vector(".1", ".1", ".8"),
    ),
    markov(
        vector(".3", ".5", ".2"),
        vector(".4", ".4", ".2"),
        vector(".7", ".1", ".2"),
        vector(".3", ".3", ".4"),
    ),
)


def first_token(probs: dict[tuple[int, ...], Fraction], v: int = 4) -> Vector:
    return tuple(
        sum((chance for text, chance in probs.items() if text[0] == token), F(0))
        for token in range(v)
    )


def random_parents(b: int, n: int, generator: torch.Generator) -> Tensor:
    limit = torch.arange(n) + 1
    return (torch.rand(b, n, generator=generator) * limit).long() - 1


def random_round(
    sampling: Sampling, b: int = 120, n: int = 8, v: int = 12, seed: int = 0
) -> tuple[Tensor, Proposal, Tensor]:
    """Rows with trees of different shapes."""
    generator = torch.Generator().manual_seed(seed)
    parents = random_parents(b, n, generator)
    p, q = (torch.randn(b, n + 1, v, generator=generator).mul(1.5).softmax(-1) for _ in range(2))
    q = (q + p) / 2
    order = torch.rand(b, n, v, generator=generator).argsort(-1)[..., 0]
    if sampling is not Sampling.IID:  # siblings get different tokens
        order = torch.stack([torch.randperm(v, generator=generator)[:n] for _ in range(b)])
    return (
        p,
        Proposal(order, parents, sampling, q, parents + 1),
        torch.rand(b, n + 1, generator=generator),
    )


def as_chain(proposal: Proposal) -> Proposal:
    b, n = proposal.tokens.shape
    chain = torch.arange(-1, n - 1).expand(b, n)
    return replace(proposal, parents=chain, q_rows=chain + 1)


def random_chain(
    sampling: Sampling = Sampling.IID, **sizes: int
) -> tuple[Tensor, Proposal, Tensor]:
    p, proposal, u = random_round(sampling, **sizes)
    return p, as_chain(proposal), u


def row_of(proposal: Proposal, row: int) -> Proposal:
    only = slice(row, row + 1)
    return replace(
        proposal,
        **{
            name: value[only] for name, value in vars(proposal).items() if isinstance(value, Tensor)
        },
    )


def retried(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """On one level: every child is judged by the original p, the last refusal leaves norm(max(0, p
    - q))."""
    rows = torch.arange(len(u))
    assert proposal.q is not None and proposal.q_rows is not None
    q, here = proposal.q[rows, proposal.q_rows[:, 0]].double(), p[:, 0].double()
    keep = u[:, :-1] < here.gather(1, proposal.tokens) / q.gather(1, proposal.tokens)
    child = torch.where(keep.any(1), keep.int().argmax(1), -1)
    weights = torch.where(
        keep.any(1)[:, None], p[rows, child + 1].double(), (here - q).clamp(min=0)
    )
    return Acceptance(child[:, None], (child >= 0).long(), draw(weights, u[:, -1]))
