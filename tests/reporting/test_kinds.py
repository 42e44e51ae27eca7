"""tau by kind of task, as tables and as a part of a page."""

from __future__ import annotations

from typing import Any

from drafttrain.reporting.kinds import OF_PROMPTS, OVER_ROUNDS, kinds_table
from drafttrain.reporting.page.kinds import by_kind
from drafttrain.reporting.page.markup import element
from drafttrain.reporting.rows import unrounded
from tests.packaging.measured import row
from tests.reporting.parsed import parsed


def kind(name: str, prompts: int, tau: float | None, **more: Any) -> dict[str, Any]:
    interval = None if tau is None or prompts < 2 else [tau - 0.5, tau + 0.5]
    found = {"category": name, "prompts": prompts, "rounds": 9, "tau": tau}
    return {**found, "tau_interval": interval, **more}


def counted(label: str, tau: float, *kinds: dict[str, Any]) -> dict[str, Any]:
    mean = {"tau_prompt_mean": tau + 0.25, "tau_prompt_mean_interval": [1.0, 3.0]}
    return row(None, tau, label=label, by_category=[*kinds], **mean, prompts_without_rounds=1)


LOW = counted("chain", 1.5, kind("code", 3, 1.25), kind("(none)", 1, None))
HIGH = counted("static", 2.0, kind("code", 3, 2.5), kind("<b>", 1, 1.75))
TIMED = counted("timed", 9.0, kind("code", 1, 9.0), kind("<b>", 1, 9.0))
PLAIN = {**counted("plain", 1.0, kind("code", 3, 1.0), kind("<b>", 1, 1.0)), "nodes": 0}


def test_kinds_are_lines_and_ways_of_drafting_columns() -> None:
    found = kinds_table([PLAIN, LOW, row(1.5, 2.0), HIGH, TIMED])
    assert found is not None
    columns, lines = found
    assert columns == ["kind of task", "prompts", "chain", "95 %", "static", "95 %"]
    assert lines == [
        ["code", 3, 1.25, (0.75, 1.75), 2.5, (2.0, 3.0)],
        ["(none)", 1, None, None, None, None],
        ["<b>", 1, None, None, 1.75, None],
        [OVER_ROUNDS, 4, 1.5, (1.4, 1.6), 2.0, (1.9, 2.1)],
        [OF_PROMPTS, 3, 1.75, (1.0, 3.0), 2.25, (1.0, 3.0)],
    ]
    assert kinds_table([row(1.5, 2.0), PLAIN]) is None and kinds_table([]) is None


def test_the_page_draws_the_best() -> None:
    html = element("html", by_kind([LOW, HIGH, TIMED]))
    root = parsed(f"<!DOCTYPE html>\n{html}\n")
    (figure,) = root.all("figure")
    assert "static" in figure.all("h4")[0].text
    assert all(words in figure.text for words in ("code (3)", "<b> (1)", "2.50", "1.75"))
    (table,) = root.all("table")
    assert [cells[0].text for cells in table.cells()][:3] == ["code", "(none)", "<b>"]
    assert table.cells()[0][4].values() == [2.5]
    assert by_kind([row(1.5, 2.0)]) is None


def test_prompts_that_are_in_no_tau_are_said() -> None:
    assert unrounded([LOW, HIGH, PLAIN, row(1.5, 2.0)]) == [
        "1 of 2 prompts had no round, since their answers ended with the first token: they are in "
        "no tau"
    ]
    assert unrounded([{**LOW, "prompts_without_rounds": 0}]) == []
