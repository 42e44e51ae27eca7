"""Prompts as people have them: user turns to be answered by the target.

A source gives numbered rows. Rows of files and data sets count from 1 (in JSON Lines the line
number, empty lines counted), so a number stays with its row whatever limit or filter applies;
self-written rows count from 0. Answers that a row brings are left out: the target writes its own.
What a row may look like: `drafttrain.data.shapes`.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from drafttrain.checks import pasted, path_of, shown
from drafttrain.data.conversations import sha256_of
from drafttrain.data.row_files import file_rows
from drafttrain.data.shapes import SHAPES, Prompt, UnknownShape, Unusable, named, parse
from drafttrain.errors import InputError, first_line

MOST_ROWS = 10_000_000
_HEAD = 100
"""Rows of a data set that its identity is made from."""


@dataclass(frozen=True)
class Skipped:
    """A row that cannot be used."""

    row: int
    reason: str
    messages: tuple[tuple[str, str], ...] = ()
    """(role, content) of its turns where they could be read; a chat template may have a word to say
    about them."""


@dataclass
class Prompts:
    """What a source holds."""

    rows: list[tuple[int, Prompt | None]]
    """Row numbers and prompts; None is a conversation whose user turns the target writes too."""
    skipped: list[Skipped] = field(default_factory=list)
    source: dict[str, Any] = field(default_factory=dict)
    """Who the source is: equal for equal rows, wherever the file is and whatever limit applies."""
    first_keys: tuple[str, ...] = ()
    more: bool = False
    """Whether the source goes on after the limit."""


class Source(Protocol):
    """Where prompts come from."""

    def read(self, limit: int | None) -> Prompts: ...


@dataclass(frozen=True, kw_only=True)
class SelfWritten:
    """No prompts: the target writes the user turns from its own chat template."""

    def read(self, limit: int | None) -> Prompts:
        if limit is None:
            raise InputError(
                "self-written conversations never end by themselves: give rows=<number>"
            )
        if limit > MOST_ROWS:
            raise InputError(
                f"rows={limit}: at most {MOST_ROWS} self-written conversations make a set"
            )
        return Prompts([(row, None) for row in range(limit)], source={"kind": "self"})


@dataclass(frozen=True, kw_only=True)
class PromptFile:
    """JSON Lines, a JSON array (either may be packed with gzip) or parquet."""

    path: str
    columns: dict[str, Any] = field(default_factory=dict)
    """{name in COLUMNS: column of the file} for columns that are named otherwise."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", named(self.columns))

    def read(self, limit: int | None) -> Prompts:
        """Rows numbered up to `limit`. Raises InputError if the file cannot be read or no row has a
        known shape."""
        path = path_of("prompts.path", self.path)
        if path.is_dir():
            raise InputError(
                f"prompts.path={self.path} is a folder: give a file, or use prompts=dataset "
                f"{pasted('prompts.path', self.path)}"
            )
        if not path.is_file():
            raise InputError(
                f"prompts.path={self.path} does not exist: give a JSON Lines, JSON (either may be "
                ".gz) or parquet file"
            )
        source: dict[str, Any] = {"kind": "file", "sha256": _sha256(path)}
        if self.columns:
            source["columns"] = dict(self.columns)
        try:
            return _collect(file_rows(path), limit, self.columns, self.path, source)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{self.path} cannot be read: {error}") from error


@dataclass(frozen=True, kw_only=True)
class PromptDataset:
    """A data set of the `datasets` package: a name on the hub, or a folder."""

    path: str
    name: str | None = None
    """Which of several configurations."""
    split: str = "train"
    revision: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    """{name in COLUMNS: column of the data set} for columns that are named otherwise."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", named(self.columns))
        for name in ("path", "name", "split", "revision"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value) and not (
                value is None and name in ("name", "revision")
            ):
                raise InputError(f"prompts.{name}={shown(value)}: needs text")

    def read(self, limit: int | None) -> Prompts:
        """Rows numbered up to `limit`. Raises InputError if it cannot be loaded or no row has a
        known shape."""
        data = self._load()
        label = f"{self.path}, split {self.split}"
        head = [data[i] for i in range(min(_HEAD, len(data)))]
        text = json.dumps(head, sort_keys=True, default=str)
        source: dict[str, Any] = {
            "kind": "dataset",
            "path": Path(self.path).name,
            "name": self.name,
            "split": self.split,
            "revision": self.revision,
            "rows": len(data),
            "head": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
        }
        if self.columns:
            source["columns"] = dict(self.columns)
        count = len(data) if limit is None else min(limit, len(data))
        rows = ((number, data[number - 1]) for number in range(1, count + 1))
        found = _collect(rows, limit, self.columns, label, source)
        found.more = count < len(data)
        return found

    def _load(self) -> Any:
        import datasets

        folder = path_of("prompts.path", self.path)
        try:
            if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
                loaded = datasets.load_from_disk(str(folder))
                if isinstance(loaded, datasets.DatasetDict):
                    if self.split not in loaded:
                        raise InputError(
                            f"{self.path} has no split {self.split}; it has {', '.join(loaded)}"
                        )
                    loaded = loaded[self.split]
                return loaded
            where = str(folder) if folder.exists() else self.path
            return datasets.load_dataset(where, self.name, split=self.split, revision=self.revision)
        except InputError:
            raise
        except Exception as error:  # The package raises many kinds.
            raise InputError(
                f"data set {self.path} cannot be loaded: {first_line(error)}"
            ) from error


def nothing_left(label: str, prompts: Prompts) -> InputError:
    """The one message for a source without a usable row."""
    if not prompts.skipped:
        return InputError(f"{label} holds no rows")
    listed = "; ".join(
        f"{len(rows)} {reason} (rows {some(rows)})"
        for reason, rows in by_reason(prompts.skipped).items()
    )
    keys = f" The first row's keys: {', '.join(prompts.first_keys)}." if prompts.first_keys else ""
    return InputError(
        f"{label}: none of its {len(prompts.skipped)} rows can be used: {listed}.{keys}"
    )


def by_reason(skipped: Iterable[Skipped]) -> dict[str, list[int]]:
    """{reason: row numbers}, the most frequent reason first."""
    found: dict[str, list[int]] = {}
    for item in skipped:
        found.setdefault(item.reason, []).append(item.row)
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


def some(rows: list[int], limit: int = 10) -> str:
    """The first row numbers, in order."""
    listed = ", ".join(map(str, sorted(rows)[:limit]))
    return listed + (f" and {len(rows) - limit} more" if len(rows) > limit else "")


def _collect(
    numbered: Iterable[tuple[int, Any]],
    limit: int | None,
    columns: dict[str, str],
    label: str,
    source: dict[str, Any],
) -> Prompts:
    found = Prompts([], source=source)
    unknown: dict[str, Any] | None = None
    shaped = False
    for number, row in numbered:
        if limit is not None and number > limit:
            found.more = True
            break
        try:
            if isinstance(row, Unusable):
                raise row
            if not isinstance(row, dict):
                raise Unusable(f"not an object with keys but a {type(row).__name__}")
            found.first_keys = found.first_keys or tuple(map(str, row))
            prompt = parse(row, columns)
            found.rows.append((number, prompt))
            shaped = True
        except UnknownShape as error:
            unknown = unknown or row
            found.skipped.append(Skipped(number, error.reason))
        except Unusable as error:
            shaped = shaped or isinstance(row, dict)
            found.skipped.append(Skipped(number, error.reason, error.messages))
    if unknown is not None and not shaped:
        hint = (
            " A text does not say where the prompt ends; to take all of it: "
            "prompts.columns.prompt=text." * ("text" in unknown)
        )
        raise InputError(
            f"{label}: no row has a known shape. Accepted: {'; '.join(SHAPES)}. The first row's "
            f"keys: {', '.join(map(str, unknown)) or 'none'}.{hint} Columns named otherwise: "
            "prompts.columns.<shape>=<column>"
        )
    return found


def _sha256(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
