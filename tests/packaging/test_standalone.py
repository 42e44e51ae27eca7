"""Packages of drafters that are language models: one file for every tensor, and a directory that
transformers reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import drafttrain
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.ssm import Ssm
from drafttrain.errors import InputError
from drafttrain.packaging.manifest import (
    CARD,
    CONFIG,
    FILES,
    STANDALONE,
    STANDALONE_CONFIG,
    STANDALONE_FILES,
    STANDALONE_TENSORS,
    TENSORS,
)
from drafttrain.packaging.reading import load_drafter
from drafttrain.packaging.writing import change_plan
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters
from tests.messages import said
from tests.packaging.made import packed

ALL = ["embedding", "norm", "head"]
ORIGINS: dict[str, dict[str, Any]] = {
    "cut": {
        "layers": [0, 2],
        "draft_ids": list(range(1, 201, 2)),
        "loss": {"jsd": 1.0, "cross_entropy": 0.5},
        "beta": 0.3,
    },
    "cut, its own head": {"layers": [1], "own": ["norm", "head"], "on_policy": 0.25},
    "cut, all its own": {"layers": [0, 2], "own": ALL},
    "new": {"layers": 2, "width": 32, "heads": 2},
    "directory": {"path": "small"},
}
STANDALONES = [name for name in ORIGINS if name not in ("cut", "cut, its own head")]


def made(origin: str, target: Target, folder: Path) -> Ssm:
    settings = dict(ORIGINS[origin])
    if "path" in settings:
        load.tiny(family="qwen2", width=32, layers=2, seed=3).model.save_pretrained(
            folder / "small"
        )
        settings["path"] = str(folder / "small")
    torch.manual_seed(3)
    drafter = drafters.make(Ssm, target, **settings)
    with torch.no_grad():
        for p in drafter.parameters():
            p.add_(0.01 * torch.randn(p.shape))
    return drafter.eval()


@pytest.fixture(scope="module")
def target() -> Target:
    return load.tiny()


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("origin", ORIGINS)
def test_round_trip_is_bit_for_bit(origin: str, tied: bool, tmp_path: Path) -> None:
    target = load.tiny(tie_word_embeddings=tied)
    drafter = made(origin, target, tmp_path)
    package = packed(tmp_path / "package", drafter, target)  # type: ignore[arg-type]
    shutil.rmtree(tmp_path / "small", ignore_errors=True)  # a package needs nothing else
    before = torch.get_rng_state()
    again = load_drafter(package, target)
    assert torch.equal(torch.get_rng_state(), before)
    assert again.settings() == drafter.settings() and not again.training
    mine, theirs = drafter.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(
        torch.equal(mine[name], theirs[name]) and mine[name].dtype == theirs[name].dtype
        for name in mine
    )
    standalone = origin in STANDALONES
    assert names(package) == sorted((*FILES, *(STANDALONE_FILES if standalone else ())))
    assert bool(load_file(package / TENSORS)) != standalone, "a tensor is stored once"
    if origin == "cut":
        assert not [name for name, t in load_file(package / TENSORS).items() if 320 in t.shape]

    speculator = drafttrain.load(package, target, dtype="float32")
    drafted, tally = speculator.generate([[5, 6, 7], [9]], max_new_tokens=10)
    plain, _ = speculator.generate([[5, 6, 7], [9]], max_new_tokens=10, plan=Plan(Tree.chain(0)))
    assert [o.ids for o in drafted] == [o.ids for o in plain] and tally.drafted


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("origin", ORIGINS)
def test_transformers_reads_it_and_drafts_with_it(origin: str, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    target = load.tiny(tie_word_embeddings=tied)
    drafter = made(origin, target, tmp_path)
    package = packed(tmp_path / "package", drafter, target, export_assistant=True)
    assistant, report = AutoModelForCausalLM.from_pretrained(
        package / STANDALONE, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert json.loads((package / STANDALONE_CONFIG).read_text())["architectures"] == [
        type(drafter.model).__name__
    ]
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.inference_mode():
        torch.testing.assert_close(
            assistant(input_ids=ids).logits, drafter.model(input_ids=ids).logits
        )
    common: dict[str, Any] = {
        "max_new_tokens": 20,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    plain = target.model.generate(ids, **common)
    assert torch.equal(target.model.generate(ids, assistant_model=assistant, **common), plain)
    assert "assistant_model=assistant" in (package / CARD).read_text()
    change_plan(package, Plan(Tree.chain(2)))
    assert "assistant_model=assistant" in (package / CARD).read_text()
    assert load_drafter(package, target).settings() == drafter.settings()


def test_half_precision_halves_the_file(target: Target, tmp_path: Path) -> None:
    drafter = made("new", target, tmp_path)
    full = packed(tmp_path / "full", drafter, target)  # type: ignore[arg-type]
    half = packed(tmp_path / "half", drafter, target, dtype="bfloat16")  # type: ignore[arg-type]
    assert (half / STANDALONE_TENSORS).stat().st_size < 0.6 * (
        full / STANDALONE_TENSORS
    ).stat().st_size
    assert json.loads((half / STANDALONE_CONFIG).read_text())["dtype"] == "bfloat16"
    again, mine = load_drafter(half, target).state_dict(), drafter.state_dict()
    assert all(
        torch.equal(again[name], mine[name].bfloat16().to(again[name].dtype)) for name in mine
    )


def test_one_package_replaces_another(target: Target, tmp_path: Path) -> None:
    """Nothing of the old one stays; what is not a package's is never touched."""
    folder = tmp_path / "package"
    packed(folder, made("new", target, tmp_path), target)  # type: ignore[arg-type]
    torch.manual_seed(0)
    packed(folder, drafters.make(Eagle1, target), target)
    assert names(folder) == sorted(FILES)
    packed(folder, made("new", target, tmp_path), target)  # type: ignore[arg-type]
    (folder / STANDALONE / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"ssm/notes\.txt"):
        packed(folder, made("new", target, tmp_path), target)  # type: ignore[arg-type]
    assert (folder / STANDALONE / "notes.txt").read_text() == "mine"


def test_what_is_no_language_model_is_not_exported(target: Target, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="export_assistant=true: Eagle1"):
        packed(tmp_path / "package", drafters.make(Eagle1, target), target, export_assistant=True)
    assert not (tmp_path / "package").exists()
    drafter = made("cut", target, tmp_path)
    other = load.tiny()
    other.config.quantization_config = {"quant_method": "fp8"}
    object.__setattr__(drafter, "target", other)
    with pytest.raises(InputError, match=said("packaging.quantised")):
        drafter.standalone()


def tensors(path: Path, edit: Any) -> None:
    found = load_file(path)
    edit(found)
    save_file(found, path)


def config(package: Path, **changes: Any) -> None:
    found = json.loads((package / CONFIG).read_text())
    found["drafter"] |= changes
    (package / CONFIG).write_text(json.dumps(found))


EMBEDDING = "model.embed_tokens.weight"
BY_CONFIG: dict[str, Any] = {"layers": None, "width": None, "heads": None}


def as_llama(package: Path, **changes: Any) -> None:
    """The package describes its network by a config."""
    sizes = {
        "vocab_size": 320,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    }
    config(package, **BY_CONFIG, config={"model_type": "llama", **sizes, **changes})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda p: tensors(p / STANDALONE_TENSORS, lambda t: t.pop(EMBEDDING)),
            said("packaging.missing_tensor") + r" model\.model\.embed_tokens\.weight",
        ),
        (
            lambda p: tensors(p / STANDALONE_TENSORS, lambda t: t.update(stranger=torch.zeros(2))),
            said("packaging.unexpected") + " stranger",
        ),
        (
            lambda p: tensors(
                p / STANDALONE_TENSORS, lambda t: t.update({EMBEDDING: torch.zeros(3, 32)})
            ),
            r"F32 \[3, 32\]",
        ),
        (
            lambda p: tensors(p / STANDALONE_TENSORS, lambda t: t[EMBEDDING].fill_(float("nan"))),
            "NaN",
        ),
        (
            lambda p: tensors(
                p / TENSORS, lambda t: t.update({f"model.{EMBEDDING}": torch.zeros(320, 32)})
            ),
            said("packaging.unexpected") + " model",
        ),
        (
            lambda p: (p / STANDALONE_TENSORS).unlink(),
            r"2 " + said("packaging.fewer_tensors") + r".* 0 tensors",
        ),
        (lambda p: (p / STANDALONE_TENSORS).write_bytes(b"\x80\x04"), said("packaging.unreadable")),
        (
            lambda p: (p / STANDALONE / "pytorch_model.bin").write_bytes(b""),
            r"pytorch_model\.bin.*" + said("packaging.only_safetensors"),
        ),
        (lambda p: config(p, layers=3), said("packaging.missing_tensor")),
        (lambda p: config(p, layers=10**9), "layers=1000000000"),
        (lambda p: config(p, layers=1024), "1024 " + said("packaging.fewer_tensors")),
        (lambda p: config(p, mlp=1 << 30), said("packaging.larger")),
        (lambda p: as_llama(p, hidden_size=1 << 15), said("packaging.larger")),
        (lambda p: as_llama(p, num_hidden_layers=1 << 40), said("packaging.fewer_tensors")),
        (lambda p: as_llama(p, hidden_size="wide"), said("packaging.no_causal_lm")),
        (
            lambda p: as_llama(p, attn_implementation="someone/kernel"),
            said("packaging.foreign_kernel"),
        ),
        (
            lambda p: as_llama(p, quantization_config={"quant_method": "fp8"}),
            said("packaging.quantised"),
        ),
        (
            lambda p: config(
                p,
                layers=None,
                width=None,
                heads=None,
                config={"model_type": "llama", "auto_map": {}},
            ),
            said("packaging.foreign_code"),
        ),
        (
            lambda p: config(p, **BY_CONFIG, path=str(p / STANDALONE)),
            said("packaging.no_directory"),
        ),
        (lambda p: config(p, own="head"), r"own is 'head'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damage_is_refused(damage: Any, message: str, target: Target, tmp_path: Path) -> None:
    package = packed(tmp_path / "package", made("new", target, tmp_path), target)
    damage(package)
    with pytest.raises(InputError, match=message):
        load_drafter(package, target)
