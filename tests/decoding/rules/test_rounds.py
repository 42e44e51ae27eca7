"""Complete rounds of every rule: the right rule writes the target's distribution, planted mistakes
do not.

A million rounds per rule and 200 seeds each are marked slow:
    python -m pytest -m slow tests/decoding/rules/test_rounds.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor

from drafttrain.decoding.rules import (
    GUARANTEES,
    block,
    k_seq,
    multi_step,
    one_hot,
    ratio,
    sample_and_match,
    spectr,
)
from drafttrain.flow import Acceptance, Proposal, Sampling
from drafttrain.nn.sampling import draw
from drafttrain.tree.topology import Tree
from tests.decoding.rounds import (
    CLOSE_DRAFT,
    Round,
    Uniform,
    grow,
    judged,
    largest_variation,
    p_value,
    p_values,
    rounds,
    rounds_by_two,
    three_tokens,
    total_variation,
)
from tests.decoding.rules.cases import retried

CHAIN, FORK, TWO = Tree.chain(2), Tree.expansion([2, 2]), Tree.expansion([2])
IRREGULAR = Tree.from_paths([[0], [1], [2], [0, 0], [0, 0, 0], [1, 0], [1, 1]])
RIGHT: dict[str, tuple[str, Round]] = {
    "ratio": ("ratio", rounds(ratio, CHAIN, Sampling.IID)),
    "block": ("block", rounds(block, Tree.chain(3), Sampling.IID, draft=CLOSE_DRAFT)),
    "multi_step, independent": ("multi_step", rounds(multi_step, FORK, Sampling.IID)),
    "multi_step, without replacement": ("multi_step", rounds(multi_step, FORK, Sampling.WOR)),
    "multi_step, irregular": ("multi_step", rounds(multi_step, IRREGULAR, Sampling.WOR)),
    "multi_step, two drafters, independent": (
        "multi_step",
        rounds_by_two(multi_step, Sampling.IID),
    ),
    "multi_step, two drafters, without replacement": (
        "multi_step",
        rounds_by_two(multi_step, Sampling.WOR),
    ),
    "one_hot": ("one_hot", rounds(one_hot, FORK, Sampling.ONE_HOT)),
    "k_seq": ("k_seq", rounds(k_seq, FORK, Sampling.IID)),
    "sample_and_match, most likely": (
        "sample_and_match",
        rounds(sample_and_match, FORK, Sampling.ONE_HOT),
    ),
    "sample_and_match, drawn": ("sample_and_match", rounds(sample_and_match, FORK, Sampling.IID)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_rounds_write_the_targets_distribution(name: str) -> None:
    assert p_value(RIGHT[name][1], 50_000) > 1e-3


# --- mistakes ---


def with_sampling(sampling: Sampling):
    return lambda found: replace(found, sampling=sampling)


def rows_of(p: Tensor) -> Tensor:
    return torch.arange(len(p))


def resampled_from_p(rule):
    """What follows a refusal is drawn from p, not from the residual."""

    def mistaken(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
        kept = rule(p, proposal, u)
        last = kept.path.gather(1, (kept.count - 1).clamp(min=0)[:, None])[:, 0]
        place = torch.where(kept.count > 0, last + 1, 0)
        return Acceptance(kept.path, kept.count, draw(p[rows_of(p), place], u[:, -1]))

    return mistaken


def sharpened(rule):
    """The rule reads a colder q than the one drawn from."""

    def mistaken(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
        assert proposal.q is not None
        return rule(
            p, replace(proposal, q=proposal.q**2 / (proposal.q**2).sum(-1, keepdim=True)), u
        )

    return mistaken


def late_rows(rule):
    """Each token is judged by the distribution after it, not by the one it came from: a shift by
    one."""

    def mistaken(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
        kept = rule(torch.cat((p[:, 1:], p[:, -1:]), 1), proposal, u)
        return Acceptance(kept.path, kept.count, draw(p[rows_of(p), kept.count], u[:, -1]))

    return mistaken


def one_number(rule):
    """All places share one uniform number."""
    return lambda p, proposal, u: rule(p, proposal, u[:, :1].expand_as(u))


def in_blocks(
    p: Tensor, proposal: Proposal, u: Tensor, *, clipped=True, weighted=True, stops=False
) -> Acceptance:
    """Block verification as the paper writes it, with mistakes to choose from: the running product
    not clipped, the residual max(0, p - q) without b, an end at the first trial that fails."""
    rows, n = rows_of(p), proposal.size
    assert proposal.q is not None and proposal.q_rows is not None
    p, q = p.double(), proposal.q[rows[:, None], proposal.q_rows].double()
    b = torch.ones(len(p), dtype=torch.float64)
    count, going = torch.zeros(len(p), dtype=torch.int64), torch.ones(len(p), dtype=torch.bool)
    residuals, product = [(p[:, 0] - q[:, 0]).clamp(min=0)], b
    for i in range(1, n + 1):
        token = proposal.tokens[:, i - 1]
        step = p[rows, i - 1, token] / q[rows, i - 1, token]
        product = product * step
        b = (b * step).clamp(max=1) if clipped else product.clamp(max=1)
        if i == n:
            chance = b
            residuals.append(p[:, n])
        else:
            left = (b[:, None] * p[:, i] - q[:, i]).clamp(min=0)
            chance = (left.sum(-1) / (left.sum(-1) + 1 - b)).nan_to_num(nan=1.0)
            residuals.append(left if weighted else (p[:, i] - q[:, i]).clamp(min=0))
        passes = u[:, i - 1] < chance
        going &= passes
        count = torch.where(going if stops else passes, i, count)
    left = torch.stack(residuals, 1)[rows, count]
    left = torch.where((left.sum(-1) > 0)[:, None], left, p[rows, count])
    steps = torch.arange(n)
    return Acceptance(torch.where(steps < count[:, None], steps, -1), count, draw(left, u[:, n]))


def not_renormalised(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """On one level: each most likely child stays with p(x), though the target's mass of those
    before it is gone."""
    keep = u[:, :-1] < p[:, 0].gather(1, proposal.tokens)
    child = torch.where(keep.any(1), keep.int().argmax(1), -1)
    left = p[:, 0].scatter(1, proposal.tokens, 0)
    weights = torch.where(keep.any(1)[:, None], p[rows_of(p), child + 1], left)
    return Acceptance(child[:, None], (child >= 0).long(), draw(weights, u[:, -1]))


def in_order(key, keep: int = 2):
    """Children of a one-level tree sorted by a falling key, the first few kept."""

    def change(found: Proposal) -> Proposal:
        order = key(found).argsort(dim=-1, descending=True, stable=True)[:, :keep]
        assert found.q_rows is not None
        return replace(
            found,
            tokens=found.tokens.gather(1, order),
            parents=found.parents[:, :keep],
            q_rows=found.q_rows.gather(1, order),
        )

    return change


def confidence(found: Proposal) -> Tensor:
    assert found.q is not None and found.q_rows is not None
    return found.q[torch.arange(len(found.tokens))[:, None], found.q_rows, found.tokens]


def repeats_dropped(last: Tensor, uniform: Uniform) -> tuple[Tensor, Acceptance]:
    """A sibling that repeats a token is left out, and the rest is judged as independent."""
    found = grow(TWO, Sampling.IID, last, uniform)
    repeated, u = found.tokens[:, 0] == found.tokens[:, 1], uniform(3)
    path, following = (
        torch.empty(len(last), 1, dtype=torch.int64),
        torch.empty(len(last), dtype=torch.int64),
    )
    assert found.q is not None and found.q_rows is not None
    for rows, n in ((repeated, 1), (~repeated, 2)):
        part = Proposal(
            found.tokens[rows, :n],
            found.parents[rows, :n],
            Sampling.IID,
            found.q[rows],
            found.q_rows[rows, :n],
        )
        kept = judged(multi_step, part, last[rows], lambda k, rows=rows: u[rows][:, -k:])[1]
        path[rows], following[rows] = kept.path, kept.next_token
    return found.tokens, Acceptance(path, (path >= 0).sum(1), following)


def one_row_of_q(found: Proposal) -> Proposal:
    """Both drafters' children are said to come from the first one's distribution."""
    assert found.q_rows is not None
    return replace(found, q_rows=torch.zeros_like(found.q_rows))


def discounted(*, rho: float | None = None, share: bool = True, left=None):
    """k-seq on one level, with a rho of its own, or a residual that forgets how often k drafts
    pass, or another one."""

    def mistaken(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
        rows, k = rows_of(p), torch.full((len(p),), proposal.size)
        assert proposal.q is not None
        here, q = p[:, 0].double(), proposal.q[:, 0].double()
        right = spectr.smallest_rho(here, q, k)[:, None]
        used = right if rho is None else torch.full_like(right, rho)
        keep = u[:, :-1] < here.gather(1, proposal.tokens) / (used * q.gather(1, proposal.tokens))
        child = torch.where(keep.any(1), keep.int().argmax(1), -1)
        rest = (
            spectr._left(here, q, used, k[:, None])[0]
            if share
            else here - torch.minimum(q, here / used)
        )
        rest = left(here, q) if left else rest
        weights = torch.where(keep.any(1)[:, None], p[rows, child + 1].double(), rest)
        return Acceptance(child[:, None], (child >= 0).long(), draw(weights, u[:, -1]))

    return mistaken


SHUFFLE = torch.Generator().manual_seed(7)
MISTAKES: dict[str, tuple[str, Round]] = {
    "ratio: resampled from p": ("ratio", rounds(resampled_from_p(ratio), CHAIN, Sampling.IID)),
    "ratio: sharpened q": ("ratio", rounds(sharpened(ratio), CHAIN, Sampling.IID)),
    "ratio: one number for all places": ("ratio", rounds(one_number(ratio), CHAIN, Sampling.IID)),
    "ratio: rows late by one": ("ratio", rounds(late_rows(ratio), CHAIN, Sampling.IID)),
    "block: an end at the first failure": (
        "block",
        rounds(
            lambda *given: in_blocks(*given, stops=True), CHAIN, Sampling.IID, draft=CLOSE_DRAFT
        ),
    ),
    "block: the token rule's residual": (
        "block",
        rounds(
            lambda *given: in_blocks(*given, weighted=False), CHAIN, Sampling.IID, draft=CLOSE_DRAFT
        ),
    ),
    "block: a product that is not clipped": (
        "block",
        rounds(
            lambda *given: in_blocks(*given, clipped=False), CHAIN, Sampling.IID, draft=CLOSE_DRAFT
        ),
    ),
    "block: resampled from p": ("block", rounds(resampled_from_p(block), CHAIN, Sampling.IID)),
    "block: sharpened q": ("block", rounds(sharpened(block), CHAIN, Sampling.IID)),
    "multi_step: retried against p": ("multi_step", rounds(retried, TWO, Sampling.IID)),
    "multi_step: repeats dropped": ("multi_step", repeats_dropped),
    "multi_step: without replacement, judged as independent": (
        "multi_step",
        rounds(multi_step, FORK, Sampling.WOR, with_sampling(Sampling.IID)),
    ),
    "multi_step: most likely judged by p/q": (
        "multi_step",
        rounds(multi_step, FORK, Sampling.ONE_HOT, with_sampling(Sampling.IID)),
    ),
    "multi_step: sorted by q": (
        "multi_step",
        rounds(multi_step, TWO, Sampling.WOR, in_order(confidence)),
    ),
    "multi_step: shuffled": (
        "multi_step",
        rounds(
            multi_step,
            TWO,
            Sampling.WOR,
            in_order(lambda found: torch.rand(found.tokens.shape, generator=SHUFFLE)),
        ),
    ),
    "multi_step: three drawn, the two most confident kept": (
        "multi_step",
        rounds(multi_step, Tree.expansion([3]), Sampling.WOR, in_order(confidence)),
    ),
    "multi_step: two drafters as one": (
        "multi_step",
        rounds_by_two(multi_step, Sampling.IID, one_row_of_q),
    ),
    "multi_step: two drafters ordered by confidence": (
        "multi_step",
        rounds_by_two(multi_step, Sampling.IID, in_order(confidence, keep=4)),
    ),
    "one_hot: resampled from p": (
        "one_hot",
        rounds(resampled_from_p(one_hot), FORK, Sampling.ONE_HOT),
    ),
    "one_hot: not renormalised": ("one_hot", rounds(not_renormalised, TWO, Sampling.ONE_HOT)),
    "one_hot: one number for all places": (
        "one_hot",
        rounds(one_number(one_hot), FORK, Sampling.ONE_HOT),
    ),
    "one_hot: rows late by one": ("one_hot", rounds(late_rows(one_hot), CHAIN, Sampling.ONE_HOT)),
    "k_seq: rho = 1": ("k_seq", rounds(discounted(rho=1.0), TWO, Sampling.IID)),
    "k_seq: a residual for one draft": (
        "k_seq",
        rounds(discounted(share=False), TWO, Sampling.IID),
    ),
    "k_seq: the ratio's residual": (
        "k_seq",
        rounds(discounted(left=lambda p, q: (p - q).clamp(min=0)), TWO, Sampling.IID),
    ),
    "k_seq: resampled from p": ("k_seq", rounds(resampled_from_p(k_seq), FORK, Sampling.IID)),
    "sample_and_match: drawn again after a mismatch": (
        "sample_and_match",
        rounds(resampled_from_p(sample_and_match), FORK, Sampling.ONE_HOT),
    ),
    "sample_and_match: one number for all places": (
        "sample_and_match",
        rounds(one_number(sample_and_match), FORK, Sampling.ONE_HOT),
    ),
    "sample_and_match: rows late by one": (
        "sample_and_match",
        rounds(late_rows(sample_and_match), CHAIN, Sampling.ONE_HOT),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_rounds_notice_a_mistake(name: str) -> None:
    assert p_value(MISTAKES[name][1], 100_000) < 1e-6


def test_every_exact_rule_is_tried_right_and_in_three_wrong_ways() -> None:
    exact = {name for name, guarantee in GUARANTEES.items() if guarantee == "distribution"}
    assert {rule for rule, _ in RIGHT.values()} == exact
    for rule in exact:
        assert sum(name == rule for name, _ in MISTAKES.values()) >= 3


def test_block_verification_as_the_paper_writes_it_agrees() -> None:
    generator = torch.Generator().manual_seed(3)

    def uniform(k: int) -> Tensor:
        return torch.rand(20_000, k, generator=generator, dtype=torch.float64)

    last = torch.randint(4, (20_000,), generator=generator)
    proposal = grow(Tree.chain(4), Sampling.IID, last, uniform)
    u = uniform(5)
    found = [judged(rule, proposal, last, lambda k: u[:, :k])[1] for rule in (block, in_blocks)]
    for name in ("path", "count", "next_token"):
        assert torch.equal(*(getattr(one, name) for one in found))
    assert found[0].count.unique().tolist() == [0, 1, 2, 3, 4]


# --- a million rounds ---

SEEDS, ROWS_PER_SEED, PART = 200, 5_000, 25
ALARM = 0.01
"""A right rule's p value is below this for one seed in a hundred."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_million_rounds_and_200_seeds(name: str) -> None:
    parts = [range(start, start + PART) for start in range(0, SEEDS, PART)]
    counts = torch.cat([three_tokens(RIGHT[name][1], seeds, ROWS_PER_SEED) for seeds in parts])
    assert counts.sum() == SEEDS * ROWS_PER_SEED == 1_000_000
    assert total_variation(counts.sum(0)) < largest_variation(1_000_000, 0.999)
    found = p_values(counts)
    alarms = int((found < ALARM).sum())
    assert alarms <= stats.binom.ppf(0.999, SEEDS, ALARM)
    assert stats.kstest(found, "uniform").pvalue > 1e-3
