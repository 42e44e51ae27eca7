"""Trees and tables of numbers that a person keeps in a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from drafttrain.errors import InputError
from drafttrain.tree.topology import Tree

_LARGEST = 1 << 20
Table = list[list[float]]


def read_tree(path: str) -> Tree:
    """A tree from a JSON or YAML file.

    Either a list of paths of ranks, in any order, as the public code of Medusa and EAGLE lists them: [[0], [1], [0, 0]];
    or `parents`: [-1, -1, 0], nodes breadth first, -1 for children of the anchor.

    Raises: InputError naming the file and what is wrong in it.
    """
    found = _read(path)
    try:
        if isinstance(found, dict) and list(found) == ["parents"]:
            return Tree(tuple(_parents(found["parents"])))
        if not isinstance(found, list) or not all(isinstance(entry, list) for entry in found):
            raise InputError(
                f"holds {_what(found)}, needs a list of paths such as [[0], [1], [0, 0]], or {{parents: [-1, -1, 0]}}"
            )
        return Tree.from_paths(found)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def table(given: str | Sequence[Any], what: str) -> Table:
    """Rows of numbers between 0 and 1, given as they are or as the name of a JSON or YAML file; one row may come alone.

    Raises: InputError for anything else.
    """
    found, where = (_read(given), f"{given}: ") if isinstance(given, str) else (given, "")
    if not isinstance(found, list | tuple) or not found:
        raise InputError(f"{where}{what} are {_what(found)}, need a list of numbers, or of lists of numbers")
    rows = [found] if not any(isinstance(entry, list | tuple) for entry in found) else found
    for row in rows:
        if not isinstance(row, list | tuple) or not row:
            raise InputError(f"{where}{what} have a row {_what(row)}, need numbers in every row")
        for value in row:
            if type(value) not in (int, float) or not (math.isfinite(value) and 0 <= value <= 1):
                raise InputError(f"{where}{what} hold {str(value)[:40]}, need numbers from 0 to 1")
    return [[float(value) for value in row] for row in rows]


def _parents(found: Any) -> list[int]:
    if not isinstance(found, list) or not found or any(type(parent) is not int for parent in found):
        raise InputError(f"parents are {_what(found)}, need whole numbers, -1 for children of the anchor")
    return found


def _read(path: str) -> Any:
    file = Path(path).expanduser()
    try:
        if file.stat().st_size > _LARGEST:
            raise InputError(f"{path} has {file.stat().st_size} bytes, more than any tree needs")
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist: give a JSON or YAML file") from error
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        raise InputError(f"{path} cannot be read as JSON or YAML: {' '.join(str(error).split())[:200]}") from error


def _what(found: Any) -> str:
    return str(found)[:60] or "nothing"
