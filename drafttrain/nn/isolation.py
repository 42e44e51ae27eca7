"""Attention among rows that were joined into one sequence: every token reads its own row alone,
itself and what stands before it.

A dense mask serves any backend that takes one. It costs the products of the whole sequence, of
which most are thrown away; where an accelerator is at hand, `flex_attention` skips blocks of tokens
that have no row in common (PyTorch's, by a `BlockMask`).
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
        window: tokens that a sliding layer reads at most, the reading one included; None is all.
    """
    documents = packing.document_ids

    def sees(sequence: Tensor, _head: Tensor, reading: Tensor, read: Tensor) -> Tensor:
        seen = (documents[sequence, reading] == documents[sequence, read]) & (read <= reading)
        return seen if window is None else seen & (reading - read < window)

    return sees


def dense(packing: Packing, first: int | None = None, window: int | None = None) -> Tensor:
    """(b 1 s s) bool, the same for all places at once, true = may be read; padding reads padding.

    Args:
        first: the first so many places alone; None is all.
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
    """`dense` on a device for the first so many places; None, which is causal, where every sequence
    is one row."""
    return None if packing is None else dense(packing.to(device), first)


def blocks(packing: Packing, window: int | None = None) -> Any:
    """The same as a `BlockMask`, one for all heads."""
    from torch.nn.attention.flex_attention import create_block_mask

    b, s = packing.document_ids.shape
    return create_block_mask(
        rule(packing, window), b, None, s, s, device=packing.document_ids.device
    )
