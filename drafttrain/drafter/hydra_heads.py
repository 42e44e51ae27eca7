"""Hydra's sequential heads (Ankner et al. 2024, arXiv:2402.05109): head k also reads the tokens
drafted before its own.

Named apart from the configuration library of the same name.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional

from drafttrain.drafter.base import Committed
from drafttrain.drafter.borrowing import sizes_of_inputs
from drafttrain.drafter.growing import BlockState, Sequential, last_of
from drafttrain.drafter.heads import ResidualBlock, VocabularyHeads
from drafttrain.tree.candidates import Candidates


class TokenBlock(nn.Module):
    """P z + SiLU(W z + b) for z = [h_t; E(x_{t+1}); ..; E(x_{t+k})], from (k+1) d to d.

    W and b are zero at first and P passes h_t on, so that a head starts as the target's own; the
    public code starts P at random.
    """

    def __init__(self, width: int, k: int) -> None:
        super().__init__()
        self.skip = nn.Linear((k + 1) * width, width, bias=False)
        self.linear = nn.Linear((k + 1) * width, width)
        with torch.no_grad():
            self.skip.weight.zero_()
            self.skip.weight[:, :width] = torch.eye(width)
            self.linear.weight.zero_()
            self.linear.bias.zero_()

    def forward(self, z: Tensor) -> Tensor:
        """(... (k+1)d) -> (... d)."""
        out: Tensor = self.skip(z) + functional.silu(self.linear(z))
        return out


class HydraHeads(VocabularyHeads, Sequential):
    """Head k reads [h_t; E(x_{t+1}); ..; E(x_{t+k})] and guesses x_{t+k+1}; the first block takes
    it to the target's width, the others are Medusa's (section 3). The embedding is the target's,
    frozen.

    Departs from the public code: embeddings, often much smaller than features, are scaled by a
    constant to weigh as much.
    """

    def make_head(self, k: int) -> nn.Module:
        d = self.target.width
        return nn.Sequential(
            TokenBlock(d, k), *(ResidualBlock(d) for _ in range(self.config.blocks - 1))
        )

    @functools.cached_property
    def scale(self) -> float:
        """What embeddings are multiplied by, so that they weigh as much as features."""
        feature, embedding = sizes_of_inputs(self.target)
        return feature / embedding

    def embed(self, ids: Tensor) -> Tensor:
        """(...) int64 -> (... d), scaled."""
        return self.target.embed(ids.to(self.target.device)).to(ids.device, self.dtype) * self.scale

    def outputs(self, hidden: Tensor, ids: Tensor, k: int) -> Tensor:
        r = hidden.shape[1]
        embedded = self.embed(ids)
        z = torch.cat(
            (hidden, *(embedded[:, i : i + r] for i in range(1, k + 1))), -1
        )  # b r (k+1)d
        out: Tensor = self.heads[k - 1](z)
        return out

    def rows(self, state: BlockState, committed: Committed, depth: int) -> Tensor:
        hidden = last_of(committed).to(self.dtype)
        return hidden[:, None].expand(-1, depth, -1)

    def step(
        self, place: int, row: Tensor, tokens: Tensor, carried: Tensor | None
    ) -> tuple[Tensor, Candidates]:
        read = row[:, None] if carried is None else carried  # what the parent's head read
        z = torch.cat((read, self.embed(tokens)), -1)  # b m (place+1)d
        return z, self.candidates(self.project(self.heads[place - 1](z), place))
