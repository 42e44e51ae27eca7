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

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drafttrain import checks
from drafttrain.decoding import exactness
from drafttrain.decoding.speculator import Speculator, check_dtype
from drafttrain.errors import InputError
from drafttrain.evaluating.comparing import (
    Compared,
    chosen,
    filled_trees,
    stand_ins,
    warn_of_length,
)
from drafttrain.evaluating.measuring import changed, exact, measure, settings_of
from drafttrain.evaluating.parity import parity
from drafttrain.evaluating.saying import say
from drafttrain.evaluating.showing import show
from drafttrain.files import write_json
from drafttrain.nn.sampling import Policy, check_seed
from drafttrain.packaging.decoding import read_plan, rule_of
from drafttrain.packaging.manifest import DECODING, read_config
from drafttrain.packaging.reading import load_drafter, target_for
from drafttrain.reporting.figures import acceptance_curve
from drafttrain.runs import check_run_dir, new_folder, plain_value, provenance
from drafttrain.target.model import Target
from drafttrain.target.prompts import open_prompts
from drafttrain.wiring.building import build
from drafttrain.wiring.doors import door

RESULT, PICTURE = "evaluation.json", "acceptance.png"


@door("evaluate", text=("prompts",))
def main(cfg: DictConfig) -> None:
    asked = check_settings(cfg)
    package = checks.path_of("package", cfg.package)
    config = read_config(package)
    source = open_prompts(cfg.prompts, plain_value(cfg.columns))
    target: Target = build(cfg.target, work="decode")
    target = target_for(package, target)
    drafter = load_drafter(package, target)
    plan = read_plan(package / DECODING, drafter)
    speculator = Speculator(target, drafter, plan, dtype=cfg.dtype)
    prompts = source.ids(target, cfg.limit, say)
    warn_of_length(config, prompts, asked.max_new_tokens)
    growths = filled_trees(asked.trees, speculator, drafter, package)
    asked.check_rules(growths, drafter)
    with new_folder(cfg.run_dir) as folder:
        rows = measure(speculator, prompts, growths, asked)
        few = prompts[: asked.parity_prompts]
        result = {
            "settings": settings_of(asked, Path(cfg.package), source, prompts, speculator),
            "rows": rows,
            "target_change": changed(target, source, asked.change_rows),
            "parity": parity(speculator, drafter, few, asked.max_new_tokens),
            "exactness": exact(speculator, prompts, growths, asked) if cfg.exactness else None,
            "provenance": provenance(cfg),
        }
        write_json(folder / RESULT, result)
        drafted = [row for row in rows if row["nodes"]]
        acceptance_curve(drafted, folder / PICTURE, title=Path(cfg.package).name)
        show(result)
        say(f"wrote {folder / RESULT} and {folder / PICTURE}")


# --- before long work starts ----------------------------------------------------------------------


def check_settings(cfg: DictConfig) -> Compared:
    """The settings of the comparison. Raises InputError for what can be refused before anything is
    read."""
    least = {
        "change_rows": 0,
        "max_new_tokens": 1,
        "batch": 1,
        "speed_prompts": 0,
        "parity_prompts": 0,
    }
    for key, at_least in least.items():
        checks.integer(key, cfg[key], at_least)
    checks.integer("limit", cfg.limit, 1, null="all")
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
    named = named_trees(cfg)
    if not named:
        raise InputError(
            "chains and trees are both empty: give at least one of them, such as 'chains=[4]'"
        )
    asked = Compared(
        policies=tuple(Policy(t, cfg.top_k, cfg.top_p).simplest() for t in cfg.temperatures),
        top_k=cfg.top_k,
        top_p=cfg.top_p,
        trees=tuple(chosen(value) for value in named),
        rules=named_rules(plain_value(cfg.rule)),
        rule_given=plain_value(cfg.rule),
        **{key: cfg[key] for key in least},
        seed=cfg.seed,
        exactness_draws=cfg.exactness_draws,
        exactness_prompts=cfg.exactness_prompts,
    )
    # The package's own trees are not known yet.
    asked.check_rules(stand_ins(asked.trees))
    return asked


def named_rules(given: Any) -> tuple[str | None, ...]:
    """Rules as the settings name them, each once; None is the one that fits."""
    values = given if isinstance(given, list) else [given]
    if not values:
        raise InputError("rule is an empty list: give auto, or the rules to compare")
    return tuple(dict.fromkeys(rule_of(value) for value in values))


def named_trees(cfg: DictConfig) -> list[Any]:
    """Chains and trees as the settings name them, and the one that is chosen next to them."""
    named = [*plain_value(cfg.chains), *plain_value(cfg.trees)]
    if cfg.tree is not None:
        named.append(build(cfg.tree) if OmegaConf.is_dict(cfg.tree) else plain_value(cfg.tree))
    return named


if __name__ == "__main__":
    main()
