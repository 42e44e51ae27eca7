"""Masks in the form an attention backend of `transformers` wants them."""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.errors import InputError

TREE_BACKENDS = ("sdpa", "eager")
"""Backends that take a mask of any shape, as a token tree needs."""


def check_backend(name: str) -> None:
    """Raises: InputError if a backend cannot take the mask of a token tree."""
    if name not in TREE_BACKENDS:
        raise InputError(f"attention={name} cannot verify a token tree: give one of {', '.join(TREE_BACKENDS)}")


def as_attention(mask: Tensor, implementation: str, dtype: torch.dtype) -> Tensor:
    """(b 1 s t) bool, true = may be read, to what the backend adds to or selects scores with."""
    if implementation == "sdpa":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
