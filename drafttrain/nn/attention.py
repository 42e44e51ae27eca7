"""Masks in the form that an attention backend of `transformers` takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.errors import InputError

TREE_BACKENDS = ("sdpa", "eager")
"""Backends that take a mask of any shape, as a token tree needs."""


def check_backend(name: str) -> None:
    """Raises: InputError if a backend cannot take the mask of a token tree."""
    if name not in TREE_BACKENDS:
        raise InputError(
            f"attention={name} cannot verify a token tree: give one of {', '.join(TREE_BACKENDS)}"
        )


@contextlib.contextmanager
def computed_by(model: nn.Module, backend: str) -> Iterator[None]:
    """Let a model of `transformers` use another backend meanwhile. Each part reads the name from
    its config, and may have its own."""
    configs: list[Any] = [part.config for part in model.modules() if hasattr(part, "config")]
    before = [
        (config, config._attn_implementation)
        for config in {id(one): one for one in configs}.values()
    ]
    try:
        for config, _ in before:
            config._attn_implementation = backend
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name


def as_attention(mask: Tensor, implementation: str, dtype: torch.dtype) -> Tensor:
    """(b 1 s t) bool, true = may be read -> what the backend takes: the same, or numbers that are
    added to the scores."""
    if implementation == "sdpa":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        ~mask, torch.finfo(dtype).min
    )
