"""Where a small causal LM comes from: cut out of the target, new in the target's family, read from
a directory, or described by a package's settings. All are networks of `transformers` in float32,
without dropout."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from drafttrain.checks import integer, path_of, shown
from drafttrain.drafter.base import SLACK
from drafttrain.drafter.lending import LentEmbedding, LentHead, LentNorm
from drafttrain.errors import InputError, first_line
from drafttrain.nn.attention import TREE_BACKENDS
from drafttrain.target import fingerprint
from drafttrain.target.model import Target
from drafttrain.target.reading import check_layers

log = logging.getLogger(__name__)

PARTS = ("embedding", "norm", "head")
"""Parts of the target that a cut borrows, or copies and trains."""
SIZES = {
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "mlp": "intermediate_size",
}
"""Sizes of a new network, and their names in a config."""
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
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.pkl")
MOST_LAYERS = 1024


# Cut from the target ------------------------------------------------------------------------------


def cut(target: Target, layers: Sequence[int], own: Sequence[str]) -> Any:
    """A network of some of the target's decoder layers, copied.

    Args:
        layers: numbers of the target's layers, from 0, ascending.
        own: of `PARTS`, those that are copied too; the others are the target's.
    """
    count = len(target.decoder_layers)
    numbers = all(type(layer) is int and 0 <= layer < count for layer in layers)
    if not layers or not numbers or any(a >= b for a, b in pairwise(layers)):
        raise InputError(
            f"layers={list(layers)}: needs numbers of layers of target {target.name}, from 0 to "
            f"{count - 1}, ascending, each once"
        )
    if target.model.config is not target.config:
        raise InputError(
            f"target {target.name} holds its language model inside another one: it cannot be cut; "
            f"give layers=<a number> for "
            "a new network, or path=<a directory>"
        )
    if getattr(target.config, "quantization_config", None) is not None:
        raise InputError(
            f"target {target.name} is quantised: its layers cannot be trained; give an unquantised "
            f"one"
        )
    config = _same_with(target.config, list(layers))
    tied = target.output.weight is target.embedding.weight
    config.tie_word_embeddings = tied and {"embedding", "head"} <= set(own)
    borrowed = {"embedding", "head"}.isdisjoint(own)
    if borrowed:
        # They are replaced below; in large vocabularies they would be most of the network.
        config.vocab_size, config.pad_token_id = 2, None
    network = _made(type(target.model), config, target.attention)
    place = next(
        name for name, module in target.model.named_modules() if module is target.decoder_layers
    )
    there = target.model.state_dict()
    replaced = (
        ()
        if not borrowed
        else (network.get_input_embeddings().weight, network.get_output_embeddings().weight)
    )
    for name, tensor in network.state_dict(keep_vars=True).items():
        source = name
        if name.startswith(f"{place}."):
            number, _, rest = name[len(place) + 1 :].partition(".")
            source = f"{place}.{layers[int(number)]}.{rest}"
        if any(tensor is other for other in replaced):
            continue
        if source not in there or there[source].shape != tensor.shape:
            raise InputError(
                f"target {target.name}: its layers differ in more than their weights ({name}), "
                f"they cannot be cut out"
            )
        tensor.data.copy_(there[source])
    config.vocab_size, config.pad_token_id = target.config.vocab_size, target.config.pad_token_id
    lend(network, target, own)
    return network


def lend(network: Any, target: Target, own: Sequence[str]) -> None:
    """Put the target's parts in the place of the network's, but for those that it is to own."""
    base = getattr(network, network.base_model_prefix)
    like = next(
        module
        for name, module in network.named_modules()
        if name and isinstance(module, type(target.decoder_layers[0]))
    )
    if "embedding" not in own:
        network.set_input_embeddings(LentEmbedding(target.embedding, like))
    if "norm" not in own:
        norm = target.norm_name
        if norm is None:
            raise InputError(
                f"target {target.name} ({target.config.model_type}): its final norm was not found; "
                f"set own=[norm] to train a copy"
            )
        setattr(base, norm, LentNorm(getattr(target.base, norm), like))
    if "head" not in own:
        network.set_output_embeddings(LentHead(target.output, like))


# New ----------------------------------------------------------------------------------------------


def new(target: Target, layers: int, sizes: Mapping[str, int | None]) -> Any:
    """A network of the target's family with random weights.

    Args:
        sizes: by the names of `SIZES`; None is the target's own.
    """
    return _made(*_like(target, layers, sizes), target.attention)


def _like(target: Target, layers: int, sizes: Mapping[str, int | None]) -> tuple[Any, Any]:
    """The class and the config of a new network."""
    if not 1 <= layers <= MOST_LAYERS:
        raise InputError(
            f"layers={shown(layers)}: needs a whole number from 1 to {MOST_LAYERS}, or a list of "
            f"the target's layers"
        )
    count = len(target.decoder_layers)
    config = _same_with(target.config, [k % count for k in range(layers)])
    for name, value in sizes.items():
        if value is None:
            continue
        integer(name, value, 1, null="the target's own")
        if getattr(config, SIZES[name], None) is None:
            raise InputError(
                f"{name}={value}: the family of target {target.name} ({config.model_type}) has no "
                f"{SIZES[name]}"
            )
        setattr(config, SIZES[name], value)
    width, heads = config.hidden_size, config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    if heads % keys:
        raise InputError(
            f"heads={heads}, kv_heads={keys}: the heads must be a multiple of the key/value heads"
        )
    if sizes.get("width") or sizes.get("heads"):
        if width % heads or (width // heads) % 2:
            raise InputError(
                f"width={width}, heads={heads}: each head needs an even, whole share of the width"
            )
        before = getattr(config, "head_dim", None)
        if before is not None:
            config.head_dim = width // heads
        if before is not None and getattr(config, "query_pre_attn_scalar", None) == before:
            config.query_pre_attn_scalar = config.head_dim
    return _class_of(target, config), config


def described(settings: Mapping[str, Any]) -> Any:
    """A network with random weights by its config, as a package keeps it."""
    return _made(*_told(settings), None)


def _told(settings: Mapping[str, Any]) -> tuple[Any, Any]:
    """The class and the config that a package describes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if (
        not isinstance(settings, Mapping)
        or not isinstance(settings.get("model_type"), str)
        or "auto_map" in settings
    ):
        raise InputError(
            "config: needs a transformers config with its model_type, without code of its own"
        )
    _refuse_kernels(settings, "config")
    if settings.get("quantization_config") is not None:
        raise InputError("config: is quantised and cannot be trained")
    try:
        config = AutoConfig.for_model(**settings)
        config = _without_dropout(config)
        kind = AutoModelForCausalLM._model_mapping[type(config)]
    except Exception as error:  # Each family checks its config in its own way.
        raise InputError(
            f"config describes no causal LM of transformers: {first_line(error)}"
        ) from error
    return kind, config


def _refuse_kernels(settings: Mapping[str, Any], where: str) -> None:
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
            _refuse_kernels(value, f"{where}.{name}")


def check_held(
    target: Target,
    layers: object,
    sizes: Mapping[str, int | None],
    config: Mapping[str, Any] | None,
    tensors: int,
    weights: int,
) -> None:
    """Raise InputError if a new network, or one by its config, is far larger than what a package
    holds. Nothing is allocated."""
    if config is None and type(layers) is not int:
        return
    kind, found = _told(config) if config is not None else _like(target, layers, sizes)  # type: ignore[arg-type]
    count = getattr(found, "num_hidden_layers", 0)
    if type(count) is int and count > tensors:
        raise InputError(f"{count} layers are described, the package holds {tensors} tensors")
    with torch.device("meta"):
        needed = sum(p.numel() for p in _made(kind, found, None).parameters())
    if needed > weights + SLACK:
        raise InputError(
            f"a network of {needed:,} weights is described, the package holds {weights:,}"
        )


# From a directory ---------------------------------------------------------------------------------


def from_directory(path: str, target: Target) -> Any:
    """The network in a directory of `transformers`; only safetensors is read, and no code of its
    own is run."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = path_of("drafter.path", path)
    if not (folder / "config.json").is_file():
        raise InputError(
            f"drafter.path={path} is no directory with a config.json: give one of a transformers "
            f"causal LM"
        )
    if not any(folder.glob("*.safetensors")):
        pickled = [file.name for pattern in _PICKLED for file in sorted(folder.glob(pattern))]
        held = (
            f"holds {pickled[0]}, which can run code when read" if pickled else "holds no weights"
        )
        raise InputError(
            f"drafter.path={path} {held}: only safetensors is read, save the model as that"
        )
    check_layers(folder, f"drafter.path={path}")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise InputError(
                f"drafter.path={path} brings its own Python code, which is never run: give a "
                f"family of transformers"
            ) from error
        raise InputError(
            f"drafter.path={path}: its config cannot be read: {first_line(error)}"
        ) from error
    _refuse_kernels(
        config.to_dict() | {"attn_implementation": config._attn_implementation},
        f"drafter.path={path}: config",
    )
    if (folder / "adapter_config.json").exists():
        raise InputError(
            f"drafter.path={path} holds an adapter, whose weights belong to another model: merge "
            f"it and save that"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(
            f"drafter.path={path} is quantised and cannot be trained: give an unquantised model"
        )
    if (
        getattr(config, "is_encoder_decoder", False)
        or type(config) not in AutoModelForCausalLM._model_mapping
    ):
        raise InputError(
            f"drafter.path={path} ({config.model_type}) is no decoder-only causal LM of "
            f"transformers"
        )
    _check_tokenizer(folder, target)
    try:
        network, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=_without_dropout(config),
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        raise InputError(f"drafter.path={path} cannot be loaded: {first_line(error)}") from error
    if lost := sorted(report.get("missing_keys", ())):
        raise InputError(
            f"drafter.path={path}: its files lack {len(lost)} tensors, the first is {lost[0]}"
        )
    return network


def _check_tokenizer(folder: Path, target: Target) -> None:
    from transformers import AutoTokenizer

    if target.tokenizer is None or not any(folder.glob("tokenizer*")):
        log.warning(
            "drafter.path=%s: no tokenizer to compare with the target's; vocabularies are compared "
            "by size alone",
            folder,
        )
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise InputError(
            f"drafter.path={folder}: its tokenizer cannot be read: {first_line(error)}"
        ) from error
    if fingerprint.of_tokenizer(tokenizer) != fingerprint.of_tokenizer(target.tokenizer):
        raise InputError(
            f"drafter.path={folder} has another tokenizer than target {target.name}: drafts are "
            f"ids, so a drafter must share the "
            "target's vocabulary"
        )


# Common -------------------------------------------------------------------------------------------


def plain_config(network: Any) -> dict[str, Any]:
    """A network's config as plain JSON values, for `described`."""
    found: dict[str, Any] = json.loads(network.config.to_json_string(use_diff=False))
    return {name: value for name, value in found.items() if name not in _VOLATILE}


def _same_with(config: Any, layers: list[int]) -> Any:
    """The config with these layers; what it says of each layer goes with it."""
    found = _without_dropout(copy.deepcopy(config))
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


def _without_dropout(config: Any) -> Any:
    """Dropout would draw from a source of chance that a resumed run does not put back."""
    for name, value in list(vars(config).items()):
        if (
            ("dropout" in name or "pdrop" in name)
            and isinstance(value, int | float)
            and not isinstance(value, bool)
        ):
            setattr(config, name, 0.0)
    return config


def _class_of(target: Target, config: Any) -> Any:
    if target.model.config is target.config:
        return type(target.model)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM._model_mapping[type(config)]


def _made(kind: Any, config: Any, attention: str | None) -> Any:
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
