"""Values that are not finite: noticed where a token is chosen from logits or features are kept, and
traced to where they come from.

To notice costs one reading of what a large product has just written. Only once it has happened is
the text read again, with the output of every layer, to name the first token and the first part of
the model that are not finite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drafttrain.errors import InputError
from drafttrain.nn.spoilt import SPOILT, spoilt

_Pass = Callable[[Tensor], Tensor]
"""(1 s) ids -> (1 s d) last hidden states."""


class Reads(Protocol):
    """A causal LM whose passes can be watched, see `nn.causal.CausalLM`."""

    called: str
    model: Any
    base: Any
    embedding: Any
    output: Any
    decoder_layers: nn.ModuleList

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def norm_name(self) -> str | None: ...

    def full_pass(self, ids: Tensor) -> Tensor: ...

    def new_cache(self, rows: int, capacity: int) -> Any: ...

    def read(self, ids: Tensor, cache: Any) -> Tensor: ...

    def head(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Origin:
    """Where the first value that is not finite comes from."""

    position: int
    """Of the token in the text that it comes with, from 0."""
    token: int
    part: str
    """As people read it: "the embedding", "layer 3", "the final norm", "the head"; another one is
    called by its name in the code, "the part wpe"."""
    damaged: bool
    """Are weights or buffers of that part not finite? -inf in a buffer is a mask."""


def usable(logits: Tensor) -> Tensor:
    """(... v) -> (...) bool: can a token be chosen? NaN and infinity spoil a row; -inf rules out a
    token, and spoils a row that it fills."""
    return logits.amax(-1).isfinite()


def fault(model: Reads, ids: Sequence[int], where: str, more: str = "") -> InputError:
    """The error that ends a run: where a model's values are not finite, and what to do.

    Args:
        ids: the text after which that was noticed; it is read again here.
        where: what people call this text, such as "prompt 3".
        more: what else they should know of it.
    """
    return fault_of(model, trace(model, ids), where, more)


def fault_of(model: Reads, found: Origin | None, where: str, more: str = "") -> InputError:
    """The same error for what `trace` has found already; None: nothing in the text."""
    if found is None and (names := spoilt_weights(model)):
        known = f"{SPOILT} {where}{more}"
        return InputError(f"{model.called}: {known}; {_not_finite(names)}: {_AGAIN_FILES}")
    if found is None:
        known = f"{SPOILT} {where}, though read again it gives finite ones{more}"
        return InputError(f"{model.called}: {known}; {_way_out(model.dtype, _AGAIN)}")
    place = f"position {found.position} (token {found.token})"
    known = f"{SPOILT} {where}, {place}, first in {found.part}{more}"
    if found.damaged:
        return InputError(
            f"{model.called}: {known}; weights of {found.part} are not finite: {_AGAIN_FILES}"
        )
    return InputError(f"{model.called}: {known}; {_way_out(model.dtype, _DAMAGED)}")


def spoilt_weights(model: Reads) -> list[str]:
    """Names of a model's weights and buffers that are not finite; -inf in a buffer is a mask."""
    return _spoilt_in(model.model)


def _spoilt_in(module: nn.Module) -> list[str]:
    weights = spoilt(dict(module.named_parameters()))
    buffers = {
        name: value.masked_fill(value == -torch.inf, 0) for name, value in module.named_buffers()
    }
    return weights + spoilt(buffers)


def drafter_fault(drafter: object, dtype: torch.dtype | None, where: str) -> InputError:
    """The same for a drafter: its drafts after such values would mean nothing."""
    names = spoilt(dict(drafter.named_parameters())) if isinstance(drafter, nn.Module) else []
    known = f"drafter {type(drafter).__name__}: NaN or infinite values after {where}"
    if names:
        return InputError(
            f"{known}; {_not_finite(names)}: get the package again, or train it again"
        )
    larger = ""
    if dtype in (torch.float16, torch.bfloat16):
        known += f": its weights are damaged, or too large for {str(dtype).removeprefix('torch.')}"
        larger = "decode with dtype=float32, "
    else:
        known += ": its weights are damaged, or too large"
    return InputError(
        f"{known}; {larger}get the package again, or train again with a smaller optim.lr"
    )


def _not_finite(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} of its weights are not finite"


_AGAIN_FILES = "get its files again"
_DAMAGED = "its files are damaged, or do not fit its code: get them again"
_AGAIN = "if that happens again, try target.attention=eager"


def _way_out(dtype: torch.dtype, otherwise: str) -> str:
    """What to do by the target's dtype; `otherwise` where no other has more room."""
    if dtype == torch.float16:
        most = f"{torch.finfo(dtype).max:,.0f}"
        return (
            f"float16 holds numbers up to {most}: load it in bfloat16 or float32 "
            "(target.dtype=float32)"
        )
    if dtype == torch.bfloat16:
        return "load it in float32 (target.dtype=float32)"
    return otherwise


@torch.inference_mode()
def trace(model: Reads, ids: Sequence[int], *, every: bool = False) -> Origin | None:
    """The first token of a text, and for it the first part of a model, whose output is not finite;
    None where all of it is finite.

    Attention spreads NaN also to positions that are masked from it, so the shortest beginning of
    the text that is spoilt is looked for, by halves.

    Args:
        every: look at what the head makes of every token, not only of the last one.
    """
    # What reads no mask may step over a value that the cached pass of decoding shows.
    ways = (model.full_pass, lambda row: model.read(row, model.new_cache(1, row.shape[1])))
    for read in ways:
        found = _origin(model, read, ids)
        if every and (found is None or found.part == _HEAD):
            found = _in_head(model, read, ids)
        if found:
            return found
    return None


def _in_head(model: Reads, read: _Pass, ids: Sequence[int]) -> Origin | None:
    """The first token after which the head leaves none to choose."""
    hidden = read(torch.tensor([list(ids)], device=model.device))
    for start in range(0, len(ids), _CHUNK):
        odd = ~usable(model.head(hidden[0, start : start + _CHUNK]))
        if bool(odd.any()):
            return _at(model, ids, start + int(odd.nonzero()[0, 0]), _HEAD)
    return None


_CHUNK = 64
"""Positions whose logits exist at one time."""


def _origin(model: Reads, read: _Pass, ids: Sequence[int]) -> Origin | None:
    part = _first_part(model, read, ids)
    if part is None:
        return None
    low, high = 1, len(ids)
    while low < high and part != _HEAD:
        middle = (low + high) // 2
        found = _first_part(model, read, ids[:middle])
        if found is None or found == _HEAD:
            low = middle + 1
        else:
            high, part = middle, found
    return _at(model, ids, len(ids) - 1 if part == _HEAD else high - 1, part)


def _at(model: Reads, ids: Sequence[int], at: int, part: str) -> Origin:
    module = dict(_parts(model)).get(part)
    damaged = module is not None and bool(_spoilt_in(module))
    return Origin(at, int(ids[at]), part, damaged)


_NORM, _HEAD = "the final norm", "the head"


def _parts(model: Reads) -> list[tuple[str, nn.Module]]:
    """The layers, the head, and whatever else holds no layer: embeddings, tables of positions,
    norms."""
    known = {model.embedding: "the embedding", model.output: _HEAD}
    known |= {layer: f"layer {i}" for i, layer in enumerate(model.decoder_layers)}
    if model.norm_name is not None:
        known.setdefault(getattr(model.base, model.norm_name), _NORM)

    def others(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if child in known:
                continue
            if any(inner in known for inner in child.modules()):
                yield from others(child)
            else:
                yield child

    names = {module: name for name, module in model.base.named_modules()}
    rest = [(f"the part {names[module]}", module) for module in others(model.base)]
    return [*((name, module) for module, name in known.items()), *rest]


def _first_part(model: Reads, read: _Pass, ids: Sequence[int]) -> str | None:
    """The first part whose output over a text is not finite; the head is looked at for the last
    token only."""
    with _watched(model) as found:
        hidden = read(torch.tensor([list(ids)], device=model.device))
    if found:
        return found[0]
    if not _all_finite(hidden):
        return _NORM
    return None if bool(usable(model.head(hidden[:, -1])).all()) else _HEAD


@contextlib.contextmanager
def _watched(model: Reads) -> Iterator[list[str]]:
    """Names of the parts whose output is not finite, in the order in which they run."""
    found: list[str] = []
    handles = []
    for name, module in _parts(model):
        if name == _HEAD:
            continue

        def hook(_module: nn.Module, _args: Any, output: Any, name: str = name) -> None:
            values = output if isinstance(output, tuple) else (output,)
            given = values[:1] if name.startswith("layer") else values
            if not all(_all_finite(value) for value in given if isinstance(value, Tensor)):
                found.append(name)

        handles.append(module.register_forward_hook(hook))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _all_finite(values: Tensor) -> bool:
    return not values.is_floating_point() or bool(values.isfinite().all())
