"""Trees and tables of numbers that a person keeps in a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from drafttrain.checks import path_of
from drafttrain.errors import InputError, first_line
from drafttrain.tree.topology import Tree

_LARGEST, _DEEPEST = 1 << 20, 16
_BRACKETS = re.compile(r"[\[\]{}]")
Table = list[list[float]]


def read_tree(path: str) -> Tree:
    """A tree from a JSON or YAML file.

    Either a list of paths of ranks, in any order, as the public code of Medusa and EAGLE lists
    them: [[0], [1], [0, 0]]; or `parents`: [-1, -1, 0], nodes breadth first, -1 for children of the
    anchor.

    Raises: InputError naming the file and what is wrong in it.
    """
    found = _read(path, "tree.path")
    try:
        if isinstance(found, dict) and list(found) == ["parents"]:
            return Tree(tuple(_parents(found["parents"])))
        if not isinstance(found, list) or not all(isinstance(entry, list) for entry in found):
            raise InputError(
                f"holds {_what(found)}, needs a list of paths such as [[0], [1], [0, 0]], or "
                f"{{parents: [-1, -1, 0]}}"
            )
        return Tree.from_paths(found)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def table(given: str | Sequence[Any], what: str) -> Table:
    """Rows of numbers between 0 and 1, given as they are or as the name of a JSON or YAML file; one
    row may come by itself.

    Raises: InputError for anything else.
    """
    found, where = (_read(given, what), f"{given}: ") if isinstance(given, str) else (given, "")
    if not isinstance(found, list | tuple) or not found:
        raise InputError(
            f"{where}{what} are {_what(found)}, need a list of numbers, or of lists of numbers"
        )
    rows = [found] if not any(isinstance(entry, list | tuple) for entry in found) else found
    for row in rows:
        if not isinstance(row, list | tuple) or not row:
            raise InputError(f"{where}{what} have a row {_what(row)}, need numbers in every row")
        for value in row:
            if type(value) not in (int, float) or not 0 <= value <= 1:
                raise InputError(f"{where}{what} hold {str(value)[:40]}, need numbers from 0 to 1")
    return [[float(value) for value in row] for row in rows]


def _parents(found: Any) -> list[int]:
    if not isinstance(found, list) or not found or any(type(parent) is not int for parent in found):
        raise InputError(
            f"parents are {_what(found)}, need integers, -1 for children of the anchor"
        )
    return found


class _PlainLoader(yaml.SafeLoader):
    """Plain values, each written where it is: ten lines that refer to each other can unfold to
    more than memory holds."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(
                f"it refers to another place (*{self.peek_event().anchor}): write the value itself"
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [
            key.value for key, _ in getattr(node, "value", ()) if isinstance(key, yaml.ScalarNode)
        ]
        if len(set(keys)) < len(keys):
            raise yaml.YAMLError(
                f"the key {next(key for key in keys if keys.count(key) > 1)[:80]!r} is there twice"
            )
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """Plain values of a YAML text. Raises: yaml.YAMLError, ValueError, RecursionError."""
    depth = 0
    for sign in _BRACKETS.findall(
        text
    ):  # What the parser takes for each level grows with their number.
        depth += 1 if sign in "[{" else -1
        if depth > _DEEPEST:
            raise ValueError(f"more than {_DEEPEST} levels")
    try:
        found = yaml.load(text, Loader=_PlainLoader)
    except (AttributeError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise yaml.YAMLError(f"a value does not fit its tag ({first_line(error)})") from error
    _refuse_huge(found)
    return found


def _read(path: str, name: str) -> Any:
    file = path_of(name, path)
    try:
        if file.stat().st_size > _LARGEST:
            raise InputError(f"{path} has {file.stat().st_size} bytes, more than any tree needs")
        return read_yaml(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist: give a JSON or YAML file") from error
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        raise InputError(
            f"{path} cannot be read as JSON or YAML: {' '.join(str(error).split())[:200]}"
        ) from error


def _refuse_huge(found: Any, depth: int = 0) -> None:
    """Raise ValueError for numbers of thousands of digits and lists within lists without end, which
    no message could show."""
    if depth > _DEEPEST:
        raise ValueError(f"more than {_DEEPEST} levels")
    if isinstance(found, int) and found.bit_length() > 1024:
        raise ValueError("a number of too many digits")
    if isinstance(found, dict):
        found = [*found.keys(), *found.values()]
    if isinstance(found, list | tuple | set):
        for inner in found:
            _refuse_huge(inner, depth + 1)


def _what(found: Any) -> str:
    return str(found)[:60] or "nothing"
