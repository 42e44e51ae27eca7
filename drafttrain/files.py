"""Files and folders that are written next to their place and moved there once they are complete.

`tempfile` closes what it makes to everybody else. What is made here has the modes that the umask
leaves: 0666 for files, 0777 for folders.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drafttrain.errors import writable, writing

_LONGEST = 40
"""Characters of a name that are kept in that of its scratch file."""


def new_folder(above: Path, name: str) -> Path:
    """A new empty hidden folder, named after what will be in it. Raises OSError."""
    while True:
        path = _hidden(above, name)
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path


def even_modes(folder: Path, *only: str) -> None:
    """Let all that is in a folder be read and written by whom the folder itself may be: libraries
    that write into it choose modes of their own.

    Args:
        only: names of files in it; without any, everything.
    """
    usual = folder.stat().st_mode & 0o777
    for path in [folder / name for name in only] or folder.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode & ~0o777 | (usual if path.is_dir() else usual & 0o666))


def write_atomic(path: Path, write: Callable[[Path], Any]) -> None:
    """Write next to the goal, then rename: a kill or a full disk leaves the old file intact."""
    with writing(path):
        scratch = _new_file(path)
    try:
        usual = stat.S_IMODE(scratch.stat().st_mode)
        with writing(path):
            write(scratch)
            with scratch.open("rb") as file:
                os.fsync(file.fileno())
        scratch.chmod(usual)  # The writer may have put a file of its own there.
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def json_text(value: Any) -> str:
    """Plain values as JSON. Raises ValueError for a number that JSON has not, such as NaN."""
    return writable(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Plain values as JSON; an earlier file is replaced at once."""
    text = writable(json.dumps(value, indent=2, ensure_ascii=False)) + "\n"
    write_atomic(path, lambda scratch: scratch.write_text(text, encoding="utf-8"))


def _new_file(path: Path) -> Path:
    while True:
        scratch = _hidden(path.parent, path.name)
        try:
            scratch.touch(exist_ok=False)
        except FileExistsError:
            continue
        return scratch


def _hidden(above: Path, name: str) -> Path:
    return above / f".{name[:_LONGEST]}-{secrets.token_hex(4)}"
