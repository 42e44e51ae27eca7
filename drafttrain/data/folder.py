"""The folder a set grows in: its settings, the journals of the processes that write it, and the set itself.

settings.json                target fingerprint, prompts and sampling; rows of other settings are never mixed in
journal-0000.jsonl, ...      finished rows, one file a process, while the set is being made
conversations.safetensors, manifest.json     the set, once every row is there; the journals are then removed
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from drafttrain.checks import path_of
from drafttrain.data.conversations import (
    LOCKS,
    MANIFEST,
    TENSORS,
    ConversationSet,
    Journal,
    Row,
    is_locked,
    journal_path,
    journals,
    read_journals,
    read_set,
    rows_of,
    write_journal,
    write_json,
    write_set,
)
from drafttrain.errors import InputError

SETTINGS = "settings.json"
BASE = "journal-base.jsonl"
PARTS = ("target", "prompts", "writing")
"""What settings.json and the manifest both say; rows of one set agree in all of it."""


class SetFolder:
    """What lies in an output folder, and what is still to be written."""

    def __init__(self, path: str | Path) -> None:
        self.path = path_of("out", path) if str(path) else Path()

    def check(self, *, resume: bool, adopt: bool) -> None:
        """Raise InputError if the folder cannot be written to, holds foreign files, or may not be continued.

        Args:
            resume: whether to continue what lies there.
            adopt: whether journals without settings are taken as made with the settings at hand.
        """
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise InputError(f"out={self.path} is a file: give a folder")
        # An empty journal is what a run leaves that was refused before its first row.
        names = sorted(
            p.name
            for p in self.path.iterdir()
            if not p.name.startswith(".") and not (_is_journal(p.name) and p.stat().st_size == 0)
        )
        foreign = [n for n in names if n not in (SETTINGS, MANIFEST, TENSORS) and not _is_journal(n)]
        if foreign:
            listed = ", ".join(foreign[:5]) + (f" and {len(foreign) - 5} more" if len(foreign) > 5 else "")
            raise InputError(f"out={self.path} holds other files ({listed}): give a folder of its own")
        if names and not resume:
            raise InputError(f"out={self.path} is not empty and resume=false: give another folder, or resume=true")
        if any(map(_is_journal, names)) and SETTINGS not in names and MANIFEST not in names and not adopt:
            raise InputError(
                f"out={self.path} holds journals without {SETTINGS}: if they were made with these very settings and "
                "this target, take them over with adopt=true; else give another folder"
            )

    def create(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"out={self.path} cannot be made: {error.strerror}") from error

    def recorded(self) -> dict[str, Any] | None:
        """Settings that the rows there were made with; None in a fresh folder."""
        for name in (SETTINGS, MANIFEST):
            path = self.path / name
            if not path.is_file():
                continue
            try:
                found = json.loads(path.read_bytes())
            except (ValueError, RecursionError, OSError) as error:
                raise InputError(f"{path} cannot be read ({error}): give another out folder") from error
            if not isinstance(found, dict) or not all(isinstance(found.get(part), dict) for part in PARTS):
                raise InputError(
                    f"{path} does not say how its rows were made ({', '.join(PARTS)}): give another folder"
                )
            marks = found["target"].get("fingerprint")
            if not isinstance(marks, dict) or not all(isinstance(value, str) for value in marks.values()):
                raise InputError(f"{path} does not say which target wrote its rows (target.fingerprint): give another folder")
            return {part: found[part] for part in PARTS}
        return None

    def record(self, settings: dict[str, Any]) -> None:
        write_json(self.path / SETTINGS, {part: settings[part] for part in PARTS})

    def await_settings(self, say: Callable[[str], None], seconds: float = 600.0) -> dict[str, Any]:
        """Other processes: what rank 0 recorded. Raises InputError when rank 0 is gone or stays silent."""
        began = told = time.monotonic()
        free = 0.0
        while True:
            found = self.recorded()
            if found is not None:
                return found
            now = time.monotonic()
            free = 0.0 if is_locked(self.journal_of(0)) else free or now
            if now - began > seconds or (LOCKS and free and now - free > 20):
                raise InputError(f"rank 0 has stopped before it wrote {self.path / SETTINGS}")
            if now - told > 30:
                say(f"waits for rank 0 to load the target ({self.path / SETTINGS})")
                told = now
            time.sleep(0.2)

    def current(self) -> ConversationSet | None:
        """The finished set, if there is one. Raises InputError if it is damaged."""
        if not (self.path / TENSORS).exists() and not (self.path / MANIFEST).exists():
            return None
        return read_set(self.path)

    def finished(self) -> tuple[dict[int, Row], dict[int, str]]:
        """Rows written and rows skipped (with the reason), in journals and in the set."""
        for attempt in range(3):
            rows, skipped = read_journals(self.path)
            try:
                found = self.current()
                break
            except InputError:
                # Rank 0 may just be replacing it, or was killed doing so; the journals are whole then.
                if rows and attempt == 2:
                    return rows, skipped
                if attempt == 2:
                    raise
                time.sleep(0.5)
        if found is not None:
            for row in rows_of(found):
                rows.setdefault(row.row, row)
            for reason, numbers in _skipped_of(found).items():
                for number in numbers:
                    if number not in rows:
                        skipped.setdefault(number, reason)
        return rows, skipped

    def reopen(self, rows: Iterable[Row], skipped: dict[int, str]) -> None:
        """Before rows are added to a finished set: keep its rows as a journal, until the next set is whole."""
        if (self.path / MANIFEST).exists() and not (self.path / BASE).exists():
            write_journal(self.path / BASE, rows, skipped)

    def journal_of(self, rank: int) -> Path:
        return journal_path(self.path, rank)

    def open_journal(self, rank: int) -> Journal:
        return Journal(self.path, rank)

    def await_rows(
        self, wanted: set[int], world: int, say: Callable[[str], None], *, grace: float = 20.0 if LOCKS else 600.0
    ) -> tuple[dict[int, Row], dict[int, str]]:
        """Rank 0: wait until every wanted row is finished, whoever writes it.

        Args:
            wanted: row numbers; rank r writes those with row % world == r.
            grace: seconds without a living writer, or a new row from it, after which its rows are given up.
        Raises: InputError naming a process that has stopped before its rows were finished.
        """
        seen: list[tuple[str, int]] | None = None
        missing: set[int] = set()
        last_alive: dict[int, float] = {}
        told = time.monotonic()
        while True:
            sizes = [(path.name, path.stat().st_size) for path in journals(self.path)]
            if sizes != seen:
                rows, skipped = self.finished()
                missing = wanted - rows.keys() - skipped.keys()
                grown = {name for name, size in sizes if (name, size) not in (seen or ())}
                seen = sizes
            else:
                grown = set()
            if not missing:
                return rows, skipped
            now = time.monotonic()
            late = sorted({row % world for row in missing})
            for rank in late:
                path = self.journal_of(rank)
                if is_locked(path) or path.name in grown:
                    last_alive[rank] = now
                if now - last_alive.setdefault(rank, now) > grace:
                    count = sum(row % world == rank for row in missing)
                    raise InputError(
                        f"process {rank} has stopped, {count} of its rows are missing: run the same command again, it "
                        "writes only what is missing"
                    )
            if now - told > 30:
                say(f"waits for {len(missing)} rows of process {', '.join(map(str, late))}")
                told = now
            time.sleep(0.5)

    def write(self, rows: Iterable[Row], manifest: dict[str, Any], *, held_out: int) -> dict[str, Any]:
        """The set, in place of an earlier one. Returns its manifest."""
        return write_set(self.path, rows, manifest=manifest, held_out=held_out)

    def clear(self) -> None:
        """Remove what the finished set no longer needs: journals, and scratch files that a kill left."""
        for path in (*journals(self.path), *self.path.glob(".*")):
            if _is_journal(path.name) or path.name.startswith(
                (f".{TENSORS}-", f".{MANIFEST}-", f".{SETTINGS}-", ".journal-")
            ):
                path.unlink(missing_ok=True)

    @property
    def size(self) -> int:
        """Bytes of the set."""
        return sum((self.path / name).stat().st_size for name in (TENSORS, MANIFEST))


def _is_journal(name: str) -> bool:
    return name.startswith("journal-") and name.endswith(".jsonl")


def _skipped_of(data: ConversationSet) -> dict[str, list[int]]:
    """{reason: row numbers} that the target could not write."""
    found = data.manifest.get("not_written", {})
    return {
        str(reason): [n for n in numbers if isinstance(n, int)]
        for reason, numbers in (found.items() if isinstance(found, dict) else ())
        if isinstance(numbers, list)
    }
