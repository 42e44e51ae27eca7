"""Acceptance by kind of task: the same lines for the console, for Markdown and for pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drafttrain.reporting.figures import row_label
from drafttrain.reporting.rows import MEAN, pair

KINDS = "tau by kind of task"
OVER_ROUNDS, OF_PROMPTS = "all, over rounds", f"all, {MEAN}"


def counted_by_kind(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows that drafted and know tau by kind; where some were counted on fewer prompts, as those
    are that were timed, only the others."""
    known = [row for row in rows if row["nodes"] and row.get("by_category")]
    most = max((_prompts(row) for row in known), default=0)
    return [row for row in known if _prompts(row) == most]


def kinds_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]] | None:
    """Columns and lines: a kind a line, a way of drafting two columns, tau over rounds and its 95 %
    interval; last the totals in both ways. None where nothing was counted by kind."""
    known = counted_by_kind(rows)
    if not known:
        return None
    kinds = [{one["category"]: one for one in row["by_category"]} for row in known]
    names = dict.fromkeys(name for kind in kinds for name in kind)
    columns = ["kind of task", "prompts"]
    for row in known:
        columns += [row_label(row), "95 %"]
    lines: list[list[Any]] = []
    for name in names:
        found = [kind.get(name, {}) for kind in kinds]
        prompts = next(one["prompts"] for one in found if one)
        lines.append([name, prompts, *_pairs(found, "tau")])
    total, without = _prompts(known[0]), known[0].get("prompts_without_rounds") or 0
    lines.append([OVER_ROUNDS, total, *_pairs(known, "tau")])
    lines.append([OF_PROMPTS, total - without, *_pairs(known, "tau_prompt_mean")])
    return columns, lines


def _pairs(found: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """Value and interval of each."""
    return [cell for one in found for cell in (one.get(name), pair(one.get(f"{name}_interval")))]


def _prompts(row: Mapping[str, Any]) -> int:
    return sum(one["prompts"] for one in row["by_category"])
