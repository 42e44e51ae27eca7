"""The decoder layer of EAGLE-3 (Li et al. 2025, arXiv:2503.01840; public code): Llama's, whose
queries, keys and values are made from two inputs side by side. Parameters have the names by which
engines load them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from drafttrain.nn.cache import KVCache
from drafttrain.nn.unrolled import Unrolled


class Attention(nn.Module):
    """Queries, keys and values of (b s reads), and (b s d) of these, with rotary positions.

    Args:
        number: of its entries in a cache.
        reads: width of what queries, keys and values are made from.
        qk_norm: normalise queries and keys of every head, as Qwen3 does.
    """

    def __init__(self, config: LlamaConfig, number: int, reads: int, qk_norm: bool) -> None:
        super().__init__()
        e: int = config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.number, self.head_width = number, e
        self.widths = [heads * e, kv_heads * e, kv_heads * e]
        self.q_proj = nn.Linear(reads, heads * e, bias=False)
        self.k_proj = nn.Linear(reads, kv_heads * e, bias=False)
        self.v_proj = nn.Linear(reads, kv_heads * e, bias=False)
        self.o_proj = nn.Linear(heads * e, config.hidden_size, bias=False)
        self.q_norm: nn.Module = norm(config, e) if qk_norm else nn.Identity()
        self.k_norm: nn.Module = norm(config, e) if qk_norm else nn.Identity()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(b s reads) -> (b s (h e)) queries, (b s (h' e)) keys, values."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def forward(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        rotary: Any,
        mask: Tensor | None,
        cache: KVCache | Unrolled | None,
    ) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # b s (h e) -> b h s e
            for part in projected
        )
        q, k = apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), *rotary)
        if isinstance(cache, Unrolled):
            read = cache.attend(q, k, v, self.number)
        else:
            if cache is not None:
                k, v = cache.update(k, v, self.number)
            read = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
            )
        out: Tensor = self.o_proj(read.transpose(1, 2).flatten(2))  # b h s e -> b s (h e)
        return out


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(... d) -> (... d)."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class ByToken(NamedTuple):
    """The embeddings' part in queries, keys and values, side by side: of a token it is the same in
    every step of an unrolled pass."""

    made: Tensor
    """(b s o)"""
    rest: Tensor
    """(o d) weights of the other part."""

    def at(self, places: Tensor) -> ByToken:
        """(r) places of the tokens -> those of these."""
        return ByToken(self.made[:, places], self.rest)


class WidenedLayer(nn.Module):
    """A layer of a draft stack. The first reads [input_layernorm(embedding); hidden_norm(x)], the
    others input_layernorm(x), as Llama's do. The residual stream is that of x only.

    Args:
        config: of a Llama layer, whose sizes it has.
        number: from 0.
        qk_norm: see `Attention`.
        norm_before_residual: the first layer's stream goes on from hidden_norm(x), not from x.
    """

    def __init__(
        self, config: LlamaConfig, number: int, *, qk_norm: bool, norm_before_residual: bool
    ) -> None:
        super().__init__()
        d = config.hidden_size
        self.hidden_norm = None if number else norm(config, d)
        self.input_layernorm = norm(config, d)
        self.self_attn = Attention(config, number, d if number else 2 * d, qk_norm)
        self.post_attention_layernorm = norm(config, d)
        self.mlp = Mlp(d, config.intermediate_size)
        self.norm_before_residual = norm_before_residual

    def by_token(self, embedded: Tensor) -> ByToken:
        """Of (b s d) embeddings; by the first layer."""
        parts = (self.self_attn.q_proj, self.self_attn.k_proj, self.self_attn.v_proj)
        weight = torch.cat([part.weight for part in parts])
        d = embedded.shape[-1]
        made = functional.linear(self.input_layernorm(embedded), weight[:, :d])
        return ByToken(made, weight[:, d:])

    def forward(
        self,
        x: Tensor,
        embedded: Tensor | ByToken,
        rotary: Any,
        mask: Tensor | None = None,
        cache: KVCache | Unrolled | None = None,
    ) -> Tensor:
        """(b s d) -> (b s d).

        Args:
            embedded: (b s d) of the tokens, or what `by_token` made of them; read by the first
                layer.
            rotary: embeddings of the positions.
            mask: (b 1 s t) bool, true = may be read; None is causal. An `Unrolled` has its own.
            cache: to which keys and values are added.
        """
        attention = self.self_attn
        if self.hidden_norm is None:
            projected = attention.project(self.input_layernorm(x))
        else:
            normed = self.hidden_norm(x)
            if isinstance(embedded, ByToken):
                q, k, v = (embedded.made + functional.linear(normed, embedded.rest)).split(
                    attention.widths, -1
                )
                projected = q, k, v
            else:
                read = torch.cat((self.input_layernorm(embedded), normed), -1)
                projected = attention.project(read)
            x = normed if self.norm_before_residual else x
        x = x + attention(projected, rotary, mask, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def norm(config: LlamaConfig, width: int) -> nn.RMSNorm:
    return nn.RMSNorm(width, eps=config.rms_norm_eps)
