"""Policies that read the text, in the loop: greedy text is transformers' own, sampled text has the
distribution of plain decoding."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from drafttrain.decoding import loop
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.errors import InputError
from drafttrain.nn.sampling import Policy
from drafttrain.target import load
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Growth, Tree
from tests.decoding.models import SMALL, drawn, make
from tests.drafter import make as drafters
from tests.messages import said
from tests.packaging.made import overfitted

PROMPTS = [[3, 5, 7, 9], [11], [20, 21, 22, 23, 24, 25, 26]]
LIMIT = 24
TREES: dict[str, Growth] = {
    "chain": Tree.chain(4),
    "confident": Confident(k=4, stop_below=0.1),
    "static": Tree.expansion([3, 2, 1]),
    "dynamic": Dynamic(depth=4, top_k=3, total=9),
}


class Alternating(LogitsProcessor):
    """Even tokens after odd ones, odd after even: every distribution depends on the token
    before."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.masked_fill(
            (torch.arange(scores.shape[-1]) + input_ids[:, -1:]) % 2 == 0, -math.inf
        )


@lru_cache(maxsize=1)
def target_and_stops() -> tuple[Any, tuple[int, ...]]:
    """Stop tokens that plain greedy text meets early in every row, though not at once."""
    target = load.tiny()
    plain, _ = decode(target, None, PROMPTS, Plan(Tree.chain(0)), max_new_tokens=LIMIT, stop_ids=())
    return target, tuple({output.ids[3 + row] for row, output in enumerate(plain)})


def cases() -> dict[str, tuple[Policy, dict[str, Any], tuple[int, ...]]]:
    """Policies, the same as settings of transformers' generate, and stop tokens."""
    _, stops = target_and_stops()
    bias = {stops[0]: -math.inf, 40: 0.5, 41: -2.0}
    theirs = {(token,): value for token, value in bias.items()}
    own = Alternating()
    processor = LogitsProcessorList([own])
    return {
        "penalty": (Policy(repetition_penalty=1.5), {"repetition_penalty": 1.5}, ()),
        "least": (Policy(min_new_tokens=15), {"min_new_tokens": 15}, stops),
        "bias": (Policy(logit_bias=bias), {"sequence_bias": theirs}, stops),
        "processor": (Policy(processors=(own,)), {"logits_processor": processor}, ()),
        "all": (
            Policy(repetition_penalty=1.2, min_new_tokens=9, logit_bias=bias, processors=(own,)),
            {
                "repetition_penalty": 1.2,
                "min_new_tokens": 9,
                "sequence_bias": theirs,
                "logits_processor": processor,
            },
            stops,
        ),
    }


@lru_cache(maxsize=8)
def trained(name: str) -> tuple[Any, tuple[int, ...], Eagle1, list[list[int]]]:
    """A drafter that knows the answers under a policy, so that drafts are accepted; and
    transformers' own answers."""
    target, _ = target_and_stops()
    policy, more, stops = cases()[name]
    settings: dict[str, Any] = {
        "max_new_tokens": LIMIT,
        "do_sample": False,
        "pad_token_id": 0,
        **more,
    }
    theirs = []
    for prompt in PROMPTS:
        out = target.model.generate(
            torch.tensor([prompt]), eos_token_id=list(stops) or None, **settings
        )
        theirs.append(out[0, len(prompt) :].tolist())
    return (
        target,
        stops,
        overfitted(target, PROMPTS, steps=40, tokens=LIMIT, policy=policy, stop_ids=stops),
        theirs,
    )


@pytest.mark.parametrize("name", ["penalty", "least", "bias", "processor", "all"])
def test_greedy_text_is_transformers_own(name: str) -> None:
    target, stops, drafter, theirs = trained(name)
    policy, _, _ = cases()[name]
    without, _ = decode(
        target, None, PROMPTS, Plan(Tree.chain(0)), max_new_tokens=LIMIT, stop_ids=stops
    )
    assert [output.ids for output in without] != theirs, "the policy must matter"
    plain, _ = decode(
        target, None, PROMPTS, Plan(Tree.chain(0), policy), max_new_tokens=LIMIT, stop_ids=stops
    )
    assert [output.ids for output in plain] == theirs
    for kind, tree in TREES.items():
        plan = Plan(tree, policy)
        outputs, tally = decode(
            target, drafter, PROMPTS, plan, max_new_tokens=LIMIT, stop_ids=stops
        )
        assert [output.ids for output in outputs] == theirs, kind
        assert plan.guarantee == "greedy" and tally.accepted_per_round > 0.5, (
            kind,
            tally.accepted_per_round,
        )


@pytest.mark.parametrize(
    ("kind", "sampled"),
    [("chain", True), ("confident", True), ("static", True), ("static", False), ("dynamic", False)],
)
def test_a_sampled_rows_text_is_its_own(kind: str, sampled: bool) -> None:
    target, stops, drafter, _ = trained("all")
    policy = Policy(1.0, 0, 0.95, 0.02, 1.3, 8, {40: 1.0}, (NoRepeatNGramLogitsProcessor(3),))
    plan = Plan(TREES[kind], policy, sampled)
    together, _ = decode(
        target, drafter, PROMPTS, plan, max_new_tokens=LIMIT, stop_ids=stops, seed=4
    )
    assert all(len(output.ids) >= 8 for output in together)
    for row, prompt in enumerate(PROMPTS):
        (single,), _ = decode(
            target,
            drafter,
            [prompt],
            plan,
            max_new_tokens=LIMIT,
            stop_ids=stops,
            seed=4,
            row_numbers=[row],
        )
        assert (single.ids, single.runs) == (together[row].ids, together[row].runs)


def test_a_plain_policy_reads_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    target, stops, drafter, _ = trained("penalty")

    def never(*arguments: Any) -> Any:
        raise AssertionError("a policy that reads no text must not pay for it")

    monkeypatch.setattr(loop._Decoding, "_text", never)
    monkeypatch.setattr(Policy, "processed", never)
    for policy in (Policy(), Policy(0.8, 9, 0.9, 0.05)):
        decode(
            target,
            drafter,
            PROMPTS,
            Plan(TREES["static"], policy),
            max_new_tokens=6,
            stop_ids=stops,
        )


# --- what rules tokens out ------------------------------------------------------------------------


def only(*allowed: int) -> Any:
    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        ruled = torch.full_like(scores, -math.inf)
        ruled[:, list(allowed)] = scores[:, list(allowed)]
        return ruled

    return processor


def counting(ids: Tensor, scores: Tensor) -> Tensor:
    """Every token must be one more than the last, up to 13; after 13 nothing may follow."""
    ruled = torch.full_like(scores, -math.inf)
    for row, token in enumerate(ids[:, -1].tolist()):
        if token < 13:
            ruled[row, token + 1] = scores[row, token + 1]
    return ruled


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_distributions_of_one_token_are_kept_to(kind: str, temperature: float) -> None:
    target, _, drafter, _ = trained("penalty")
    plan = Plan(TREES[kind], Policy(temperature, processors=(counting,)))
    outputs, _ = decode(target, drafter, [[3], [5, 9], [8]], plan, max_new_tokens=9, stop_ids=(13,))
    assert [output.ids for output in outputs] == [
        list(range(4, 13)),
        [10, 11, 12, 13],
        [9, 10, 11, 12, 13],
    ]
    assert [output.finish for output in outputs] == ["length", "stop", "stop"]
    # A distribution that is empty only after the end is not up to the policy; one in the text is.
    with pytest.raises(InputError, match=said("decoding.nothing_left") + " in row 1"):
        decode(target, drafter, [[3], [9]], plan, max_new_tokens=6, stop_ids=())


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("rule", ["auto", "sample_and_match"])
def test_a_few_tokens_are_kept_to_beyond_the_draft_vocabulary(kind: str, rule: str) -> None:
    target, *_ = trained("penalty")
    torch.manual_seed(0)
    drafter = drafters.make(Eagle1, target, draft_ids=[2, 7, 9, 30, 31]).eval()
    policy = Policy(1.0, repetition_penalty=1.1, processors=(only(9, 33, 50),))
    plan = Plan(TREES[kind], policy, rule=None if rule == "auto" else rule)
    outputs, _ = decode(target, drafter, PROMPTS, plan, max_new_tokens=20, stop_ids=())
    assert {token for output in outputs for token in output.ids} == {9, 33, 50}


def test_a_policy_that_rules_all_out_at_once_is_refused() -> None:
    target, *_ = trained("penalty")
    for temperature in (0.0, 1.0):
        plan = Plan(Tree.chain(0), Policy(temperature, min_new_tokens=2, processors=(only(7),)))
        with pytest.raises(InputError, match=said("decoding.nothing_left") + " in row 0"):
            decode(target, None, PROMPTS, plan, max_new_tokens=4, stop_ids=(7,))
    with pytest.raises(InputError, match=r"logit_bias\b.*9999"):
        decode(
            target,
            None,
            PROMPTS,
            Plan(Tree.chain(0), Policy(logit_bias={9999: 1.0})),
            max_new_tokens=4,
        )


# --- the distribution of sampled text -------------------------------------------------------------

ROWS = 4_500
PENALTY, LIFT = 6.0, 3.0
"""A penalty is felt where logits are large: all are lifted first."""


@lru_cache(maxsize=1)
def small() -> tuple[Any, Eagle1, Eagle1, Tensor]:
    """A target of 8 tokens, two drafters, and the target's distribution of three tokens by
    transformers' own penalty."""
    target, drafter = make(**SMALL)
    torch.manual_seed(0)
    partial = drafters.make(Eagle1, target, draft_ids=[0, 2, 3, 5, 6]).eval()
    penalty = RepetitionPenaltyLogitsProcessor(PENALTY)
    with torch.inference_mode():
        probs, prefixes = torch.ones(1, dtype=torch.float64), [[3]]
        for _ in range(3):
            ids = torch.tensor(prefixes)
            logits = penalty(
                ids, target.model(input_ids=ids, use_cache=False).logits[:, -1].float() + LIFT
            )
            probs = (probs[:, None] * logits.double().softmax(-1)).flatten()
            prefixes = [prefix + [token] for prefix in prefixes for token in range(8)]
    return target, drafter, partial, probs


def p_value(drafter: Eagle1, tree: Growth, **settings: Any) -> float:
    target, _, _, probs = small()
    policy = Policy(1.0, repetition_penalty=PENALTY, logit_bias={token: LIFT for token in range(8)})
    plan = Plan(tree, policy, **settings)
    counts, expected = drawn(target, drafter, plan, ROWS, [3]), probs * ROWS
    big = expected >= 5
    observed = torch.cat((counts[big], counts[~big].sum()[None]))
    wanted = torch.cat((expected[big], expected[~big].sum()[None]))
    return float(stats.chisquare(observed.numpy(), (wanted * ROWS / wanted.sum()).numpy()).pvalue)


SAMPLED: dict[str, tuple[Growth, dict[str, Any]]] = {
    "chain": (Tree.chain(3), {"rule": "ratio"}),
    "tree": (Tree.expansion([3, 2]), {}),
    "most likely": (Dynamic(depth=2, top_k=2, total=4), {}),
}


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("vocabulary", ["full", "part"])
def test_three_tokens_follow_the_penalised_distribution(name: str, vocabulary: str) -> None:
    _, drafter, partial, _ = small()
    tree, settings = SAMPLED[name]
    assert p_value(drafter if vocabulary == "full" else partial, tree, **settings) > 1e-3


@pytest.mark.parametrize("name", SAMPLED)
def test_a_penalty_without_the_drafted_tokens_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = loop.paths_to
    monkeypatch.setattr(loop, "paths_to", lambda *arguments: torch.full_like(right(*arguments), -1))
    tree, settings = SAMPLED[name]
    assert p_value(small()[1], tree, **settings) < 1e-6


def test_drafts_are_drawn_from_the_distribution_that_is_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """q of every node is transformers' penalty on the text and the drafts before it: tokens of both
    are marked down."""
    target, drafter, *_ = small()
    seen: list[tuple[Any, Any]] = []
    propose = Eagle1.propose

    def recorded(self: Eagle1, state: Any, committed: Any, *more: Any) -> Any:
        seen.append((committed.text, propose(self, state, committed, *more)))
        return seen[-1][1]

    monkeypatch.setattr(Eagle1, "propose", recorded)
    # Under so large a penalty a token of positive logit that has been written is hardly drawn
    # again, all others are equal.
    policy = Policy(1.0, logit_bias={token: 30.0 for token in range(8)}, repetition_penalty=1e6)
    decode(
        target,
        drafter,
        [[3], [5, 2]],
        Plan(Tree.chain(3), policy, rule="ratio"),
        max_new_tokens=3,
        stop_ids=(),
    )
    for text, proposal in seen:
        for row in range(len(proposal.tokens)):
            written = set(text.ids[row, : text.lengths[row]].tolist())
            for node, token in enumerate(proposal.tokens[row].tolist()):
                q = proposal.q[row, proposal.q_rows[row, node]]
                assert (
                    float(q[sorted(written)].sum()) < 1e-6 and q[token] > 0 and token not in written
                )
                written.add(token)
    assert seen
