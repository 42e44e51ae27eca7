"""Heads in a target's own files: a tuned one is written into a copy in which every other byte is
the same; a new one is added; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.drafter.mtp import Mtp
from drafttrain.errors import InputError
from drafttrain.export import export_package
from drafttrain.layouts import patching
from drafttrain.target import load, native
from drafttrain.target.model import Target
from tests.drafter import make as drafters
from tests.drafter import native as targets
from tests.layouts.made import names, read_back, same, stirred
from tests.packaging.made import packed

FAMILIES = sorted(targets.FAMILIES)


def exported(folder: Path, target: Target, drafter: Mtp, **options: Any) -> Path:
    packed(folder / "package", drafter, target, dtype="float32")
    export_package(folder / "package", target, "target", folder / "out", **options)
    return folder / "out"


def held(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tuned_head_goes_back(family: str, tmp_path: Path) -> None:
    folder = targets.shipped(tmp_path / "t", family, shard="20KB")
    (folder / "README.md").write_text("a model")
    target = targets.loaded(folder)
    drafter = stirred(drafters.make(Mtp, target, native="shipped"))
    out = exported(tmp_path, target, drafter)
    files = {path.name for path in folder.iterdir()}
    assert len(files) > 4 and files <= {path.name for path in out.iterdir()}
    for name in files - {"mtp.safetensors"}:
        if name == "config.json" and json.loads((folder / name).read_text()) != json.loads(
            (out / name).read_text()
        ):
            continue  # it now says that there is a head
        assert (out / name).read_bytes() == (folder / name).read_bytes(), name
    old, new = held(folder), held(out)
    assert old.keys() == new.keys()
    state = drafter.native.state_dict()
    places = native.places(native.family_of(target), target, state, set(old))
    assert all(torch.equal(new[place.name], place.part) for place in places)
    untouched = old.keys() - {place.name for place in places}
    assert all(torch.equal(old[name], new[name]) for name in untouched)
    again = targets.loaded(out)
    assert same(drafters.make(Mtp, again, native="shipped"), drafter.eval())
    assert not [name for name, fatal in names(out).items() if fatal]


@pytest.mark.parametrize("shard", ["20KB", "10GB"])
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5", "mimo"])
def test_a_new_head_is_added(family: str, shard: str, tmp_path: Path) -> None:
    folder = targets.saved(tmp_path / "t", family, shard=shard)
    target = targets.loaded(folder)
    drafter = stirred(drafters.make(Mtp, target, native="new"))
    out = exported(tmp_path, target, drafter)
    old, new = held(folder), held(out)
    assert all(torch.equal(old[name], new[name]) for name in old)
    made = new.keys() - old.keys()
    family_ = native.family_of(target)
    assert native.copies(family_, target).keys() <= made
    index = out / "model.safetensors.index.json"
    if index.exists():
        said = json.loads(index.read_text())
        assert {name for name, file in said["weight_map"].items() if file == patching.ADDED} == made
        assert said["weight_map"].keys() == new.keys()
    else:
        assert (out / patching.ADDED).exists() is False
    config = json.loads((out / "config.json").read_text())
    assert any(config.get(key, 0) >= 1 for key in family_.counts)
    assert not [name for name, fatal in names(out).items() if fatal]
    again = targets.loaded(out)
    assert native.ships(again) and again.fingerprint["weights"] == target.fingerprint["weights"]
    assert same(drafters.make(Mtp, again, native="shipped"), drafter.eval())


def test_a_shipped_head_is_adopted(tmp_path: Path) -> None:
    """As it is, and that of the model that a target was tuned from."""
    folder = targets.shipped(tmp_path / "t", "glm4_moe")
    target = targets.loaded(folder)
    assert same(read_back(folder, target), drafters.make(Mtp, target, native="shipped").eval())
    lost = targets.loaded(targets.saved(tmp_path / "lost", "glm4_moe"))
    assert same(read_back(folder, lost), read_back(folder, target))
    with pytest.raises(InputError, match="lost holds no MTP head"):
        read_back(tmp_path / "lost", lost)


def test_the_dtype_of_the_files_is_kept(tmp_path: Path) -> None:
    folder = targets.shipped(tmp_path / "t", "qwen3_5")
    half = {name: value.bfloat16() for name, value in held(folder).items()}
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    target = targets.loaded(folder)
    drafter = stirred(drafters.make(Mtp, target, native="shipped"))
    new = held(exported(tmp_path, target, drafter))
    assert {value.dtype for value in new.values()} == {torch.bfloat16}
    assert torch.equal(new["mtp.fc.weight"], drafter.native.join.weight.bfloat16())


def test_what_is_refused(tmp_path: Path) -> None:
    folder = targets.shipped(tmp_path / "t", "mimo")
    target = targets.loaded(folder)
    own = drafters.make(Mtp, target, native="shipped", own_head=True)
    with pytest.raises(InputError, match=r"^to=target: .* head of its own"):
        exported(tmp_path / "own", target, own)
    tuned = drafters.make(Mtp, target, native="shipped")
    packed(tmp_path / "package", tuned, target, dtype="float32")
    with pytest.raises(InputError, match=r"^to=vllm: .* give to=target"):
        export_package(tmp_path / "package", target, "vllm", tmp_path / "out")
    plain = load.tiny()
    with pytest.raises(InputError, match=r"^to=target: .* give to=vllm"):
        exported(tmp_path / "plain", plain, drafters.make(Mtp, plain))


def test_values_that_are_lost_in_the_files_dtype(tmp_path: Path) -> None:
    source, out = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    out.mkdir()
    (source / "config.json").write_text("{}")
    (source / ".hidden").write_text("")
    (source / "more").mkdir()
    (source / "more" / "file").write_text("x")
    save_file({"w": torch.zeros(2, dtype=torch.float16)}, source / "model.safetensors")
    with pytest.raises(InputError, match="w is no finite number as float16"):
        patching.copy(source, out, {"w": torch.full((2,), 1e9)})
    (tmp_path / "b2").mkdir()
    with pytest.raises(InputError, match=r"w of model\.safetensors is F16 \[2\], .* \[3\]"):
        patching.copy(source, tmp_path / "b2", {"w": torch.zeros(3)})
    assert (out / "more" / "file").read_text() == "x" and not (out / ".hidden").exists()
