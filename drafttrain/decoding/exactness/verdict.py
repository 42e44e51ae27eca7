"""What the tests found: judged together, and said in plain words."""

from __future__ import annotations

from typing import Any

from drafttrain.decoding.exactness.cells import TOKENS
from drafttrain.decoding.exactness.chi_square import POWER, holm, noticed_distance, power

FALSE_ALARM = 0.01
"""Chance that a comparison of right rules reports any difference at all: Holm's correction spreads
it over the plans."""


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add Holm's p-values, what each test would have noticed, and a verdict. Only rules said to be
    exact share the correction.

    Power is stated at the strictest of Holm's levels, so that it holds whatever the other plans do.
    """
    exact = [row for row in rows if row["p"] is not None and row["guarantee"] == "distribution"]
    alarm = FALSE_ALARM / max(1, len(exact))
    corrected = holm([row["p"] for row in exact])
    own = {id(row): value for row, value in zip(exact, corrected, strict=True)}
    judged = []
    for row in rows:
        p = own.get(id(row), row["p"])
        tested = row["p"] is not None
        found = tested and p <= (FALSE_ALARM if id(row) in own else alarm)
        if not tested:
            verdict = "not tested: the target leaves no choice after these prompts"
        elif row["control"]:
            verdict = "noticed, as it should be" if found else "NOT NOTICED"
        elif id(row) not in own:
            verdict = (
                "differs, as is expected of an approximate rule"
                if found
                else "approximate; no difference found"
            )
        else:
            verdict = "DIFFERS" if found else "no difference found"
        more = {
            "p_corrected": p,
            "false_alarm": alarm,
            "noticed_distance": None,
            "power": None,
            "verdict": verdict,
        }
        if tested:
            more["noticed_distance"] = noticed_distance(row["df"], row["draws"], alarm)
        if tested and row["control"]:
            # What exceeds the statistic's mean under the target's own distribution estimates the
            # noncentrality.
            more["power"] = power(row["df"], max(0.0, row["statistic"] - row["df"]), alarm)
        judged.append(row | more)
    return judged


def words(found: dict[str, Any]) -> list[str]:
    """The findings in plain words, the alarming ones in capitals."""
    lines = []
    if found["greedy"]:
        equal = sum(row["verdict"] == "identical" for row in found["greedy"])
        tokens = sum(row["tokens"] for row in found["greedy"])
        lines.append(
            f"greedy: {equal} of {len(found['greedy'])} ways of drafting wrote plain decoding's "
            f"text, {tokens} tokens compared"
        )
    for row in found["greedy"]:
        if row["differences"]:
            lines.append(f"{row['label']}: {row['verdict']}: {_difference(row['differences'][0])}")
    exact = [
        row for row in found["law"] if row["guarantee"] == "distribution" and row["p"] is not None
    ]
    for row in exact:
        if row["verdict"] == "DIFFERS":
            lines.append(
                f"{row['label']}: DIFFERS from the target's distribution: chi-square "
                f"{row['statistic']:.1f} with {row['df']} degrees of freedom, p {row['p']:.2g}, "
                f"corrected {row['p_corrected']:.2g}"
            )
    if exact and all(row["verdict"] == "no difference found" for row in exact):
        worst = max(row["noticed_distance"] for row in exact)
        lines.append(
            f"sampled: no difference from the target's distribution found in {len(exact)} ways of "
            f"drafting; a difference of more than {worst:.3f} (total variation, of the first "
            f"{TOKENS} tokens in cells) would have been noticed with {POWER:.0%} probability, at "
            f"{FALSE_ALARM:.0%} false alarms over all of them"
        )
    for row in found["law"]:
        if row["outside"] and not row["control"]:
            lines.append(
                f"{row['label']}: {row['outside']} of {row['draws']} draws have tokens that the "
                "target's filtered distribution leaves out; in low precision its border moves "
                "with rounding"
            )
        if row["power"] is not None and row["verdict"] != "NOT NOTICED":
            lines.append(
                f"temperature {row['temperature']:g}: a decoder that keeps every draft was noticed "
                f"(distance seen {row['seen_distance']:.2f}); another run would notice it with "
                f"about {row['power']:.0%} probability"
            )
        if row["control"] and row["verdict"] == "NOT NOTICED":
            lines.append(
                f"THE TEST IS WEAK at temperature {row['temperature']:g}: a decoder that keeps "
                "every draft was not noticed; raise exactness_draws"
            )
        if row["p"] is None and not row["control"]:
            lines.append(f"{row['label']}: {row['verdict']}")
    return lines


def _difference(found: dict[str, Any]) -> str:
    def shown(name: str) -> str:
        token, text = found[name], found[f"{name}_text"]
        return "the end" if token is None else f"{token}" + ("" if text is None else f" {text!r}")

    where = (
        f"prompt {found['prompt']}, token {found['place'] + 1}: {shown('plain')} plainly, "
        f"{shown('drafted')} with drafts"
    )
    if found["gap"] is None:
        return where
    tie = "a near-tie" if found["near_tie"] else "no near-tie"
    return (
        f"{where}; their logits are {found['gap']:.3g} apart, rounding moves one by "
        f"{found['rounding']:.2g}: {tie}"
    )
