"""What tune is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from drafttrain.checks import integer, replay_words, switch
from drafttrain.decoding.plan import check_dtype
from drafttrain.errors import InputError
from drafttrain.nn.sampling import Policy, check_seed
from drafttrain.packaging.decoding import rule_of, tree_of
from drafttrain.runs import check_run_dir, plain_value
from drafttrain.tree.topology import Growth, check_size


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is tuned for, and on how much text: the settings, checked."""

    policy: Policy
    sizes: tuple[int, ...]
    trees: dict[str, Growth]
    """{as the settings name it: tree}, which race in any case."""
    rules: tuple[str | None, ...]
    max_new_tokens: int
    batch: int
    calibration_prompts: int
    race: int
    """Trees that race."""
    race_prompts: int
    replay: bool
    """Calibrate on the target's kept answers, at temperature 0?"""
    answers: str | None
    """Folder of a set that holds these; None finds or writes them."""
    seed: int


def check_settings(cfg: DictConfig) -> Asked:
    """What is asked for. Raises InputError for what can be refused before anything is read."""
    least = {
        "max_new_tokens": 2,
        "batch": 1,
        "calibration_prompts": 1,
        "race": 1,
        "race_prompts": 1,
    }
    for key, at_least in least.items():
        integer(key, cfg[key], at_least)
    switch("write", cfg.write)
    for key in ("sizes", "trees", "rules"):
        if not OmegaConf.is_list(cfg[key]):
            raise InputError(f"{key}={cfg[key]}: needs a list, such as '{key}=[]'")
    for size in cfg.sizes:
        if type(size) is not int or size < 1:
            raise InputError(f"sizes: {size!r} is not an integer of at least 1")
        check_size(size, "sizes")
    check_seed(cfg.seed)
    check_dtype(cfg.dtype)
    check_run_dir(cfg.run_dir, resume=False)
    policy = Policy(cfg.temperature, cfg.top_k, cfg.top_p).simplest()
    replay_words(cfg.replay, cfg.answers, greedy=policy.greedy)
    trees = {str(value): tree_of(plain_value(value)) for value in cfg.trees}
    for name, tree in trees.items():
        if not tree.size:
            raise InputError(
                f"trees: {name} drafts nothing; plain decoding races anyway: leave it out"
            )
    return Asked(
        policy=policy,
        sizes=tuple(cfg.sizes),
        trees=trees,
        rules=tuple(rule_of(rule) for rule in cfg.rules),
        **{key: cfg[key] for key in least},
        replay=cfg.replay,
        answers=cfg.answers,
        seed=cfg.seed,
    )
