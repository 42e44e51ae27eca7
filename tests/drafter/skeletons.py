"""Two drafters of kinds to come, each a few dozen lines in its own file: what the contract must
carry without a line elsewhere.

`Fused` is EAGLE-3-like (Li et al. 2025, arXiv:2503.01840): several layers of the target fused, a
layer that reads embedding and feature side by side, a head of its own, training unrolled over two
steps. `Blocks` is DFlash-like (Chen et al. 2026, arXiv:2602.06036): keys and values of the context
are made from the target's features, and one pass with attention in both directions fills a block of
masks. `Corrected` is a sequential head on the same block: a bias by the parent's token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.drafter.base import Committed
from drafttrain.drafter.borrowing import BorrowsHead, DraftVocabulary
from drafttrain.drafter.growing import (
    Autoregressive,
    AutoregressiveState,
    BlockState,
    Parallel,
    Sequential,
    anchor_of,
)
from drafttrain.flow import Batch, Features, Loss, Needs
from drafttrain.nn import losses
from drafttrain.nn.cache import KVCache
from drafttrain.nn.layers import Given, call, keys_and_values, new_layers
from drafttrain.target.model import Target
from drafttrain.tree.candidates import Candidates


@dataclass(frozen=True, kw_only=True)
class Taps:
    """Settings of both."""

    taps: Sequence[int]
    """Layers of the target, from 0, whose outputs are fused."""
    draft_ids: Sequence[int] | None
    """(w) ascending ids that can be proposed; None is the whole vocabulary."""


def fused(features: Features, taps: Sequence[int], device: torch.device) -> Tensor:
    """(b s l*d)"""
    return torch.cat([features.layers[tap].to(device) for tap in taps], -1).float()


class Fused(DraftVocabulary, Autoregressive):
    """Row i reads [E(x_{i+1}); g_i], g the fused features or, from the second step on, the layer's
    own output, and guesses x_{i+2}."""

    Config = Taps
    config: Taps

    def __init__(self, target: Target, **settings: Any) -> None:
        super().__init__(target, **settings)
        d = target.width
        self.needs = Needs(layers=tuple(self.config.taps), last_hidden=True)
        self.fuse = nn.Linear(len(self.config.taps) * d, d)
        self.norms = nn.ModuleList([nn.RMSNorm(d), nn.RMSNorm(d)])
        (self.layer,) = new_layers(target, input_width=2 * d, input_norm=nn.Identity())
        self.lm_head = nn.Parameter(self.rows_of_head().float().clone())

    def forward(
        self, g: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Any = None
    ) -> Tensor:
        embedded = self.target.embed(tokens).float()
        both = torch.cat((self.norms[0](embedded), self.norms[1](g)), -1)
        self.layer.input_layernorm = Reads(both)
        rotary = self.target.base.rotary_emb(g, position_ids=positions)
        return call(self.layer, g, positions=positions, rotary=rotary, mask=mask, cache=cache)

    def head(self, hidden: Tensor) -> Tensor:
        return hidden @ self.lm_head.T

    def loss(
        self, batch: Batch, features: Features, *, generator: torch.Generator | None = None
    ) -> Loss:
        ids, s = batch.input_ids, batch.input_ids.shape[1] - 3
        g = self.fuse(fused(features, self.config.taps, ids.device))[:, :s]
        causal, own = torch.ones(s, s).tril().bool(), torch.eye(s).bool()
        # Two steps at once: the second sees the first's rows, and itself (section 4, Figure 6).
        mask = torch.cat((torch.cat((causal, ~own & own), 1), torch.cat((causal, own), 1)))
        place = torch.arange(s)[None].expand(len(ids), -1)
        first = self(g, ids[:, 1 : s + 1], place, causal[None, None])
        both = torch.cat((g, first), 1)
        tokens = torch.cat((ids[:, 1 : s + 1], ids[:, 2 : s + 2]), 1)
        out = self(both, tokens, torch.cat((place, place + 1), 1), mask[None, None])
        found = [batch.labels(2)[:, 2 + k : 2 + k + s] for k in (0, 1)]
        hidden = torch.cat(
            [part[where] for part, where in zip(out.split(s, 1), found, strict=True)]
        )
        read = features.last_hidden
        assert read is not None
        teacher = torch.cat([read[:, 1 + k : 1 + k + s][where] for k, where in enumerate(found)])
        logits = self.target.head(teacher).float()
        p = logits if self.draft_ids is None else logits[:, self.draft_ids]
        total = losses.forward_kl(p, self.head(hidden)).sum()
        return Loss(total, torch.tensor(float(len(hidden))), {})

    def extend(
        self, state: AutoregressiveState, committed: Committed, depth: int
    ) -> tuple[Tensor, Candidates]:
        g = self.fuse(fused(committed.features, self.config.taps, committed.tokens.device))
        s, cache = g.shape[1], state.cache
        positions = cache.lengths[:, None] + torch.arange(s)
        mask = cache.mask(torch.ones(1, s, s, dtype=torch.bool).tril())
        out = self(g, committed.tokens, positions, mask, cache)
        cache.commit(committed.counts)
        last = out[torch.arange(len(out)), committed.counts - 1][:, None]
        return last, self.candidates(self.head(last))

    def expand(
        self, state: Any, tokens: Tensor, hidden: Tensor, depth: int, tree_mask: Tensor
    ) -> tuple[Tensor, Candidates]:
        cache, m = state.cache, tokens.shape[1]
        before = cache.lengths - (tree_mask.shape[-1] - m)
        positions = (before + depth - 1)[:, None].expand(-1, m)
        out = self(hidden, tokens, positions, cache.mask(tree_mask), cache)
        cache.advance(m)
        return out, self.candidates(self.head(out))


class Reads(nn.Module):
    """Gives what the attention reads in the place of the layer's own norm."""

    def __init__(self, both: Tensor) -> None:
        super().__init__()
        self.both = both

    def forward(self, _: Tensor) -> Tensor:
        return self.both


@dataclass(kw_only=True)
class ContextState(BlockState):
    """Keys and values of the context: all that is remembered between rounds."""

    cache: KVCache


class Blocks(BorrowsHead, Parallel):
    """Row j of the block [anchor, MASK, ..] guesses the token j + 1 places after the anchor."""

    Config = Taps
    config: Taps

    def __init__(self, target: Target, **settings: Any) -> None:
        super().__init__(target, **settings)
        d = target.width
        self.needs = Needs(layers=tuple(self.config.taps), last_hidden=True)
        self.fuse = nn.Sequential(nn.Linear(len(self.config.taps) * d, d), nn.RMSNorm(d))
        (self.layer,) = new_layers(target)
        self.mask_row = nn.Parameter(torch.randn(d) * 0.02)
        self.norm = nn.RMSNorm(d)

    @property
    def max_depth(self) -> int:
        return 4

    def context(self, features: Features, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of some positions of the text."""
        x = self.fuse(fused(features, self.config.taps, positions.device))
        return keys_and_values(
            self.layer, x, self.target.base.rotary_emb(x, position_ids=positions)
        )

    def block(self, anchors: Tensor, first: Tensor, mask: Tensor, cache: Any, k: int) -> Tensor:
        """(b) anchors at positions (b) -> (b k d)"""
        masks = self.mask_row.expand(len(anchors), k - 1, -1)
        x = torch.cat((self.target.embed(anchors[:, None]).float(), masks), 1)
        positions = first[:, None] + torch.arange(k)
        rotary = self.target.base.rotary_emb(x, position_ids=positions)
        out = call(self.layer, x, positions=positions, rotary=rotary, mask=mask, cache=cache)
        return self.norm(out)

    def loss(
        self, batch: Batch, features: Features, *, generator: torch.Generator | None = None
    ) -> Loss:
        ids, k = batch.input_ids, self.max_depth
        s = ids.shape[1]
        at = (batch.lengths - k - 1).clamp_min(1)  # one anchor a row
        entries = {0: self.context(features, torch.arange(s)[None].expand(len(ids), -1))}
        sees = torch.arange(s)[None] < at[:, None]
        mask = torch.cat((sees, torch.ones(len(ids), k, dtype=torch.bool)), 1)[:, None, None]
        anchors = ids.gather(1, at[:, None])[:, 0]
        rows = self.block(anchors, at, mask.expand(-1, -1, k, -1), Given(entries), k)
        places = (at[:, None] + torch.arange(1, k + 1)).clamp_max(s - 1)
        labels = self.to_draft_ids(ids.gather(1, places))
        where = batch.loss_mask.gather(1, places) & (labels >= 0)
        logits = self.head(rows)[where].float()
        total = nn.functional.cross_entropy(logits, labels[where], reduction="sum")
        return Loss(total, where.sum().float(), {})

    def open(self, rows: int, capacity: int) -> ContextState:
        return ContextState(cache=KVCache(rows, capacity + self.max_depth, self.target.device))

    def select(self, state: ContextState, rows: Tensor) -> None:
        state.cache.select(rows)

    def rows(self, state: ContextState, committed: Committed, depth: int) -> Tensor:
        cache, s = state.cache, committed.tokens.shape[1]
        new = self.context(committed.features, cache.lengths[:, None] + torch.arange(s))
        cache.update(*new, 0)
        cache.commit(committed.counts)
        mask = cache.mask(torch.ones(1, depth, depth, dtype=torch.bool))
        return self.block(anchor_of(committed)[:, 0], cache.lengths, mask, cache, depth)

    def place(self, row: Tensor, place: int) -> Candidates:
        return self.candidates(self.head(row)[:, None])


class Corrected(Sequential, Blocks):
    """The same block, with few candidates a node: the row's best, moved by the parent's token."""

    def __init__(self, target: Target, **settings: Any) -> None:
        super().__init__(target, **settings)
        self.bias = nn.Parameter(torch.randn(target.vocab_size, self.choices))

    def step(
        self, place: int, row: Tensor, tokens: Tensor, carried: Tensor | None
    ) -> tuple[Tensor, Candidates]:
        logits = self.head(row)[:, None] + self.bias[tokens]  # b m w
        best = logits.topk(6)
        ids = self.to_target_ids(best.indices)
        carried = row.new_zeros(*tokens.shape, 0)
        return carried, Candidates(best.values, self.target.vocab_size, ids)


class Chosen(Blocks):
    """The same block again, with a few tokens chosen for each node and none else proposed."""

    def place(self, row: Tensor, place: int) -> Candidates:
        best = self.head(row).topk(6)
        ids = self.to_target_ids(best.indices)[:, None]
        return Candidates(best.values[:, None], self.target.vocab_size, ids)
