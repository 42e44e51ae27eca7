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
    """95 % interval of sum(above) / sum(below) over resampled prompts; None for one prompt."""
    if not sum(below) or len(below) < 2:
        return None
    index = resampled(len(below))
    denominators = np.asarray(below, dtype=float)[index].sum(1)
    good = denominators > 0
    return middle(np.asarray(above, dtype=float)[index].sum(1)[good] / denominators[good])


def middle(values: np.ndarray) -> Interval:
    """The middle 95 % of values."""
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
