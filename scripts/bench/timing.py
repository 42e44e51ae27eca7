"""Timing shared by the benchmarks: medians inside one run, and ratios of them; never a figure from
another run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def interleaved(
    jobs: dict[str, Callable[[], object]], *, rounds: int, warmup: int = 2
) -> dict[str, float]:
    """Median seconds of every job; each round runs all of them, so that a slow moment of the
    machine affects all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(warmup + rounds):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}
