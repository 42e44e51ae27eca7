"""The config of the library speculators: the head's own keys at the top level, its block's inside,
and the target by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafttrain.layouts.eagle3.facts import FLAGS, KEY, SPECULATORS_TYPE
from drafttrain.layouts.writing import Source
from drafttrain.target.naming import public

BLOCK = "transformer_layer_config"
VERSION = "0.9.0"
"""Of the library, whose keys these are."""
_OWN = (KEY, "draft_vocab_size", *FLAGS)
"""At the top level. vLLM's adapter looks for num_aux_hidden_states among the block's keys."""
_TAKEN_OVER = (
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "tie_word_embeddings",
    "quantization_config",
)
_ELSEWHERE = ("architectures", "eagle_config", "dtype", "torch_dtype")


def nested(config: Mapping[str, Any], source: Source[Any]) -> dict[str, Any]:
    """A plain config of this layout as the library writes it."""
    block = {key: value for key, value in config.items() if key not in (*_OWN, *_ELSEWHERE)}
    target = source.target
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": source.tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {"name_or_path": public(target.name), "architectures": [type(target.model).__name__]}
    return {
        "architectures": config["architectures"],
        SPECULATORS_TYPE: "eagle3",
        "speculators_version": VERSION,
        **{key: config[key] for key in _OWN if key in config},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": config["dtype"],
        BLOCK: block,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
    }


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The plain config of this layout that vLLM's adapter makes of the library's."""
    found = shared(config)
    qwen = found.get("model_type") == "qwen3"
    found["architectures"] = ["Eagle3Qwen3ForCausalLM" if qwen else "Eagle3LlamaForCausalLM"]
    found["norm_before_residual"] = config.get(
        "norm_before_residual", config.get(SPECULATORS_TYPE) == "eagle3"
    )
    found[KEY] = config.get(KEY)
    found["mask_token_id"] = config.get("mask_token_id")
    return found


def shared(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the adapter takes over for heads of all kinds: the block's keys, and these of its
    own."""
    block = config.get(BLOCK)
    found = {**(block if isinstance(block, dict) else {})}
    found |= {key: config[key] for key in _TAKEN_OVER if key in config}
    found["draft_vocab_size"] = config.get("draft_vocab_size")
    if config.get("target_hidden_size") is not None:
        found["target_hidden_size"] = config["target_hidden_size"]
    return found
