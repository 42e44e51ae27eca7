"""Bootstrap intervals over prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 1000
Interval = tuple[float, float]


def resampled(prompts: int) -> np.ndarray:
    """(resamples prompts) indices, the same at every call."""
    return np.random.default_rng(0).integers(0, prompts, (RESAMPLES, prompts))


def bootstrap(above: Sequence[float], below: Sequence[float]) -> Interval | None:
    """95 % interval of sum(above) / sum(below) over resampled prompts. Those with nothing below are
    left out; None where fewer than two remain."""
    counted = np.asarray(below, dtype=float) > 0
    if counted.sum() < 2:
        return None
    columns = np.asarray([above, below], dtype=float)[:, counted]  # 2 prompts
    sums = columns[:, resampled(columns.shape[1])].sum(-1)
    return middle(sums[0] / sums[1])


def middle(values: np.ndarray) -> Interval:
    """The middle 95 % of values."""
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
