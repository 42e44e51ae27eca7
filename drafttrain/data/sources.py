"""Several sources of rows in one order, any stretch of which has of each source its share.

Row numbers follow that order. So whatever takes the first rows, the last ones or those after others
(a limit, the held-out split, what is set aside) takes from all sources in proportion.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

_TEXTS = (".jsonl", ".ndjson", ".json")
ENDINGS = (*_TEXTS, *(f"{ending}.gz" for ending in _TEXTS), ".parquet")
"""Of files of rows, in lower case; upper case is read too."""
_SHARD = re.compile(r"[-_.](\d{5})-of-(\d{5})")


def drawn(sizes: Sequence[int], seed: int) -> list[tuple[int, int]]:
    """(source, place in it) of every row. Which rows of a source come first is drawn by the seed;
    at any place of the list, of each source its share has come, but for less than a row."""
    keyed = []
    for source, size in enumerate(sizes):
        chance = random.Random(f"{seed}/{source}/sources")
        places = list(range(size))
        chance.shuffle(places)
        start = chance.random()
        keyed += [((turn + start) / size, source, place) for turn, place in enumerate(places)]
    return [(source, place) for _, source, place in sorted(keyed)]


@dataclass(frozen=True)
class Found:
    """What is in a folder and in those below it."""

    files: list[Path]
    """Those of rows, by name."""
    passed_over: tuple[str, ...]
    """What else is there, in words."""


def files_of(folder: Path) -> Found:
    """The files of rows in a folder and in those below it, links followed. A folder or file is read
    once, under its own name where it is below by itself; hidden files and folders are not read.

    Raises: OSError for a folder that cannot be read.
    """
    files: list[Path] = []
    left: dict[str, list[Path]] = {}
    seen: set[str] = set()
    below, links = [folder], list[Path]()
    while below or links:
        place = below.pop() if below else links.pop(0)
        if os.path.realpath(place) in seen:
            left.setdefault("links to folders that are read anyway", []).append(place)
            continue
        seen.add(os.path.realpath(place))
        for path in sorted(place.iterdir()):
            is_rows = path.name.lower().endswith(ENDINGS)
            if path.name.startswith("."):
                if is_rows:
                    left.setdefault("hidden files", []).append(path)
            elif path.is_dir():
                (links if path.is_symlink() else below).append(path)
            elif not is_rows:
                left.setdefault("files with other endings", []).append(path)
            elif path.is_file():
                files.append(path)
            else:
                left.setdefault("links that lead to no file", []).append(path)
    files, again = _once(files)
    if again:
        left["links to files that are read anyway"] = again
    words = [f"{len(paths)} {why} ({_names(paths, folder)})" for why, paths in left.items()]
    return Found(files, (*words, *_lacking(files, folder)))


def _once(files: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """The files, by name, and the links that lead to one of these."""
    named: dict[str, Path] = {}
    again = []
    for path in sorted(files, key=lambda path: (path.is_symlink(), path)):
        if named.setdefault(os.path.realpath(path), path) is not path:
            again.append(path)
    return sorted(named.values()), again


def _lacking(files: Sequence[Path], folder: Path) -> list[str]:
    """The shards that their neighbours' names count and that are not there, in words."""
    found: dict[tuple[str, int], set[int]] = {}
    for path in files:
        name = str(path.relative_to(folder))
        if match := _SHARD.search(name):
            whole = f"{name[: match.start()]}{name[match.end() :]}", int(match.group(2))
            found.setdefault(whole, set()).add(int(match.group(1)))
    return [
        f"{count - len(here)} of {count} shards of {name}, which are not there"
        for (name, count), here in sorted(found.items())
        if len(here) < count
    ]


def _names(paths: Sequence[Path], folder: Path, limit: int = 5) -> str:
    names = sorted(str(path.relative_to(folder)) for path in paths)
    return ", ".join(names[:limit]) + f" and {len(names) - limit} more" * (len(names) > limit)


def by_source(files: Iterable[str], folder: Path) -> dict[str, list[str]]:
    """{name of a source: its files}; the shards of a file (a-00000-of-00002.parquet) are one."""
    found: dict[str, list[str]] = {}
    for file in files:
        path = PurePath(file)
        name = str(path.relative_to(folder)) if path.is_relative_to(folder) else path.name
        found.setdefault(_SHARD.sub("", name), []).append(file)
    return found
