"""A reduced draft vocabulary: the ids a drafter can propose, which cuts the cost of its head."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from torch import Tensor

from drafttrain.data.datamodule import ConversationData
from drafttrain.errors import InputError
from drafttrain.target.model import Target


def most_frequent(counts: Tensor, size: int, always: Iterable[int]) -> Tensor:
    """The ids seen most often under the loss mask, stop and control tokens always among them.

    Args:
        counts: (v) how often each id is a supervised label.
        size: ids to keep; if the text shows fewer, the lowest unused ids fill up.
        always: ids that are in whatever their count.
    Returns: (size) int64, ascending.
    Raises: InputError if size is below what must be in, below 2, or above v.
    """
    v = len(counts)
    forced = sorted({i for i in always if 0 <= i < v})
    if not max(2, len(forced)) <= size <= v:
        raise InputError(
            f"draft_vocab is {size}: give {max(2, len(forced))} (stop and control tokens are "
            f"always in) to {v} (the target's vocabulary), or 0 for the whole vocabulary"
        )
    score = counts.double().clone()
    score[forced] = float("inf")
    # A stable sort leaves the lowest ids first among equals.
    return score.sort(descending=True, stable=True).indices[:size].sort().values


def coverage(counts: Tensor, ids: Tensor) -> float:
    """Share of supervised labels that are in the draft vocabulary; the rest can never be
    accepted."""
    total = float(counts.sum())
    return float(counts[ids].sum()) / total if total else 0.0


def always_proposable(target: Target, data: ConversationData) -> set[int]:
    """Stop tokens, and special tokens of the tokenizer that occur in the set."""
    specials = set(getattr(target.tokenizer, "all_special_ids", ()) or ())
    specials |= set(getattr(target.tokenizer, "added_tokens_decoder", {}) or {})
    return set(target.stop_ids) | (specials & set(np.unique(data.set.ids).tolist()))
