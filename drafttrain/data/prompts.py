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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from drafttrain.checks import MOST, integer, pasted, path_of, shown
from drafttrain.data.conversations import sha256_of
from drafttrain.data.row_files import file_rows
from drafttrain.data.shapes import (
    CATEGORIES,
    SHAPES,
    Prompt,
    UnknownShape,
    Unusable,
    category_of,
    check_unicode,
    named,
    parse,
    reads,
)
from drafttrain.data.sources import ENDINGS, by_source, drawn, files_of
from drafttrain.data.template import ChatPieces
from drafttrain.errors import InputError, first_line

MOST_ROWS = 10_000_000
TEXT = "text"
"""Kind of a source of texts that are continued."""
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
    source: str = ""
    """Where the source has several: the one in which the row has this number."""


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
    origin: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Where there are several sources: the source of every row, those after the limit too, and its
    number in it."""
    category: dict[int, str] = field(default_factory=dict)
    """The kind of task of a row, where it is named."""
    apart: Callable[[int], bool] | None = None
    """Whether a row is held out, where the source decides it; else the first rows are."""
    notes: list[str] = field(default_factory=list)
    """What a person should know of how the rows were made."""

    @property
    def texts(self) -> bool:
        """Are they texts that the target goes on with, without a chat template?"""
        return self.source.get("kind") == TEXT

    def leave_out(self, row: int, reason: str) -> None:
        """Count a row among the skipped ones."""
        source, number = self.origin.get(row, ("", row))
        self.skipped.append(Skipped(number, reason, source=source))

    def places(self, rows: Iterable[int]) -> str:
        """Rows as a person finds them: their numbers, or those in each source."""
        found: dict[str, list[int]] = {}
        for row in rows:
            source, number = self.origin.get(row, ("", row))
            found.setdefault(source, []).append(number)
        return "; ".join(f"{source} {some(found[source])}".strip() for source in sorted(found))

    def counts(self, rows: Iterable[int]) -> dict[str, int]:
        """Rows by source, where there are several."""
        return dict(Counter(self.origin[row][0] for row in sorted(rows) if row in self.origin))


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

    def read(self, limit: int | None, watch: Watch = unwatched) -> Prompts:
        """Rows numbered up to `limit`. Raises InputError if the file cannot be read or no row has a
        known shape."""
        path = path_of(f"{self.room}.path", self.path)
        if not path.is_file() and not path.is_dir():
            raise InputError(
                f"{self.room}.path={self.path} does not exist: give a JSON Lines, JSON (either may "
                "be .gz) or parquet file, or a folder of them"
            )
        files = files_of(path) if path.is_dir() else [path]
        if not files:
            raise InputError(
                f"{self.room}.path={self.path} is a folder without files that end in "
                f"{', '.join(ENDINGS)}: give a file, or for prompts of a data set prompts=dataset "
                f"{pasted('prompts.path', self.path)}"
            )
        source: dict[str, Any] = {"kind": "file", "sha256": _sha256(files[0])}
        if len(files) > 1:
            sums = {str(file.relative_to(path)): _sha256(file) for file in files}
            source = {"kind": "files", "seed": self.seed, "sha256": sums}
        if self.columns:
            source["columns"] = dict(self.columns)
        sources = by_source(map(str, files), path)
        if len(sources) == 1:
            return self._rows(files, limit, source, watch)
        parts = {
            name: self._rows(map(Path, some), None, {}, watch) for name, some in sources.items()
        }
        return joined(parts, limit, self.seed, source)

    def _rows(
        self, files: Iterable[Path], limit: int | None, source: dict[str, Any], watch: Watch
    ) -> Prompts:
        """Of files that are one source."""
        files = list(files)
        try:
            rows = watch(_one_by_one(files, self.reads()))
            return _collect(rows, limit, self.parse, str(files[0]), source)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{files[0]} cannot be read: {error}") from error


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
                    self.parse,
                    f"{label}: {name}",
                    {},
                )
                for name, data in parts.items()
            }
            return joined(read, limit, self.seed, source)
        (data,) = parts.values()
        count = len(data) if limit is None else min(limit, len(data))
        rows = _rows_of(data, count, self.columns)
        found = _collect(watch(rows), limit, self.parse, label, source)
        found.more = count < len(data)
        return found

    def parse(self, row: Any) -> Prompt:
        return parse(as_object(row), self.columns)

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


def joined(
    parts: Mapping[str, Prompts], limit: int | None, seed: int, source: dict[str, Any]
) -> Prompts:
    """Several sources as one, in the order of `drawn`; rows count from 1 in it.

    Args:
        parts: {name: all that a source holds}.
        limit: rows up to this number are taken.
    """
    names = list(parts)
    prompts = {name: dict(part.rows) for name, part in parts.items()}
    skipped = {name: {item.row: item for item in part.skipped} for name, part in parts.items()}
    numbers = {name: sorted([*prompts[name], *skipped[name]]) for name in names}
    order = drawn([len(numbers[name]) for name in names], seed)
    found = Prompts([], source=source, more=limit is not None and limit < len(order))
    for row, (place, turn) in enumerate(order, start=1):
        name = names[place]
        number = numbers[name][turn]
        found.origin[row] = name, number
        if limit is not None and row > limit:
            continue
        if number in skipped[name]:
            found.skipped.append(dataclasses.replace(skipped[name][number], source=name))
        else:
            found.rows.append((row, prompts[name][number]))
            if number in parts[name].category:
                found.category[row] = parts[name].category[number]
    found.first_keys = next((part.first_keys for part in parts.values() if part.first_keys), ())
    return found


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
    """{reason: row numbers}, the most frequent reason first; where there are several sources, a
    reason names its own."""
    found: dict[str, list[int]] = {}
    for item in skipped:
        reason = f"{item.reason}, in {item.source}" if item.source else item.reason
        found.setdefault(reason, []).append(item.row)
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


def unread_columns(prompts: Prompts, pieces: ChatPieces) -> dict[str, list[int]]:
    """{argument that rows bring and the chat template does not read: row numbers}."""
    found: dict[str, list[int]] = {}
    for row, prompt in prompts.rows:
        if prompt is not None and prompt.arguments:
            for name in pieces.given(prompt.arguments).unread(prompt.arguments):
                found.setdefault(name, []).append(row)
    return found


def some(rows: list[int], limit: int = 10) -> str:
    """The first row numbers, in order."""
    listed = ", ".join(map(str, sorted(rows)[:limit]))
    return listed + (f" and {len(rows) - limit} more" if len(rows) > limit else "")


def _rows_of(data: Any, count: int, columns: dict[str, str]) -> Iterator[tuple[int, Any]]:
    """The first rows of a data set; columns that nothing looks at come as None and are not read."""
    blank = dict.fromkeys(data.column_names)
    read = [name for name in blank if name in reads(columns)]
    rows = data.select(range(count)).select_columns(read) if read else ({} for _ in range(count))
    yield from ((number, blank | row) for number, row in enumerate(rows, start=1))


def as_object(row: Any) -> dict[str, Any]:
    """A row with keys. Raises `Unusable` for another one."""
    if not isinstance(row, dict):
        raise Unusable(f"not an object with keys but a {type(row).__name__}")
    return row


def _one_by_one(files: Iterable[Path], columns: set[str]) -> Iterator[tuple[int, Any]]:
    """Rows of files, one after the other, numbered through."""
    before = 0
    for file in files:
        number = 0
        for number, row in file_rows(file, columns):
            yield before + number, row
        before += number


def _collect(
    numbered: Iterable[tuple[int, Any]],
    limit: int | None,
    parse: Callable[[Any], Any],
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
            found.rows.append((number, parse(row)))
            shaped = True
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


def _sha256(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
