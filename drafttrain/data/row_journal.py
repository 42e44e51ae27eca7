"""Finished rows of a set that is being written: a journal for each process, from which a run that
was killed goes on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from drafttrain.checks import is_count
from drafttrain.data.conversations import FINISH, Row
from drafttrain.data.journal import Lines, as_line, records
from drafttrain.files import write_atomic


class Journal(Lines):
    """Finished rows; `finished` reads what every process has written, so a resumed run skips it."""

    def add(self, row: Row) -> None:
        """Write a finished row at once."""
        self.write(_as_record(row))

    def skip(self, row: int, reason: str) -> None:
        """Note that a row was left out, and why."""
        self.write({"row": row, "skipped": reason})

    def finished(self) -> tuple[dict[int, Row], dict[int, str]]:
        """Rows written and rows skipped (with the reason) so far, over all processes."""
        return read_journals(self.folder)


def read_journals(folder: Path) -> tuple[dict[int, Row], dict[int, str]]:
    """Rows written and rows skipped (with the reason) in every journal of a folder; a row counts
    once.

    Raises: InputError naming file and line of a record that no run of this program writes.
    """
    rows: dict[int, Row] = {}
    skipped: dict[int, str] = {}
    for found in records(folder, _from_record, "its row written again"):
        if isinstance(found, Row):
            rows.setdefault(found.row, found)
        else:
            skipped.setdefault(*found)
    return rows, {row: reason for row, reason in skipped.items() if row not in rows}


def write_journal(path: Path, rows: Iterable[Row], skipped: dict[int, str]) -> None:
    """A complete journal at once, so that the rows of a finished set can be added to."""
    every = [
        *map(_as_record, rows),
        *({"row": row, "skipped": reason} for row, reason in skipped.items()),
    ]
    text = "".join(map(as_line, every))
    write_atomic(path, lambda scratch: scratch.write_text(text, encoding="utf-8"))


def _as_record(row: Row) -> dict[str, Any]:
    return {
        "row": row.row,
        "ids": row.ids,
        "spans": row.spans,
        "finish": row.finish,
        "temperature": row.temperature,
    }


def _from_record(record: Any) -> Row | tuple[int, str]:
    """Check a journal's record. Raises ValueError saying what is wrong with it."""
    if not isinstance(record, dict) or not _count(record.get("row")):
        raise ValueError("not an object with a row number")
    if "skipped" in record:
        if not isinstance(record["skipped"], str):
            raise ValueError("its reason is not text")
        return record["row"], record["skipped"]
    ids, spans, finish, temperature = (
        record.get(name) for name in ("ids", "spans", "finish", "temperature")
    )
    if not isinstance(ids, list) or not ids or not all(map(_count, ids)):
        raise ValueError("its ids are not a list of token ids")
    if not isinstance(spans, list) or not spans:
        raise ValueError("it has no answer")
    end = 0
    for span in spans:
        if not isinstance(span, list) or len(span) != 2 or not all(map(_count, span)):
            raise ValueError("an answer is not a pair of places")
        if not end <= span[0] < span[1] <= len(ids):
            raise ValueError("its answers are not within its ids")
        end = span[1]
    if (
        not isinstance(finish, list)
        or len(finish) != len(spans)
        or not all(reason in FINISH for reason in finish)
    ):
        raise ValueError(f"its answers do not each end by one of {', '.join(FINISH)}")
    if (
        not isinstance(temperature, float | int)
        or isinstance(temperature, bool)
        or not 0 <= temperature < 1e30
    ):
        raise ValueError("its temperature is not a number")
    return Row(
        record["row"],
        tuple(ids),
        tuple((a, b) for a, b in spans),
        tuple(finish),
        float(temperature),
    )


def _count(value: Any) -> bool:
    return is_count(value, 1 << 31)
