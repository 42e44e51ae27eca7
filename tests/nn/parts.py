"""What several tests of nn/ share."""

from __future__ import annotations

import torch
from torch import Tensor


def logits_of(*shape: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    """Random logits, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread
