"""Run what a foreign file asks for within bounds: of time, and of memory where the system has such
a limit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

try:
    import resource
except ImportError:  # Not on Windows; there, memory is not bounded.
    resource = None  # type: ignore[assignment]


@contextlib.contextmanager
def within(seconds: float, memory: int) -> Iterator[None]:
    """Stop what takes longer, or asks for more memory, with an error of its own.

    Time is watched in the main thread, where no other timer runs; memory on Linux, as long as no
    accelerator is in use, since its driver would be refused too.

    Args:
        memory: bytes beyond what the process has already.
    Raises: TimeoutError, MemoryError.
    """
    # The clock is stopped before the limit is put back, so that it cannot ring in between.
    with _memory(memory), _time(seconds):
        yield


@contextlib.contextmanager
def _time(seconds: float) -> Iterator[None]:
    free = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if not free or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def ring(_number: int, _frame: Any) -> None:
        raise TimeoutError(f"it takes longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _memory(size: int) -> Iterator[None]:
    taken = _taken()
    if taken is None or torch.cuda.is_initialized():
        yield
        return
    limit, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = taken + size
    if limit != resource.RLIM_INFINITY and limit <= wanted:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _taken() -> int | None:
    """Bytes of address space that the process has; None where that is not known."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
