"""The table of a set that synthesize wrote: what is in it, what was left out, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafttrain.data.conversations import HELD_OUT, TRAIN, Row, read_set
from drafttrain.data.folder import SetFolder
from drafttrain.data.numbered import Prompts, some
from drafttrain.processes import world_size
from drafttrain.reporting.console import amount, table
from drafttrain.target.writing import SynthesisConfig


def show_set(
    folder: SetFolder,
    manifest: dict[str, Any],
    rows: Sequence[Row],
    prompts: Prompts,
    writing: SynthesisConfig,
    speed: float | None,
) -> None:
    """Print what is in a set that was written.

    Args:
        rows: in the set.
        prompts, writing: what they were written to, and how.
        speed: tokens a second; None where nothing was written now.
    """
    total = manifest["supervised_tokens"]
    supervised = f"{total} of {manifest['tokens']} ({total / manifest['tokens']:.0%})"
    lines: list[tuple[str, str]] = [
        ("conversations", f"{len(rows)}, {manifest['held_out']} of them held out")
    ]
    numbers = sorted(row.row for row in rows)
    first = prompts.counts(numbers[: manifest["held_out"]])
    lines += [
        (f"  from {name}", f"{count}, {first.get(name, 0)} of them held out")
        for name, count in sorted(prompts.counts(numbers).items())
    ]
    lines += [("not read", what) for what in prompts.passed_over]
    data = read_set(folder.path)
    again = data.asked_also(data.indices(TRAIN))
    if again:
        why = "held out, though another row has the same prompt"
        lines.append((f"  {why}", f"{again}: take repeated prompts out of the files"))
    apart = data.by_category(data.indices(HELD_OUT))
    lines += [
        (f"  {name}", f"{count}, {apart[name]} of them held out")
        for name, count in data.by_category(range(len(data))).items()
    ]
    lines.append(("supervised tokens", supervised))
    lines += [
        (f"  at temperature {temperature}", f"{count} ({count / total:.0%})")
        for temperature, count in manifest["supervised_by_temperature"].items()
    ]
    changed = f"{manifest['reencoding_would_change_rows']} of {len(rows)} rows"
    lines += [
        ("answers", f"{manifest['answers']}, {manifest['answers_cut_by_length']} cut by a limit"),
        ("re-encoding would have changed", changed),
    ]
    lines += _left_out(manifest, rows, prompts, writing)
    if speed is not None:
        share = " by this process" if world_size() > 1 else ""
        lines.append((f"tokens written a second{share}", amount(speed)))
    lines.append(("size", f"{folder.size / 1e6:.2f} MB"))
    table(str(folder.path), ("", "value"), lines)


def _left_out(
    manifest: dict[str, Any], rows: Sequence[Row], prompts: Prompts, writing: SynthesisConfig
) -> list[tuple[str, str]]:
    """What is not in the set, or not as somebody may expect it, and where."""
    lines: list[tuple[str, str]] = []
    for reason, numbers in turns_left_out(rows, prompts, writing).items():
        where = f"{len(numbers)} rows: {prompts.places(numbers)}"
        lines.append((f"later turns left out, {reason}", where))
    for reason, numbers in manifest["skipped"].items():
        lines.append((f"skipped: {reason}", f"{len(numbers)} rows: {some(numbers)}"))
    for reason, numbers in manifest["not_written"].items():
        lines.append((f"skipped: {reason}", f"{len(numbers)} rows: {prompts.places(numbers)}"))
    for name, numbers in manifest["columns_not_read"].items():
        why = f"not read by the chat template: {name}"
        lines.append((why, f"{len(numbers)} rows: {some(numbers)}"))
    for what, numbers in manifest["overlooked"].items():
        lines.append((f"not read: {what}", f"{len(numbers)} rows: {some(numbers)}"))
    for token, numbers in manifest["control_tokens_spelt"].items():
        why = f"spelt in prompts, read as a control token: {token}"
        lines.append((why, f"{len(numbers)} rows: {some(numbers)}"))
    return lines


_LEFT_OUT = {
    "stop": "too long, or without a user turn",
    "length": "after an answer cut by a limit",
    "template": "since there the template shows the answer otherwise",
}
"""Why a conversation has fewer answers than it was to have, by how its last one ended."""


def turns_left_out(
    rows: Sequence[Row], prompts: Prompts, writing: SynthesisConfig
) -> dict[str, list[int]]:
    """{why: numbers of rows that have fewer answers than turns}"""
    given, found = dict(prompts.rows), dict[str, list[int]]()
    for row in rows:
        if row.row in given and len(row.spans) < writing.answers(row.row, given[row.row]):
            found.setdefault(_LEFT_OUT[row.finish[-1]], []).append(row.row)
    return found
