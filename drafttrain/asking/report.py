"""What report is asked for."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drafttrain import runs
from drafttrain.checks import integer, replay_words
from drafttrain.decoding.plan import check_dtype
from drafttrain.errors import InputError
from drafttrain.nn.sampling import Policy, check_seed
from drafttrain.packaging.decoding import tree_of
from drafttrain.runs import check_run_dir, plain_value

READING = ("runs", "measure", "temperature", "run_dir")
"""Settings that have a meaning without measure=true."""


def check_settings(cfg: DictConfig) -> tuple[Policy, list[Any], Any]:
    """The policy, the trees and the baseline's tree as they were given. Raises InputError for what
    can be refused before a package is read."""
    if type(cfg.measure) is not bool:
        raise InputError(f"measure={cfg.measure}: give true or false")
    if not cfg.measure:
        refuse_idle()
    for key in ("limit", "turns", "max_new_tokens"):
        value, may_be_null = cfg[key], key != "max_new_tokens"
        if not (may_be_null and value is None) and (type(value) is not int or value < 1):
            raise InputError(f"{key}={value}: needs an integer of at least 1")
    integer("speed_prompts", cfg.speed_prompts, 0)
    integer("batch", cfg.batch, 1)
    check_seed(cfg.seed)
    check_dtype(cfg.dtype)
    check_run_dir(cfg.run_dir, resume=False)
    trees, baseline_tree = plain_value(cfg.trees), plain_value(cfg.baseline_tree)
    check_trees(trees, baseline_tree)
    listed(cfg.runs)
    policy = Policy(cfg.temperature, cfg.top_k, cfg.top_p).simplest()
    replay_words(cfg.replay, cfg.answers, greedy=policy.greedy)
    return policy, trees, baseline_tree


def check_trees(trees: Any, baseline_tree: Any) -> None:
    if not isinstance(trees, list) or not trees:
        raise InputError(
            f"trees={trees}: needs a list of at least one tree, such as 'trees=[package]'"
        )
    for key, value in [*(("trees", tree) for tree in trees), ("baseline_tree", baseline_tree)]:
        if value != "package" and not tree_of(value).size:
            raise InputError(
                f"{key}: {value} drafts nothing; plain decoding is measured anyway: leave it out"
            )


def refuse_idle() -> None:
    """Raise InputError if a setting is given that only measuring reads."""
    for word in runs.current.overrides:
        if re.split("[.@=]", word.lstrip("~+"))[0] not in READING:
            raise InputError(
                f"{word}: without measure=true nothing is measured, the numbers are those that the "
                "packages hold; leave it out, or give measure=true"
            )


def listed(value: Any) -> list[str]:
    """The folders that `runs` names: one text, or a list of them in brackets."""
    if OmegaConf.is_list(value):
        found = [str(one) for one in value]
    else:
        text = str(value).strip()
        found = text[1:-1].split(",") if text.startswith("[") and text.endswith("]") else [text]
    found = [one.strip().strip("'\"") for one in found]
    if not any(found):
        raise InputError(
            "runs is empty: give folders of runs or packages, as in runs=[runs/a,runs/b]"
        )
    return [one for one in found if one]
