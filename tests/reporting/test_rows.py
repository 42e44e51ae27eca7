"""Sentences about measured rows."""

from __future__ import annotations

from typing import Any

import pytest

from drafttrain.decoding.plan import UNKEPT
from drafttrain.reporting.rows import (
    accepted_cells,
    gaps,
    memories,
    position_intervals,
    same_text_cell,
    verdicts,
    wilson,
)


def test_cells_show_counts_where_they_are_known() -> None:
    row = {"accept_at": [0.5, None, 0.25], "accept_counts": [[1, 2], [0, 0], None]}
    assert accepted_cells(row) == ["0.500 (1/2)", "-", "0.250"]
    assert same_text_cell({"same_as_plain": None}) == "-"
    assert same_text_cell({"same_as_plain": 3, "speed_prompts": 4, "prompts": 100}) == "3/4"
    assert same_text_cell({"same_as_plain": 3, "prompts": 4}) == "3/4"
    assert same_text_cell({"same_as_plain": 3, "prompts": None}) == "3/?"


def test_intervals_of_shares_are_those_recorded_or_of_the_counts() -> None:
    row: dict[str, Any] = {"accept_at": [0.5, None], "accept_counts": [[10, 20], None]}
    intervals, over_prompts = position_intervals(row)
    assert intervals == [pytest.approx((0.29930, 0.70070), abs=1e-5), None] and not over_prompts
    assert position_intervals({**row, "accept_at_interval": [[0.25, 0.75], None]}) == (
        [(0.25, 0.75), None],
        True,
    )
    # Both ends solve |p - kept/offered| = z sqrt(p (1 - p) / offered).
    for kept, offered in ((0, 5), (3, 7), (99, 100), (8, 8)):
        found = wilson(kept, offered)
        assert found is not None
        for end in found:
            assert abs(end - kept / offered) == pytest.approx(
                1.959964 * (max(0.0, end * (1 - end)) / offered) ** 0.5, abs=1e-6
            )
    assert wilson(0, 0) is None and wilson(3, 2) is None and wilson(-1, 2) is None


def test_a_lower_tau_is_said_with_how_sure_that_is() -> None:
    rows: list[dict[str, Any]] = [
        {"label": "b", "tau": 1.5, "tau_behind_best": 0.25, "tau_behind_best_interval": [0.1, 0.4]},
        {"label": "a", "tau": 1.75, "tau_behind_best": None, "tau_behind_best_interval": None},
        {
            "label": "c",
            "tau": 1.7,
            "tau_behind_best": 0.05,
            "tau_behind_best_interval": [-0.1, 0.2],
        },
    ]
    (said,) = gaps(rows)
    assert said == (
        "tau is highest with a; lower, on the same prompts: b by 0.250 (0.100..0.400), c by 0.050 "
        "(-0.100..0.200, too few prompts to be sure)"
    )
    assert gaps(rows[1:2]) == gaps([{"label": "d", "tau": 2.0}]) == []


def test_what_was_remembered_while_measuring_is_said() -> None:
    rows = [
        {"label": "a", "remember": 900, "repeated_prompts": 0},
        {"label": "b", "remember": 900, "repeated_prompts": 0},
        {"label": "c", "remember": 900, "repeated_prompts": 3},
        {"label": "d", "remember": 0, "repeated_prompts": 0},
        {"label": "e", "remember": None},
        {"label": "f"},
    ]
    once, again = memories(rows)
    assert "(up to 900 tokens)" in once and once.endswith(": a, b")
    assert again.endswith("; 3 of the prompts had been decoded before: c")
    assert memories(rows[3:]) == []


@pytest.mark.field("F59")
def test_slower_is_said_plainly() -> None:
    def row(
        label: str, speed: float | None, *, nodes: int = 3, low: float = 0.0, same: int | None = 4
    ) -> dict[str, Any]:
        return {
            "label": label,
            "temperature": 0.0,
            "nodes": nodes,
            "speedup": speed,
            "speedup_interval": [low, 9.0],
            "tau": 2.0,
            "same_as_plain": same,
            "speed_prompts": 4,
        }

    (line,) = verdicts([row("plain", 1.0, nodes=0), row("a", 0.9), row("b", 0.8)])
    assert "SLOWER" in line and "a, 0.90x" in line
    best, slower = verdicts([row("a", 1.5, low=1.2), row("b", 0.8)])
    assert (
        best == "fastest is a, 1.50x plain decoding"
        and slower == "slower than plain decoding: b (0.80x)"
    )
    assert "not clearly faster" in verdicts([row("a", 1.1, low=0.9)])[0]
    assert "near-ties" in verdicts([row("a", 1.1, low=1.05, same=3)])[1]
    assert verdicts([row("a", None)]) == []


@pytest.mark.field("F70")
def test_another_text_is_called_what_it_is() -> None:
    """Near-ties explain it in low precision only, and a rule that is approximate explains it
    too."""

    def line(guarantee: str) -> str:
        row = {
            "label": "a",
            "temperature": 0.0,
            "nodes": 3,
            "speedup": None,
            "tau": 2.0,
            "same_as_plain": 3,
            "speed_prompts": 4,
            "guarantee": guarantee,
        }
        (found,) = verdicts([row])
        return found

    assert "near-ties in low precision" in line("greedy")
    assert "DIFFERS" in line(UNKEPT) and "near-ties" not in line(UNKEPT) and "3/4" in line(UNKEPT)
    assert "the rule is approximate" in line("approximate")
