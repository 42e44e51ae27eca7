"""Small random models of families that `target=tiny` does not have."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafttrain.target.model import Target


def model_of(family: str, backend: str = "eager", **settings: Any) -> Any:
    """A random model of a family that `tiny` does not have."""
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **sizes | settings), attn_implementation=backend
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                size = 1.0 if "embed" in name else 0.6 / parameter.shape[-1] ** 0.5
                parameter.normal_(0, size)
    return model


AFTER: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 16, "sliding_window": 24},
    "olmo2": {},
    "olmo3": {"sliding_window": 24},
    "exaone4": {"sliding_window": 24, "head_dim": 8},
    "seed_oss": {"head_dim": 16, "residual_dropout": 0.1},
    "glm4": {"head_dim": 8},
}
"""Norms after the sub-layers, biases, q/k norms."""
EXPERTS: dict[str, dict[str, Any]] = {
    family: {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, **more}
    for family, more in {
        "qwen3_moe": {"head_dim": 8, "moe_intermediate_size": 24},
        "mixtral": {},
        "olmoe": {},
        "granitemoe": {},
        "gpt_oss": {"head_dim": 8, "sliding_window": 24},
    }.items()
}
"""With experts and routers; gpt_oss has attention sinks too."""


def target_of(family: str) -> Target:
    """A target of one of these, or of another family as transformers sizes it."""
    settings = {**AFTER, **EXPERTS}.get(family, {})
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    backend = "eager" if family == "gpt_oss" else "sdpa"
    heads = {} if family == "gpt2" else {"num_key_value_heads": 2}
    return Target(model_of(family, backend, **heads, **ids, **settings), None, f"tiny-{family}")
