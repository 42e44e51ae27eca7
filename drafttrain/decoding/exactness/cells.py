"""Cells for the first few tokens after a prompt, of at least a known probability under the target's
own distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.decoding.exactness.logits import last_logits
from drafttrain.nn.sampling import Policy
from drafttrain.target.model import Target

TOKENS = 3
"""Length of the sequences that are tested. The first token is the prefill's, before any
draft."""
LEAST_CELL = 1 / 8
"""Of the probability of the first token, the share that a cell holds at least."""
LEAST_EXPECTED = 10


@dataclass(frozen=True)
class Cells:
    """A partition of the sequences of a few tokens after a prompt, with the target's own
    probability of each part.

    The first token is the prefill's, so only what follows the most likely one is divided further:
    all other first tokens are one cell. From there on a likely token leads to the sequences after
    it; the others are put together, the most likely first.
    """

    tables: dict[tuple[int, ...], Tensor]
    """{tokens so far: (v) int64 cell of every token, -1 where the next token decides}."""
    outside: dict[tuple[int, ...], Tensor]
    """{tokens so far: (v) bool, tokens that the target never draws there}. They are counted in a
    cell of small ones."""
    probs: Tensor
    """(cells) float64, adds up to 1."""

    @classmethod
    def of(
        cls,
        target: Target,
        prompt: Sequence[int],
        policy: Policy,
        draws: int,
        *,
        tokens: int = TOKENS,
    ) -> Cells:
        """Every cell but the first expects LEAST_EXPECTED of these draws, or more, and holds at
        least LEAST_CELL of what the most likely first token does."""
        least = 1.0
        tables: dict[tuple[int, ...], Tensor] = {}
        outside: dict[tuple[int, ...], Tensor] = {}
        # Cell 0: other first tokens, and what is too little for a cell of its own.
        masses, small = [0.0], 0
        level: dict[tuple[int, ...], float] = {(): 1.0}
        for depth in range(tokens):
            deeper: dict[tuple[int, ...], float] = {}
            if not level:
                break
            logits = last_logits(target, [[*prompt, *prefix] for prefix in level])
            after = policy.probs(logits).double().cpu()
            for (prefix, mass), probs in zip(level.items(), after, strict=True):
                falling, order = (mass * probs / probs.sum()).sort(descending=True)
                if not depth:
                    least = max(LEAST_CELL * float(falling[0]), LEAST_EXPECTED / draws)
                named = int((falling >= least).sum()) if depth else 1
                table = torch.full_like(order, small)
                for token, own in zip(
                    order[:named].tolist(), falling[:named].tolist(), strict=True
                ):
                    if depth + 1 < tokens:
                        table[token] = -1
                        deeper[prefix + (token,)] = own
                    else:
                        table[token] = len(masses)
                        masses.append(own)
                rest = falling[named:]
                left = float(rest.sum())
                if not depth or left < least:
                    masses[small] += left
                else:
                    # Every token is below `least`, so runs of at least twice as much never fall
                    # below it.
                    groups = max(1, int(left / (2 * least)))
                    group = ((rest.cumsum(0) - rest) / (left / groups)).long().clamp(0, groups - 1)
                    table[order[named:]] = group + len(masses)
                    masses += (
                        torch.zeros(groups, dtype=rest.dtype).index_add(0, group, rest).tolist()
                    )
                tables[prefix], outside[prefix] = table, probs <= 0
            level = deeper
        return cls(tables, outside, torch.tensor(masses, dtype=torch.float64))._without_dust(draws)

    def _without_dust(self, draws: int) -> Cells:
        """Cell 0 joins the smallest other one if it expects too little for the chi-square
        distribution to hold."""
        if len(self.probs) == 1 or float(self.probs[0]) * draws >= LEAST_EXPECTED / 2:
            return self
        goal = 1 + int(self.probs[1:].argmin())
        probs = self.probs[1:].clone()
        probs[goal - 1] += self.probs[0]
        tables = {
            prefix: torch.where(table > 0, table - 1, torch.where(table == 0, goal - 1, -1))
            for prefix, table in self.tables.items()
        }
        return Cells(tables, self.outside, probs)

    def place(self, ids: Sequence[int]) -> tuple[int, bool]:
        """The cell of a sequence, and whether the target never draws it, as far as it was looked
        at."""
        for depth, token in enumerate(ids):
            prefix = tuple(ids[:depth])
            cell = int(self.tables[prefix][token])
            if cell >= 0:
                return cell, bool(self.outside[prefix][token])
        raise ValueError(f"a sequence of {len(ids)} tokens is too short for these cells")
