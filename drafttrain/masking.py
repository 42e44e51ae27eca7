"""Secrets among settings: which they are, and texts and values without them.

A setting is a secret by its name (`logger.token`), a variable of the environment by its own
(`${oc.env:API_KEY}`), and in an address what precedes the `@`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

MASK = "***"
_ANYWHERE = {
    *("password", "passwd", "pwd", "passphrase", "passcode", "secret", "secrets", "credential"),
    *("credentials", "cred", "creds", "auth", "oauth", "authorization", "authentication", "bearer"),
    *("cookie", "cookies", "jwt", "session", "sessionid", "signature", "csrf", "webhook"),
}
"""Words that make a secret of a setting, wherever they are in its name."""
_LAST = {"token", "key", "pass", "pw", "pat", "sig"}
"""Words that make a secret of a setting where its name ends with them."""
_OWNED = {"api", "access", "auth", "private", "secret"}
"""Words that precede `tokens` and `keys` where these are secrets."""
_OF_TEXT = {"bos", "eos", "pad", "unk", "sep", "cls", "mask", "start", "stop", "end", "image"}
"""Words that precede `token` where it is a token of text."""
_JOINED = re.compile(
    "(?:password|passwd|secret"
    "|(?:api|access|auth|bearer|private|refresh|secret|session)(?:key|token)s?)(?:id)?$"
)
"""Ends of words that are written without what parts them."""
_SHORTEST, _SHORTEST_WORD = 6, 8
"""Characters, and letters of a plain word or digits of a number, of a secret that is looked for in
texts: a shorter one would be found everywhere."""
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_USER = re.compile(r"(?<=://)[^/\s@?#]*(?:@[^/\s@?#]*)*@")
_NAME = re.compile(r"(?P<name>[\w-]+)(?:=|%3D)")
_VALUE = re.compile(r"\"[^\"]*\"|'[^']*'|[^\s&,;)\]}'\"]+")
_NAME_INSIDE = re.compile(r"(?P<name>[\w-]+)[\"']?\s*[:=]\s*[\"']?")
_VALUE_INSIDE = re.compile(r"[^\s,{}\[\]\"']+")
_BEFORE = re.compile(r"[^\s,;&?=(){}\[\]'\"]*$")
"""What precedes a name and belongs to it."""
_QUERY = re.compile(r"://[^\s'\"]*\?[^\s'\"]*$")
_PART = re.compile(r"[\d-]+(?:/|$)")
"""A number or a day, as a part of a path has it."""
_ROOT = re.compile(r"[/\\~.]|\w:[/\\]")
_NEAR = 2000
"""Characters before a name that are looked at."""
_LINE = re.compile(r"(?m)^(?P<start>\s*(?:- )?)(?P<name>[\w-]+):[ \t]+(?P<value>\S.*)$")
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*(?P<name>\w+)\s*(?:,(?P<default>[^{}]*))?\}")
_REFERENCE = re.compile(r"\$\{[\w.\[\]]+\}")
_PLACEHOLDER = re.compile(r"[\"']?(?:<|\.\.\.|\*\*\*|value\b|\$\{)")


def looks_secret(name: str) -> bool:
    """Is what has this name kept to oneself?"""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    return (
        not _ANYWHERE.isdisjoint(words)
        or (last in _LAST and before not in _OF_TEXT)
        or (last in ("tokens", "keys") and before in _OWNED)
        or ((before, last) == ("key", "id") and "access" in words)
        or any(map(_JOINED.search, words))
    )


def reads_environment(text: str) -> bool:
    """Does a setting name a variable of the environment?"""
    return re.search(r"\$\{\s*oc\.env\s*:", text) is not None


def hidden(text: str, known: Collection[str] = ()) -> str:
    """A text without users and passwords in addresses, values that follow the name of a secret, and
    secrets that are known. A plain word or number among these is left where it is a part of a
    longer name or path."""
    for secret in sorted(known, key=len, reverse=True):
        before, after = r"(?<!\w)", r"(?!\w)"
        if secret.isalpha() or secret.isdigit():
            before, after = r"(?<![\w./\\-])", r"(?![\w/\\-]|\.\w)"
        text = re.sub(before + re.escape(secret) + after, MASK, text)
    text = _ENVIRONMENT.sub(_without_default, text)
    return _without_values(_USER.sub(f"{MASK}@", text))


def hidden_lines(text: str, known: Collection[str] = ()) -> str:
    """As `hidden`, of a text in YAML."""
    return hidden(
        _LINE.sub(
            lambda line: (
                f"{line['start']}{line['name']}: {_secret(line['value'])}"
                if looks_secret(line["name"])
                else line[0]
            ),
            text,
        ),
        known,
    )


def masked(value: Any, known: Collection[str] = (), *, secret: bool = False) -> Any:
    """Plain values without secrets. What names a variable of the environment, or another setting,
    stays.

    Args:
        secret: is all of it?
    """
    if isinstance(value, Mapping):
        return {
            key: masked(held, known, secret=secret or looks_secret(str(key)))
            for key, held in value.items()
        }
    if isinstance(value, list | tuple):
        return [masked(held, known, secret=secret) for held in value]
    if isinstance(value, str):
        return _secret(value) if secret else hidden(value, known)
    return value if value is None or isinstance(value, bool) or not secret else MASK


def secrets_in(written: Any, resolved: Any, *, secret: bool = False) -> Iterator[str]:
    """The secrets of a configuration that are long enough to be looked for in texts.

    Args:
        written: plain values, with references as they were written.
        resolved: the same without references.
    """
    if isinstance(written, Mapping) and isinstance(resolved, Mapping):
        for key, held in written.items():
            name = str(key)
            yield from secrets_in(held, resolved.get(key), secret=secret or looks_secret(name))
    elif isinstance(written, list) and isinstance(resolved, list):
        for held, one in zip(written, resolved, strict=False):
            yield from secrets_in(held, one, secret=secret)
    elif secret and resolved is not None and not isinstance(resolved, bool):
        yield from _long(str(resolved))
    elif isinstance(written, str):
        for found in _ENVIRONMENT.finditer(written):
            if looks_secret(found["name"]):
                yield from _long(os.environ.get(found["name"], ""))
        for user in _USER.findall(str(resolved)):
            name, _, password = user[:-1].partition(":")
            yield from _long(password or name)


def secrets_among(words: Collection[str]) -> Iterator[str]:
    """Those on a command line, also where it cannot be read as settings."""
    for word in words:
        name, _, value = word.partition("=")
        if looks_secret(name.rpartition(".")[2]) and not name.startswith("/"):
            yield from _long(value)
            yield from _long(value.strip("\"'"))
        for found in _NAME_INSIDE.finditer(word):
            held = _VALUE_INSIDE.match(word, found.end())
            if held and looks_secret(found["name"]) and not _in_path(word, found, held[0]):
                for value in {held[0], held[0].partition("&")[0]}:
                    yield from _long(value)


def _long(text: str) -> Iterator[str]:
    least = _SHORTEST_WORD if text.isalpha() or text.isdigit() else _SHORTEST
    if len(text) >= least and not _PLACEHOLDER.match(text):
        yield text


def _secret(text: str) -> str:
    """What is written in the place of a secret."""
    if not text or _REFERENCE.fullmatch(text):
        return text
    found = _ENVIRONMENT.fullmatch(text)
    return MASK if found is None else _named_only(found)


def _named_only(found: re.Match[str]) -> str:
    default = "" if found["default"] is None else f",{MASK}"
    return f"${{oc.env:{found['name']}{default}}}"


def _without_default(found: re.Match[str]) -> str:
    return _named_only(found) if looks_secret(found["name"]) else found[0]


def _without_values(text: str) -> str:
    kept, end = [], 0
    for found in _NAME.finditer(text):
        held = _VALUE.match(text, found.end())
        if found.start() < end or held is None or not looks_secret(found["name"]):
            continue
        if not _PLACEHOLDER.match(held[0]) and not _in_path(text, found, held[0]):
            kept += [text[end : found.end()], MASK]
            end = held.end()
    return "".join((*kept, text[end:]))


def _in_path(text: str, found: re.Match[str], value: str) -> bool:
    """Is a name with its value a part of a file's path, as in /data/key=2024/a.jsonl?

    In what an address asks for, after its question mark, it is none. Where no path is seen to
    begin, it is one if it is a number or a day, or if there is a folder before it and after it.
    """
    start = found.start()
    near = max(0, start - _NEAR)
    if _QUERY.search(text, near, start):
        return False
    before = _BEFORE.search(text, near, start)
    lead = before[0] if before else ""
    is_part = _PART.match(value) is not None
    if "://" in lead or not re.search(r"[/\\]", lead):
        return is_part and ("://" in lead or "/" in value)
    return is_part or "/" in value or _ROOT.match(lead) is not None
