"""Arguments of chat templates that a row of prompts brings: tools, documents, others by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

RESERVED = frozenset(
    (
        "self",
        "conversation",
        "conversations",
        "messages",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "sanitize_control_tokens",
    )
)
"""What this program gives to a template, or transformers takes for itself."""
_DEEPEST = 100
"""Levels of a value that a column gives to the chat template."""
OF_TEMPLATE = ("tools", "documents", "chat_template_kwargs")
"""Columns whose values are given to the chat template: lists of objects, and an object of further
arguments; each may be the JSON of it."""


def is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def read_arguments(get: Callable[[str], Any], *, table: bool = False) -> dict[str, Any]:
    """{argument: value} of a row.

    Args:
        get: a column's value by its name, None where the row has none.
        table: whether the row is a table's. A table fills in every key that any of its rows has,
            so there a key without a value is none; in JSON it is a value, such as a default.
    Raises: ValueError saying which column cannot be read.
    """
    found: dict[str, Any] = {}
    for name in OF_TEMPLATE[:-1]:
        value = _objects(get(name), name, table)
        if value:
            found[name] = value
    more = _decoded(_given(get(OF_TEMPLATE[-1]), table), OF_TEMPLATE[-1])
    if more is not None and not isinstance(more, dict):
        raise ValueError(f"a {OF_TEMPLATE[-1]} column that is not an object")
    for name, value in (more or {}).items():
        if name in RESERVED or name == "chat_template":
            raise ValueError(f"a {OF_TEMPLATE[-1]} column with {name}, which is decided here")
        if name in ("tools", "documents"):
            value = _objects(value, name, table)
        found.setdefault(name, value)
    check_plain(found)
    return found


def check_plain(value: Any) -> None:
    """Raise ValueError for what a chat template is not given: values that JSON lacks, numbers that
    are not finite, half a character, and what is nested too deep."""
    _refuse_depth(value)
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise ValueError("a column for the chat template with values that JSON lacks") from None
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            "a column for the chat template with text that is not Unicode (half of a surrogate "
            "pair)"
        ) from None


def _objects(value: Any, name: str, table: bool) -> list[dict[str, Any]] | None:
    """A list of objects: as it is, as JSON, as a list of JSON, or as an object of lists, which is
    how a table may keep it."""
    value = _decoded(_given(value, table), name)
    lists = isinstance(value, dict) and all(isinstance(part, list) for part in value.values())
    if lists and value:
        if len({len(part) for part in value.values()}) > 1:
            raise ValueError(f"a {name} column whose lists are of unequal lengths")
        value = [
            {key: held for key, held in zip(value, one, strict=True) if held is not None}
            for one in zip(*value.values(), strict=True)
        ]
    if value is None or value == {}:
        return None
    listed = [value] if isinstance(value, dict) else value
    if isinstance(listed, list):
        listed = [_decoded(one, name) for one in listed]
    if not is_list_of_objects(listed):
        raise ValueError(f"a {name} column that is not a list of objects")
    return listed


def _given(value: Any, table: bool) -> Any:
    _refuse_depth(value)
    return _without_gaps(value) if table else value


def _decoded(value: Any, name: str) -> Any:
    """A value, or what its JSON says; None where it is empty."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"a {name} column whose JSON cannot be read") from None


def _without_gaps(value: Any) -> Any:
    """Without keys that have no value."""
    if isinstance(value, dict):
        return {str(key): _without_gaps(held) for key, held in value.items() if held is not None}
    return [_without_gaps(one) for one in value] if isinstance(value, list) else value


def _refuse_depth(value: Any, depth: int = 0) -> None:
    if depth > _DEEPEST:
        raise ValueError("a column for the chat template that is nested too deep")
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list):
        for part in parts:
            _refuse_depth(part, depth + 1)
