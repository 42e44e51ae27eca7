"""Where time goes: in a run by its stages, in decoding by what each token costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafttrain.decoding.clock import STAGES
from drafttrain.reporting.console import clock
from drafttrain.reporting.figures import row_label
from drafttrain.reporting.page import charts
from drafttrain.reporting.page.markup import Content, Markup
from drafttrain.reporting.page.parts import Row, figure, figures, missing
from drafttrain.reporting.page.tables import numbers, table
from drafttrain.reporting.records import FIT_STAGES, Record

Bar = tuple[str, dict[str, float]]
_RUN = (
    "Training includes the decoding of held-out prompts in between. Of a run that was continued "
    "this is the last part."
)
_TOKEN = """\
One prompt at a time, in turn with plain decoding. Prefill reads the prompt, draft proposes, verify
is the target's pass over the drafts, host is the rest."""
_LONG_RUN = 300.0
"""Seconds from which on minutes are shown."""


def time_spent(record: Record) -> Content:
    drawn: list[Markup] = []
    if record.seconds:
        unit, per = (
            ("minutes", 60.0) if sum(record.seconds.values()) > _LONG_RUN else ("seconds", 1.0)
        )
        bars: list[Bar] = [
            ("the run", {stage: value / per for stage, value in record.seconds.items()})
        ]
        drawing = charts.stages(f"{unit} of the run by stage", bars, FIT_STAGES, x=unit)
        drawn.append(figure(drawing, "The run", _RUN, charts.stage_legend(bars, FIT_STAGES)))
    bars = bars_of(record.entry.rows)
    if bars:
        drawing = charts.stages(
            "milliseconds per token by stage", bars, STAGES, x="milliseconds per token"
        )
        drawn.append(figure(drawing, "A decoded token", _TOKEN, charts.stage_legend(bars, STAGES)))
    lacking = None if record.seconds else missing("the seconds of the run by stage", *record.again)
    return [lacking, figures(drawn), _table(record)]


def bars_of(rows: Sequence[Row]) -> list[Bar]:
    """Milliseconds per token by stage of the rows whose speed was measured, plain decoding first.

    A row of an earlier version has no count of tokens; its rounds wrote tau each, and every
    prompt's prefill one.
    """
    plain: dict[str, dict[str, float]] = {}
    bars: list[Bar] = []
    for row in rows:
        seconds, tokens = row.get("seconds"), row.get("tokens")
        if row["speedup"] is None or not seconds or not row["nodes"]:
            continue
        if tokens is None and None not in (row["tau"], row["rounds"], row["prompts"]):
            tokens = round(row["tau"] * row["rounds"]) + row["prompts"]
        if not tokens:
            continue
        ground = "plain decoding" + (
            f", temperature {row['temperature']:g}" if row["temperature"] else ""
        )
        if row.get("plain_seconds") and row.get("plain_tokens"):
            spent = {
                stage: 1000 * value / row["plain_tokens"]
                for stage, value in row["plain_seconds"].items()
            }
            plain.setdefault(ground, spent)
        elif row["plain_tokens_per_second"]:
            plain.setdefault(ground, {"stages not recorded": 1000 / row["plain_tokens_per_second"]})
        bars.append(
            (row_label(row), {stage: 1000 * value / tokens for stage, value in seconds.items()})
        )
    return [*plain.items(), *bars]


def _table(record: Record) -> Content:
    training = record.entry.config["training"].get("training")
    noted = training if isinstance(training, dict) else {}
    rows: list[list[Any]] = [
        [stage, value, clock(value)] for stage, value in record.seconds.items()
    ]
    for name, words in (
        ("seconds", "training, all parts"),
        ("evaluation_seconds", "of it decoding held-out prompts"),
    ):
        value = noted.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            rows.append([words, value, clock(value)])
    return (
        numbers(table("Seconds of the run", ["stage", "seconds", "time"], rows)) if rows else None
    )
