"""Every configuration composes and names things that exist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra.utils
import pytest
from omegaconf import OmegaConf

from drafttrain.wiring.building import check_calls
from drafttrain.wiring.composing import compose, invocation_of
from drafttrain.wiring.conf import conf_dir

FILES = sorted(conf_dir().rglob("*.yaml"))
DOORS = sorted(path.stem for path in conf_dir().glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))


def targets(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("_target_"), str):
            yield node["_target_"]
        for value in node.values():
            yield from targets(value)
    elif isinstance(node, list):
        for value in node:
            yield from targets(value)


def name_of(path: Path) -> str:
    return str(path.relative_to(conf_dir()))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_targets_resolve(path: Path) -> None:
    for target in targets(OmegaConf.to_container(OmegaConf.load(path))):
        assert target.startswith("drafttrain."), f"{target} is not ours"
        assert callable(hydra.utils.get_object(target)), target


def test_doors_compose() -> None:
    for door in DOORS:
        compose(door, check_missing=False)


def test_experiments_compose_with_every_door_that_takes_them() -> None:
    assert not EXPERIMENTS or DOORS
    for door in DOORS:
        if "experiment" not in invocation_of(door, [], check_missing=False).choices:
            continue
        for experiment in EXPERIMENTS:
            config = compose(door, [f"experiment={experiment}"], check_missing=False)
            OmegaConf.to_container(config, resolve=True)


def test_every_choice_composes() -> None:
    """Each option of each group, in each door that has the group; keys that its class does not take
    are refused too."""
    for door in DOORS:
        options = {
            group: sorted(
                path.stem for path in (conf_dir() / group.partition("@")[0]).glob("*.yaml")
            )
            for group, chosen in invocation_of(door, [], check_missing=False).choices.items()
            if group != "experiment" and not isinstance(chosen, list)
        }
        # One composition takes an option of every group: they are slow, and groups do not depend on
        # each other.
        for number in range(max(map(len, options.values()), default=0)):
            taken = {group: names[number % len(names)] for group, names in options.items()}
            config = compose(
                door, [f"{group}={name}" for group, name in taken.items()], check_missing=False
            )
            for group in taken:
                node = OmegaConf.select(config, group.partition("@")[2] or group)
                if OmegaConf.is_dict(node) and "_target_" in node:
                    OmegaConf.set_struct(node, False)
                    node["_partial_"] = True  # what is handed over at run time is not in the file
                    check_calls(node)


def test_one_word_three_trees() -> None:
    """A drafter's configuration has a module and a test of the same name, or names another
    drafter's class."""
    root = Path(__file__).resolve().parent.parent
    for path in sorted((conf_dir() / "drafter").glob("*.yaml")):
        (first, *_) = [*targets(OmegaConf.to_container(OmegaConf.load(path))), ""]
        module = first.split(".")[2] if first.startswith("drafttrain.drafter.") else path.stem
        assert (root / "drafttrain" / "drafter" / f"{module}.py").exists(), path
        assert (root / "tests" / "drafter" / f"test_{module}.py").exists(), path
