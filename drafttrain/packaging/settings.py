"""A drafter's settings in a package: exactly those of its class, each of its type."""

from __future__ import annotations

import dataclasses
from typing import Any

from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError
from drafttrain.packaging.checking import check_keys
from drafttrain.packaging.manifest import STORED

_PLAIN: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
}
_LISTS = ("Sequence[", "list[", "tuple[")


def json_types_of(kind: type[Drafter]) -> dict[str, tuple[type, ...]]:
    """What a class of drafters takes apart from the target: the fields of its `Config`.

    Returns: of each the types that its value has in JSON; () where the class itself checks it.
    """
    return {field.name: _annotated(field.type) for field in dataclasses.fields(kind.Config)}


def _annotated(annotation: Any) -> tuple[type, ...]:
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if name.startswith(_LISTS) and name.endswith("]"):
        return (list,)
    return _PLAIN.get(name, ())


def checked_settings(
    node: dict[str, Any], kind: type[Drafter], where: str, also: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The settings of a drafter in config.json, apart from those that are stored as tensors.

    Args:
        also: what else is given there.
    Raises: InputError unless they are exactly those that the class takes, each of its type.
    """
    parameters = {name: types for name, types in json_types_of(kind).items() if name not in STORED}
    check_keys(node, ("_target_", *also, *parameters), where)
    settings = {name: value for name, value in node.items() if name != "_target_"}
    for name, value in settings.items():
        types = parameters.get(name, ())
        if types and not (isinstance(value, types) and isinstance(value, bool) == (bool in types)):
            needed = " or ".join(one.__name__ for one in types)
            raise InputError(f"{where}.{name} is {str(value)[:80]!r}, needs {needed}")
    return settings
