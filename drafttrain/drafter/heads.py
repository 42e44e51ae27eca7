"""What heads that read one position have in common: blocks, vocabulary projections, labels, loss
and accuracy.

Alignment, 0-based, for a row x_0..x_{T-1} with features h_t (what the LM head reads), head k =
1..K:

| rows of head k | reads | predicts  | weight    |
| 0..T-k-2       | h_t   | x_{t+k+1} | m_{t+k+1} |

The LM head itself predicts x_{t+1}, so no head does. The weight is the *label's* mask.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drafttrain.checks import integer, shown, switch
from drafttrain.drafter.borrowing import SLACK, BorrowsHead, best_ids
from drafttrain.drafter.growing import Block
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Loss, Needs
from drafttrain.nn import losses
from drafttrain.target.model import Target

TOPS = (1, 5, 10)
"""Ranks up to which a head's accuracy is reported."""
MOST_HEADS = 64
"""Of one drafter: a head guesses a token, and no text goes on as guessed for so long. What a
package asks for is built before its tensors are compared, so it must have an end."""
MOST_BLOCKS = 64
TEXT = "cross_entropy"
"""The loss against the text's own tokens; all others are against the target's distribution."""


class ResidualBlock(nn.Module):
    """z + SiLU(W z + b), W and b zero at first: it starts as the identity.

    Cai et al. 2024 (arXiv:2401.10774), section 2.2.1. Departs from the public code, which zeroes
    only W."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, z: Tensor) -> Tensor:
        """(... d) -> (... d)."""
        return z + functional.silu(self.linear(z))


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """Settings of `VocabularyHeads`."""

    draft_ids: Sequence[int] | None
    """(w) ascending ids that can be proposed; None is the whole vocabulary."""
    heads: int
    """K."""
    blocks: int
    """Residual blocks of each head."""
    own_head: bool
    """Every head trains a projection of its own; false borrows the target's, which is far
    smaller."""
    decay: float
    """Head k weighs decay^k in the loss; the paper's is 0.8."""
    loss: str
    """`cross_entropy` against the text's tokens, as in the paper, or a divergence from the target's
    own distribution there."""
    chunk: int
    """Positions whose logits exist at one time in the loss."""

    def __post_init__(self) -> None:
        integer("heads", self.heads, 1, MOST_HEADS)
        integer("blocks", self.blocks, 1, MOST_BLOCKS)
        integer("chunk", self.chunk, 1)
        switch("own_head", self.own_head)
        decay, loss = self.decay, self.loss
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1:
            raise InputError(f"decay={decay}: needs a number above 0, at most 1")
        if not isinstance(loss, str) or (loss != TEXT and loss not in losses.DIVERGENCES):
            raise InputError(
                f"loss {shown(loss)} is not known: give one of "
                f"{', '.join((TEXT, *losses.DIVERGENCES))}"
            )


class VocabularyHeads(BorrowsHead, Block, abc.ABC):
    """K heads fill the K places of a block, each with a projection to the vocabulary: its own,
    started as a copy of the target's, or the target's frozen one."""

    Config = HeadsConfig
    config: HeadsConfig
    needs = Needs(last_hidden=True)

    def __init__(self, target: Target, **settings: Any) -> None:
        super().__init__(target, **settings)
        self.projections: nn.ParameterList | None = None
        if self.config.own_head:
            rows = self.rows_of_head().float()
            copies = [nn.Parameter(rows.clone()) for _ in range(self.count)]
            self.projections = nn.ParameterList(copies)
        self.heads = nn.ModuleList(self.make_head(k) for k in range(1, self.count + 1))
        self.to(target.device)

    @classmethod
    def check_held(
        cls, target: Target, settings: Mapping[str, Any], tensors: int, weights: int
    ) -> None:
        heads, blocks = settings["heads"], settings["blocks"]
        needed = heads * blocks * target.width**2  # at least
        if needed > weights + SLACK:
            raise InputError(
                f"heads={heads}, blocks={blocks} need at least {needed:,} weights, the package "
                f"holds {weights:,}"
            )

    @property
    def count(self) -> int:
        """K, the number of heads."""
        return self.config.heads

    @classmethod
    def deepest(cls, config: HeadsConfig) -> int:
        return config.heads

    def project(self, z: Tensor, k: int) -> Tensor:
        """(... d) what head k = 1..K made of its input -> (... w) logits."""
        if self.projections is None:
            return self.head(z)
        z = z.to(self.dtype)
        return self.target.finish_logits(
            functional.linear(z, self.projections[k - 1], self.head_bias(z))
        )

    @abc.abstractmethod
    def make_head(self, k: int) -> nn.Module:
        """Head k = 1..K without its projection, such that at first it passes h_t on."""

    @abc.abstractmethod
    def outputs(self, hidden: Tensor, ids: Tensor, k: int) -> Tensor:
        """What head k's projection reads, teacher-forced.

        Args:
            hidden: (b r d) features of the rows 0..r-1; ids: (b r+k) the text, so that row t of
                head k may read up to x_{t+k}.
        Returns: (b r d).
        """

    # Training -------------------------------------------------------------------------------------
    def check_packing(self) -> None:
        """A head reads one position of its own row, and `valid` says where it has one."""

    @property
    def loss_parts(self) -> tuple[str, ...]:
        names = [f"head_{k}_top{top}" for k in range(1, self.count + 1) for top in TOPS]
        return (*names, *(f"head_{k}" for k in range(1, self.count + 1)), "accuracy")

    def loss(
        self, batch: Batch, features: Features, *, generator: torch.Generator | None = None
    ) -> Loss:
        """Sum over heads of decay^k times the head's loss, over supervised labels x_{t+k+1}.

        The sum is divided by the labels that head 1 has, for all heads alike: a mean of each head's
        own, as the paper has it, would depend on how a window is cut into micro-batches. The two
        differ by the few labels at a row's start that only the first heads reach.
        """
        assert features.last_hidden is not None
        stacked, at, valid, labels = self._aligned(batch, features)
        own = self.to_draft_ids(labels)
        by_text = self.config.loss == TEXT
        # A label that no head can say teaches nothing where it is all that is known.
        learn = valid & (own >= 0)[:, None] if by_text else valid
        teacher = features.last_hidden[
            at[0], at[1] - 1
        ]  # t d, which the label's distribution comes from

        def goal(part: slice) -> Tensor:
            return (
                own[part].clamp_min(0) if by_text else self.head(teacher[part].to(stacked)).float()
            )

        ks = range(1, self.count + 1)
        judged = losses.heads_over_vocabulary(
            stacked,
            learn,
            [self.config.decay**k for k in ks],
            own,
            [functools.partial(self.project, k=k) for k in ks],
            goal,
            losses.cross_entropy if by_text else losses.divergence(self.config.loss),
            trained=list(self.projections or ()),
            chunk=self.config.chunk,
        )
        parts: dict[str, tuple[Tensor, Tensor]] = {}
        for k in ks:
            counted = valid[:, k - 1]
            for top in TOPS:
                hits = (judged.noted[:, k - 1] < top) & counted
                parts[f"head_{k}_top{top}"] = (hits.sum().float(), counted.sum().float())
            parts[f"head_{k}"] = (judged.sums[k - 1, 0], learn[:, k - 1].sum().float())
        parts["accuracy"] = parts["head_1_top1"]
        return Loss(judged.total, valid[:, 0].sum().float(), parts)

    def _aligned(
        self, batch: Batch, features: Features
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
        """What every head reads for every supervised label.

        Returns: (t k d) with grad; (t) row and (t) position of each label; (t k) bool, where head k
            reaches back that far; (t) int64 labels.
        """
        hidden = features.last_hidden
        assert hidden is not None
        device = next(self.parameters()).device
        hidden, ids = hidden.to(device, self.dtype), batch.input_ids.to(device)
        if hidden.is_inference() and torch.is_grad_enabled():
            hidden = hidden.clone()  # Such a tensor cannot be kept for the way back.
        # Head 1 reads position place - 2: a label with less before it is no draft's.
        row, place = batch.labels(2).to(device).nonzero(as_tuple=True)  # t
        own = batch.positions.to(device).expand(len(ids), -1)[row, place]
        valid = torch.stack([own >= k + 1 for k in range(1, self.count + 1)], 1)  # t k
        s = hidden.shape[1]
        read = []
        for k in range(1, self.count + 1):
            rows = max(s - k - 1, 0)
            out = self.outputs(hidden[:, :rows], ids[:, : rows + k], k)  # b r d
            if rows:
                read.append(out[row, (place - k - 1).clamp_min(0)])
            else:
                read.append(hidden.new_zeros(len(row), hidden.shape[-1]))
        return torch.stack(read, 1), (row, place), valid, ids[row, place]

    @torch.no_grad()
    def guesses(self, batch: Batch, features: Features) -> Tensor:
        stacked, (row, place), valid, _ = self._aligned(batch, features)
        found = torch.full(
            (*batch.input_ids.shape, self.count), -1, dtype=torch.int64, device=stacked.device
        )
        for k in range(1, self.count + 1):
            project = functools.partial(self.project, k=k)
            ids = best_ids(self, stacked[:, k - 1], project, self.config.chunk)
            found[row, place, k - 1] = torch.where(valid[:, k - 1], ids, -1)
        return found

    @torch.no_grad()
    def hits(self, batch: Batch, features: Features, ranks: int) -> tuple[Tensor, Tensor]:
        """How often each head's j-th choice is the text's token, teacher-forced.

        Returns: (k ranks) int64 hits, (k) int64 comparisons made.
        """
        stacked, _, valid, labels = self._aligned(batch, features)
        hits = torch.zeros(self.count, ranks, dtype=torch.int64)
        for k in range(1, self.count + 1):
            for part, counted, label in zip(
                stacked[:, k - 1].split(self.config.chunk),
                valid[:, k - 1].split(self.config.chunk),
                labels.split(self.config.chunk),
                strict=True,
            ):
                best = self.to_target_ids(self.project(part, k).topk(ranks, -1).indices)  # c ranks
                hits[k - 1] += ((best == label[:, None]) & counted[:, None]).sum(0).cpu()
        return hits, valid.sum(0).cpu()
