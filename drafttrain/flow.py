"""The records that travel between rooms. Every field has its shape.

Letters: b batch, s sequence, d width, v vocabulary, w draft vocabulary, n drafted tree nodes, k
draft depth, r rows of q.

Round state of every drafter: the target has read x_0..x_{n-1} and chosen x_n (the anchor); drafts
are x_{n+1}..; the target's distribution after the anchor judges the first draft.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from drafttrain.later import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Where rows are that were joined into sequences, one after the other. Each is a document that
    nothing outside of it reads."""

    document_ids: Tensor
    """(b s) int64: which of the batch's `row_ids` a token is of, ascending from sequence to
    sequence; -1 on padding."""
    position_ids: Tensor
    """(b s) int64: place of a token in its own row; 0 on padding."""

    def to(self, device: torch.device | str) -> Packing:
        """The same on a device."""
        return Packing(self.document_ids.to(device), self.position_ids.to(device))


@dataclass(frozen=True)
class Batch:
    """Rows written by the target, padded on the right: each a sequence of its own, or several
    joined into one."""

    input_ids: Tensor
    """(b s) int64; padding holds a valid id that nothing reads."""
    loss_mask: Tensor
    """(b s) bool; true where the token was written by the target (its end-of-turn token
    included)."""
    lengths: Tensor
    """(b) int64 real tokens per sequence."""
    row_ids: Tensor
    """(n) int64 index of each row in its conversation set; n is b, or more where rows are
    joined."""
    weights: Tensor | None = None
    """(b s) float32: how much each label counts; None is all alike."""
    packing: Packing | None = None
    """Where joined rows are; None: row k is sequence k."""

    @property
    def padding(self) -> Tensor:
        """(b s) bool, true on real tokens."""
        steps = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        return steps[None] < self.lengths[:, None]

    @property
    def positions(self) -> Tensor:
        """(b|1 s) int64, place of every token in its own row."""
        if self.packing is not None:
            return self.packing.position_ids
        return torch.arange(self.input_ids.shape[1], device=self.input_ids.device)[None]

    @property
    def row_lengths(self) -> Tensor:
        """(n) int64 real tokens of each row."""
        if self.packing is None:
            return self.lengths
        ids = self.packing.document_ids
        return torch.bincount(ids[ids >= 0], minlength=len(self.row_ids))

    def labels(self, before: int) -> Tensor:
        """(b s) bool, the tokens to learn that have at least `before` tokens of their own row
        before them."""
        return self.loss_mask & (self.positions >= before)

    def lengths_at(self) -> Tensor:
        """(b 1|s) int64, tokens of the row that each token is of; anything above 0 on padding."""
        if self.packing is None:
            return self.lengths[:, None]
        return self.row_lengths[self.packing.document_ids.clamp_min(0)]

    def rows_with(self, tokens: Tensor) -> list[int]:
        """Numbers in the set of the rows that some tokens, (b s) bool, are of; padding is of
        none."""
        if self.packing is None:
            return self.row_ids[(tokens & self.padding).any(1)].tolist()
        documents = self.packing.document_ids[tokens & self.padding].unique()
        return self.row_ids[documents].tolist()

    def to(self, device: torch.device | str) -> Batch:
        """The same rows on a device."""
        ids, mask, lengths, rows = (
            one.to(device) for one in (self.input_ids, self.loss_mask, self.lengths, self.row_ids)
        )
        weights = None if self.weights is None else self.weights.to(device)
        return Batch(
            ids,
            mask,
            lengths,
            rows,
            weights,
            None if self.packing is None else self.packing.to(device),
        )


@dataclass(frozen=True)
class Needs:
    """What a drafter reads of the target."""

    last_hidden: bool = False
    layers: tuple[int, ...] = ()
    """0-based index l of the decoder layer whose *output* is meant."""
    logits: bool = False


@dataclass(frozen=True)
class Features:
    """What the target supplies for some positions."""

    last_hidden: Tensor | None = None
    """(b s d) exactly what the LM head reads, after the final norm."""
    layers: dict[int, Tensor] = field(default_factory=dict)
    """{l: (b s d)} residual stream after decoder layer l."""


@dataclass(frozen=True)
class Loss:
    """A drafter's loss on one batch, as sums: dividing comes last, after sums over accumulation and
    processes."""

    total: Tensor
    """() float32, weighted *sum* over supervised positions, with grad."""
    count: Tensor
    """() float32, number of supervised positions; where labels have weights, the sum of these."""
    parts: dict[str, tuple[Tensor, Tensor]]
    """{name: (sum, count)} detached, for the log."""


class Sampling(str, enum.Enum):
    """How the children of a node were drawn; says which acceptance rules are valid (Leviathan 2023;
    SpecInfer 2023)."""

    IID = "iid"
    """k independent draws from q, duplicates kept; a chain is k = 1."""
    WOR = "wor"
    """k draws without replacement; children are in the order drawn."""
    ONE_HOT = "one_hot"
    """A deterministic function of the committed prefix (argmax, top-k, n-gram)."""
    UNKNOWN = "unknown"
    """Nobody knows; only a rule that compares with the target's own draws can judge it."""


@dataclass(frozen=True)
class PartialPass:
    """The lower layers of the pass that verifies, where drafting has run them already on the
    target's own cache. The entries that they wrote follow the committed ones."""

    layer: int
    """The last layer that was run."""
    hidden: Tensor
    """(b t d) residual stream after it, of the tokens read, in the order of their entries."""
    places: Tensor
    """(b n+1) int64: which of them the anchor and each node are, -1 for one not read."""


@dataclass(frozen=True)
class Proposal:
    """A tree of drafted tokens per row. Siblings are checked in index order, which must not depend
    on the drawn tokens."""

    tokens: Tensor
    """(b n) int64"""
    parents: Tensor
    """(b n) int64 index of the parent node, -1 = anchor; a parent's index is below its
    children's."""
    sampling: Sampling
    q: Tensor | None = None
    """(b r v) float32 draft probabilities; for each node (or the anchor) that has children, one row
    per drafter that drew some of them. None under ONE_HOT, UNKNOWN."""
    q_rows: Tensor | None = None
    """(b n) int64: the row of q that node's token was drawn from, its parent's distribution. Under
    WOR siblings of one row were drawn together, those of different rows apart; a row that is a
    point mass makes a deterministic child."""
    counts: Tensor | None = None
    """(b) int64 nodes of each row that are real; those after them are padding, never to be
    accepted. None: all are."""
    merged_into: Tensor | None = None
    """(b n) int64: the node whose children are judged once this one is accepted, the first of those
    with the same path. Only it has children; the others are further proposals of its token. None:
    no path is proposed twice."""
    places: Tensor | None = None
    """(b n) int64: the node of the tree asked for that each node is, where a row may lack
    some. None: its own number."""
    read: Tensor | None = None
    """(b n) int64: number of each node among those that the drafter read while growing, in that
    order; -1 for one it did not read. None where that is not known."""
    partial_pass: PartialPass | None = None
    """What drafting has done of the pass that verifies; None: nothing."""

    @property
    def size(self) -> int:
        """Nodes of a row, padding included."""
        return self.tokens.shape[1]

    def part(self, rows: Tensor, size: int) -> Proposal:
        """Some rows of this proposal, and of each the first `size` nodes."""
        return Proposal(
            self.tokens[rows, :size],
            self.parents[rows, :size],
            self.sampling,
            None if self.q is None else self.q[rows],
            None if self.q_rows is None else self.q_rows[rows, :size],
            None,
            None if self.merged_into is None else self.merged_into[rows, :size],
        )


@dataclass(frozen=True)
class Acceptance:
    """What a rule kept of one proposal."""

    path: Tensor
    """(b k) int64 accepted node indices from the anchor down, padded with -1."""
    count: Tensor
    """(b) int64 accepted drafted tokens A; the round emits A + 1."""
    next_token: Tensor
    """(b) int64 correction or bonus, the next anchor."""
    fallbacks: int = 0
    """Refusals whose residual was empty by rounding; the token was drawn from p instead."""


@dataclass
class Tally:
    """Counts of decoding rounds. Ratios are computed last: sums before divisions."""

    rounds: int = 0
    """Target passes that verified a proposal; prefill is not a round."""
    drafted: int = 0
    accepted: int = 0
    """Accepted drafted tokens that were emitted (after cuts by a stop token or the limit)."""
    emitted: int = 0
    """Tokens emitted by rounds; the prefill's own first token is not counted."""
    offered: list[int] = field(default_factory=list)
    """offered[k]: rounds in which depths 1..k were accepted and a node of depth k+1 was drafted
    after the last of them."""
    kept: list[int] = field(default_factory=list)
    """kept[k]: rounds in which depth k+1 was accepted."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall seconds by stage: prefill, draft, verify, host."""

    def __iadd__(self, other: Tally) -> Tally:
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.emitted += other.emitted
        for name in ("offered", "kept"):
            mine, theirs = getattr(self, name), getattr(other, name)
            mine.extend([0] * (len(theirs) - len(mine)))
            for depth, value in enumerate(theirs):
                mine[depth] += value
        for stage, value in other.seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + value
        return self

    @property
    def tau(self) -> float | None:
        """Tokens emitted per target pass, bonus included; None when nothing was measured."""
        return self.emitted / self.rounds if self.rounds else None

    @property
    def accepted_per_round(self) -> float | None:
        """Accepted drafted tokens per round, bonus excluded."""
        return self.accepted / self.rounds if self.rounds else None

    @property
    def accept_at(self) -> list[float | None]:
        """accept@k, k = 1..: share of rounds accepting depth k of those whose depths 1..k-1 were
        accepted."""
        return [
            kept / offered if offered else None
            for kept, offered in zip(self.kept, self.offered, strict=True)
        ]
