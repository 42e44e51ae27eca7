"""Pictures of measured acceptance. Drawn with matplotlib's objects and the Agg canvas: no display,
no global state."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from drafttrain.errors import writing

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#000000")
_HEAD = re.compile(r"sim/head_(\d+)_top(\d+)")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
TAU = "tau: tokens per target pass, bonus included"
SPEED = "speed: plain decoding's seconds per token over these"


def row_label(row: Mapping[str, Any]) -> str:
    """A measured row's name in tables and pictures: its `label`, or its settings."""
    if row.get("label"):
        return str(row["label"])
    words = []
    if row.get("temperature") is not None:
        words.append(f"T={row['temperature']:g}")
    if row.get("growth") is not None:
        words.append(str(row["growth"]))
    if row.get("nodes") is not None:
        words.append(str(row["nodes"]))
    if row.get("rule") is not None:
        words.append(str(row["rule"]))
    return " ".join(words) or "measured"


def acceptance_curve(
    rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], *, title: str | None = None
) -> Path:
    """accept@k by depth for every row, and tau as bars, as one PNG.

    Args:
        rows: as in a package's `metrics.json`: `accept_at` (k = 1..), `tau`, and where measured
            `accept_at_interval` (a list of [low, high]) and `tau_interval`. None is left out.
        path: where to write; its folder is made, and an earlier picture is replaced only by a
            complete one.
    Returns: path.
    """
    path = Path(path)
    figure = Figure(figsize=(11, 4.2 + 0.25 * max(0, len(rows) - 4)), layout="constrained")
    curve, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_curves(curve, rows)
    _draw_bars(bars, rows, "tau", TAU)
    if title:
        figure.suptitle(_literal(title))
    _write(figure, path)
    return path


def comparison(
    rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], *, title: str | None = None
) -> Path:
    """Speed, tau and accept@k of several drafters side by side, in the order of the rows, as one
    PNG.

    Args:
        rows: as in `acceptance_curve`, with `speedup` and where measured `speedup_interval`.
        path: where to write; its folder is made, and an earlier picture is replaced only by a
            complete one.
    Returns: path.
    """
    path = Path(path)
    figure = Figure(figsize=(16, 3.2 + 0.35 * len(rows)), layout="constrained")
    speed, tau, curve = figure.subplots(1, 3, width_ratios=(3, 3, 4))
    _draw_bars(speed, rows, "speedup", SPEED)
    _draw_bars(tau, rows, "tau", TAU)
    _draw_curves(curve, rows)
    if title:
        figure.suptitle(_literal(title))
    _write(figure, path)
    return path


def head_accuracies(metrics: Mapping[str, float | None], path: str | os.PathLike[str]) -> bool:
    """Top-n accuracy of every head on held-out text, as one PNG.

    Args:
        metrics: `sim/head_<k>_top<n>` are drawn, whatever else is there.
    Returns: whether there was something to draw; without it nothing is written.
    """
    curves: dict[int, list[tuple[int, float]]] = {}
    for name, value in metrics.items():
        if (found := _HEAD.fullmatch(name)) and value is not None:
            curves.setdefault(int(found[2]), []).append((int(found[1]), value))
    if not curves:
        return False
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    for place, (top, points) in enumerate(sorted(curves.items())):
        heads, values = zip(*sorted(points), strict=True)
        axes.plot(
            heads,
            values,
            label=f"top {top}",
            color=_COLOURS[place % len(_COLOURS)],
            marker=_MARKERS[place % len(_MARKERS)],
        )
    axes.set_xlabel("head k, which guesses the token k + 1 places ahead")
    axes.set_ylabel("share of held-out tokens, teacher-forced")
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    _write(figure, Path(path))
    return True


def _write(figure: Figure, path: Path) -> None:
    """An earlier picture is replaced only by a complete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with writing(path), warnings.catch_warnings():
        # A box is drawn in its place.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        FigureCanvasAgg(figure).print_figure(
            str(temporary), format="png", dpi=120, metadata={"Software": None}
        )
    os.replace(temporary, path)


def _literal(text: str) -> str:
    """A name that matplotlib shows letter by letter: it takes text between two dollars for a
    formula."""
    return text.replace("$", r"\$")


def _draw_curves(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """accept@k by depth for every row."""
    found = [
        _draw_curve(axes, row, place, 0.05 * (place - (len(rows) - 1) / 2))
        for place, row in enumerate(rows)
    ]
    drawn = [one for one in found if one is not None]
    axes.set_xlabel("position k in the draft")
    axes.set_ylabel("accept@k (given positions 1..k-1 accepted)")
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if drawn:
        # By name, since matplotlib leaves out names that start with an underscore.
        axes.legend(drawn, [_literal(str(one.get_label())) for one in drawn], fontsize="small")
    else:
        _say_nothing(axes)


def _draw_curve(
    axes: Axes, row: Mapping[str, Any], place: int, shift: float
) -> ErrorbarContainer | None:
    """One row's points, shifted a little so that intervals do not hide each other; None without
    any."""
    values = row.get("accept_at") or []
    depths = [k for k, value in enumerate(values, 1) if value is not None]
    if not depths:
        return None
    heights = [float(values[k - 1]) for k in depths]
    intervals = row.get("accept_at_interval") or []
    ranges = [_interval(intervals[k - 1]) if k <= len(intervals) else None for k in depths]
    colour = _COLOURS[place % len(_COLOURS)]
    return axes.errorbar(
        [depth + shift for depth in depths],
        heights,
        yerr=_bars(heights, ranges),
        label=row_label(row),
        color=colour,
        marker=_MARKERS[place % len(_MARKERS)],
        linestyle="-" if place < len(_COLOURS) else "--",
        capsize=3,
    )


def _draw_bars(axes: Axes, rows: Sequence[Mapping[str, Any]], name: str, words: str) -> None:
    """One number of every row that has it, with its interval; decoding without drafts has 1."""
    measured = [(place, row) for place, row in enumerate(rows) if row.get(name) is not None]
    axes.set_xlabel(words)
    if not measured:
        _say_nothing(axes)
        return
    heights = [float(row[name]) for _, row in measured]
    ranges = [_interval(row.get(f"{name}_interval")) for _, row in measured]
    axes.barh(
        range(len(measured)),
        heights,
        xerr=_bars(heights, ranges),
        color=[_COLOURS[place % len(_COLOURS)] for place, _ in measured],
        capsize=3,
    )
    for place, height in enumerate(heights):
        axes.annotate(
            f"{height:.2f}",
            (0, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color="white",
        )
    axes.set_yticks(range(len(measured)), [_literal(row_label(row)) for _, row in measured])
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1, linestyle=":")


def _interval(pair: Any) -> tuple[float, float] | None:
    return (
        None
        if pair is None or pair[0] is None or pair[1] is None
        else (float(pair[0]), float(pair[1]))
    )


def _bars(
    heights: Sequence[float], ranges: Sequence[tuple[float, float] | None]
) -> list[list[float]] | None:
    """Lengths below and above each value, as matplotlib takes them; zero where there is no
    interval."""
    if not any(ranges):
        return None
    below = [
        max(0.0, height - pair[0]) if pair else 0.0
        for height, pair in zip(heights, ranges, strict=True)
    ]
    above = [
        max(0.0, pair[1] - height) if pair else 0.0
        for height, pair in zip(heights, ranges, strict=True)
    ]
    return [below, above]


def _say_nothing(axes: Axes) -> None:
    axes.text(0.5, 0.5, "nothing measured", ha="center", va="center", transform=axes.transAxes)
