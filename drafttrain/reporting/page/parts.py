"""What several parts of a report's page are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafttrain.reporting.page.markup import Content, Markup, element
from drafttrain.reporting.page.svg import is_wide

Row = Mapping[str, Any]
"""A measured row, as a package's `metrics.json` has it, checked."""


def part(name: str, title: str, content: Content) -> Markup:
    """A titled part of a run's section; `name` is its id."""
    return element("section", element("h3", title), content, id=name)


def figure(drawing: Markup, title: str, words: str | None = None, key: Content = None) -> Markup:
    """A drawing with its title, key and caption; a wide one in a box that can be scrolled."""
    if is_wide(drawing):
        drawing = element(
            "div", drawing, class_="scroll", role="group", aria_label=title, tabindex=0
        )
    return element(
        "figure",
        element("h4", title),
        drawing,
        key,
        element("figcaption", words) if words else None,
    )


def figures(drawn: list[Markup], *, small: bool = False) -> Markup | None:
    """Drawings side by side, as many as there is room for."""
    return element("div", drawn, class_="figures small" if small else "figures") if drawn else None


def absent(words: str) -> Markup:
    return element("p", words, class_="missing")


def missing(what: str, how: str, command: str | None = None) -> Markup:
    """Says that something was not recorded, and how to get it, where possible by a command."""
    words = f"Not recorded: {what}. {how[:1].upper()}{how[1:]}"
    return element(
        "p", words, [" ", element("code", command)] if command else None, class_="missing"
    )


def listed(*words: Any) -> str:
    """Those that are there, with commas."""
    return ", ".join(str(word) for word in words if word not in (None, ""))
