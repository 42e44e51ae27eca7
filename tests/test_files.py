"""What is written has the modes that the system gives, and the room for it is asked for."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from drafttrain.data.datamodule import ConversationData
from drafttrain.data.journal import Lines
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.errors import InputError, disk_full, refuse_full_disk, writing
from drafttrain.files import even_modes, new_folder, write_atomic
from drafttrain.layouts.writing import Exported, put
from drafttrain.packaging.writing import change_plan
from drafttrain.reporting.figures import head_accuracies
from drafttrain.target import embedded
from drafttrain.target.filling import StoreFolder
from drafttrain.target.model import Target
from drafttrain.training.checkpoint import write_checkpoint
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters
from tests.helpers import file_limit
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
    write_checkpoint(out / "checkpoints" / "last.ckpt", {"weights": {"w": torch.zeros(3)}})
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


# --- F90: room ------------------------------------------------------------------------------------
# The kind: whatever writes without saying what it writes, so that the system's refusal comes
# without a path (an open file names none), in the words of a library (safetensors), or as free
# space that seems to be enough since a reserve is not mentioned. Tried with a real limit of file
# sizes: shards, journals, sets, packages, exports, pictures, checkpoints; and with a disk that says
# it is full.


def shard(target: Target, folder: Path) -> None:
    random_set(target, folder / "rows")
    with file_limit(4000):
        make_store(target, ConversationData(folder / "rows"), folder / "x", shard_mb=1)


def record(target: Target, folder: Path) -> None:
    lines = Lines(folder / "x")
    with file_limit(10):
        lines.write({"row": 1, "ids": [1, 2, 3]})


def rows(target: Target, folder: Path) -> None:
    with file_limit(100):
        random_set(target, folder / "x")


def package(target: Target, folder: Path) -> None:
    drafter = drafters.make(Eagle1, target)
    with file_limit(4000):
        packed(folder / "x", drafter, target)


def directory(target: Target, folder: Path) -> None:
    exported = Exported({"model_type": "x"}, {"a": torch.zeros(9999)}, "")
    with file_limit(4000):
        put(folder / "x", exported, {}, None, lambda head: [])


def picture(target: Target, folder: Path) -> None:
    with file_limit(4000):
        head_accuracies({"sim/head_1_top1": 0.5}, folder / "x.png")


def checkpoint(target: Target, folder: Path) -> None:
    with file_limit(4000):
        write_checkpoint(folder / "x", {"weights": {"w": torch.zeros(9999)}})


@pytest.mark.field("F90")
@pytest.mark.parametrize(
    ("write", "file", "needs"),
    [
        (shard, r"x/shard-00000\.safetensors\.part", r"it needs [\d.]+ kB, "),
        (record, r"x/journal-0000\.jsonl", ""),
        (rows, r"x/conversations\.safetensors", ""),
        (package, r"x/\S+", r"(it needs [\d.]+ kB, )?"),
        (directory, r"x/model\.safetensors", ""),
        (picture, r"x\.png", ""),
        (checkpoint, "x", ""),
    ],
)
def test_what_a_limited_disk_refuses_is_named(
    write: Callable[[Target, Path], None], file: str, needs: str, target: Target, tmp_path: Path
) -> None:
    with pytest.raises(OSError) as caught:
        write(target, tmp_path)
    with file_limit(4000):
        said = disk_full(caught.value)
    assert re.match(
        rf"a file grew larger than this system allows while writing {tmp_path}/{file} "
        rf"\({needs}4 kB are allowed\): raise the limit",
        said,
    ), said


@pytest.fixture
def nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """120 MB are free."""
    usage = shutil.disk_usage(tmp_path)._replace(free=120_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


def test_a_full_disk_says_what_is_needed_and_free(nearly_full: None, tmp_path: Path) -> None:
    for error in (OSError(28, "x"), RuntimeError("I/O error: No space left on device")):
        with pytest.raises(OSError) as caught, writing(tmp_path / "x", 8_980_000):
            raise error
        assert disk_full(caught.value) == (
            f"the disk is full while writing {tmp_path / 'x'} (it needs 8.98 MB, 120 MB are free "
            "on that disk): free some space, or write elsewhere (run_dir=, cache folders)"
        )
    with pytest.raises(InputError, match=r"^No space left"), writing(tmp_path / "x"):
        raise InputError("No space left on device, says somebody")


def test_a_reserve_is_named(nearly_full: None, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        StoreFolder(tmp_path).check_room(8_800_000)
    assert str(caught.value).startswith(
        f"out={tmp_path}: the disk of {tmp_path} has no room for 8.98 MB more (120 MB are free, "
        "268 MB of a disk are kept in reserve). Free some space"
    )
    refuse_full_disk(tmp_path, 8_800_000, what="x", remedy="y")


def test_a_package_is_refused_before_it_is_written(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(InputError, match=r"has no room for \S+ kB more \(1 kB are free\)\. Free"):
        packed(tmp_path / "package", drafters.make(Eagle1, target), target)
    assert list(tmp_path.iterdir()) == []
