"""In which mode a target talks: its chat template, and the arguments that every rendering is given.

The ids that a target is asked with depend on it, its weights do not. So what was made in another
mode still fits the target, and is warned about.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from drafttrain.data.template import ChatPieces, arguments_of
from drafttrain.errors import InputError

_USER = {"role": "user", "content": "Why is the sky blue?"}
_TALKS: tuple[list[dict[str, str]], ...] = (
    [_USER],
    [{"role": "system", "content": "Be brief."}, _USER],
    [_USER, {"role": "assistant", "content": "It scatters light."}, _USER],
)
"""Conversations that are rendered to compare two modes."""
_CLOCK = "strftime_now"
"""What a template calls whose text depends on the day."""
_LONGEST = 600
"""Characters of a rendered text that are kept."""


def mode_of(tokenizer: Any | None) -> dict[str, Any]:
    """{arguments, template: digest of its text, texts: how it renders a few conversations}; empty
    without a template."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return {}
    sha = hashlib.sha256(json.dumps(template, sort_keys=True).encode())
    return {
        "arguments": arguments_of(tokenizer),
        "template": sha.hexdigest()[:16],
        "texts": [] if _CLOCK in json.dumps(template) else _texts(tokenizer),
    }


def _texts(tokenizer: Any) -> list[str]:
    texts: list[str] = []
    pieces = ChatPieces(tokenizer, ())
    for talk in _TALKS:
        try:
            text = pieces.render(talk, prompt=True)
        except InputError as error:
            texts.append(str(error)[:_LONGEST])
            if len(texts) == 1:
                break  # It refuses everything, and may take long each time.
            continue
        rest = f"... {hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:16]}"
        texts.append(text if len(text) <= _LONGEST else text[:_LONGEST] + rest)
    return texts


def difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """How two modes differ, in words; empty where they are one."""
    if there == here:
        return ""
    if not there or not here:
        return "a chat template " + ("here, none there" if here else "there, none here")
    words = []
    before, after = there.get("arguments") or {}, here.get("arguments") or {}
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            words.append(f"{name} {_given(before, name)} there, {_given(after, name)} here")
    if there.get("template") != here.get("template"):
        words.append("the chat template is another")
    for old, new in zip(there.get("texts") or (), here.get("texts") or (), strict=False):
        if old != new:
            pairs = enumerate(zip(old, new, strict=False))
            first = next((k for k, (a, b) in pairs if a != b), min(len(old), len(new)))
            start = max(0, first - 10)
            words.append(f"it makes {_cut(old, start)} there, {_cut(new, start)} here")
            break
    return ", ".join(words)


def _given(arguments: Mapping[str, Any], name: str) -> str:
    return json.dumps(arguments[name])[:80] if name in arguments else "not given"


def _cut(text: str, start: int) -> str:
    part = text[start : start + 50]
    return ("..." if start else "") + repr(part) + ("..." if len(text) > start + 50 else "")


def words(mode: Mapping[str, Any]) -> str:
    """A mode's arguments as settings; empty where the template has none."""
    arguments = mode.get("arguments")
    if not isinstance(arguments, Mapping):
        return ""
    return " ".join(f"target.template.{name}={json.dumps(v)}" for name, v in arguments.items())
