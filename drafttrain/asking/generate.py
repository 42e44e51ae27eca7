"""What generate is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from drafttrain.checks import integer
from drafttrain.decoding.plan import Plan, check_dtype
from drafttrain.errors import InputError
from drafttrain.nn.sampling import Policy, check_seed
from drafttrain.packaging.decoding import fit, rule_of, tree_of
from drafttrain.runs import plain_value
from drafttrain.tree.topology import Growth, Tree
from drafttrain.wiring.building import build

if TYPE_CHECKING:
    from drafttrain.decoding.speculator import Speculator

MARKS = ("auto", "colour", "brackets", "none")


@dataclass(frozen=True)
class Asked:
    """How the settings ask to decode."""

    policy: Policy
    tree: Growth | None
    """None is the package's own."""
    rule: str | None
    """None is the one that fits."""

    def plan(self, speculator: Speculator) -> Plan:
        """The plan for this package."""
        own = speculator.plan
        if self.tree is not None:
            plan = Plan(self.tree, self.policy, rule=self.rule)
            return fit(plan, speculator.drafter, self.tree.title)
        if self.rule is None and own.policy.greedy == self.policy.greedy:
            return replace(own, policy=self.policy)
        return Plan(own.tree, self.policy, rule=self.rule).made_by(speculator.drafter)


def check_settings(cfg: DictConfig) -> Asked:
    """How to decode. Raises InputError for what can be refused before anything is read."""
    integer("max_new_tokens", cfg.max_new_tokens, 1)
    if cfg.mark not in MARKS:
        raise InputError(f"mark={cfg.mark}: give one of {', '.join(MARKS)}")
    for key in ("chat", "compare"):
        if not isinstance(cfg[key], bool):
            raise InputError(f"{key}={cfg[key]}: needs true or false")
    policy = Policy(
        cfg.temperature,
        cfg.top_k,
        cfg.top_p,
        cfg.min_p,
        cfg.repetition_penalty,
        cfg.min_new_tokens,
        () if cfg.logit_bias is None else plain_value(cfg.logit_bias),
    ).simplest()
    tree = None if cfg.tree == "package" else chosen_tree(cfg.tree)
    asked = Asked(policy, tree, rule_of(cfg.rule))
    # The package's own tree is not known yet; a rule that fits any tree fits a chain.
    plan = Plan(Tree.chain(1) if tree is None else tree, policy, rule=asked.rule)
    _ = plan.rule_name  # refuses what does not fit
    if cfg.prompt is not None and not str(cfg.prompt).strip():
        raise InputError('prompt is empty: give prompt="...", or leave it out to be asked')
    if cfg.system is not None and not cfg.chat:
        raise InputError(
            "system has no place without a chat template: leave it out, or set chat=true"
        )
    if cfg.system is not None:
        readable(str(cfg.system), "system")
    if cfg.seed is not None:
        check_seed(cfg.seed)
    check_dtype(cfg.dtype)
    return asked


def chosen_tree(value: Any) -> Growth:
    """A tree by name, or as a choice of the configuration describes it."""
    return build(value) if OmegaConf.is_dict(value) else tree_of(value)


def readable(text: str, what: str = "the prompt") -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{what} is not UTF-8 (character {error.start + 1}): save or type it as UTF-8"
        ) from error
    return text
