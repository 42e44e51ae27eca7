"""An adapter: one switch away from the original while it is trained, a second target afterwards,
and never the original itself."""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import replace

import pytest
import torch

from drafttrain.errors import InputError
from drafttrain.flow import Needs
from drafttrain.nn.packed import pack
from drafttrain.target import change, fingerprint, load
from drafttrain.target.adapter import linears_of, shapes_of, tuned
from drafttrain.target.model import Target
from tests.messages import said
from tests.target.adapters import made, stirred, trained
from tests.training.parts import same

IDS = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(1))
LENGTHS = torch.tensor([9, 9])


def logits(target: Target) -> torch.Tensor:
    hidden = target.features(IDS, LENGTHS, Needs(last_hidden=True)).last_hidden
    assert hidden is not None
    return target.head(hidden)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_neox"])
def test_off_it_is_the_original_bit_for_bit(family: str) -> None:
    target = load.tiny(family=family)
    marks, names = target.fingerprint, list(target.model.state_dict())
    original = logits(target)
    adapter = trained(target, dropout=0.5)
    assert torch.equal(logits(target), original), "B starts as zero, dropout is only for learning"
    stirred(adapter)
    on = logits(target)
    assert not torch.equal(on, original)
    with adapter.off():
        assert torch.equal(logits(target), original)
        assert torch.equal(target.head(target.hidden(IDS)), original)
    assert torch.equal(logits(target), on)
    adapter.remove()
    assert torch.equal(logits(target), original) and list(target.model.state_dict()) == names
    assert Target(target.model, None, "again").fingerprint == marks and not hasattr(
        target.model, "peft_config"
    )


def test_gradients_reach_only_the_adapter() -> None:
    target = load.tiny()
    adapter = stirred(trained(target))
    target.hidden(IDS).square().sum().backward()
    assert all(
        weight.grad is not None and weight.grad.abs().sum() > 0
        for weight in adapter.weights.values()
    )
    ours = {id(weight) for weight in adapter.parameters()}
    others = [p for p in target.model.parameters() if id(p) not in ours]
    assert others and not any(p.requires_grad or p.grad is not None for p in others)
    assert (
        len(ours)
        == 2 * len(linears_of(load.tiny(), "all"))
        == len(list(target.model.parameters())) - len(others)
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_tuned_target_is_a_second_one(family: str, packed: bool) -> None:
    target = load.tiny(family=family)
    adapter = stirred(trained(target))
    on = logits(target)
    found = adapter.adapter()
    adapter.remove()
    if packed:
        assert pack(target.model)
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    original = logits(target)
    second = tuned(target, found)
    torch.testing.assert_close(logits(second), on, rtol=1e-4, atol=1e-4)
    assert same(dict(target.model.state_dict()), before) and torch.equal(logits(target), original)
    assert (
        second.embedding.weight is target.embedding.weight
        and second.output.weight is target.output.weight
    )
    assert second.model is not target.model and second.config is target.config
    assert (
        type(second.decoder_layers[0]) is type(target.decoder_layers[0])
        and second.decoder_layers is not target.decoder_layers
    )
    again = tuned(target, copy.deepcopy(found))
    assert torch.equal(logits(again), logits(second)), "the same adapter makes the same target"


def test_a_tuned_target_is_another_target() -> None:
    target = load.tiny()
    found = made(target)
    second = tuned(target, found)
    assert (
        second.fingerprint == {**target.fingerprint, "adapter": found.digest}
        and "adapter" not in target.fingerprint
    )
    for there, here in ((target, second), (second, target)):
        with pytest.raises(InputError, match="adapter"):
            fingerprint.refuse_other(there.fingerprint, here.fingerprint, "a set")
    fingerprint.refuse_other(second.fingerprint, tuned(target, found).fingerprint, "a set")
    name = next(iter(found.tensors))
    moved = {**found.tensors, name: found.tensors[name] + 1e-6}
    for other in (replace(found, tensors=moved), replace(found, alpha=9.0)):
        assert other.digest != found.digest
        with pytest.raises(InputError, match="adapter"):
            fingerprint.refuse_other(second.fingerprint, tuned(target, other).fingerprint, "a set")
    with pytest.raises(InputError, match=said("target.tuned_already")):
        tuned(second, found)
    with pytest.raises(InputError, match=said("target.tuned_already")):
        trained(second)


def test_low_precision() -> None:
    target = load.tiny(dtype="bfloat16")
    adapter = stirred(trained(target))
    assert {weight.dtype for weight in adapter.weights.values()} == {torch.float32}
    on = logits(target)
    assert on.dtype == torch.bfloat16
    found = adapter.adapter()
    adapter.remove()
    second = tuned(target, found)
    assert second.dtype == torch.bfloat16
    assert float((logits(second).float() - on.float()).abs().max()) < 0.05 * float(
        on.float().abs().max()
    )


def test_chosen_linears() -> None:
    target = load.tiny()
    found = made(target, linears=["q_proj", "down_proj"])
    assert (
        {name.split(".")[-2] for name in found.tensors}
        == {"q_proj", "down_proj"}
        == set(found.linears)
    )
    assert {name: tuple(t.shape) for name, t in found.tensors.items()} == shapes_of(
        target, 4, ["q_proj", "down_proj"]
    )
    with pytest.raises(InputError, match=r"linears: qproj .* q_proj, k_proj"):
        linears_of(target, ["qproj"])
    assert not any("lm_head" in name for name in linears_of(target, "all"))


def test_what_cannot_be_trained_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = load.tiny()
    pack(target.model)
    with pytest.raises(InputError, match=r"target\.pack=false"):
        trained(target)
    hooked = load.tiny()
    found = made(hooked)
    layer = hooked.decoder_layers[0]
    layer.forward = layer.forward  # as hooks of accelerate do
    with pytest.raises(InputError, match="device_map"):
        tuned(hooked, found)
    plain = load.tiny()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"peft.*drafttrain\[medusa2\]"):
        trained(plain)


def test_change_against_plain_sums() -> None:
    from drafttrain.flow import Batch

    target = load.tiny()
    second = tuned(target, made(target))
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 4:], mask[1, :7] = True, True
    batch = Batch(IDS, mask, LENGTHS, torch.arange(2))
    found = change.change(target, second, [batch, batch], chunk=3)
    assert found is not None and found["rows"] == 4 and found["tokens"] == 2 * (5 + 6)
    p, q = (logits(one).log_softmax(-1).double() for one in (target, second))
    places = [(b, s) for b in range(2) for s in range(1, 9) if mask[b, s]]
    nats = [
        -sum(float(logs[b, s - 1, IDS[b, s]]) for b, s in places) / len(places) for logs in (p, q)
    ]
    kl = sum(
        float((p[b, s - 1].exp() * (p[b, s - 1] - q[b, s - 1])).sum()) for b, s in places
    ) / len(places)
    agree = sum(int(p[b, s - 1].argmax() == q[b, s - 1].argmax()) for b, s in places) / len(places)
    assert found["perplexity_original"] == pytest.approx(
        torch.tensor(nats[0]).exp().item(), rel=1e-5
    )
    assert found["perplexity_tuned"] == pytest.approx(torch.tensor(nats[1]).exp().item(), rel=1e-5)
    assert found["kl"] == pytest.approx(kl, rel=1e-4) and found["agreement"] == agree < 1
    none = change.change(target, target, [batch])
    assert none is not None and none["kl"] == 0 and none["agreement"] == 1
    assert (
        change.change(
            target, second, [Batch(IDS, torch.zeros_like(mask), LENGTHS, torch.arange(2))]
        )
        is None
    )
