"""Adapters for tests, in training and trained."""

from __future__ import annotations

from typing import Any

import torch

from drafttrain.target.adapter import Adapter, Trained
from drafttrain.target.model import Target


def trained(target: Target, *, linears: Any = "all", dropout: float = 0.0) -> Trained:
    return Trained(target, rank=4, alpha=8.0, dropout=dropout, linears=linears, seed=0)


def stirred(adapter: Trained, scale: float = 0.2) -> Trained:
    """With a random B in place of zero."""
    chance = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in adapter.weights.items():
            if name.endswith("/B"):
                weight.normal_(0, scale, generator=chance)
    return adapter


def made(target: Target, **settings: Any) -> Adapter:
    """A stirred adapter; the target remains the original."""
    adapter = stirred(trained(target, **settings))
    found = adapter.adapter()
    adapter.remove()
    return found
