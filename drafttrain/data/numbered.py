"""Rows of a source by their numbers: what it holds, what was left out of it, and where a person
finds a row: in which file, and on which line of it."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drafttrain.data.arguments import RESERVED
from drafttrain.data.shapes import Prompt, reads
from drafttrain.data.sources import drawn
from drafttrain.data.template import ChatPieces, spelt_tokens
from drafttrain.errors import InputError

TEXT = "text"
"""Kind of a source of texts that are continued."""


@dataclass(frozen=True)
class Skipped:
    """A row that cannot be used."""

    row: int
    reason: str
    messages: tuple[tuple[str, str], ...] = ()
    """(role, content) of its turns where they could be read; a chat template may have a word to say
    about them."""
    file: str = ""
    """Where there are several files or sources: the one in which the row has this number."""


@dataclass
class FileRows:
    """Which rows of a source are in one of its files."""

    name: str
    before: int
    """Rows of the files before it."""
    last: int
    """Number in the source of its last row that was read."""


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
    files: dict[str, list[FileRows]] = field(default_factory=dict)
    """{source that is in several files: these, as far as they were read}; "" is the only source."""
    passed_over: tuple[str, ...] = ()
    """What is in a folder and was not read, in words."""
    category: dict[int, str] = field(default_factory=dict)
    """The kind of task of a row, where it is named."""
    overlooked: dict[str, list[int]] = field(default_factory=dict)
    """{what a row says besides and is not read: numbers of such rows}"""
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
        file, number = self.place(row)
        self.skipped.append(Skipped(number, reason, file=file))

    def place(self, row: int) -> tuple[str, int]:
        """The file or source of a row, empty where there is one, and the row's number in it."""
        return self._in_file(*self.origin.get(row, ("", row)))

    def _in_file(self, source: str, number: int) -> tuple[str, int]:
        for file in self.files.get(source, ()):
            if file.before < number <= file.last:
                return file.name, number - file.before
        return source, number

    def with_files(self) -> Prompts:
        """The same, whose skipped rows have the numbers in their files, not in their sources."""
        for place, item in enumerate(self.skipped):
            file, number = self._in_file(item.file, item.row)
            self.skipped[place] = dataclasses.replace(item, file=file, row=number)
        return self

    def places(self, rows: Iterable[int]) -> str:
        """Rows as a person finds them: their numbers, or those in each file."""
        found: dict[str, list[int]] = {}
        for row in rows:
            file, number = self.place(row)
            found.setdefault(file, []).append(number)
        return "; ".join(f"{file} {some(found[file])}".strip() for file in sorted(found))

    def by_file(self, found: Mapping[str, Iterable[int]]) -> dict[str, list[int]]:
        """{what was found: rows} -> the same by the numbers in their files, which are named where
        there are several."""
        listed: dict[str, list[int]] = {}
        for what, rows in found.items():
            for file, number in sorted(map(self.place, rows)):
                listed.setdefault(_of(what, file), []).append(number)
        return listed

    def counts(self, rows: Iterable[int]) -> dict[str, int]:
        """Rows by source, where there are several."""
        return dict(Counter(self.origin[row][0] for row in sorted(rows) if row in self.origin))


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
    besides = {name: _by_row(part.overlooked) for name, part in parts.items()}
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
            found.skipped.append(dataclasses.replace(skipped[name][number], file=name))
        else:
            found.rows.append((row, prompts[name][number]))
            if number in parts[name].category:
                found.category[row] = parts[name].category[number]
            for what in besides[name].get(number, ()):
                found.overlooked.setdefault(what, []).append(row)
    found.files = {name: part.files[""] for name, part in parts.items() if part.files}
    found.first_keys = next((part.first_keys for part in parts.values() if part.first_keys), ())
    return found.with_files()


def _by_row(found: Mapping[str, Sequence[int]]) -> dict[int, list[str]]:
    rows: dict[int, list[str]] = {}
    for what, numbers in found.items():
        for row in numbers:
            rows.setdefault(row, []).append(what)
    return rows


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
    """{reason: row numbers}, the most frequent reason first; where there are several files, a
    reason names its own."""
    found: dict[str, list[int]] = {}
    for item in skipped:
        found.setdefault(_of(item.reason, item.file), []).append(item.row)
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


def _of(what: str, file: str) -> str:
    return f"{what}, in {file}" if file else what


def unread_columns(prompts: Prompts, pieces: ChatPieces) -> dict[str, list[int]]:
    """{argument that rows bring and the chat template does not read: row numbers}."""
    found: dict[str, list[int]] = {}
    for row, prompt in prompts.rows:
        if prompt is not None and prompt.arguments:
            for name in pieces.given(prompt.arguments).unread(prompt.arguments):
                found.setdefault(name, []).append(row)
    return found


def not_given(prompts: Prompts, pieces: ChatPieces) -> list[str]:
    """Columns of the first row that are not given to the chat template, though it looks up such
    names."""
    read = reads(prompts.source.get("columns", {})) | RESERVED
    names = [name for name in prompts.first_keys if name not in read]
    unread = pieces.unread(names) if names else []
    return [name for name in names if name != "chat_template" and name not in unread]


def spelt_by_rows(prompts: Prompts, tokenizer: Any) -> dict[str, list[int]]:
    """{control token that the text of rows spells: row numbers}; see `spelt_tokens`."""
    found: dict[str, list[int]] = {}
    for row, prompt in prompts.rows:
        if prompt is not None:
            more = json.dumps(prompt.arguments, ensure_ascii=False) if prompt.arguments else ""
            text = "\n".join((*prompt.users, prompt.system or "", more))
            for token in spelt_tokens(tokenizer, text):
                found.setdefault(token, []).append(row)
    return found


def account(prompts: Prompts, tokenizer: Any) -> dict[str, Any]:
    """What a set's manifest says of its prompts: rows that were left out, and what is in rows or
    next to them that somebody may miss."""
    unread = {} if prompts.texts else unread_columns(prompts, ChatPieces(tokenizer, ()))
    return {
        "skipped": by_reason(prompts.skipped),
        "columns_not_read": prompts.by_file(unread),
        "overlooked": prompts.by_file(prompts.overlooked),
        "control_tokens_spelt": prompts.by_file(spelt_by_rows(prompts, tokenizer)),
        "files_not_read": list(prompts.passed_over),
    }


def some(rows: list[int], limit: int = 10) -> str:
    """The first row numbers, in order."""
    listed = ", ".join(map(str, sorted(rows)[:limit]))
    return listed + (f" and {len(rows) - limit} more" if len(rows) > limit else "")
