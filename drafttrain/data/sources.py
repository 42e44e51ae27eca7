"""Several sources of rows in one order, any stretch of which has of each source its share.

Row numbers follow that order. So whatever takes the first rows, the last ones or those after others
(a limit, the held-out split, what is set aside) takes from all sources in proportion.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath

ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
_SHARD = re.compile(r"[-_.]\d{5}-of-\d{5}")


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


def files_of(folder: Path) -> list[Path]:
    """The files of rows in a folder and in those below it, by name; hidden ones are left out."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.name.endswith(ENDINGS)
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def by_source(files: Iterable[str], folder: Path) -> dict[str, list[str]]:
    """{name of a source: its files}; the shards of a file (a-00000-of-00002.parquet) are one."""
    found: dict[str, list[str]] = {}
    for file in files:
        path = PurePath(file)
        name = str(path.relative_to(folder)) if path.is_relative_to(folder) else path.name
        found.setdefault(_SHARD.sub("", name), []).append(file)
    return found
