"""Early exit: drafts leave the target behind one of its first layers, through a small adapter and
the target's own head. After Kangaroo (Liu et al. 2024, arXiv:2404.18911).

The adapter is one attention block, without an MLP unless one is wanted, and a norm. Alignment,
0-based, for a row x_0..x_{T-1} with t_i the target's residual stream behind the exit layer and h_i
what its LM head reads:

| row i  | reads    | position | soft label         | predicts | weight  |
| 0..T-2 | t_0..t_i | i        | softmax(head(h_i)) | x_{i+1}  | m_{i+1} |

The weight is the label's mask. While decoding, the layers up to the exit are run on drafted tokens,
on the target's own cache: what the adapter reads is exact, at any depth. Verification goes on
behind the exit layer, so that no layer of the target reads a token twice. Rows of committed tokens,
the anchor's included, stay in the adapter's own cache; those of accepted drafts are made anew in
the pass that reads the next anchor, which costs little more for it.

Departs from the source: the output projection begins as zero and the norm as the target's final
one, so that training begins from the target's own head on the exit layer; the loss is chosen among
several; a draft ends before an unsure token (`tree=chain tree.stop_below=0.6`), not behind it; the
draft vocabulary can be reduced.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.checks import integer
from drafttrain.drafter.base import Committed
from drafttrain.drafter.inside import Inside, InsideState
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Loss, Needs
from drafttrain.nn.block import Block
from drafttrain.nn.cache import KVCache
from drafttrain.nn.isolation import mask_of
from drafttrain.nn.mixture import Mixture, mixed
from drafttrain.target.model import Target

FORWARD_KL = {"forward_kl": 1.0}


@dataclass(kw_only=True)
class EarlyExitState(InsideState):
    """The adapter's cache beside the target's."""

    rows: KVCache
    """The adapter's own."""


class EarlyExit(Inside):
    """The target's layers 0..exit_layer, then an adapter, then the target's head, of which nothing
    is trained but the adapter.

    Args:
        target: the frozen model.
        exit_layer: number, from 0, of the last layer that drafts go through.
        draft_ids: (w) ascending ids that can be proposed; None is the whole vocabulary.
        heads, kv_heads: of the adapter's attention; 0 is the target's.
        mlp: width inside an MLP behind the attention; 0 is none, as in the source.
        loss: weights of losses by name: `cross_entropy` against the target's text, and divergences
            between the two laws.
        beta: of `jsd`.
        chunk: positions whose logits exist at one time in the loss.
    Raises: InputError for a layer that is not there, sizes that do not fit, and a target whose
    layers cannot be run apart.
    """

    def __init__(
        self,
        target: Target,
        *,
        exit_layer: int = 0,
        draft_ids: Tensor | list[int] | None = None,
        heads: int = 0,
        kv_heads: int = 0,
        mlp: int = 0,
        loss: Mapping[str, float] | None = None,
        beta: float = 0.5,
        chunk: int = 256,
    ) -> None:
        super().__init__(target, draft_ids)
        count = len(target.decoder_layers)
        if type(exit_layer) is not int or not 0 <= exit_layer < count:
            raise InputError(
                f"exit_layer={exit_layer}: needs the number of a layer of target {target.name}, "
                f"from 0 to {count - 1}"
            )
        for name, value in (("heads", heads), ("kv_heads", kv_heads), ("mlp", mlp)):
            integer(name, value)
        integer("chunk", chunk, 1)
        self.exit_layer, self.heads, self.kv_heads, self.mlp, self.chunk = (
            exit_layer,
            heads,
            kv_heads,
            mlp,
            chunk,
        )
        self.mixture = Mixture(FORWARD_KL if loss is None else loss, beta)
        self.needs = Needs(last_hidden=self.mixture.reads_target_probs, layers=(exit_layer,))
        self.common = target.stack.steps[
            : exit_layer + 1
        ]  # refuses a target whose layers cannot be run apart
        self.block = Block(target.width, *self._shape(), mlp=mlp, base=_rotary_base(target))
        # The target's own, to begin with.
        self.norm: nn.Module = copy.deepcopy(getattr(target.base, target.norm_name or "")).float()
        for parameter in self.norm.parameters():
            parameter.requires_grad_(True)
        self.to(target.device)

    def settings(self) -> dict[str, Any]:
        names = ("exit_layer", "heads", "kv_heads", "mlp", "chunk")
        return {name: getattr(self, name) for name in names} | {
            "loss": dict(self.mixture.weights),
            "beta": self.mixture.beta,
            "draft_ids": None if self.draft_ids is None else self.draft_ids.tolist(),
        }

    def describe(self) -> dict[str, Any]:
        return {
            "exit": f"behind layer {self.exit_layer} of {len(self.target.stack)}",
            **super().describe(),
        }

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
        """(b s d) residual streams behind the exit layer -> (b s d) what the head reads; the other
        arguments as of `Block`."""
        out: Tensor = self.norm(self.block(stream.to(self.dtype), positions, mask, cache))
        return out

    # Training -------------------------------------------------------------------------------------
    def check_packing(self) -> None:
        pass

    def loss(
        self, batch: Batch, features: Features, *, generator: torch.Generator | None = None
    ) -> Loss:
        device = self.device
        ids, chosen = batch.input_ids.to(device), batch.labels(1)[:, 1:].to(device)
        count = chosen.sum().float()
        # Every parameter takes part, so that no process waits for a gradient that another one has.
        nothing = torch.stack([p.sum() for p in self.parameters()]).sum() * 0.0
        if ids.shape[1] < 2:
            return Loss(nothing.float(), count, {})
        out = self._rows(batch, features)[chosen]  # t d
        labels = ids[:, 1:][chosen]
        teacher = None
        if self.mixture.reads_target_probs:
            assert features.last_hidden is not None
            teacher = features.last_hidden.to(device)[:, :-1][chosen]
        found = mixed(
            out,
            self.to_draft_ids(labels),
            self.head,
            self.mixture,
            teacher=teacher,
            teacher_head=self.head,
            chunk=self.chunk,
        )
        parts = {name: (value, count) for name, value in found.sums.items()}
        # Labels outside the draft vocabulary cannot be chosen, so they count as misses.
        parts["accuracy"] = ((self.to_target_ids(found.choices) == labels).sum().float(), count)
        return Loss((found.total + nothing).float(), count, parts)

    @torch.no_grad()
    def guesses(self, batch: Batch, features: Features) -> Tensor:
        ids, chosen = batch.input_ids.to(self.device), batch.loss_mask[:, 1:].to(self.device)
        found = torch.full_like(ids, -1)
        if ids.shape[1] > 1 and bool(chosen.any()):
            parts = [
                self.head(part).argmax(-1)
                for part in self._rows(batch, features)[chosen].split(self.chunk)
            ]
            found[:, 1:][chosen] = self.to_target_ids(torch.cat(parts))
        return found[:, :, None]

    def _rows(self, batch: Batch, features: Features) -> Tensor:
        """(b s-1 d) what the head reads at every place but the last."""
        stream = features.layers[self.exit_layer].to(self.device)[:, :-1]
        positions = batch.positions.to(self.device)[:, :-1]
        return self(stream, positions, mask_of(batch.packing, stream.shape[1], self.device))

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

    def extend(self, state: InsideState, committed: Committed) -> tuple[Tensor, Tensor]:
        rows = _rows_of(state)
        anchor = self.read_anchor(state, committed)  # b 1 d
        known, counts = committed.features.layers[self.exit_layer], committed.counts
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
        return last, self.head(last)

    def expand(
        self, state: InsideState, tokens: Tensor, hidden: Tensor, depth: int, tree_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, m = _rows_of(state), tokens.shape[1]
        stream = self.read_drafts(state, tokens, depth, tree_mask)
        true_rows = rows.lengths - (tree_mask.shape[-1] - m)
        positions = (true_rows + depth - 1)[:, None].expand(-1, m)
        out = self(stream, positions, rows.mask(tree_mask), rows)
        rows.advance(m)
        return out, self.head(out)

    # Inside ---------------------------------------------------------------------------------------
    def _shape(self) -> tuple[int, int, int]:
        """Heads, key/value heads and a head's width."""
        config = self.target.config
        heads = self.heads or config.num_attention_heads
        own = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        kv_heads = self.kv_heads or (own if not self.heads else heads)
        width = self.target.width // heads
        if self.target.width % heads or width % 2:
            raise InputError(
                f"heads={heads}: each needs an even, whole share of the target's width "
                f"{self.target.width}"
            )
        if heads % kv_heads:
            raise InputError(
                f"heads={heads}, kv_heads={kv_heads}: the heads must be a multiple of the "
                f"key/value heads"
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
