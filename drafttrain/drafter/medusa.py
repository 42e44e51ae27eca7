"""Medusa (Cai et al. 2024, arXiv:2401.10774): K heads on the target's last hidden state guess K
tokens at once."""

from __future__ import annotations

from torch import Tensor, nn

from drafttrain.drafter.base import Parallel
from drafttrain.drafter.heads import ResidualBlock, VocabularyHeads


class Medusa(VocabularyHeads, Parallel):
    """Head k: residual blocks on h_t, then a vocabulary projection; it guesses x_{t+k+1} (section
    2.2.1).

    Each head starts as the target's own: its blocks as the identity, its projection as the
    target's. Blocks have weights of their own; the public code repeats one shared block.
    """

    def make_head(self, k: int) -> nn.Module:
        return nn.Sequential(*(ResidualBlock(self.target.width) for _ in range(self.blocks)))

    def outputs(self, hidden: Tensor, ids: Tensor, k: int) -> Tensor:
        out: Tensor = self.heads[k - 1](hidden)
        return out

    def place(self, hidden: Tensor, k: int) -> Tensor:
        return self.project(self.heads[k - 1](hidden.to(self.dtype)), k)
