"""Drawings of trees of drafts: the hits of every node, or of every position and rank."""

from __future__ import annotations

from collections.abc import Sequence

from drafttrain.reporting.page.axes import Axis, Frame
from drafttrain.reporting.page.markup import Markup, brief, element
from drafttrain.reporting.page.svg import PLACE, WIDTH, dot, svg, text, upward
from drafttrain.tree.topology import Tree

_ROW, _LEVEL = 17.0, 48.0
"""Height of a tree's leaf and least width of its level."""
_Place = tuple[float, float]


def tree(title: str, shape: Tree, kept: Sequence[int], offered: Sequence[int]) -> Markup:
    """A tree of drafts from the left to the right, a node's first child on its own line.

    The more of all rounds took a way, the wider it is. Next to a node is how often it was accepted,
    given that its parent was.

    Args:
        kept, offered: of each node, rounds in which it was accepted, and in which its parent was.
    """
    lines, depth = _lines(shape), shape.max_depth
    left, right, top, foot = 14.0, 34.0, 12.0, 40.0
    level = max(_LEVEL, (WIDTH - left - right) / depth)
    width, height = left + level * depth + right, top + _ROW * (max(lines, default=0) + 1) + foot
    rounds = max((offered[node] for node in shape.children(-1)), default=0)
    root = (left, top)
    places = [
        (left + level * at, top + _ROW * line) for at, line in zip(shape.depths, lines, strict=True)
    ]
    ways: list[tuple[float, Markup]] = []
    nodes: list[Markup] = []
    for node, (parent, place) in enumerate(zip(shape.parents, places, strict=True)):
        share = kept[node] / rounds if rounds else 0.0
        ways.append((share, _way(root if parent < 0 else places[parent], place, share)))
        words = f"child {shape.ranks[node] + 1} at position {shape.depths[node]}"
        nodes += _node(place, words, kept[node], offered[node])
    ways.sort(key=lambda way: way[0])
    nodes.append(dot("the last token that was chosen", left, top, 3.5, "anchor"))
    frame = Frame(
        Axis(0.0, float(depth), PLACE, integers=True),
        width=width,
        height=height,
        left=left,
        right=right,
        top=top,
        foot=foot,
        padded=False,
    )
    axes = frame.drawn(upright=False, lines=False)
    return svg(title, height, axes, [way for _, way in ways], nodes, width=width)


def _way(start: _Place, end: _Place, share: float) -> Markup:
    """From a parent to its child; siblings share one line down from their parent."""
    (x0, y0), (x1, y1) = start, end
    turns = f"M{brief(x0)} {brief(y0)} H{brief(x0 + 9)} V{brief(y1)} H{brief(x1)}"
    return element("path", d=turns, stroke_width=0.8 + 5 * share, class_="way s0")


def _node(place: _Place, words: str, kept: int, offered: int) -> list[Markup]:
    """A node and its hit rate."""
    x, y = place
    rate = kept / offered if offered else None
    if rate is None:
        words += ": its parent was never accepted"
    else:
        words += f": accepted in {kept} of {offered} rounds, {rate:.1%}"
    shown = "–" if rate is None else f"{rate:.0%}"
    return [
        dot(words, x, y, 3, "fill s0" if kept else "open s0"),
        text(shown, x + 5, y - 3.5, "rate"),
    ]


def _lines(shape: Tree) -> list[int]:
    """The line of each node: a first child has its parent's, every other one the next that is
    free."""
    lines, line, waiting = [0] * shape.size, 0, [*reversed(shape.children(-1))]
    while waiting:
        node = waiting.pop()
        line += shape.ranks[node] > 0
        lines[node] = line
        waiting += reversed(shape.children(node))
    return lines


def grid(title: str, rates: Sequence[Sequence[float | None] | None]) -> Markup:
    """Hit rates by position and rank, the most likely child on top: what is known where nodes were
    not counted one by one."""
    ranks = max((len(row) for row in rates if row), default=1)
    left, right, top, foot, step = 46.0, 10.0, 8.0, 38.0, 26.0
    wide = max(_LEVEL * 0.75, (WIDTH - left - right) / max(1, len(rates)))
    width, height = left + wide * len(rates) + right, top + step * ranks + foot
    drawn = [
        text(str(rank + 1), left - 8, top + step * rank + 17, "tick", anchor="end")
        for rank in range(ranks)
    ]
    for place, row in enumerate(rates):
        for rank, rate in enumerate(row or ()):
            x, y = left + wide * place, top + step * rank
            if rate is not None:
                size = {"width": wide - 2, "height": step - 2, "fill_opacity": 0.08 + 0.5 * rate}
                drawn.append(element("rect", x=x + 1, y=y + 1, class_="fill s0", **size))
            shown = "–" if rate is None else f"{rate:.0%}"
            drawn.append(text(shown, x + wide / 2, y + 17, "value", anchor="middle"))
    drawn.append(upward("child", top + step * ranks / 2))
    frame = Frame(
        Axis(0.5, len(rates) + 0.5, PLACE, integers=True),
        width=width,
        height=height,
        left=left,
        right=right,
        top=top,
        foot=foot,
        padded=False,
    )
    return svg(title, height, frame.drawn(upright=False, lines=False), drawn, width=width)
