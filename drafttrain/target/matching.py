"""Are stored features what they say they are? Some rows are read by the target and compared.

Checksums only say that a file is as it was written. A store that another program made, or another
version of one, may hold the residual stream before the final norm, another layer, features of the
next position, or something that is only near what it should be.

What may differ is what the encoding loses, value by value, and what another device, batch or
attention kernel rounds otherwise. Between attention kernels on a CPU, over SmolLM2's 30 layers and
in units of the dtype's rounding (2^-8 in bfloat16, 2^-11 in float16): at most 8 for nine of ten
tokens, 28 for the worst, 23 for a dimension, 1 for the length. In float32 nothing is above 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.errors import InputError
from drafttrain.flow import Batch, Needs
from drafttrain.target.encoding import Encoding
from drafttrain.target.features import LAST, computed
from drafttrain.target.model import Target

ROWS, TOKENS = 32, 512
"""Rows that are compared, one of each shard, short ones where there are any, and tokens of each at
most; next to them the longest row is, whole."""
TOGETHER = 8
"""Of them that are read in one pass."""
EXACT = 1e-3
"""Distance, relative to a vector's length, that rounding in float32 does not come to."""
AGREE = 0.8
"""Share of tokens for which the stored last hidden state must give the target's own top token,
through its head. 0.97 is seen between attention kernels in bfloat16, where two tokens are near."""
NEARER = 0.5
"""Something else of the target is what is stored where it is this much nearer than what should
be."""
ALIKE = 0.25
"""Distance within which something else is what is stored."""
_QUANTILE = 0.9
_LISTED = 4
_EMBEDDED = "embedded"
"""The tokens' embeddings, which some programs count as the first of the layers."""


@dataclass(frozen=True)
class Bounds:
    """What a pass in a dtype may differ by, relative to a vector's length."""

    near: float
    """All tokens but one, and one of ten of many."""
    far: float
    """Every token: a few of a text, such as the first ones, are moved further by rounding."""
    dimension: float
    """Every dimension, over the tokens that are near."""
    gain: float
    """The factor of the length, in the median of tokens: rounding moves it both ways."""

    @classmethod
    def of(cls, dtype: torch.dtype) -> Bounds:
        unit = torch.finfo(dtype).eps / 2
        return cls(*(max(EXACT, units * unit) for units in (16, 128, 64, 2)))


def check_rows(
    target: Target,
    batch: Batch,
    stored: Mapping[str | int, Tensor],
    code: Encoding,
    what: str,
    again: str,
) -> None:
    """Compare stored features with what the target computes for the same rows.

    Args:
        batch: a few rows, not joined.
        stored: {name: (b s d)} of these rows, decoded.
        code: how they were written down.
        what: the store in words; again: what makes it again.
    Raises: InputError naming a row, the features, and what they most likely are.
    """
    bounds = Bounds.of(target.dtype)
    own = computed(target, batch, _needs(stored))
    agreed, tokens = 0, 0
    for row, length in enumerate(batch.lengths.tolist()):
        for name in stored:
            values, right = (found[name][row, :length].cpu().float() for found in (stored, own))
            pair = _Pair(values.double(), right.double(), code)
            same = _same_tops(target, values, code.rounded(right)) if name == LAST else 0
            if name == LAST:
                agreed, tokens = agreed + same, tokens + length
            if pair.within(bounds):
                continue
            cause = _cause(target, batch, row, name, pair, bounds)
            if name == LAST:
                cause += f"; through the head {same} of {length} tokens are the target's own top"
            raise InputError(
                f"{what}: {_title(name)} of row {int(batch.row_ids[row])} is not what the "
                f"target computes ({cause}): {again}"
            )
    if agreed < AGREE * tokens:
        raise InputError(
            f"{what}: the last hidden state is near what the target computes, but through the head "
            f"only {agreed} of {tokens} tokens are the target's own top, at least {AGREE:.0%} are "
            f"needed (it may be after another norm, or of other weights): {again}"
        )


def _needs(names: Mapping[str | int, object]) -> Needs:
    layers = tuple(sorted(name for name in names if isinstance(name, int)))
    return Needs(last_hidden=LAST in names, layers=layers)


def _title(name: str | int) -> str:
    if name == _EMBEDDED:
        return "what the first layer reads"
    return "the last hidden state" if isinstance(name, str) else f"the output of layer {name}"


def _same_tops(target: Target, values: Tensor, right: Tensor) -> int:
    """For how many of two rows' tokens, (s d), the head has the same top."""
    same = 0
    with torch.inference_mode():
        for parts in zip(values.split(64), right.split(64), strict=True):
            given, own = (
                target.head(part.to(target.output.weight.device, target.dtype)).argmax(-1)
                for part in parts
            )
            same += int((given == own).sum())
    return same


class _Pair:
    """Stored and computed vectors of a row, (s d), float64."""

    def __init__(self, values: Tensor, right: Tensor, code: Encoding) -> None:
        self.values, self.right, self.code = values, right, code
        self.units = _units(right)
        lost = code.loss(right.float()).double()
        apart = ((values - right).abs() - lost).clamp_min(0) / self.units
        self.apart = apart.nan_to_num(torch.inf, torch.inf)
        """(s d) What the encoding does not explain, in parts of the token's length."""
        whole = self.apart.mul(self.units).norm(dim=-1) / right.norm(dim=-1).clamp_min(1e-30)
        self.tokens = torch.maximum(self.apart.norm(dim=-1), whole)
        """(s) The same of a token, in ordinary values or in the large ones."""
        own = right / self.units
        more = (values - code.rounded(right.float()).double()) / self.units
        gains = (more * own).sum(-1) / own.square().sum(-1).clamp_min(1e-30)
        self.gain = float(gains.median()) if len(gains) else 0.0
        """By how much the stored vectors are longer, beyond what the encoding does."""

    @property
    def worst(self) -> float:
        return float(self.tokens.max()) if len(self.tokens) else 0.0

    def scaled(self) -> _Pair:
        """The same against vectors that are as much longer as the stored ones are."""
        return _Pair(self.values, self.right * (1 + self.gain), self.code)

    def dimensions(self, kept: Tensor) -> Tensor:
        """(d) distances over the tokens kept, (s) bool."""
        width = self.apart.shape[-1]
        return self.apart[kept].square().mean(0).mul(width).sqrt()

    def within(self, bounds: Bounds) -> bool:
        """Are they one, but for rounding?"""
        off = self.tokens > bounds.near
        if bool((self.tokens > bounds.far).any()) or int(off.sum()) > 1 + len(off) // 10:
            return False
        if bool((self.dimensions(~off) > bounds.dimension).any()):
            return False
        return abs(self.gain) <= bounds.gain

    def where(self, bounds: Bounds) -> str | None:
        """The tokens, or the dimensions, that are others where the rest is right."""
        off = self.tokens > bounds.near
        if 0 < int(off.sum()) <= len(off) // 2:
            return f"{_listed('token', off)}; the other tokens are right"
        odd = self.dimensions(torch.ones_like(off)) > bounds.dimension
        rest = self.apart[:, ~odd].norm(dim=-1)
        if 0 < int(odd.sum()) <= len(odd) // 2 and bool((rest <= bounds.far).all()):
            return f"{_listed('dimension', odd)}; the other dimensions are right"
        return None


def _units(right: Tensor) -> Tensor:
    """(s d) by which differences are divided: the size of a token's ordinary values, and of the
    value itself where it is larger, times the root of the width. A few values of a vector may be a
    hundred times larger than all others, and would hide these."""
    size = right.abs()
    ordinary = size.median(-1, keepdim=True).values / 0.6745  # Of normal values, their deviation.
    floor = 1e-3 * size.amax(-1, keepdim=True)
    width = right.shape[-1]
    return torch.maximum(torch.maximum(ordinary, floor), size).clamp_min(1e-30) * width**0.5


def _listed(kind: str, odd: Tensor) -> str:
    places = odd.nonzero()[:, 0].tolist()
    more = ", ..." if len(places) > _LISTED else ""
    shown = ", ".join(map(str, places[:_LISTED])) + more
    return f"{len(places)} of {len(odd)} {kind}s differ: {shown}"


def _cause(
    target: Target, batch: Batch, row: int, name: str | int, pair: _Pair, bounds: Bounds
) -> str:
    """Why stored features are not those of that name."""
    length = len(pair.values)
    layers = tuple(range(len(target.decoder_layers)))
    found = computed(target, batch, Needs(last_hidden=True, layers=layers))
    own = {other: value[row, :length].cpu().double() for other, value in found.items()}
    with torch.inference_mode():
        ids = batch.input_ids[row : row + 1, :length].to(target.embedding.weight.device)
        own[_EMBEDDED] = target.embedding(ids)[0].cpu().double()
    distance = _distance(pair.values, pair.right)
    best, nearest = distance, None
    for cause, candidate in _candidates(name, pair.values, own, target):
        other = _distance(*candidate)
        if other < best:
            best, nearest = other, cause
    if nearest is not None and best < NEARER * distance and best <= ALIKE:
        return f"it is {nearest}, distance {best:.2g} against {distance:.2g}"
    if abs(pair.gain) > bounds.gain and pair.scaled().worst <= max(
        bounds.near, NEARER * pair.worst
    ):
        return f"it is {1 + pair.gain:.4g} times what it should be"
    if (places := pair.where(bounds)) is not None:
        return places
    if distance <= ALIKE:
        return (
            f"relative distance {pair.worst:.2g} beyond what its encoding loses, "
            f"rounding comes to {bounds.near:.2g}: it may be of other weights, a mean of layers, "
            "or have noise in it"
        )
    return (
        f"relative distance {distance:.2g}, and it is nothing else of this row: it may be of "
        "another row, or of other weights"
    )


def _distance(values: Tensor, wanted: Tensor) -> float:
    """Relative distance of most of the tokens; a few of a text may be far from all others."""
    if not len(wanted):
        return float("inf")
    apart = (values - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)
    return float(apart.nan_to_num(torch.inf, torch.inf).quantile(_QUANTILE))


def _candidates(
    name: str | int, values: Tensor, own: Mapping[str | int, Tensor], target: Target
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """(what it could be, stored and computed vectors to compare)."""
    deepest = len(target.decoder_layers) - 1
    for other, found in own.items():
        if other != name:
            before = name == LAST and other == deepest
            words = "what the final norm reads, before the norm" if before else _title(other)
            yield words, (values, found)
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
            out: Tensor = layer(hidden.to(layer.weight.device, target.dtype)).cpu().double()
        return out

    return apply
