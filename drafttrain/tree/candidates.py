"""Tokens that may follow the nodes of a tree, with the drafter's scores: what every growth asks
for, level by level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from drafttrain.later import torch
from drafttrain.nn.processing import Text
from drafttrain.nn.sampling import Policy

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """The children that m nodes of every row may get.

    A drafter proposes from the whole vocabulary of the target, from a part of it that is the same
    for all nodes (a draft vocabulary), or from a few tokens chosen for each node (a selector).
    """

    logits: Tensor
    """(b m w)"""
    vocab_size: int
    """v, of the target."""
    ids: Tensor | None = None
    """(w) or (b m w) int64 ids of the target, each once in a node; None: a place is an id."""

    def at(self, nodes: Sequence[int]) -> Candidates:
        """Those of some of the m nodes, in the order given."""
        chosen = list(nodes)
        own = self.ids is not None and self.ids.dim() == 3
        ids = self.ids[:, chosen] if own and self.ids is not None else self.ids
        return Candidates(self.logits[:, chosen], self.vocab_size, ids)

    def to_ids(self, places: Tensor) -> Tensor:
        """(b m k) int64 places among the w candidates -> (b m k) ids of the target."""
        if self.ids is None:
            return places
        return self.ids[places] if self.ids.dim() == 1 else self.ids.gather(2, places)

    def spread(self, values: Tensor, missing: float = 0.0) -> Tensor:
        """(b m w) one value for each candidate -> (b m v), `missing` for tokens that are none."""
        if self.ids is None:
            return values
        wide = values.new_full((*values.shape[:-1], self.vocab_size), missing)
        if self.ids.dim() == 1:
            wide[..., self.ids] = values
            return wide
        return wide.scatter_(-1, self.ids, values)

    def processed(self, policy: Policy, text: Text, drafted: Tensor) -> Candidates:
        """With logits as the policy processes them: candidates from the target's whole vocabulary,
        since a processor may raise a token that the drafter does not know.

        Args:
            drafted: (b m k) int64 drafts on the path to each node, -1 past a path's end.
        """
        wide = self.spread(self.logits.float(), -math.inf)
        return Candidates(policy.processed(wide, text, drafted)[0], self.vocab_size)


class Expands(Protocol):
    """What growth asks of a drafter."""

    def expand(
        self, state: Any, tokens: Tensor, hidden: Tensor, depth: int, tree_mask: Tensor
    ) -> tuple[Tensor, Candidates]:
        """Read m drafted nodes of one depth.

        Args:
            tokens: (b m) int64 target ids of the nodes.
            hidden: (b m e) what the drafter returned for each node's parent.
            depth: 1 for the anchor's children.
            tree_mask: (b|1 m t) bool, which of the nodes read so far this round, these included,
                each node sees.
        Returns: (b m e) one output a node, which its children are read with, and the candidates
            for its children.
        """
        ...


def paths_to(tokens: Tensor, tree_mask: Tensor, depths: Tensor, deepest: int) -> Tensor:
    """The drafts on the path to every node, itself included.

    Args:
        tokens, depths: (b n) of the nodes.
        tree_mask: (b n+1 n+1) which node sees which, as `ancestor_mask`.
    Returns: (b n+1 deepest) int64, row 0 the anchor's; -1 past a path's end.
    """
    b, n = tokens.shape
    # Place 0, the anchor's, takes what is not on the path.
    place = torch.where(tree_mask[:, :, 1:], depths[:, None], 0)  # b n+1 n
    found = tokens.new_full((b, n + 1, deepest + 1), -1)
    return found.scatter(2, place, tokens[:, None].expand(-1, n + 1, -1))[:, :, 1:]
