"""HTML and SVG as text: elements put together so that everything but `Markup` is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

_ODD = re.compile("[\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff\x80-\x9f]")
"""Lone surrogates, which no file can hold, and characters that a page must not."""
_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {
    0x7F: "\u2421"
}
"""Control characters as pictures of themselves."""
VOID = frozenset(("meta", "br", "hr", "col"))
"""Elements without an end tag."""


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Content = str | None | Iterable["Content"]
"""What an element holds; None is nothing."""


def escaped(text: str) -> Markup:
    """Any text as a page may hold it, in an element or an attribute in quotes."""
    return Markup(html.escape(_ODD.sub("\ufffd", text).translate(_CONTROLS)))


def joined(*content: Content) -> Markup:
    """Contents one after the other; plain text is escaped."""
    parts: list[str] = []
    for one in content:
        if isinstance(one, Markup):
            parts.append(one)
        elif isinstance(one, str):
            parts.append(escaped(one))
        elif one is not None:
            parts.append(joined(*one))
    return Markup("".join(parts))


def element(name: str, *content: Content, **attributes: str | float | bool | None) -> Markup:
    """One element.

    Args:
        attributes: `class_` is class, `font_size` font-size; None and False leave one out, True has
            no value.
    """
    words = [name]
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            words.append(key)
        elif value is not None and value is not False:
            words.append(f'{key}="{escaped(value if isinstance(value, str) else brief(value))}"')
    inner = joined(*content)
    return Markup(
        f"<{' '.join(words)}>" if name in VOID else f"<{' '.join(words)}>{inner}</{name}>"
    )


def brief(value: float) -> str:
    """A coordinate: two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
