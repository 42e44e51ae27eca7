"""What every growth asks of an autoregressive drafter."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Speaker(Protocol):
    """What growth asks of a drafter."""

    def expand(
        self, state: Any, tokens: Tensor, hidden: Tensor, depth: int, tree_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Read m drafted nodes of one depth.

        Args:
            tokens: (b m) int64 target ids of the nodes.
            hidden: (b m d) the drafter's output at each node's parent.
            depth: 1 for the anchor's children.
            among: (b|1 m t) bool, which of the nodes read so far this round, these included, each
                node sees.
        Returns: (b m d) outputs, (b m w) logits of each node's children.
        """
        ...

    def to_target_ids(self, ids: Tensor) -> Tensor: ...

    def to_target_probs(self, probs: Tensor) -> Tensor:
        """(... w) -> (... v), zero outside the draft vocabulary."""
        ...
