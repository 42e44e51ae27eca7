"""Early exit: drafts leave the target after one of its first layers, through a small adapter and
the target's own head. After Kangaroo (Liu et al. 2024, arXiv:2404.18911).

The adapter is one attention block, without an MLP unless one is asked for, and a norm. Alignment,
0-based, for a row x_0..x_{T-1} with t_i the target's residual stream after the exit layer and h_i
what its LM head reads:

| row i  | reads    | position | soft label         | predicts | weight  |
| 0..T-2 | t_0..t_i | i        | softmax(head(h_i)) | x_{i+1}  | m_{i+1} |

The weight is the label's mask. While decoding, the layers up to the exit are run on drafted tokens,
on the target's own cache: what the adapter reads is exact, at any depth. Verification goes on after
the exit layer, so that no layer of the target reads a token twice. Rows of committed tokens, the
anchor's included, stay in the adapter's own cache; those of accepted drafts are made again in the
pass that reads the next anchor, which costs little more for it.

Departs from the source: the output projection starts as zero and the norm as the target's final
one, so that training starts from the target's own head on the exit layer; several losses can be
chosen; a draft ends before an unsure token (`tree=chain tree.stop_below=0.6`), not after it; the
draft vocabulary can be reduced.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.checks import integer
from drafttrain.drafter.base import Committed
from drafttrain.drafter.borrowing import best_ids
from drafttrain.drafter.inside import Inside, InsideState
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Loss, Needs
from drafttrain.nn.block import Block
from drafttrain.nn.cache import KVCache
from drafttrain.nn.isolation import mask_of
from drafttrain.nn.mixture import Mixture, mixed
from drafttrain.target.model import Target
from drafttrain.tree.candidates import Candidates


@dataclass(kw_only=True)
class EarlyExitState(InsideState):
    """The adapter's cache next to the target's."""

    rows: KVCache
    """The adapter's own."""


@dataclass(frozen=True, kw_only=True)
class EarlyExitConfig:
    """Settings of `EarlyExit`."""

    exit_layer: int
    """Number, from 0, of the last layer that drafts go through."""
    heads: int
    """Of the adapter's attention; 0 is the target's number."""
    kv_heads: int
    """Of the adapter's attention; 0 is the target's number, or `heads` where these are given."""
    mlp: int
    """Width inside an MLP after the attention; 0 is none, as in the source."""
    loss: Mapping[str, float]
    """Weights of losses by name: `cross_entropy` against the target's text, and divergences between
    the two distributions."""
    beta: float
    """Of `jsd`."""
    chunk: int
    """Positions whose logits exist at one time in the loss."""
    draft_ids: Sequence[int] | None
    """(w) ascending ids that can be proposed; None is the whole vocabulary."""

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "mlp"):
            integer(name, getattr(self, name))
        integer("chunk", self.chunk, 1)
        Mixture(self.loss, self.beta)


class EarlyExit(Inside):
    """The target's layers 0..exit_layer, then an adapter, then the target's head, of which only the
    adapter is trained.

    Raises: InputError for a layer that is not there, sizes that do not fit, and a target whose
    layers cannot be run apart.
    """

    Config = EarlyExitConfig
    config: EarlyExitConfig

    def __init__(self, target: Target, **settings: Any) -> None:
        super().__init__(target, **settings)
        exit_layer, count = self.config.exit_layer, len(target.decoder_layers)
        if type(exit_layer) is not int or not 0 <= exit_layer < count:
            raise InputError(
                f"exit_layer={exit_layer}: needs the number of a layer of target {target.name}, "
                f"from 0 to {count - 1}"
            )
        self.mixture = Mixture(self.config.loss, self.config.beta)
        self.needs = Needs(last_hidden=self.mixture.reads_target_probs, layers=(exit_layer,))
        # Refuses a target whose layers cannot be run apart.
        self.common = target.stack.steps[: exit_layer + 1]
        self.block = Block(
            target.width, *self._shape(), mlp=self.config.mlp, base=_rotary_base(target)
        )
        # The target's own, at the start.
        self.norm: nn.Module = copy.deepcopy(getattr(target.base, target.norm_name or "")).float()
        for parameter in self.norm.parameters():
            parameter.requires_grad_(True)
        self.to(target.device)

    def describe(self) -> dict[str, Any]:
        layers = len(self.target.stack)
        return {"exit": f"after layer {self.config.exit_layer} of {layers}", **super().describe()}

    @property
    def loss_parts(self) -> tuple[str, ...]:
        return (*self.mixture.names, "accuracy")

    def forward(
        self,
        stream: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """(b s d) residual streams after the exit layer -> (b s d) what the head reads; the other
        arguments as of `Block`."""
        out: Tensor = self.norm(self.block(stream.to(self.dtype), positions, mask, cache))
        return out

    # Training -------------------------------------------------------------------------------------
    def check_packing(self) -> None:
        """Rows keep apart by their mask and positions."""

    def _aligned(self, batch: Batch, features: Features) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of the table above that have a label.

        Returns: (t d) what the head reads, (t) int64 labels, (b s) bool where these labels are.
        """
        device = self.device
        ids, where = batch.input_ids.to(device), batch.labels(1).to(device)
        stream = features.layers[self.config.exit_layer].to(device)
        if ids.shape[1] < 2:  # no row reaches a label
            nothing = stream.new_zeros(0, stream.shape[-1])
            return nothing.to(self.dtype), ids.new_zeros(0), torch.zeros_like(where)
        stream, chosen = stream[:, :-1], where[:, 1:]  # b s-1 d, b s-1
        positions = batch.positions.to(device)[:, :-1]
        out = self(stream, positions, mask_of(batch.packing, stream.shape[1], device))
        return out[chosen], ids[:, 1:][chosen], where

    def loss(
        self, batch: Batch, features: Features, *, generator: torch.Generator | None = None
    ) -> Loss:
        out, labels, where = self._aligned(batch, features)
        count = where.sum().float()
        teacher = None
        if self.mixture.reads_target_probs:
            assert features.last_hidden is not None
            teacher = features.last_hidden.to(out.device)[:, :-1][where[:, 1:]]
        found = mixed(
            out,
            self.to_draft_ids(labels),
            self.head,
            self.mixture,
            teacher=teacher,
            teacher_head=self.head,
            chunk=self.config.chunk,
        )
        parts = {name: (value, count) for name, value in found.sums.items()}
        # Labels outside the draft vocabulary cannot be chosen, so they count as misses.
        parts["accuracy"] = ((self.to_target_ids(found.choices) == labels).sum().float(), count)
        return Loss(found.total.float(), count, parts)

    @torch.no_grad()
    def guesses(self, batch: Batch, features: Features) -> Tensor:
        out, _, where = self._aligned(batch, features)
        found = torch.full_like(batch.input_ids.to(where.device), -1)
        found[where] = best_ids(self, out, self.head, self.config.chunk)
        return found[:, :, None]

    # Decoding -------------------------------------------------------------------------------------
    def open(self, rows: int, capacity: int) -> EarlyExitState:
        return EarlyExitState(rows=KVCache(rows, capacity + 1, self.device))

    def select(self, state: InsideState, rows: Tensor) -> None:
        _rows_of(state).select(rows)

    @contextlib.contextmanager
    def scratch(self, state: InsideState) -> Iterator[None]:
        """Only rows of committed tokens stay."""
        rows = _rows_of(state)
        true_rows = rows.lengths
        yield
        rows.set_lengths(true_rows)

    def extend(
        self, state: InsideState, committed: Committed, depth: int
    ) -> tuple[Tensor, Candidates]:
        rows = _rows_of(state)
        anchor = self.read_anchor(state, committed)  # b 1 d
        known, counts = committed.features.layers[self.config.exit_layer], committed.counts
        if committed.first is None:
            # Its first is the last round's anchor, whose row is there.
            known, counts = known[:, 1:], counts - 1
        stream = torch.cat((known.to(anchor), anchor), 1)
        number = torch.arange(len(stream), device=stream.device)
        stream[number, counts] = anchor[:, 0]  # rows are ragged
        s = stream.shape[1]
        tree_mask = torch.ones(1, s, s, dtype=torch.bool, device=stream.device).tril()
        positions = rows.lengths[:, None] + torch.arange(s, device=stream.device)
        out = self(stream, positions, rows.mask(tree_mask), rows)
        rows.commit(counts + 1)
        last = out[number, counts]  # b d
        return last[:, None], self.candidates(self.head(last)[:, None])

    def expand(
        self, state: InsideState, tokens: Tensor, hidden: Tensor, depth: int, tree_mask: Tensor
    ) -> tuple[Tensor, Candidates]:
        rows, m = _rows_of(state), tokens.shape[1]
        stream = self.read_drafts(state, tokens, depth, tree_mask)
        true_rows = rows.lengths - (tree_mask.shape[-1] - m)
        positions = (true_rows + depth - 1)[:, None].expand(-1, m)
        out = self(stream, positions, rows.mask(tree_mask), rows)
        rows.advance(m)
        return out, self.candidates(self.head(out))

    # Inside ---------------------------------------------------------------------------------------
    def _shape(self) -> tuple[int, int, int]:
        """Heads, key/value heads and a head's width."""
        config, given = self.target.config, self.config
        heads = given.heads or config.num_attention_heads
        own = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        kv_heads = given.kv_heads or (own if not given.heads else heads)
        width = self.target.width // heads
        if self.target.width % heads or width % 2:
            raise InputError(
                f"heads={heads}: they do not divide the target's width {self.target.width} into "
                "even widths"
            )
        if heads % kv_heads:
            raise InputError(
                f"heads={heads}, kv_heads={kv_heads}: the heads must be a multiple of the "
                "key/value heads"
            )
        return heads, kv_heads, width


def _rows_of(state: InsideState) -> KVCache:
    assert isinstance(state, EarlyExitState)
    return state.rows


def _rotary_base(target: Target) -> float:
    """The target's own, where it has one."""
    found = (getattr(target.config, "rope_parameters", None) or {}).get("rope_theta")
    if isinstance(found, int | float) and math.isfinite(found) and found > 1:
        return float(found)
    return 10000.0
