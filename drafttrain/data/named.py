"""Columns of a set that hold one of a few names for every row: where a row comes from, what kind of
task it is. Kept as places in a list of names, which is in the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

NO_CATEGORY = "(none)"
"""Counted for rows that name no kind of task."""
MOST_CATEGORIES = 1000
"""Where there are more, they are no kinds."""


def encoded(names: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """One name a row -> the names in order, and each row's place among them (uint16)."""
    listed = sorted(set(names))
    place = {name: number for number, name in enumerate(listed)}
    return listed, np.asarray([place[name] for name in names], dtype=np.uint16)


def kinds(names: Sequence[str]) -> tuple[list[str], str]:
    """The kinds of task of some prompts, none of them where they are too many to be kinds; and what
    a person should know of that, empty where nothing."""
    given = len({*names} - {NO_CATEGORY})
    if given > MOST_CATEGORIES:
        return [], (
            f"{given} categories, more than {MOST_CATEGORIES}: nothing is counted by kind of task"
        )
    without = names.count(NO_CATEGORY) if given else 0
    note = f"{without} of {len(names)} prompts name no kind of task, by kind they are {NO_CATEGORY}"
    return list(names), note if without else ""


def fault(names: Any, places: np.ndarray, rows: int) -> str:
    """Why a column cannot be what `encoded` made; empty where it can."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return "no list of names"
    if places.shape != (rows,) or int(places.max()) >= len(names):
        return "a name of a row that there is none of"
    return ""


def counted(names: Sequence[str], places: np.ndarray, indices: Iterable[int]) -> dict[str, int]:
    """Rows by name, for the rows of these numbers."""
    counts = np.bincount(places[list(indices)], minlength=len(names))
    return dict(zip(names, counts.tolist(), strict=True))
