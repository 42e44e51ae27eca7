"""Speaking through the target's own frozen head, or through the rows of it that a reduced draft
vocabulary keeps."""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from drafttrain.drafter.base import Growing
from drafttrain.nn.packed import FrozenProduct
from drafttrain.target.model import Target


class BorrowsHead(Growing, abc.ABC):
    """Knows the target's head and the draft vocabulary. Rows of the head are borrowed: never
    trained, never saved.

    Args:
        draft_ids: (w) ascending ids that can be proposed; None is the whole vocabulary.
    """

    draft_ids: Tensor | None
    head_rows: Tensor | None

    def __init__(self, target: Target, draft_ids: Tensor | list[int] | None = None) -> None:
        super().__init__(target)
        ids = None if draft_ids is None else torch.as_tensor(draft_ids, dtype=torch.int64)
        self.register_buffer("draft_ids", ids)
        self.register_buffer("head_rows", None, persistent=False)
        self._product: FrozenProduct | None = None

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.parameters())

    def rows_of_head(self) -> Tensor:
        """(w d) the target's head, the rows that can be proposed."""
        weight = self.target.output.weight
        return (
            weight if self.draft_ids is None else weight[self.draft_ids.to(weight.device)]
        ).detach()

    def head(self, hidden: Tensor) -> Tensor:
        """(... d) -> (... w): the rows of the target's frozen head that can be proposed, in this
        drafter's dtype."""
        # Kept between calls, so also for training where the first call is made while decoding.
        with torch.inference_mode(False):
            if (
                self.head_rows is None
                or self.head_rows.dtype != self.dtype
                or self.head_rows.device != hidden.device
            ):
                self.head_rows = self.rows_of_head().to(device=hidden.device, dtype=self.dtype)
            if self._product is None or self._product.weight is not self.head_rows:
                self._product = FrozenProduct(self.head_rows)
        return self.target.finish_logits(
            self._product(hidden.to(self.dtype), self.head_bias(hidden))
        )

    def head_bias(self, hidden: Tensor) -> Tensor | None:
        """(w) the bias of the target's head, where it has one."""
        bias: Tensor | None = getattr(self.target.output, "bias", None)
        if bias is None:
            return None
        return (bias if self.draft_ids is None else bias[self.draft_ids]).detach().to(hidden)

    def to_target_ids(self, ids: Tensor) -> Tensor:
        return ids if self.draft_ids is None else self.draft_ids[ids]

    def to_draft_ids(self, ids: Tensor) -> Tensor:
        """Places of target ids in the draft vocabulary, -1 for those outside of it."""
        if self.draft_ids is None:
            return ids
        place = torch.searchsorted(self.draft_ids, ids).clamp_max(len(self.draft_ids) - 1)
        return torch.where(self.draft_ids[place] == ids, place, -1)

    def to_target_probs(self, probs: Tensor) -> Tensor:
        if self.draft_ids is None:
            return probs
        law = probs.new_zeros(*probs.shape[:-1], self.target.vocab_size)
        law[..., self.draft_ids] = probs
        return law


def sizes_of_inputs(target: Target) -> tuple[float, float]:
    """Root mean squares of the target's features, as far as its final norm tells, and of its
    embedding: they often differ widely. Neither is below 1e-3."""
    norm = getattr(target.base, "norm", None)
    feature, embedding = (
        1.0 if weight is None else float(weight.detach().float().pow(2).mean().sqrt())
        for weight in (getattr(norm, "weight", None), target.embedding.weight)
    )
    return max(feature, 1e-3), max(embedding, 1e-3)
