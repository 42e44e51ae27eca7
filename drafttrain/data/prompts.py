"""Prompts as people have them: user turns to be answered by the target.

A source gives numbered rows. Rows of files and data sets count from 1 (in JSON Lines the line
number, empty lines counted), so a number stays with its row whatever limit or filter applies;
self-written rows count from 0. Rows of several files are numbered in an order that takes from each
its share, see `drafttrain.data.sources`. Answers that a row brings are left out: the target writes
its own. What a row may look like: `drafttrain.data.shapes`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from drafttrain.checks import MOST, integer, pasted, path_of, shown
from drafttrain.data.conversations import sha256_of
from drafttrain.data.numbered import TEXT, FileRows, Prompts, Skipped, joined
from drafttrain.data.row_files import file_rows
from drafttrain.data.shapes import (
    CATEGORIES,
    SHAPES,
    Prompt,
    TableRow,
    UnknownShape,
    Unusable,
    category_of,
    check_unicode,
    named,
    overlooked,
    overlooked_category,
    parse,
    reads,
)
from drafttrain.data.sources import ENDINGS, Found, by_source, files_of
from drafttrain.errors import InputError, first_line

MOST_ROWS = 10_000_000
_HEAD = 100
"""Rows of a data set that its identity is made from."""


Numbered = Iterable[tuple[int, Any]]
Watch = Callable[[Numbered], Numbered]
"""Rows -> the same, shown to a person as they are read."""


def unwatched(rows: Numbered) -> Numbered:
    """The rows, shown to nobody."""
    return rows


class Source(Protocol):
    """Where prompts come from."""

    def read(self, limit: int | None, watch: Watch = unwatched) -> Prompts: ...


@dataclass(frozen=True, kw_only=True)
class SelfWritten:
    """No prompts: the target writes the user turns from its own chat template."""

    def read(self, limit: int | None, watch: Watch = unwatched) -> Prompts:
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
    """JSON Lines, a JSON array (either may be packed with gzip) or parquet; or a folder of them.

    Of parquet only the columns that are looked at are read.
    """

    room: ClassVar[str] = "prompts"
    """Where its settings are."""
    path: str
    columns: dict[str, Any] = field(default_factory=dict)
    """{name in COLUMNS: column of the file} for columns that are named otherwise."""
    seed: int = 0
    """Which rows of several files come first."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", named(self.columns))
        integer(f"{self.room}.seed", self.seed)

    def reads(self) -> set[str]:
        """The columns that are looked at."""
        return reads(self.columns)

    def parse(self, row: Any) -> Any:
        """What a row holds. Raises `Unusable` for one that cannot be used."""
        return parse(as_object(row), self.columns)

    def overlooked(self, row: Any, parsed: Any) -> Iterator[str]:
        """What it holds besides, in words; see `shapes.overlooked`."""
        return overlooked(row, parsed, self.columns)

    def read(self, limit: int | None, watch: Watch = unwatched) -> Prompts:
        """Rows numbered up to `limit`. Raises InputError if the file cannot be read or no row has a
        known shape."""
        path = path_of(f"{self.room}.path", self.path)
        if not path.is_file() and not path.is_dir():
            raise InputError(
                f"{self.room}.path={self.path} does not exist: give a JSON Lines, JSON (either may "
                "be .gz) or parquet file, or a folder of them"
            )
        found = self.files(path)
        files = found.files
        source: dict[str, Any] = {"kind": "file", "sha256": sum_of(files[0])}
        if len(files) > 1:
            sums = {str(file.relative_to(path)): sum_of(file) for file in files}
            source = {"kind": "files", "seed": self.seed, "sha256": sums}
        if self.columns:
            source["columns"] = dict(self.columns)
        sources = by_source(map(str, files), path)
        if len(sources) == 1:
            only = self._rows(files, path, limit, source, watch).with_files()
            return dataclasses.replace(only, passed_over=found.passed_over)
        parts = {
            name: self._rows(list(map(Path, some)), path, None, {}, watch)
            for name, some in sources.items()
        }
        every = joined(parts, limit, self.seed, source)
        return dataclasses.replace(every, passed_over=found.passed_over)

    def files(self, path: Path) -> Found:
        """The file, or those in the folder. Raises InputError if there are none."""
        try:
            found = files_of(path) if path.is_dir() else Found([path], ())
        except OSError as error:
            raise InputError(f"{self.room}.path={self.path} cannot be read: {error}") from error
        if not found.files:
            there = f"; it has {', '.join(found.passed_over)}" if found.passed_over else ""
            raise InputError(
                f"{self.room}.path={self.path} is a folder without files that end in "
                f"{', '.join(ENDINGS)}{there}: give a file, or for prompts of a data set "
                f"prompts=dataset {pasted('prompts.path', self.path)}"
            )
        return found

    def _rows(
        self,
        files: Sequence[Path],
        folder: Path,
        limit: int | None,
        source: dict[str, Any],
        watch: Watch,
    ) -> Prompts:
        """Of files that are one source; they may be in a folder."""
        shards = files if len(files) > 1 else ()
        several = [FileRows(str(file.relative_to(folder)), 0, 0) for file in shards]
        label = str(files[0]) + f" and {len(files) - 1} more" * (len(files) > 1)
        rows = watch(_one_by_one(files, self.reads(), several))
        found = _collect(rows, limit, self, label, source)
        if several:
            found.files[""] = several
        return found


@dataclass(frozen=True, kw_only=True)
class TextFile(PromptFile):
    """Plain texts, which the target goes on with; no chat template is needed.

    Files as of prompts; a row is a text, or has one in a column.
    """

    column: str = "text"
    tokens: int | None = 64
    """Of each text, how many are read at most; None takes all of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("prompts.tokens", self.tokens, 1, null="all of a text")
        if not isinstance(self.column, str) or not self.column:
            raise InputError(f"prompts.column={shown(self.column)}: needs the name of a column")

    def reads(self) -> set[str]:
        return {self.column, *CATEGORIES}

    def overlooked(self, row: Any, parsed: Any) -> Iterator[str]:
        return overlooked_category(row)

    def parse(self, row: Any) -> Prompt:
        text = row.get(self.column) if isinstance(row, dict) else row
        if not isinstance(text, str) or not text.strip():
            raise Unusable(f"no text in column {self.column}")
        check_unicode(text)
        return Prompt((text,), read=self.tokens or MOST)

    def read(self, limit: int | None, watch: Watch = unwatched) -> Prompts:
        found = super().read(limit, watch)
        found.source |= {"kind": TEXT, "column": self.column, "tokens": self.tokens}
        return found


@dataclass(frozen=True, kw_only=True)
class PromptDataset:
    """A data set of the `datasets` package: a name on the hub, or a folder.

    A folder of several data files has several sources; elsewhere a data set is one.
    """

    path: str
    name: str | None = None
    """Which of several configurations."""
    split: str = "train"
    revision: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    """{name in COLUMNS: column of the data set} for columns that are named otherwise."""
    seed: int = 0
    """Which rows of several data files come first."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", named(self.columns))
        integer("prompts.seed", self.seed)
        for name in ("path", "name", "split", "revision"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value) and not (
                value is None and name in ("name", "revision")
            ):
                raise InputError(f"prompts.{name}={shown(value)}: needs text")

    def read(self, limit: int | None, watch: Watch = unwatched) -> Prompts:
        """Rows numbered up to `limit`. Raises InputError if it cannot be loaded or no row has a
        known shape."""
        parts = self._load()
        label = f"{self.path}, split {self.split}"
        head = [data[i] for data in parts.values() for i in range(min(_HEAD, len(data)))]
        text = json.dumps(head, sort_keys=True, default=str)
        source: dict[str, Any] = {
            "kind": "dataset",
            "path": Path(self.path).name,
            "name": self.name,
            "split": self.split,
            "revision": self.revision,
            "rows": sum(map(len, parts.values())),
            "head": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
        }
        if self.columns:
            source["columns"] = dict(self.columns)
        if len(parts) > 1:
            source |= {"seed": self.seed, "sources": {name: len(parts[name]) for name in parts}}
            read = {
                name: _collect(
                    watch(_rows_of(data, len(data), self.columns)),
                    None,
                    self,
                    f"{label}: {name}",
                    {},
                )
                for name, data in parts.items()
            }
            return joined(read, limit, self.seed, source)
        (data,) = parts.values()
        count = len(data) if limit is None else min(limit, len(data))
        rows = _rows_of(data, count, self.columns)
        found = _collect(watch(rows), limit, self, label, source)
        found.more = count < len(data)
        return found

    def parse(self, row: Any) -> Prompt:
        return parse(as_object(row), self.columns)

    def overlooked(self, row: Any, parsed: Any) -> Iterator[str]:
        """What it holds besides, in words; see `shapes.overlooked`."""
        return overlooked(row, parsed, self.columns)

    def _load(self) -> dict[str, Any]:
        """{name of a source: its rows}"""
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
                return {"": loaded}
            where = str(folder) if folder.exists() else self.path
            files = self._files(folder) if folder.is_dir() else {}
            if len(files) > 1:
                return {
                    name: datasets.load_dataset(
                        where, self.name, split=self.split, data_files={self.split: some}
                    )
                    for name, some in files.items()
                }
            return {
                "": datasets.load_dataset(
                    where, self.name, split=self.split, revision=self.revision
                )
            }
        except InputError:
            raise
        except Exception as error:  # The package raises many kinds.
            raise InputError(
                f"data set {self.path} cannot be loaded: {first_line(error)}"
            ) from error

    def _files(self, folder: Path) -> dict[str, list[str]]:
        """{name of a source: its data files} of the split, as the package finds them."""
        import datasets

        builder = datasets.load_dataset_builder(str(folder), self.name)
        files = (builder.config.data_files or {}).get(self.split, ())
        return by_source(map(str, files), folder.resolve())


def _rows_of(data: Any, count: int, columns: dict[str, str]) -> Iterator[tuple[int, Any]]:
    """The first rows of a data set; columns that nothing looks at come as None and are not read."""
    blank = dict.fromkeys(data.column_names)
    read = [name for name in blank if name in reads(columns)]
    rows = data.select(range(count)).select_columns(read) if read else ({} for _ in range(count))
    yield from ((number, TableRow(blank | row)) for number, row in enumerate(rows, start=1))


def as_object(row: Any) -> dict[str, Any]:
    """A row with keys. Raises `Unusable` for another one."""
    if not isinstance(row, dict):
        raise Unusable(f"not an object with keys but a {type(row).__name__}")
    return row


def _one_by_one(
    files: Iterable[Path], columns: set[str], several: Sequence[FileRows]
) -> Iterator[tuple[int, Any]]:
    """Rows of files, one after the other, numbered through. Raises InputError naming the file that
    cannot be read.

    Args:
        several: of each file, where it says which rows it has; none for a single file.
    """
    before = 0
    for place, file in enumerate(files):
        number = 0
        try:
            for number, row in file_rows(file, columns):
                if several:
                    several[place].before, several[place].last = before, before + number
                yield before + number, row
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{file} cannot be read: {error}") from error
        before += number


class _ReadsRows(Protocol):
    def parse(self, row: Any) -> Any: ...

    def overlooked(self, row: Any, parsed: Any) -> Iterator[str]: ...


def _collect(
    numbered: Iterable[tuple[int, Any]],
    limit: int | None,
    source_of: _ReadsRows,
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
            if isinstance(row, dict):
                found.first_keys = found.first_keys or tuple(map(str, row))
            parsed = source_of.parse(row)
            found.rows.append((number, parsed))
            shaped = True
            for what in source_of.overlooked(row, parsed):
                found.overlooked.setdefault(what, []).append(number)
            category = category_of(row)
            if category:
                found.category[number] = category
        except UnknownShape as error:
            unknown = unknown or row
            found.skipped.append(Skipped(number, error.reason))
        except Unusable as error:
            shaped = shaped or isinstance(row, dict)
            found.skipped.append(Skipped(number, error.reason, error.messages))
    if unknown is not None and not shaped:
        hint = (
            " A text does not say where the prompt ends; to take all of it: "
            "prompts.columns.prompt=text; to have the target go on with it: prompts=text."
            * ("text" in unknown)
        )
        raise InputError(
            f"{label}: no row has a known shape. Accepted: {'; '.join(SHAPES)}. The first row's "
            f"keys: {', '.join(map(str, unknown)) or 'none'}.{hint} Columns named otherwise: "
            "prompts.columns.<shape>=<column>"
        )
    return found


def sum_of(path: Path) -> str:
    """Of a file's content. Raises InputError for one that cannot be read."""
    try:
        return sha256_of(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
