"""HASS: EAGLE-1 learned at several steps, against chain inference and a plain loop over steps.

Neighbours that were thought of: layers of the target's family and plain ones, eager attention with
soft caps, joined rows, rows too short for a step, gradients kept or cut between steps, gradients
made at each step, a loss on features only, a reduced draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.data.datamodule import collate
from drafttrain.data.joining import join
from drafttrain.drafter.base import Committed
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features
from drafttrain.nn import losses
from drafttrain.target import load
from tests.drafter import make as drafters
from tests.families import target_of

WEIGHTS: dict[str, Any] = {"regression": 2.0, "classification": 0.5, "topk_weight": 0.7, "topk": 3}


def make(family: str = "llama", **settings: Any) -> Eagle1:
    tiny = family in ("llama", "gemma2", "gpt_neox", "qwen3")
    target = load.tiny(family=family) if tiny else target_of(family)
    torch.manual_seed(0)
    return drafters.make(Eagle1, target, **{"steps": 3, "noise": 0.0, **settings}).eval()


def rows_of(*lengths: int) -> list[tuple[Tensor, Tensor, int]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randint(3, 90, (n,), generator=generator), torch.arange(n) >= min(3, n - 1), i)
        for i, n in enumerate(lengths)
    ]


def features_of(drafter: Eagle1, batch: Batch) -> Features:
    if batch.packing is not None:
        drafter.target.choose_isolation()
    return drafter.target.features(batch.input_ids, batch.lengths, drafter.needs, batch.packing)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_neox", "olmo2"])
def test_a_training_row_equals_chain_inference_in_float64(family: str, each: bool) -> None:
    # Gemma-2's own attention has its softmax in float32.
    close = 1e-5 if family == "gemma2" else 1e-10
    drafter = make(family, steps=4, backward_each_step=each).double()
    batch = collate([(torch.arange(10, 21), torch.ones(11, dtype=torch.bool), 0)])
    x, true = batch.input_ids, features_of(drafter, batch)
    assert true.last_hidden is not None
    hidden = true.last_hidden.double()
    with torch.inference_mode():
        trained = list(drafter._steps(batch, Features(hidden), None))
        for row in range(9):
            state = drafter.open(1, 32)
            given = Features(hidden[:, : row + 1])
            committed = Committed(given, x[:, 1 : row + 2], torch.tensor([row + 1]))
            out, _ = drafter.extend(state, committed, 4)
            for step in range(4):
                assert float((out[0, 0] - trained[step][0, row]).abs().max()) < close
                if row + 3 + step >= 11:
                    break
                token, mask = x[:, row + 2 + step][None], torch.ones(1, 1, step + 1).bool()
                out, _ = drafter.expand(state, token, out, step + 1, mask)


def by_loop(drafter: Eagle1, rows: list[tuple[Tensor, Tensor, int]]) -> tuple[Tensor, int]:
    """The loss of every chain by itself, all it has read so far in one causal pass."""
    given = drafter.config
    total, count = torch.zeros((), dtype=torch.float64), 0
    for ids, mask, _ in rows:
        x, batch = ids[None], collate([(ids, mask, 0)])
        true = features_of(drafter, batch)
        assert true.last_hidden is not None
        h = true.last_hidden.double()
        p = drafter.head(h[0]).softmax(-1)
        for row in range(len(ids) - 2):
            hidden = h[:, : row + 1]
            for step in range(given.steps):
                end = row + 1 + step
                if end + 1 >= len(ids):
                    break
                out = drafter(hidden, x[:, 1 : end + 1], torch.arange(end)[None])[:, -1:]
                hidden = torch.cat((hidden, out.detach() if given.detach else out), 1)
                if not mask[end + 1]:
                    continue
                count += step == 0
                log_q = drafter.head(out[0, 0]).log_softmax(-1)
                total = total + given.regression * losses.smooth_l1(out[0, 0], h[0, end]).double()
                total = total - given.classification * (p[end] * log_q).sum()
                top, ids_of = p[end].topk(given.topk)
                total = total - given.topk_weight * (top * log_q[ids_of]).sum()
    return total, count


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "olmo2"])
def test_loss_and_gradients_are_those_of_a_plain_loop(family: str, detach: bool) -> None:
    drafter = make(family, detach=detach, chunk=4, **WEIGHTS).double()
    parameters = list(drafter.parameters())
    rows = rows_of(9, 2, 6)
    expected, count = by_loop(drafter, rows)
    slopes = torch.autograd.grad(expected, parameters)
    for batch in (collate(rows), join(rows, 12) if family == "llama" else collate(rows)):
        true = features_of(drafter, batch)
        for each in (False, True) if detach else (False,):
            drafter.config = drafter.Config(**{**drafter.settings(), "backward_each_step": each})
            loss = drafter.loss(batch, true)
            torch.testing.assert_close(loss.total.double(), expected, rtol=1e-5, atol=1e-5)
            assert int(loss.count) == count and set(loss.parts) == set(drafter.loss_parts)
            found = torch.autograd.grad(loss.total, parameters)
            for mine, theirs in zip(found, slopes, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_cut_between_steps_changes_gradients_only() -> None:
    batch = collate(rows_of(9, 7))
    one, other = (make(detach=detach, **WEIGHTS) for detach in (True, False))
    first, second = (d.loss(batch, features_of(d, batch)) for d in (one, other))
    assert torch.equal(first.total, second.total)
    first.total.backward(), second.total.backward()
    assert float((one.fc.weight.grad - other.fc.weight.grad).abs().max()) > 1e-4


@pytest.mark.field("F12", "F31")
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_rows_too_short_to_teach_count_nothing(length: int, each: bool) -> None:
    drafter = make(backward_each_step=each, **WEIGHTS)
    batch = collate([(torch.arange(4, 4 + length), torch.ones(length, dtype=torch.bool), 0)])
    true = features_of(drafter, batch)
    loss = drafter.loss(batch, true)
    loss.total.backward()
    assert int(loss.count) == (1 if length > 2 else 0) and bool(loss.total.isfinite())
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in drafter.parameters())
    found = drafter.guesses(batch, true)
    assert found.shape[-1] == 3 and bool((found[..., 1:] == -1).all())


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"classification": 0.0}, ["regression"]),
        ({"regression": 0.0}, ["accuracy", "accuracy_2", "accuracy_3", "classification"]),
        ({"steps": 1, "topk_weight": 1.0}, ["accuracy", "classification", "regression", "topk"]),
        ({"steps": 1}, ["accuracy", "classification", "regression"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("each", [False, True])
def test_its_parts(settings: dict[str, Any], parts: list[str], each: bool) -> None:
    drafter = make(**settings, backward_each_step=each, draft_ids=list(range(0, 320, 4))).train()
    batch = collate(rows_of(9, 5))
    loss = drafter.loss(batch, features_of(drafter, batch))
    assert sorted(loss.parts) == sorted(drafter.loss_parts) == parts
    loss.total.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in drafter.parameters())
    again = make(**settings, backward_each_step=not each, draft_ids=list(range(0, 320, 4)))
    other = again.loss(batch, features_of(again, batch))
    for name, (value, of) in loss.parts.items():
        torch.testing.assert_close(value, other.parts[name][0], rtol=1e-5, atol=1e-6)
        assert float(of) == float(other.parts[name][1])


def test_guesses_of_the_first_step_are_those_of_eagle() -> None:
    batch = collate(rows_of(9, 6))
    hass, eagle = make(), make(steps=1)
    true = features_of(hass, batch)
    found = hass.guesses(batch, true)
    assert torch.equal(found[..., :1], eagle.guesses(batch, true))
    assert int((found[..., 2] >= 0).sum()) == 5 + 2


def test_noise_is_on_the_targets_features_only() -> None:
    drafter, batch = make(noise=0.1), collate(rows_of(9))
    true = features_of(drafter, batch)
    plain = drafter.loss(batch, true)
    noisy = drafter.loss(batch, true, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(plain.total, noisy.total)


def test_the_loss_over_the_most_likely_tokens() -> None:
    """p = (.5, .25, .25) and q uniform of 4: the two most likely have a mass of .75."""
    p = torch.tensor([[0.5, 0.25, 0.25, 1e-30]])
    found = losses.top_cross_entropy(torch.zeros(1, 4), p.log(), 2)
    torch.testing.assert_close(found, 0.75 * torch.tensor([4.0]).log())
    every = losses.top_cross_entropy(torch.zeros(1, 4), p.log(), 10)
    torch.testing.assert_close(every, losses.soft_cross_entropy(torch.zeros(1, 4), p.log()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"steps": 65}, "steps=65"),
        ({"steps": True}, "steps=True"),
        ({"detach": "no"}, "detach=no"),
        ({"backward_each_step": True, "detach": False}, "backward_each_step=true with detach=fal"),
        ({"topk": 0}, "topk=0"),
        ({"topk_weight": -1.0}, "topk_weight=-1.0"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(**settings)
