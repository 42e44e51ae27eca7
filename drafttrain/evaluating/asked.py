"""What evaluate is asked for: settings, checked without torch."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from drafttrain import checks
from drafttrain.decoding.draws import check_draws
from drafttrain.decoding.plan import check_dtype
from drafttrain.errors import InputError
from drafttrain.evaluating.comparing import Compared, chosen, stand_ins
from drafttrain.nn.sampling import Policy, check_seed
from drafttrain.packaging.decoding import rule_of
from drafttrain.runs import check_run_dir, plain_value
from drafttrain.wiring.building import build


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
    checks.integer("turns", cfg.turns, 1, null="all")
    for key in ("exactness", "sim"):
        if type(cfg[key]) is not bool:
            raise InputError(f"{key}={cfg[key]}: give true or false")
    check_draws(cfg.exactness_draws, cfg.exactness_prompts)
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
        replay=cfg.replay,
        answers=cfg.answers,
        seed=cfg.seed,
        exactness_draws=cfg.exactness_draws,
        exactness_prompts=cfg.exactness_prompts,
    )
    if cfg.sim and all(policy.greedy for policy in asked.policies):
        raise InputError(
            f"sim=true computes acceptance at temperatures above 0, {cfg.temperatures} has none: "
            "add one, as in 'temperatures=[0,1]', or leave sim out"
        )
    greedy = any(policy.greedy for policy in asked.policies)
    checks.replay_words(cfg.replay, cfg.answers, greedy=greedy)
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
