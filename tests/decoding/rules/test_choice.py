"""What every rule must bear, and what it refuses: zero probabilities, rounding, wrong distributions
and shapes, names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from drafttrain.decoding import rules
from drafttrain.decoding.rules import (
    GUARANTEES,
    RULES,
    SCOPES,
    block,
    greedy,
    k_seq,
    multi_step,
    one_hot,
    ratio,
    rule_for,
    sample_and_match,
    typical,
)
from drafttrain.errors import InputError
from drafttrain.flow import Proposal, Sampling
from tests.decoding.rules.cases import as_chain, random_round
from tests.messages import said

ROOT = torch.tensor([[-1]])
JUDGES = [
    (RULES[name], sampling)
    for name, scope in SCOPES.items()
    for sampling in scope.samplings
    if name != "greedy"
]  # every rule under every distribution that it judges


@pytest.mark.parametrize(("rule", "sampling"), JUDGES)
def test_probability_zero_is_refused_at_u_zero(rule, sampling: Sampling) -> None:
    p = torch.tensor([[[0.0, 0.4, 0.6], [0.2, 0.3, 0.5]]])
    q = torch.tensor([[[0.5, 0.3, 0.2]]])
    kept = rule(p, Proposal(torch.tensor([[0]]), ROOT, sampling, q, ROOT + 1), torch.zeros(1, 2))
    assert kept.count.tolist() == [0]
    assert kept.path.tolist() == [[-1]]
    assert kept.next_token.tolist() == ([2] if rule is typical else [1])


@pytest.mark.parametrize(("rule", "sampling"), JUDGES)
def test_a_certain_draft_is_kept_whatever_the_number(rule, sampling: Sampling) -> None:
    p = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
    q = torch.tensor([[[0.5, 0.3, 0.2]]])
    almost = torch.full((1, 2), 1 - 2.0**-53, dtype=torch.float64)
    kept = rule(p, Proposal(torch.tensor([[1]]), ROOT, sampling, q, ROOT + 1), almost)
    assert (kept.count.tolist(), kept.next_token.tolist(), kept.fallbacks) == ([1], [2], 0)


@pytest.mark.parametrize("rule", [ratio, block, multi_step])
def test_a_residual_emptied_by_rounding_falls_back_to_p(rule) -> None:
    short = 0.5 - 2.0**-20
    p = torch.tensor([[[0.5, short], [0.5, 0.5]]] * 2)
    q = torch.tensor([[[0.5, 0.5]]] * 2)
    root = torch.tensor([[-1], [-1]])
    u = torch.tensor([[1 - 2.0**-40, 0.75], [0.1, 0.75]], dtype=torch.float64)
    kept = rule(p, Proposal(torch.tensor([[1], [1]]), root, Sampling.IID, q, root + 1), u)
    assert kept.count.tolist() == [0, 1]
    assert kept.next_token.tolist() == [1, 1]
    assert kept.fallbacks == 1


@pytest.mark.parametrize(("rule", "sampling"), JUDGES)
def test_an_empty_proposal_draws_from_the_target(rule, sampling: Sampling) -> None:
    p = torch.tensor([[[0.25, 0.75]], [[0.6, 0.4]]])
    nothing = torch.empty(2, 0, dtype=torch.int64)
    kept = rule(p, Proposal(nothing, nothing, sampling), torch.tensor([[0.3], [0.3]]))
    assert kept.path.shape == (2, 0)
    assert (kept.count.tolist(), kept.next_token.tolist()) == ([0, 0], [1, 0])
    assert greedy(p.argmax(-1), Proposal(nothing, nothing, sampling)).next_token.tolist() == [1, 0]


@pytest.mark.parametrize(("rule", "sampling"), JUDGES)
def test_the_tensors_given_are_left_as_they_are(rule, sampling: Sampling) -> None:
    """Also in float64, where a rule's own arithmetic needs no copy."""
    p, proposal, u = random_round(sampling, b=30)
    proposal = as_chain(proposal) if SCOPES[rule.__name__].chain else proposal
    assert proposal.q is not None
    given = (p.double(), replace(proposal, q=proposal.q.double()), u.double())
    read: list[Any] = [given[0], given[1].q, given[1].tokens, given[2]]
    before = [value.clone() for value in read]
    first, again = rule(*given), rule(*given)
    for value, old in zip(read, before, strict=True):
        assert torch.equal(value, old)
    assert torch.equal(first.next_token, again.next_token) and torch.equal(first.path, again.path)
    half = rule(p, proposal, u)
    assert (half.count == first.count).float().mean() > 0.9


@pytest.mark.parametrize(
    ("rule", "sampling"),
    [
        (rule, sampling)
        for rule, sampling in JUDGES
        if sampling in (Sampling.IID, Sampling.WOR) and rule not in (sample_and_match, typical)
    ],
)
def test_a_token_that_q_cannot_draw_is_an_error(rule, sampling: Sampling) -> None:
    for bad in (0.0, float("nan")):
        p, q = torch.full((1, 2, 3), 1 / 3), torch.tensor([[[bad, 0.5, 0.5]]])
        with pytest.raises(ValueError, match=said("decoding.undrawable")):
            rule(
                p,
                Proposal(torch.tensor([[0]]), ROOT, sampling, q, ROOT + 1),
                torch.full((1, 2), 0.5),
            )


@pytest.mark.parametrize(
    ("rule", "sampling"), [(rule, sampling) for rule, sampling in JUDGES if rule is not typical]
)
def test_a_target_that_is_no_number_is_an_error(rule, sampling: Sampling) -> None:
    p, q = torch.full((1, 2, 3), float("nan")), torch.tensor([[[0.2, 0.3, 0.5]]])
    with pytest.raises(ValueError, match=said("decoding.not_finite")):
        rule(p, Proposal(torch.tensor([[0]]), ROOT, sampling, q, ROOT + 1), torch.full((1, 2), 0.5))


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        (name, sampling)
        for name, scope in SCOPES.items()
        for sampling in Sampling
        if sampling not in scope.samplings
    ],
)
def test_a_rule_refuses_drafts_made_in_another_way(name: str, sampling: Sampling) -> None:
    p, proposal, u = random_round(Sampling.WOR, b=2)
    with pytest.raises(
        InputError, match=said("decoding.other_drafts").format(rule=name, given=sampling.value)
    ):
        RULES[name](p, replace(as_chain(proposal), sampling=sampling), u)


def test_a_rule_refuses_wrong_shapes() -> None:
    p, proposal, u = random_round(Sampling.IID, b=2)
    for rule in (ratio, block):
        with pytest.raises(InputError, match=said("decoding.not_a_chain")):
            rule(p, proposal, u)
    for rule in (multi_step, k_seq):
        for change, fault in (
            ({"q": None, "q_rows": None}, "no_q"),
            ({"q": proposal.q[..., 1:]}, "shape_of_q"),  # type: ignore[index]
            ({"q_rows": proposal.q_rows[:, 1:]}, "shape_of_q_rows"),  # type: ignore[index]
            ({"parents": proposal.parents.flip(1)}, "order_of_parents"),
            ({"parents": proposal.parents[:, 1:]}, "shape_of_tokens"),
        ):
            with pytest.raises(InputError, match=said(f"decoding.{fault}")):
                rule(p, replace(proposal, **change), u)
    for rule, sampling in JUDGES:
        shaped = replace(as_chain(proposal), sampling=sampling)
        with pytest.raises(InputError, match=said("decoding.shape_of_p")):
            rule(p[:, 1:], shaped, u)
        with pytest.raises(InputError, match=said("decoding.shape_of_u")):
            rule(p, shaped, u[:, 1:])
    with pytest.raises(InputError, match=said("decoding.shape_of_argmaxes")):
        greedy(proposal.tokens, proposal)


def test_a_vocabulary_of_50_thousand() -> None:
    generator = torch.Generator().manual_seed(0)
    b, n, v = 2, 6, 50_257
    p, q = (torch.randn(b, n + 1, v, generator=generator).mul(3).softmax(-1) for _ in range(2))
    q = (p + q)[:, :n] / 2
    chain = torch.arange(-1, n - 1).expand(b, n)
    tokens = q.argmax(-1)
    for rule, sampling in JUDGES:
        kept = rule(
            p,
            Proposal(tokens, chain, sampling, q, chain + 1),
            torch.rand(b, n + 1, generator=generator),
        )
        assert bool(((kept.next_token >= 0) & (kept.next_token < v)).all())


# --- names ---


def test_the_default_rule_follows_how_drafts_are_made() -> None:
    for sampling in Sampling:
        assert rule_for(sampling, greedy=True, is_chain=False) == "greedy"
    assert rule_for(Sampling.IID, greedy=False, is_chain=True) == "block"
    assert rule_for(Sampling.IID, greedy=False, is_chain=False) == "multi_step"
    assert rule_for(Sampling.WOR, greedy=False, is_chain=True) == "multi_step"
    assert rule_for(Sampling.ONE_HOT, greedy=False, is_chain=True) == "one_hot"
    assert rule_for(Sampling.UNKNOWN, greedy=False, is_chain=False) == "sample_and_match"
    assert RULES.keys() == GUARANTEES.keys() == SCOPES.keys()
    assert set(GUARANTEES.values()) == {"greedy", "distribution", "approximate"}
    for sampling in Sampling:
        for is_chain in (True, False):
            name = rule_for(sampling, greedy=False, is_chain=is_chain)
            assert sampling in SCOPES[name].samplings and GUARANTEES[name] == "distribution"


def test_typical_takes_its_thresholds_by_name() -> None:
    p, proposal, u = random_round(Sampling.ONE_HOT)
    looser = rules.named("typical:0.02:0.1")(p, proposal, u)
    assert torch.equal(looser.path, typical(p, proposal, u, epsilon=0.02, delta=0.1).path)
    assert not torch.equal(looser.count, rules.named("typical")(p, proposal, u).count)
    assert rules.guarantee_of("typical:0.02:0.1") == "approximate"
    assert rules.named("block") is block and rules.named("one_hot") is one_hot


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("magic", "rule magic .*greedy, ratio, block"),
        ("", "rule  "),
        ("typical:0.1", "rule typical:0.1 .*typical:0.09:0.3"),
        ("typical:a:b", "rule typical:a:b"),
        ("block:0.1:0.3", "rule block:0.1:0.3"),
        ("typical:-1:0.3", "epsilon -1.0"),
    ],
)
def test_other_names_are_refused(name: str, message: str) -> None:
    for ask in (rules.named, rules.guarantee_of, rules.scope_of):
        with pytest.raises(InputError, match=message):
            ask(name)
