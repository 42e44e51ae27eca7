"""The part of a report's page about one run, made from its record. What the record lacks is
named."""

from __future__ import annotations

from collections.abc import Sequence

from drafttrain.errors import InputError, room
from drafttrain.packaging.decoding import read_plan
from drafttrain.packaging.manifest import DECODING
from drafttrain.reporting.console import clock
from drafttrain.reporting.figures import row_label
from drafttrain.reporting.page import charts
from drafttrain.reporting.page.acceptance import positions, trees
from drafttrain.reporting.page.answers import answers
from drafttrain.reporting.page.kinds import by_kind
from drafttrain.reporting.page.learning import learning
from drafttrain.reporting.page.markup import Content, Markup, element
from drafttrain.reporting.page.parts import Row, absent, figure, figures, listed, missing, part
from drafttrain.reporting.page.spending import time_spent
from drafttrain.reporting.page.tables import numbers, table
from drafttrain.reporting.records import Record
from drafttrain.reporting.rows import MEAN, accepted_cells, pair, same_text_cell, verdicts

_COLUMNS = (
    *("drafts", "nodes", "temperature", "measured for", "tau", "95 %", MEAN, "95 %"),
    *("accepted/round", "speed", "95 %", "tokens/s", "plain tokens/s"),
    *("accept@1, 2, ... (kept/offered)", "prompts", "rounds", "same text", "rule", "guarantee"),
)
_INTERVALS = "Bars are 95 % intervals over prompts; the line at 1 is decoding without drafts."


def section(record: Record, name: str) -> Markup:
    """Everything of one run.

    Args:
        name: id of the section; the ids of its parts start with it.
    """
    entry = record.entry
    return element(
        "section",
        element("h2", entry.name),
        facts(record),
        [absent(f"{one}.") for one in record.unread],
        part(f"{name}-measured", "What was measured", measured(entry.rows)),
        part(f"{name}-learning", "Learning curves", learning(record)),
        part(f"{name}-positions", "Acceptance by position", positions(entry.rows)),
        part(f"{name}-trees", "Trees and their hit rates", trees(record)),
        part(f"{name}-time", "Where time goes", time_spent(record)),
        part(f"{name}-answers", "Sample answers", answers(record)),
        part(f"{name}-settings", "Settings", settings(record)),
        id=name,
        class_="run",
    )


# --- what it is -----------------------------------------------------------------------------------


def facts(record: Record) -> Markup:
    """Target, drafter, training, plan and provenance, as far as they are known."""
    entry = record.entry
    config, costs = entry.config, entry.facts()
    target, shape, made = config["target"], config["shape"], config["training"]
    limited = shape["draft_vocab"] < shape["vocab_size"]
    versions = made.get("versions") if isinstance(made.get("versions"), dict) else {}
    rows: list[tuple[str, Content]] = [
        (
            "Target",
            listed(
                target["name"],
                target["model_type"],
                target["fingerprint"].get("dtype"),
                target["licence"],
            ),
        ),
        (
            "Drafter",
            listed(
                entry.drafter,
                None if costs["parameters"] is None else f"{costs['parameters']:,} parameters",
                f"{room(costs['bytes'])} as a package",
                f"drafts from {shape['draft_vocab']:,} of {shape['vocab_size']:,} tokens"
                if limited
                else None,
            ),
        ),
        ("Training", _trained(record)),
        ("Target's change", record.change),
        ("Decodes with", _plan(record)),
        (
            "Measured with",
            listed(
                *(
                    f"{k} {v}"
                    for k, v in entry.settings.items()
                    if isinstance(v, str | int | float | bool)
                )
            ),
        ),
        (
            "Made",
            listed(
                made.get("date"),
                f"commit {made['commit']}" if made.get("commit") else None,
                config["made_with"],
                *(f"{name} {value}" for name, value in versions.items() if name != "drafttrain"),
            ),
        ),
        ("Command", None if record.command is None else element("code", record.command)),
    ]
    return element(
        "dl", [[element("dt", word), element("dd", value)] for word, value in rows if value]
    )


def _trained(record: Record) -> str:
    if not record.learns:
        return "it learns nothing"
    costs, training = record.entry.facts(), record.entry.config["training"].get("training")
    training = training if isinstance(training, dict) else {}
    words = [
        f"{training[name]} {name}"
        for name in ("updates", "epochs")
        if training.get(name) is not None
    ]
    if training.get("best_update") is not None:
        words.append(f"best at update {training['best_update']}")
    if costs["supervised_tokens"]:
        words.append(f"{costs['supervised_tokens']:,} supervised tokens")
    if costs["training_seconds"]:
        words.append(clock(costs["training_seconds"]))
    if costs["begun_from"]:
        words.append(f"from the weights of {costs['begun_from']}")
    return listed(*words) or "not recorded"


def _plan(record: Record) -> str | None:
    try:
        plan = read_plan(record.entry.folder / DECODING)
    except InputError:
        return None
    return f"{plan.tree.title}, temperature {plan.policy.temperature:g}, rule {plan.rule_name}"


# --- what was measured ----------------------------------------------------------------------------


def measured(rows: Sequence[Row]) -> Content:
    """The fastest way in words, speed and tau as drawings, and everything as a table."""
    if not rows:
        return absent("Nothing was measured: there was no held-out prompt to decode.")
    lines = [
        [
            *(row_label(row), row["nodes"], row["temperature"], row["measured"]),
            *(row["tau"], pair(row["tau_interval"])),
            *(row.get("tau_prompt_mean"), pair(row.get("tau_prompt_mean_interval"))),
            *(
                row["accepted_per_round"],
                row["speedup"],
                pair(row["speedup_interval"]),
                row["tokens_per_second"],
                row["plain_tokens_per_second"],
            ),
            *(" ".join(accepted_cells(row)) or None, row["prompts"], row["rounds"]),
            *(same_text_cell(row), row["rule"], row["guarantee"]),
        ]
        for row in rows
    ]
    known = [{**row, "label": row_label(row)} for row in rows if row["temperature"] is not None]
    sentences = [element("p", f"{line[:1].upper()}{line[1:]}.") for line in verdicts(known)]
    return [
        sentences,
        intervals(rows),
        table("Every way of drafting that was measured", _COLUMNS, lines),
        by_kind(rows),
    ]


def intervals(rows: Sequence[Row]) -> Markup | None:
    """Speed and tau of the rows that have them."""
    drawn = []
    for name, title, axis, unit in (
        ("speedup", "Speed", "speed, times plain decoding's", "×"),
        ("tau", "Tokens per target pass", "tau, tokens per target pass", ""),
    ):
        found = [
            (row_label(row), float(row[name]), pair(row[f"{name}_interval"]))
            for row in rows
            if row[name] is not None
        ]
        if found:
            drawing = charts.whiskers(title, found, x=axis, mark=1.0, unit=unit)
            drawn.append(figure(drawing, title, _INTERVALS))
    return figures(drawn)


# --- settings -------------------------------------------------------------------------------------


def settings(record: Record) -> Content:
    if not record.texts:
        return missing("config.yaml", "fit writes it into the run's folder.")
    return [numbers(element("pre", text), name) for name, text in record.texts.items()]
