"""What a package says of its making, without the folders of the machine it was made on."""

from __future__ import annotations

import itertools
import re
import shlex
from typing import Any

from drafttrain.packaging.manifest import PACKAGE

_ROOT = r"(?:~[^\s/\\]*|[A-Za-z]:)?[/\\]"
_ONE_PATH = re.compile(rf"(?:file://)?{_ROOT}[^\n]*")
# Not where the characters before it make it a part of something else: a relative path, a hub id,
# an address, a fraction, markup.
_INSIDE = re.compile(rf"(?:file://|(?<![\w:/\\.~<-])){_ROOT}[^\s,'\"()\[\]{{}}=;|<>]+")

_HOMES = ("home", "Users")
"""Folders of folders that have the names of people."""


def portable(value: Any) -> Any:
    """A plain JSON value in which only the last name is left of every absolute path; relative
    paths, hub ids and addresses stay.

    A text under the key `command` is a command line: its words are looked at one by one, so a path
    with spaces is one path. A `fingerprint` stays as it is: it is compared, and names no folder.
    """
    if isinstance(value, dict):
        return {
            key: _command(held)
            if key == "command"
            else held
            if key == "fingerprint"
            else portable(held)
            for key, held in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [portable(held) for held in value]
    return _text(value) if isinstance(value, str) else value


def _text(text: str) -> str:
    if _ONE_PATH.fullmatch(text):
        return _name(text)
    return _INSIDE.sub(lambda found: _name(found.group()), text)


def _command(line: Any) -> Any:
    if not isinstance(line, str):
        return portable(line)
    try:
        words = shlex.split(line)
    except ValueError:
        return _text(line)
    return shlex.join(_word(word) for word in words)


def _word(word: str) -> str:
    """Of `key=<path>` only the path is changed; it may hold an `=` of its own."""
    key, sign, held = word.partition("=")
    return (
        f"{key}={_text(held)}"
        if sign and re.fullmatch(r"[\w.@/+~-]+", key) and not _ONE_PATH.fullmatch(word)
        else _text(word)
    )


def _name(path: str) -> str:
    """The last name; of a run's package the run's too, since all packages of runs have the same
    name. A home folder, which has the name of a person, is ~."""
    names = ["", *re.split(r"[/\\]", path.rstrip("/\\"))]
    named = [
        "~" if above in _HOMES or name.startswith("~") else name
        for above, name in itertools.pairwise(names)
    ]
    return (
        "/".join(named[-2:])
        if named[-1] == PACKAGE and named[-2:-1] not in ([], [""], ["~"])
        else named[-1]
    )
