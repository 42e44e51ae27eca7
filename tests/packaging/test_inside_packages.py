"""Packages of drafters that are a part of the target: numbers of layers, an adapter's tensors, and
nothing of the target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import drafttrain
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.speculator import Speculator
from drafttrain.drafter.early_exit import EarlyExit
from drafttrain.drafter.inside import Inside
from drafttrain.drafter.selfspec import SelfSpec
from drafttrain.errors import InputError
from drafttrain.nn.sampling import Policy
from drafttrain.packaging.hf_generate import generate
from drafttrain.packaging.manifest import CARD, CONFIG, TENSORS, read_config
from drafttrain.packaging.reading import load_drafter
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters
from tests.messages import said
from tests.packaging.made import packed

PROMPTS = [[5, 6, 7, 8, 9, 10, 5, 6], [3]]
FEW = list(range(0, 320, 4))


@pytest.fixture(scope="module")
def target() -> Target:
    return load.tiny()


def made(target: Target) -> dict[str, Inside]:
    torch.manual_seed(0)
    found: dict[str, Inside] = {
        "selfspec": drafters.make(SelfSpec, target, skip_attention=[2], skip_mlp=[1, 2]),
        "selfspec, few tokens": drafters.make(SelfSpec, target, skip_mlp=[1], draft_ids=FEW),
        "early_exit": drafters.make(
            EarlyExit, target, exit_layer=1, loss={"cross_entropy": 1.0, "forward_kl": 0.5}
        ),
        "early_exit, few tokens": drafters.make(
            EarlyExit, target, exit_layer=0, heads=2, mlp=32, draft_ids=FEW
        ),
    }
    with torch.no_grad():
        for drafter in found.values():
            for parameter in drafter.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return found


NAMES = ["selfspec", "selfspec, few tokens", "early_exit", "early_exit, few tokens"]


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str, target: Target, tmp_path: Path) -> None:
    drafter = made(target)[name].eval()
    folder = packed(tmp_path / "package", drafter, target, plan=Plan(Tree.expansion([2, 1])))
    tensors, config = load_file(folder / TENSORS), read_config(folder)
    assert {*tensors} == {*drafter.state_dict()} and all(
        torch.equal(tensors[n], v) for n, v in drafter.state_dict().items()
    )
    if name == "selfspec":
        assert not tensors and config["shape"]["parameters"] == 0
        assert (config["drafter"]["skip_attention"], config["drafter"]["skip_mlp"]) == ([2], [1, 2])
    else:
        assert config["shape"]["draft_vocab"] == (80 if "few" in name else 320)
    again = load_drafter(folder, target)
    assert type(again) is type(drafter) and again.settings() == drafter.settings()
    assert all(torch.equal(v, again.state_dict()[n]) for n, v in drafter.state_dict().items())
    speculator = drafttrain.load(folder, target, dtype="float32")
    for policy in (Policy(), Policy(1.0)):
        plan = Plan(Tree.expansion([2, 1]), policy)
        ours, _ = Speculator(target, drafter, plan, dtype="float32").generate(
            PROMPTS, max_new_tokens=12, seed=2
        )
        theirs, _ = speculator.generate(PROMPTS, max_new_tokens=12, plan=plan, seed=2)
        assert [(o.ids, o.runs) for o in ours] == [(o.ids, o.runs) for o in theirs]
        if policy.greedy:
            plain, _ = speculator.generate(PROMPTS, max_new_tokens=12, plan=Plan(Tree.chain(0)))
            assert [o.ids for o in ours] == [o.ids for o in plain]


def test_the_card_says_what_it_is(target: Target, tmp_path: Path) -> None:
    cards = {
        name: (packed(tmp_path / name, drafter, target) / CARD).read_text()
        for name, drafter in made(target).items()
    }
    assert "attention of layers 2; MLP of layers 1, 2" in cards["selfspec"]
    assert "copied" not in cards["selfspec"] and "trained parameters" not in cards["selfspec"]
    assert "trained parameters" in cards["early_exit"]


def edit_config(package: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((package / CONFIG).read_text())
    edit(config)
    (package / CONFIG).write_text(json.dumps(config))


def settings(**changed: Any) -> Callable[[Path], None]:
    return lambda package: edit_config(package, lambda config: config["drafter"].update(changed))


DAMAGE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a layer beyond the last": ("selfspec", settings(skip_mlp=[3]), r"skip_mlp=\[3\].*from 0 to 2"),
    "a layer twice": ("selfspec", settings(skip_mlp=[1, 1]), "each once"),
    "a layer that is no number": (
        "selfspec",
        settings(skip_attention=["1"]),
        "needs a list of layers",
    ),
    "layers that are no list": (
        "selfspec",
        settings(skip_attention="12"),
        "skip_attention is '12'",
    ),
    "everything left out": (
        "selfspec",
        settings(skip_attention=[0, 1, 2], skip_mlp=[0, 1, 2]),
        "skip_",
    ),
    "a setting missing": (
        "selfspec",
        lambda p: edit_config(p, lambda c: c["drafter"].pop("skip_mlp")),
        said("packaging.lacks") + " skip_mlp",
    ),
    "a tensor too many": (
        "selfspec",
        lambda p: save_file({"fc": torch.zeros(2)}, p / TENSORS),
        said("packaging.unexpected") + " fc",
    ),
    "needs that it has not": (
        "selfspec",
        lambda p: edit_config(p, lambda c: c["needs"].update(layers=[1])),
        said("packaging.needs_differ"),
    ),
    "an exit beyond the last": ("early_exit", settings(exit_layer=3), "exit_layer=3"),
    "another exit": ("early_exit", settings(exit_layer=0), said("packaging.needs_differ")),
    "an exit that is no number": ("early_exit", settings(exit_layer=1.5), r"exit_layer is '1\.5'"),
    "another size": (
        "early_exit",
        settings(mlp=16),
        said("packaging.missing_tensor") + r" block\.mlp",
    ),
    "a tensor of another shape": (
        "early_exit",
        lambda p: save_file({**load_file(p / TENSORS), "norm.weight": torch.ones(2)}, p / TENSORS),
        said("packaging.other_shape") + r": norm\.weight",
    ),
    "no number": (
        "early_exit",
        lambda p: save_file(
            {**load_file(p / TENSORS), "norm.weight": torch.full((64,), torch.nan)}, p / TENSORS
        ),
        said("packaging.not_finite") + r" norm\.weight",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_by_name(name: str, target: Target, tmp_path: Path) -> None:
    which, edit, message = DAMAGE[name]
    package = packed(tmp_path / "package", made(target)[which], target)
    edit(package)
    with pytest.raises(InputError, match=message):
        drafttrain.load(package, target)


@pytest.mark.parametrize("name", ["selfspec", "early_exit"])
def test_transformers_decodes_with_it(name: str, target: Target, tmp_path: Path) -> None:
    package = packed(tmp_path / "package", made(target)[name], target, plan=Plan(Tree.chain(3)))
    ids = torch.tensor([PROMPTS[0]])
    given = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = target.model.generate(ids, **given)
    assert torch.equal(generate(target.model, package=package, inputs=ids, **given), plain)
