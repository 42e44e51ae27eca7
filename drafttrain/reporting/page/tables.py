"""Tables of a report's page: each in a box that can be scrolled, numbers with their exact value
next to the rounded one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafttrain.reporting.console import cell
from drafttrain.reporting.page.markup import Content, Markup, element


def table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, name: str | None = None
) -> Markup:
    """Rows whose first cell names them; cells are shown as in the console's tables.

    Args:
        name: the table's id.
    """
    numeric = [
        all(isinstance(row[place], int | float | tuple | type(None)) for row in rows)
        for place in range(len(columns))
    ]
    head = [
        element("th", column, scope="col", class_=_side(right))
        for column, right in zip(columns, numeric, strict=True)
    ]
    lines = []
    for first, *rest in rows:
        cells = [
            element("td", shown(value), class_=_side(right))
            for value, right in zip(rest, numeric[1:], strict=True)
        ]
        lines.append(element("tr", element("th", shown(first), scope="row"), cells))
    inner = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", head)),
        element("tbody", lines),
        id=name,
    )
    return element("div", inner, class_="scroll", role="region", aria_label=caption, tabindex=0)


def shown(value: Any) -> Content:
    """A cell; the exact number is in the `value` of a `data` element."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return element("data", cell(value), value=repr(value))
    if isinstance(value, tuple) and len(value) == 2:
        return [shown(value[0]), "..", shown(value[1])]
    return cell(value)


def numbers(content: Content, summary: str = "The numbers") -> Markup:
    """The numbers of a drawing, to be opened by those who read them."""
    return element("details", element("summary", summary), content)


def _side(right: bool) -> str | None:
    return "number" if right else None
