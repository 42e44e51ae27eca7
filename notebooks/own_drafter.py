"""A complete drafter in one file: a bigram model that proposes through the target's head.

It reads the last token and nothing else.

Alignment, 0-based, for a row x_0..x_{T-1} with the target's features h_i (what its LM head reads):

| row i  | reads | soft label         | predicts | weight  |
| 0..T-2 | x_i   | softmax(head(h_i)) | x_{i+1}  | m_{i+1} |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.checks import integer
from drafttrain.drafter.base import Committed
from drafttrain.drafter.borrowing import BorrowsHead
from drafttrain.drafter.growing import anchor_of
from drafttrain.flow import Batch, Features, Loss, Needs
from drafttrain.nn import losses
from drafttrain.target.model import Target
from drafttrain.tree.candidates import Candidates


@dataclass(frozen=True, kw_only=True)
class LastTokenConfig:
    """Settings of `LastToken`. Their defaults are in its configuration file, not here."""

    draft_ids: Sequence[int] | None
    """(w) ascending ids that can be proposed; None is the whole vocabulary."""
    width: int
    """Of the layer between the two linears."""
    chunk: int
    """Positions whose logits exist at one time in the loss."""

    def __post_init__(self) -> None:
        integer("width", self.width, 1)
        integer("chunk", self.chunk, 1)


class LastToken(BorrowsHead):
    """Two linears from the last token's embedding to what the head reads; nothing is remembered
    between rounds."""

    Config = LastTokenConfig
    config: LastTokenConfig
    needs = Needs(last_hidden=True)  # read by the loss only
    loss_parts = ("divergence", "accuracy")

    def __init__(self, target: Target, **settings: Any) -> None:
        super().__init__(target, **settings)
        d, width = target.width, self.config.width
        self.layers = nn.Sequential(
            nn.RMSNorm(d), nn.Linear(d, width), nn.SiLU(), nn.Linear(width, d)
        )
        self.to(target.device)

    def forward(self, tokens: Tensor) -> Tensor:
        """(...) ids -> (... d) what the head reads of the next token."""
        embedded = self.target.embed(tokens.to(self.target.device)).to(self.device, self.dtype)
        out: Tensor = self.layers(embedded)
        return out

    def loss(
        self, batch: Batch, features: Features, *, generator: torch.Generator | None = None
    ) -> Loss:
        assert features.last_hidden is not None
        ids = batch.input_ids.to(self.device)
        chosen = batch.loss_mask[:, 1:].to(self.device)  # b s-1
        out = self(ids[:, :-1][chosen])  # t d
        teacher = features.last_hidden.to(self.device)[:, :-1][chosen]  # t d
        total, guesses = losses.over_vocabulary(
            out, teacher, self.head, losses.forward_kl, chunk=self.config.chunk
        )
        right = (self.to_target_ids(guesses) == ids[:, 1:][chosen]).sum().float()
        count = chosen.sum().float()
        parts = {"divergence": (total.detach(), count), "accuracy": (right, count)}
        return Loss(total, count, parts)

    def open(self, rows: int, capacity: int) -> None:
        return None

    def select(self, state: None, rows: Tensor) -> None:
        return None

    def extend(self, state: None, committed: Committed, depth: int) -> tuple[Tensor, Candidates]:
        out = self(anchor_of(committed))  # b 1 d
        return out, self.candidates(self.head(out))

    def expand(
        self, state: None, tokens: Tensor, hidden: Tensor, depth: int, tree_mask: Tensor
    ) -> tuple[Tensor, Candidates]:
        out = self(tokens)  # b m d
        return out, self.candidates(self.head(out))
