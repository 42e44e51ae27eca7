"""The part of a page that compares the runs of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drafttrain.reporting.page import charts
from drafttrain.reporting.page.charts import Series
from drafttrain.reporting.page.markup import Markup, element
from drafttrain.reporting.page.parts import figure, figures
from drafttrain.reporting.page.svg import COLOURS
from drafttrain.reporting.page.tables import table

WORDS = """\
val/tau is the mean number of tokens written per pass of the target on held-out prompts, the best of
a run's evaluations. All runs decoded the same prompts by the same target."""


def runs_of_sweep(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    taus: Mapping[str, Mapping[int, float]],
    notes: Sequence[str],
) -> Markup:
    """A table of all runs, and val/tau by update of the first ones.

    Args:
        columns, rows: of the table, the best run first; a row's first cell names the run.
        taus: {run: {update: val/tau}}, in the same order.
        notes: sentences about them.
    """
    drawn = [Series(name, sorted(found.items())) for name, found in taus.items() if found]
    few, more = drawn[:COLOURS], len(drawn) - COLOURS
    words = "Of each run, by the update of its evaluation."
    if more > 0:
        words += f" Drawn are {COLOURS} of {len(drawn)} runs."
    chart = None
    if few:
        drawing = charts.curves("val/tau by update", few, x="update", y="tokens per target pass")
        chart = figures([figure(drawing, "val/tau", words, charts.legend(few))])
    return element(
        "section",
        element("h2", "Runs of the sweep"),
        [element("p", f"{note[:1].upper()}{note[1:]}.") for note in notes],
        table("Runs, the best first", columns, rows, name="sweep"),
        element("p", WORDS),
        chart,
        id="runs-of-the-sweep",
    )
