"""What a run's folder says of the run, in addition to its package: how it learned, samples of its
answers, where its time went."""

from __future__ import annotations

import csv
import functools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafttrain.checks import pasted
from drafttrain.errors import InputError
from drafttrain.files import write_json
from drafttrain.masking import hidden, hidden_lines
from drafttrain.packaging.checking import read_json
from drafttrain.packaging.collection import Entry, with_rows
from drafttrain.packaging.manifest import DECODING, class_of
from drafttrain.packaging.manifest import read_metrics as read_package_metrics
from drafttrain.reporting.loggers import read_metrics
from drafttrain.target import change

NOTED, METRICS, CONFIG, MEMBERS = "run.json", "metrics.csv", "config.yaml", "members"
FORMAT = 1
FIT_STAGES = ("loading", "searching", "training", "measuring", "packaging")
"""Of a run, in their order."""
_LARGEST = 16 << 20
_LARGEST_TABLE = 256 << 20
_LARGEST_TEXT = 1 << 18
_MOST = 1e15
"""More than any number that was measured."""


@dataclass(frozen=True)
class Pass:
    """One pass of the target, as text."""

    tokens: int
    """Written by it, the accepted drafts included."""
    drafts: tuple[str, ...]
    """Accepted drafts, token by token."""
    own: str
    """What the target chose after them; "" for a token that is no text, and where a stop token or
    the limit cut it off."""


@dataclass(frozen=True)
class Answer:
    """One sample."""

    prompt: str
    passes: tuple[Pass, ...]
    finish: str


@dataclass(frozen=True)
class Samples:
    """Some answers, decoded in one way."""

    tree: str
    temperature: float
    rule: str
    guarantee: str
    written_in: str
    """"text", or "ids" where the target came without a tokenizer."""
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Record:
    """A run, as its folder describes it."""

    entry: Entry
    """The package and what was measured with it."""
    curves: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """Rows of metrics.csv; of the run itself under "", of each of several models that it fitted
    under the model's name."""
    samples: Samples | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall seconds by stage of the run's last part; empty where they were not noted."""
    command: str | None = None
    """Of the run's last part; where that was not noted the package's, which names no folders."""
    change: str | None = None
    """What joint training did to the target, in words."""
    texts: dict[str, str] = field(default_factory=dict)
    """config.yaml and decoding.yaml, unchanged."""
    unread: tuple[str, ...] = ()
    """Files that are there and cannot be read, with the reason."""

    @property
    def learns(self) -> bool:
        return class_of(self.entry.config["drafter"]["_target_"], self.entry.name).learns

    @property
    def again(self) -> tuple[str, str | None]:
        """How to get what an earlier version did not note: by measuring again, without training.
        Words, and a command."""
        command = self.command
        if command is None or not command.startswith("python -m drafttrain.fit"):
            return "fit notes it at the end of a run.", None
        if not self.learns:
            return "with a new run_dir= the same command measures again and notes it:", command
        more = "" if "resume=" in command else " resume=last"
        folder = self.entry.run_folder
        # Without run_dir the newest run of this experiment would be continued.
        if "run_dir=" not in command and folder is not None:
            more += " " + pasted("run_dir", f"runs/{folder.name}")
        return (
            "continued after its end, the run trains nothing, measures again and notes it:",
            command + more,
        )


class Laps:
    """Wall seconds by stage, each from the end of the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def mark(self, stage: str) -> None:
        """The time since the last mark was spent in this stage."""
        now = time.monotonic()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now


def write_noted(
    folder: Path, *, samples: Mapping[str, Any] | None, seconds: Mapping[str, float], command: str
) -> None:
    """Keep what no other file of a run holds, in run.json.

    Args:
        samples: as `drafttrain.decoding.samples` gives them; None where nothing was decoded.
        seconds: by stage.
        command: with which the run's last part was started.
    """
    rounded = {stage: round(value, 3) for stage, value in seconds.items()}
    write_json(
        folder / NOTED,
        {"format": FORMAT, "command": command, "seconds": rounded, "samples": samples},
    )


def read_record(entry: Entry) -> Record:
    """Everything that is in the run's folder. Damaged files are named in `unread`; the others are
    read all the same."""
    unread: list[str] = []
    if not entry.rows:
        try:
            entry = with_rows(entry)
        except InputError as error:
            unread.append(str(error))
    texts = {}
    folder = entry.run_folder
    for path in (entry.folder / DECODING, *(() if folder is None else (folder / CONFIG,))):
        _try(unread, path, lambda path: texts.update({path.name: _text(path)}))
    noted_command = entry.config["training"].get("command")
    command = hidden(noted_command) if isinstance(noted_command, str) else None
    if folder is None:
        return Record(
            entry, command=command, change=_change(entry), texts=texts, unread=tuple(unread)
        )
    curves: dict[str, list[dict[str, float]]] = {}
    members = sorted(folder.glob(f"{MEMBERS}/*/{METRICS}"))
    for name, path in (("", folder / METRICS), *((path.parent.name, path) for path in members)):
        _try(unread, path, functools.partial(_add_curve, curves, name))
    noted: list[tuple[Samples | None, dict[str, float], str | None]] = []
    _try(unread, folder / NOTED, lambda path: noted.append(_noted(path)))
    samples, seconds, own = noted[0] if noted else (None, {}, None)
    return Record(
        entry, curves, samples, seconds, own or command, _change(entry), texts, tuple(unread)
    )


def _change(entry: Entry) -> str | None:
    try:
        return change.words(read_package_metrics(entry.folder)["target_change"])
    except (KeyError, TypeError, ValueError):
        return None


def _try(unread: list[str], path: Path, read: Any) -> None:
    """Read a file if it is there, or note why it cannot be read."""
    if not path.exists():
        return
    try:
        read(path)
    except InputError as error:
        unread.append(str(error))
    except (OSError, ValueError, KeyError, csv.Error) as error:
        unread.append(f"{path} cannot be read: {error}")


def _add_curve(curves: dict[str, list[dict[str, float]]], name: str, path: Path) -> None:
    curves[name] = _rows(path)


def _text(path: Path) -> str:
    if path.stat().st_size > _LARGEST_TEXT:
        raise InputError(f"{path} has {path.stat().st_size} bytes: too many to show")
    return hidden_lines(path.read_text(encoding="utf-8"))  # Earlier versions kept secrets.


def _rows(path: Path) -> list[dict[str, float]]:
    if path.stat().st_size > _LARGEST_TABLE:
        raise InputError(f"{path} has {path.stat().st_size} bytes: too many to read")
    # This leaves out NaN, too.
    rows = [
        {name: value for name, value in row.items() if abs(value) < _MOST}
        for row in read_metrics(path)
    ]
    return [row for row in rows if "step" in row]


def _noted(path: Path) -> tuple[Samples | None, dict[str, float], str | None]:
    """Samples, seconds and command of a run.json. Raises InputError for another form."""
    found = read_json(path, _LARGEST, "what a run noted")
    try:
        seconds = {str(stage): float(value) for stage, value in found["seconds"].items()}
        if not all(0 <= value < _MOST for value in seconds.values()):
            raise ValueError("seconds that are none")
        given, command = found["samples"], found.get("command")
        return (
            (None if given is None else _samples(given)),
            seconds,
            None if command is None else hidden(_word(command)),
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"{path} is not of the form that fit writes, so nothing of it is shown: put back the "
            "file that fit wrote"
        ) from error


def _samples(given: Any) -> Samples:
    answers = tuple(
        Answer(
            _word(answer["prompt"]),
            tuple(
                Pass(_count(one["tokens"]), tuple(map(_word, one["drafts"])), _word(one["own"]))
                for one in answer["passes"]
            ),
            _word(answer["finish"]),
        )
        for answer in given["answers"]
    )
    temperature = float(given["temperature"])
    if not math.isfinite(temperature):
        raise ValueError("a temperature that is none")
    tree, rule, guarantee, written_in = (
        _word(given[name]) for name in ("tree", "rule", "guarantee", "written_in")
    )
    return Samples(tree, temperature, rule, guarantee, written_in, answers)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise TypeError(f"{str(value)[:40]} is no count")
    return value


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is no text")
    return value
