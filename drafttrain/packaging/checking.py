"""Checks of files: JSON without surprises, exact keys, the nearest valid name for a misspelt
one."""

from __future__ import annotations

import difflib
import json
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from drafttrain.errors import InputError


def check_keys(found: Any, known: Iterable[str], what: str, optional: Iterable[str] = ()) -> None:
    """Raise InputError unless `found` is a mapping with exactly the known keys, and any of the
    optional ones."""
    needed = list(known)
    names = [*needed, *optional]
    if not isinstance(found, dict):
        raise InputError(
            f"{what} is {type(found).__name__}, needs a mapping with {', '.join(names)}"
        )
    odd = [str(key) for key in found if key not in names]
    if odd:
        near = difflib.get_close_matches(odd[0], names, 1, 0.6)
        hint = f", did you mean {near[0]}?" if near else "."
        raise InputError(
            f"{what} has an unknown key {odd[0][:80]!r}{hint} It takes: "
            f"{', '.join(names) or 'none'}"
        )
    lacking = [name for name in needed if name not in found]
    if lacking:
        raise InputError(f"{what} lacks {', '.join(lacking)}; nothing is guessed in its place")


def check_regular(path: Path) -> None:
    """Raise InputError unless a path leads to a regular file: opening a pipe may wait for ever, and
    a device has no end."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise InputError(f"{path} is no regular file: put the file itself in its place")


def read_json(path: Path, largest: int, what: str) -> Any:
    """A JSON file in which every key occurs once and every number is finite.

    Args:
        largest: bytes that it may have.
        what: what it should be, such as "a package's config".
    Raises: InputError.
    """
    check_regular(path)
    try:
        if (size := path.stat().st_size) > largest:
            raise InputError(f"{path} has {size} bytes: not {what}")
        return json.loads(path.read_bytes(), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def check_characters(found: Any, path: Path) -> Any:
    """What was read from JSON, if all of it could be written as UTF-8; raises InputError for half a
    surrogate pair, as \\ud800."""
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.start + 1]
        raise InputError(
            f"{path} holds half a character ({half!a}): it is damaged, get it again"
        ) from error
    return found


def some(names: Iterable[str], limit: int = 8) -> str:
    """The first names, and how many more there are."""
    listed = [str(name)[:160] for name in names]
    return ", ".join(listed[:limit]) + (
        f" and {len(listed) - limit} more" if len(listed) > limit else ""
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:80]!r} occurs there twice")
        found[key] = value
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number")
