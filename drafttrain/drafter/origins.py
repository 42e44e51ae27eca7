"""Where a small causal LM comes from: cut out of the target, new in the target's family, read from
a directory; a package keeps the config of one. All are networks of `transformers` in float32,
without dropout."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from drafttrain.checks import integer, path_of, shown
from drafttrain.drafter.borrowing import SLACK
from drafttrain.drafter.lending import LentEmbedding, LentHead, LentNorm
from drafttrain.drafter.networks import class_of, config_with_layers, new_network, refuse_kernels
from drafttrain.errors import InputError, first_line
from drafttrain.nn.layers import without_dropout
from drafttrain.target import tokenising
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
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.pkl")
MOST_LAYERS = 1024


class Origin(Protocol):
    """Where a network comes from."""

    @property
    def owns(self) -> tuple[str, ...]:
        """Which of `PARTS` are the network's own; it borrows the others of the target."""
        ...

    def build(self, target: Target) -> Any:
        """The network. Raises: InputError if it does not fit the target."""
        ...

    def check_held(self, target: Target, tensors: int, weights: int) -> None:
        """Raise InputError if the network is far larger than what a package holds. Nothing is
        allocated."""
        ...


def chosen(
    *,
    layers: int | Sequence[int] | None,
    path: str | None,
    config: Mapping[str, Any] | None,
    own: Sequence[str],
    sizes: Mapping[str, int | None],
) -> Origin:
    """The one origin that settings name.

    Args:
        sizes: by the names of `SIZES`.
    Raises: InputError for none, for several, and for settings that are another origin's.
    """
    named = {"layers": layers, "path": path, "config": config}
    given = [name for name, value in named.items() if value is not None]
    if len(given) != 1:
        raise InputError(
            f"the drafter's origin is {' and '.join(given) or 'not given'}: give one of "
            "layers=[..] (cut from the target), layers=<a number> (new), path=<a directory>"
        )
    cut, new = isinstance(layers, list | tuple), type(layers) is int
    if layers is not None and not cut and not new:
        raise InputError(
            f"layers={shown(layers)}: needs an integer, or a list of the target's layers such as "
            "[0, 1]"
        )
    sized = [name for name, value in sizes.items() if value is not None]
    if sized and not new:
        raise InputError(
            f"{sized[0]}={sizes[sized[0]]}: only a new network takes sizes, and that is layers=<a "
            "number>"
        )
    if not isinstance(own, list | tuple) or not all(part in PARTS for part in own):
        raise InputError(f"own={shown(own)}: needs a list of some of {', '.join(PARTS)}")
    if own and not cut:
        raise InputError(f"own={list(own)}: only a cut borrows of the target; set it to []")
    if isinstance(layers, list | tuple):
        return Cut(layers=list(layers), own=tuple(part for part in PARTS if part in own))
    if isinstance(layers, int):
        return New(layers=layers, **sizes)
    if path is not None:
        return Directory(path=path)
    assert config is not None
    return Described(config=config)


# Cut from the target ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Some of the target's decoder layers, copied."""

    layers: Sequence[int]
    """Numbers of the target's layers, from 0, ascending."""
    own: tuple[str, ...]
    """Of `PARTS`, those that are copied too; the others are the target's."""

    @property
    def owns(self) -> tuple[str, ...]:
        return self.own

    def build(self, target: Target) -> Any:
        self._check(target)
        config = config_with_layers(target.config, list(self.layers))
        tied = target.output.weight is target.embedding.weight
        config.tie_word_embeddings = tied and {"embedding", "head"} <= set(self.own)
        borrowed = {"embedding", "head"}.isdisjoint(self.own)
        if borrowed:
            # They are replaced below; in large vocabularies they would be most of the network.
            config.vocab_size, config.pad_token_id = 2, None
        network = new_network(type(target.model), config, target.attention)
        replaced = [network.get_input_embeddings(), network.get_output_embeddings()]
        self._copy(target, network, replaced if borrowed else [])
        config.vocab_size = target.config.vocab_size
        config.pad_token_id = target.config.pad_token_id
        _lend(network, target, self.own)
        return network

    def check_held(self, target: Target, tensors: int, weights: int) -> None:
        """It cannot be larger than the target."""

    def _check(self, target: Target) -> None:
        layers, count = self.layers, len(target.decoder_layers)
        numbers = all(type(layer) is int and 0 <= layer < count for layer in layers)
        if not layers or not numbers or any(a >= b for a, b in pairwise(layers)):
            raise InputError(
                f"layers={list(layers)}: needs numbers of layers of target {target.name}, from 0 "
                f"to {count - 1}, ascending, each once"
            )
        if target.model.config is not target.config:
            raise InputError(
                f"target {target.name} holds its language model inside another one: it cannot be "
                "cut; give layers=<a number> for a new network, or path=<a directory>"
            )
        if getattr(target.config, "quantization_config", None) is not None:
            raise InputError(
                f"target {target.name} is quantised: its layers cannot be trained; give an "
                "unquantised one"
            )

    def _copy(self, target: Target, network: Any, replaced: Sequence[Any]) -> None:
        """Copy the target's weights into a network, but for modules that are replaced later."""
        place = next(
            name for name, module in target.model.named_modules() if module is target.decoder_layers
        )
        there = target.model.state_dict()
        left_out = [module.weight for module in replaced]
        for name, tensor in network.state_dict(keep_vars=True).items():
            source = name
            if name.startswith(f"{place}."):
                number, _, rest = name[len(place) + 1 :].partition(".")
                source = f"{place}.{self.layers[int(number)]}.{rest}"
            if any(tensor is other for other in left_out):
                continue
            if source not in there or there[source].shape != tensor.shape:
                raise InputError(
                    f"target {target.name}: its layers differ in more than their weights ({name}), "
                    "they cannot be cut out"
                )
            tensor.data.copy_(there[source])


def _lend(network: Any, target: Target, own: Sequence[str]) -> None:
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
                "set own=[norm] to train a copy"
            )
        setattr(base, norm, LentNorm(getattr(target.base, norm), like))
    if "head" not in own:
        network.set_output_embeddings(LentHead(target.output, like))


# New ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class New:
    """Layers of the target's family with random weights."""

    layers: int
    width: int | None
    """The target's own where None; so are the other sizes."""
    heads: int | None
    kv_heads: int | None
    mlp: int | None

    def __post_init__(self) -> None:
        if not 1 <= self.layers <= MOST_LAYERS:
            raise InputError(
                f"layers={shown(self.layers)}: needs an integer from 1 to {MOST_LAYERS}, or a list "
                "of the target's layers"
            )
        for name in SIZES:
            integer(name, getattr(self, name), 1, null="the target's own")

    @property
    def owns(self) -> tuple[str, ...]:
        return PARTS

    def build(self, target: Target) -> Any:
        return new_network(*self._like(target), target.attention)

    def check_held(self, target: Target, tensors: int, weights: int) -> None:
        _check_size(*self._like(target), tensors, weights)

    def _like(self, target: Target) -> tuple[Any, Any]:
        """The class and the config of such a network."""
        count = len(target.decoder_layers)
        config = config_with_layers(target.config, [k % count for k in range(self.layers)])
        for name, word in SIZES.items():
            value = getattr(self, name)
            if value is None:
                continue
            if getattr(config, word, None) is None:
                raise InputError(
                    f"{name}={value}: the family of target {target.name} ({config.model_type}) has "
                    f"no {word}"
                )
            setattr(config, word, value)
        width, heads = config.hidden_size, config.num_attention_heads
        keys = getattr(config, "num_key_value_heads", None) or heads
        if heads % keys:
            raise InputError(
                f"heads={heads}, kv_heads={keys}: the heads must be a multiple of the key/value "
                "heads"
            )
        if self.width or self.heads:
            if width % heads or (width // heads) % 2:
                raise InputError(
                    f"width={width}, heads={heads}: the heads do not divide the width into even "
                    "widths"
                )
            _set_head_width(config, width // heads)
        return class_of(target, config), config


def _set_head_width(config: Any, width: int) -> None:
    before = getattr(config, "head_dim", None)
    if before is None:
        return
    config.head_dim = width
    if getattr(config, "query_pre_attn_scalar", None) == before:
        config.query_pre_attn_scalar = width


# As a package keeps it ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Described:
    """By its config, with random weights, which those of a package replace."""

    config: Mapping[str, Any]

    @property
    def owns(self) -> tuple[str, ...]:
        return PARTS

    def build(self, target: Target) -> Any:
        return new_network(*self._read(), None)

    def check_held(self, target: Target, tensors: int, weights: int) -> None:
        _check_size(*self._read(), tensors, weights)

    def _read(self) -> tuple[Any, Any]:
        """The class and the config of such a network."""
        from transformers import AutoConfig, AutoModelForCausalLM

        given = self.config
        named = isinstance(given, Mapping) and isinstance(given.get("model_type"), str)
        if not named or "auto_map" in given:
            raise InputError(
                "config: needs a transformers config with its model_type, without code of its own"
            )
        refuse_kernels(given, "config")
        if given.get("quantization_config") is not None:
            raise InputError("config: is quantised and cannot be trained")
        try:
            config = AutoConfig.for_model(**given)
            config = without_dropout(config)
            kind = AutoModelForCausalLM._model_mapping[type(config)]
        except Exception as error:  # Each family checks its config in its own way.
            raise InputError(
                f"config describes no causal LM of transformers: {first_line(error)}"
            ) from error
        return kind, config


def _check_size(kind: Any, config: Any, tensors: int, weights: int) -> None:
    """Raise InputError if a network is far larger than what a package holds."""
    count = getattr(config, "num_hidden_layers", 0)
    if type(count) is int and count > tensors:
        raise InputError(f"{count} layers are described, the package holds {tensors} tensors")
    with torch.device("meta"):
        needed = sum(p.numel() for p in new_network(kind, config, None).parameters())
    if needed > weights + SLACK:
        raise InputError(
            f"a network of {needed:,} weights is described, the package holds {weights:,}"
        )


# From a directory ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Directory:
    """A directory of `transformers`; only safetensors is read, and no code of its own is run."""

    path: str

    @property
    def owns(self) -> tuple[str, ...]:
        return PARTS

    def build(self, target: Target) -> Any:
        folder = path_of("drafter.path", self.path)
        self._check_files(folder)
        check_layers(folder, f"drafter.path={self.path}")
        config = self._config(folder)
        self._check_config(config, folder)
        _check_tokenizer(folder, target)
        return self._loaded(config, folder)

    def check_held(self, target: Target, tensors: int, weights: int) -> None:
        raise InputError(
            f"path={shown(self.path)}: a package holds its drafter itself and names no directory"
        )

    def _check_files(self, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            raise InputError(
                f"drafter.path={self.path} is no directory with a config.json: give one of a "
                "transformers causal LM"
            )
        if any(folder.glob("*.safetensors")):
            return
        pickled = [file.name for pattern in _PICKLED for file in sorted(folder.glob(pattern))]
        held = "holds no weights"
        if pickled:
            held = f"holds {pickled[0]}, which can run code when read"
        raise InputError(
            f"drafter.path={self.path} {held}: only safetensors is read, save the model as that"
        )

    def _config(self, folder: Path) -> Any:
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:
            if "trust_remote_code" in str(error):
                raise InputError(
                    f"drafter.path={self.path} brings its own Python code, which is never run: "
                    "give a family of transformers"
                ) from error
            raise InputError(
                f"drafter.path={self.path}: its config cannot be read: {first_line(error)}"
            ) from error

    def _check_config(self, config: Any, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        asked = config.to_dict() | {"attn_implementation": config._attn_implementation}
        refuse_kernels(asked, f"drafter.path={self.path}: config")
        if (folder / "adapter_config.json").exists():
            raise InputError(
                f"drafter.path={self.path} holds an adapter, whose weights belong to another "
                "model: merge it and save that"
            )
        if getattr(config, "quantization_config", None) is not None:
            raise InputError(
                f"drafter.path={self.path} is quantised and cannot be trained: give an unquantised "
                "model"
            )
        known = type(config) in AutoModelForCausalLM._model_mapping
        if getattr(config, "is_encoder_decoder", False) or not known:
            raise InputError(
                f"drafter.path={self.path} ({config.model_type}) is no decoder-only causal LM of "
                "transformers"
            )

    def _loaded(self, config: Any, folder: Path) -> Any:
        from transformers import AutoModelForCausalLM

        try:
            network, report = AutoModelForCausalLM.from_pretrained(
                folder,
                config=without_dropout(config),
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except Exception as error:
            raise InputError(
                f"drafter.path={self.path} cannot be loaded: {first_line(error)}"
            ) from error
        if lost := sorted(report.get("missing_keys", ())):
            raise InputError(
                f"drafter.path={self.path}: its files lack {len(lost)} tensors, the first is "
                f"{lost[0]}"
            )
        return network


def _as_written(folder: Path) -> Any | None:
    """The tokenizer as its file describes it; None where there is no such file, or none to read."""
    from transformers import PreTrainedTokenizerFast

    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception:  # Another library's many kinds.
        return None


def _check_tokenizer(folder: Path, target: Target) -> None:
    from transformers import AutoTokenizer

    if target.tokenizer is None or not any(folder.glob("tokenizer*")):
        log.warning(
            "drafter.path=%s: no tokenizer to compare with the target's; only the sizes of the "
            "vocabularies are compared",
            folder,
        )
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise InputError(
            f"drafter.path={folder}: its tokenizer cannot be read: {first_line(error)}"
        ) from error
    own = tokenising.parts_of(target.tokenizer)
    words = tokenising.difference(tokenising.parts_of(tokenizer), own, target.tokenizer)
    if words and (written := _as_written(folder)) is not None:
        # The class that a config names may load a tokenizer otherwise than its file says.
        words = tokenising.difference(tokenising.parts_of(written), own, target.tokenizer)
    if words:
        raise InputError(
            f"drafter.path={folder} has another tokenizer than target {target.name} ({words}): "
            "drafts are ids, so a drafter must share the target's vocabulary"
        )
