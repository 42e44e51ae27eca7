"""Journals of finished work: JSON lines, appended and flushed, one file a process. A kill loses
only what was being written."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar

try:
    import fcntl
except ImportError:  # Not on Windows; there, two runs in one folder are not noticed.
    fcntl = None  # type: ignore[assignment]

from drafttrain.errors import InputError, writing

T = TypeVar("T")

LOCKS = fcntl is not None


class Lines:
    """One process's journal, locked while the process lives."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder = folder
        self.path = journal_path(folder, rank)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = self._taken()
        self._heal()

    def _taken(self) -> TextIO:
        """Opened and locked. Whoever had the lock before may have removed the file as it ended:
        then there is a new one."""
        while True:
            file = self.path.open("a", encoding="utf-8")
            if not _lock(file):
                file.close()
                raise InputError(
                    f"{self.path} is being written by another process: wait for it, or give "
                    "another out folder"
                )
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                    return file
            file.close()

    def _heal(self) -> None:
        """Cut a last line that a kill left unfinished, so that the next append starts a line of its
        own."""
        data = self.path.read_bytes()
        if data and not data.endswith(b"\n"):
            os.truncate(self.path, data.rfind(b"\n") + 1)

    def write(self, record: dict[str, Any]) -> None:
        with writing(self.path):
            self._file.write(as_line(record))
            self._file.flush()

    def close(self) -> None:
        if self._file.closed:
            return
        with writing(self.path):
            os.fsync(self._file.fileno())
        empty = os.fstat(self._file.fileno()).st_size == 0
        self._file.close()
        if empty:
            self.path.unlink(missing_ok=True)


def as_line(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"


def journal_path(folder: Path, rank: int) -> Path:
    return folder / f"journal-{rank:04d}.jsonl"


def journals(folder: Path) -> list[Path]:
    return sorted(folder.glob("journal-*.jsonl"))


def is_journal(name: str) -> bool:
    return name.startswith("journal-") and name.endswith(".jsonl")


def records(folder: Path, parse: Callable[[Any], T], again: str) -> Iterator[T]:
    """What every journal of a folder holds.

    Args:
        parse: of one line's JSON value; raises ValueError saying what is wrong with it.
        again: what deleting a line leads to, for the message.
    Raises: InputError naming file and line of a record that no run of this program writes.
    """
    for path in journals(folder):
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break  # Unfinished: its writer was killed, or is just writing it.
                try:
                    found = parse(json.loads(line))
                except (ValueError, RecursionError) as error:
                    raise InputError(
                        f"{path}, line {number} is damaged ({error}): delete the line to have "
                        f"{again}"
                    ) from error
                yield found


def is_locked(path: Path) -> bool:
    """Does a living process write this journal?"""
    try:
        with path.open("rb") as file:
            return not _lock(file, patience=0)
    except OSError:
        return False


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """While it lasts, however it ends, no other process is in here for this folder; no file is made
    for it.

    Raises: InputError if one is.
    """
    handle = None
    with contextlib.suppress(OSError):  # Windows opens no folders.
        handle = os.open(folder, os.O_RDONLY)
    try:
        if handle is not None and not _lock(handle):
            raise InputError(
                f"{folder} is being written by another process: wait for it, or give another folder"
            )
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _lock(file: Any, patience: float = 2.0) -> bool:
    """Take the file until this process ends, however it ends; False if another has it.

    Args:
        patience: seconds to try for, since others take the lock for a moment to see whether it is
            free.
    """
    until = time.monotonic() + patience
    while fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.05)
        except OSError:
            break  # A file system without locks.
        else:
            break
    return True
