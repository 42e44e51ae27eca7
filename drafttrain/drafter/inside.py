"""Drafters that are a part of the target: some of its layers, run on its own cache.

What the target has read stays in its cache as the target made it. A draft reads it there, writes
after it, and what it wrote is taken back. Layers that the draft runs just as the target does need
not run again for the tokens it has read: verification goes on after them.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from drafttrain.drafter.base import Committed
from drafttrain.drafter.borrowing import BorrowsHead
from drafttrain.flow import PartialPass, Proposal, Sampling
from drafttrain.nn.cache import KVCache
from drafttrain.nn.sampling import Policy
from drafttrain.nn.stack import Steps
from drafttrain.tree.topology import Growth


@dataclass
class InsideState:
    """The target's cache, and what this round's drafts have read on it."""

    shared: KVCache | None = None
    """The target's own."""
    depths: list[int] = field(default_factory=list)
    """Of the drafted nodes read this round, in the order of their entries; 0 is the anchor's
    children."""
    stream: list[Tensor] = field(default_factory=list)
    """(b m d) residual streams after the layers that verification need not run, of the tokens read
    this round."""


class Inside(BorrowsHead, abc.ABC):
    """Runs `common` steps, which are the target's first layers as they are, then `rest`."""

    runs_target = True
    common: Steps = ()
    rest: Steps = ()

    @property
    def shared_layer(self) -> int | None:
        """The target's last layer that drafts have been through when they are verified; None: they
        start again at the first."""
        return len(self.common) - 1 if self.common else None

    def open(self, rows: int, capacity: int) -> InsideState:
        return InsideState()

    def attach(self, state: InsideState, cache: KVCache) -> None:
        """Give a state the target's own cache, once, after `open`.

        Drafts may write after its committed entries, where the verifying pass writes too. To
        commit, and to select rows, is the loop's work.
        """
        state.shared = cache

    def select(self, state: InsideState, rows: Tensor) -> None:
        """The loop selects the rows of the target's cache."""

    def propose(
        self,
        state: InsideState,
        committed: Committed,
        tree: Growth,
        policy: Policy,
        u: Tensor | None,
        sampling: Sampling = Sampling.WOR,
    ) -> Proposal:
        cache = _cache_of(state)
        before = cache.lengths
        state.depths, state.stream = [], []
        try:
            proposal = super().propose(state, committed, tree, policy, u, sampling)
        finally:
            cache.set_lengths(before)
        if not self.common or proposal.read is None:
            return proposal
        anchor = proposal.read.new_zeros(len(proposal.read), 1)
        places = torch.cat((anchor, torch.where(proposal.read < 0, -1, proposal.read + 1)), 1)
        done = PartialPass(len(self.common) - 1, torch.cat(state.stream, 1), places)
        return replace(proposal, partial_pass=done)

    def read_anchor(self, state: InsideState, committed: Committed) -> Tensor:
        """(b 1 d) the residual stream at each row's last committed token."""
        rows = torch.arange(len(committed.tokens), device=committed.tokens.device)
        return self._read(state, committed.tokens[rows, committed.counts - 1][:, None], None, None)

    def read_drafts(
        self, state: InsideState, tokens: Tensor, depth: int, tree_mask: Tensor
    ) -> Tensor:
        """(b m) drafted nodes of one depth -> (b m d) the residual stream there; arguments as in
        `Expands.expand`."""
        state.depths += [depth - 1] * tokens.shape[1]
        depths = torch.tensor([state.depths], device=tokens.device)
        return self._read(state, tokens, tree_mask, depths)

    def _read(
        self, state: InsideState, tokens: Tensor, tree_mask: Tensor | None, depths: Tensor | None
    ) -> Tensor:
        stack, cache = self.target.stack, _cache_of(state)
        hidden = stack.embed(tokens)
        inputs = stack.inputs(hidden, cache, tree_mask, depths)
        hidden = stack.run(hidden, inputs, self.common)
        state.stream.append(hidden)
        hidden = stack.run(hidden, inputs, self.rest)
        cache.advance(tokens.shape[1])
        return hidden


def _cache_of(state: InsideState) -> KVCache:
    if state.shared is None:
        raise ValueError(
            "a drafter that is a part of the target drafts on its cache: attach(state, cache) "
            "after open"
        )
    return state.shared
