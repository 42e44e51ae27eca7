"""Measured rows, as a package's `metrics.json` has them, in cells and sentences for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from drafttrain.decoding.plan import UNKEPT

_Z = 1.959964
"""Half the width of a 95 % interval, in standard deviations."""


MEAN = "mean tau of prompts"
"""Heading of `tau_prompt_mean`; `tau` is over rounds."""


def pair(interval: Sequence[float] | None) -> tuple[float, float] | None:
    """An interval as tables take it."""
    return None if interval is None else (interval[0], interval[1])


def accepted_cells(row: Mapping[str, Any]) -> list[str]:
    """accept@k for k = 1, 2, ..., each with the rounds that kept the k-th draft of those that
    offered it, where known."""
    return [
        "-" if value is None else f"{value:.3f}" + (f" ({counts[0]}/{counts[1]})" if counts else "")
        for value, counts in zip(row["accept_at"], row["accept_counts"], strict=True)
    ]


def position_intervals(row: Mapping[str, Any]) -> tuple[list[tuple[float, float] | None], bool]:
    """95 % intervals of accept@k, k = 1, 2, ..., and whether they are over prompts: where a row of
    an earlier version has none, Wilson's interval of its counts, which takes rounds as independent
    of each other."""
    given = row.get("accept_at_interval")
    if given is not None:
        return [pair(interval) for interval in given], True
    return [None if counts is None else wilson(*counts) for counts in row["accept_counts"]], False


def wilson(kept: float, offered: float) -> tuple[float, float] | None:
    """95 % interval of a share (Wilson 1927); None where there is no share."""
    if not 0 <= kept <= offered or not offered:
        return None
    share, room = kept / offered, _Z**2 / offered
    centre, half = (
        share + room / 2,
        _Z * math.sqrt(share * (1 - share) / offered + room / offered / 4),
    )
    return (centre - half) / (1 + room), (centre + half) / (1 + room)


def same_text_cell(row: Mapping[str, Any]) -> str:
    """Prompts with the same text as in plain decoding, of those that were timed; - where that was
    not compared."""
    same, timed = row["same_as_plain"], timed_prompts(row)
    return "-" if same is None else f"{same}/{'?' if timed is None else timed}"


def timed_prompts(row: Mapping[str, Any]) -> int | None:
    """Prompts that were decoded plainly, too: all of the row's, unless it says otherwise; None
    where that is not known."""
    found: int | None = row.get("speed_prompts", row.get("prompts"))
    return found


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """In plain words: the fastest way at each temperature, and those slower than decoding without
    drafts."""
    lines = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        drafting = [row for row in rows if row["temperature"] == temperature and row["nodes"]]
        timed = [row for row in drafting if row["speedup"] is not None]
        lines += gaps(drafting)
        if not any(row["tau"] is not None for row in drafting):
            lines.append(
                f"temperature {temperature:g}: acceptance is not available, no prompt had a round "
                "of drafts"
            )
        if not timed:
            continue
        best = max(timed, key=lambda row: row["speedup"])
        slower = [f"{row['label']} ({row['speedup']:.2f}x)" for row in timed if row["speedup"] < 1]
        if best["speedup"] < 1:
            lines.append(
                f"drafting is SLOWER than plain decoding here at temperature {temperature:g}, "
                f"whatever was tried; at best {best['label']}, {best['speedup']:.2f}x: decode "
                "plainly on this machine"
            )
            continue
        low = (best["speedup_interval"] or [None])[0]
        if low is None:
            sure = ", on one prompt: not certain"
        else:
            sure = "" if low > 1 else ", not clearly faster than plain decoding"
        lines.append(f"fastest is {best['label']}, {best['speedup']:.2f}x plain decoding{sure}")
        if slower:
            lines.append(f"slower than plain decoding: {', '.join(slower)}")
    return lines + unrounded(rows) + _unlike(rows) + memories(rows)


def unrounded(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many prompts are in no tau, where some are."""
    found = dict.fromkeys(
        (row["prompts_without_rounds"], row["prompts"])
        for row in rows
        if row["nodes"] and row.get("rounds") and row.get("prompts_without_rounds")
    )
    return [
        f"{without} of {prompts} prompts had no round, since their answers ended with the first "
        "token: they are in no tau"
        for without, prompts in found
    ]


def _unlike(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whose greedy text was not the plain one, by what that means."""
    found: dict[str, list[str]] = {}
    for row in rows:
        same = row["same_as_plain"]
        if same is None or not row["nodes"] or same >= (timed_prompts(row) or 0):
            continue
        guarantee = str(row.get("guarantee"))
        why = "greedy text was not the plain one for every prompt (near-ties in low precision)"
        if guarantee == UNKEPT:
            why = "the greedy text DIFFERS from plain decoding's, which rounding does not explain"
        elif guarantee.startswith("approximate"):
            why = "greedy text was not the plain one for every prompt (the rule is approximate)"
        found.setdefault(why, []).append(f"{row['label']} ({same_text_cell(row)})")
    return [f"{why}: {', '.join(labels)}" for why, labels in found.items()]


def memories(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which drafts also came from texts that were decoded before in the same measurement."""
    found: dict[tuple[int, int], list[str]] = {}
    for row in rows:
        if row.get("remember"):
            found.setdefault((row["remember"], row.get("repeated_prompts") or 0), []).append(
                str(row["label"])
            )
    lines = []
    for (tokens, again), labels in found.items():
        repeated = f"; {again} of the prompts had been decoded before" if again else ""
        lines.append(
            "drafts came from the texts decoded before in the same measurement, too (up to "
            f"{tokens} tokens), so that the order of the prompts and how alike they are "
            f"count{repeated}: {', '.join(labels)}"
        )
    return lines


def gaps(drafting: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ways with a lower tau than the best, and whether the prompts are enough to be sure; none
    where they were not compared."""
    found = []
    for row in drafting:
        gap, interval = row.get("tau_behind_best"), row.get("tau_behind_best_interval")
        if gap is not None and interval is not None:
            unsure = "" if interval[0] > 0 else ", too few prompts to be sure"
            found.append(
                f"{row['label']} by {gap:.3f} ({interval[0]:.3f}..{interval[1]:.3f}{unsure})"
            )
    best = (
        row["label"]
        for row in drafting
        if row["tau"] is not None and row.get("tau_behind_best") is None
    )
    if not found:
        return []
    return [f"tau is highest with {next(best, '')}; lower, on the same prompts: {', '.join(found)}"]
