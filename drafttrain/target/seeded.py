"""Small random models of real families, for tests and for trying things out."""

from __future__ import annotations

from typing import Any

import torch

from drafttrain.checks import integer, number, shown
from drafttrain.errors import InputError

TINY = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_neox")


def check(
    family: str, *, vocab_size: int, width: int, layers: int, seed: int, sharpness: float
) -> None:
    """Raise InputError for settings of a tiny target that do not fit."""
    if family not in TINY:
        raise InputError(f"target.family={shown(family)}: give one of {', '.join(TINY)}")
    integer("target.vocab_size", vocab_size, 3, 1 << 20)
    integer("target.width", width, 8, 1 << 14)
    if width % 8:
        raise InputError(
            f"target.width={width}: needs a multiple of 8, for four heads of an even width"
        )
    integer("target.layers", layers, 1, 1 << 10)
    integer("target.seed", seed)
    number("target.sharpness", sharpness, above=0)


def config_of(
    family: str, *, vocab_size: int, width: int, layers: int, attention: str, settings: Any
) -> Any:
    """The config of such a model.

    Args:
        settings: more keys of the family's config.
    """
    from transformers import AutoConfig

    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 2 * width,
        "max_position_embeddings": 512,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "pad_token_id": 0,
    }
    if family != "gpt_neox":
        common["num_key_value_heads"] = 2
    if family in ("qwen3", "gemma2"):
        common["head_dim"] = width // 4
    if family == "mistral":
        common["sliding_window"] = 24
    if family == "gemma2":
        common |= {
            "sliding_window": 24,
            "query_pre_attn_scalar": width // 4,
            "hidden_activation": "gelu_pytorch_tanh",
        }
        attention = "eager"  # soft-capped attention has no sdpa kernel
    config = AutoConfig.for_model(family, **(common | settings))
    config._attn_implementation = attention
    return config


def model_of(config: Any, *, seed: int, sharpness: float) -> Any:
    """A causal LM with random weights, the same for the same seed. Torch's own generator is as it
    was afterwards.

    Args:
        sharpness: factor on the output head, so that its next-token distribution is far from
            uniform.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=config._attn_implementation
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    size = 1.0 if "embed" in name else 0.6 / parameter.shape[-1] ** 0.5
                    parameter.normal_(0, size)
            if not config.tie_word_embeddings:
                model.get_output_embeddings().weight.mul_(sharpness)
    return model
