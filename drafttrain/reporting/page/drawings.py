"""Drawings of a report's page as SVG: learning curves, acceptance by position, intervals, stages,
trees.

A drawing is as wide as a phone, so that its letters can be read there; wide pages show several side
by side. Colours are classes of the page's style sheet (`s0`, `s1`, ...), so that they follow light
and dark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drafttrain.reporting.page.markup import Content, Markup, brief, element
from drafttrain.tree.topology import Tree

Interval = tuple[float, float]
COLOURS = 6
"""Classes s0 to s5 of the style sheet."""
WIDTH, SMALL = 360.0, 264.0
"""Of drawings, and of those that stand closer together."""
PLACE = "position k in the draft"
_LONGEST = 46
"""Letters of a name that a drawing has room for."""
_MOST_POINTS = 400
_ROW, _LEVEL = 17.0, 48.0
"""Height of a tree's leaf and least width of its level."""


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    dots: bool = True


# --- charts ---------------------------------------------------------------------------------------


def curves(
    title: str,
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    least: float | None = None,
    most: float | None = None,
) -> Markup:
    """Lines over a common x axis. Of a line with very many points, evenly spaced ones are drawn,
    the last among them.

    Args:
        x, y: names of the axes, with units.
        least, most: ends of the y axis; None leaves room for the points.
    """
    given = [point for one in series for point in one.points]
    xs, ys = [point[0] for point in given], [point[1] for point in given]
    frame = _Frame(
        _Axis(0.0, max(xs), x, whole=True),
        _Axis(min(ys) if least is None else least, max(ys) if most is None else most, y),
    )
    drawn = []
    for place, one in enumerate(series):
        places = [(frame.x(a), frame.y(b)) for a, b in _thinned(one.points)]
        path = "M" + " L".join(f"{brief(a)} {brief(b)}" for a, b in places)
        drawn.append(
            element("path", d=path, class_=f"line {_colour(place)}{' dashed' * one.dashed}")
        )
        if one.dots:
            drawn += [_mark(place, a, b, one.dashed) for a, b in places]
    return _svg(title, frame.height, frame.drawn(), drawn)


def legend(series: Sequence[Series]) -> Markup:
    """The names of lines, each with its look."""
    items = []
    for place, one in enumerate(series):
        look = [
            element("path", d="M1 6 H25", class_=f"line {_colour(place)}{' dashed' * one.dashed}")
        ]
        look += [_mark(place, 13, 6, one.dashed)] if one.dots else []
        items.append(_key(look, one.name, width=26))
    return element("ul", items, class_="legend")


def positions(
    title: str,
    rates: Sequence[float | None],
    intervals: Sequence[Interval | None],
    reach: Sequence[float | None],
) -> Markup:
    """accept@k of positions 1, 2, ... as dots with their intervals as bars; behind each, as a
    column, the share of all rounds that accept at least so many."""
    across = _Axis(0.5, max(1, len(rates)) + 0.5, PLACE, whole=True)
    frame = _Frame(across, _Axis(0.0, 1.0, "share of rounds"), width=SMALL, height=180.0, left=42.0)
    wide = min(26.0, 0.6 * (frame.x(1) - frame.x(0)))
    drawn = []
    for k, share in enumerate(reach, start=1):
        if share is not None:
            top = frame.y(share)
            drawn.append(
                element(
                    "rect",
                    element("title", f"at least {k} accepted: {share:.1%} of all rounds"),
                    x=frame.x(k) - wide / 2,
                    y=top,
                    width=wide,
                    height=max(0.0, frame.y(0) - top),
                    class_="tint",
                )
            )
    for k, (rate, interval) in enumerate(zip(rates, intervals, strict=True), start=1):
        if rate is None:
            continue
        told = f"accept@{k} {rate:.3f}"
        at = frame.x(k)
        if interval is not None:
            told += f", 95 % {interval[0]:.3f} to {interval[1]:.3f}"
            low, high = (frame.y(min(1.0, max(0.0, end))) for end in interval)
            half = min(5.0, wide / 3)
            path = f"M{brief(at)} {brief(low)} V{brief(high)}"
            path += "".join(
                f" M{brief(at - half)} {brief(end)} H{brief(at + half)}" for end in (low, high)
            )
            drawn.append(element("path", d=path, class_="line s0"))
        drawn.append(
            element(
                "circle", element("title", told), cx=at, cy=frame.y(rate), r=3.2, class_="fill s0"
            )
        )
    return _svg(title, frame.height, frame.drawn(), drawn, width=SMALL)


def whiskers(
    title: str,
    rows: Sequence[tuple[str, float, Interval | None]],
    *,
    x: str,
    mark: float,
    unit: str = "",
) -> Markup:
    """One value a row with its interval as a bar.

    Args:
        rows: name, value and interval.
        mark: a value that is marked by a line, such as 1 for decoding without drafts.
    """
    step, top, foot = 36.0, 6.0, 38.0
    ends = [end for _, value, interval in rows for end in (value, *(interval or ()))]
    axis = _Axis(min(mark, *ends), max(mark, *ends), x)
    height = top + step * len(rows) + foot
    frame = _Frame(
        axis, _Axis(0.0, 1.0, ""), height=height, left=10.0, right=46.0, top=top, foot=foot
    )
    drawn = [
        element(
            "path", d=f"M{brief(frame.x(mark))} {brief(top)} V{brief(height - foot)}", class_="mark"
        )
    ]
    for place, (name, value, interval) in enumerate(rows):
        line, at = top + step * place + 25, frame.x(value)
        told = f"{name}: {value:.3f}{unit}" + (
            f", 95 % {interval[0]:.3f} to {interval[1]:.3f}" if interval else ""
        )
        drawn.append(
            element("text", element("title", name), _short(name), x=10, y=line - 11, class_="label")
        )
        if interval is not None:
            low, high = map(frame.x, interval)
            path = f"M{brief(low)} {brief(line)} H{brief(high)}"
            path += "".join(
                f" M{brief(end)} {brief(line - 4)} V{brief(line + 4)}" for end in (low, high)
            )
            drawn.append(element("path", d=path, class_="line s0"))
        drawn.append(
            element("circle", element("title", told), cx=at, cy=line, r=3.6, class_="fill s0")
        )
        drawn.append(
            element(
                "text",
                f"{value:.2f}{unit}",
                x=WIDTH - 2,
                y=line + 4,
                text_anchor="end",
                class_="value",
            )
        )
    return _svg(title, height, frame.drawn(upright=False), drawn)


def stages(
    title: str, bars: Sequence[tuple[str, Mapping[str, float]]], names: Sequence[str], *, x: str
) -> Markup:
    """Amounts by stage as bars of one length each, the stages one behind the other.

    Args:
        bars: name, and amount by stage.
        names: the stages, in the order of their colours; others come last, in grey.
    """
    step, top, foot = 38.0, 6.0, 38.0
    totals = [sum(amounts.values()) for _, amounts in bars]
    height = top + step * len(bars) + foot
    frame = _Frame(
        _Axis(0.0, max(totals), x),
        _Axis(0.0, 1.0, ""),
        height=height,
        left=10.0,
        right=46.0,
        top=top,
        foot=foot,
    )
    drawn = []
    for place, ((name, amounts), total) in enumerate(zip(bars, totals, strict=True)):
        line, at = top + step * place + 18, 0.0
        drawn.append(
            element("text", element("title", name), _short(name), x=10, y=line - 4, class_="label")
        )
        for stage in _in_order(amounts, names):
            start, end = frame.x(at), frame.x(at + amounts[stage])
            told = (
                f"{name}, {stage}: {amounts[stage]:.3g} ({amounts[stage] / total:.0%})"
                if total
                else name
            )
            drawn.append(
                element(
                    "rect",
                    element("title", told),
                    x=start,
                    y=line,
                    width=max(0.0, end - start),
                    height=13,
                    class_=f"fill {_stage_colour(stage, names)}",
                )
            )
            at += amounts[stage]
        drawn.append(
            element(
                "text", f"{total:.3g}", x=WIDTH - 2, y=line + 11, text_anchor="end", class_="value"
            )
        )
    return _svg(title, height, frame.drawn(upright=False), drawn)


def stage_legend(bars: Sequence[tuple[str, Mapping[str, float]]], names: Sequence[str]) -> Markup:
    """The stages that any of the bars has, each with its colour."""
    there = _in_order(
        {stage: amount for _, amounts in bars for stage, amount in amounts.items()}, names
    )
    items = [
        _key(
            [
                element(
                    "rect",
                    x=1,
                    y=1,
                    width=11,
                    height=11,
                    class_=f"fill {_stage_colour(stage, names)}",
                )
            ],
            stage,
            width=13,
        )
        for stage in there
    ]
    return element("ul", items, class_="legend")


# --- trees ----------------------------------------------------------------------------------------


def tree(title: str, shape: Tree, kept: Sequence[int], offered: Sequence[int]) -> Markup:
    """A tree of drafts from the left to the right, a node's first child on its own line.

    A way is the wider, the more of all rounds took it; beside a node stands how often it was
    accepted, given that its parent was.

    Args:
        kept, offered: of each node, rounds in which it was accepted, and in which its parent was.
    """
    lines = _lines(shape)
    depth = shape.max_depth
    left, right, top, foot = 14.0, 34.0, 12.0, 40.0
    level = max(_LEVEL, (WIDTH - left - right) / depth)
    width, height = left + level * depth + right, top + _ROW * (max(lines, default=0) + 1) + foot
    rounds = max((offered[node] for node in shape.children(-1)), default=0)

    def at(node: int) -> tuple[float, float]:
        return (
            (left, top)
            if node < 0
            else (left + level * shape.depths[node], top + _ROW * lines[node])
        )

    ways: list[tuple[float, Markup]] = []
    nodes: list[Markup] = []
    for node in range(shape.size):
        (x0, y0), (x1, y1) = at(shape.parents[node]), at(node)
        share = kept[node] / rounds if rounds else 0.0
        # Siblings share one line down from their parent.
        path = f"M{brief(x0)} {brief(y0)} H{brief(x0 + 9)} V{brief(y1)} H{brief(x1)}"
        ways.append((share, element("path", d=path, stroke_width=0.8 + 5 * share, class_="way s0")))
        rate = kept[node] / offered[node] if offered[node] else None
        told = f"child {shape.ranks[node] + 1} at position {shape.depths[node]}: "
        if rate is None:
            told += "its parent was never accepted"
        else:
            told += f"accepted in {kept[node]} of {offered[node]} rounds, {rate:.1%}"
        look = "fill s0" if kept[node] else "open s0"
        nodes.append(element("circle", element("title", told), cx=x1, cy=y1, r=3, class_=look))
        nodes.append(
            element(
                "text", "–" if rate is None else f"{rate:.0%}", x=x1 + 5, y=y1 - 3.5, class_="rate"
            )
        )
    ways.sort(key=lambda way: way[0])
    nodes.append(
        element(
            "circle",
            element("title", "the last token that was chosen"),
            cx=left,
            cy=top,
            r=3.5,
            class_="anchor",
        )
    )
    axis = _Axis(0.0, float(depth), PLACE, whole=True)
    frame = _Frame(
        axis,
        _Axis(0.0, 1.0, ""),
        width=width,
        height=height,
        left=left,
        right=right,
        top=top,
        foot=foot,
        padded=False,
    )
    return _svg(
        title,
        height,
        frame.drawn(upright=False, lines=False),
        [way for _, way in ways],
        nodes,
        width=width,
    )


def grid(title: str, rates: Sequence[Sequence[float | None] | None]) -> Markup:
    """Hit rates by position and rank, the likeliest child on top: what is known where nodes were
    not counted one by one."""
    ranks = max((len(row) for row in rates if row), default=1)
    left, right, top, foot, step = 46.0, 10.0, 8.0, 38.0, 26.0
    wide = max(_LEVEL * 0.75, (WIDTH - left - right) / max(1, len(rates)))
    width, height = left + wide * len(rates) + right, top + step * ranks + foot
    drawn = []
    for rank in range(ranks):
        drawn.append(
            element(
                "text",
                str(rank + 1),
                x=left - 8,
                y=top + step * rank + 17,
                text_anchor="end",
                class_="tick",
            )
        )
    for place, row in enumerate(rates):
        for rank, rate in enumerate(row or ()):
            x, y = left + wide * place, top + step * rank
            if rate is not None:
                size = {"width": wide - 2, "height": step - 2, "fill_opacity": 0.08 + 0.5 * rate}
                drawn.append(element("rect", x=x + 1, y=y + 1, class_="fill s0", **size))
            told = "–" if rate is None else f"{rate:.0%}"
            drawn.append(
                element(
                    "text", told, x=x + wide / 2, y=y + 17, text_anchor="middle", class_="value"
                )
            )
    middle = top + step * ranks / 2
    drawn.append(
        element(
            "text",
            "child",
            x=12,
            y=middle,
            text_anchor="middle",
            transform=f"rotate(-90 12 {brief(middle)})",
            class_="name",
        )
    )
    axis = _Axis(0.5, len(rates) + 0.5, PLACE, whole=True)
    frame = _Frame(
        axis,
        _Axis(0.0, 1.0, ""),
        width=width,
        height=height,
        left=left,
        right=right,
        top=top,
        foot=foot,
        padded=False,
    )
    return _svg(title, height, frame.drawn(upright=False, lines=False), drawn, width=width)


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


# --- axes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    name: str
    whole: bool = False
    """Marks stand at whole numbers alone."""

    def ticks(self, most: int) -> list[float]:
        """At most about so many round values between the ends."""
        span = self.high - self.low
        step = 10.0 ** math.floor(math.log10(span / most))
        step *= next(times for times in (1, 2, 5, 10, 20) if span / (step * times) <= most)
        if self.whole:
            step = max(1.0, round(step))
        first = math.ceil(self.low / step - 1e-9)
        count = math.floor(self.high / step + 1e-9) - first + 1
        return [(first + k) * step for k in range(count)]


class _Frame:
    """Where values lie in a drawing, and its axes."""

    def __init__(
        self,
        x: _Axis,
        y: _Axis,
        *,
        width: float = WIDTH,
        height: float = 230.0,
        left: float = 46.0,
        right: float = 12.0,
        top: float = 10.0,
        foot: float = 40.0,
        padded: bool = True,
    ) -> None:
        self.width, self.height = width, height
        self.left, self.right, self.top, self.foot = left, right, top, foot
        self.across, self.up = (_wider(x), _wider(y)) if padded else (x, y)

    def x(self, value: float) -> float:
        return self.left + (value - self.across.low) / (self.across.high - self.across.low) * (
            self.width - self.left - self.right
        )

    def y(self, value: float) -> float:
        room = self.height - self.top - self.foot
        return self.height - self.foot - (value - self.up.low) / (self.up.high - self.up.low) * room

    def drawn(self, *, upright: bool = True, lines: bool = True) -> list[Markup]:
        """The axes.

        Args:
            upright: with the y axis.
            lines: with faint lines at the marks of the x axis, where there is no y axis.
        """
        base, parts = self.height - self.foot, []
        if upright:
            for value in self.up.ticks(5):
                at = self.y(value)
                parts.append(
                    element(
                        "path",
                        d=f"M{brief(self.left)} {brief(at)} H{brief(self.width - self.right)}",
                        class_="rule",
                    )
                )
                parts.append(
                    element(
                        "text",
                        _shown(value),
                        x=self.left - 6,
                        y=at + 4,
                        text_anchor="end",
                        class_="tick",
                    )
                )
            middle = self.top + (base - self.top) / 2
            turned = f"rotate(-90 12 {brief(middle)})"
            parts.append(
                element(
                    "text",
                    self.up.name,
                    x=12,
                    y=middle,
                    text_anchor="middle",
                    transform=turned,
                    class_="name",
                )
            )
        for value in self.across.ticks(max(4, int((self.width - self.left - self.right) / 40))):
            at = self.x(value)
            if not upright and lines:
                parts.append(
                    element(
                        "path", d=f"M{brief(at)} {brief(self.top)} V{brief(base)}", class_="rule"
                    )
                )
            parts.append(element("path", d=f"M{brief(at)} {brief(base)} v4", class_="axis"))
            parts.append(
                element(
                    "text", _shown(value), x=at, y=base + 16, text_anchor="middle", class_="tick"
                )
            )
        parts.append(
            element(
                "path",
                d=f"M{brief(self.left)} {brief(base)} H{brief(self.width - self.right)}",
                class_="axis",
            )
        )
        centre = self.left + (self.width - self.left - self.right) / 2
        parts.append(
            element(
                "text",
                self.across.name,
                x=centre,
                y=self.height - 6,
                text_anchor="middle",
                class_="name",
            )
        )
        return parts


def _wider(axis: _Axis) -> _Axis:
    """Ends that are not too close to what is drawn, and never one value."""
    low, high = axis.low, axis.high
    if high - low <= 1e-9 * max(1.0, abs(low), abs(high)):
        room = max(0.5, 1e-9 * abs(high))
        low, high = low - room, high + room
    elif not axis.whole and not (low == 0.0 and high == 1.0):
        room = 0.06 * (high - low)
        low, high = (low if low == 0.0 else low - room), high + room
    return _Axis(low, high, axis.name, axis.whole)


# --- parts ----------------------------------------------------------------------------------------


def is_wide(drawing: Markup) -> bool:
    """Whether it keeps a size of its own, which a phone has not."""
    return ' class="wide"' in drawing.partition(">")[0]


def _svg(title: str, height: float, *content: Content, width: float = WIDTH) -> Markup:
    """A drawing that is wider than a phone keeps its size; what it stands in can be scrolled."""
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


def _key(look: Sequence[Markup], name: str, *, width: int) -> Markup:
    drawn = element(
        "svg", look, viewBox=f"0 0 {width} 13", width=width, height=13, aria_hidden="true"
    )
    return element("li", drawn, " ", name)


def _mark(place: int, x: float, y: float, hollow: bool) -> Markup:
    """A dot, square, triangle or diamond: lines are told apart without their colours, too."""
    look = f"{'open' if hollow else 'fill'} {_colour(place)}"
    kind = place % 4
    if kind == 0:
        return element("circle", cx=x, cy=y, r=3, class_=look)
    if kind == 1:
        return element("rect", x=x - 2.7, y=y - 2.7, width=5.4, height=5.4, class_=look)
    corners = {
        2: ((0, -3.6), (3.5, 2.8), (-3.5, 2.8)),
        3: ((0, -3.9), (3.9, 0), (0, 3.9), (-3.9, 0)),
    }[kind]
    return element(
        "polygon",
        points=" ".join(f"{brief(x + a)},{brief(y + b)}" for a, b in corners),
        class_=look,
    )


def _colour(place: int) -> str:
    return f"s{place % COLOURS}"


def _stage_colour(stage: str, names: Sequence[str]) -> str:
    return _colour(names.index(stage)) if stage in names else "grey"


def _in_order(amounts: Mapping[str, float], names: Sequence[str]) -> list[str]:
    return [
        *(name for name in names if name in amounts),
        *(name for name in amounts if name not in names),
    ]


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    step = -(-len(points) // _MOST_POINTS)
    return [point for place, point in enumerate(points) if (len(points) - 1 - place) % step == 0]


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"


def _shown(value: float) -> str:
    """A mark of an axis."""
    return (
        f"{value:,.0f}"
        if abs(value) >= 1000
        else f"{value:g}"
        if abs(value) < 1e-3
        else f"{value:.4g}"
    )
