"""What is written has the modes that the system gives, and the room for it is asked for."""

from __future__ import annotations

import importlib.metadata
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from drafttrain.data.datamodule import ConversationData
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.files import even_modes, new_folder, write_atomic
from drafttrain.layouts.writing import Exported, put
from drafttrain.packaging.writing import change_plan
from drafttrain.reporting.figures import head_accuracies
from drafttrain.target import embedded
from drafttrain.target.model import Target
from drafttrain.training.checkpoint import write_checkpoint
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters
from tests.packaging.made import packed
from tests.target.stores import make_store, random_set

# --- F91: modes -----------------------------------------------------------------------------------
# The kind: whatever makes its files by `tempfile` (600 and 700), whatever sets 644 and 755 over the
# umask, and libraries with modes of their own (safetensors writes 600). Tried under each umask:
# the converted target with a folder inside, sets, stores, packages with their inner folder, a
# package whose plan is changed later, exports, checkpoints, pictures; a cache whose files take the
# group of the folder (setgid).


@pytest.fixture(params=[0o077, 0o002, 0o022], ids=["077", "002", "022"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    """Of a folder and all in it."""
    return {
        str(path.relative_to(folder.parent)): oct(stat.S_IMODE(path.stat().st_mode))
        for path in (folder, *folder.rglob("*"))
    }


def usual(folder: Path, umask: int) -> dict[str, str]:
    """What the umask leaves of 0666 and 0777."""
    return {
        str(path.relative_to(folder.parent)): oct((0o777 if path.is_dir() else 0o666) & ~umask)
        for path in (folder, *folder.rglob("*"))
    }


def wheel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded target's wheel, and a conversion that takes no time."""

    def convert(_: Path, goal: Path) -> None:
        save_file({"a": torch.zeros(2)}, goal / "model.safetensors")
        (goal / "inside").mkdir(mode=0o700)
        (goal / "inside" / "config.json").write_text("{}")

    held = SimpleNamespace(files=[Path("x.gguf")], version="1", locate_file=lambda name: name)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: held)
    monkeypatch.setattr(embedded, "_convert", convert)
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(folder))


@pytest.mark.field("F91")
def test_all_files_of_an_output_have_the_modes_that_the_umask_leaves(
    umask: int, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    wheel(out / "cache", monkeypatch)
    assert (embedded.converted() / "inside" / "config.json").is_file()
    random_set(target, out / "set")
    make_store(target, ConversationData(out / "set"), out / "store")
    packed(out / "package", drafters.make(Eagle1, target), target)
    change_plan(out / "package", Plan(Tree.chain(2)))
    write_checkpoint(out / "checkpoints" / "last.ckpt", {"weights": torch.zeros(3)})
    exported = Exported({"model_type": "x"}, {"a": torch.zeros(2)}, "", tokenizer=True)
    put(out / "export", exported, {"README.md": ""}, target.tokenizer, lambda head: [])
    head_accuracies({"sim/head_1_top1": 0.5}, out / "heads.png")
    assert len(modes(out)) > 20 and modes(out) == usual(out, umask)


def test_what_is_put_into_a_package_later_is_as_open_as_the_package(
    umask: int, target: Target, tmp_path: Path
) -> None:
    packed(tmp_path / "package", drafters.make(Eagle1, target), target)
    before = modes(tmp_path / "package")
    os.umask(0o077)
    change_plan(tmp_path / "package", Plan(Tree.chain(2)))
    assert modes(tmp_path / "package") == before


def test_a_shared_folder_keeps_its_group(umask: int, tmp_path: Path) -> None:
    tmp_path.chmod(0o2777)
    folder = new_folder(tmp_path, "goal")
    (folder / "inside").mkdir(mode=0o2700)
    even_modes(folder)
    wanted = 0o777 & ~umask
    assert stat.S_IMODE((folder / "inside").stat().st_mode) & 0o777 == wanted
    assert (folder / "inside").stat().st_mode & stat.S_ISGID == folder.stat().st_mode & stat.S_ISGID


def test_a_long_name_leaves_room_for_that_of_the_scratch_file(tmp_path: Path) -> None:
    path = tmp_path / ("ü" * 125)
    write_atomic(path, lambda scratch: scratch.write_text("all"))
    assert path.read_text() == "all" and list(tmp_path.iterdir()) == [path]
