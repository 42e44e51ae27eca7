"""The plain decoder layer: Llama's, in the width, heads and rotary settings of any model, with a
dense MLP. Engines build a drafter's layer in this shape, whatever the target's family is.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from drafttrain.nn.causal import CausalLM

INPUT_NORM = "input_layernorm"
"""A family's name of the norm before attention."""


def why_plain(model: CausalLM) -> str:
    """Why a drafter's layer is not one of the model's own family; nothing where it can be one."""
    layer = model.decoder_layers[0]
    names = [f"{name} {type(part).__name__}".lower() for name, part in layer.named_modules()]
    if any("expert" in name for name in names):
        return "the target's layers hold experts"
    if not hasattr(layer, INPUT_NORM):
        return "the target's layers have no norm before attention"
    rotary = getattr(model.base, "rotary_emb", None)
    if rotary is None:
        return "the target has no rotary positions"
    if "layer_type" in inspect.signature(type(rotary).forward).parameters:
        return "the target's layers differ in their rotary positions"
    return ""


def plain_layer(config: LlamaConfig, number: int) -> nn.Module:
    """With torch's initial values, and all of them set."""
    return LlamaDecoderLayer(config, number)


def plain_rotary(config: LlamaConfig) -> nn.Module:
    return LlamaRotaryEmbedding(config)


def plain_config(
    model: CausalLM, count: int = 1, *, rotary: Mapping[str, Any] | None = None
) -> LlamaConfig:
    """The config of such layers.

    What a family leaves open is as in most: an MLP of four times the width, a rotary base of 10000.
    Experts are often narrower than a model of their width needs: an MLP is at least twice as wide.

    Args:
        rotary: settings in place of the model's own.
    """
    own, width = model.config, model.width
    heads = own.num_attention_heads
    kv_heads = getattr(own, "num_key_value_heads", None) or heads
    head_dim = getattr(own, "head_dim", None) or width // heads
    if width % heads or heads % kv_heads:
        heads = kv_heads = math.gcd(width, heads)
    inner = getattr(own, "intermediate_size", None)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    special: dict[str, Any] = {name: getattr(own, name, None) for name in names}
    config = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=width,
        intermediate_size=max(inner, 2 * width) if type(inner) is int else 4 * width,
        num_hidden_layers=count,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim + head_dim % 2,
        hidden_act="silu",
        rms_norm_eps=_epsilon(own),
        max_position_embeddings=getattr(own, "max_position_embeddings", None) or model.context,
        rope_parameters={**_rotary_of(own), **(rotary or {})},
        tie_word_embeddings=False,
        **special,
    )
    config._attn_implementation = model.attention
    return config


def _epsilon(config: Any) -> float:
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    return next((value for name in names if (value := getattr(config, name, None))), 1e-6)


def _rotary_of(config: Any) -> dict[str, Any]:
    """Rotary settings for all of a head's width; of layers of several kinds those with full
    attention."""
    found = getattr(config, "rope_parameters", None) or {}
    kinds = [value for value in found.values() if isinstance(value, Mapping)]
    if kinds:
        found = found.get("full_attention") or kinds[0]
    if found.get("partial_rotary_factor", 1.0) != 1.0:
        # A scaling of some places does not fit all of them.
        found = {"rope_theta": found.get("rope_theta")}
    named = {
        name: value
        for name, value in found.items()
        if value is not None and not name.startswith(("mrope", "partial"))
    }
    return {"rope_type": "default", "rope_theta": 10000.0} | named
