"""What plain passes of the target say after texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.flow import Needs
from drafttrain.target.model import Target


def last_logits(target: Target, rows: Sequence[Sequence[int]]) -> Tensor:
    """(b v) float64 logits after texts of one length, by one plain causal pass."""
    ids = torch.tensor([list(row) for row in rows])
    hidden = target.features(
        ids, torch.full((len(ids),), ids.shape[1]), Needs(last_hidden=True)
    ).last_hidden
    assert hidden is not None
    return target.head(hidden[:, -1]).double()
