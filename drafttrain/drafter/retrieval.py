"""Drafters that copy their drafts from text."""

from __future__ import annotations

import abc
import contextlib
from typing import Any, Protocol

import torch
from torch import Tensor

from drafttrain.drafter.base import Committed, Drafter
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Loss, Needs, Proposal, Sampling
from drafttrain.nn.sampling import Policy
from drafttrain.target.model import Target
from drafttrain.tree.copied import Continuations, copied, proposal_of
from drafttrain.tree.topology import Growth


class RowText(Continuations, Protocol):
    """What a drafter that copies remembers of one row: its committed ids, the anchor last, so that
    what followed is found."""

    def append(self, token: int) -> None:
        """Take in the next committed token."""
        ...

    def root(self) -> Any:
        """The place after the anchor, whose continuations are drafted; None where nothing like the
        text's end is known."""
        ...


class Retrieval(Drafter):
    """Drafts copied from text: tokens, no probabilities. Learns nothing and reads nothing of the
    target.

    It works on the host, every row by its own text. How continuations fill a tree:
    `drafttrain.tree.copied`.
    """

    needs = Needs()
    learns = False
    can_draw = False

    @abc.abstractmethod
    def memory(self) -> RowText:
        """Of a new row."""

    def reading(self) -> contextlib.AbstractContextManager[Any]:
        """Held while rows' texts go on and are read, for memories that several threads share."""
        return contextlib.nullcontext()

    def open(self, rows: int, capacity: int) -> list[RowText]:
        return [self.memory() for _ in range(rows)]

    def select(self, state: list[RowText], rows: Tensor) -> None:
        state[:] = [state[row] for row in rows.tolist()]

    def propose(
        self,
        state: list[RowText],
        committed: Committed,
        tree: Growth,
        policy: Policy,
        u: Tensor | None,
        sampling: Sampling = Sampling.ONE_HOT,
    ) -> Proposal:
        """Remember what became true, then copy what followed earlier. Rows may have fewer nodes
        than the tree, or none."""
        counts = committed.counts.to(committed.tokens.device)
        if committed.first is not None:
            counts, new = counts + 1, torch.cat((committed.first[:, None], committed.tokens), 1)
        else:
            new = committed.tokens
        rows = []
        with self.reading():
            for text, (count, *ids) in zip(
                state, torch.cat((counts[:, None], new), 1).tolist(), strict=True
            ):
                for token in ids[:count]:
                    text.append(token)
                rows.append(copied(text, text.root(), tree))
        return proposal_of(rows, new.device)

    def loss(
        self, batch: Batch, features: Features, *, generator: torch.Generator | None = None
    ) -> Loss:
        raise InputError(
            f"{type(self).__name__} has no weights: there is nothing to train, python -m "
            "drafttrain.fit measures it"
        )

    def at(self, dtype: torch.dtype, target: Target | None = None) -> Drafter:
        """Itself, unless for another target: it has no weights to convert."""
        if target is None or target is self.target:
            return self.eval()
        return super().at(dtype, target)

    def describe(self) -> dict[str, Any]:
        return {"learns": "nothing, it copies its drafts from the text", **self.settings()}
