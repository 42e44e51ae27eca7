"""The decoder block that engines build heads from: Llama's, with the sizes and the settings of a
target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from drafttrain.errors import InputError
from drafttrain.layouts.inspection import Inspection, Shapes
from drafttrain.layouts.rope import FALLBACK, both_spellings
from drafttrain.layouts.writing import Source
from drafttrain.target.model import Target

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")
"""What a block may turn by in any engine."""


@dataclass(frozen=True)
class Sizes:
    width: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int


def sizes_of(config: Mapping[str, Any], inspection: Inspection[Any]) -> Sizes | None:
    """By config.json; None, with faults, where it does not say."""
    width, mlp = (
        inspection.integer(config, "hidden_size"),
        inspection.integer(config, "intermediate_size"),
    )
    heads = inspection.integer(config, "num_attention_heads")
    if width is None or mlp is None or heads is None:
        return None
    nothing = {"num_key_value_heads": heads, "head_dim": width // heads}
    given = {
        key: config[key] if config.get(key) is not None else own for key, own in nothing.items()
    }
    kv_heads, head_dim = (inspection.integer(given, key) for key in nothing)
    return (
        None
        if kv_heads is None or head_dim is None
        else Sizes(width, mlp, heads, kv_heads, head_dim)
    )


def block_shapes(
    prefix: str,
    sizes: Sizes,
    *,
    reads: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
) -> Shapes:
    """Names and shapes of a block's tensors without the norms before and after its attention.

    Args:
        prefix: with its dot; reads: width of what queries, keys and values are made of, the block's
            own unless given.
    """
    h, q, kv = sizes.width, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    found: Shapes = {}
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        found[f"self_attn.{name}_proj.weight"] = (rows, reads or h)
        if qkv_bias:
            found[f"self_attn.{name}_proj.bias"] = (rows,)
    found["self_attn.o_proj.weight"] = (h, q)
    if o_bias:
        found["self_attn.o_proj.bias"] = (h,)
    found |= {
        "mlp.gate_proj.weight": (sizes.mlp, h),
        "mlp.up_proj.weight": (sizes.mlp, h),
        "mlp.down_proj.weight": (h, sizes.mlp),
    }
    if mlp_bias:
        rows = {"gate": sizes.mlp, "up": sizes.mlp, "down": h}
        found |= {f"mlp.{name}_proj.bias": (size,) for name, size in rows.items()}
    return {prefix + name: shape for name, shape in found.items()}


def block_config(target: Target, config: Any) -> dict[str, Any]:
    """config.json of a block in the target's shape: sizes, activation, epsilon, RoPE in both
    spellings, context, special ids.

    Args:
        config: that the block was made by.
    Raises: InputError for a target whose vocabulary or RoPE no engine's head can have.
    """
    rows = target.embedding.weight.shape[0]
    if rows != target.vocab_size:
        raise InputError(
            f"target {target.name} has an embedding of {rows} rows and a vocabulary of "
            f"{target.vocab_size}: engines know one vocabulary size"
        )
    heads = config.num_attention_heads
    found: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": target.width,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or target.width // heads,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.context,
        "tie_word_embeddings": False,
        **both_spellings(config),
    }
    kind = found["rope_parameters"]["rope_type"]
    if kind not in ROPE_TYPES or found["rope_parameters"].get("partial_rotary_factor", 1) != 1:
        raise InputError(
            f"target {target.name} turns by RoPE of type {kind}: heads turn by "
            f"{', '.join(ROPE_TYPES)}, in full"
        )
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if (value := getattr(config, key, None)) is not None:
            found[key] = list(value) if isinstance(value, list | tuple) else value
    return found


def refuse_rope(
    config: Mapping[str, Any], source: Source[Any], ropes: Iterable[str] | None
) -> None:
    """Raise InputError for a block that turns by RoPE as an engine does not.

    Args:
        config: with RoPE in both spellings.
        ropes: types that the engine has, scaled ones only with the base that it falls back to;
            None: all of ROPE_TYPES.
    """
    kind, theta = config["rope_parameters"]["rope_type"], config["rope_theta"]
    if ropes is None or (kind in ropes and (kind == "default" or theta == FALLBACK)):
        return
    raise InputError(
        f"to={source.engine}: {source.engine.title} has no RoPE of type {kind} with a base of "
        f"{theta:g}: give {source.others(lambda other: other.ropes is None)}"
    )
