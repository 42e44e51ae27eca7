"""Drafters side by side: a line for each, for the console and as Markdown, so that both show the
same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drafttrain.reporting.console import cell, clock
from drafttrain.reporting.kinds import KINDS, kinds_table
from drafttrain.reporting.rows import MEAN, accepted_cells, pair, same_text_cell

COLUMNS = (
    "run",
    "drafter",
    "tree",
    "speed",
    "95 %",
    "tau",
    "95 %",
    MEAN,
    "accepted/round",
    "accept@1, 2, ... (kept/offered)",
    "prompts",
    "same text",
    "parameters",
    "MB",
    "training",
    "tokens learned",
    "guarantee",
)
MEANING = """\
`speed` is plain decoding's seconds per token divided by the drafter's, `tau` the tokens written per
target pass over all rounds, the target's own included, `mean tau of prompts` the mean of the
prompts' own taus, and `accept@k` how often the k-th drafted token is kept, given that those before
it were. 95 % intervals are over prompts. `parameters` and `MB` are what the
package adds to its target; `tokens learned` are supervised tokens, those of every epoch counted."""


def line(row: Mapping[str, Any]) -> list[Any]:
    """The cells of a drafter's row.

    Args:
        row: a measured row with what its drafter costs: `run`, `drafter`, `parameters`, `bytes`,
            `training_seconds`, `supervised_tokens`, `begun_from`.
    """
    return [
        row["run"],
        row["drafter"],
        tree_title(row),
        row["speedup"],
        pair(row["speedup_interval"]),
        row["tau"],
        pair(row["tau_interval"]),
        row.get("tau_prompt_mean"),
        row["accepted_per_round"],
        " ".join(accepted_cells(row)) or None,
        row["prompts"],
        same_text_cell(row),
        _thousands(row["parameters"]),
        None if row["bytes"] is None else row["bytes"] / 1e6,
        _training(row),
        _thousands(row["supervised_tokens"]),
        row["guarantee"],
    ]


def tree_title(row: Mapping[str, Any]) -> str:
    """A measured row's tree in a word or two."""
    return str(row["tree"] or f"{row['growth'] or '?'} {row['nodes']}")


def fastest_first(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those without a measured speed last."""
    return sorted(
        rows,
        key=lambda row: (
            row["speedup"] is None,
            -(row["speedup"] or 0.0),
            -(row["tau"] or 0.0),
            row["label"],
        ),
    )


def markdown(
    rows: Sequence[Mapping[str, Any]],
    *,
    title: str,
    settings: Mapping[str, Any],
    notes: Sequence[str] = (),
    picture: str | None = None,
) -> str:
    """The table as a Markdown file.

    Args:
        settings: under which everything was measured.
        notes: sentences under the table.
        picture: name of a file in the same folder.
    """
    listed = ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
    lines = [
        f"# {title}",
        "",
        _table_line(COLUMNS),
        _table_line(["---"] * len(COLUMNS)),
        *(_table_line([cell(value) for value in line(row)]) for row in rows),
        "",
        MEANING,
        *_by_kind(rows),
        *(["", f"Measured with: {listed}."] if listed else []),
        *(["", *(f"- {note}" for note in notes)] if notes else []),
        *(["", f"![speed, tau and accept@k]({picture})"] if picture else []),
    ]
    return "\n".join(lines) + "\n"


def _by_kind(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    found = kinds_table(rows)
    if found is None:
        return []
    columns, lines = found
    return [
        *("", f"## {KINDS[0].upper()}{KINDS[1:]}", ""),
        _table_line(columns),
        _table_line(["---"] * len(columns)),
        *(_table_line([cell(value) for value in line]) for line in lines),
    ]


def _table_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "/").replace("\n", " ") for text in cells) + " |"


def _thousands(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def _training(row: Mapping[str, Any]) -> str | None:
    if row["training_seconds"] is None:
        return None
    more = f", from {row['begun_from']}" if row["begun_from"] else ""
    return clock(row["training_seconds"]) + more
