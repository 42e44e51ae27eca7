"""Rules for chains drawn from the draft's distribution: token by token, and as one block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drafttrain.decoding.rules.shared import check, minus, refuse_undrawable
from drafttrain.flow import Acceptance, Proposal, Sampling
from drafttrain.later import torch
from drafttrain.nn.sampling import draw

if TYPE_CHECKING:
    from torch import Tensor


def ratio(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """Keep each drafted token of a chain with probability min(1, p/q); at the first refusal draw
    norm(max(0, p - q)).

    Exact for the target's distribution: Leviathan et al. 2023 (arXiv:2211.17192), Algorithm 1.
    Departs from it: where rounding leaves the residual empty, the token is drawn from p and counted
    in `fallbacks`.

    Args:
        p: (b n+1 v) target probabilities.
        proposal: a chain under Sampling.IID, with q.
        u: (b n+1) uniform numbers; u[:, i] judges node i.
    Returns: accepted path, count, and the correction or, if all n stay, the bonus token.
    Raises: InputError on a tree or other drafts; ValueError if a drafted token has q = 0.
    """
    b, n = check("ratio", p, proposal, u, samplings=(Sampling.IID,), chain=True)
    rows, u = torch.arange(b, device=p.device), u.to(p.device, torch.float64)
    if n == 0:
        return _bonus(p, proposal, u)
    assert proposal.q is not None and proposal.q_rows is not None
    wanted, drafted = _along(p, proposal)
    count = (u[:, :n] < wanted / drafted).long().cumprod(1).sum(1)  # b
    weights = p[rows, count].double()  # b v
    refused = rows[count < n]
    q = proposal.q[refused, proposal.q_rows[refused, count[refused]]].double()
    rest, empty = minus(weights[refused], q)
    weights[refused] = torch.where(empty[:, None], weights[refused], rest)
    return Acceptance(_prefix(count, n), count, draw(weights, u[:, n]), int(empty.sum()))


def block(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """Keep the longest prefix of a chain that its own trial accepts; a later token can rescue an
    earlier one.

    With p_i, q_i the distributions of drafted token x_i (i = 1..n) and p_{n+1} that of the token
    after the last:
        b_0 = 1, b_i = min(1, b_{i-1} p_i(x_i) / q_i(x_i)): how much of the prefix's mass the target
        still needs;
        w_i = max(0, b_i p_{i+1} - q_{i+1}), r_i its sum: what is left to do after i kept tokens;
        h_i = r_i / (r_i + 1 - b_i) for i < n (1 where that is 0/0), h_n = b_n: chance of the trial
        at i.
    The trials are independent, the largest i that succeeds is kept (h_0 = 1), and the next token
    comes from norm(w_i), after the full block from p_{n+1}. There is no early stop.

    b is taken in closed form, log b_i = S_i - max_{j <= i} S_j with S_i = sum_{j <= i} log(p_j(x_j)
    / q_j(x_j)) and S_0 = 0: a long chain of small ratios neither underflows on the way nor loses
    what comes after it. An r_i of 0 under b_i < 1 gives h_i = 0, so its empty residual is never
    drawn from.

    Exact for the target's distribution, and keeps at least as many tokens as `ratio` on average:
    Sun et al. 2024 (arXiv:2403.10444), Algorithm 2 and Theorems 1 and 2. With one token it is
    `ratio`. Departs from it: places are tried from the last backwards, so that only the residuals
    that are needed are computed; where rounding leaves a residual empty under b_i = 1, the token is
    drawn from p and counted in `fallbacks`.

    Args:
        p: (b n+1 v) target probabilities.
        proposal: a chain under Sampling.IID, with q.
        u: (b n+1) uniform numbers; u[:, i] is the trial of keeping nodes 0..i.
    Returns: accepted path, count, and the token drawn from the residual after it or, if all n
    stay, the bonus token.
    Raises: InputError on a tree or other drafts; ValueError if a drafted token has q = 0.
    """
    b, n = check("block", p, proposal, u, samplings=(Sampling.IID,), chain=True)
    rows, u = torch.arange(b, device=p.device), u.to(p.device, torch.float64)
    if n == 0:
        return _bonus(p, proposal, u)
    assert proposal.q is not None and proposal.q_rows is not None
    weight = _joint(*_along(p, proposal))  # b n+1
    count = proposal.tokens.new_full((b,), n)
    residual = p[:, n].to(torch.float64, copy=True)  # b v
    fallbacks = 0
    undecided = rows[u[:, n - 1] >= weight[:, n]]
    for kept in range(n - 1, -1, -1):
        if not len(undecided):
            break
        here = p[undecided, kept].double()  # rows v
        share = weight[undecided, kept]
        q = proposal.q[undecided, proposal.q_rows[undecided, kept]].double()
        rest = (share[:, None] * here - q).clamp_(min=0)
        mass = rest.sum(-1)
        stays = torch.ones_like(undecided, dtype=torch.bool)
        if kept:
            stays = u[undecided, kept - 1] < _trial(mass, share)
        empty = ~(mass > 0)
        residual[undecided[stays]] = torch.where(empty[:, None], here, rest)[stays]
        count[undecided[stays]] = kept
        fallbacks += int((stays & empty).sum())
        undecided = undecided[~stays]
    return Acceptance(_prefix(count, n), count, draw(residual, u[:, n]), fallbacks)


def kept_on_average(p: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
    """How many tokens of these very chains `ratio` and `block` keep, on average over their uniform
    numbers.

    Two rules compared so differ by what they do, not by which drafts or numbers each happened to
    get.

    Args:
        p: (b n+1 v) target probabilities.
        proposal: a chain under Sampling.IID, with q.
    Returns: (b) for `ratio` and (b) for `block`, float64, between 0 and n; a row of `block` may be
        below that of `ratio`, the average over chains drawn from q does not (arXiv:2403.10444,
        Theorem 2).
    Raises: as the rules.
    """
    b, n = check(
        "ratio",
        p,
        proposal,
        p.new_zeros(len(p), proposal.size + 1),
        samplings=(Sampling.IID,),
        chain=True,
    )
    if n == 0:
        return p.new_zeros(b, dtype=torch.float64), p.new_zeros(b, dtype=torch.float64)
    assert proposal.q is not None and proposal.q_rows is not None
    wanted, drafted = _along(p, proposal)
    by_token = (wanted / drafted).clamp(max=1).cumprod(1).sum(1)
    weight = _joint(wanted, drafted)  # b n+1
    rows = torch.arange(b, device=p.device)
    by_block = torch.zeros_like(by_token)
    fails = 1 - weight[:, n]  # that every trial from here to the end does
    by_block += 1 - fails
    for kept in range(n - 1, 0, -1):
        q = proposal.q[rows, proposal.q_rows[:, kept]].double()
        mass = (weight[:, kept, None] * p[:, kept].double() - q).clamp_(min=0).sum(-1)
        fails = fails * (1 - _trial(mass, weight[:, kept]))
        by_block += 1 - fails
    return by_token, by_block


def _trial(mass: Tensor, share: Tensor) -> Tensor:
    """h_i of `block`: r_i / (r_i + 1 - b_i), 1 where that is 0/0."""
    return (mass / (mass + 1 - share)).nan_to_num(nan=1.0)


def _along(p: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
    """Target's and draft's probability of every token of a chain, (b n) float64 each."""
    assert proposal.q is not None and proposal.q_rows is not None
    rows = torch.arange(len(p), device=p.device)[:, None]
    steps = torch.arange(proposal.size, device=p.device)
    wanted = p[rows, steps, proposal.tokens].double()
    drafted = proposal.q[rows, proposal.q_rows, proposal.tokens].double()
    refuse_undrawable(drafted, proposal.tokens)
    return wanted, drafted


def _joint(wanted: Tensor, drafted: Tensor) -> Tensor:
    """(b n+1) b_0..b_n of `block`, from the two probabilities of each token."""
    sums = torch.nn.functional.pad((wanted.log() - drafted.log()).cumsum(1), (1, 0))  # b n+1
    return (sums - sums.cummax(1).values).exp()


def _prefix(count: Tensor, n: int) -> Tensor:
    steps = torch.arange(n, device=count.device)
    return torch.where(steps < count[:, None], steps, -1)  # b n


def _bonus(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """What follows no drafts at all."""
    tokens = proposal.tokens
    return Acceptance(tokens, tokens.new_zeros(len(tokens)), draw(p[:, 0], u[:, 0]))
