"""Tensors that hold NaN or infinite values: one way to find them, one way to say so."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

SPOILT = "NaN or infinite values in"
"""How a message names what was found, followed by the tensors' names."""


def spoilt(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors with a value that is not finite; every value is read once."""
    return [
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]
