"""Is this the same run? What decides which update comes next, and what may differ between the parts
of one run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drafttrain.data.datamodule import ConversationData
from drafttrain.errors import InputError
from drafttrain.runs import differences, masked
from drafttrain.target.model import Target
from drafttrain.training.module import DraftModule


def facts_of(
    config: dict[str, Any],
    target: Target,
    data: ConversationData,
    module: DraftModule,
    world: int,
    features: dict[str, Any],
) -> dict[str, Any]:
    """What decides which update comes next, the facts of the source of features included.

    A run is only resumed where all of it is the same. Secrets are no part of it.
    """
    in_rate = ("warmup", "schedule", "end_factor", "horizon")
    facts: dict[str, Any] = {
        "target": target.fingerprint,
        "data": data.set.digest,
        "rows": {
            name: value
            for name, value in config["data"].items()
            if name not in ("_target_", "path")
        },
        "drafter": config["drafter"],
        "draft_vocab": config["draft_vocab"],
        "joint": config.get("joint"),
        "optim": {name: value for name, value in config["optim"].items() if name not in in_rate},
        "rate": module.rate.facts(),
        "batches": {
            name: config["trainer"][name]
            for name in ("batch_tokens", "batch_rows", "pack", "precision")
        },
        "accumulate x processes": config["trainer"]["accumulate"] * world,
        "features": features,
        "seed": config["seed"],
        **({} if data.digest is None else {"part": data.digest}),
    }
    return masked(facts)


def refuse_other_run(
    resumed: dict[str, Any],
    facts: dict[str, Any],
    config: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    """List what differs from the earlier part of the run; refuse what would make it another run."""
    # Earlier versions kept secrets in checkpoints.
    important = differences(masked(resumed["facts"]), facts)
    other = differences(masked(resumed["settings"]), config)
    for key in ("resume", "run_dir", "target.dtype", "target.device"):
        other.pop(key, None)
    if other:
        listed = "; ".join(f"{key} was {before}, is {now}" for key, (before, now) in other.items())
        say(f"settings differ from the earlier part of this run: {listed}")
    if important:
        listed = "; ".join(
            f"{key} was {before}, is {now}" for key, (before, now) in important.items()
        )
        raise InputError(
            f"this would not be the same run ({listed}): start a new one with another run_dir, or "
            "set these back"
        )
