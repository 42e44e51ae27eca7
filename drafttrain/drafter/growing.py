"""Drafters that trees are grown with, level by level, by how the tokens of a draft depend on each
other.

| base             | one pass of the drafter gives                | a token depends on             |
|------------------|----------------------------------------------|--------------------------------|
| `Autoregressive` | the candidates after given nodes             | all drafts on its path         |
| `Recurrent`      | the same, reading its own output before      | all drafts on its path         |
| `Parallel`       | a row for every place of a block             | nothing drafted                |
| `Sequential`     | a row for every place; a cheap step corrects | its parent, what steps carry   |

Trees, temperatures, batches and rules are the same for all: growth asks for candidates.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafter.base import Committed, Drafter
from drafttrain.flow import Features, Proposal, Sampling
from drafttrain.nn.cache import KVCache
from drafttrain.nn.sampling import Policy
from drafttrain.tree.candidates import Candidates
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.growth import grow
from drafttrain.tree.topology import Growth, Tree


class Growing(Drafter):
    """Reads what became true, then gives candidates for the children of nodes that were drafted."""

    growths = (Tree, Dynamic, Confident)

    @abc.abstractmethod
    def extend(self, state: Any, committed: Committed, depth: int) -> tuple[Tensor, Candidates]:
        """Read what became true.

        Args:
            depth: of the deepest node that will be drafted.
        Returns: (b 1 e) the output at the anchor, which its children are read with, and the
            candidates for them.
        """

    @abc.abstractmethod
    def expand(
        self, state: Any, tokens: Tensor, hidden: Tensor, depth: int, tree_mask: Tensor
    ) -> tuple[Tensor, Candidates]:
        """Read drafted nodes of one depth: see `drafttrain.tree.candidates.Expands`."""

    def scratch(self, state: Any) -> contextlib.AbstractContextManager[None]:
        """While a tree is grown: what `expand` writes into the state is taken back after it."""
        return contextlib.nullcontext()

    def propose(
        self,
        state: Any,
        committed: Committed,
        tree: Growth,
        policy: Policy,
        u: Tensor | None,
        sampling: Sampling = Sampling.WOR,
    ) -> Proposal:
        hidden, candidates = self.extend(state, committed, tree.max_depth)
        with self.scratch(state):
            return grow(self, state, hidden, candidates, tree, policy, u, sampling, committed.text)


@dataclass
class AutoregressiveState:
    """What a drafter with a cache of its own remembers of what is committed; while a tree is grown,
    its drafts too."""

    cache: KVCache


class Autoregressive(Growing):
    """One call gives the candidates after given nodes, growing a draft cache."""

    def open(self, rows: int, capacity: int) -> AutoregressiveState:
        return AutoregressiveState(KVCache(rows, capacity, self.target.device))

    def select(self, state: AutoregressiveState, rows: Tensor) -> None:
        state.cache.select(rows)

    @contextlib.contextmanager
    def scratch(self, state: AutoregressiveState) -> Iterator[None]:
        """Only entries made from the target's own features stay."""
        true_rows = state.cache.lengths
        yield
        state.cache.set_lengths(true_rows)


class Recurrent(Autoregressive):
    """One step after the other: the first reads the target's features, each later one its own
    output before, next to the token that was drafted."""

    @abc.abstractmethod
    def begin(self, features: Features) -> Tensor:
        """(b s d) what the first step reads."""

    @abc.abstractmethod
    def run(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        """One step.

        Args:
            hidden: (b s d); tokens: (b s) the ones after them; positions: (b s) rotary.
            mask: (b 1 s t) bool.
        Returns: (b s d) what the head reads, (b s d) what the next step reads.
        """

    @abc.abstractmethod
    def after(self, out: Tensor) -> Candidates:
        """(b s d) what the head reads -> the candidates after these nodes."""

    def extend(
        self, state: AutoregressiveState, committed: Committed, depth: int
    ) -> tuple[Tensor, Candidates]:
        cache, s = state.cache, committed.tokens.shape[1]
        device = committed.tokens.device
        tree_mask = torch.ones(1, s, s, dtype=torch.bool, device=device).tril()
        positions = cache.lengths[:, None] + torch.arange(s, device=device)
        hidden = self.begin(committed.features)
        out, fed = self.run(hidden, committed.tokens, positions, cache.mask(tree_mask), cache)
        cache.commit(committed.counts)
        last = torch.arange(len(out), device=device), committed.counts - 1
        return fed[last][:, None], self.after(out[last][:, None])

    def expand(
        self,
        state: AutoregressiveState,
        tokens: Tensor,
        hidden: Tensor,
        depth: int,
        tree_mask: Tensor,
    ) -> tuple[Tensor, Candidates]:
        cache, m = state.cache, tokens.shape[1]
        true_rows = cache.lengths - (tree_mask.shape[-1] - m)
        positions = (true_rows + depth - 1)[:, None].expand(-1, m)
        out, fed = self.run(hidden, tokens, positions, cache.mask(tree_mask), cache)
        cache.advance(m)
        return fed, self.after(out)


@dataclass
class BlockState:
    """What a block drafter remembers. One with a cache adds it, and selects its rows."""

    rows: Tensor | None = None
    """(b k d) of the places of this round's block; read while its tree is grown."""


class Block(Growing):
    """One pass gives a row for every place of a block, whatever tokens will be drafted there."""

    @abc.abstractmethod
    def rows(self, state: Any, committed: Committed, depth: int) -> Tensor:
        """Read what became true. Returns (b k d), a row for each place to come, k at least
        `depth`."""

    @abc.abstractmethod
    def step(
        self, place: int, row: Tensor, tokens: Tensor, carried: Tensor | None
    ) -> tuple[Tensor, Candidates]:
        """Candidates for one place of the block.

        Args:
            place: 1 for the anchor's children.
            row: (b d) of this place.
            tokens: (b m) int64 the parents: drafted nodes of the place before; m = 1, the anchor,
                for place 1.
            carried: (b m e) what the step before returned for each of these parents' own parent;
                None at place 1.
        Returns: (b m e) what the steps of their children get, and the candidates (b m w).
        """

    def open(self, rows: int, capacity: int) -> Any:
        return BlockState()

    def select(self, state: Any, rows: Tensor) -> None:
        """Rows live for one round only."""

    def extend(self, state: Any, committed: Committed, depth: int) -> tuple[Tensor, Candidates]:
        state.rows = self.rows(state, committed, depth)
        return self.step(1, state.rows[:, 0], anchor_of(committed), None)

    def expand(
        self, state: Any, tokens: Tensor, hidden: Tensor, depth: int, tree_mask: Tensor
    ) -> tuple[Tensor, Candidates]:
        return self.step(depth + 1, state.rows[:, depth], tokens, hidden)


class Parallel(Block):
    """The places of a block know nothing of each other's tokens: all nodes of a depth have the same
    candidates."""

    @abc.abstractmethod
    def place(self, row: Tensor, place: int) -> Candidates:
        """(b d) the row of place 1, 2, .. -> candidates of one node, (b 1 w)."""

    def step(
        self, place: int, row: Tensor, tokens: Tensor, carried: Tensor | None
    ) -> tuple[Tensor, Candidates]:
        b, m = tokens.shape
        found = self.place(row, place)
        ids = found.ids
        if ids is not None and ids.dim() == 3:
            ids = ids.expand(-1, m, -1)
        same = Candidates(found.logits.expand(-1, m, -1), found.vocab_size, ids)
        return row.new_empty(b, m, 0), same


class Sequential(Block):
    """A cheap step corrects a place's row by the token before it, and by what the steps on the path
    carry along (a recurrent state, the inputs of heads). It defines `rows` and `step`."""


def last_of(committed: Committed) -> Tensor:
    """(b d) features of each row's last position that the target has read."""
    hidden = committed.features.last_hidden
    assert hidden is not None
    rows = torch.arange(len(hidden), device=hidden.device)
    return hidden[rows, committed.counts.to(hidden.device) - 1]


def anchor_of(committed: Committed) -> Tensor:
    """(b 1) int64 the last committed token of each row."""
    last = committed.counts.to(committed.tokens.device)[:, None] - 1
    return committed.tokens.gather(1, last)
