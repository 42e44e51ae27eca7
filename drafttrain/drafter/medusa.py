"""Medusa (Cai et al. 2024, arXiv:2401.10774): K heads on the target's last hidden state guess K
tokens at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafttrain.drafter.base import Committed
from drafttrain.drafter.growing import BlockState, Parallel, last_of
from drafttrain.drafter.heads import ResidualBlock, VocabularyHeads
from drafttrain.tree.candidates import Candidates


class Medusa(VocabularyHeads, Parallel):
    """Head k: residual blocks on h_t, then a vocabulary projection; it guesses x_{t+k+1} (section
    2.2.1).

    Each head starts as the target's own: its blocks as the identity, its projection as the
    target's. Blocks have weights of their own; the public code repeats one shared block.
    """

    def make_head(self, k: int) -> nn.Module:
        return nn.Sequential(*(ResidualBlock(self.target.width) for _ in range(self.config.blocks)))

    def outputs(self, hidden: Tensor, ids: Tensor, k: int) -> Tensor:
        out: Tensor = self.heads[k - 1](hidden)
        return out

    def rows(self, state: BlockState, committed: Committed, depth: int) -> Tensor:
        hidden = last_of(committed).to(self.dtype)
        return torch.stack([self.heads[k](hidden) for k in range(depth)], 1)

    def place(self, row: Tensor, place: int) -> Candidates:
        return self.candidates(self.project(row, place)[:, None])
