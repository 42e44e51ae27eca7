"""Prompts as people have them: user turns to be answered by the target.

A source gives numbered rows. Rows of files and data sets count from 1 (in JSON Lines the line
number, empty lines counted), so a number stays with its row whatever limit or filter applies;
self-written rows count from 0. Answers that a row brings are left out: the target writes its own.

Accepted shapes of a row:

    conversations: [{"from": "human", "value": ...}, ...]        ShareGPT; further roles: user, gpt,
    assistant, system messages: [{"role": "user", "content": ...}, ...]            OpenAI; content
    may be a list of text parts prompt: "..." or ["first turn", "second turn"]               or a
    list of messages; a completion is left out turns: ["first turn", "second turn"]
    instruction: "...", input: "..."                             joined by an empty line; an output
    is left out

each with an optional `system` text. A row of `text` alone is refused, because it does not say where
the prompt ends.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafttrain.checks import path_of, shown
from drafttrain.data.conversations import sha256_of
from drafttrain.errors import InputError, first_line

SHAPES = (
    "conversations [{from, value}]",
    "messages [{role, content}]",
    "prompt (text, list of turns, or messages)",
    "turns [text]",
    "instruction (+ input)",
)
COLUMNS = ("conversations", "messages", "prompt", "turns", "instruction", "input", "system")
_USER = {"user", "human", "prompter"}
_ASSISTANT = {"assistant", "gpt", "model", "bot", "chatgpt", "bard", "bing"}
_SYSTEM = {"system", "developer"}
MOST_ROWS = 10_000_000
_LONGEST_LINE, _LONGEST_ARRAY = 64 << 20, 1 << 30
"""Bytes; a packed file of some kilobytes can unfold to lines of any length."""
_HEAD = 100
"""Rows of a data set that its identity is made from."""


@dataclass(frozen=True)
class Prompt:
    """The user's side of one conversation."""

    users: tuple[str, ...]
    """User turns in order, at least one."""
    system: str | None = None

    def lead(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system else []


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
    """Who the source is: equal for equal rows, wherever the file lies and whatever limit
    applies."""
    first_keys: tuple[str, ...] = ()
    more: bool = False
    """Whether the source goes on behind the limit."""


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
        object.__setattr__(self, "columns", _named(self.columns))

    def read(self, limit: int | None) -> Prompts:
        """Rows numbered up to `limit`. Raises InputError if the file cannot be read or no row has a
        known shape."""
        path = path_of("prompts.path", self.path)
        if path.is_dir():
            raise InputError(
                f"prompts.path={self.path} is a folder: give a file, or use prompts=dataset "
                f"prompts.path={self.path}"
            )
        if not path.is_file():
            raise InputError(
                f"prompts.path={self.path} does not exist: give a JSON Lines, JSON (either may be "
                f".gz) or parquet file"
            )
        source: dict[str, Any] = {"kind": "file", "sha256": _sha256(path)}
        if self.columns:
            source["columns"] = dict(self.columns)
        try:
            return _collect(_file_rows(path), limit, self.columns, self.path, source)
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
        object.__setattr__(self, "columns", _named(self.columns))
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


class _Unusable(Exception):
    def __init__(self, reason: str, messages: list[tuple[str, str]] | None = None) -> None:
        super().__init__(reason)
        self.reason, self.messages = reason, tuple(messages or ())


class _UnknownShape(_Unusable):
    pass


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
            if isinstance(row, _Unusable):
                raise row
            if not isinstance(row, dict):
                raise _Unusable(f"not an object with keys but a {type(row).__name__}")
            found.first_keys = found.first_keys or tuple(map(str, row))
            prompt = parse(row, columns)
            found.rows.append((number, prompt))
            shaped = True
        except _UnknownShape as error:
            unknown = unknown or row
            found.skipped.append(Skipped(number, error.reason))
        except _Unusable as error:
            shaped = shaped or isinstance(row, dict)
            found.skipped.append(Skipped(number, error.reason, error.messages))
    if unknown is not None and not shaped:
        hint = (
            " A text alone does not say where the prompt ends; to take all of it: "
            "prompts.columns.prompt=text." * ("text" in unknown)
        )
        raise InputError(
            f"{label}: no row has a known shape. Accepted: {'; '.join(SHAPES)}. The first row's "
            f"keys: "
            f"{', '.join(map(str, unknown)) or 'none'}.{hint} Columns named otherwise: "
            f"prompts.columns.<shape>=<column>"
        )
    return found


def parse(row: dict[str, Any], columns: dict[str, str] | None = None) -> Prompt:
    """The user's side of one row. Raises an exception with a `reason` if it cannot be used."""
    columns = columns or {}

    def get(name: str) -> Any:
        return row.get(columns.get(name, name))

    system = get("system")
    if system is not None and not isinstance(system, str):
        raise _Unusable("a system column that is not text")
    for name in ("conversations", "messages", "turns", "prompt"):
        value = get(name)
        if value is None:
            continue
        if isinstance(value, str):
            if name != "prompt":
                raise _Unusable(f"{name}: not a list")
            return _from_messages([("user", value)], system)
        return _from_messages(_turns(value, name), system)
    instruction = get("instruction")
    if instruction is not None:
        more = get("input")
        if not isinstance(instruction, str) or not isinstance(more, str | None):
            raise _Unusable("an instruction or input that is not text")
        text = f"{instruction}\n\n{more}" if more and more.strip() else instruction
        return _from_messages([("user", text)], system)
    if any(columns.get(name, name) in row for name in COLUMNS[:-2]):
        raise _Unusable("an empty prompt column")
    raise _UnknownShape("no prompt column")


def _turns(value: Any, name: str) -> list[tuple[str, str]]:
    """(role, content) of a list of turns or messages."""
    if isinstance(value, dict) and value and all(isinstance(part, list) for part in value.values()):
        # A data set may keep a list of objects as an object of lists.
        value = [
            dict(zip(value, parts, strict=True)) for parts in zip(*value.values(), strict=False)
        ]
    if not isinstance(value, list):
        raise _Unusable(f"{name}: not a list")
    found: list[tuple[str, str]] = []
    for turn in value:
        if isinstance(turn, str) and name in ("prompt", "turns"):
            found.append(("user", turn))
            continue
        if not isinstance(turn, dict):
            raise _Unusable("a turn that is not an object")
        said = next((turn[key] for key in ("from", "role") if isinstance(turn.get(key), str)), None)
        if said is None:
            raise _Unusable("a turn without a role")
        role = said.strip().lower()
        for known, names in (("user", _USER), ("assistant", _ASSISTANT), ("system", _SYSTEM)):
            role = known if role in names else role
        if role not in ("user", "assistant", "system"):
            raise _Unusable(f"a turn of role {said[:40]}")
        content = next(
            (turn[key] for key in ("value", "content", "text") if turn.get(key) is not None), None
        )
        if role == "assistant":
            content = content if isinstance(content, str) else ""  # Left out anyway.
        found.append((role, _text(content)))
    if all(isinstance(turn, str) for turn in value):
        return _answered(found)
    return found


def _answered(users: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """A list of user turns stands for a conversation with the answers left out."""
    return [turn for user in users for turn in (user, ("assistant", ""))]


def _text(content: Any) -> str:
    if isinstance(content, list):
        parts = []
        for part in content:
            if (
                isinstance(part, dict)
                and part.get("type", "text") == "text"
                and isinstance(part.get("text"), str)
            ):
                parts.append(part["text"])
            else:
                raise _Unusable("content that is not text")
        return "".join(parts)
    if not isinstance(content, str):
        raise _Unusable("content that is not text")
    return content


def _from_messages(messages: list[tuple[str, str]], system: str | None) -> Prompt:
    leading = 0
    while leading < len(messages) and messages[leading][0] == "system":
        leading += 1
    system = system if system and system.strip() else None
    turns = messages[leading:]
    if not messages:
        raise _Unusable("empty conversation")
    if leading > 1:
        raise _Unusable("several system messages", messages)
    if not any(role == "user" for role, _ in turns):
        raise _Unusable("no user turn", messages)
    if turns[0][0] == "assistant":
        raise _Unusable("begins with an assistant turn", messages)
    if any(role == "system" for role, _ in turns):
        raise _Unusable("a system message behind the first turn", messages)
    if leading and messages[0][1].strip():
        if system is not None and system.strip() != messages[0][1].strip():
            raise _Unusable("system column and system message differ", messages)
        system = messages[0][1]
    for (before, _), (role, _) in itertools.pairwise(turns):
        if before == role:
            raise _Unusable(f"two {role} turns in a row", messages)
    users = tuple(content for role, content in turns if role == "user")
    if not all(user.strip() for user in users):
        raise _Unusable("an empty user turn", messages)
    try:
        "".join((*users, system or "")).encode()
    except UnicodeEncodeError:
        raise _Unusable("text that is not Unicode (half of a surrogate pair)") from None
    return Prompt(users, system)


def _named(columns: dict[str, Any]) -> dict[str, str]:
    """Columns that are named otherwise than their shape."""
    if not isinstance(columns, dict):
        raise InputError(
            f"prompts.columns={shown(columns)}: needs names of columns by their shape, such as "
            f"{{prompt: question}}"
        )
    for name, column in columns.items():
        if name not in COLUMNS:
            listed = ", ".join(COLUMNS)
            raise InputError(
                f"prompts.columns.{name}: there is no such shape; columns can be named for {listed}"
            )
        if column is not None and not isinstance(column, str):
            raise InputError(f"prompts.columns.{name}={shown(column)}: needs the name of a column")
    return {name: column for name, column in columns.items() if column is not None}


def _sha256(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _file_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        head = file.read(4)
    if head == b"PAR1":
        return _parquet_rows(path)
    return _json_rows(path, packed=head[:2] == b"\x1f\x8b")


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise InputError(f"{path} cannot be read as parquet: {first_line(error)}") from error


def _json_rows(path: Path, *, packed: bool) -> Iterator[tuple[int, Any]]:
    with gzip.open(path, "rb") if packed else path.open("rb") as file:
        first = b""
        while not first.strip(b"\xef\xbb\xbf \t\r\n"):
            line = file.readline(_LONGEST_LINE)
            if not line:
                return
            first = line
        if first.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            file.seek(0)
            try:
                text = bytearray()
                while part := file.read(1 << 20):
                    text += part
                    if len(text) > _LONGEST_ARRAY:
                        raise InputError(
                            f"{path} is a JSON array of more than {_LONGEST_ARRAY} bytes: write "
                            f"one object a line"
                        )
                rows = json.loads(text.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"{path} begins like a JSON array but cannot be read: {error}"
                ) from error
            yield from enumerate(rows, start=1)
            return
        file.seek(0)
        for number, read in enumerate(_lines(file), start=1):
            if read is None:
                yield number, _Unusable(f"a line of more than {_LONGEST_LINE} bytes")
                continue
            if number == 1:
                read = read.removeprefix(b"\xef\xbb\xbf")
            if read.strip():
                yield number, _json_row(read)


def _lines(file: Any) -> Iterator[bytes | None]:
    """Lines of a file; None for one that is too long to be held."""
    while line := file.readline(_LONGEST_LINE):
        if len(line) < _LONGEST_LINE or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(_LONGEST_LINE)
        yield None


def _json_row(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"), object_pairs_hook=_once)
    except UnicodeDecodeError:
        return _Unusable("not UTF-8: save the file as UTF-8")
    except _Twice as error:
        return _Unusable(f"key {error} is given twice")
    except (ValueError, RecursionError):
        return _Unusable("not JSON: one object or string a line")


class _Twice(ValueError):
    pass


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Twice(next(key for key in keys if keys.count(key) > 1))
    return found
