"""Checks of single settings: numbers, and paths as a person writes them."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

from drafttrain.errors import InputError

_PLAIN = re.compile(r"[\w./:-]+", re.ASCII)
"""Text that needs no quotes on a command line."""
_NO_TEXT = re.compile(r"[-+.]?\d|(?:null|true|false|[-+]?(?:nan|inf))$", re.IGNORECASE)
"""Without quotes it would be read as a number, null, true or false."""
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


def is_count(value: object, most: float = math.inf) -> TypeGuard[int]:
    """Is a value from a file an integer of at least 0, less than `most`?"""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < most


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
        example = pasted(name, str(given) if isinstance(given, int | float) else "2024")
        raise InputError(
            f"{name}={shown(given)}: needs a path; one that looks like a number needs quotes: "
            f"{example}"
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


def literal_text(value: str) -> str:
    """Text as OmegaConf must hold it to give the same text back: interpolation marks are data
    here."""
    return re.sub(r"(\\*)\$\{", lambda match: match.group(1) * 2 + r"\${", value)


def pasted(name: str, value: object) -> str:
    """A setting as a word to paste into a shell, whatever characters its value has.

    Args:
        value: text, a path, a number, true or false, None, or a list of these.
    """
    return shlex.quote(f"{name}={word_of(value)}")


def word_of(value: object) -> str:
    """A value as Hydra reads it; values as for `pasted`."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(word_of, value))}]"
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    text = str(value)
    if isinstance(value, int | float) or (_PLAIN.fullmatch(text) and not _NO_TEXT.match(text)):
        return text
    quoted = re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + r"\"" * bool(m[2]), literal_text(text))
    return f'"{quoted}"'


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
    bounds = "" if vocab_size is None else f", from 0 to {vocab_size - 1}"
    needs = f"needs ids of the target{bounds}, each once and rising"
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise InputError(f"drafter.draft_ids={shown(given)}: {needs}")
    before = -1
    for token in given:
        if type(token) is not int or token < 0 or (vocab_size is not None and token >= vocab_size):
            raise InputError(f"drafter.draft_ids holds {shown(token)}: {needs}")
        if token <= before:
            raise InputError(f"drafter.draft_ids holds {token} after {before}: {needs}")
        before = token


def replay_words(
    replay: object, folder: object, where: str = "", *, greedy: bool | None = None
) -> None:
    """Raise InputError for settings that do not say whether, and on which answers, acceptance is
    counted, and for answers that nothing would read.

    Args:
        where: what the settings' names begin with.
        greedy: is anything decoded at temperature 0? None: that is not asked here.
    """
    switch(f"{where}replay", replay)
    if folder is None:
        return
    path = path_of(f"{where}answers", folder)
    if not replay:
        raise InputError(f"{where}answers is read with {where}replay=true: leave one of them out")
    if greedy is False:
        raise InputError(
            f"{where}answers={shown(folder)} would not be read: answers are those at temperature "
            "0, and nothing is decoded at it here: leave it out"
        )
    if not path.is_dir():
        raise InputError(
            f"{where}answers={shown(folder)} is no folder: give that of a conversation set, or "
            "leave it out, then the answers are written here"
        )
