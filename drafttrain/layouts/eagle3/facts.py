"""What each engine makes of an EAGLE-3 head, and names that writing, checking and reading share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drafttrain.layouts import engines
from drafttrain.layouts.engines import Engine, Reading

KEY = "eagle_aux_hidden_state_layer_ids"
SPECULATORS_TYPE = "speculators_model_type"
GUESSED = 3
"""States that an engine captures where nothing is said."""
FLAGS = ("norm_before_residual", "fc_norm", "norm_before_fc", "norm_output")
"""Settings that change what is computed, by their names in a config and in the drafter."""
ARCHITECTURE = "LlamaForCausalLMEagle3"
"""By which a directory is known where its engine does not look."""
FIRST, NAMED = "layers.0.", "midlayer."
"""The first layer in drafttrain, vLLM and speculators, and in EAGLE's code."""


@dataclass(frozen=True, kw_only=True)
class Reads(Reading):
    architectures: tuple[str, ...] = ()
    """By which it chooses its code, the first is written; empty: it does not look."""
    nested_layers: bool = False
    """Does it read the numbers of captured states inside eagle_config?"""
    guessed_layers: bool = False
    """Does it capture x[2], x[N/2], x[N-3] whatever is given?"""
    last_state: bool = True
    """Does it capture x[N], the output of the last layer?"""
    sizes_by_config: bool = False
    """Does it size fc by the number of states that config.json says, whatever the file has?"""
    skips_square_fc: bool = False
    """Does it pass over fc where that reads as much as it writes, which one state is?"""
    needs_draft_size: bool = False
    """Must draft_vocab_size be there? A head that is not in the file then stays random."""
    passed_over: tuple[str, ...] = ()
    """Settings that change what is computed and that it does not read."""
    query_norms: str = ""
    """Its architecture for blocks with norms of queries and keys; none: it has no such blocks."""
    attention_bias: bool = False
    """Does it read attention_bias?"""
    mlp_bias: bool = False
    parallel: bool = True
    """Does it draft in parallel, as P-EAGLE does?"""
    later_norm: str = "input_layernorm"
    """Its name for the norm of the stream in layers after the first."""
    one_layer: bool = False
    """Does it build one layer whatever num_hidden_layers says?"""
    first_layer: str = ""
    """The one name of the first layer that it knows; none: it knows both."""
    ropes: tuple[str, ...] | None = None
    """Types of RoPE that it has; scaled ones only with the base that it falls back to."""
    nests_block: bool = False
    """Is the block's config inside another one, as the library speculators writes it?"""
    notes: tuple[str, ...] = ()
    """What a person should know of every export for it."""


READINGS: dict[Engine, Reads] = {
    engines.VLLM: Reads(
        method="eagle3",
        architectures=(
            "LlamaForCausalLMEagle3",
            "Eagle3LlamaForCausalLM",
            "Eagle3Qwen3ForCausalLM",
            "Eagle3DeepseekV2ForCausalLM",
        ),
        sizes_by_config=True,
        query_norms="Eagle3Qwen3ForCausalLM",
        attention_bias=True,
        mlp_bias=True,
    ),
    engines.SGLANG: Reads(
        method="EAGLE3",
        settings={"speculative-eagle-topk": 1, "speculative-draft-model-quantization": "unquant"},
        architectures=("LlamaForCausalLMEagle3",),
        skips_unknown=True,
        nested_layers=True,
        sizes_by_config=True,
        skips_square_fc=True,
        last_state=False,
        needs_draft_size=True,
        passed_over=("norm_before_residual",),
        parallel=False,
        later_norm="hidden_norm",
    ),
    engines.EAGLE: Reads(
        settings={"use_eagle3": True},
        skips_unknown=True,
        guessed_layers=True,
        sizes_by_config=True,
        skips_square_fc=True,
        needs_draft_size=True,
        passed_over=FLAGS,
        parallel=False,
        one_layer=True,
        first_layer=NAMED,
        ropes=("default", "linear"),
        notes=(
            "EAGLE's loader looks into model.safetensors.index.json of the target, which one in "
            "a single file lacks",
        ),
    ),
    engines.SPECULATORS: Reads(
        method="eagle3",
        architectures=("Eagle3DraftModel",),
        sizes_by_config=True,
        query_norms="Eagle3DraftModel",
        first_layer=FIRST,
        nests_block=True,
    ),
}


def inner(config: Mapping[str, Any]) -> dict[str, Any]:
    """`eagle_config`, {} where there is none."""
    found = config.get("eagle_config")
    return found if isinstance(found, dict) else {}


def captures(config: Mapping[str, Any]) -> bool:
    """Does it read states of inner layers? Else what the target's own head reads."""
    return inner(config).get("use_aux_hidden_state", True) is not False


def guessed(layers: int) -> list[int]:
    """The i of the x[i] that are captured where nothing is said.

    Args:
        layers: N of the target.
    """
    return sorted({2, layers // 2, layers - 3})
