"""What a sweep has done so far, in `sweep.json` of its folder: which runs it made, and what each
came to. Nothing here needs torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from drafttrain.errors import InputError
from drafttrain.files import write_json
from drafttrain.packaging.checking import read_json

BOOK = "sweep.json"
FORMAT = 1
RUNNING, COMPLETE, PRUNED, FAILED = STATES = ("running", "complete", "pruned", "failed")
_LARGEST = 64 << 20


@dataclass(kw_only=True)
class Row:
    """A run of a sweep."""

    name: str
    """Of its folder, within the sweep's."""
    words: list[str]
    """One of each setting that the sweep varies."""
    status: str = RUNNING
    taus: dict[int, float] = field(default_factory=dict)
    """val/tau by update, of every evaluation so far."""
    intervals: dict[int, list[float]] = field(default_factory=dict)
    """Their 95 % intervals over prompts, where they were measured."""
    tau: float | None = None
    """The best val/tau, of a run that is complete."""
    best_update: int | None = None
    updates: int | None = None
    prompts: int | None = None
    """Held-out prompts that val/tau is measured on."""
    seconds: float | None = None
    """Of training and evaluation, all parts of the run together."""
    why: str | None = None
    """It failed, in words."""
    same_as: str | None = None
    """An earlier run with the same words, whose results these are: nothing was run."""

    @property
    def best(self) -> float | None:
        """The highest val/tau so far."""
        return max(self.taus.values(), default=None) if self.tau is None else self.tau

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the best val/tau; None where it was not measured."""
        found = None if self.best_update is None else self.intervals.get(self.best_update)
        return None if found is None else (found[0], found[1])

    def hear(self, updates: int, metrics: Mapping[str, float | None]) -> None:
        """Note what an evaluation measured."""
        tau, low, high = (metrics.get(f"val/tau{end}") for end in ("", "_low", "_high"))
        if tau is not None:
            self.taus[updates] = tau
        if low is not None and high is not None:
            self.intervals[updates] = [low, high]


@dataclass
class Book:
    """The runs of a sweep, kept in a file that is replaced at every change."""

    folder: Path
    words: list[str]
    """Of the command, in order, without those that say where and whether it goes on."""
    dtype: str | None = None
    """Of the target, where it is chosen by what is faster: one for all runs."""
    rows: list[Row] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.folder / BOOK

    def write(self) -> None:
        """Keep it."""
        rows = [asdict(row) for row in self.rows]
        found = {"format": FORMAT, "words": self.words, "dtype": self.dtype, "runs": rows}
        write_json(self.path, found)

    @property
    def complete(self) -> list[Row]:
        """Runs that trained to their end, the best first; of equals the earlier."""
        done = [row for row in self.rows if row.status == COMPLETE and row.same_as is None]
        return sorted((row for row in done if row.tau is not None), key=lambda row: -_tau(row))


def _tau(row: Row) -> float:
    assert row.tau is not None
    return row.tau


def read_book(folder: Path, words: Sequence[str]) -> Book:
    """The book of a sweep that goes on.

    Raises: InputError if it is missing or damaged, or the sweep had other words.
    """
    path = folder / BOOK
    if not path.is_file():
        raise InputError(
            f"run_dir={folder} is no sweep's folder, it has no {BOOK}: give that of an earlier "
            "sweep, or leave resume out and give a new one"
        )
    try:
        found = read_json(path, _LARGEST, "what a sweep has done")
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}, this version reads {FORMAT}")
        dtype = None if found["dtype"] is None else _text(found["dtype"])
        book = Book(folder, [_text(word) for word in found["words"]], dtype)
        book.rows = [_row(row) for row in found["runs"]]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is damaged ({error}): start the sweep again in another run_dir"
        ) from error
    lost = [word for word in book.words if word not in words]
    new = [word for word in words if word not in book.words]
    if lost or new:
        said = [f"without {' '.join(new)}"] if new else []
        said += [f"with {' '.join(lost)}"] if lost else []
        raise InputError(
            f"this would not be the same sweep: it was started {' and '.join(said)}; give the same "
            "words, or another run_dir without resume"
        )
    return book


def _row(given: Mapping[str, Any]) -> Row:
    unknown = given.keys() - {one.name for one in fields(Row)}
    if unknown:
        raise ValueError(f"unknown {', '.join(sorted(unknown))}")
    row, found = Row(**given), dict[int, list[float]]()
    row.taus = {int(updates): _number(tau) for updates, tau in given["taus"].items()}
    for updates, (low, high) in given.get("intervals", {}).items():
        found[int(updates)] = [_number(low), _number(high)]
    row.intervals = found
    row.words = [_text(word) for word in given["words"]]
    if row.status not in STATES or (row.status == COMPLETE and row.tau is None):
        raise ValueError(f"a run that is {str(row.status)[:40]}")
    if Path(_text(row.name)).name != row.name or row.name.startswith("."):
        raise ValueError(f"a run called {row.name[:80]}")
    for value in (row.tau, row.seconds):
        _number(0.0 if value is None else value)
    return row


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{str(value)[:40]!r} is no text")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{str(value)[:40]} is no number")
    return float(value)
