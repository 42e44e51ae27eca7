"""Folders that several processes fill, and go on filling after a kill: settings, journals, and who
is still at work."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from drafttrain.checks import path_of
from drafttrain.data.conversations import MANIFEST
from drafttrain.data.journal import LOCKS, Lines, is_journal, is_locked, journal_path, journals
from drafttrain.errors import InputError
from drafttrain.files import write_json
from drafttrain.runs import differences

SETTINGS = "settings.json"
GRACE = 20.0 if LOCKS else 600.0
"""Seconds without a living writer, or a new line from it, after which its work is given up."""
_LARGEST_SETTINGS = 64 << 20


class GrowingFolder:
    """An output folder while it is filled: settings.json, a journal of each process, and what a
    kind of folder adds to them."""

    parts: ClassVar[tuple[str, ...]]
    """What settings.json and the manifest both say; what is written under other settings is never
    mixed in."""

    def __init__(self, path: str | Path) -> None:
        self.path = path_of("out", path) if str(path) else Path()

    def belongs(self, name: str) -> bool:
        """May such a file be in the folder?"""
        return name in (SETTINGS, MANIFEST) or is_journal(name)

    def check(self, *, resume: bool) -> list[str]:
        """Names of what is there. Raises InputError if the folder cannot be written to, holds
        foreign files, or may not be continued.

        Args:
            resume: whether to continue what is there.
        """
        if not self.path.exists():
            return []
        if not self.path.is_dir():
            raise InputError(f"out={self.path} is a file: give a folder")
        # An empty journal is what a run leaves that was refused before it wrote anything.
        names = sorted(
            p.name
            for p in self.path.iterdir()
            if not p.name.startswith(".") and not (is_journal(p.name) and p.stat().st_size == 0)
        )
        foreign = [name for name in names if not self.belongs(name)]
        if foreign:
            listed = ", ".join(foreign[:5]) + (
                f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
            )
            raise InputError(
                f"out={self.path} holds other files ({listed}): give a folder of its own"
            )
        if names and not resume:
            raise InputError(
                f"out={self.path} is not empty and resume=false: give another folder, or "
                "resume=true"
            )
        return names

    def create(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"out={self.path} cannot be made: {error.strerror}") from error

    def recorded(self) -> dict[str, Any] | None:
        """Settings that the folder's work was made with; None in a new folder."""
        for name in (SETTINGS, MANIFEST):
            path = self.path / name
            if not path.is_file():
                continue
            try:
                if path.stat().st_size > _LARGEST_SETTINGS:
                    raise ValueError(f"it has {path.stat().st_size} bytes")
                found = json.loads(path.read_bytes())
            except (ValueError, RecursionError, OSError) as error:
                raise InputError(
                    f"{path} cannot be read ({error}): give another out folder"
                ) from error
            if not isinstance(found, dict) or not all(
                isinstance(found.get(part), dict) for part in self.parts
            ):
                raise InputError(
                    f"{path} does not say how its rows were made ({', '.join(self.parts)}): give "
                    "another folder"
                )
            marks = found["target"].get("fingerprint") if "target" in self.parts else {}
            if not isinstance(marks, dict) or not all(
                isinstance(value, str) for value in marks.values()
            ):
                raise InputError(
                    f"{path} does not say which target wrote its rows (target.fingerprint): give "
                    "another folder"
                )
            return {part: found[part] for part in self.parts}
        return None

    def compare(self, settings: dict[str, Any]) -> None:
        """Raise InputError listing what differs from the settings that the folder's work was made
        with.

        Args:
            settings: some or all parts.
        """
        there = self.recorded()
        changed = (
            {} if there is None else differences({part: there[part] for part in settings}, settings)
        )
        if changed:
            listed = "; ".join(
                f"{key} was {before}, is {now}" for key, (before, now) in changed.items()
            )
            raise InputError(
                f"out={self.path} holds rows made otherwise ({listed}): give another folder, or "
                "these settings"
            )

    def record(self, settings: dict[str, Any]) -> None:
        write_json(self.path / SETTINGS, {part: settings[part] for part in self.parts})

    def await_settings(self, say: Callable[[str], None], seconds: float = 600.0) -> dict[str, Any]:
        """Other processes: what rank 0 recorded. Raises InputError when rank 0 is gone or stays
        silent."""
        began = reported = time.monotonic()
        free = 0.0
        while True:
            found = self.recorded()
            if found is not None:
                return found
            now = time.monotonic()
            free = 0.0 if is_locked(self.journal_of(0)) else free or now
            if now - began > seconds or (LOCKS and free and now - free > 20):
                raise InputError(f"rank 0 has stopped before it wrote {self.path / SETTINGS}")
            if now - reported > 30:
                say(f"waits for rank 0 to load the target ({self.path / SETTINGS})")
                reported = now
            time.sleep(0.2)

    def journal_of(self, rank: int) -> Path:
        return journal_path(self.path, rank)

    def open_journal(self, rank: int) -> Lines:
        return Lines(self.path, rank)

    def await_work(
        self,
        missing: Callable[[], set[int]],
        world: int,
        say: Callable[[str], None],
        *,
        what: str,
        grace: float = GRACE,
    ) -> None:
        """Rank 0: wait until nothing is missing, whoever does it.

        Args:
            missing: numbers of what is not there yet; asked whenever a journal has grown. Process r
                does those with number % world == r.
            what: the numbered things, in the plural.
            grace: see GRACE.
        Raises: InputError naming a process that has stopped before its share was done.
        """
        seen: list[tuple[str, int]] | None = None
        lacking: set[int] = set()
        last_alive: dict[int, float] = {}
        reported = time.monotonic()
        while True:
            sizes = [(path.name, path.stat().st_size) for path in journals(self.path)]
            if sizes != seen:
                lacking = missing()
                grown = {name for name, size in sizes if (name, size) not in (seen or ())}
                seen = sizes
            else:
                grown = set()
            if not lacking:
                return
            now = time.monotonic()
            late = sorted({number % world for number in lacking})
            for rank in late:
                path = self.journal_of(rank)
                if is_locked(path) or path.name in grown:
                    last_alive[rank] = now
                if now - last_alive.setdefault(rank, now) > grace:
                    count = sum(number % world == rank for number in lacking)
                    raise InputError(
                        f"process {rank} has stopped, {count} of its {what} are missing: run the "
                        "same command again, it writes only what is missing"
                    )
            if now - reported > 30:
                say(f"waits for {len(lacking)} {what} of process {', '.join(map(str, late))}")
                reported = now
            time.sleep(0.5)
