"""Checks of single settings: numbers, and paths as a person writes them."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from drafttrain.errors import InputError

MOST = (1 << 31) - 1
"""Of any count: more than a run needs, and few enough for every library below."""


def integer(name: str, value: object, least: int = 0, most: int = MOST, *, null: str = "") -> None:
    """Raise InputError unless a setting is an integer within bounds.

    Args:
        name: as it is written on the command line.
        null: what null means, where it may be given.
    """
    if (value is None and null) or (type(value) is int and least <= value <= most):
        return
    bounds = (
        f"of at least {least}"
        if most == MOST and not (type(value) is int and value > most)
        else f"from {least} to {most}"
    )
    raise InputError(
        f"{name}={shown(value)}: needs an integer {bounds}"
        + (f", or null for {null}" if null else "")
    )


def number(
    name: str, value: object, *, above: float | None = None, least: float = 0.0, null: str = ""
) -> None:
    """Raise InputError unless a setting is a finite number of at least `least`, or above `above`
    where that is given."""
    if value is None and null:
        return
    fits = (type(value) is float and math.isfinite(value)) or (
        type(value) is int and abs(value) < 1 << 1000
    )
    if fits and (value > above if above is not None else value >= least):  # type: ignore[operator]
        return
    bounds = f"above {above:g}" if above is not None else f"of at least {least:g}"
    raise InputError(
        f"{name}={shown(value)}: needs a finite number {bounds}"
        + (f", or null for {null}" if null else "")
    )


def switch(name: str, value: object) -> None:
    """Raise InputError unless a setting is true or false: a word such as `no` would count as
    true."""
    if not isinstance(value, bool):
        raise InputError(f"{name}={shown(value)}: needs true or false")


def path_of(name: str, given: object) -> Path:
    """A path as a person writes it, with ~ for the home folder. Whether it exists is not checked.

    Raises: InputError for what can be no path here.
    """
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise InputError(
            f"{name}={shown(given)}: needs a path; one that looks like a number needs quotes: "
            f"'{name}=\"2024\"'"
        )
    try:
        os.fspath(given).encode()
        path = Path(given).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise InputError(f"{name}={shown(given)}: {error.strerror}") from error
    except UnicodeEncodeError as error:
        raise InputError(f"{name}={shown(given)} is not UTF-8: give a path that is") from error
    except (RuntimeError, ValueError) as error:  # Nobody of that name has a home folder; a NUL.
        raise InputError(f"{name}={shown(given)} can be no path: {error}") from error
    return path


def shown(value: object) -> str:
    """A value as messages show it."""
    return str(value)[:80]


def check_ids(given: object, vocab_size: int | None = None) -> None:
    """Raise InputError unless a draft vocabulary is None, or ids of the target by rising number.

    Args:
        vocab_size: the target's; None where it is not known yet.
    """
    if given is None:
        return
    end = "the target's vocabulary" if vocab_size is None else vocab_size - 1
    needs = f"needs ids of the target, from 0 to {end}, each once and rising"
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise InputError(f"drafter.draft_ids={shown(given)}: {needs}")
    before = -1
    for token in given:
        if type(token) is not int or token < 0 or (vocab_size is not None and token >= vocab_size):
            raise InputError(f"drafter.draft_ids holds {shown(token)}: {needs}")
        if token <= before:
            raise InputError(f"drafter.draft_ids holds {token} after {before}: {needs}")
        before = token
