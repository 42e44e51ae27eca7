"""What was accepted: by position with intervals, and node by node of a tree."""

from __future__ import annotations

from collections.abc import Sequence

from drafttrain.reporting.figures import row_label
from drafttrain.reporting.page import branches, charts
from drafttrain.reporting.page.markup import Content, Markup, element
from drafttrain.reporting.page.parts import Row, absent, figure, figures, missing
from drafttrain.reporting.page.tables import numbers, table
from drafttrain.reporting.records import Record
from drafttrain.reporting.rows import position_intervals
from drafttrain.tree.topology import Tree

_MOST_POSITIONS = 64
_POSITIONS = """\
Dots are accept@k: of the rounds in which a k-th token was drafted after k-1 accepted ones, the
share that kept it, with its 95 % interval. Columns are the share of all rounds that kept at least k
drafts; their sum is the number of drafts accepted per round."""
_OVER_PROMPTS = " Intervals are over prompts."
_OF_COUNTS = """ \
Where no interval over prompts was recorded, the bar is Wilson's interval of the counts, which is
too narrow if the rounds of a prompt are alike; measuring again records the interval over
prompts."""
_TREES = """\
A number is how often the node was accepted, given that its parent was. The more of all rounds took
a way, the wider it is. The most likely child is on its parent's line. An answer's last round is
left out, since a stop token or the limit may have cut it."""


def positions(rows: Sequence[Row]) -> Content:
    """A drawing for each row that drafted, and the numbers of all."""
    known = [row for row in rows if any(rate is not None for rate in row["accept_at"])]
    if not known:
        return absent("No round of drafts was measured.")
    drawn, lines, over_prompts = [], [], set()
    for row in known:
        label, rates, reach = (
            row_label(row),
            row["accept_at"][:_MOST_POSITIONS],
            row.get("reach") or [],
        )
        intervals, by_prompt = position_intervals(row)
        over_prompts.add(by_prompt)
        drawing = charts.positions(
            f"accept@k of {label}", rates, intervals[: len(rates)], reach[: len(rates)]
        )
        drawn.append(figure(drawing, label, _extent(row)))
        for k, rate in enumerate(rates, start=1):
            counts = row["accept_counts"][k - 1] or (None, None)
            lines.append(
                [
                    label,
                    k,
                    rate,
                    intervals[k - 1],
                    *counts,
                    reach[k - 1] if k <= len(reach) else None,
                ]
            )
    words = (
        _POSITIONS + _OVER_PROMPTS * (True in over_prompts) + _OF_COUNTS * (False in over_prompts)
    )
    columns = ["drafts", "k", "accept@k", "95 %", "kept", "offered", "reach"]
    return [
        element("p", words),
        figures(drawn, small=True),
        numbers(table("Acceptance by position", columns, lines)),
    ]


def trees(record: Record) -> Content:
    """Trees with the hits of every node; of runs that did not count those, what is known by
    position and rank."""
    drawn: list[Markup] = []
    coarse: list[Markup] = []
    uncounted: list[str] = []
    changing: list[str] = []
    for row in record.entry.rows:
        label, counted, rates = row_label(row), row.get("node_counts"), row.get("rank_rates")
        if not row["nodes"] or row["growth"] in (None, "plain", "chain"):
            continue
        if row["growth"] != "static":
            changing.append(label)
        elif counted:
            shape = Tree(tuple(node["parent"] for node in counted))
            kept, offered = ([node[name] for node in counted] for name in ("kept", "offered"))
            drawn.append(
                figure(
                    branches.tree(f"hit rates of {label}", shape, kept, offered),
                    label,
                    _extent(row),
                )
            )
        else:
            uncounted.append(label)
            if rates:
                title = f"hit rates of {label} by position and rank"
                coarse.append(
                    figure(
                        branches.grid(title, rates), f"{label}, by position and rank", _extent(row)
                    )
                )
    found: list[Content] = [
        [element("p", _TREES), figures(drawn)] if drawn else None,
        figures(coarse),
        missing(f"the hits of each node of {', '.join(uncounted)}", *record.again)
        if uncounted
        else None,
        absent(
            f"Another tree in every round, so that no node can be followed: {', '.join(changing)}."
        )
        if changing
        else None,
    ]
    if not any(found):
        return absent(
            "Only chains were measured; their positions are shown above."
            if record.entry.rows
            else "Nothing was measured."
        )
    return found


def _extent(row: Row) -> str:
    """What was drafted, and in how many rounds."""
    words = [str(row["tree"] or row["growth"] or "drafts")]
    words += [
        f"{row[name]:,} {name}" for name in ("nodes", "prompts", "rounds") if row[name] is not None
    ]
    return ", ".join(words)
