"""What a class or a function takes, as a configuration may name it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def parameters_of(call: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Named parameters, in order: those of the signature, then the fields of a class's `Config`.

    A class whose settings are one dataclass, `Config`, takes its fields as keywords.

    Raises: TypeError or ValueError for what has no signature, such as some built-in functions.
    """
    signature = inspect.signature(call)
    found = {p.name: p for p in signature.parameters.values() if p.kind not in _MANY}
    for field in settings_of(call):
        found[field.name] = inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field)
        )
    return found


def is_open(call: Callable[..., Any]) -> bool:
    """Does it take keywords beyond those that `parameters_of` names?"""
    if settings_of(call):
        return False
    return any(
        p.kind == inspect.Parameter.VAR_KEYWORD for p in inspect.signature(call).parameters.values()
    )


def settings_of(call: Callable[..., Any]) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a class's `Config`; none where it has no such dataclass."""
    config = getattr(call, "Config", None) if isinstance(call, type) else None
    if not (isinstance(config, type) and dataclasses.is_dataclass(config)):
        return ()
    return tuple(field for field in dataclasses.fields(config) if field.init)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return inspect.Parameter.empty
