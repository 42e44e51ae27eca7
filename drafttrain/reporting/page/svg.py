"""Parts of drawings as SVG.

A drawing is as wide as a phone, so that its letters can be read there; wide pages show several side
by side. Colours are classes of the page's style sheet (`s0`, `s1`, ...), so that they follow light
and dark.
"""

from __future__ import annotations

from collections.abc import Sequence

from drafttrain.reporting.page.markup import Content, Markup, brief, element

Interval = tuple[float, float]
COLOURS = 6
"""Classes s0 to s5 of the style sheet."""
WIDTH, SMALL = 360.0, 264.0
"""Of drawings, and of those that are set closer together."""
PLACE = "position k in the draft"
_LONGEST = 46
"""Letters of a name that a drawing has room for."""


def svg(title: str, height: float, *content: Content, width: float = WIDTH) -> Markup:
    """A drawing. One that is wider than a phone keeps its size; its box can be scrolled."""
    wide = width > WIDTH
    return element(
        "svg",
        *content,
        viewBox=f"0 0 {brief(width)} {brief(height)}",
        width=width if wide else None,
        height=height if wide else None,
        role="img",
        aria_label=title,
        class_="wide" if wide else None,
    )


def is_wide(drawing: Markup) -> bool:
    """Whether it keeps a size of its own, wider than a phone."""
    return ' class="wide"' in drawing.partition(">")[0]


def path(d: str, look: str) -> Markup:
    return element("path", d=d, class_=look)


def text(words: str, x: float, y: float, look: str, *, anchor: str | None = None) -> Markup:
    """Words whose start is at x, or the part of them that `anchor` names (middle, end)."""
    return element("text", words, x=x, y=y, text_anchor=anchor, class_=look)


def upward(words: str, middle: float) -> Markup:
    """The name of an upright axis, around that height."""
    turned = f"rotate(-90 12 {brief(middle)})"
    return element(
        "text", words, x=12, y=middle, text_anchor="middle", transform=turned, class_="name"
    )


def dot(title: str, x: float, y: float, radius: float, look: str) -> Markup:
    """A circle that says its title when pointed at."""
    return element("circle", element("title", title), cx=x, cy=y, r=radius, class_=look)


def name_of_row(name: str, y: float) -> Markup:
    """The name above a row, shortened to the drawing's width; its title is the full name."""
    shown = name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"
    return element("text", element("title", name), shown, x=10, y=y, class_="label")


def key(look: Sequence[Markup], name: str, *, width: int) -> Markup:
    """An entry of a legend."""
    drawn = element(
        "svg", look, viewBox=f"0 0 {width} 13", width=width, height=13, aria_hidden="true"
    )
    return element("li", drawn, " ", name)


def marker(place: int, x: float, y: float, hollow: bool) -> Markup:
    """A dot, square, triangle or diamond: lines can be distinguished without their colours, too."""
    look = f"{'open' if hollow else 'fill'} {colour(place)}"
    kind = place % 4
    if kind == 0:
        return element("circle", cx=x, cy=y, r=3, class_=look)
    if kind == 1:
        return element("rect", x=x - 2.7, y=y - 2.7, width=5.4, height=5.4, class_=look)
    corners = {
        2: ((0, -3.6), (3.5, 2.8), (-3.5, 2.8)),
        3: ((0, -3.9), (3.9, 0), (0, 3.9), (-3.9, 0)),
    }[kind]
    points = " ".join(f"{brief(x + a)},{brief(y + b)}" for a, b in corners)
    return element("polygon", points=points, class_=look)


def colour(place: int) -> str:
    return f"s{place % COLOURS}"
