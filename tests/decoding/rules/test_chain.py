"""Rules for chains, by exact enumeration: the ratio rule (Leviathan et al. 2023) and block
verification (Sun et al. 2024)."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from drafttrain.decoding.rules import block, multi_step, ratio
from drafttrain.decoding.rules.chain import _joint, kept_on_average
from drafttrain.errors import InputError
from drafttrain.flow import Acceptance, Proposal, Sampling
from drafttrain.nn.sampling import draw
from drafttrain.tree.topology import Tree
from tests.decoding.exact import (
    Table,
    Vector,
    block_grid,
    cases,
    constant,
    continued,
    draws,
    grid,
    in_blocks,
    measure,
    norm,
    pinned,
    siblings,
    text_distribution,
    vector,
)
from tests.decoding.rules.cases import TOY_1, TOY_2, F, P, Q, first_token, random_chain, row_of
from tests.messages import said

SIZES = {ratio: grid, multi_step: grid, block: block_grid}


@pytest.mark.parametrize("rule", SIZES)
@pytest.mark.parametrize(
    ("p", "q", "residual"),
    [
        (P, Q, (F(0), F(1, 10), F(1, 5), F(0))),
        (vector(".4", ".35", ".25"), vector(".7", ".2", ".1"), (F(0), F(3, 20), F(3, 20))),
    ],
)
def test_one_step_accepts_the_overlap_and_adds_the_residual(
    rule, p: Vector, q: Vector, residual: Vector
) -> None:
    probs, accepted = measure(
        rule, cases(Tree.chain(1), constant(q), Sampling.IID), constant(p), SIZES[rule]
    )
    assert accepted == F(7, 10) == sum(map(min, p, q))
    assert first_token(probs, len(p)) == p
    kept = tuple(
        sum((c for t, c in probs.items() if t[0] == x and len(t) == 2), F(0)) for x in range(len(p))
    )
    assert kept == tuple(map(min, p, q))
    assert tuple(probs.get((x,), F(0)) for x in range(len(p))) == residual


@pytest.mark.parametrize("rule", [ratio, multi_step])
def test_chain_without_context_emits_the_geometric_sum(rule) -> None:
    p, q = constant(vector(".4", ".35", ".25")), constant(vector(".7", ".2", ".1"))
    probs, accepted = measure(rule, cases(Tree.chain(3), q, Sampling.IID), p)
    assert accepted + 1 == F(2533, 1000) == (1 - F(7, 10) ** 4) / (1 - F(7, 10))
    assert continued(probs, p, 4) == text_distribution(p, 4)


@pytest.mark.parametrize("rule", [ratio, multi_step])
def test_chain_with_context_is_exact(rule) -> None:
    p, q = TOY_1
    probs, accepted = measure(rule, cases(Tree.chain(2), q, Sampling.IID), p)
    assert accepted == F(7, 5)
    assert continued(probs, p, 3) == text_distribution(p, 3)


# --- block verification ---


@pytest.mark.parametrize(("rule", "accepted"), [(ratio, F(10, 9)), (block, F(11, 9))])
def test_the_papers_example(rule, accepted: Fraction) -> None:
    p, q = constant(vector("1/3", "2/3")), constant(vector("2/3", "1/3"))
    probs, found = measure(rule, cases(Tree.chain(2), q, Sampling.IID), p, SIZES[rule])
    assert found == accepted
    assert continued(probs, p, 3) == text_distribution(p, 3)


def kept_by(
    rule, drafts, p: Table, v: int
) -> dict[tuple[int, ...], tuple[list[Fraction], list[Vector | None]]]:
    """For each draft the distribution of how many tokens stay, and for each number the distribution
    of the token after them."""
    found = {}
    for case in drafts:
        counts: dict[int, list[Fraction]] = defaultdict(lambda: [F(0)] * v)
        for text, chance in measure(rule, [case], p, SIZES[rule])[0].items():
            counts[len(text) - 1][text[-1]] += chance / case.chance
        sums = [sum(counts[i], F(0)) if i in counts else F(0) for i in range(case.tree.size + 1)]
        distributions = [norm(counts[i]) if share else None for i, share in enumerate(sums)]
        found[case.tokens] = (sums, distributions)
    return found


def test_the_papers_example_draft_by_draft() -> None:
    p, q = constant(vector("1/3", "2/3")), constant(vector("2/3", "1/3"))
    drafts = list(cases(Tree.chain(2), q, Sampling.IID))
    found = {tokens: sums for tokens, (sums, _) in kept_by(block, drafts, p, 2).items()}
    assert found == {
        (0, 0): [F(3, 4), 0, F(1, 4)],
        (0, 1): [0, 0, 1],
        (1, 0): [0, F(1, 2), F(1, 2)],
        (1, 1): [0, 0, 1],
    }
    assert {case.tokens: case.chance for case in drafts} == {
        (0, 0): F(4, 9), (0, 1): F(2, 9), (1, 0): F(2, 9), (1, 1): F(1, 9),
    }  # fmt: skip


FIRST, LAST = (F(1), F(0), F(0)), (F(0), F(0), F(1))
TABLE = {
    # draft: probability, b, h, distribution of the kept count, distribution of the next token after
    # 0 and after 1
    (0, 0): ("3/25", "1 1 1", "1 1 1", "0 0 1", None, None),
    (0, 1): ("3/25", "1 1 3/4", "1 1 3/4", "0 1/4 3/4", None, FIRST),
    (0, 2): ("3/50", "1 1 1/2", "1 1 1/2", "0 1/2 1/2", None, FIRST),
    (1, 0): (
        "7/20",
        "1 3/5 3/35",
        "1 3/8 3/35",
        "4/7 12/35 3/35",
        FIRST,
        (F(0), F(7, 12), F(5, 12)),
    ),
    (1, 1): ("1/20", "1 3/5 1", "1 3/8 1", "0 0 1", None, None),
    (1, 2): ("1/10", "1 3/5 1", "1 3/8 1", "0 0 1", None, None),
    (2, 0): ("3/50", "1 1 1/3", "1 1 1/3", "0 2/3 1/3", None, LAST),
    (2, 1): ("3/50", "1 1 1/3", "1 1 1/3", "0 2/3 1/3", None, LAST),
    (2, 2): ("2/25", "1 1 1", "1 1 1", "0 0 1", None, None),
}


def test_every_draft_of_a_toy_with_context() -> None:
    p, q = TOY_2
    drafts = list(cases(Tree.chain(2), q, Sampling.IID))
    found = kept_by(block, drafts, p, 3)
    assert found.keys() == TABLE.keys()
    for case in drafts:
        chance, b, h, counts, *after = TABLE[case.tokens]
        replayed = in_blocks(case, p)
        assert case.chance == F(chance)
        assert (replayed.b, replayed.h) == tuple(tuple(map(F, words.split())) for words in (b, h))
        sums, distributions = found[case.tokens]
        assert sums == list(map(F, counts.split())) == replayed.chances
        assert distributions[:2] == after


@pytest.mark.parametrize(("rule", "accepted"), [(ratio, F(32, 25)), (block, F(67, 50))])
def test_a_toy_with_context(rule, accepted: Fraction) -> None:
    p, q = TOY_2
    probs, found = measure(rule, cases(Tree.chain(2), q, Sampling.IID), p, SIZES[rule])
    assert found == accepted
    assert continued(probs, p, 3) == text_distribution(p, 3)


def random_table(draw_from: random.Random, v: int) -> Table:
    """Distributions of small integer weights, one for each text asked about."""
    known: dict[tuple[int, ...], Vector] = {}

    def table(prefix: tuple[int, ...]) -> Vector:
        if prefix not in known:
            known[prefix] = norm([Fraction(draw_from.randint(1, 9)) for _ in range(v)])
        return known[prefix]

    return table


def test_sixty_random_toys_are_exact_and_never_worse_than_the_ratio_rule() -> None:
    """The real code is held to the recursion's thresholds to within 1e-6; the recursion's
    distribution is compared in rationals."""
    draw_from = random.Random(1)
    better = 0
    for _ in range(60):
        v, n = draw_from.choice([2, 3]), draw_from.choice([1, 2, 3])
        p, q = random_table(draw_from, v), random_table(draw_from, v)
        probs: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
        mine = theirs = F(0)
        for case in cases(Tree.chain(n), q, Sampling.IID):
            found = in_blocks(case, p)
            own: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
            for i, chance in enumerate(found.chances):
                for token, share in enumerate(found.following[i]):
                    own[(*case.tokens[:i], token)] += chance * share
            for text, chance in own.items():
                probs[text] += chance * case.chance
            mine += case.chance * sum(i * chance for i, chance in enumerate(found.chances))
            reach = F(1)
            for i in range(n):
                reach *= min(
                    F(1),
                    p(case.prefix(i - 1))[case.tokens[i]] / q(case.prefix(i - 1))[case.tokens[i]],
                )
                theirs += case.chance * reach
            edges = {edge for one in found.following for edge in accumulated(one)}
            real, _ = pinned(block, case, p, [*([h] for h in found.h[1:]), edges])
            assert real.keys() == {text for text, chance in own.items() if chance}
            assert all(abs(real[text] - own[text]) < 1e-4 for text in real)
        assert continued(
            {text: chance for text, chance in probs.items() if chance}, p, n + 1
        ) == text_distribution(p, n + 1)
        assert mine >= theirs
        assert n > 1 or mine == theirs
        better += mine > theirs
    assert better > 30


def test_what_both_rules_keep_of_a_chain_on_average() -> None:
    papers = constant(vector("1/3", "2/3")), constant(vector("2/3", "1/3"))
    draw_from = random.Random(2)
    toys = [(random_table(draw_from, 3), random_table(draw_from, 3), n) for n in (1, 2, 3, 3, 4)]
    for p, q, n in [(*papers, 2), (*TOY_2, 2), *toys]:
        sums = [0.0, 0.0]
        for case in cases(Tree.chain(n), q, Sampling.IID):
            reach, by_token = F(1), F(0)
            for i in range(n):
                before = case.prefix(i - 1)
                reach *= min(F(1), p(before)[case.tokens[i]] / q(before)[case.tokens[i]])
                by_token += reach
            by_block = sum(i * chance for i, chance in enumerate(in_blocks(case, p).chances))
            found = [
                float(kept) for kept in kept_on_average(case.distributions(p), case.proposal(1))
            ]
            assert found == pytest.approx([float(by_token), float(by_block)], abs=1e-5)
            sums = [
                total + float(case.chance) * kept for total, kept in zip(sums, found, strict=True)
            ]
        assert sums[1] >= sums[0] - 1e-6
        if p is papers[0]:
            assert sums == pytest.approx([10 / 9, 11 / 9], abs=1e-5)


def test_an_empty_chain_keeps_nothing_on_average() -> None:
    p, proposal, _ = random_chain(b=3, n=4)
    none = replace(
        proposal,
        tokens=proposal.tokens[:, :0],
        parents=proposal.parents[:, :0],
        q_rows=proposal.q_rows[:, :0],
    )
    assert [kept.tolist() for kept in kept_on_average(p[:, :1], none)] == [[0.0] * 3] * 2
    tree = replace(proposal, parents=torch.full_like(proposal.parents, -1))
    with pytest.raises(InputError, match=said("decoding.not_a_chain")):
        kept_on_average(p, tree)


def accumulated(probs: Vector) -> list[Fraction]:
    return [sum(probs[: i + 1], F(0)) for i in range(len(probs))]


def test_deterministic_drafts_or_a_decided_target_gain_nothing() -> None:
    """A point mass for q, or for p, leaves no prefix to rescue: both rules keep as much."""
    p, _ = TOY_2
    points = [(F(0), F(1), F(0)), (F(1), F(0), F(0)), (F(0), F(0), F(1)), (F(0), F(0), F(1))]
    chosen: Table = lambda prefix: points[prefix[-1] + 1] if prefix else points[0]  # noqa: E731
    decided, drafted = constant((F(0), F(1), F(0))), constant(vector(".2", ".5", ".3"))
    for target, draft, n in ((p, chosen, 2), (decided, drafted, 2)):
        (probs, mine), (_, theirs) = (
            measure(rule, cases(Tree.chain(n), draft, Sampling.IID), target, SIZES[rule])
            for rule in (block, ratio)
        )
        assert mine == theirs
        assert continued(probs, target, n + 1) == text_distribution(target, n + 1)


def test_the_closed_form_is_the_recursion() -> None:
    p, q = TOY_2
    for case in cases(Tree.chain(3), q, Sampling.IID):
        wanted, drafted = (
            torch.tensor(
                [[float(t(case.prefix(i - 1))[case.tokens[i]]) for i in range(3)]],
                dtype=torch.float64,
            )
            for t in (p, q)
        )
        expected = torch.tensor([list(map(float, in_blocks(case, p).b))], dtype=torch.float64)
        assert torch.allclose(_joint(wanted, drafted), expected, atol=1e-12, rtol=0)


def test_a_long_block_neither_underflows_nor_forgets() -> None:
    """A product of 400 ratios of 1/1000 is below the smallest float; what follows it can still be
    whole again."""
    wanted = torch.tensor([[1e-3] * 400 + [1.0] * 400 + [0.0, 1.0]], dtype=torch.float64)
    drafted = torch.tensor([[1.0] * 400 + [1e-3] * 402], dtype=torch.float64)
    b = _joint(wanted, drafted)[0]
    assert b[300] == 0 or b[300] < 1e-300
    assert b[800] == pytest.approx(1.0, abs=1e-9)
    assert b[801] == b[802] == 0


def test_block_keeps_a_draft_after_a_failed_trial() -> None:
    """The second trial succeeds for certain, so the first one's failure does not matter."""
    p, q = TOY_2
    (case,) = [case for case in cases(Tree.chain(2), q, Sampling.IID) if case.tokens == (1, 1)]
    u = torch.tensor([[0.999, 0.5, 0.5]])
    assert block(case.distributions(p), case.proposal(1), u).count.tolist() == [2]
    assert ratio(case.distributions(p), case.proposal(1), u).count.tolist() == [0]


def test_equal_distributions_accept_everything() -> None:
    p, proposal, u = random_chain()
    proposal = Proposal(proposal.tokens, proposal.parents, Sampling.IID, p, proposal.q_rows)
    for rule in (ratio, block):
        kept = rule(p, proposal, u)
        assert (kept.count == 8).all() and kept.fallbacks == 0
        assert torch.equal(kept.next_token, draw(p[:, 8], u[:, 8]))


def test_block_draws_nothing_from_a_residual_that_is_empty() -> None:
    """Nothing is left to want after the first token (b = 1/4 of a distribution that q covers), so
    the trial there never succeeds."""
    p = torch.tensor([[[0.2, 0.8], [0.5, 0.5], [0.5, 0.5]]])
    q = torch.tensor([[[0.8, 0.2], [0.5, 0.5]]])
    chain = torch.tensor([[-1, 0]])
    for first in (0.0, 0.5):
        u = torch.tensor([[first, 0.9, 0.5]])
        kept = block(p, Proposal(torch.tensor([[0, 0]]), chain, Sampling.IID, q, chain + 1), u)
        assert (kept.count.tolist(), kept.next_token.tolist(), kept.fallbacks) == ([0], [1], 0)


def test_rows_agree_with_themselves_by_itself_and_the_ratio_rule_with_a_tree_of_one_branch() -> (
    None
):
    p, proposal, u = random_chain()
    for rule in (ratio, block):
        together = rule(p, proposal, u)
        assert together.count.unique().numel() > 2
        for name in ("path", "count", "next_token"):
            single = [
                getattr(rule(p[r : r + 1], row_of(proposal, r), u[r : r + 1]), name)
                for r in range(120)
            ]
            assert torch.equal(getattr(together, name), torch.cat(single))
    as_tree = multi_step(p, proposal, u)
    for name in ("path", "count", "next_token"):
        assert torch.equal(getattr(ratio(p, proposal, u), name), getattr(as_tree, name))


# --- mistakes, exactly ---


def resampled_from_p(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """After a refusal the token is drawn from p, not from the residual."""
    kept = ratio(p, proposal, u)
    rows = torch.arange(len(u))
    return Acceptance(kept.path, kept.count, draw(p[rows, kept.count], u[:, -1]))


def sharpened(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """The ratio reads a colder q than the one drawn from; the residual reads the right one."""
    assert proposal.q is not None and proposal.q_rows is not None
    cold = proposal.q**2 / (proposal.q**2).sum(-1, keepdim=True)
    kept = ratio(
        p, Proposal(proposal.tokens, proposal.parents, Sampling.IID, cold, proposal.q_rows), u
    )
    rows, n = torch.arange(len(u)), proposal.size
    q = proposal.q[rows, proposal.q_rows[rows, kept.count.clamp(max=n - 1)]]
    weights = p[rows, kept.count].double() - torch.where((kept.count < n)[:, None], q, 0).double()
    return Acceptance(kept.path, kept.count, draw(weights.clamp(min=0), u[:, -1]))


@pytest.mark.parametrize(
    ("rule", "sizes", "accepted", "probs"),
    [
        (resampled_from_p, (5, 10), F(7, 10), (F(26, 100), F(29, 100), F(32, 100), F(13, 100))),
        (sharpened, (125, 30), F(636, 1000), (F(17, 125), F(241, 750), F(166, 375), F(1, 10))),
    ],
)
def test_one_step_shows_a_mistake(rule, sizes, accepted: Fraction, probs: Vector) -> None:
    drafts = [
        siblings(chance, tokens, Q, Sampling.IID) for tokens, chance in draws(Q, 1, Sampling.IID)
    ]
    found, share = measure(rule, drafts, constant(P), sizes)
    assert first_token(found) == probs != P
    assert share == accepted
