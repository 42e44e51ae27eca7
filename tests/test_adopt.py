"""A head from elsewhere becomes a package that decodes, measures and begins a training."""

from __future__ import annotations

import copy
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from safetensors.torch import load_file

import drafttrain
from drafttrain import adopt, export
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.eagle3 import Eagle3
from drafttrain.drafter.medusa import Medusa
from drafttrain.drafter.ssm import Ssm
from drafttrain.errors import InputError
from drafttrain.layouts import eagle3
from drafttrain.layouts.checking import check_path
from drafttrain.layouts.directory import how_to_convert, open_directory
from drafttrain.packaging.beginning import check_beginning, read_beginning, take_weights
from drafttrain.packaging.manifest import read_config
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree
from drafttrain.wiring.composing import compose
from tests.drafter import make as drafters
from tests.helpers import save_target
from tests.layouts.made import DROP, config, read_back, same, stirred
from tests.messages import said
from tests.packaging.made import packed

KINDS: dict[str, tuple[Any, str]] = {
    "eagle1": (lambda target: drafters.make(Eagle1, target, bias=True), "sglang"),
    "eagle3": (lambda target: drafters.make(Eagle3, target, fc_norm=True, own_head=True), "vllm"),
    "medusa": (lambda target: drafters.make(Medusa, target, heads=2, own_head=True), "vllm"),
    "ssm": (lambda target: drafters.make(Ssm, target, layers=1, width=32, heads=2), "hf"),
}


@pytest.fixture(scope="module")
def place(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target, and a foreign head of each kind in bfloat16."""
    folder = tmp_path_factory.mktemp("adopt")
    save_target(target, folder / "target")
    for kind, (make, engine) in KINDS.items():
        packed(
            folder / "package", stirred(make(target)), target, dtype="bfloat16", trained_length=48
        )
        export.export_package(folder / "package", target, engine, folder / kind)
        (folder / f"{kind}-ours").mkdir()
        shutil.copytree(folder / kind, folder / f"{kind}-ours", dirs_exist_ok=True)
        (folder / kind / "drafttrain.json").unlink()
    shutil.copytree(folder / "eagle3", broken := folder / "eagle3-broken")
    key = eagle3.KEY
    config(**{key: [1], f"eagle_config__{key}": [0], "num_aux_hidden_states": 2})(broken)
    return folder


@pytest.fixture(scope="module")
def settings() -> DictConfig:
    return compose("adopt", ["head=x", "out=y"], text=("head", "out"))


def words(place: Path, *more: str, **settings: Any) -> list[str]:
    given = {
        "target": "hf",
        "target.path": place / "target",
        "target.dtype": "float32",
        "target.device": "cpu",
        **settings,
    }
    return [f"{key}={value}" for key, value in given.items()] + list(more)


@pytest.mark.parametrize("kind", KINDS)
def test_a_foreign_head_decodes_and_begins_a_training(
    kind: str, place: Path, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "package"
    adopt.main(words(place, head=place / kind, out=package, chain=3))
    said = capsys.readouterr().err
    assert f"init_from={package} drafter={kind} draft_vocab=0" in said
    assert said.count(" target=hf target.path=") == 2, "both commands need the target, too"
    saved = read_config(package)
    assert (
        saved["shape"]["dtype"] == "bfloat16"
        and saved["training"]["adopted"]
        and saved["trained_length"] is None
    )
    speculator = drafttrain.load(package, target, dtype="float32")
    assert speculator.plan.tree.max_depth == (2 if kind == "medusa" else 3)
    outputs, tally = speculator.generate([[5, 6, 7]], max_new_tokens=8)
    plain, _ = decode(target, None, [[5, 6, 7]], Plan(Tree.chain(0)), max_new_tokens=8)
    assert outputs[0].ids == plain[0].ids and tally.drafted
    check_beginning(str(package))
    make = KINDS[kind][0]
    fresh = make(target)
    given = read_beginning(str(package), target, type(fresh), 0)
    take_weights(fresh, given, str(package))
    assert same(fresh, given)


# F97 stands for every number that a config gives of what the file holds, and that `adopt` did not
# read: heads and blocks of Medusa, attention heads of EAGLE-1 and of a draft model (no shape shows
# them), layers.
SIZES: dict[str, tuple[str, dict[str, Any], str, bool | None]] = {
    "no number of heads": ("medusa", {"num_heads": DROP}, "config-key-missing", True),
    "a number that is none": ("medusa", {"num_heads": "two"}, "config-value", True),
    "more heads": ("medusa", {"num_heads": 3}, "medusa-counts", True),
    "fewer heads": ("medusa", {"num_heads": 1}, "medusa-counts", False),
    "more blocks": ("medusa", {"num_hidden_layers": 2}, "medusa-counts", True),
    "no attention heads": ("eagle1", {"num_attention_heads": DROP}, "config-key-missing", True),
    "no layers": ("eagle1", {"num_hidden_layers": DROP}, "config-key-missing", True),
    "no MLP": ("eagle1", {"intermediate_size": DROP}, "config-key-missing", True),
    "no heads of a model": ("ssm", {"num_attention_heads": DROP}, "config-key-missing", True),
    "no heads of EAGLE-3": ("eagle3", {"num_attention_heads": DROP}, "config-key-missing", True),
    "no layers of EAGLE-3": ("eagle3", {"num_hidden_layers": DROP}, "config-key-missing", True),
    "more layers of EAGLE-3": ("eagle3", {"num_hidden_layers": 2}, "tensor-missing", True),
    "as exported": ("eagle1", {}, "", None),
}


@pytest.mark.field("F97")
@pytest.mark.parametrize(("kind", "changes", "name", "fatal"), SIZES.values(), ids=SIZES)
def test_adopt_and_check_judge_numbers_alike(
    kind: str,
    changes: dict[str, Any],
    name: str,
    fatal: bool | None,
    place: Path,
    target: Target,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = Path(shutil.copytree(place / kind, tmp_path / "head"))
    config(**changes)(path)
    found = {one.name: one.fatal for one in check_path(path)}
    assert found.get(name) is fatal
    if fatal:
        with pytest.raises(InputError, match=rf"\[{name}\]"):
            read_back(path, target)
    else:
        assert read_back(path, target) and (name in caplog.text)


@pytest.mark.field("F97")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
            "attention_heads is 8",
        ),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
    ],
)
def test_other_attention_heads_than_the_targets_are_refused(
    changes: dict[str, Any], message: str, place: Path, target: Target, tmp_path: Path
) -> None:
    """The tensors have the same shapes, and would be computed otherwise."""
    path = Path(shutil.copytree(place / "eagle1", tmp_path / "head"))
    config(**changes)(path)
    with pytest.raises(InputError, match=message):
        read_back(path, target)


def test_an_export_keeps_what_its_package_knew(place: Path, tmp_path: Path) -> None:
    adopt.main(words(place, head=place / "eagle1-ours", out=tmp_path / "package"))
    assert read_config(tmp_path / "package")["trained_length"] == 48


def test_the_random_state_stays(place: Path, target: Target) -> None:
    before = torch.get_rng_state()
    adopt.read_drafter(open_directory(place / "medusa", "head"), target, None)
    assert torch.equal(torch.get_rng_state(), before)


def test_pickles_are_refused_with_a_way(
    place: Path,
    tmp_path: Path,
    target: Target,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The way that is printed really leads there."""
    head = tmp_path / "head"
    shutil.copytree(place / "eagle1", head)
    torch.save(load_file(head / "model.safetensors"), head / "pytorch_model.bin")
    (head / "model.safetensors").unlink()
    with pytest.raises(SystemExit) as left:
        adopt.main(words(place, head=head, out=tmp_path / "package"))
    said = capsys.readouterr().err
    assert (
        left.value.code == 2
        and "pytorch_model.bin can run code when read" in said
        and not (tmp_path / "package").exists()
    )
    *_, code, name = shlex.split(said[said.index("python -c") : said.rindex(" in its directory")])
    monkeypatch.chdir(head)
    monkeypatch.setattr(sys, "argv", ["-c", name])
    exec(code, {})
    (head / "pytorch_model.bin").unlink()
    assert same(read_back(head, target), read_back(place / "eagle1", target))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", 'it\'s $HOME `id` "a".bin', "-x.pt", f"{'n' * 200}.bin"]
)
def test_the_way_is_safe_in_a_shell(name: str) -> None:
    """A foreign file's name is one word of the command that is printed."""
    saved = how_to_convert((name,))
    found = shlex.split(saved[saved.index("python -c") : saved.rindex(" in its directory")])
    assert found[:2] == ["python", "-c"] and found[3:] == [name]
    compile(found[2], "printed", "exec")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"head": "/nowhere"}, "head=/nowhere"),
        ({"chain": 0}, "chain=0"),
        ({"trained_length": "long"}, "trained_length=long"),
        ({"out": "{place}"}, "out="),
        ({"out": "{place}/package"}, "out="),
        ({"out": "~nobody-of-that-name/x"}, "out=~nobody-of-that-name/x"),
        ({"head": "~nobody-of-that-name/x"}, "head=~nobody-of-that-name/x"),
        ({"head": "{place}/package"}, "drafttrain package"),
        ({"head": "{place}/eagle3-broken"}, "[layers-count] 1 states are named, fc reads 2"),
    ],
)
def test_bad_input(
    given: dict[str, Any], message: str, place: Path, settings: DictConfig, tmp_path: Path
) -> None:
    """Before the target is read."""
    cfg = copy.deepcopy(settings)
    for key, value in {
        "head": str(place / "eagle1"),
        "out": str(tmp_path / "package"),
        **given,
    }.items():
        cfg[key] = value.replace("{place}", str(place)) if isinstance(value, str) else value
    with pytest.raises(InputError, match=re.escape(message)):
        adopt.read_head(cfg)


def test_another_class_than_the_exports(place: Path, tmp_path: Path, target: Target) -> None:
    head = Path(shutil.copytree(place / "eagle1-ours", tmp_path / "head"))
    saved = json.loads((head / "drafttrain.json").read_text())
    for name in ("drafttrain.drafter.medusa.Medusa", "os.system"):
        saved["drafter"]["_target_"] = name
        (head / "drafttrain.json").write_text(json.dumps(saved))
        with pytest.raises(InputError, match=said("doors.adopt-another-class")):
            read_back(head, target)
