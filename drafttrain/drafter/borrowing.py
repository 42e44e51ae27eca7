"""A draft vocabulary, and proposing through the target's own frozen head."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drafttrain.checks import check_ids
from drafttrain.drafter.growing import Growing
from drafttrain.nn.packed import FrozenProduct
from drafttrain.target.model import Target
from drafttrain.tree.candidates import Candidates

SLACK = 1 << 24
"""Weights beyond a package's that may be made before its tensors are compared by name, which says
more."""


class DraftVocabulary(Growing, abc.ABC):
    """Proposes from the target's vocabulary or from a part of it, the same for all nodes.

    Its `Config` has a field `draft_ids`: ascending ids that can be proposed; None is the target's
    whole vocabulary.
    """

    draft_ids: Tensor | None

    def __init__(self, target: Target, **settings: Any) -> None:
        super().__init__(target, **settings)
        given = self.config.draft_ids
        check_ids(given, target.vocab_size)
        ids = None if given is None else torch.as_tensor(given, dtype=torch.int64)
        self.register_buffer("draft_ids", ids)

    @property
    def dtype(self) -> torch.dtype:
        return super().dtype or self.target.dtype

    @property
    def choices(self) -> int:
        return self.target.vocab_size if self.draft_ids is None else len(self.draft_ids)

    def candidates(self, logits: Tensor) -> Candidates:
        """(b m w) logits over the draft vocabulary, as growth reads them."""
        return Candidates(logits, self.target.vocab_size, self.draft_ids)

    def to_target_ids(self, ids: Tensor) -> Tensor:
        """(...) int64 places in the draft vocabulary -> (...) ids of the target."""
        return ids if self.draft_ids is None else self.draft_ids[ids]

    def to_draft_ids(self, ids: Tensor) -> Tensor:
        """(...) ids of the target -> their places in the draft vocabulary, -1 for those outside."""
        if self.draft_ids is None:
            return ids
        place = torch.searchsorted(self.draft_ids, ids).clamp_max(len(self.draft_ids) - 1)
        return torch.where(self.draft_ids[place] == ids, place, -1)

    def rows_of_head(self) -> Tensor:
        """(w d) the rows of the target's head that can be proposed."""
        weight = self.target.output.weight
        return (
            weight if self.draft_ids is None else weight[self.draft_ids.to(weight.device)]
        ).detach()

    def head_bias(self, hidden: Tensor) -> Tensor | None:
        """(w) the bias of the target's head, where it has one. A token that -inf rules out has a
        probability of 0 with any low number, and in a loss 0 times -inf would be NaN."""
        bias: Tensor | None = getattr(self.target.output, "bias", None)
        if bias is None:
            return None
        rows = bias if self.draft_ids is None else bias[self.draft_ids]
        least = torch.finfo(hidden.dtype).min / 4
        return rows.detach().to(hidden).masked_fill(rows.to(hidden.device) == -torch.inf, least)


class BorrowsHead(DraftVocabulary, abc.ABC):
    """Proposes through the target's head: its rows are borrowed, never trained, never saved."""

    head_rows: Tensor | None

    def __init__(self, target: Target, **settings: Any) -> None:
        super().__init__(target, **settings)
        self.register_buffer("head_rows", None, persistent=False)
        self._product: FrozenProduct | None = None

    def head(self, hidden: Tensor) -> Tensor:
        """(... d) -> (... w): the rows of the target's frozen head that can be proposed, in this
        drafter's dtype."""
        dtype = self.dtype
        # Kept between calls, so also for training where the first call is made while decoding.
        with torch.inference_mode(False):
            rows = self.head_rows
            if rows is None or rows.dtype != dtype or rows.device != hidden.device:
                rows = self.head_rows = self.rows_of_head().to(device=hidden.device, dtype=dtype)
            if self._product is None or self._product.weight is not rows:
                self._product = FrozenProduct(rows)
        return self.target.finish_logits(self._product(hidden.to(dtype), self.head_bias(hidden)))


def best_ids(
    drafter: DraftVocabulary, hidden: Tensor, head: Callable[[Tensor], Tensor], chunk: int
) -> Tensor:
    """(t d) what a head reads -> (t) int64 ids of the target that it finds most likely, the logits
    of `chunk` positions at a time."""
    parts = [head(part).argmax(-1) for part in hidden.split(chunk)]
    if not parts:
        return torch.empty(0, dtype=torch.int64, device=hidden.device)
    return drafter.to_target_ids(torch.cat(parts))


def sizes_of_inputs(target: Target) -> tuple[float, float]:
    """Root mean squares of the target's features, as far as its final norm says, and of its
    embedding: they often differ widely. Neither is below 1e-3."""
    norm = getattr(target.base, "norm", None)
    feature, embedding = (
        1.0 if weight is None else float(weight.detach().float().pow(2).mean().sqrt())
        for weight in (getattr(norm, "weight", None), target.embedding.weight)
    )
    return max(feature, 1e-3), max(embedding, 1e-3)
