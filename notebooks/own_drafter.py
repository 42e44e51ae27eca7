"""A complete drafter in one file: a bigram model that proposes through the target's head.

It reads the last token and nothing else.

Alignment, 0-based, for a row x_0..x_{T-1} with the target's features h_i (what its LM head reads):

| row i  | reads | soft label         | predicts | weight  |
| 0..T-2 | x_i   | softmax(head(h_i)) | x_{i+1}  | m_{i+1} |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.checks import whole
from drafttrain.drafter.base import Fresh
from drafttrain.drafter.borrowing import BorrowsHead
from drafttrain.flow import Batch, Features, Loss, Needs
from drafttrain.nn import losses
from drafttrain.target.model import Target


class LastToken(BorrowsHead):
    """Two linears from the last token's embedding to what the head reads; nothing is remembered between rounds.

    Args:
        draft_ids: (w) ascending ids that can be proposed; None is the full vocabulary.
        width: of the layer between the two.
        chunk: positions whose logits exist at one time in the loss.
    """

    needs = Needs(last_hidden=True)  # read only by the loss
    loss_parts = ("divergence", "accuracy")

    def __init__(
        self, target: Target, *, draft_ids: Tensor | list[int] | None = None, width: int = 64, chunk: int = 256
    ) -> None:
        super().__init__(target, draft_ids)
        whole("width", width, 1)
        whole("chunk", chunk, 1)
        self.width, self.chunk, d = width, chunk, target.width
        self.layers = nn.Sequential(nn.RMSNorm(d), nn.Linear(d, width), nn.SiLU(), nn.Linear(width, d))
        self.to(target.device)

    def settings(self) -> dict[str, Any]:
        ids = None if self.draft_ids is None else self.draft_ids.tolist()
        return {"width": self.width, "chunk": self.chunk, "draft_ids": ids}

    def forward(self, tokens: Tensor) -> Tensor:
        """(...) ids -> (... d) what the head reads of the next token."""
        embedded = self.target.embed(tokens.to(self.target.device)).to(self.device, self.dtype)
        out: Tensor = self.layers(embedded)
        return out

    def loss(self, batch: Batch, features: Features, *, generator: torch.Generator | None = None) -> Loss:
        assert features.last_hidden is not None
        ids, chosen = batch.input_ids.to(self.device), batch.loss_mask[:, 1:].to(self.device)  # b s-1
        out = self(ids[:, :-1][chosen])  # t d
        teacher = features.last_hidden.to(self.device)[:, :-1][chosen]  # t d
        total, guesses = losses.over_vocabulary(out, teacher, self.head, losses.forward_kl, chunk=self.chunk)
        right, count = (self.to_target_ids(guesses) == ids[:, 1:][chosen]).sum().float(), chosen.sum().float()
        return Loss(total, count, {"divergence": (total.detach(), count), "accuracy": (right, count)})

    def open(self, rows: int, capacity: int) -> None:
        return None

    def select(self, state: None, rows: Tensor) -> None:
        return None

    def extend(self, state: None, fresh: Fresh) -> tuple[Tensor, Tensor]:
        last = fresh.counts.to(fresh.tokens.device)[:, None] - 1
        out = self(fresh.tokens.gather(1, last)[:, 0])  # b d
        return out, self.head(out)

    def expand(self, state: None, tokens: Tensor, hidden: Tensor, depth: int, among: Tensor) -> tuple[Tensor, Tensor]:
        out = self(tokens)  # b m d
        return out, self.head(out)
