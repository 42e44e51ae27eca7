"""A plain decoder block, of no model's family: a norm, causal attention with rotary positions, and
an MLP if one is asked for. `layers` makes layers of a target's family."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from drafttrain.nn.cache import KVCache


class Block(nn.Module):
    """x + attention(norm(x)); then, with an MLP, x + SwiGLU(norm(x)). Both start as zero, so that
    the block starts as the identity.

    Args:
        width: d of x.
        heads, kv_heads: of attention; the first is a multiple of the second.
        head_width: e, even.
        mlp: width inside the MLP; 0 is none.
        base: of rotary positions.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_width: int,
        mlp: int = 0,
        base: float = 10000.0,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.base = heads, kv_heads, base
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.q = nn.Linear(width, heads * head_width, bias=False)
        self.k = nn.Linear(width, kv_heads * head_width, bias=False)
        self.v = nn.Linear(width, kv_heads * head_width, bias=False)
        self.o = nn.Linear(heads * head_width, width, bias=False)
        nn.init.zeros_(self.o.weight)
        self.mlp: Mlp | None = None
        if mlp:
            self.mlp = Mlp(width, mlp)

    def forward(
        self, x: Tensor, positions: Tensor, mask: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """(b s d) -> (b s d).

        Args:
            positions: (b|1 s) int64.
            mask: (b 1 s t) bool, true = may be read; None is causal.
            cache: keys and values of earlier rows, to which these are added.
        """
        normed = self.attention_norm(x)
        q, k, v = (
            part(normed).unflatten(-1, (count, -1)).transpose(1, 2)  # b s (h e) -> b h s e
            for part, count in (
                (self.q, self.heads),
                (self.k, self.kv_heads),
                (self.v, self.kv_heads),
            )
        )
        q, k = rotated(q, positions, self.base), rotated(k, positions, self.base)
        if cache is not None:
            k, v = cache.update(k, v, 0)
        read = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.heads != self.kv_heads
        )
        x = x + self.o(read.transpose(1, 2).flatten(2))  # b h s e -> b s (h e)
        return x if self.mlp is None else x + self.mlp(x)


class Mlp(nn.Module):
    """A norm, then SwiGLU; starts as zero."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(... d) -> (... d)."""
        normed = self.norm(x)
        out: Tensor = self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return out


def rotated(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864): (b h s e) by (b|1 s), pairs being i and
    i + e/2, as in Llama."""
    e = x.shape[-1]
    rates = base ** (-torch.arange(0, e, 2, device=x.device, dtype=torch.float32) / e)
    angles = positions[:, None, :, None].float() * rates  # b 1 s e/2
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
