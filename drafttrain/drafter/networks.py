"""Networks of `transformers` for small causal LMs, and their configs."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import torch

from drafttrain.checks import shown
from drafttrain.errors import InputError, first_line
from drafttrain.nn.attention import TREE_BACKENDS
from drafttrain.nn.layers import without_dropout
from drafttrain.target.model import Target

_VOLATILE = (
    "_name_or_path",
    "transformers_version",
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
)
_LISTS = ("architectures", "token_id", "token_ids")
"""Ends of names in a config whose lists do not go by layers."""


def refuse_kernels(settings: Mapping[str, Any], where: str) -> None:
    """Raise InputError if a config asks for kernels, which transformers would fetch from elsewhere
    and run."""
    for name, value in settings.items():
        if "implementation" in str(name):
            known = (None, *TREE_BACKENDS) if "attn" in name else (value,)
            if value not in known or "/" in str(value):
                raise InputError(
                    f"{where}.{name} is {shown(value)}: only what transformers itself brings is run"
                )
        elif isinstance(value, Mapping):
            refuse_kernels(value, f"{where}.{name}")


def plain_config(network: Any) -> dict[str, Any]:
    """A network's config as plain JSON values, for `Described`."""
    found: dict[str, Any] = json.loads(network.config.to_json_string(use_diff=False))
    return {name: value for name, value in found.items() if name not in _VOLATILE}


def config_with_layers(config: Any, layers: list[int]) -> Any:
    """The config with these layers; what it says of each layer goes with it."""
    found = without_dropout(copy.deepcopy(config))
    count = config.num_hidden_layers
    for name, value in vars(config).items():
        if (
            isinstance(value, list | tuple)
            and len(value) == count
            and not name.startswith("_")
            and not name.endswith(_LISTS)
        ):
            setattr(found, name, type(value)(value[layer] for layer in layers))
    found.num_hidden_layers = len(layers)
    return found


def class_of(target: Target, config: Any) -> Any:
    if target.model.config is target.config:
        return type(target.model)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM._model_mapping[type(config)]


def new_network(kind: Any, config: Any, attention: str | None) -> Any:
    words = {} if attention is None else {"attn_implementation": attention}
    try:
        return kind._from_config(config, dtype=torch.float32, **words)
    except (TypeError, ValueError, RuntimeError, AttributeError, AssertionError) as error:
        raise InputError(
            f"no {kind.__name__} can be built from such a config: {first_line(error)}"
        ) from error


def config_of_standalone(network: Any, tied: bool) -> Any:
    """The config of a network once what it borrows is put in: tied if head and embedding are
    one."""
    found = copy.deepcopy(network.config)
    found.tie_word_embeddings, found.architectures = tied, [type(network).__name__]
    return found
