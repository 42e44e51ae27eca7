"""Training-time test (EAGLE-3, Li et al. 2025, arXiv:2503.01840; HASS, Zhang et al. 2024,
arXiv:2408.15766): a layer is run J times over the same rows, fed with its own output, so that it
learns what it will read while it drafts.

Index table, 0-based, for a row x_0..x_{T-1}; p_i is the target's distribution after x_0..x_i:

|                 | step 0              | step j = 1..J-1                              |
|-----------------|---------------------|----------------------------------------------|
| hidden of row i | of the target       | row i's output of step j - 1                 |
| token           | x_{i+1}             | x_{i+1+j}                                    |
| position        | i                   | i + j                                        |
| keys            | step-0 rows <= i    | step-0 rows <= i, row i of steps 1..j        |
| learns          | p_{i+1}, of x_{i+2} | p_{i+1+j}, of x_{i+2+j}                      |
| weight          | m_{i+2}             | m_{i+2+j}, the label's                       |

Row i of step j is what drafting computes at depth j + 1 after a prefix of i + 2 tokens, whose
drafts are the text's own tokens. HASS writes row i of step j at place i + j; the numbers are the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache

MOST_STEPS = 64
"""J at most: no draft is so deep."""
Entries = tuple[Tensor, Tensor]
"""Keys and values of one step, (b h r e) each."""
Step = Callable[[Tensor, Tensor, Tensor, "Unrolled"], tuple[Tensor, Tensor]]
"""(b r d) hidden, (r) places of the tokens, (b|1 r) positions, entries of earlier steps -> (b r d)
what the head reads, (b r d) what the next step reads."""
Recall = Callable[[Tensor, Tensor, Tensor], Entries]
"""The first three of these -> the entries that the step made of them."""


class Unrolled(Cache):
    """Entries of all steps so far; a cache of `transformers` that a layer adds its own to.

    Args:
        first: (b|1 1 r r) bool, which rows of step 0 each row may read; None is causal.
    """

    is_compileable = False

    def __init__(self, first: Tensor | None = None) -> None:
        self.layers: list = []
        self.layer_class_to_replicate = None
        self.offloading = False
        self.first = first
        self.entries: dict[int, list[Entries]] = {}

    # For a layer of a model's family --------------------------------------------------------------
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> Entries:
        """Adds a step's (b h r e) entries. Returns those of all steps, one step after the other:
        (b h j*r e) twice."""
        made = self.entries.setdefault(layer_idx, [])
        made.append((key_states, value_states))
        keys, values = zip(*made, strict=True)
        return torch.cat(keys, 2), torch.cat(values, 2)

    def mask(self, rows: int, device: torch.device, layer: int = 0) -> Tensor:
        """(b|1 1 r j*r) bool for the step to come: which entries, in the order of `update`, each
        row may read."""
        first = self._first(rows, device)
        own = torch.eye(rows, dtype=torch.bool, device=device).expand_as(first)
        return torch.cat((first, *[own] * len(self.entries.get(layer, ()))), -1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return sum(keys.shape[2] for keys, _ in self.entries.get(layer_idx, ()))

    # For a layer of our own -----------------------------------------------------------------------
    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Adds a step's entries, and reads those that the mask above allows: a product with the
        entries of step 0, and one score for each later step.

        Args:
            q: (b h r e), rotated; k, v: (b h' r e), h a multiple of h'.
        Returns: (b h r e).
        """
        made = self.entries.setdefault(layer, [])
        made.append((k, v))
        (keys, values), *later = made
        if not later:
            return functional.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=self.first,
                is_causal=self.first is None,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        b, h, r, e = q.shape
        group = (b, keys.shape[1], h // keys.shape[1], r)
        wide = (q * e**-0.5).reshape(*group[:2], -1, e)  # b h (g r) e, h of the keys from here on
        scores = (wide @ keys.mT).view(*group, r)
        scores = scores.masked_fill(~self._first(r, q.device)[:, :, None], -torch.inf)
        own_keys = torch.stack([one for one, _ in later], -2)[:, :, None]  # b h 1 r j e
        own_values = torch.stack([one for _, one in later], -2)[:, :, None]
        own = torch.linalg.vecdot(wide.view(*group, 1, e), own_keys)  # b h g r j
        shares = torch.cat((scores, own), -1).softmax(-1)
        read = (shares[..., :r].flatten(2, 3) @ values).view(*group, e)
        read = read + (shares[..., r:, None] * own_values).sum(-2)
        return read.reshape(b, h, r, e)

    def _first(self, rows: int, device: torch.device) -> Tensor:
        if self.first is None:
            return torch.ones(1, 1, rows, rows, dtype=torch.bool, device=device).tril()
        return self.first


def unroll(
    step: Step,
    hidden: Tensor,
    positions: Tensor,
    count: int,
    *,
    first: Tensor | None = None,
    detach: bool = False,
    recall: Recall | None = None,
) -> Iterator[Tensor]:
    """What the head reads of each step, (b r d), by the table above.

    Args:
        hidden: (b r d) of rows 0..r-1 at step 0; the text has r + 2 tokens.
        positions: (b|1 r) of the rows at step 0.
        count: J.
        first: see `Unrolled`.
        detach: no gradient goes from a step's hidden states to the step that they are of. Keys and
            values of earlier steps still have gradients of their weights.
        recall: computes the entries of earlier steps again in every step, so that no step needs the
            graph of another one; needs `detach`.
    """
    cache, rows = Unrolled(first), hidden.shape[1]
    places = torch.arange(1, rows + 1, device=hidden.device)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    for j in range(count):
        # A row whose token is beyond the end has no label either.
        tokens = (places + j).clamp_max(rows + 1)
        if recall is not None:
            cache.entries = {0: [recall(*given) for given in seen]}
            seen.append((hidden, tokens, positions + j))
        out, hidden = step(hidden, tokens, positions + j, cache)
        hidden = hidden.detach() if detach else hidden
        yield out


def at_labels(out: Tensor, where: tuple[Tensor, Tensor], step: int) -> Tensor:
    """(b r d) of the rows of a step -> (t d) of those that learn some labels; any row for a label
    that no row of the step reaches.

    Args:
        where: (t) sequence and (t) place of the labels.
    """
    row, place = where
    if not out.shape[1]:
        return out.sum(1)[row]
    return out[row, (place - 2 - step).clamp_min(0)]


class AtOnce:
    """Adds up losses whose gradients are made when they are added, so that their graphs are freed.

    Args:
        parameters: that learn. Where no gradient is asked for, none is computed.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = [one for one in parameters if one.requires_grad]
        self.learn = torch.is_grad_enabled() and bool(self.parameters)
        self.slopes = [torch.zeros_like(one) for one in self.parameters] if self.learn else []
        self.sum: Tensor | None = None

    def add(self, loss: Tensor) -> None:
        """() float32 with grad."""
        self.sum = loss.detach() if self.sum is None else self.sum + loss.detach()
        if self.learn and loss.requires_grad:
            found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
            for mine, slope in zip(self.slopes, found, strict=True):
                if slope is not None:
                    mine += slope

    def total(self) -> Tensor:
        """() their sum, with grad of the parameters."""
        assert self.sum is not None
        if not self.learn:
            return self.sum
        total: Tensor = _Ready.apply(self.sum, self.slopes, *self.parameters)
        return total


class _Ready(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, slopes: list[Tensor], *_parameters: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(*slopes)
        return total.clone()

    @staticmethod
    def backward(ctx: Any, by_total: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, None, *(slope * by_total.to(slope.dtype) for slope in ctx.saved_tensors)
