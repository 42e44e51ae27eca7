"""What was accepted by kind of task: a drawing of the best way of drafting, and the numbers of
all."""

from __future__ import annotations

from collections.abc import Sequence

from drafttrain.reporting.figures import row_label
from drafttrain.reporting.kinds import KINDS, counted_by_kind, kinds_table
from drafttrain.reporting.page import charts
from drafttrain.reporting.page.markup import Content, element
from drafttrain.reporting.page.parts import Row, figure, figures
from drafttrain.reporting.page.tables import numbers, table
from drafttrain.reporting.rows import pair

_WORDS = """\
tau of a kind is over the rounds of its prompts, whose number is in brackets. Bars are 95 %
intervals over these prompts; the line at 1 is decoding without drafts."""


def by_kind(rows: Sequence[Row]) -> Content:
    """None where nothing was counted by kind."""
    found = kinds_table(rows)
    if found is None:
        return None
    best = max(counted_by_kind(rows), key=lambda row: row["tau"] or 0.0)
    drawn = [
        (f"{one['category']} ({one['prompts']})", float(one["tau"]), pair(one["tau_interval"]))
        for one in best["by_category"]
        if one["tau"] is not None
    ]
    drawing = None
    if drawn:
        title = f"{KINDS} of {row_label(best)}, the highest of these"
        chart = charts.whiskers(title, drawn, x="tau, tokens per target pass", mark=1.0)
        drawing = figures([figure(chart, title, _WORDS)])
    return [element("h4", "By kind of task"), drawing, numbers(table(KINDS, *found))]
