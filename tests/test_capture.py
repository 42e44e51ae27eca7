"""The door as a person uses it: a store that fit trains from, whoever shares the work and whatever
interrupts it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drafttrain import capture, fit
from drafttrain.data.conversations import read_set
from drafttrain.data.datamodule import ConversationData
from drafttrain.flow import Batch, Features, Needs
from drafttrain.target import features, load
from drafttrain.target.filling import StoreFolder
from drafttrain.target.model import Target
from drafttrain.target.store import Store
from drafttrain.training.checkpoint import read_checkpoint
from tests.forked import Forked, pair
from tests.target.stores import random_set
from tests.training.parts import same

UNMEASURED = [
    "eval.every=null",
    "eval.prompts=0",
    "eval.sim_rows=0",
    "final.prompts=0",
    "final.speed_prompts=0",
]


@pytest.fixture(scope="module")
def target() -> Target:
    return load.tiny()


@pytest.fixture(scope="module")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_set(target, tmp_path_factory.mktemp("set"), rows=40, held_out=4, longest=40)


def words(folder: Path, out: Path, *more: str) -> list[str]:
    """As `experiment=smoke` of fit reads them."""
    given = [
        "target=tiny",
        "data=set",
        f"data.path={folder}",
        f"out={out}",
        "batch_tokens=1024",
        "encoding=float32",
    ]
    return [*given, *more]


def fit_words(folder: Path, run: Path, *more: str) -> list[str]:
    return [
        "experiment=smoke",
        f"data.path={folder}",
        f"run_dir={run}",
        *UNMEASURED,
        "trainer.max_steps=3",
        *more,
    ]


def refusal(capsys: pytest.CaptureFixture[str], door: Any, words: Sequence[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        door.main(words)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != "manifest.json"}


# --- trained from ---------------------------------------------------------------------------------


def test_fits_from_stores_give_the_weights_of_one_without(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From a store of last hidden states, and from one of the last layer, which they are recomputed
    from."""
    fit.main(fit_words(folder, tmp_path / "online", "features.keep_dtype=float32"))
    right = read_checkpoint(tmp_path / "online" / "checkpoints" / "last.ckpt")
    train = set(ConversationData(folder).indices)
    computed = features.computed

    def count(target: Target, batch: Batch, needs: Needs) -> Any:
        assert not train & set(batch.row_ids.tolist()), "the target read a training row"
        return computed(target, batch, needs)

    monkeypatch.setattr(features, "computed", count)
    for layers, names in (("[]", ["last_hidden"]), ("[2]", [2])):
        out, run = tmp_path / f"store-{len(layers)}", tmp_path / f"run-{len(layers)}"
        capture.main(words(folder, out, f"layers={layers}"))
        said = capsys.readouterr()
        assert "still to be taken" in said.err and "bytes a token" in said.out
        assert {path.name for path in out.iterdir()} == {"manifest.json", "shard-00000.safetensors"}
        store = Store(out)
        assert store.contents.names == names  # One tensor, also where both are asked for.
        fit.main(fit_words(folder, run, "features=store", f"features.path={out}"))
        assert f"read from {out}" in capsys.readouterr().out
        found = read_checkpoint(run / "checkpoints" / "last.ckpt")
        assert same(right["weights"], found["weights"])
        assert right["progress"]["supervised"] == found["progress"]["supervised"]
        assert found["facts"]["features"] == {"store": store.digest}
    said_of_resume = refusal(capsys, fit, fit_words(folder, tmp_path / "run-2", "resume=last"))
    assert f"features.store was {Store(tmp_path / 'store-2').digest}, is None" in said_of_resume


def test_a_store_that_fit_cannot_train_from_is_refused_before_the_target_is_loaded(
    target: Target,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, out = tmp_path / "run", tmp_path / "store"
    capture.main(words(folder, out, "last_hidden=false", "layers=[0]"))
    stored = ["features=store", f"features.path={out}"]
    said = refusal(capsys, fit, fit_words(folder, run, *stored))
    assert (
        "lacks the last hidden state" in said
        and "last_hidden=true layers=[0] encoding=float32" in said
    )
    with monkeypatch.context() as patch:
        patch.setattr(
            "drafttrain.target.load.tiny", lambda **_: pytest.fail("the target was loaded")
        )
        for more, expected in (
            (["features=store", f"features.path={tmp_path}"], "not a finished store"),
            ([*stored, "joint=lora"], "a target that is trained too (joint) changes"),
            (
                [*stored, f"data.path={random_set(target, tmp_path / 'other', seed=7)}"],
                "of another conversation set",
            ),
        ):
            assert expected in refusal(capsys, fit, fit_words(folder, run, *more))
        shard = out / "shard-00000.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1])
        assert "is damaged" in refusal(capsys, fit, fit_words(folder, run, *stored))
    assert not run.exists()


# --- interrupted and shared -----------------------------------------------------------------------


@pytest.mark.field("F22")
@pytest.mark.processes
def test_a_kill_loses_doubles_and_recomputes_nothing(
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = random_set(target, tmp_path / "set", rows=200, held_out=0, longest=40)
    out, calm = tmp_path / "store", tmp_path / "calm"
    more = ["batch_tokens=null", "batch_rows=1", "shard_mb=0.2"]
    journal = out / "journal-0000.jsonl"
    process, until = (
        Forked(capture.main, words(folder, out, *more), said=tmp_path / "said"),
        time.monotonic() + 120,
    )
    # Past the first shard, in the middle of another.
    while not journal.exists() or journal.read_bytes().count(b"\n") < 60:
        assert process.runs and time.monotonic() < until, process.said
        time.sleep(0.002)
    process.kill()
    assert not (out / "manifest.json").exists()
    kept = journal.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    lines = [json.loads(line) for line in kept.splitlines()]
    before = {line["batch"] for line in lines if "batch" in line}
    assert 50 < len(before) < 200 and {"shard-00000.safetensors"} < {
        path.name for path in out.glob("shard-*")
    }
    with pytest.raises(SystemExit):
        fit.main(fit_words(folder, tmp_path / "run", "features=store", f"features.path={out}"))
    assert "goes on with the same command" in capsys.readouterr().err

    read: list[int] = []
    computed = capture.computed

    def count(target: Target, batch: Batch, needs: Needs) -> Any:
        read.extend(batch.row_ids.tolist())
        return computed(target, batch, needs)

    with monkeypatch.context() as patch:
        patch.setattr(capture, "computed", count)
        patch.setattr(StoreFolder, "clear", lambda self: None)
        capture.main(words(folder, out, *more))
    assert journal.read_bytes().startswith(kept)
    batches = [
        line["batch"]
        for line in map(json.loads, journal.read_text().splitlines())
        if "batch" in line
    ]
    assert sorted(batches) == list(range(200)) and len(read) == 200 - len(before) == len(set(read))
    capture.main(words(folder, calm, *more))
    capture.main(words(folder, out, *more))  # Clears what was kept for this test.
    assert contents(out) == contents(calm) and Store(out).digest == Store(calm).digest


@pytest.mark.processes
def test_two_processes_make_the_shards_of_one(folder: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    more = ["batch_tokens=100", "shard_mb=0.02", "layers=[0]", "encoding=int8"]
    said = pair(capture.main, words(folder, two, *more), said=tmp_path / "said")
    capture.main(words(folder, one, *more))
    assert contents(one) == contents(two) and len(contents(one)) > 2
    assert Store(one).digest == Store(two).digest
    assert "bytes a token" in said[0] and "bytes a token" not in said[1]


def test_a_finished_store_is_looked_after(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "store"
    more = ["batch_tokens=100", "shard_mb=0.03"]
    capture.main(words(folder, out, *more))
    before, digest = contents(out), Store(out).digest
    shard, lost = out / "shard-00001.safetensors", out / "shard-00002.safetensors"
    harmed = bytearray(shard.read_bytes())
    harmed[-1] ^= 1
    shard.write_bytes(harmed)
    lost.unlink()
    read: list[int] = []
    computed = capture.computed
    monkeypatch.setattr(
        capture,
        "computed",
        lambda *given: read.extend(given[1].row_ids.tolist()) or computed(*given),
    )
    capture.main(words(folder, out, *more))
    assert "shard-00001.safetensors was damaged and is made again" in capsys.readouterr().err
    assert sorted(read) == sorted(
        row for number in (1, 2) for row in Store(out).shards[number].rows
    )
    assert contents(out) == before and Store(out).digest == digest
    read.clear()
    capture.main(words(folder, out, *more))
    assert not read and contents(out) == before
    for changed, said in (
        ("encoding=bf16", "contents.encoding was float32, is bf16"),
        ("layers=[1]", "contents.layers was [], is [1]"),
        ("seed=1", "batches.seed was 0, is 1"),
        ("data.limit_rows=3", "set.rows was 36, is 3"),
        ("target.dtype=bfloat16", "dtype float32, it is loaded in bfloat16 here"),
        ("resume=false", "resume=false"),
    ):
        assert said in refusal(capsys, capture, words(folder, out, *more, changed))
    assert contents(out) == before


# --- what is wrong is refused ---------------------------------------------------------------------


@pytest.mark.field("F28")
def test_a_disk_without_room_is_refused_before_anything_is_written(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free._replace(free=(1 << 28) + 1000))
    said = refusal(capsys, capture, words(folder, tmp_path / "store"))
    tokens = ConversationData(folder).tokens
    assert f"{tokens} tokens x 1 x (64 values x 4 bytes) = " in said
    assert "no room for" in said and "features=online" in said and "encoding=bf16" in said
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["out="], "needs out=<folder of the store>"),
        (["encoding=int4"], "encoding=int4: give one of float32, bf16, int8, fp8"),
        (["layers=3"], "needs a list of decoder layers"),
        (["layers=[-1]"], "needs a list of decoder layers"),
        (["layers=[1,1]"], "a layer is named twice"),
        (["layers=[3]"], "layer 3 asked for; target tiny-llama has layers 0..2"),
        (["last_hidden=false"], "nothing would be kept"),
        (["last_hidden=7"], "last_hidden=7: needs true or false"),
        (["batch_tokens=8"], "less than the longest row"),
        (["target.seed=1"], "belongs to another target"),
        (["data.path=/nowhere"], "is not a conversation set"),
        (["enconding=bf16"], "Did you mean encoding"),
    ],
)
def test_wrong_settings(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    out = tmp_path / "store"
    assert said in refusal(capsys, capture, words(folder, out, *more))
    assert not out.exists()


def test_a_folder_with_other_files_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "other files (notes.txt)" in refusal(capsys, capture, words(folder, tmp_path))
    # A conversation set is not taken for a store that was started.
    assert "holds other files (conversations.safetensors)" in refusal(
        capsys, capture, words(folder, folder)
    )
    assert len(read_set(folder)) == 40


@pytest.mark.field("F32")
def test_features_that_are_not_finite_stop_it_naming_their_rows(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner = Target.features

    def poisoned(self: Target, *given: Any) -> Any:
        hidden = inner(self, *given).last_hidden.clone()
        hidden[1, 2, 3] = float("nan")
        return Features(hidden)

    monkeypatch.setattr(Target, "features", poisoned)
    said = refusal(capsys, capture, words(folder, tmp_path / "store"))
    assert (
        "NaN or infinite values in row" in said
        and not (tmp_path / "store" / "manifest.json").exists()
    )


@pytest.mark.field("F93")
def test_a_store_is_continued_from_another_folder_of_the_same_target(
    target: Target, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the folder is called, and in whichever schema its config is written."""
    out, same = tmp_path / "store", ["target=hf", "target.dtype=float32", "target.device=cpu"]
    for name in ("one", "two"):
        target.model.save_pretrained(tmp_path / name)
        file = tmp_path / name / "config.json"
        config = json.loads(file.read_text())
        if name == "two":
            config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
            file.write_text(json.dumps(config | {"rope_scaling": None, "bos_token_id": 5}))
        path = f"target.path={tmp_path / name}"
        capture.main([*words(folder, out)[1:], *same, path])
    assert "is finished: its shards are looked at" in capsys.readouterr().err
    with_dtype = [*words(folder, out)[1:], *same[:1], "target.dtype=bfloat16", path]
    assert "set target.dtype=float32" in refusal(capsys, capture, with_dtype)
