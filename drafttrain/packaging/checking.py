"""Checks of what files hold: exact keys, the nearest valid name for a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from drafttrain.errors import InputError


def check_keys(found: Any, known: Iterable[str], what: str, optional: Iterable[str] = ()) -> None:
    """Raise InputError unless `found` is a mapping with exactly the known keys, and any of the optional ones."""
    needed = list(known)
    names = [*needed, *optional]
    if not isinstance(found, dict):
        raise InputError(f"{what} is {type(found).__name__}, needs a mapping with {', '.join(names)}")
    odd = [str(key) for key in found if key not in names]
    if odd:
        near = difflib.get_close_matches(odd[0], names, 1, 0.6)
        hint = f", did you mean {near[0]}?" if near else ""
        raise InputError(f"{what} has an unknown key {odd[0][:80]!r}{hint} It takes: {', '.join(names) or 'none'}")
    lacking = [name for name in needed if name not in found]
    if lacking:
        raise InputError(f"{what} lacks {', '.join(lacking)}; nothing is guessed in its place")


def some(names: Iterable[str], limit: int = 8) -> str:
    """The first names, and how many more there are."""
    listed = [str(name)[:160] for name in names]
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")
