"""Whatever is given to a setting of conf/, it is taken, or refused in words: never another error,
never an endless loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.utils import get_object
from omegaconf import OmegaConf

from drafttrain import adopt, evaluate, export, generate, report, synthesize, tune
from drafttrain.data.datamodule import ConversationData
from drafttrain.errors import InputError
from drafttrain.fitting import settings
from drafttrain.flow import Needs
from drafttrain.packaging.manifest import STORED
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.wiring.building import build
from drafttrain.wiring.composing import compose
from drafttrain.wiring.conf import conf_dir
from drafttrain.wiring.parameters import parameters_of
from tests.training.parts import write_tiny_set

VALUES = (-1, 10**400, 0.5, math.nan, True, "", "x", ["x"], {"x": 1}, None)
SKIPPED = ("experiment", "logger", "target/smollm2", "target/hf", "features/store")
"""Recipes, which are no nodes; loggers, which open files; and what is read from disk."""
INCOMPLETE = ("drafter/ensemble",)
"""What is refused as it is: it needs packages."""
NEEDED: dict[str, dict[str, Any]] = {
    "drafter/early_exit": {"exit_layer": 0},
    "drafter/selfspec": {"skip_attention": [0], "skip_mlp": []},
    "drafter/ssm": {"layers": [0]},
    "tree/sequoia": {"rates": [[0.6, 0.2], [0.5, 0.1]], "nodes": 4},
    "tree/sparse": {"accuracies": [[0.6, 0.2], [0.5, 0.1]], "nodes": 4},
    "target/tiny": {"width": 16, "layers": 1, "vocab_size": 32},
    "fit.final": {"acceptance": {"a": None}, "speed": {"b": None}},
}
"""Settings without a default, or whose default only suits the embedded target; and two tables of
many trees, which have their own files."""


@pytest.fixture(scope="module")
def target() -> Target:
    return load.tiny(layers=1, width=16, vocab_size=256)


@pytest.fixture(scope="module")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_set(target, tmp_path_factory.mktemp("sweep") / "set", rows=6, held_out=2)
    (folder.parent / "tree.json").write_text("[[0], [1]]")
    (folder.parent / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (folder.parent / "tokens.jsonl").write_text('{"input_ids": [1, 2], "loss_mask": [0, 1]}\n')
    return folder


def nodes() -> dict[str, dict[str, Any]]:
    """Everything in conf/ that is built, by its name."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(conf_dir().rglob("*.yaml")):
        name = str(path.relative_to(conf_dir()).with_suffix(""))
        node = yaml.safe_load(path.read_text()) or {}
        if name.startswith(SKIPPED):
            continue
        if "_target_" in node:
            found[name] = node
        found |= {
            f"{name}.{key}": inner
            for key, inner in node.items()
            if isinstance(inner, dict) and "_target_" in inner
        }
    return found


NODES = nodes()


def places(node: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every setting of a node, but for those of what it holds that is built by itself."""
    for key, value in node.items():
        if key != "_target_":
            yield (*before, key)
            if isinstance(value, dict) and "_target_" not in value:
                yield from places(value, (*before, key))


def changed(node: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    node = copy.deepcopy(node)
    inner = node
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return node


@pytest.mark.parametrize("name", NODES)
def test_what_is_built(name: str, target: Target, folder: Path) -> None:
    files = {
        "data": folder,
        "tree/file": folder.parent / "tree.json",
        "data/tokens": folder.parent / "tokens.jsonl",
        "prompts": folder.parent / "prompts.jsonl",
    }
    node = {**NODES[name], **NEEDED.get(name, {})}
    for start, path in files.items():
        if name.startswith(start) and "path" in node:
            node["path"] = str(path)
    objects: dict[str, Any] = {}
    if name.startswith("drafter/"):
        taken = parameters_of(get_object(node["_target_"]))
        # What a run makes is in no configuration.
        objects = {"target": target, **{name: None for name in STORED if name in taken}}
    elif name.startswith("features/"):
        objects = {
            "target": target,
            "needs": Needs(last_hidden=True),
            "data": ConversationData(folder),
            "spill_dir": None,
        }
    if name not in INCOMPLETE:
        build(node, **objects)
    for place in places(node):
        for value in VALUES:
            try:
                build(changed(node, place, value), **objects)
            except InputError as error:
                assert str(error), (place, value)
            except Exception as error:
                raise AssertionError(
                    f"{name}: {'.'.join(place)}={str(value)[:40]} ends with {error!r}"
                ) from error


@pytest.mark.parametrize(
    ("door", "words", "check"),
    [
        ("fit", ["experiment=smoke", "data.path=x"], settings.read_settings),
        ("evaluate", ["package=x"], evaluate.check_settings),
        ("generate", ["package=x"], generate.check_settings),
        ("tune", ["package=x"], tune.check_settings),
        ("report", ["runs=x", "measure=true"], report.read_settings),
        ("synthesize", ["out=x"], synthesize.check_settings),
        ("export", ["package=x", "to=vllm", "out=y"], export.check_settings),
        ("adopt", ["head=x", "out=y"], adopt.check_settings),
    ],
)
def test_settings_of_the_doors(
    door: str, words: list[str], check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose(door, words)
    check(config.copy())
    refused = 0
    for key in [str(key) for key in config if not OmegaConf.is_dict(config[key])]:
        for value in VALUES if door != "fit" else VALUES[::3]:  # It builds all sections every time.
            tried = config.copy()
            OmegaConf.update(tried, key, value, merge=False)
            try:
                check(tried)
            except InputError:
                refused += 1
            except Exception as error:
                raise AssertionError(
                    f"{door}: {key}={str(value)[:40]} ends with {error!r}"
                ) from error
    assert refused > 4
    assert not list(tmp_path.iterdir())
