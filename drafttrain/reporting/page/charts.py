"""Charts of a report's page: learning curves, acceptance by position, intervals, stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drafttrain.reporting.page.axes import Axis, Frame
from drafttrain.reporting.page.markup import Markup, brief, element
from drafttrain.reporting.page.svg import (
    PLACE,
    SMALL,
    WIDTH,
    Interval,
    colour,
    dot,
    key,
    marker,
    name_of_row,
    path,
    svg,
    text,
)

_MOST_POINTS = 400


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    dots: bool = True


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
    including the last.

    Args:
        x, y: names of the axes, with units.
        least, most: ends of the y axis; None leaves room for the points.
    """
    given = [point for one in series for point in one.points]
    xs, ys = [point[0] for point in given], [point[1] for point in given]
    frame = Frame(
        Axis(0.0, max(xs), x, integers=True),
        Axis(min(ys) if least is None else least, max(ys) if most is None else most, y),
    )
    drawn = []
    for place, one in enumerate(series):
        places = [(frame.x(a), frame.y(b)) for a, b in _thinned(one.points)]
        drawn.append(
            path("M" + " L".join(f"{brief(a)} {brief(b)}" for a, b in places), _line(place, one))
        )
        if one.dots:
            drawn += [marker(place, a, b, one.dashed) for a, b in places]
    return svg(title, frame.height, frame.drawn(), drawn)


def legend(series: Sequence[Series]) -> Markup:
    """The names of lines, each with its look."""
    items = []
    for place, one in enumerate(series):
        look = [path("M1 6 H25", _line(place, one))]
        look += [marker(place, 13, 6, one.dashed)] if one.dots else []
        items.append(key(look, one.name, width=26))
    return element("ul", items, class_="legend")


def _line(place: int, series: Series) -> str:
    return f"line {colour(place)}{' dashed' * series.dashed}"


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    step = -(-len(points) // _MOST_POINTS)
    return [point for place, point in enumerate(points) if (len(points) - 1 - place) % step == 0]


# --- acceptance by position -----------------------------------------------------------------------


def positions(
    title: str,
    rates: Sequence[float | None],
    intervals: Sequence[Interval | None],
    reach: Sequence[float | None],
) -> Markup:
    """accept@k of positions 1, 2, ... as dots with their intervals as bars. In the background, as
    a column, the share of all rounds that accept at least k drafts."""
    across = Axis(0.5, max(1, len(rates)) + 0.5, PLACE, integers=True)
    frame = Frame(across, Axis(0.0, 1.0, "share of rounds"), width=SMALL, height=180.0, left=42.0)
    wide = min(26.0, 0.6 * (frame.x(1) - frame.x(0)))
    drawn = [
        _column(frame, k, share, wide)
        for k, share in enumerate(reach, start=1)
        if share is not None
    ]
    for k, (rate, interval) in enumerate(zip(rates, intervals, strict=True), start=1):
        if rate is not None:
            drawn += _rate(frame, k, rate, interval, min(5.0, wide / 3))
    return svg(title, frame.height, frame.drawn(), drawn, width=SMALL)


def _column(frame: Frame, k: int, share: float, wide: float) -> Markup:
    top = frame.y(share)
    return element(
        "rect",
        element("title", f"at least {k} accepted: {share:.1%} of all rounds"),
        x=frame.x(k) - wide / 2,
        y=top,
        width=wide,
        height=max(0.0, frame.y(0) - top),
        class_="tint",
    )


def _rate(
    frame: Frame, k: int, rate: float, interval: Interval | None, half: float
) -> list[Markup]:
    """A dot at the rate, on a bar from end to end of its interval."""
    at, words, drawn = frame.x(k), f"accept@{k} {rate:.3f}", []
    if interval is not None:
        words += f", 95 % {interval[0]:.3f} to {interval[1]:.3f}"
        low, high = (frame.y(min(1.0, max(0.0, end))) for end in interval)
        bar = f"M{brief(at)} {brief(low)} V{brief(high)}"
        bar += "".join(
            f" M{brief(at - half)} {brief(end)} H{brief(at + half)}" for end in (low, high)
        )
        drawn.append(path(bar, "line s0"))
    return [*drawn, dot(words, at, frame.y(rate), 3.2, "fill s0")]


# --- one value a row ------------------------------------------------------------------------------


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
    axis = Axis(min(mark, *ends), max(mark, *ends), x)
    height = top + step * len(rows) + foot
    frame = Frame(axis, height=height, left=10.0, right=46.0, top=top, foot=foot)
    drawn = [path(f"M{brief(frame.x(mark))} {brief(top)} V{brief(height - foot)}", "mark")]
    for place, row in enumerate(rows):
        drawn += _whisker(frame, top + step * place + 25, *row, unit)
    return svg(title, height, frame.drawn(upright=False), drawn)


def _whisker(
    frame: Frame, line: float, name: str, value: float, interval: Interval | None, unit: str
) -> list[Markup]:
    """Name, bar, dot and number of a row, whose bar is at height `line`."""
    words, drawn = f"{name}: {value:.3f}{unit}", [name_of_row(name, line - 11)]
    if interval is not None:
        words += f", 95 % {interval[0]:.3f} to {interval[1]:.3f}"
        low, high = map(frame.x, interval)
        bar = f"M{brief(low)} {brief(line)} H{brief(high)}"
        bar += "".join(
            f" M{brief(end)} {brief(line - 4)} V{brief(line + 4)}" for end in (low, high)
        )
        drawn.append(path(bar, "line s0"))
    number = text(f"{value:.2f}{unit}", WIDTH - 2, line + 4, "value", anchor="end")
    return [*drawn, dot(words, frame.x(value), line, 3.6, "fill s0"), number]


# --- stages ---------------------------------------------------------------------------------------


def stages(
    title: str, bars: Sequence[tuple[str, Mapping[str, float]]], names: Sequence[str], *, x: str
) -> Markup:
    """Amounts by stage as bars, the stages of a bar one after the other.

    Args:
        bars: name, and amount by stage.
        names: the stages, in the order of their colours; others come last, in grey.
    """
    step, top, foot = 38.0, 6.0, 38.0
    most = max(sum(amounts.values()) for _, amounts in bars)
    height = top + step * len(bars) + foot
    frame = Frame(Axis(0.0, most, x), height=height, left=10.0, right=46.0, top=top, foot=foot)
    drawn: list[Markup] = []
    for place, (name, amounts) in enumerate(bars):
        drawn += _bar(frame, top + step * place + 18, name, amounts, names)
    return svg(title, height, frame.drawn(upright=False), drawn)


def _bar(
    frame: Frame, line: float, name: str, amounts: Mapping[str, float], names: Sequence[str]
) -> list[Markup]:
    """Name, stages and total of a bar, whose upper edge is at height `line`."""
    total, at = sum(amounts.values()), 0.0
    drawn = [name_of_row(name, line - 4)]
    for stage in _in_order(amounts, names):
        start, end = frame.x(at), frame.x(at + amounts[stage])
        words = name
        if total:
            words += f", {stage}: {amounts[stage]:.3g} ({amounts[stage] / total:.0%})"
        drawn.append(
            element(
                "rect",
                element("title", words),
                x=start,
                y=line,
                width=max(0.0, end - start),
                height=13,
                class_=f"fill {_stage_colour(stage, names)}",
            )
        )
        at += amounts[stage]
    return [*drawn, text(f"{total:.3g}", WIDTH - 2, line + 11, "value", anchor="end")]


def stage_legend(bars: Sequence[tuple[str, Mapping[str, float]]], names: Sequence[str]) -> Markup:
    """The stages that any of the bars has, each with its colour."""
    there = _in_order(
        {stage: amount for _, amounts in bars for stage, amount in amounts.items()}, names
    )
    items = []
    for stage in there:
        look = f"fill {_stage_colour(stage, names)}"
        square = element("rect", x=1, y=1, width=11, height=11, class_=look)
        items.append(key([square], stage, width=13))
    return element("ul", items, class_="legend")


def _stage_colour(stage: str, names: Sequence[str]) -> str:
    return colour(names.index(stage)) if stage in names else "grey"


def _in_order(amounts: Mapping[str, float], names: Sequence[str]) -> list[str]:
    return [
        *(name for name in names if name in amounts),
        *(name for name in amounts if name not in names),
    ]
