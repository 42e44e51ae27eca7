"""New decoder layers of a causal LM's own family, or plain ones in its shape, every parameter
initialised, and their call.

A layer class of `transformers` that is constructed directly initialises only what torch's own
modules initialise. Experts, routers and attention sinks are set later, by the model around it
(`PreTrainedModel._init_weights`); here that step follows at once. A family without such modules
gets what direct construction gives, bit for bit.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import Cache

from drafttrain.errors import InputError
from drafttrain.nn.causal import CausalLM
from drafttrain.nn.plain import INPUT_NORM, plain_config, plain_layer, plain_rotary

_INPUTS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")
"""Names of the products that read the attention's input."""
_EMPTY = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty)


def new_layers(
    model: CausalLM,
    count: int = 1,
    *,
    input_norm: bool | nn.Module = True,
    input_width: int | None = None,
    rotary: Mapping[str, Any] | None = None,
    full_attention: bool = True,
    plain: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> list[nn.Module]:
    """Decoder layers of the model's family and shape with random weights, in torch's default dtype
    on torch's default device. Torch's global generator is the only source of chance.

    Args:
        model: whose layer class and config they have; it is not changed.
        count: how many; layer i writes entry i of a cache.
        input_norm: keep the norms before attention (true), replace them by the identity (false), or
            replace that of the first layer by a module of the caller. With two inputs, as EAGLE-3
            has them, it returns (b s input_width) from the (b s d) residual stream that the layer
            gives it.
        input_width: what the queries, keys and values of the first layer are made from; None is d.
            The residual stream stays d wide.
        rotary: rotary settings in place of the model's own, such as {"rope_theta": 1e6}. Layers are
            given their rotary embeddings by the caller: see `new_rotary`.
        full_attention: also where the model's own layers slide. Otherwise layer i is of the kind of
            the model's layer i, and the caller's masks are to slide.
        plain: Llama-like ones in place of the family's own, see `plain.why_plain`.
        settings: of the family's config, in place of the model's own.
    Raises: InputError for a family that has no such layers.
    """
    config = layer_config(model, count, rotary=rotary, full_attention=full_attention, plain=plain)
    for name, value in (settings or {}).items():
        setattr(config, name, value)
    kind: Any = plain_layer if plain else type(model.decoder_layers[0])
    with _Marked():
        layers: list[nn.Module] = [kind(config, number) for number in range(count)]
    for layer in layers:
        _initialise(model, layer)
    if input_width is not None and input_width != model.width:
        _widen(model, layers[0], input_width)
    if input_norm is not True:
        if not all(hasattr(layer, INPUT_NORM) for layer in layers):
            raise InputError(f"{_named(model)}: its layers have no norm before attention")
        given = isinstance(input_norm, nn.Module)
        for layer in layers[:1] if given else layers:
            setattr(layer, INPUT_NORM, input_norm if given else nn.Identity())
    return layers


def layer_config(
    model: CausalLM,
    count: int = 1,
    *,
    rotary: Mapping[str, Any] | None = None,
    full_attention: bool = True,
    plain: bool = False,
) -> Any:
    """The config of `new_layers`, a copy without dropout; arguments as there."""
    if plain:
        return plain_config(model, count, rotary=rotary)
    config = without_dropout(copy.deepcopy(model.config))
    config.num_hidden_layers = count
    kinds = getattr(config, "layer_types", None)
    if kinds:
        repeated = [kinds[number % len(kinds)] for number in range(count)]
        config.layer_types = ["full_attention"] * count if full_attention else repeated
    config._attn_implementation = model.attention
    if rotary is not None:
        config.rope_parameters = {**(getattr(config, "rope_parameters", None) or {}), **rotary}
    return config


def without_dropout(config: Any) -> Any:
    """Dropout would draw from a source of chance that a resumed run does not put back."""
    for name, value in list(vars(config).items()):
        if (
            ("dropout" in name or "pdrop" in name)
            and isinstance(value, int | float)
            and not isinstance(value, bool)
        ):
            setattr(config, name, 0.0)
    return config


def new_rotary(
    model: CausalLM, rotary: Mapping[str, Any] | None = None, *, plain: bool = False
) -> nn.Module:
    """A module of the family: (x, position_ids=positions) -> the rotary embeddings that its layers
    read. None gives the settings of the model itself.

    Args:
        plain: for plain layers.
    """
    if plain:
        return plain_rotary(plain_config(model, rotary=rotary))
    if not hasattr(model.base, "rotary_emb"):
        raise InputError(f"{_named(model)}: it has no rotary positions")
    made: nn.Module = type(model.base.rotary_emb)(config=layer_config(model, rotary=rotary))
    return made


def _initialise(model: CausalLM, module: nn.Module) -> None:
    """Give parameters that a constructor left unset the family's own initial values. `module` was
    constructed within `_Marked`, so that unset parameters are NaN.

    Some families construct routers as zero and draw them afterwards, so a module in which nothing
    was drawn is initialised by the family too. Norms are not changed by that. Torch's own modules
    are complete.
    """
    with torch.no_grad():
        for part in module.modules():
            own = [p for p in part.parameters(recurse=False) if not p.is_meta]
            if not own or type(part).__module__.partition(".")[0] == "torch":
                continue
            if any(_unset(p) for p in own) or all(_constant(p) for p in own):
                model.base._init_weights(part)
    unset = [name for name, p in module.named_parameters() if not p.is_meta and _unset(p)]
    if unset:
        raise InputError(
            f"{_named(model)}: its family gives new layers no initial value for {unset[0]}"
        )


def cache_word(layer: nn.Module) -> str:
    """The argument by which a layer, or an attention, takes its cache."""
    kind: Any = type(layer)
    return _cache_word(kind)


@functools.cache
def _cache_word(kind: Any) -> str:
    words = inspect.signature(kind.forward).parameters
    known = (word for word in ("cache", "past_key_values", "layer_past") if word in words)
    return next(known, "cache")


def call(
    layer: nn.Module,
    hidden: Tensor,
    *,
    positions: Tensor,
    rotary: Any,
    mask: Tensor | None = None,
    cache: Cache | None = None,
) -> Tensor:
    """(b s d) residual stream before a layer -> after it.

    Args:
        positions: (b s) int64.
        rotary: what the family's rotary module makes of the positions.
        mask: in the form of the attention backend, see `attention.as_attention`; None is causal
            where the backend is sdpa.
        cache: to which the layer's keys and values are added, or extra ones to be read before them.
    """
    out = layer(
        hidden,
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=rotary,
        use_cache=cache is not None,
        **{cache_word(layer): cache},
    )
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return found


class Given(Cache):
    """Extra keys and values that a pass reads before its own; nothing is kept of the pass.

    Args:
        entries: {layer: keys and values, (b h t e) each, as of `keys_and_values`}.
    """

    is_compileable = False

    def __init__(self, entries: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        self.layers: list = []
        self.layer_class_to_replicate = None
        self.offloading = False
        self.entries = dict(entries)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """(b h s e) twice -> (b h t+s e) twice."""
        keys, values = self.entries[layer_idx]
        return torch.cat((keys, key_states), 2), torch.cat((values, value_states), 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.entries[layer_idx][0].shape[2]


def keys_and_values(layer: nn.Module, x: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
    """What a layer's attention makes of (b t d) inputs, rotated: (b h t e) keys and values. With
    grad where gradients are on.

    A block drafter reads a context so: keys and values of target features, then those of the block.

    Args:
        x: what the attention reads; the layer's input norm is not applied.
        rotary: of the positions of x.
    """
    attention: Any = next(part for part in layer.children() if hasattr(part, "layer_idx"))
    words = {cache_word(attention): _Recorder()}
    try:
        attention(x, attention_mask=None, position_embeddings=rotary, **words)
    except _Recorded as found:
        return found.keys, found.values
    raise InputError(f"{type(layer).__name__} writes no keys and values into a cache")


class _Recorded(Exception):
    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values


class _Recorder(Given):
    """Ends the pass at the first keys and values."""

    def __init__(self) -> None:
        super().__init__({})

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        raise _Recorded(key_states, value_states)


class _Marked(TorchFunctionMode):
    """Memory that is allocated without a value holds NaN, so that it can be found."""

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _EMPTY and (out.is_floating_point() or out.is_complex()):
            with torch.no_grad():
                out.fill_(math.nan)
        return out


def _unset(parameter: Tensor) -> bool:
    return bool(parameter.isnan().any())


def _constant(parameter: Tensor) -> bool:
    return bool((parameter == parameter.flatten()[:1]).all())


def _widen(model: CausalLM, layer: nn.Module, width: int) -> None:
    found = [
        (parent, name, part)
        for parent in layer.modules()
        for name, part in parent.named_children()
        if name in _INPUTS and isinstance(part, nn.Linear) and part.in_features == model.width
    ]
    if not found:
        raise InputError(
            f"{_named(model)}: the products that read the attention's input were not found; they "
            f"are looked for as {', '.join(_INPUTS)}"
        )
    for parent, name, part in found:
        setattr(parent, name, nn.Linear(width, part.out_features, bias=part.bias is not None))


def _named(model: CausalLM) -> str:
    return f"{model.called} ({model.config.model_type})"
