"""How a package decodes by default: `decoding.yaml` to and from a Plan, and trees by name."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from drafttrain.checks import is_count
from drafttrain.decoding import rules
from drafttrain.decoding.plan import Plan
from drafttrain.errors import InputError
from drafttrain.nn.sampling import Policy
from drafttrain.packaging.checking import check_keys
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.files import read_yaml
from drafttrain.tree.forest import Forest
from drafttrain.tree.topology import MOST_NODES, Growth, Tree, check_size

if TYPE_CHECKING:
    from drafttrain.drafter.base import Drafter

log = logging.getLogger(__name__)

_LARGEST_FILE = 1 << 20
_LONG_CHAIN = 32
_AUTO = "auto"
_KEYS = ("tree", "budget", "policy", "sampled", "rule")
_BUDGET = ("nodes", "depth")
_POLICY = ("temperature", "top_k", "top_p")
_MORE_POLICY = ("min_p", "repetition_penalty", "min_new_tokens", "logit_bias")
"""Written only where they differ from their defaults, so that packages without them stay as they
were."""
_GROWTHS: dict[str, type[Dynamic] | type[Confident]] = {"dynamic": Dynamic, "chain": Confident}
"""Growths that are no fixed shape, as `Growth.spec` names them."""

_TEXT = """\
# How this drafter decodes unless told otherwise.
# tree: one entry for each drafted token, the ranks on the way to it from the last chosen token \
([] decodes plainly); or a chain's
# length; or how it grows, such as {{growth: dynamic, depth: 5, top_k: 8, total: 24}} or \
{{growth: chain, k: 6, stop_below: 0.3}}.
# An ensemble has a tree for each member: \
{{growth: forest, trees: [[[0], [0, 0]], {{growth: chain, k: 6, stop_below: 0.3}}]}}.
tree:{tree}
# What the tree above costs at most: drafted tokens that the target checks in one pass, and their \
depth.
budget: {{nodes: {nodes}, depth: {depth}}}
# temperature 0 is greedy; top_k 0 and top_p 1.0 keep every token.
policy: {{temperature: {temperature!r}, top_k: {top_k}, top_p: {top_p!r}{more}}}
# auto: drafts are made as suits the rule, drawn whenever the temperature is above 0 if that is \
auto too; the rule is
# the exact one that fits them. Another rule is given by its name: block, ratio, multi_step, \
one_hot, k_seq, ...
sampled: {sampled}
rule: {rule}
"""


def write_plan(plan: Plan) -> str:
    """The text of `decoding.yaml`.

    Raises: InputError for a policy with processors, which no file can hold.
    """
    if plan.policy.processors:
        raise InputError(
            "a package cannot hold the policy's processors: give them at generation, and a policy "
            "without them here"
        )
    found = plan.tree.spec()
    if isinstance(found, dict):
        tree = " {" + ", ".join(f"{name}: {value}" for name, value in found.items()) + "}"
    else:
        assert isinstance(found, list)
        tree = "".join(f"\n  - {path}" for path in found) or " []"
        if plan.tree.is_chain and len(found) > _LONG_CHAIN:
            tree = f" {len(found)}"  # its paths grow with the square of its length
    return _TEXT.format(
        tree=tree,
        nodes=plan.tree.size,
        depth=plan.tree.max_depth,
        temperature=float(plan.policy.temperature),
        top_k=int(plan.policy.top_k),
        top_p=float(plan.policy.top_p),
        more=_more(plan.policy),
        sampled=_AUTO if plan.sampled is None else str(plan.sampled).lower(),
        rule=plan.rule or _AUTO,
    )


def _more(policy: Policy) -> str:
    changed = {
        name: getattr(policy, name)
        for name in _MORE_POLICY
        if getattr(policy, name) != getattr(Policy(), name)
    }
    if "logit_bias" in changed:
        changed["logit_bias"] = dict(changed["logit_bias"])
    text = yaml.safe_dump(changed, default_flow_style=True, sort_keys=False, width=math.inf).strip()
    return f", {text[1:-1]}" if changed else ""


def read_plan(path: Path, drafter: Drafter | None = None) -> Plan:
    """Read and check `decoding.yaml`.

    Args:
        drafter: its depth caps the tree, with a message; its vocabulary bounds the children of a
            node.
    Raises: InputError naming the file and what is wrong in it.
    """
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise InputError(f"{path} has {path.stat().st_size} bytes: not a decoding plan")
        if not path.is_file():
            raise FileNotFoundError
        found = read_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing: the package is not complete") from error
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        raise InputError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    try:
        plan = _plan(found)
        return plan if drafter is None else fit(plan, drafter, str(path))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _plan(found: Any) -> Plan:
    check_keys(found, _KEYS, "the plan")
    check_keys(found["budget"], _BUDGET, "budget")
    check_keys(found["policy"], _POLICY, "policy", optional=_MORE_POLICY)
    tree = tree_of(found["tree"])
    for name, own in (("nodes", tree.size), ("depth", tree.max_depth)):
        if not is_count(found["budget"][name]) or found["budget"][name] < own:
            raise InputError(
                f"budget.{name} is {found['budget'][name]!r}, the tree has {own}: they must fit "
                "together"
            )
    sampled, rule = found["sampled"], found["rule"]
    if sampled != _AUTO and not isinstance(sampled, bool):
        raise InputError(f"sampled is {sampled!r}: give auto, true or false")
    plan = Plan(
        tree, Policy(**found["policy"]), None if sampled == _AUTO else sampled, rule_of(rule)
    )
    _ = plan.rule_name  # refuses contradictions
    return plan


def rule_of(value: Any) -> str | None:
    """A rule as settings name it: `auto` is None, the exact one that fits the drafts; see
    `decoding.rules` for the others.

    Raises: InputError for anything else.
    """
    if value == _AUTO:
        return None
    if not isinstance(value, str):
        raise InputError(
            f"rule {str(value)[:80]!r} is not known: give auto or one of {', '.join(rules.RULES)}"
        )
    rules.named(value)
    return value


def tree_of(value: Any) -> Growth:
    """A tree as settings name it.

    `static` or `eagle1_static` (the 25 nodes of EAGLE-1), `medusa` (the 63 of Medusa), `plain` or 0
    (no drafts), a chain's length or `chain:<length>`, `expand:4x2x1` (that many children per node,
    depth by depth), `dynamic:5x8x24` (EAGLE-2: depth, top_k, total), a list of paths of ranks, also
    as text, or a mapping as `Growth.spec` gives it. For an ensemble, a tree for each member with
    `+` between them: `4+expand:2x1`.

    Raises: InputError for anything else, and for a malformed tree.
    """
    found: Growth | None = None
    if isinstance(value, str):
        found = _from_text(value)
    elif is_count(value):
        check_size(value)
        found = Tree.chain(value)
    elif isinstance(value, dict):
        found = _from_mapping(value)
    elif isinstance(value, Iterable):
        found = _from_paths(list(value))
    if found is None:
        raise InputError(
            f"tree {str(value)[:80]!r} is not known: give static, medusa, plain, a chain's length "
            "such as 4, expand:4x2x1, dynamic:5x8x24, a list of paths such as [[0],[1],[0,0]], or "
            "for an ensemble one for each member, such as 4+3"
        )
    return found


def _from_text(value: str) -> Growth | None:
    """None where no tree has such a name."""
    if "+" in value:
        return _checked(Forest(tuple(tree_of(one) for one in value.split("+"))))
    value = value.strip()
    name, _, rest = value.partition(":")
    if value in ("static", "eagle1_static"):
        return Tree.eagle1_static()
    if value == "medusa":
        return Tree.medusa()
    if value == "plain":
        return Tree.chain(0)
    if name == "chain" and rest.isdecimal():
        return tree_of(int(rest))
    widths = rest.split("x")
    if name == "dynamic" and len(widths) == 3 and all(width.isdecimal() for width in widths):
        depth, top_k, total = map(int, widths)
        return _checked(Dynamic(depth=depth, top_k=top_k, total=total))
    if name == "expand" and all(width.isdecimal() and int(width) > 0 for width in widths):
        nodes = level = 1
        for width in widths:
            level *= int(width)
            nodes += level
            check_size(nodes - 1)
        return Tree.expansion([int(width) for width in widths])
    if value.isdecimal():
        return tree_of(int(value))
    if not value.startswith("["):
        return None
    try:
        return tree_of(json.loads(value))
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"tree {value[:80]!r} is not a list of paths such as [[0],[1],[0,0]]: {error}"
        ) from error


def _from_mapping(value: dict[Any, Any]) -> Growth | None:
    """None where nothing grows by such a name."""
    name = str(value.get("growth"))
    if value.get("growth") == "forest":
        check_keys(value, ("growth", "trees"), "tree")
        if not isinstance(value["trees"], list):
            raise InputError(
                f"tree.trees is {str(value['trees'])[:80]}, needs a list with one tree for each "
                "member"
            )
        return _checked(Forest(tuple(tree_of(one) for one in value["trees"])))
    if name not in _GROWTHS:
        return None
    kind = _GROWTHS[name]
    check_keys(value, ("growth", *(field.name for field in fields(kind))), "tree")
    return _checked(kind(**{key: setting for key, setting in value.items() if key != "growth"}))


def _from_paths(paths: list[Any]) -> Growth:
    check_size(len(paths))
    for path in paths:
        listed = isinstance(path, list | tuple) and len(path) <= MOST_NODES
        if not listed or not all(map(is_count, path)):
            raise InputError(
                f"tree: {str(path)[:80]} is not a path, such as [0, 1] for the second child of the "
                "first"
            )
    return Tree.from_paths(paths) if paths else Tree.chain(0)


def fit(plan: Plan, drafter: Drafter, where: str = "the plan") -> Plan:
    """The plan as this drafter can fill it: deeper nodes are cut off, with a message.

    Raises: InputError if it cannot fill such a tree, a node has more children than there are tokens
        to propose, or drafts are to be drawn by a drafter that copies them.
    """
    deepest = drafter.max_depth
    if deepest is not None and plan.tree.max_depth > deepest:
        log.warning(
            "%s: the tree is %d deep, this drafter fills %d: the rest is cut off",
            where,
            plan.tree.max_depth,
            deepest,
        )
        plan = replace(plan, tree=plan.tree.capped(deepest))
    drafter.check(plan.tree, where)
    return plan.made_by(drafter)


def as_filled(trees: Iterable[Growth], drafter: Drafter) -> list[Growth]:
    """Trees as this drafter can fill them, each once; trees without drafts are left out. Raises
    InputError as `fit` does."""
    return list(
        dict.fromkeys(fit(Plan(tree), drafter, tree.title).tree for tree in trees if tree.size)
    )


def _checked(tree: Growth) -> Growth:
    check_size(max(tree.size, tree.reads))
    return tree
