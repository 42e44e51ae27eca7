"""What a trained drafter is worth: acceptance on held-out prompts, speed against plain decoding,
and the plan to package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drafttrain.decoding.conditions import conditions, dtype_name
from drafttrain.decoding.measure import Measurement, Watch, unwatched
from drafttrain.decoding.measurement import by_category
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.samples import samples_of
from drafttrain.decoding.speculator import Speculator
from drafttrain.training.settings import DECODED_LAST, FinalConfig
from drafttrain.tree.topology import Growth


@dataclass(frozen=True)
class Worth:
    """Measured rows, and the plan that they led to."""

    plan: Plan
    """The fastest measured; where no speed was measured, the one with the highest tau; else the one
    given."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    change: dict[str, Any] | None = None
    """What joint training did to the target."""
    samples: dict[str, Any] | None = None
    """Some answers as that plan decoded them, see `drafttrain.decoding.samples`; None where none
    was measured."""

    @property
    def metrics(self) -> dict[str, Any]:
        """As a package's `metrics.json` has them."""
        found: dict[str, Any] = {"settings": self.settings, "rows": self.rows}
        return found if self.change is None else {**found, "target_change": self.change}


@dataclass(frozen=True)
class Best:
    """The best of the trees measured so far."""

    value: float
    plan: Plan
    found: Measurement


def measure(
    speculator: Speculator,
    prompts: Sequence[Sequence[int]],
    config: FinalConfig,
    *,
    categories: Sequence[str] = (),
    calibrate: Callable[[int], Growth] | None = None,
    seed: int = 0,
    watch: Watch = unwatched,
) -> Worth:
    """Decode with every tree of the configuration, and with the speculator's own where that is none
    of them.

    Args:
        categories: the kind of task of each prompt, where they have any.
        calibrate: makes the calibrated tree of a number of nodes, where some are asked for.

    With no prompts nothing is measured, and nothing is made up.
    """
    accepting, racing = trees_of(speculator, config, calibrate)
    chosen = accepted_prompts(prompts, speculator, config)
    rows, best = acceptances(speculator, accepting, chosen, config, seed, watch, categories)
    raced, fastest = speeds(speculator, racing, prompts, config, seed, watch)
    settings = {
        "prompts": len(chosen),
        "max_new_tokens": config.max_new_tokens,
        "batch": config.batch,
        "speed_prompts": len(prompts[: config.speed_prompts]),
        "speed_new_tokens": config.speed_new_tokens,
        "split": "held_out",
        "seed": seed,
        **conditions(speculator.target, prompts[: max(len(chosen), config.speed_prompts)]),
        "drafter_dtype": dtype_name(speculator.drafter.dtype),
    }
    best = fastest or best
    if best is None:
        return Worth(speculator.plan, rows + raced, settings)
    samples = samples_of(speculator.target, prompts, best.found, config.samples)
    return Worth(best.plan, rows + raced, settings, samples=samples)


def accepted_prompts(
    prompts: Sequence[Sequence[int]], speculator: Speculator, config: FinalConfig
) -> Sequence[Sequence[int]]:
    """Those that acceptance is measured on."""
    count = config.prompts
    if count is None and not speculator.replays_plan():
        count = DECODED_LAST
    return prompts[:count]


def trees_of(
    speculator: Speculator, config: FinalConfig, calibrate: Callable[[int], Growth] | None
) -> tuple[dict[str, Growth], dict[str, Growth]]:
    """Trees by name: those to measure acceptance with, and those to measure speed with."""
    shaped = speculator.drafter.shaped
    accepting, racing = (
        {name: tree and shaped(tree) for name, tree in table.items()}
        for table in (config.acceptance, config.speed)
    )
    if calibrate is not None:
        accepting |= {f"calibrated_{size}": calibrate(size) for size in config.calibrated}
        racing |= {f"calibrated_{size}": calibrate(size) for size in config.calibrated_speed}
    own = speculator.plan.tree
    if own not in (*accepting.values(), *racing.values()):
        more = {own.title.replace(" ", "_"): own}
        accepting, racing = {**accepting, **more}, {**racing, **more}
    return (
        {name: tree for name, tree in accepting.items() if tree is not None},
        {name: tree for name, tree in racing.items() if tree is not None},
    )


def acceptances(
    speculator: Speculator,
    trees: Mapping[str, Growth],
    prompts: Sequence[Sequence[int]],
    config: FinalConfig,
    seed: int,
    watch: Watch,
    categories: Sequence[str],
) -> tuple[list[dict[str, Any]], Best | None]:
    """Rows of acceptance, by kind of task too, and the tree of the highest tau."""
    rows: list[dict[str, Any]] = []
    best: Best | None = None
    for name, tree in trees.items() if prompts else ():
        found = speculator.measure_acceptance(
            prompts,
            Plan(tree),
            max_new_tokens=config.max_new_tokens,
            batch=config.batch,
            seed=seed,
            watch=lambda items, what, name=name: watch(items, f"{name}: {what}"),
        )
        row = {
            "label": name,
            "measured": "acceptance",
            **found.row(),
            **by_category(found, categories),
            "speedup": None,
            "speedup_interval": None,
        }
        rows.append(row)
        if row["tau"] is not None and (best is None or row["tau"] > best.value):
            best = Best(row["tau"], found.plan, found)
    return rows, best


def speeds(
    speculator: Speculator,
    trees: Mapping[str, Growth],
    prompts: Sequence[Sequence[int]],
    config: FinalConfig,
    seed: int,
    watch: Watch,
) -> tuple[list[dict[str, Any]], Best | None]:
    """Rows of speed, and the fastest tree; None where no speed was measured."""
    rows: list[dict[str, Any]] = []
    fastest: Best | None = None
    plans = {name: Plan(tree) for name, tree in trees.items()}
    chosen = list(prompts[: config.speed_prompts])
    if not plans or not chosen:
        return rows, fastest
    raced = speculator.measure_speed(
        chosen, list(plans.values()), max_new_tokens=config.speed_new_tokens, seed=seed, watch=watch
    )
    for (name, plan), found in zip(plans.items(), raced, strict=True):
        rows.append({"label": f"{name} alone", "measured": "speed", **found.row()})
        if found.speedup is not None and (fastest is None or found.speedup > fastest.value):
            fastest = Best(found.speedup, plan, found)
    return rows, fastest
