"""The measurements of evaluate: acceptance, speed, exactness, and what joint training changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafttrain.data.datamodule import BUILTIN, ConversationData
from drafttrain.decoding import exactness
from drafttrain.decoding.conditions import conditions, dtype_name
from drafttrain.decoding.measure import Measurement, behind
from drafttrain.decoding.measurement import by_category, with_speed
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.speculator import Speculator
from drafttrain.errors import InputError
from drafttrain.evaluating.comparing import Compared, label_of
from drafttrain.evaluating.saying import say
from drafttrain.flow import Tally
from drafttrain.reporting.console import track
from drafttrain.target import change
from drafttrain.target.model import Target
from drafttrain.target.prompts import Source
from drafttrain.target.turns import counted
from drafttrain.tree.topology import Growth, Tree


def measure(
    speculator: Speculator,
    prompts: list[list[int]],
    growths: Sequence[Growth],
    asked: Compared,
    source: Source,
) -> list[dict[str, Any]]:
    """A row for each temperature, growth and rule that fits them, plain decoding first.

    Args:
        source: of the prompts; it knows the turn and the kind of task of each.
    """
    rows = []
    for policy in asked.policies:
        plans = [
            Plan(Tree.chain(0), policy),
            *_fitting(asked.plans(growths, policy, speculator.drafter)),
        ]
        if len(plans) > 1:
            rows += _rows(speculator, prompts, plans, asked, source)
    return rows


def _fitting(plans: Sequence[Plan]) -> list[Plan]:
    """Those whose rule fits; the others are named with the reason."""
    fitting = []
    for plan in plans:
        reason = plan.misfit
        if reason is None:
            fitting.append(plan)
        else:
            say(f"{label_of(plan)} is not measured: {reason}")
    return fitting


def _rows(
    speculator: Speculator,
    prompts: list[list[int]],
    plans: Sequence[Plan],
    asked: Compared,
    source: Source,
) -> list[dict[str, Any]]:
    """The rows of plans of one policy, the first of which is plain decoding."""
    timed = prompts[: asked.speed_prompts]
    common: dict[str, Any] = {"max_new_tokens": asked.max_new_tokens, "seed": asked.seed}
    at = f"temperature {plans[0].policy.temperature:g}"
    speeds: list[Measurement | None] = [None] * len(plans)
    if timed:
        say(f"{at}: times {len(timed)} prompts, each plainly and in {len(plans) - 1} other ways")
        speeds = list(speculator.measure_speed(timed, plans, **common))
    accepted = speeds
    if len(timed) < len(prompts):
        # Plain decoding accepts nothing by definition; its row is that of the timed prompts.
        counted = [
            speculator.measure_acceptance(prompts, plan, batch=asked.batch, **common)
            for plan in track(plans[1:], description=f"{at}: acceptance", unit="trees")
        ]
        accepted = [speeds[0], *counted]
    best = max((one for one in accepted[1:] if one is not None), key=lambda one: one.tally.tau or 0)
    return [
        row_of(plan, one, speed)
        | behind(best, one if plan.tree.size else None)
        | by_turn(one, source.by_turn)
        | by_category(one, source.categories)
        for plan, one, speed in zip(plans, accepted, speeds, strict=True)
        if plan.tree.size or speed is not None
    ]


def by_turn(found: Measurement | None, turns: Sequence[int]) -> dict[str, Any]:
    """Of every turn its prompts, rounds and tau, where the prompts have several."""
    if found is None or len(set(turns)) < 2:
        return {}
    totals: dict[int, Tally] = {}
    prompts = Counter(turns[: len(found.tallies)])
    for turn, tally in zip(turns, found.tallies, strict=False):
        total = totals.setdefault(turn, Tally())
        total += tally
    return {
        "by_turn": [
            {"turn": turn, "prompts": prompts[turn], "rounds": total.rounds, "tau": total.tau}
            for turn, total in sorted(totals.items())
        ]
    }


def row_of(plan: Plan, accepted: Measurement | None, speed: Measurement | None) -> dict[str, Any]:
    """Acceptance over all prompts, speed over the timed ones. None where nothing was measured."""
    row = (accepted or Measurement(plan, [], Tally(), [])).row()
    row["label"] = label_of(plan)
    return row if speed is None else with_speed(row, speed)


def exact(
    speculator: Speculator, prompts: list[list[int]], growths: Sequence[Growth], asked: Compared
) -> dict[str, Any]:
    """Whether the plans of the table write the target's own text; see
    `drafttrain.decoding.exactness`."""
    every = [
        plan
        for policy in asked.policies
        for plan in asked.plans(growths, policy, speculator.drafter)
    ]
    return exactness.check(
        speculator,
        prompts,
        {label_of(plan): plan for plan in every if plan.misfit is None},
        draws=asked.exactness_draws,
        places=asked.exactness_prompts,
        max_new_tokens=asked.max_new_tokens,
        batch=asked.batch,
        seed=asked.seed,
        watch=lambda items, what: track(items, description=what, unit="batches"),
    )


def changed(target: Target, source: Source, limit: int) -> dict[str, Any] | None:
    """What joint training did to the target, on held-out text; None where there was no such
    training, or no such text.

    Args:
        limit: rows of text at most; 0 compares nothing.
    """
    if target.original is None or not limit:
        return None
    if source.data is None:
        say(
            "how far the tuned target is from the original is not measured: a file of prompts "
            f"holds no answers; give a conversation set, such as prompts={BUILTIN}smollm2"
        )
        return None
    try:
        rows = ConversationData(
            source.data, split="held_out", max_length=target.context, limit_rows=limit
        )
    except InputError:
        say(
            "how far the tuned target is from the original is not measured: the set has no "
            "held-out answers"
        )
        return None
    todo = track(range(len(rows)), description="tuned against original", unit="rows")
    return change.change(target.original, target, (rows.batch([i]) for i in todo))


def settings_of(
    asked: Compared,
    package: Path,
    source: Source,
    prompts: Sequence[Sequence[int]],
    speculator: Speculator,
) -> dict[str, Any]:
    """What the numbers depend on, as plain JSON values."""
    target = speculator.target
    return {
        "package": package.name,
        "target": Path(target.name).name + ("" if target.adapter is None else " (tuned)"),
        "prompts": source.name,
        "prompt_count": len(prompts),
        "prompts_by_turn": counted(source.by_turn),
        "turns_left_out": source.turns_left_out,
        "prompts_by_category": Counter(sorted(source.categories)),
        "speed_prompts": min(asked.speed_prompts, len(prompts)),
        "max_new_tokens": asked.max_new_tokens,
        "batch": asked.batch,
        "top_k": asked.top_k,
        "top_p": asked.top_p,
        "rule": asked.rule_given,
        "seed": asked.seed,
        **conditions(target, prompts),
        "drafter_dtype": dtype_name(speculator.drafter.dtype),
    }
