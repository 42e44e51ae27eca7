"""Measure a package: acceptance, speed against plain decoding, guarantee, for chains and trees,
greedy and sampled.

Every number comes from really decoding. Acceptance is counted over all prompts, decoded in batches;
speed over some of them, one at a time, interleaved with plain decoding of the same prompts. The
table goes to the console, to evaluation.json (the form of a package's metrics.json) and, as a
picture, to acceptance.png. With exactness=true the guarantees are tested on this target and
package, too. A package that was trained jointly with its target is compared with the original on
held-out text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from drafttrain.checks import path_of
from drafttrain.data.conversations import write_json
from drafttrain.data.datamodule import BUILTIN, ConversationData
from drafttrain.decoding import exactness
from drafttrain.decoding.conditions import conditions, dtype_name
from drafttrain.decoding.measure import Measurement, behind
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.speculator import Speculator, check_dtype
from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Tally
from drafttrain.nn.sampling import Policy, check_seed
from drafttrain.packaging.decoding import as_filled, read_plan, rule_of, tree_of
from drafttrain.packaging.manifest import DECODING, read_config, read_metrics
from drafttrain.packaging.reading import load_drafter, target_for
from drafttrain.reporting.console import table, track
from drafttrain.reporting.figures import acceptance_curve
from drafttrain.reporting.rows import accepted_cells, pair, same_text_cell, verdicts
from drafttrain.runs import check_run_dir, new_folder, provenance
from drafttrain.target import change
from drafttrain.target.model import Target
from drafttrain.target.prompts import Source, open_prompts
from drafttrain.training.calibrate import calibrated
from drafttrain.tree.files import table as numbers
from drafttrain.tree.topology import Growth, Tree, check_size
from drafttrain.wiring.building import build
from drafttrain.wiring.doors import door

RESULT, PICTURE = "evaluation.json", "acceptance.png"
CALIBRATED = "calibrated:"
_STAGES = ("prefill", "draft", "verify", "host")


@door("evaluate", text=("package", "prompts"))
def main(cfg: DictConfig) -> None:
    check_settings(cfg)
    package = path_of("package", cfg.package)
    config = read_config(package)
    source = open_prompts(cfg.prompts, columns_of(cfg))
    target: Target = build(cfg.target, work="decode")
    target = target_for(package, target)
    drafter = load_drafter(package, target)
    speculator = Speculator(
        target, drafter, read_plan(package / DECODING, drafter), dtype=cfg.dtype
    )
    prompts = source.ids(target, cfg.limit, say)
    warn_of_length(config, prompts, cfg.max_new_tokens)
    growths = trees_of(cfg, speculator, drafter)
    check_rules(cfg, growths, drafter)
    with new_folder(cfg.run_dir) as folder:
        rows = measure(speculator, prompts, growths, cfg)
        result = {
            "settings": settings_of(cfg, source, prompts, speculator),
            "rows": rows,
            "target_change": changed(target, source, cfg),
            "parity": parity(
                speculator, drafter, prompts[: cfg.parity_prompts], cfg.max_new_tokens
            ),
            "exactness": exact(speculator, prompts, growths, cfg) if cfg.exactness else None,
            "provenance": provenance(cfg),
        }
        write_json(folder / RESULT, result)
        acceptance_curve(
            [row for row in rows if row["nodes"]],
            folder / PICTURE,
            title=str(Path(cfg.package).name),
        )
        show(result)
        say(f"wrote {folder / RESULT} and {folder / PICTURE}")


# --- before long work starts ----------------------------------------------------------------------


def check_settings(cfg: DictConfig) -> None:
    whole = {
        "change_rows": 0,
        "max_new_tokens": 1,
        "batch": 1,
        "speed_prompts": 0,
        "parity_prompts": 0,
        "limit": 1,
    }
    for key, least in whole.items():
        value = cfg[key]
        if not (key == "limit" and value is None) and (type(value) is not int or value < least):
            raise InputError(f"{key}={value}: needs a whole number of at least {least}")
    if type(cfg.exactness) is not bool:
        raise InputError(f"exactness={cfg.exactness}: give true or false")
    exactness.check_draws(cfg.exactness_draws, cfg.exactness_prompts)
    check_seed(cfg.seed)
    check_dtype(cfg.dtype)
    check_run_dir(cfg.run_dir, resume=False)
    for key in ("temperatures", "chains", "trees"):
        if not OmegaConf.is_list(cfg[key]):
            raise InputError(
                f"{key}={cfg[key]}: needs a list, such as "
                f"'{key}=[{1 if key != 'trees' else 'package'}]'"
            )
    if not cfg.temperatures:
        raise InputError("temperatures is empty: give at least one, 0 is greedy")
    if not named_trees(cfg):
        raise InputError(
            "chains and trees are both empty: give at least one of them, such as 'chains=[4]'"
        )
    for temperature in cfg.temperatures:
        policy_of(cfg, temperature)
    for value in named_trees(cfg):
        if not of_package(value) and not chosen_tree(value).size:
            raise InputError(
                f"{value} drafts nothing; plain decoding is measured anyway: leave it out"
            )
    # The package's own trees are not known yet; a rule that fits any tree fits a chain.
    check_rules(
        cfg,
        [Tree.chain(1) if of_package(value) else chosen_tree(value) for value in named_trees(cfg)],
    )


def named_rules(cfg: DictConfig) -> list[str | None]:
    """Rules as the settings name them, each once; None is the one that fits."""
    values = OmegaConf.to_container(cfg.rule) if OmegaConf.is_list(cfg.rule) else [cfg.rule]
    if not values:
        raise InputError("rule is an empty list: give auto, or the rules to compare")
    return list(dict.fromkeys(rule_of(value) for value in values))  # type: ignore[union-attr]


def check_rules(cfg: DictConfig, growths: Sequence[Growth], drafter: Drafter | None = None) -> None:
    """Refuse a rule that fits no temperature and tree of the comparison, with the reason."""
    policies = [policy_of(cfg, temperature) for temperature in cfg.temperatures]
    for rule in named_rules(cfg):
        plans = [
            Plan(tree, policy, rule=rule).made_by(drafter)
            for policy in policies
            for tree in growths
        ]
        reasons = [plan.misfit for plan in plans]
        if all(reasons):
            raise InputError(str(reasons[-1]))


def named_trees(cfg: DictConfig) -> list[Any]:
    """Chains and trees as the settings name them, and the one chosen beside them."""
    named = [*OmegaConf.to_container(cfg.chains), *OmegaConf.to_container(cfg.trees)]  # type: ignore[misc]
    return named if cfg.tree is None else [*named, cfg.tree]


def of_package(value: Any) -> bool:
    """Whether only the package knows this tree."""
    if not isinstance(value, str) or not value.startswith(CALIBRATED):
        return bool(value == "package")
    size = value.removeprefix(CALIBRATED)
    if not (size.isdecimal() and int(size)):
        raise InputError(f"tree {value!r}: needs a number of nodes, such as {CALIBRATED}64")
    check_size(int(size))
    return True


def packaged_tree(value: str, speculator: Speculator, package: Path) -> Growth:
    """The tree that the package decodes with, or the calibrated one of the accuracies that it
    holds."""
    if value == "package":
        return speculator.plan.tree
    settings = read_metrics(package).get("settings")
    accuracies = settings.get("head_accuracy") if isinstance(settings, dict) else None
    if accuracies is None:
        raise InputError(
            f"tree {value}: {package} holds no accuracy of heads, which fit measures for medusa "
            f"and hydra_heads where "
            "final.calibrated names a size: name another tree, or let python -m drafttrain.tune "
            "find one"
        )
    return calibrated(
        numbers(accuracies, f"accuracies of heads in {package}"),
        int(value.removeprefix(CALIBRATED)),
    )


def chosen_tree(value: Any) -> Growth:
    """A tree by name, or as a choice of the configuration describes it."""
    return build(value) if OmegaConf.is_dict(value) else tree_of(value)


def policy_of(cfg: DictConfig, temperature: Any) -> Policy:
    return Policy(temperature, cfg.top_k, cfg.top_p).simplest()


def columns_of(cfg: DictConfig) -> dict[str, str | None]:
    return OmegaConf.to_container(cfg.columns)  # type: ignore[return-value]


def warn_of_length(config: dict[str, Any], prompts: Sequence[Sequence[int]], limit: int) -> None:
    trained = config["trained_length"]
    beyond = sum(len(prompt) + limit > trained for prompt in prompts) if trained else 0
    if beyond:
        say(
            f"{beyond} of {len(prompts)} prompts go beyond the {trained} tokens of the longest row "
            f"in training: the text "
            "stays the target's, fewer drafts may be accepted there"
        )


def trees_of(cfg: DictConfig, speculator: Speculator, drafter: Drafter) -> list[Growth]:
    """The trees to compare, as this drafter can fill them, each once."""
    package = path_of("package", cfg.package)
    found = [
        packaged_tree(value, speculator, package) if of_package(value) else chosen_tree(value)
        for value in named_trees(cfg)
    ]
    return as_filled(found, drafter)


# --- the measurements -----------------------------------------------------------------------------


def measure(
    speculator: Speculator, prompts: list[list[int]], growths: Sequence[Growth], cfg: DictConfig
) -> list[dict[str, Any]]:
    """A row for each temperature, growth and rule that fits them, plain decoding first."""
    rows = []
    timed = prompts[: cfg.speed_prompts]
    common = {"max_new_tokens": cfg.max_new_tokens, "seed": cfg.seed}
    for temperature in cfg.temperatures:
        policy = policy_of(cfg, temperature)
        plans = [Plan(Tree.chain(0), policy)]
        for plan in plans_of(cfg, growths, policy, speculator.drafter):
            reason = plan.misfit
            if reason is None:
                plans.append(plan)
            else:
                say(f"{label_of(plan)} is not measured: {reason}")
        if len(plans) == 1:
            continue
        speeds: list[Measurement | None] = [None] * len(plans)
        if timed:
            say(
                f"temperature {temperature:g}: times {len(timed)} prompts, each plainly and in "
                f"{len(plans) - 1} other ways"
            )
            speeds = list(speculator.measure_speed(timed, plans, **common))
        accepted = speeds
        if len(timed) < len(prompts):
            # Plain decoding accepts nothing by definition; its row is that of the timed prompts.
            todo = track(
                plans[1:], description=f"temperature {temperature:g}: acceptance", unit="trees"
            )
            counted = [
                speculator.measure_acceptance(prompts, plan, batch=cfg.batch, **common)
                for plan in todo
            ]
            accepted = [speeds[0], *counted]
        pairs = zip(plans, accepted, speeds, strict=True)
        best = max(
            (one for one in accepted[1:] if one is not None), key=lambda one: one.tally.tau or 0
        )
        rows += [
            row_of(plan, one, speed)
            | {"guarantee": plan.guarantee_on(speculator.target)}
            | behind(best, one if plan.tree.size else None)
            for plan, one, speed in pairs
            if plan.tree.size or speed is not None
        ]
    return rows


def plans_of(
    cfg: DictConfig, growths: Sequence[Growth], policy: Policy, drafter: Drafter
) -> list[Plan]:
    """Every tree with every rule, also where they do not fit."""
    return [
        Plan(tree, policy, rule=rule).made_by(drafter)
        for tree in growths
        for rule in named_rules(cfg)
    ]


def exact(
    speculator: Speculator, prompts: list[list[int]], growths: Sequence[Growth], cfg: DictConfig
) -> dict[str, Any]:
    """Whether the plans of the table write the target's own text; see
    `drafttrain.decoding.exactness`."""
    policies = [policy_of(cfg, temperature) for temperature in cfg.temperatures]
    every = [
        plan for policy in policies for plan in plans_of(cfg, growths, policy, speculator.drafter)
    ]
    plans = [plan for plan in every if plan.misfit is None]
    return exactness.check(
        speculator,
        prompts,
        {label_of(plan): plan for plan in plans},
        draws=cfg.exactness_draws,
        places=cfg.exactness_prompts,
        max_new_tokens=cfg.max_new_tokens,
        batch=cfg.batch,
        seed=cfg.seed,
        watch=lambda items, what: track(items, description=what, unit="batches"),
    )


def changed(target: Target, source: Source, cfg: DictConfig) -> dict[str, Any] | None:
    """What joint training did to the target, on held-out text; None where there was no such
    training, or no such text."""
    if target.original is None or not cfg.change_rows:
        return None
    if source.data is None:
        say(
            "how far the tuned target is from the original is not measured: a file of prompts "
            "holds no answers; give a "
            f"conversation set, such as prompts={BUILTIN}smollm2"
        )
        return None
    try:
        rows = ConversationData(
            source.data, split="held_out", max_length=target.context, limit_rows=cfg.change_rows
        )
    except InputError:
        say(
            "how far the tuned target is from the original is not measured: the set has no "
            "held-out answers"
        )
        return None
    todo = track(range(len(rows)), description="tuned against original", unit="rows")
    return change.change(target.original, target, (rows.batch([i]) for i in todo))


def row_of(plan: Plan, accepted: Measurement | None, speed: Measurement | None) -> dict[str, Any]:
    """Acceptance over all prompts, speed over the timed ones. None where nothing was measured."""
    row = (accepted or Measurement(plan, [], Tally(), [])).row()
    row["label"] = label_of(plan)
    if speed is None:
        return row
    timed = speed.row()
    taken = (
        *("speedup", "speedup_interval", "tokens_per_second", "plain_tokens_per_second"),
        *("seconds", "tokens", "plain_seconds", "plain_tokens", "same_as_plain"),
    )
    return row | {name: timed[name] for name in taken} | {"speed_prompts": timed["prompts"]}


def label_of(plan: Plan) -> str:
    return f"T={plan.policy.temperature:g} {plan.tree.title}" + (
        f" {plan.rule}" if plan.rule else ""
    )


@torch.inference_mode()
def parity(
    speculator: Speculator, drafter: Drafter, prompts: Sequence[list[int]], limit: int
) -> dict[str, Any] | None:
    """Does decoding accept what training's own accuracy promises, at the very same positions?

    The prompts are decoded greedily with a chain; where a round began, the first draft was kept or
    not. Fed as in training, the drafter guesses the tokens at the same positions of the same text.
    Apart from rounding both rates are one number; a gap means that decoding feeds the drafter
    something else than training does.

    Returns: None if there was nothing to compare.
    """
    if not prompts or not drafter.learns:
        return None
    depth = min(4, drafter.max_depth or 4)
    outputs, _ = speculator.generate(prompts, max_new_tokens=limit, plan=Plan(Tree.chain(depth)))
    kept = right = rounds = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        ids, starts = prompt + output.ids, []
        place = len(prompt)
        for number, (emitted, accepted) in enumerate(output.runs):
            last = number == len(output.runs) - 1
            # The prefill is no round. A last round that kept nothing may have been cut before its
            # first draft counted.
            if number and not (last and not accepted):
                starts.append((place, accepted > 0))
            place += emitted
        mask = torch.zeros(1, len(ids), dtype=torch.bool)
        mask[0, [place for place, _ in starts]] = True
        batch = Batch(torch.tensor([ids]), mask, torch.tensor([len(ids)]), torch.tensor([0]))
        features = speculator.target.features(batch.input_ids, batch.lengths, drafter.needs)
        guesses = drafter.guesses(batch, features)
        if guesses is None:
            return None
        compared = [
            (place, was_kept) for place, was_kept in starts if int(guesses[0, place, 0]) >= 0
        ]
        rounds += len(compared)
        kept += sum(was_kept for _, was_kept in compared)
        right += sum(int(guesses[0, place, 0]) == ids[place] for place, _ in compared)
    if not rounds:
        return None
    exact = {speculator.target.dtype, speculator.drafter.dtype} == {torch.float32}
    decoded, forced, allowed = kept / rounds, right / rounds, 0.01 if exact else 0.05
    return {
        "accept_at_1": decoded,
        "sim_accept_at_1": forced,
        "rounds": rounds,
        "gap": decoded - forced,
        "allowed_gap": allowed,
        "agree": abs(decoded - forced) <= allowed,
    }


def settings_of(
    cfg: DictConfig, source: Source, prompts: Sequence[Sequence[int]], speculator: Speculator
) -> dict[str, Any]:
    target = speculator.target
    return {
        "package": Path(cfg.package).name,
        "target": Path(target.name).name + ("" if target.adapter is None else " (tuned)"),
        "prompts": source.name,
        "prompt_count": len(prompts),
        "speed_prompts": min(cfg.speed_prompts, len(prompts)),
        "max_new_tokens": cfg.max_new_tokens,
        "batch": cfg.batch,
        "top_k": cfg.top_k,
        "top_p": cfg.top_p,
        "rule": OmegaConf.to_container(cfg.rule) if OmegaConf.is_list(cfg.rule) else cfg.rule,
        "seed": cfg.seed,
        **conditions(target, prompts),
        "drafter_dtype": dtype_name(speculator.drafter.dtype),
    }


# --- what is shown --------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    rows, settings = result["rows"], result["settings"]
    title = f"acceptance: {settings['prompt_count']} prompts, at most {settings['max_new_tokens']} new tokens"
    deepest = max((len(row["accept_at"]) for row in rows), default=0)
    columns = [
        "",
        "tau",
        "95 %",
        "accepted/round",
        *(f"accept@{k}" for k in range(1, deepest + 1)),
        "rounds",
        "guarantee",
    ]
    table(title, columns, [acceptance_line(row, deepest) for row in rows])
    if settings["speed_prompts"]:
        where = f"{settings['device']}, {settings['threads']} threads, {settings['target_dtype']}"
        title = f"speed: {settings['speed_prompts']} prompts, one at a time ({where})"
        columns = [
            "",
            "speed",
            "95 %",
            "tokens/s",
            "plain tokens/s",
            *(f"s {stage}" for stage in _STAGES),
            "same text",
        ]
        table(title, columns, [speed_line(row) for row in rows])
        say("speed of plain over plain would be 1 without the noise of timing")
    if result["target_change"]:
        say(change.words(result["target_change"]))
    for line in (*verdicts(rows), *parity_words(result["parity"])):
        say(line)
    if result["exactness"]:
        show_exactness(result["exactness"])


def acceptance_line(row: dict[str, Any], deepest: int) -> list[Any]:
    at = accepted_cells(row)
    at += ["-"] * (deepest - len(at))
    return [
        row["label"],
        row["tau"],
        pair(row["tau_interval"]),
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
        *(row["seconds"].get(stage) for stage in _STAGES),
        same_text_cell(row),
    ]


def parity_words(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    facts = (
        f"first drafts accepted while decoding {found['accept_at_1']:.3f}, expected by training's "
        f"own accuracy at the same "
        f"{found['rounds']} positions {found['sim_accept_at_1']:.3f}"
    )
    if found["agree"]:
        return [f"parity: {facts}: they agree"]
    return [
        f"PARITY GAP: {facts}: decoding feeds the drafter something else than training did; tau is "
        f"lower than it could be"
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
            f"exactness, sampled: first {exactness.TOKENS} tokens against the target's law "
            f"(chi-square), "
            f"{exactness.FALSE_ALARM:.0%} false alarms over all"
        )
        columns = [
            "",
            "draws",
            "chi-square",
            "df",
            "p",
            "p corrected",
            "distance seen",
            "90 % noticed from",
            "verdict",
        ]
        names = (
            "draws",
            "statistic",
            "df",
            "p",
            "p_corrected",
            "seen_distance",
            "noticed_distance",
            "verdict",
        )
        table(
            title,
            columns,
            [[row["label"], *(_small(row[name]) for name in names)] for row in found["law"]],
        )
    for line in exactness.words(found):
        say(line)


def _small(value: Any) -> Any:
    """Three decimals hide how small a p-value is."""
    return f"{value:.1g}" if isinstance(value, float) and 0 <= value < 0.001 else value


def say(text: str) -> None:
    print(f"evaluate: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
