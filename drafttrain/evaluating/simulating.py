"""Acceptance at temperatures above 0, computed on texts that the target samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from drafttrain.decoding.simulated import cannot, simulate
from drafttrain.decoding.speculator import Speculator
from drafttrain.decoding.texts import sampled_texts
from drafttrain.evaluating.comparing import Compared, label_of
from drafttrain.evaluating.saying import say
from drafttrain.reporting.console import track
from drafttrain.tree.topology import Growth


def simulated(
    speculator: Speculator, prompts: list[list[int]], growths: Sequence[Growth], asked: Compared
) -> dict[str, Any]:
    """A row for each temperature above 0, growth and rule; the target samples its texts once for
    each temperature. `left_out`: what is not computed, and why."""
    target, drafter = speculator.target, speculator.drafter
    rows, left_out = list[dict[str, Any]](), list[dict[str, str]]()
    common: dict[str, Any] = {
        "max_new_tokens": asked.max_new_tokens,
        "batch": asked.batch,
        "seed": asked.seed,
    }
    for policy in asked.policies:
        if policy.greedy:
            continue
        plans = []
        for plan in asked.plans(growths, policy, drafter):
            reason = cannot(plan, drafter)
            if reason is None:
                plans.append(plan)
            else:
                left_out.append({"label": label_of(plan), "reason": reason})
                say(f"{label_of(plan)} has no sim/: {reason}")
        if not plans:
            continue
        at = f"temperature {policy.temperature:g}"
        say(f"{at}: the target samples {len(prompts)} texts for sim/")
        texts = sampled_texts(
            target, prompts, policy, layers=drafter.needs.layers, watch=_watched, **common
        )
        for plan in track(plans, description=f"{at}: sim/", unit="trees"):
            found = simulate(target, drafter, texts, plan, **common)
            rows.append({"label": label_of(plan), **found.row()})
            if found.impossible:
                say(
                    f"{label_of(plan)}: {found.impossible} tokens of the texts have probability 0 "
                    "in one pass over the text, by rounding at the edge of top_k or top_p; they "
                    "count as refused"
                )
    return {"rows": rows, "left_out": left_out}


def _watched(items: Sequence[int], what: str) -> Iterable[int]:
    return track(items, description=what, unit="batches")
