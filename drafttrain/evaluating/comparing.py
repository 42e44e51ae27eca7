"""What evaluate compares: temperatures, trees and rules, and the plans that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafttrain.decoding.plan import Plan
from drafttrain.errors import InputError
from drafttrain.evaluating.saying import say
from drafttrain.nn.sampling import Policy
from drafttrain.packaging.decoding import as_filled, tree_of
from drafttrain.tree.files import table as numbers
from drafttrain.tree.topology import Growth, Tree, check_size

if TYPE_CHECKING:
    from drafttrain.decoding.speculator import Speculator
    from drafttrain.drafter.base import Drafter

CALIBRATED = "calibrated:"


@dataclass(frozen=True)
class OfPackage:
    """A tree that only the package knows: `package` or `calibrated:<nodes>`."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What is compared, and on how much text: the settings, checked."""

    policies: tuple[Policy, ...]
    top_k: int
    top_p: float
    trees: tuple[Growth | OfPackage, ...]
    rules: tuple[str | None, ...]
    """Each once; None is the one that fits."""
    rule_given: Any
    """As it was written, one name or a list of them."""
    max_new_tokens: int
    batch: int
    """Prompts decoded side by side for acceptance."""
    replay: bool
    """Count acceptance at temperature 0 on the target's kept answers, where they can stand in?"""
    answers: str | None
    """Folder of a set that holds these; None finds or writes them."""
    seed: int
    speed_prompts: int
    parity_prompts: int
    change_rows: int
    exactness_draws: int
    exactness_prompts: int

    def check_rules(self, growths: Sequence[Growth], drafter: Drafter | None = None) -> None:
        """Refuse a rule that fits no temperature and tree of the comparison, with the reason."""
        for rule in self.rules:
            reasons = [
                Plan(tree, policy, rule=rule).made_by(drafter).misfit
                for policy in self.policies
                for tree in growths
            ]
            if all(reasons):
                raise InputError(str(reasons[-1]))

    def plans(self, growths: Sequence[Growth], policy: Policy, drafter: Drafter) -> list[Plan]:
        """Every tree with every rule, also where they do not fit."""
        return [
            Plan(tree, policy, rule=rule).made_by(drafter)
            for tree in growths
            for rule in self.rules
        ]


def chosen(value: Any) -> Growth | OfPackage:
    """A tree as the settings name it.

    Raises: InputError for one that is not known, or drafts nothing.
    """
    found = value if isinstance(value, Growth) else _named(value)
    if isinstance(found, Growth) and not found.size:
        name = found.title if found is value else value
        raise InputError(f"{name} drafts nothing; plain decoding is measured anyway: leave it out")
    return found


def _named(value: Any) -> Growth | OfPackage:
    if value == "package":
        return OfPackage(value)
    if not isinstance(value, str) or not value.startswith(CALIBRATED):
        return tree_of(value)
    size = value.removeprefix(CALIBRATED)
    if not (size.isdecimal() and int(size)):
        raise InputError(f"tree {value!r}: needs a number of nodes, such as {CALIBRATED}64")
    check_size(int(size))
    return OfPackage(value)


def stand_ins(trees: Sequence[Growth | OfPackage]) -> list[Growth]:
    """Trees to check rules with before the package is read: a rule that fits any tree fits a
    chain."""
    return [Tree.chain(1) if isinstance(tree, OfPackage) else tree for tree in trees]


def filled_trees(
    trees: Sequence[Growth | OfPackage], speculator: Speculator, drafter: Drafter, package: Path
) -> list[Growth]:
    """The trees to compare, as this drafter can fill them, each once."""
    found = [
        packaged_tree(tree.name, speculator, package) if isinstance(tree, OfPackage) else tree
        for tree in trees
    ]
    return as_filled(found, drafter)


def packaged_tree(value: str, speculator: Speculator, package: Path) -> Growth:
    """The tree that the package decodes with, or the calibrated one of the accuracies that it
    holds."""
    if value == "package":
        return speculator.plan.tree
    from drafttrain.packaging.manifest import read_metrics
    from drafttrain.training.calibrate import calibrated

    settings = read_metrics(package).get("settings")
    accuracies = settings.get("head_accuracy") if isinstance(settings, dict) else None
    if accuracies is None:
        raise InputError(
            f"tree {value}: {package} holds no accuracy of heads, which fit measures for medusa "
            "and hydra_heads where final.calibrated names a size: name another tree, or let "
            "python -m drafttrain.tune find one"
        )
    return calibrated(
        numbers(accuracies, f"accuracies of heads in {package}"),
        int(value.removeprefix(CALIBRATED)),
    )


def warn_of_length(config: dict[str, Any], prompts: Sequence[Sequence[int]], limit: int) -> None:
    """Say how many texts may grow longer than what the drafter was trained on."""
    trained = config["trained_length"]
    beyond = sum(len(prompt) + limit > trained for prompt in prompts) if trained else 0
    if beyond:
        say(
            f"{beyond} of {len(prompts)} prompts go beyond the {trained} tokens of the longest row "
            "in training: the text stays the target's, fewer drafts may be accepted there"
        )


def label_of(plan: Plan) -> str:
    """What a plan's row is called."""
    rule = f" {plan.rule}" if plan.rule else ""
    return f"T={plan.policy.temperature:g} {plan.tree.title}{rule}"
