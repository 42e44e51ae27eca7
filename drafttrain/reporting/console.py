"""What people see while a command runs: rate, time left and the last numbers; plain lines where
there is no terminal."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from drafttrain.errors import one_line
from drafttrain.processes import rank

T = TypeVar("T")
_PLAIN_WIDTH = 240
_WINDOW_SECONDS = 30.0


def console(*, stderr: bool = False) -> Console:
    """Rich's console; without a terminal it is wide and plain, so that tables in a log file are
    complete."""
    found = Console(stderr=stderr)
    return found if found.is_terminal else Console(stderr=stderr, width=_PLAIN_WIDTH, no_color=True)


def clock(seconds: float | None) -> str:
    """Seconds as 42s, 3:21 or 1:02:03."""
    if seconds is None or not 0 <= seconds < 1e7:
        return "?"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded}s"
    hours, minutes, rest = rounded // 3600, rounded // 60 % 60, rounded % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Rate:
    """Counts per second over the last half minute, and over everything for the time left."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = now()
        self._marks: deque[tuple[float, float]] = deque([(self._began, 0.0)])
        self.count = 0.0

    def add(self, amount: float) -> None:
        self.count += amount
        moment = self._now()
        self._marks.append((moment, self.count))
        while len(self._marks) > 2 and self._marks[1][0] < moment - _WINDOW_SECONDS:
            self._marks.popleft()

    @property
    def recent(self) -> float | None:
        (first, before), (last, after) = self._marks[0], self._marks[-1]
        return (after - before) / (last - first) if last > first else None

    def left(self, remaining: float) -> float | None:
        """Seconds for the rest, at the pace of everything so far (pauses for evaluation
        included)."""
        elapsed = self._now() - self._began
        return remaining * elapsed / self.count if self.count > 0 else None


def amount(value: float | None) -> str:
    """A rate or count with about three digits."""
    if value is None:
        return "?"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def track(
    iterable: Iterable[T],
    *,
    description: str = "",
    unit: str = "it",
    size: Callable[[T], float] = lambda _: 1,
    total: float | None = None,
    interval: float = 10.0,
    after: float = 0.0,
    out: Console | None = None,
) -> Iterator[T]:
    """Yield the items of `iterable` and show count, rate and time left, on rank 0 only, on stderr.

    A live line in a terminal; else a line every `interval` seconds and one at the end.

    Args:
        unit: what is counted.
        size: how many of them an item is.
        total: of all items; by itself the number of items, where that is known.
        after: seconds before anything is shown; what ends sooner shows nothing.
    """
    if rank() != 0:
        yield from iterable
        return
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    shown = _Tracked(description, unit, total, interval, after, out or console(stderr=True))
    try:
        for item in iterable:
            yield item
            shown.add(size(item))
    finally:
        shown.stop()


def reading(rows: Iterable[T]) -> Iterator[T]:
    """Rows of prompts as they are read or looked at; shown where that takes more than a second."""
    return track(rows, description="reads prompts", unit="rows", after=1.0)


class _Tracked:
    """What `track` shows: a live line in a terminal, else plain ones."""

    def __init__(
        self,
        description: str,
        unit: str,
        total: float | None,
        interval: float,
        after: float,
        out: Console,
    ) -> None:
        self._description, self._unit, self._total = description, unit, total
        self._interval, self._after, self._out = interval, after, out
        self._rate = Rate()
        self._began = time.monotonic()
        self._said = self._began + (after - interval if after else 0.0)
        self._live: Progress | None = None
        if not after:
            self._start()

    def _start(self) -> None:
        if self._out.is_terminal and self._live is None:
            bar = BarColumn(bar_width=24)
            self._live = Progress(bar, TextColumn("{task.fields[line]}"), console=self._out)
            self._task = self._live.add_task("", total=self._total, line=self._description)
            self._live.start()

    @property
    def _waits(self) -> bool:
        return time.monotonic() - self._began < self._after

    def add(self, count: float) -> None:
        self._rate.add(count)
        if self._waits:
            return
        self._start()
        if self._live:
            self._live.update(self._task, completed=self._rate.count, line=self._line())
        elif time.monotonic() - self._said >= self._interval:
            self._said = time.monotonic()
            self._print(self._line())

    def stop(self) -> None:
        if self._live:
            self._live.stop()
        elif self._rate.count and not self._waits:
            took = time.monotonic() - self._began
            count = f"{int(self._rate.count)} {self._unit}"
            self._print(_joined(self._description, count, f"in {clock(took)}"))

    def _line(self) -> str:
        done, total = int(self._rate.count), self._total
        return _joined(
            self._description,
            f"{done}/{total:.0f}" if total else str(done),
            f"{amount(self._rate.recent)} {self._unit}/s",
            f"left {clock(self._rate.left(max(0, total - done)))}" if total else "",
        )

    def _print(self, line: str) -> None:
        self._out.print(line, markup=False, highlight=False)


def _joined(*words: str) -> str:
    return "  ".join(word for word in words if word)


def cell(value: Any) -> str:
    """A value in a table: None is -, floats have three decimals, a pair is low..high, a list is its
    cells."""
    if value is None:
        return "-"
    if isinstance(value, bool | str | int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, tuple) and len(value) == 2:
        return f"{cell(value[0])}..{cell(value[1])}"
    if isinstance(value, list | tuple):
        return " ".join(cell(item) for item in value)
    return str(value)


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, out: Console | None = None
) -> None:
    """Print a table on rank 0; numbers are on the right. Control characters in it do not reach the
    terminal."""
    if rank() != 0:
        return
    listed = [list(row) for row in rows]
    drawn = Table(title=Text(one_line(title)), title_justify="left")
    for place, name in enumerate(columns):
        numeric = all(isinstance(row[place], int | float | tuple | type(None)) for row in listed)
        drawn.add_column(Text(name), justify="right" if numeric else "left")
    for row in listed:
        if len(row) != len(columns):
            raise ValueError(f"a row has {len(row)} cells, the table {len(columns)} columns")
        drawn.add_row(*(Text(one_line(cell(value))) for value in row))
    (out or console()).print(drawn)
    sys.stdout.flush()
