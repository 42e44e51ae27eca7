"""What the benchmarks share: medians inside one run, and ratios of them, never a figure from
another run; and wrong input as one line."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from drafttrain.errors import InputError, one_line, refused_by_system
from drafttrain.runs import hidden
from drafttrain.target.model import Target


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


def count(text: str) -> int:
    """A number of things, as an argument of a script."""
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text[:40]}: needs an integer of at least 1")
    return int(text)


def refuse_long(target: Target, tokens: int) -> None:
    """Raise InputError if the target's context does not hold this many tokens."""
    if tokens > target.context:
        raise InputError(f"{tokens} tokens: the context of {target.name} holds {target.context}")


def reported(main: Callable[[], None]) -> None:
    """Run a script. Wrong input, and what the system refuses, end it as they end a door: one line,
    exit code 2."""
    try:
        main()
    except Exception as error:
        said = str(error) if isinstance(error, InputError) else refused_by_system(error)
        if not said:
            raise
        print(f"{Path(sys.argv[0]).name}: {one_line(hidden(said))}", file=sys.stderr)
        raise SystemExit(2) from None
