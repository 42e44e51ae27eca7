"""How a run learned: tau, accept@k and loss by update."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from drafttrain.reporting.page import charts
from drafttrain.reporting.page.charts import Series
from drafttrain.reporting.page.markup import Content, Markup, element
from drafttrain.reporting.page.parts import absent, figure, figures, missing
from drafttrain.reporting.page.svg import COLOURS
from drafttrain.reporting.page.tables import numbers, table
from drafttrain.reporting.records import Record

Logged = Mapping[str, float]
"""A row of metrics.csv."""
_TAU = re.compile(r"val/(?:[^/]+/)?tau")
_FORCED = ("sim/forced_tau", "sim/tau")
"""The second in runs of an earlier version."""
_ACCEPT = re.compile(r"val/accept@([0-9]{1,6})")


def learning(record: Record) -> Content:
    """Curves of the run, and of each model that it fitted."""
    if not record.learns and not any(map(_evaluations, record.curves.values())):
        return absent("It learns nothing, so there is no curve.")
    if not record.curves:
        return missing("metrics.csv", "every logger but logger=none keeps it in the run's folder.")
    found = [(name, _of_one(rows)) for name, rows in record.curves.items()]
    shown: list[Content] = []
    for name, content in found:
        if content is not None:
            shown += [element("h4", name) if name else None, content]
    if shown:
        return shown
    return missing(
        "what was learned",
        "evaluations are made every eval.every updates and at the end, with eval.prompts above 0.",
    )


def _evaluations(rows: Sequence[Logged]) -> list[Logged]:
    return [row for row in rows if any(_TAU.fullmatch(name) for name in row)]


def _of_one(rows: Sequence[Logged]) -> Content:
    """None where no curve was logged."""
    held_out = _evaluations(rows)
    names = {name for row in held_out for name in row}
    places = sorted(int(found[1]) for name in names if (found := _ACCEPT.fullmatch(name)))
    drawn = [*_taus(held_out, names), *_rates(held_out, places), *_losses(rows)]
    if not drawn:
        return None
    return [figures(drawn), numbers(_table(held_out, places)) if held_out else None]


def _taus(rows: Sequence[Logged], names: set[str]) -> list[Markup]:
    lines = [Series(name, _points(rows, name)) for name in sorted(names) if _TAU.fullmatch(name)]
    known = [name for name in _FORCED if name in names]
    lines += [Series(_FORCED[0], _points(rows, name), dashed=True) for name in known[:1]]
    if not lines:
        return []
    words = (
        "val is of held-out prompts with the live weights, counted on the target's answers or by "
        "decoding; sim is estimated from held-out text."
    )
    drawing = charts.curves("tau by update", lines, x="update", y="tokens per target pass")
    return [figure(drawing, "tau", words, charts.legend(lines))]


def _rates(rows: Sequence[Logged], places: Sequence[int]) -> list[Markup]:
    few = places[:COLOURS]
    lines = [Series(f"accept@{k}", _points(rows, f"val/accept@{k}")) for k in few]
    if not lines:
        return []
    words = "Of the rounds whose first k-1 drafts were accepted, the share that accepts the k-th."
    if len(few) < len(places):
        words += f" Drawn are {len(few)} of {len(places)} positions."
    drawing = charts.curves(
        "accept@k by update", lines, x="update", y="share of rounds", least=0.0, most=1.0
    )
    return [figure(drawing, "accept@k", words, charts.legend(lines))]


def _losses(rows: Sequence[Logged]) -> list[Markup]:
    looks = (("train/loss", False, False), ("sim/loss", True, True))
    lines = [Series(name, _points(rows, name), dashed, dots) for name, dashed, dots in looks]
    lines = [one for one in lines if one.points]
    if not lines:
        return []
    words = "train is of the updates since the last entry, sim of held-out text."
    drawing = charts.curves("loss by update", lines, x="update", y="loss per supervised token")
    return [figure(drawing, "loss", words, charts.legend(lines))]


def _table(rows: Sequence[Logged], places: Sequence[int]) -> Markup:
    columns = [
        "update",
        "val/tau",
        "interval",
        "accepted/round",
        "rounds",
        _FORCED[0],
        *(f"accept@{k} (offered)" for k in places),
    ]
    lines = []
    for row in rows:
        rounds = row.get("val/rounds")
        values = [
            row.get("val/tau"),
            _interval(row.get("val/tau_low"), row.get("val/tau_high")),
            row.get("val/accepted_per_round"),
            None if rounds is None else round(rounds),
            next((row[name] for name in _FORCED if name in row), None),
        ]
        rates = [
            _rate(row.get(f"val/accept@{k}"), row.get(f"val/accept@{k}_count")) for k in places
        ]
        lines.append([int(row["step"]), *values, *rates])
    return table("Evaluations while training", columns, lines)


def _points(rows: Sequence[Logged], name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in rows if name in row]


def _interval(low: float | None, high: float | None) -> str | None:
    return None if low is None or high is None else f"{low:.3f}..{high:.3f}"


def _rate(value: float | None, count: float | None) -> str | None:
    return None if value is None else f"{value:.3f}" + ("" if count is None else f" ({count:.0f})")
