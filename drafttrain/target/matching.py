"""Are stored features what they say they are? Some rows are read by the target and compared.

Checksums only say that a file is as it was written. A store that another program made, or another
version of one, may hold the residual stream before the final norm, another layer, or features of
the next position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Needs
from drafttrain.target.features import LAST, names_of
from drafttrain.target.model import Target

ROWS, TOKENS = 4, 512
"""Rows that are compared, short ones where there are any, and tokens of each at most."""
RIGHT = 0.02
"""Distance, relative to a vector's length, within which it does not matter what else is near."""
LARGEST = 0.25
"""Distance that no encoding and no rounding comes to."""
NEARER = 0.5
"""Something else of the target is what is stored where it is this much nearer than what should
be."""
_QUANTILE = 0.9


def check_rows(
    target: Target, batch: Batch, stored: Features, needs: Needs, what: str, again: str
) -> None:
    """Compare stored features with what the target computes for the same rows.

    Args:
        batch: a few rows, not joined.
        stored: of these rows, as `needs` says.
        what: the store in words; again: what makes it again.
    Raises: InputError naming a row, the features, and what they most likely are.
    """
    layers = tuple(range(len(target.decoder_layers)))
    found = target.features(batch.input_ids, batch.lengths, Needs(last_hidden=True, layers=layers))
    for row, length in enumerate(batch.lengths.tolist()):
        own = {name: _of(found, name)[row, :length].float() for name in (LAST, *layers)}
        for name in names_of(needs):
            values = _of(stored, name)[row, :length].float().to(own[name].device)
            cause = _cause(name, values, own, target)
            if cause is not None:
                raise InputError(
                    f"{what}: {_title(name)} of row {int(batch.row_ids[row])} is not what the "
                    f"target computes ({cause}): {again}"
                )


def _of(features: Features, name: str | int) -> Tensor:
    found = features.last_hidden if isinstance(name, str) else features.layers[name]
    assert found is not None
    return found


def _title(name: str | int) -> str:
    return "the last hidden state" if isinstance(name, str) else f"the output of layer {name}"


def _cause(
    name: str | int, values: Tensor, own: dict[str | int, Tensor], target: Target
) -> str | None:
    """Why stored features, (s d), are not those of that name; None where they are.

    Args:
        own: what the target computes, by name.
    """
    distance = _distance(values, own[name])
    if distance <= RIGHT:
        return None
    best, nearest = distance, None
    for cause, candidate in _candidates(name, values, own, target):
        found = _distance(*candidate)
        if found < best:
            best, nearest = found, cause
    if nearest is not None and best < NEARER * distance and best <= LARGEST:
        return f"it is {nearest}, distance {best:.2g} against {distance:.2g}"
    if distance <= LARGEST:
        return None
    return (
        f"relative distance {distance:.2g}, and it is nothing else of this row: it may be of "
        "another row, or of other weights"
    )


def _distance(values: Tensor, wanted: Tensor) -> float:
    """Relative distance of most of the tokens; a few of a text may be far from all others."""
    if not len(wanted):
        return float("inf")
    apart = (values - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-20)
    return float(apart.nan_to_num(torch.inf, torch.inf).quantile(_QUANTILE))


def _candidates(
    name: str | int, values: Tensor, own: dict[str | int, Tensor], target: Target
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """(what it could be, stored and computed vectors to compare)."""
    deepest = len(target.decoder_layers) - 1
    for other, computed in own.items():
        if other != name:
            before = name == LAST and other == deepest
            words = "what the final norm reads, before the norm" if before else _title(other)
            yield words, (values, computed)
    right, norm = own[name], _norm(target)
    yield "that of the next position", (values[:-1], right[1:])
    yield "that of the position before", (values[1:], right[:-1])
    if norm is not None and name == LAST:
        yield "after the final norm a second time", (values, norm(right))


def _norm(target: Target) -> Callable[[Tensor], Tensor] | None:
    if target.norm_name is None:
        return None
    layer = getattr(target.base, target.norm_name)

    def apply(hidden: Tensor) -> Tensor:
        with torch.inference_mode():
            out: Tensor = layer(hidden.to(target.dtype)).float()
        return out

    return apply
