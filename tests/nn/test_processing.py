"""What is done to logits before temperature equals transformers' processors on each node's full
text; and min-p."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from drafttrain.errors import InputError
from drafttrain.nn.processing import Text
from drafttrain.nn.sampling import Policy
from tests.nn.parts import logits_of

V = 12
PROMPTS = [[3, 5, 7, 9], [11], [2, 3, 2]]
ANSWERS = [[1, 3], [], [4, 4, 3]]
DRAFTED = [[[-1, -1], [2, -1], [2, 3]], [[-1, -1], [11, -1], [11, 11]], [[-1, -1], [4, -1], [0, 4]]]
STOPS = (1, 4)
BIAS = {2: -3.0, 7: 1.5, 9: -math.inf}


def text() -> Text:
    return Text.of(PROMPTS, ANSWERS, STOPS, torch.device("cpu"))


def theirs(policy: Policy, prompt: int, ids: list[int], row: Tensor) -> Tensor:
    """One row of logits by transformers' own processors, in the order of `generate`."""
    found = LogitsProcessorList()
    if policy.logit_bias:
        found.append(
            SequenceBiasLogitsProcessor(
                {(token,): value for token, value in dict(policy.logit_bias).items()}
            )
        )
    if policy.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(float(policy.repetition_penalty)))
    if policy.min_new_tokens:
        found.append(MinNewTokensLengthLogitsProcessor(prompt, policy.min_new_tokens, list(STOPS)))
    found += policy.processors
    return found(torch.tensor([ids]), row[None])[0]


def less_the_sum(ids: Tensor, scores: Tensor) -> Tensor:
    """A processor that reads all of a text."""
    return scores - ids.sum(-1)[:, None]


@pytest.mark.parametrize(
    "policy",
    [
        Policy(repetition_penalty=1.4),
        Policy(repetition_penalty=0.7),
        Policy(min_new_tokens=3),
        Policy(logit_bias=BIAS),
        Policy(processors=(NoRepeatNGramLogitsProcessor(2),)),
        Policy(0.0, 0, 1.0, 0.0, 2, 4, BIAS, (NoRepeatNGramLogitsProcessor(1), less_the_sum)),
    ],
    ids=["penalty", "reward", "least", "bias", "processor", "all"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_processed_logits_are_transformers_own(policy: Policy, dtype: torch.dtype) -> None:
    logits = logits_of(3, 3, V).to(dtype)
    logits[0, 1, 5] = -math.inf
    before = logits.clone()
    made, nothing = policy.processed(logits, text(), torch.tensor(DRAFTED))
    assert policy.processes and not policy.only_cuts
    assert made.dtype == torch.float32 and not nothing.any()
    assert torch.equal(logits, before), "the caller's logits are not changed"
    for row, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        for node, drafted in enumerate(DRAFTED[row]):
            ids = prompt + answer + [token for token in drafted if token >= 0]
            expected = theirs(policy, len(prompt), ids, logits[row, node].float())
            torch.testing.assert_close(made[row, node], expected, rtol=0, atol=0)


@pytest.mark.parametrize("min_p", [0.05, 0.3, 1.0])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 20, 0.9), (1.8, 0, 0.8)]
)
def test_min_p_keeps_what_transformers_keeps(
    min_p: float, temperature: float, top_k: int, top_p: float
) -> None:
    logits = logits_of(40, 60)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers.append(MinPLogitsWarper(min_p))
    expected = warpers(torch.zeros(40, 1, dtype=torch.int64), logits).softmax(-1)
    torch.testing.assert_close(
        Policy(temperature, top_k, top_p, min_p).probs(logits), expected, rtol=1e-5, atol=1e-7
    )


def test_min_p_keeps_what_is_on_the_threshold() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    for min_p, kept in ((0.2, 4), (0.26, 2), (0.49, 2), (0.51, 1), (1.0, 1), (0.0, 4)):
        assert Policy(1.0, min_p=min_p).probs(logits).count_nonzero() == kept
    assert Policy(1.0, min_p=1.0).probs(torch.zeros(5)).tolist() == pytest.approx([0.2] * 5)


def test_where_nothing_is_left_the_logits_stay_and_it_is_reported() -> None:
    logits = logits_of(3, 3, V)

    for value in (-math.inf, math.nan, math.inf):
        policy = Policy(
            1.0,
            processors=(
                lambda ids, scores, value=value: torch.where(ids[:, -1:] == 2, value, scores),
            ),
        )
        made, nothing = policy.processed(logits, text(), torch.tensor(DRAFTED))
        assert nothing.tolist() == [[False, True, False], [False] * 3, [False] * 3]
        assert torch.equal(made, logits) and policy.probs(made).isfinite().all()


def test_ruled_out_tokens_have_probability_0() -> None:
    policy = Policy(0.5, 5, 0.9, 0.01, 1.5, 9, {token: -math.inf for token in range(2, V - 1)})
    made, nothing = policy.processed(logits_of(3, 3, V), text(), torch.tensor(DRAFTED))
    probs = policy.probs(made)
    assert not nothing.any()
    assert set(probs.nonzero()[:, 2].tolist()) <= {0, V - 1}, "1 is a stop token"
    torch.testing.assert_close(probs.sum(-1), torch.ones(3, 3))


def test_a_policy_is_hashable_and_its_bias_is_kept_in_order() -> None:
    assert hash(Policy(logit_bias={7: 1, 2: -3})) == hash(Policy(logit_bias=((2, -3.0), (7, 1.0))))
    assert (
        not Policy(0.9, 3, 0.5).processes
        and Policy(0.9, 3, 0.5).only_cuts
        and not Policy(1.0, min_p=0.1).only_cuts
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"min_p": math.nan}, "min_p is nan"),
        ({"min_p": "x"}, "min_p is x"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"repetition_penalty": True}, "repetition_penalty is True"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"min_new_tokens": 1.0}, "min_new_tokens is 1.0"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias names token 'a'"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias names token -1"),
        ({"logit_bias": {1: math.inf}}, "logit_bias of token 1 is inf"),
        ({"logit_bias": {1: None}}, "logit_bias of token 1 is None"),
        ({"logit_bias": 3}, "logit_bias is 3"),
        ({"logit_bias": "5"}, "logit_bias is '5'"),
        ({"logit_bias": ((1, 2.0), (1, 3.0))}, r"logit_bias is \(\(1, 2.0\), \(1, 3.0\)\)"),
        ({"processors": ("x",)}, r"processors is \('x',\)"),
        ({"processors": NoRepeatNGramLogitsProcessor(2)}, "processors is <"),
    ],
)
def test_what_is_no_policy_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Policy(**settings)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Policy(logit_bias={V: 1.0}), rf"logit_bias names token {V}, .*0\.\.{V - 1}"),
        (
            Policy(processors=(lambda ids, scores: scores[:, 1:],)),
            r"processor function .*\(\d, 11\)",
        ),
        (Policy(processors=(lambda ids, scores: None,)), "processor function .*NoneType"),
    ],
)
def test_what_does_not_fit_the_logits_is_refused(policy: Policy, message: str) -> None:
    with pytest.raises(InputError, match=message):
        policy.processed(logits_of(3, 3, V), text(), torch.tensor(DRAFTED))
