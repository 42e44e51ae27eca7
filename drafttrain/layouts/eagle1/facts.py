"""What each engine makes of an EAGLE-1 head, and names that writing, checking and reading share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from drafttrain.layouts import engines
from drafttrain.layouts.engines import Engine, Reading

TOKEN_MAP = "hot_token_ids.json"
COMPUTED = "rotary_emb.inv_freq"
"""End of a name that older versions of transformers saved: engines pass over it, since it follows
from the config."""


class FcBias(Enum):
    """What an engine makes of `fc.bias`."""

    DROPPED = auto()
    NEEDED = auto()
    """Where it is not there, it stays random."""
    DECLARED = auto()
    """Read where `bias` in the config is true. Others take `bias` for the attention's."""


class Embedding(Enum):
    """What an engine makes of `embed_tokens.weight`."""

    NEEDED = auto()
    USED = auto()
    """Takes the place of the target's where it is there."""
    IGNORED = auto()


@dataclass(frozen=True, kw_only=True)
class Reads(Reading):
    architectures: tuple[str, ...] = ()
    """By which it chooses its code, the first is written; empty: it does not look."""
    suffix: str = ""
    """End of an architecture that only this engine has."""
    qwen2: str = ""
    """Its architecture for blocks of Qwen2, whose queries, keys and values have biases."""
    qkv_bias: bool = False
    """Does it read qkv_bias?"""
    attention_bias: bool = False
    """Does it read attention_bias, for all of attention?"""
    mlp_bias: bool = False
    fc_bias: FcBias
    embedding: Embedding
    refuses_head: bool = False
    """Does it refuse a file with lm_head.weight? Others take the target's anyway."""
    token_map: bool = False
    """Does it read a list of ids of a reduced vocabulary?"""
    ropes: tuple[str, ...] | None = None
    """Types of RoPE that it has; scaled ones only with the base that it falls back to."""
    square: bool = False
    """Must attention heads make up the width?"""
    notes: tuple[str, ...] = ()
    """What a person should know of every export for it."""


READINGS: dict[Engine, Reads] = {
    engines.VLLM: Reads(
        method="eagle",
        architectures=("LlamaForCausalLM", "EagleLlamaForCausalLM"),
        qkv_bias=True,
        attention_bias=True,
        mlp_bias=True,
        fc_bias=FcBias.DROPPED,
        embedding=Embedding.USED,
        refuses_head=True,
    ),
    engines.SGLANG: Reads(
        method="EAGLE",
        settings={"speculative-eagle-topk": 1, "speculative-draft-model-quantization": "unquant"},
        skips_unknown=True,
        architectures=("LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle", "MistralForCausalLMEagle"),
        suffix="Eagle",
        qwen2="Qwen2ForCausalLMEagle",
        attention_bias=True,
        fc_bias=FcBias.NEEDED,
        embedding=Embedding.IGNORED,
        token_map=True,
    ),
    engines.EAGLE: Reads(
        settings={"use_eagle3": False},
        qkv_bias=True,
        fc_bias=FcBias.DECLARED,
        embedding=Embedding.NEEDED,
        ropes=("default", "linear"),
        square=True,
        notes=(
            "EAGLE's loader looks into model.safetensors.index.json of the target, which one in "
            "a single file lacks",
        ),
    ),
}
