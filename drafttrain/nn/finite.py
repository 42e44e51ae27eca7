"""Values that are not finite: noticed where a token is chosen from logits or features are kept, and
traced to where they come from.

To notice costs one reading of what a large product has just written. Only once it has happened is
the text read again, with the output of every layer, to name the first token and the first part of
the model that are not finite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drafttrain.errors import InputError
from drafttrain.nn.spoilt import SPOILT


class Reads(Protocol):
    """A causal LM whose passes can be watched, see `nn.causal.CausalLM`."""

    called: str
    base: Any
    embedding: Any
    output: Any
    decoder_layers: nn.ModuleList

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def full_pass(self, ids: Tensor) -> Tensor: ...

    def head(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Origin:
    """Where the first value that is not finite comes from."""

    position: int
    """Of the token in the text that it comes with, from 0."""
    token: int
    part: str
    """As people read it: "the embedding", "layer 3", "the final norm", "the head"."""
    damaged: bool
    """Are weights of that part not finite?"""


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
    if found is None:
        known = f"{SPOILT} {where}, though read again it gives finite ones{more}"
        return InputError(f"{model.called}: {known}; {_way_out(model.dtype, _AGAIN)}")
    place = f"position {found.position} (token {found.token})"
    known = f"{SPOILT} {where}, {place}, first in {found.part}{more}"
    if found.damaged:
        return InputError(
            f"{model.called}: {known}; weights of {found.part} are not finite: get its files again"
        )
    return InputError(f"{model.called}: {known}; {_way_out(model.dtype, _DAMAGED)}")


def drafter_fault(drafter: object, dtype: torch.dtype | None, where: str) -> InputError:
    """The same for a drafter: its drafts after such values would mean nothing."""
    return InputError(
        f"drafter {type(drafter).__name__}: NaN or infinite values after {where}: its weights are "
        f"damaged, or too large for {str(dtype).removeprefix('torch.')}; decode with "
        "dtype=float32, get the package again, or train again with a smaller optim.lr"
    )


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
def trace(model: Reads, ids: Sequence[int]) -> Origin | None:
    """The first token of a text, and for it the first part of a model, whose output is not finite;
    None where all of it is finite.

    Attention spreads NaN also to positions that are masked from it, so the shortest beginning of
    the text that is spoilt is looked for, by halves.
    """
    part = _first_part(model, ids)
    if part is None:
        return None
    low, high = 1, len(ids)
    while low < high and part != _HEAD:
        middle = (low + high) // 2
        found = _first_part(model, ids[:middle])
        if found is None or found == _HEAD:
            low = middle + 1
        else:
            high, part = middle, found
    at = len(ids) - 1 if part == _HEAD else high - 1
    module = dict(_parts(model)).get(part)
    weights = [] if module is None else list(module.parameters())
    damaged = any(not _all_finite(weight) for weight in weights)
    return Origin(at, int(ids[at]), part, damaged)


_NORM, _HEAD = "the final norm", "the head"


def _parts(model: Reads) -> list[tuple[str, nn.Module]]:
    layers = [(f"layer {i}", layer) for i, layer in enumerate(model.decoder_layers)]
    return [("the embedding", model.embedding), *layers, (_HEAD, model.output)]


def _first_part(model: Reads, ids: Sequence[int]) -> str | None:
    """The first part whose output over a text is not finite; the head is looked at for the last
    token only."""
    with _watched(model) as found:
        hidden = model.full_pass(torch.tensor([list(ids)], device=model.device))
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
    for name, module in _parts(model)[:-1]:

        def hook(_module: nn.Module, _args: Any, output: Any, name: str = name) -> None:
            if not _all_finite(output[0] if isinstance(output, tuple) else output):
                found.append(name)

        handles.append(module.register_forward_hook(hook))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _all_finite(values: Tensor) -> bool:
    return not values.is_floating_point() or bool(values.isfinite().all())
