"""evaluate's tables and verdicts on the console."""

from __future__ import annotations

from typing import Any

from drafttrain.decoding import exactness
from drafttrain.decoding.clock import STAGES
from drafttrain.evaluating.parity import parity_words
from drafttrain.evaluating.saying import say
from drafttrain.reporting.console import table
from drafttrain.reporting.kinds import KINDS, kinds_table
from drafttrain.reporting.rows import MEAN, accepted_cells, pair, same_text_cell, verdicts
from drafttrain.target import change


def show(result: dict[str, Any]) -> None:
    """The tables of an evaluation, and what follows from them in words."""
    rows, settings = result["rows"], result["settings"]
    title = (
        f"acceptance: {settings['prompt_count']} prompts, at most {settings['max_new_tokens']} new "
        "tokens"
    )
    deepest = max((len(row["accept_at"]) for row in rows), default=0)
    columns = [
        "",
        "tau",
        "95 %",
        MEAN,
        "95 %",
        "accepted/round",
        *(f"accept@{k}" for k in range(1, deepest + 1)),
        "rounds",
        "guarantee",
    ]
    table(title, columns, [acceptance_line(row, deepest) for row in rows])
    if len(settings["prompts_by_turn"]) > 1:
        columns = ["tau by turn", *(f"{turn}" for turn in settings["prompts_by_turn"])]
        lines = [[row["label"], *(one["tau"] for one in _turns(row, columns[1:]))] for row in rows]
        table("acceptance by turn of the conversation", columns, lines)
    by_kind = kinds_table(rows)
    if by_kind is not None:
        table(KINDS, *by_kind)
    if settings["speed_prompts"]:
        where = f"{settings['device']}, {settings['threads']} threads, {settings['target_dtype']}"
        title = f"speed: {settings['speed_prompts']} prompts, one at a time ({where})"
        columns = [
            "",
            "speed",
            "95 %",
            "tokens/s",
            "plain tokens/s",
            *(f"s {stage}" for stage in STAGES),
            "same text",
        ]
        table(title, columns, [speed_line(row) for row in rows])
        say("speed of plain over plain would be 1 without the noise of timing")
    if result["sim"]:
        show_simulated(result["sim"]["rows"])
    if result["target_change"]:
        say(change.words(result["target_change"]))
    for line in (*verdicts(rows), *parity_words(result["parity"])):
        say(line)
    if result["exactness"]:
        show_exactness(result["exactness"])


def show_simulated(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    deepest = max(row["depth"] for row in rows)
    places = [f"sim/accept@{k}" for k in range(1, deepest + 1)]
    lines = [
        [
            row["label"],
            row["sim/tau"],
            pair(row["sim/tau_interval"]),
            row["sim/accepted_per_round"],
            *(row.get(place, "-") for place in places),
            row["texts"],
        ]
        for row in rows
    ]
    columns = ["", "sim/tau", "95 %", "sim/accepted_per_round", *places, "texts"]
    table("sim/: acceptance computed on texts that the target sampled, not decoded", columns, lines)


def _turns(row: dict[str, Any], turns: list[str]) -> list[dict[str, Any]]:
    """What a row has of each turn; a row that was only timed may lack the later ones."""
    found = {str(one["turn"]): one for one in row.get("by_turn", ())}
    return [found.get(turn, {"tau": None}) for turn in turns]


def acceptance_line(row: dict[str, Any], deepest: int) -> list[Any]:
    at = accepted_cells(row)
    at += ["-"] * (deepest - len(at))
    return [
        row["label"],
        row["tau"],
        pair(row["tau_interval"]),
        row["tau_prompt_mean"],
        pair(row["tau_prompt_mean_interval"]),
        row["accepted_per_round"],
        *at,
        row["rounds"],
        row["guarantee"],
    ]


def speed_line(row: dict[str, Any]) -> list[Any]:
    return [
        row["label"],
        row["speedup"],
        pair(row["speedup_interval"]),
        row["tokens_per_second"],
        row["plain_tokens_per_second"],
        *(row["seconds"].get(stage) for stage in STAGES),
        same_text_cell(row),
    ]


def show_exactness(found: dict[str, Any]) -> None:
    if found["greedy"]:
        columns = ["", "same text", "tokens compared", "verdict"]
        lines = [
            [row["label"], f"{row['same']}/{row['prompts']}", row["tokens"], row["verdict"]]
            for row in found["greedy"]
        ]
        table("exactness, greedy: text against plain decoding's", columns, lines)
    if found["law"]:
        title = (
            f"exactness, sampled: first {exactness.TOKENS} tokens against the target's "
            f"distribution (chi-square), {exactness.FALSE_ALARM:.0%} false alarms over all"
        )
        names = {
            "draws": "draws",
            "statistic": "chi-square",
            "df": "df",
            "p": "p",
            "p_corrected": "p corrected",
            "seen_distance": "distance seen",
            "noticed_distance": "90 % noticed from",
            "verdict": "verdict",
        }
        lines = [[row["label"], *(_small(row[name]) for name in names)] for row in found["law"]]
        table(title, ["", *names.values()], lines)
    for line in exactness.words(found):
        say(line)


def _small(value: Any) -> Any:
    """Three decimals hide how small a p-value is."""
    return f"{value:.1g}" if isinstance(value, float) and 0 <= value < 0.001 else value
