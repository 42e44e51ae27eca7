"""A module of multi-token prediction as models are shipped with it (DeepSeek-V3, arXiv:2412.19437,
section 2.2): a norm of each input, one product that joins them, a decoder layer of the model's own
family, a norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.nn.attention import as_attention
from drafttrain.nn.cache import KVCache
from drafttrain.nn.causal import CausalLM
from drafttrain.nn.layers import call, new_layers
from drafttrain.nn.plain import INPUT_NORM
from drafttrain.nn.unrolled import Unrolled

_ONE_LAYER: dict[str, Any] = {
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "mlp_layer_types": ["sparse"],
}
"""Settings by which families tell layers with experts from others: this one has experts where the
model has any."""


class NativeModule(nn.Module):
    """(b s d) hidden states and embeddings -> (b s d), what the head and the next step read.

    Args:
        embedding_first: is the embedding the first half of what `join` reads?
        blank_first: is the embedding of position 0 zero?
    Raises: InputError for a family whose layer cannot be made.
    """

    def __init__(self, model: CausalLM, *, embedding_first: bool, blank_first: bool) -> None:
        super().__init__()
        settings = {
            name: value for name, value in _ONE_LAYER.items() if hasattr(model.config, name)
        }
        self.layer = new_layers(model, settings=settings)[0]
        like: Any = getattr(self.layer, INPUT_NORM)
        d, eps = model.width, model.config.rms_norm_eps
        self.embedding_norm, self.hidden_norm, self.norm = (
            type(like)(d, eps=eps) for _ in range(3)
        )
        self.join = nn.Linear(2 * d, d, bias=False)
        self.embedding_first, self.blank_first = embedding_first, blank_first
        self.attention = model.attention

    def forward(
        self,
        x: Tensor,
        embedded: Tensor,
        positions: Tensor,
        rotary: Any,
        mask: Tensor | None = None,
        cache: KVCache | Unrolled | None = None,
    ) -> Tensor:
        """Args:
        positions: (b s).
        rotary: what the family's rotary module makes of them.
        mask: (b 1 s t) bool; None is causal. An `Unrolled` has its own.
        """
        rows = x.shape[1]
        if isinstance(cache, Unrolled):
            mask = cache.mask(rows, x.device)
        elif mask is None:
            mask = torch.ones(1, 1, rows, rows, dtype=torch.bool, device=x.device).tril()
        if self.blank_first:
            embedded = embedded.masked_fill((positions == 0)[..., None], 0)
        both = self.embedding_norm(embedded), self.hidden_norm(x)
        joined = self.join(torch.cat(both if self.embedding_first else both[::-1], -1))
        out = call(
            self.layer,
            joined,
            positions=positions,
            rotary=rotary,
            mask=as_attention(mask, self.attention, x.dtype),
            cache=cache,
        )
        found: Tensor = self.norm(out)
        return found
