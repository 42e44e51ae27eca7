"""Drawings put values where the axes say they are."""

from __future__ import annotations

import itertools
import re

import pytest

from drafttrain.reporting.page.axes import Axis
from drafttrain.reporting.page.branches import grid, tree
from drafttrain.reporting.page.charts import (
    Series,
    curves,
    legend,
    positions,
    stage_legend,
    stages,
    whiskers,
)
from drafttrain.reporting.page.markup import Markup
from drafttrain.reporting.page.svg import COLOURS, WIDTH, colour, is_wide, marker
from drafttrain.tree.topology import Tree
from tests.reporting.parsed import Node, parsed


def read(drawing: Markup) -> Node:
    return parsed(f"<!DOCTYPE html>\n{drawing}").all("svg")[0]


def number(node: Node, name: str) -> float:
    return float(node.attributes[name] or "")


def scale(svg: Node, across: bool) -> tuple[float, float]:
    """(a, b) of place = a value + b, by the first and last mark of an axis."""
    middle = [
        node
        for node in svg.classed("tick")
        if (node.attributes.get("text-anchor") == "middle") == across
    ]
    name = "x" if across else "y"
    values = [float(node.text.replace(",", "")) for node in middle]
    places = [number(node, name) - (0 if across else 4) for node in middle]
    a = (places[-1] - places[0]) / (values[-1] - values[0])
    return a, places[0] - a * values[0]


def test_positions_are_drawn_at_their_rates() -> None:
    svg = read(positions("p", [0.8, None, 0.25], [(0.7, 0.9), None, None], [0.8, 0.4, 0.1]))
    assert svg.attributes["aria-label"] == "p" and svg.attributes["role"] == "img"
    (a, b), (c, d) = scale(svg, True), scale(svg, False)
    dots = svg.all("circle")
    assert [(number(dot, "cx"), number(dot, "cy")) for dot in dots] == [
        pytest.approx((a * k + b, c * rate + d), abs=0.02) for k, rate in ((1, 0.8), (3, 0.25))
    ]
    (bar,) = svg.classed("line")
    ends = [float(end) for end in re.findall(r"[\d.]+", (bar.attributes["d"] or "").split(" M")[0])]
    assert ends == pytest.approx([a + b, c * 0.7 + d, c * 0.9 + d], abs=0.02)
    columns = svg.all("rect")
    assert [number(column, "y") for column in columns] == pytest.approx(
        [c * share + d for share in (0.8, 0.4, 0.1)], abs=0.02
    )
    assert all(
        number(column, "y") + number(column, "height") == pytest.approx(d, abs=0.02)
        for column in columns
    )
    assert (
        dots[0].text == "accept@1 0.800, 95 % 0.700 to 0.900" and dots[1].text == "accept@3 0.250"
    )


def test_curves_run_through_their_points() -> None:
    lines = [Series("a", [(100, 1.25), (2000, 1.75)]), Series("b", [(100, 1.5)], dashed=True)]
    svg = read(curves("c", lines, x="update", y="tau"))
    (a, b), (c, d) = scale(svg, True), scale(svg, False)
    first, second = svg.classed("line")
    found = [float(part) for part in re.findall(r"[\d.]+", first.attributes["d"] or "")]
    assert found == pytest.approx([a * 100 + b, c * 1.25 + d, a * 2000 + b, c * 1.75 + d], abs=0.05)
    assert "dashed" in (second.attributes["class"] or "") and len(svg.classed("open")) == 1
    assert {"update", "tau"} <= {node.text for node in svg.classed("name")}
    assert "2,000" in [node.text for node in svg.classed("tick")]
    assert len(read(legend(lines)).all("path")) == 1


def test_of_many_points_some_are_drawn_and_the_last() -> None:
    points = [(float(step), step / 1000) for step in range(1, 1002)]
    svg = read(curves("c", [Series("a", points, dots=False)], x="update", y="loss"))
    (line,) = svg.classed("line")
    places = (line.attributes["d"] or "").split(" L")
    assert 300 < len(places) <= 400
    a, b = scale(svg, True)
    assert float(places[-1].split()[0]) == pytest.approx(a * 1001 + b, abs=0.02)


def test_marks_of_an_axis_are_round_and_few() -> None:
    for low, high in (
        (0.0, 1.0),
        (1.5957, 1.9439),
        (0.0, 2669.0),
        (-3e-9, 5e12),
        (0.0, 1e-7),
        (7.0, 7.0),
        (1e15, 1e15),
    ):
        axis = Axis(low, high, "x").widened()
        ticks = axis.ticks(6)
        assert 2 <= len(ticks) <= 7
        assert axis.low - 1e-9 <= ticks[0] and ticks[-1] <= axis.high * (1 + 1e-9)
        steps = [(b - a) / (ticks[1] - ticks[0]) for a, b in itertools.pairwise(ticks)]
        assert steps == pytest.approx([1.0] * len(steps))
    assert Axis(0.5, 4.5, "k", integers=True).ticks(8) == [1, 2, 3, 4]
    assert Axis(0.5, 64.5, "k", integers=True).ticks(8) == [10, 20, 30, 40, 50, 60]


def test_whiskers_hold_value_and_interval() -> None:
    long = "a name that is much longer than any drawing of a phone's width has room for"
    svg = read(
        whiskers("w", [("a", 1.5, (1.25, 2.0)), (long, 0.5, None)], x="speed", mark=1.0, unit="×")
    )
    a, b = scale(svg, True)
    assert [number(dot, "cx") for dot in svg.all("circle")] == pytest.approx(
        [a * 1.5 + b, a * 0.5 + b], abs=0.02
    )
    (bar,) = svg.classed("line")
    low, _, high = (float(end) for end in re.findall(r"[\d.]+", bar.attributes["d"] or "")[:3])
    assert [low, high] == pytest.approx([a * 1.25 + b, a * 2.0 + b], abs=0.02)
    assert [node.text for node in svg.classed("value")] == ["1.50×", "0.50×"]
    assert any(node.text.endswith("…") and long in node.text for node in svg.all("text")), (
        "the full name is its title"
    )


def test_stages_are_as_long_as_their_amounts() -> None:
    bars = [("a", {"verify": 3.0, "draft": 1.0}), ("b", {"other": 2.0}), ("c", {})]
    svg = read(stages("s", bars, ("draft", "verify"), x="ms"))
    a, b = scale(svg, True)
    rects = svg.all("rect")
    assert [number(rect, "width") for rect in rects] == pytest.approx(
        [a * 1, a * 3, a * 2], abs=0.02
    )
    assert [number(rect, "x") for rect in rects] == pytest.approx([b, b + a, b], abs=0.02)
    assert [rect.attributes["class"] for rect in rects] == ["fill s0", "fill s1", "fill grey"]
    keys = parsed(f"<!DOCTYPE html>\n{stage_legend(bars, ('draft', 'verify'))}").all("li")
    assert [key.text.strip() for key in keys] == ["draft", "verify", "other"]


def test_a_tree_s_first_children_are_on_their_parent_s_line() -> None:
    shape = Tree.eagle1_static()
    kept, offered = [25 - node for node in range(25)], [50] * 25
    svg = read(tree("t", shape, kept, offered))
    *circles, anchor = svg.all("circle")
    places = [(number(circle, "cx"), number(circle, "cy")) for circle in circles]
    assert len(set(places)) == shape.size, "no node hides another"
    assert len({y for _, y in places}) == len(shape.leaves)
    for node, (x, y) in enumerate(places):
        parent = shape.parents[node]
        above = (number(anchor, "cx"), number(anchor, "cy")) if parent < 0 else places[parent]
        assert x > above[0] and (y == above[1]) == (shape.ranks[node] == 0)
    assert [node.text for node in svg.classed("rate")] == [f"{hit / 50:.0%}" for hit in kept]
    widths = [number(way, "stroke-width") for way in svg.classed("way")]
    assert widths == sorted(widths) and widths[-1] == pytest.approx(0.8 + 5 * 0.5)
    box = [float(end) for end in (svg.attributes["viewbox"] or "").split()]
    assert box[2] == WIDTH and max(y for _, y in places) < box[3]
    deep = tree("t", Tree.expansion([2, *[1] * 11]), [1] * 24, [2] * 24)
    assert is_wide(deep) and float(read(deep).attributes["width"] or "") > WIDTH
    assert not is_wide(grid("wide", [[0.5]])) and "–" in grid("g", [[0.5], [None, 0.25], None])


def test_lines_are_distinguished_without_their_colours() -> None:
    marks = [marker(place, 0, 0, False) for place in range(4)]
    assert (
        len({mark.partition(" ")[0] + ("4" if mark.count(",") == 4 else "") for mark in marks}) == 4
    )
    assert colour(COLOURS) == colour(0)
