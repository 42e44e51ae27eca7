"""Attention in sequences that several rows were joined into: every token reads only its own row, up
to itself.

A dense mask serves any backend that takes one. It costs the products of the full sequence, most of
which are thrown away. On an accelerator, PyTorch's `flex_attention` skips blocks of tokens that
have no row in common, by a `BlockMask`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drafttrain.flow import Packing

DENSE, FLEX = "dense", "flex"
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(sequence, head, reading place, place read) -> bool, each (): what `flex_attention` asks of a
mask."""


def rule(packing: Packing, window: int | None = None) -> Rule:
    """Which place may be read from which, place by place.

    Args:
        window: the most tokens that a sliding layer reads, the reading one included; None is all.
    """
    documents = packing.document_ids

    def sees(sequence: Tensor, _head: Tensor, reading: Tensor, read: Tensor) -> Tensor:
        seen = (documents[sequence, reading] == documents[sequence, read]) & (read <= reading)
        return seen if window is None else seen & (reading - read < window)

    return sees


def dense(packing: Packing, first: int | None = None, window: int | None = None) -> Tensor:
    """(b 1 s s) bool, the same for all places at once, true = may be read; padding reads padding.

    Args:
        first: only that many places, from the start; None is all.
    """
    documents = packing.document_ids[:, :first]
    s = documents.shape[1]
    mask = (documents[:, :, None] == documents[:, None]) & torch.ones(
        s, s, dtype=torch.bool, device=documents.device
    ).tril()
    if window is not None:
        mask &= torch.ones(s, s, dtype=torch.bool, device=documents.device).triu(1 - window)
    return mask[:, None]


def mask_of(packing: Packing | None, first: int, device: torch.device) -> Tensor | None:
    """`dense` on a device, for the first places only; None, which is causal, where every sequence
    is one row."""
    return None if packing is None else dense(packing.to(device), first)


def blocks(packing: Packing, window: int | None = None) -> Any:
    """The same as a `BlockMask`, one for all heads."""
    from torch.nn.attention.flex_attention import create_block_mask

    b, s = packing.document_ids.shape
    return create_block_mask(
        rule(packing, window), b, None, s, s, device=packing.document_ids.device
    )
