"""The shapes that a row of prompts may have, and the user's side of a row of any of them.

    conversations: [{"from": "human", "value": ...}, ...]
        ShareGPT; further roles: user, gpt, assistant, system
    messages: [{"role": "user", "content": ...}, ...]
        OpenAI; content may be a list of text parts
    prompt: "..." or ["first turn", "second turn"]
        or a list of messages; a completion is left out
    turns: ["first turn", "second turn"]
    instruction: "...", input: "..."
        joined by an empty line; an output is left out

each with an optional `system` text, and with columns that change how the template writes the
prompt: `tools`, `documents`, `chat_template_kwargs` (values, or their JSON). A `category` (else a
`task`) names the kind of task; it is kept with the row. Answers are left out.
A row with only a `text` is refused, because it does not say where the prompt ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from drafttrain.checks import shown
from drafttrain.data.arguments import OF_TEMPLATE, read_arguments
from drafttrain.errors import InputError

SHAPES = (
    "conversations [{from, value}]",
    "messages [{role, content}]",
    "prompt (text, list of turns, or messages)",
    "turns [text]",
    "instruction (+ input)",
)
_PROMPTS = ("conversations", "messages", "prompt", "turns", "instruction")
CATEGORIES = ("category", "task")
"""Columns that name a row's kind of task; the first that has a value counts."""
_LONGEST_CATEGORY = 60
PARTS = ("context", "history", "system_prompt")
"""Columns that hold a part of the prompt in some data sets, and are read where they are named."""
COLUMNS = (*_PROMPTS, "input", "system", *OF_TEMPLATE)
_USER = {"user", "human", "prompter"}
_ASSISTANT = {"assistant", "gpt", "model", "bot", "chatgpt", "bard", "bing"}
_SYSTEM = {"system", "developer"}


@dataclass(frozen=True)
class Prompt:
    """The user's side of one conversation."""

    users: tuple[str, ...]
    """User turns in order, at least one."""
    system: str | None = None
    read: int | None = None
    """Of a text that the target goes on with, without a chat template: how many tokens are read at
    most. None is a conversation."""
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)
    """What the row gives to the chat template, by the argument's name."""

    def lead(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system else []


class Unusable(Exception):
    """A row that cannot be used; `messages` are its turns where they could be read."""

    def __init__(self, reason: str, messages: list[tuple[str, str]] | None = None) -> None:
        super().__init__(reason)
        self.reason, self.messages = reason, tuple(messages or ())


class UnknownShape(Unusable):
    """A row that has no column of any shape."""


class TableRow(dict[str, Any]):
    """A row of a table, which fills in every key that any of its rows has."""


def parse(row: dict[str, Any], columns: dict[str, str] | None = None) -> Prompt:
    """The user's side of one row. Raises an exception with a `reason` if it cannot be used."""
    columns = columns or {}

    def get(name: str) -> Any:
        return row.get(columns.get(name, name))

    prompt = _conversation(row, columns, get)
    try:
        arguments = read_arguments(get, table=isinstance(row, TableRow))
    except ValueError as error:
        raise Unusable(str(error)) from None
    return replace(prompt, arguments=arguments) if arguments else prompt


def _conversation(
    row: dict[str, Any], columns: dict[str, str], get: Callable[[str], Any]
) -> Prompt:
    system = get("system")
    if system is not None and not isinstance(system, str):
        raise Unusable("a system column that is not text")
    for name in ("conversations", "messages", "turns", "prompt"):
        value = get(name)
        if value is None:
            continue
        if isinstance(value, str):
            if name != "prompt":
                raise Unusable(f"{name}: not a list")
            return _from_messages([("user", value)], system)
        return _from_messages(_turns(value, name), system)
    instruction = get("instruction")
    if instruction is not None:
        more = get("input")
        if not isinstance(instruction, str) or not isinstance(more, str | None):
            raise Unusable("an instruction or input that is not text")
        text = f"{instruction}\n\n{more}" if more and more.strip() else instruction
        return _from_messages([("user", text)], system)
    if any(columns.get(name, name) in row for name in _PROMPTS):
        raise Unusable("an empty prompt column")
    raise UnknownShape("no prompt column")


def _turns(value: Any, name: str) -> list[tuple[str, str]]:
    """(role, content) of a list of turns or messages."""
    if isinstance(value, dict) and value and all(isinstance(part, list) for part in value.values()):
        # A data set may keep a list of objects as an object of lists.
        value = [
            dict(zip(value, parts, strict=True)) for parts in zip(*value.values(), strict=False)
        ]
    if not isinstance(value, list):
        raise Unusable(f"{name}: not a list")
    found: list[tuple[str, str]] = []
    for turn in value:
        if isinstance(turn, str) and name in ("prompt", "turns"):
            found.append(("user", turn))
            continue
        if not isinstance(turn, dict):
            raise Unusable("a turn that is not an object")
        said = [turn[key] for key in ("from", "role") if isinstance(turn.get(key), str)]
        if not said:
            raise Unusable("a turn without a role")
        role, *others = map(_role, said)
        if role not in ("user", "assistant", "system"):
            raise Unusable(f"a turn of role {said[0][:40]}")
        texts = [turn[key] for key in ("value", "content", "text") if turn.get(key) is not None]
        content = texts[0] if texts else None
        if any(other != role for other in others) or any(text != content for text in texts):
            raise Unusable("a turn with two roles, or two texts (value, content, text)")
        if role == "assistant":
            content = content if isinstance(content, str) else ""  # Left out anyway.
        found.append((role, _text(content)))
    if all(isinstance(turn, str) for turn in value):
        return _answered(found)
    return found


def _role(said: str) -> str:
    name = said.strip().lower()
    for known, names in (("user", _USER), ("assistant", _ASSISTANT), ("system", _SYSTEM)):
        name = known if name in names else name
    return name


def _answered(users: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """A list of user turns is a conversation with the answers left out."""
    return [turn for user in users for turn in (user, ("assistant", ""))]


def _text(content: Any) -> str:
    if isinstance(content, list):
        parts = []
        for part in content:
            if (
                isinstance(part, dict)
                and part.get("type", "text") == "text"
                and isinstance(part.get("text"), str)
            ):
                parts.append(part["text"])
            else:
                raise Unusable("content that is not text")
        return "".join(parts)
    if not isinstance(content, str):
        raise Unusable("content that is not text")
    return content


def _from_messages(messages: list[tuple[str, str]], system: str | None) -> Prompt:
    leading = 0
    while leading < len(messages) and messages[leading][0] == "system":
        leading += 1
    system = system if system and system.strip() else None
    turns = messages[leading:]
    if not messages:
        raise Unusable("empty conversation")
    if leading > 1:
        raise Unusable("several system messages", messages)
    if not any(role == "user" for role, _ in turns):
        raise Unusable("no user turn", messages)
    if turns[0][0] == "assistant":
        raise Unusable("starts with an assistant turn", messages)
    if any(role == "system" for role, _ in turns):
        raise Unusable("a system message after the first turn", messages)
    if leading and messages[0][1].strip():
        if system is not None and system.strip() != messages[0][1].strip():
            raise Unusable("system column and system message differ", messages)
        system = messages[0][1]
    for (before, _), (role, _) in itertools.pairwise(turns):
        if before == role:
            raise Unusable(f"two {role} turns in a row", messages)
    users = tuple(content for role, content in turns if role == "user")
    if not all(user.strip() for user in users):
        raise Unusable("an empty user turn", messages)
    check_unicode("".join((*users, system or "")))
    return Prompt(users, system)


def overlooked(row: Any, taken: Prompt, columns: dict[str, str]) -> Iterator[str]:
    """What a row that can be used says besides and is not read: another prompt in another column,
    and a kind of task that is no name of one."""
    given = {name: row.get(columns.get(name, name)) for name in (*_PROMPTS, "input")}
    known = [name for name in _PROMPTS if given[name]]
    for name in known if len(known) > 1 else ():
        only = {"input": given["input"], name: given[name]}
        try:
            users = _conversation(only, {}, only.get).users
        except Unusable:
            users = ()
        if not users or users != taken.users[: len(users)]:
            column = columns.get(name, name)
            yield f"column {column}, which says something else than the one that is read"
    taken_columns = {columns.get(name, name) for name in COLUMNS}
    parts = [name for name in PARTS if row.get(name) and name not in taken_columns]
    if given["input"] and "instruction" not in known:
        parts.append(columns.get("input", "input"))
    for name in parts:
        yield (
            f"column {name}, which may be a part of the prompt (prompts.columns.<input, system or "
            f"another shape>={name} reads it)"
        )
    yield from overlooked_category(row)


def overlooked_category(row: Any) -> Iterator[str]:
    """The part of `overlooked` that rows of any shape may have."""
    given = [
        name for name in CATEGORIES if isinstance(row, dict) and row.get(name) not in (None, "")
    ]
    if given and not category_of(row):
        yield (
            f"column {given[0]}, which is no name of a kind of task (a text of one line and at "
            f"most {_LONGEST_CATEGORY} characters)"
        )


def check_unicode(text: str) -> None:
    """Raise `Unusable` for a text that UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Unusable("text that is not Unicode (half of a surrogate pair)") from None


def reads(columns: dict[str, str]) -> set[str]:
    """The columns that are looked at; whatever else a row has is not read."""
    return {*(columns.get(name, name) for name in COLUMNS), *CATEGORIES, *PARTS}


def category_of(row: Any) -> str:
    """The kind of task that a row names; empty where it names none. A long text, or one of several
    lines, is a task itself and no name of a kind."""
    for name in CATEGORIES:
        value = row.get(name) if isinstance(row, dict) else None
        text = value.strip() if isinstance(value, str) else ""
        if 0 < len(text) <= _LONGEST_CATEGORY and text.isprintable():
            return text
    return ""


def named(columns: dict[str, Any]) -> dict[str, str]:
    """Columns that are named otherwise than their shape."""
    if not isinstance(columns, dict):
        raise InputError(
            f"prompts.columns={shown(columns)}: needs names of columns by their shape, such as "
            f"{{prompt: question}}"
        )
    for name, column in columns.items():
        if name not in COLUMNS:
            listed = ", ".join(COLUMNS)
            raise InputError(
                f"prompts.columns.{name}: there is no such shape; columns can be named for {listed}"
            )
        if column is not None and not isinstance(column, str):
            raise InputError(f"prompts.columns.{name}={shown(column)}: needs the name of a column")
    return {name: column for name, column in columns.items() if column is not None}
