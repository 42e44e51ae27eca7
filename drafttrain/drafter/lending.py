"""Parts of the target inside a drafter's own network: used there, never trained, saved or moved
with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Lent(nn.Module):
    """Takes the place of a part of a network.

    Args:
        part: the target's module.
        like: a module of the network, whose dtype is the network's.
    """

    def __init__(self, part: nn.Module, like: nn.Module) -> None:
        super().__init__()
        # Not attributes that nn.Module would register: both belong elsewhere.
        object.__setattr__(self, "part", part)
        object.__setattr__(self, "like", like)
        self.part: Any
        self.like: nn.Module

    @property
    def weight(self) -> Tensor:
        """The target's own."""
        weight: Tensor = self.part.weight
        return weight

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.like.parameters())


class LentEmbedding(Lent):
    def forward(self, ids: Tensor) -> Tensor:
        """(...) int64 -> (... d), scaled where the target's family scales."""
        out: Tensor = self.part(ids)
        return out.to(self.dtype)


class LentNorm(Lent):
    def forward(self, x: Tensor) -> Tensor:
        """(... d) -> (... d), in the dtype of x."""
        weights = {name: p.to(x.dtype) for name, p in self.part.named_parameters()}
        out: Tensor = torch.func.functional_call(self.part, weights, (x,))
        return out


class LentHead(Lent):
    """The whole vocabulary. Training and decoding go through `BorrowsHead.head`, which keeps the
    rows that can be proposed."""

    def forward(self, x: Tensor) -> Tensor:
        """(... d) -> (... v)."""
        bias: Tensor | None = getattr(self.part, "bias", None)
        return functional.linear(
            x, self.weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        )


def lent_tensors(network: nn.Module) -> dict[str, Tensor]:
    """What is lent, under the names it would have if it were the network's own."""
    found: dict[str, Tensor] = {}
    for name, module in network.named_modules():
        if isinstance(module, Lent):
            found |= {
                f"{name}.{inner}": tensor for inner, tensor in module.part.state_dict().items()
            }
    return found
