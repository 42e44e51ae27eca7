"""New layers of a family: every parameter initialised, by the seeded generator only, and dense ones
as their class constructs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from drafttrain.errors import InputError
from drafttrain.nn import layers
from drafttrain.nn.cache import KVCache
from drafttrain.nn.causal import CausalLM
from drafttrain.target import load
from tests.messages import said

EXPERTS = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")
"""Families whose layers hold experts and routers; gpt_oss has attention sinks too."""


def mixture_of_experts(family: str, **settings: Any) -> CausalLM:
    """A tiny model with four experts in every layer."""
    common: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "moe_intermediate_size": 48,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 128,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "pad_token_id": 0,
        ("num_local_experts" if family in ("mixtral", "gpt_oss") else "num_experts"): 4,
    }
    config = AutoConfig.for_model(family, **common | settings)
    backend = "eager" if family == "gpt_oss" else "sdpa"
    torch.manual_seed(0)
    return CausalLM(
        AutoModelForCausalLM.from_config(config, attn_implementation=backend).eval(), "target tiny"
    )


def model_of(family: str) -> CausalLM:
    return mixture_of_experts(family) if family in EXPERTS else load.tiny(family=family)


def made(model: CausalLM, seed: int = 3, **settings: Any) -> list[nn.Module]:
    torch.manual_seed(seed)
    return layers.new_layers(model, **settings)


def direct(model: CausalLM, seed: int = 3) -> nn.Module:
    """What the class gives by itself."""
    kind: Any = type(model.decoder_layers[0])
    torch.manual_seed(seed)
    layer: nn.Module = kind(layers.layer_config(model), 0)
    return layer


def equal(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.fixture
def _stale_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the allocator hands out holds NaN, as memory that was used before may."""
    plain = torch.empty

    def stale(*args: Any, **more: Any) -> Tensor:
        out = plain(*args, **more)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", stale)
    yield


@pytest.mark.field("F74")
@pytest.mark.usefixtures("_stale_memory")
@pytest.mark.parametrize("family", [*load.TINY, *EXPERTS])
def test_every_parameter_is_initialised_by_the_seed(family: str) -> None:
    model = model_of(family)
    first, second = made(model, count=2)
    assert not any(p.isnan().any() for layer in (first, second) for p in layer.parameters())
    again = made(model, count=2)
    assert equal(first, again[0]) and equal(second, again[1])
    assert not equal(first, second) and not equal(first, made(model, seed=4)[0])


@pytest.mark.usefixtures("_stale_memory")
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_routers_and_sinks_are_drawn_as_the_family_draws_them(family: str) -> None:
    model = model_of(family)
    assert any(p.isnan().any() for p in direct(model).parameters()), "its class leaves some unset"
    (layer,) = made(model)
    deviation = model.config.initializer_range
    found = {
        name: p
        for name, p in layer.named_parameters()
        if name.rpartition(".")[2] in ("gate_up_proj", "down_proj", "sinks")
        or name.endswith((".gate.weight", ".router.weight"))
    }
    assert len(found) == (4 if family == "gpt_oss" else 3)
    for name, p in found.items():
        loose = 0.8 if p.numel() < 100 else 0.2
        assert abs(float(p.detach().std()) - deviation) < loose * deviation, name


@pytest.mark.parametrize("family", load.TINY)
def test_dense_layers_are_what_their_class_constructs(family: str) -> None:
    model = model_of(family)
    expected, generator = direct(model), torch.get_rng_state()
    (layer,) = made(model)
    assert equal(layer, expected)
    assert torch.equal(torch.get_rng_state(), generator), "no more numbers are drawn"


def run(model: CausalLM, layer: nn.Module, hidden: Tensor, cache: KVCache | None = None) -> Tensor:
    b, s, _ = hidden.shape
    start = 0 if cache is None else cache.longest
    positions = torch.arange(start, start + s)[None].expand(b, -1)
    rotary = model.base.rotary_emb(hidden, position_ids=positions)
    causal = torch.ones(b, s, s, dtype=torch.bool).tril()
    mask = causal[:, None] if cache is None else cache.mask(causal)
    mask = model.as_attention(mask)
    return layers.call(layer, hidden, positions=positions, rotary=rotary, mask=mask, cache=cache)


@pytest.mark.parametrize("family", [*load.TINY, *EXPERTS])
def test_layers_run_with_a_cache_as_without(family: str) -> None:
    model = model_of(family)
    (layer,) = made(model, input_norm=False)
    assert isinstance(layer.eval().input_layernorm, nn.Identity)
    hidden = torch.randn(2, 5, model.width, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = run(model, layer, hidden)
        cache = model.new_cache(2, 8)
        first = run(model, layer, hidden[:, :3], cache)
        cache.commit(torch.tensor([3, 3]))
        second = run(model, layer, hidden[:, 3:], cache)
    torch.testing.assert_close(torch.cat((first, second), 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", [*load.TINY, *EXPERTS])
def test_extra_keys_and_values_are_read_before_those_of_the_pass(family: str) -> None:
    model = model_of(family)
    (layer,) = made(model, input_norm=False)
    hidden = torch.randn(2, 7, model.width, generator=torch.Generator().manual_seed(1))
    expected = run(model, layer.eval(), hidden)[:, 4:]
    context = hidden[:, :4].clone().requires_grad_()
    positions = torch.arange(7)[None].expand(2, -1)
    rotary = model.base.rotary_emb(hidden, position_ids=positions)
    before, own = (tuple(part[:, cut] for part in rotary) for cut in (slice(4), slice(4, 7)))
    keys, values = layers.keys_and_values(layer, context, before)
    assert keys.shape[2] == values.shape[2] == 4
    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool).tril()[:, :, 4:]
    found = layers.call(
        layer,
        hidden[:, 4:],
        positions=positions[:, 4:],
        rotary=own,
        mask=model.as_attention(mask),
        cache=layers.Given({0: (keys, values)}),
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found.sum().backward()
    assert context.grad is not None and bool(context.grad.abs().sum(-1).all())


class Joined(nn.Module):
    """The norm before attention of an EAGLE-3 layer: embedding and residual stream side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.other: Tensor = torch.zeros(())

    def forward(self, stream: Tensor) -> Tensor:
        return torch.cat((self.other, stream), -1)


@pytest.mark.usefixtures("_stale_memory")
@pytest.mark.parametrize("family", [*load.TINY, *EXPERTS])
def test_attention_of_a_wider_input(family: str) -> None:
    """Of two layers the first reads more, and the residual stream stays as wide as it was."""
    model = model_of(family)
    norm = Joined()
    first, second = made(model, count=2, input_width=2 * model.width, input_norm=norm)
    for layer, width in ((first, 2 * model.width), (second, model.width)):
        read = [
            part.in_features
            for name, part in layer.named_modules()
            if isinstance(part, nn.Linear)
            and name.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj", "query_key_value")
        ]
        assert read and set(read) == {width}
    assert not any(p.isnan().any() for p in first.parameters())
    hidden = torch.randn(2, 5, model.width)
    norm.other = torch.randn(2, 5, model.width)
    assert run(model, first, hidden).shape == hidden.shape
    assert first.input_layernorm is norm and second.input_layernorm is not norm


def test_attention_is_full_or_of_the_models_own_kinds() -> None:
    model = load.tiny(family="gemma2", layers=2)
    kinds = list(model.config.layer_types)
    assert set(kinds) == {"full_attention", "sliding_attention"}
    full = layers.layer_config(model, 3)
    assert full.layer_types == ["full_attention"] * 3
    assert layers.layer_config(model, 3, full_attention=False).layer_types == [*kinds, kinds[0]]
    assert model.config.layer_types == kinds and model.config.num_hidden_layers == 2


@pytest.mark.parametrize("family", load.TINY)
def test_rotary_positions_are_the_models_own_or_as_given(family: str) -> None:
    model = model_of(family)
    x, positions = torch.zeros(1, 4, model.width), torch.arange(4)[None]
    own = model.base.rotary_emb(x, position_ids=positions)
    same = layers.new_rotary(model)(x, position_ids=positions)
    other = layers.new_rotary(model, {"rope_theta": 123.0})(x, position_ids=positions)
    assert all(torch.equal(one, two) for one, two in zip(own, same, strict=True))
    assert not torch.equal(own[0], other[0])
    assert layers.layer_config(model, rotary={"rope_theta": 5.0}).rope_parameters["rope_theta"] == 5
    assert model.config.rope_parameters["rope_theta"] != 5


def test_a_family_without_such_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, attn_implementation="sdpa")
    old = CausalLM(GPT2LMHeadModel(config), "target old")
    with pytest.raises(InputError, match=said("nn.no_input_norm")):
        layers.new_layers(old, input_norm=False)
    with pytest.raises(InputError, match=said("nn.no_inputs")):
        layers.new_layers(old, input_width=64)
    with pytest.raises(InputError, match=said("nn.no_rotary")):
        layers.new_rotary(old)
    model = mixture_of_experts("mixtral")
    monkeypatch.setattr(model.base, "_init_weights", lambda _module: None)
    with pytest.raises(InputError, match=said("nn.uninitialised")):
        layers.new_layers(model)
