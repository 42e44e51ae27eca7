"""A run that was killed, or that the disk stopped, ends like one that nothing disturbed: bit for
bit, row for row."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain import fit
from drafttrain.data import journal
from drafttrain.data.datamodule import ConversationData
from drafttrain.decoding.plan import Plan
from drafttrain.packaging.writing import change_plan
from drafttrain.reporting.loggers import read_metrics
from drafttrain.training.checkpoint import read_checkpoint
from drafttrain.training.decode_callback import DecodeCallback
from drafttrain.training.run import Run
from drafttrain.tree.topology import Tree
from tests.fitting.parts import UNMEASURED, refusal, words
from tests.training.parts import same

ROOT = Path(__file__).resolve().parents[2]
KILLS = 20
UPDATES = 600
CHILD = """
import json, os, sys

from drafttrain import fit
from drafttrain.fitting import learning
from drafttrain.reporting.progress import ConsoleProgress


class Noting(ConsoleProgress):
    '''Writes down the rows of every micro-batch before it is learned from.

    A kill leaves complete lines.
    '''

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        # What fills up an epoch's last update replaces a row, and has nothing to learn.
        rows = batch.row_ids.tolist() if batch.loss_mask.any() else []
        line = json.dumps([pl_module.position, rows]) + chr(10)
        os.write(notes, line.encode())


notes = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
learning.ConsoleProgress = Noting
fit.main(sys.argv[2:])
"""


def start(notes: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, "-c", CHILD, str(notes), *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def noted(notes: Path) -> list[tuple[int, list[int]]]:
    """(number of the micro-batch, its rows) in the order in which they were read."""
    lines = notes.read_text().splitlines() if notes.exists() else []
    return [(int(position), rows) for position, rows in map(json.loads, lines)]


def equal(a: Any, b: Any) -> bool:
    """Bit for bit, whatever holds the tensors."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return (
            isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
        )
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@pytest.mark.field("F18", "F29")
@pytest.mark.slow
@pytest.mark.processes
def test_twenty_kills_at_random_change_nothing(folder: Path, tmp_path: Path) -> None:
    run, calm = tmp_path / "run", tmp_path / "calm"
    more = [
        f"trainer.max_steps={UPDATES}",
        "trainer.batch_tokens=512",
        "trainer.accumulate=2",
        "trainer.log_every=10",
    ]
    more += [
        "checkpoint.every=3",
        "checkpoint.keep=2",
        "eval.every=20",
        "eval.speed_prompts=0",
        "eval.max_new_tokens=6",
    ]
    more += ["final.prompts=0", "final.speed_prompts=0"]
    process = start(tmp_path / "calm.jsonl", words(folder, calm, *more))
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    undisturbed = noted(tmp_path / "calm.jsonl")
    rows_of = dict(undisturbed)

    chance = random.Random(0)
    parts: list[list[tuple[int, list[int]]]] = []
    resume: list[str] = []
    for number in range(KILLS):
        notes = tmp_path / f"part-{number}.jsonl"
        process = start(notes, [*words(folder, run, *more), *resume])
        enough, until = chance.randint(1, 30), time.monotonic() + 300
        while not notes.exists() or notes.read_bytes().count(b"\n") < enough:
            assert process.poll() is None and time.monotonic() < until, process.communicate()[0]
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.04))
        process.send_signal(signal.SIGKILL)
        said, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, f"kill {number} came too late: {said}"
        parts.append(noted(notes))
        resume = ["resume=last"]
    assert not (run / "package").exists()
    process = start(tmp_path / "last.jsonl", [*words(folder, run, *more), *resume])
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    parts.append(noted(tmp_path / "last.jsonl"))

    # Every micro-batch that was ever read is the undisturbed run's; those that the result was made
    # of are each there once.
    assert all(rows == rows_of[position] for part in parts for position, rows in part)
    ends = [part[0][0] for part in parts[1:]] + [len(undisturbed)]
    kept = [
        entry for part, end in zip(parts, ends, strict=True) for entry in part if entry[0] < end
    ]
    assert kept == undisturbed and [position for position, _ in kept] == list(range(len(kept)))
    train, seen = (
        sorted(ConversationData(folder).indices),
        [row for _, rows in kept for row in rows],
    )
    epochs = [sorted(seen[at : at + len(train)]) for at in range(0, len(seen), len(train))]
    assert len(epochs) > 10 and all(epoch == train for epoch in epochs[:-1])

    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == sorted(
        path.name for path in (calm / "checkpoints").iterdir()
    )
    for name in ("last.ckpt", "best.ckpt"):
        ours, theirs = (read_checkpoint(path / "checkpoints" / name) for path in (run, calm))
        for state in (ours, theirs):
            state["progress"].pop("seconds")
            state["decode"].pop("seconds")
            state["settings"].pop("run_dir")
            state["settings"].pop("resume")
        assert all(equal(ours[part], theirs[part]) for part in theirs), name
    assert (run / "package" / "drafter.safetensors").read_bytes() == (
        calm / "package" / "drafter.safetensors"
    ).read_bytes()
    ours, theirs = (
        {row["step"]: row for row in read_metrics(path / "metrics.csv")} for path in (run, calm)
    )
    assert list(ours) == list(theirs)
    for step in theirs:
        for key in ("train/lr", "val/tau", "val/rounds", "sim/loss"):
            assert ours[step].get(key) == theirs[step].get(key), (step, key)


def test_a_run_that_is_being_made_is_not_made_twice(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever takes a run for dead that is not must not write between its checkpoints."""
    monkeypatch.setattr(journal, "_lock", functools.partial(journal._lock, patience=0))
    run = tmp_path / "run"
    (run / "scratch" / "0").mkdir(parents=True)
    for name in ("config.yaml", "scratch/0/features.bin"):
        (run / name).touch()
    with journal.locked(run):
        said = refusal(capsys, words(folder, run, "resume=last"))
    assert (
        f"{run} is being written by another process: wait for it" in said
        and (run / "scratch/0/features.bin").exists()
    )
    with journal.locked(run):  # The refused one has let go of it.
        pass


def test_a_run_without_its_last_checkpoint_is_not_started_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").touch()
    (run / "metrics.csv").write_text("kept")
    (run / "checkpoints" / "update-00000004.ckpt").touch()
    said = refusal(capsys, words(folder, run, "resume=last"))
    assert (
        "has lost last.ckpt: go on from another one (update-00000004.ckpt) by resume=<its path>"
        in said
    )
    (run / "checkpoints" / "last.ckpt").symlink_to("last.ckpt")
    said = refusal(capsys, words(folder, run, "resume=last"))
    assert "last.ckpt is a link that leads nowhere: go on from another one (update-" in said
    assert (run / "metrics.csv").read_text() == "kept"


@pytest.mark.field("F18")
def test_a_disk_that_fills_up_leaves_a_checkpoint_to_go_on_from(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, calm = tmp_path / "run", tmp_path / "calm"
    save, room = torch.save, 2

    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def flush(self) -> None: ...

    def filling(state: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal room
        room -= 1
        if room < 0:
            file.write(b"half")
            file.file = Full()
        save(state, file, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(torch, "save", filling)
        fit.main(words(folder, run, *UNMEASURED, "checkpoint.keep=1"))
    assert stopped.value.code == 2 and "the disk is full while writing" in capsys.readouterr().err
    left = {
        path.name: read_checkpoint(path)["progress"]["updates"]
        for path in (run / "checkpoints").iterdir()
    }
    assert left == {"last.ckpt": 4, "update-00000004.ckpt": 4}
    fit.main([*words(folder, run, *UNMEASURED, "checkpoint.keep=1"), "resume=last"])
    assert "goes on after update 4," in capsys.readouterr().out
    fit.main(words(folder, calm, *UNMEASURED))
    ours, theirs = (read_checkpoint(path / "checkpoints" / "last.ckpt") for path in (run, calm))
    assert same(ours["weights"], theirs["weights"]) and ours["progress"]["updates"] == 12


SHORT = [
    "eval.every=2",
    "eval.prompts=2",
    "eval.max_new_tokens=6",
    "eval.sim_rows=0",
    "eval.speed_prompts=0",
    "checkpoint.every=1",
    "checkpoint.keep=2",
    "trainer.max_steps=4",
    "optim.schedule=constant",
    "final.prompts=0",
    "final.speed_prompts=0",
]


@pytest.fixture(scope="module")
def ended(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four updates that has ended, and was measured twice."""
    run = tmp_path_factory.mktemp("ended") / "run"
    fit.main(words(folder, run, *SHORT))
    return run


@pytest.fixture
def run(ended: Path, tmp_path: Path) -> Path:
    shutil.copytree(ended, tmp_path / "run")
    return tmp_path / "run"


def resumed(
    capsys: pytest.CaptureFixture[str], folder: Path, run: Path, what: str, *more: str
) -> str:
    capsys.readouterr()
    fit.main([*words(folder, run, *SHORT, *more), f"resume={what}"])
    return " ".join(capsys.readouterr().out.split())


# The kind: several causes, one sentence. Neighbours: what is named does not exist, is a folder, is
# a run's folder, is a name that resume does not know; the run's folder does not exist, is empty, is
# no run's, has no checkpoint yet, has lost its last or never had a best one.
@pytest.mark.field("F102")
def test_each_cause_of_a_failed_resume_has_its_own_words(
    folder: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare" / "checkpoints").mkdir(parents=True)
    (tmp_path / "bare" / "config.yaml").touch()
    found = {}
    for where, what, sentence in (
        (run, "lost.ckpt", "resume=lost.ckpt: there is no such file; give last, best, or the path"),
        (run, "newest", "resume=newest: there is no such file; give last, best"),
        (run, run, f"is a folder: give the checkpoint itself, or a run's folder as run_dir={run}"),
        (tmp_path / "nowhere", "last", "nowhere does not exist, so there is nothing to resume"),
        (tmp_path / "nowhere", "best", "nowhere does not exist, so there is nothing to resume"),
        (tmp_path / "empty", "last", "empty is empty, so there is nothing to resume"),
        (tmp_path / "bare", "best", "holds no best.ckpt, which a first measured evaluation writes"),
    ):
        said = refusal(capsys, words(folder, where, f"resume={what}"))
        assert sentence in said, said
        found[said] = what
    assert len(found) == 6 and not (tmp_path / "nowhere").exists()


@pytest.mark.field("F102")
def test_resume_best_goes_on_from_the_best(
    folder: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = read_checkpoint(run / "checkpoints" / "best.ckpt")["progress"]["updates"]
    before = read_checkpoint(run / "checkpoints" / "last.ckpt")["weights"]
    said = resumed(capsys, folder, run, "best")
    assert f"goes on after update {best}," in said
    assert same(read_checkpoint(run / "checkpoints" / "last.ckpt")["weights"], before)


@pytest.mark.field("F73")
def test_a_best_that_is_lost_is_said_and_its_figure_not_lent(
    folder: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "best.ckpt").unlink()
    for numbered in (run / "checkpoints").glob("update-*.ckpt"):
        numbered.unlink()
    said = resumed(capsys, folder, run, "last")
    assert "best.ckpt is lost, and the best was val/tau" in said
    assert "uses last.ckpt of update 4 fit:" in said  # And no figure with it.


def test_what_was_chosen_or_left_next_to_a_run_is_kept_or_removed(
    folder: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan that `tune` chose stays; what a killed packaging left goes."""
    own = (run / "package" / "decoding.yaml").read_text()
    for name in (".package-abcd_123", ".package-old-abcd_123"):
        shutil.copytree(run / "package", run / name)
    (run / ".package-mine").mkdir()
    said = resumed(capsys, folder, run, "last")
    assert "keeps the plan" not in said and (run / "package" / "decoding.yaml").read_text() == own
    assert [path.name for path in run.glob(".package*")] == [".package-mine"]

    change_plan(run / "package", Plan(Tree.chain(2)))
    chosen = (run / "package" / "decoding.yaml").read_text()
    for _ in range(2):
        assert "keeps the plan in" in resumed(capsys, folder, run, "last")
        assert (run / "package" / "decoding.yaml").read_text() == chosen != own

    (run / "package").rename(run / ".package-old-abcd_123")
    Run(run).clear_scratch()
    assert (run / "package" / "decoding.yaml").read_text() == chosen


def test_a_run_that_is_beyond_its_end_says_so(
    folder: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = resumed(capsys, folder, run, "last")
    assert "training is already done: the run is at update 4, its last" in said
    said = resumed(capsys, folder, run, "last", "trainer.max_steps=2")
    assert "the run is at update 4 already, beyond the 2 that trainer.max_steps" in said
    assert "already done" not in said
    said = resumed(capsys, folder, run, "last", "trainer.max_steps=9", "trainer.max_minutes=1e-9")
    assert "the run is at update 4, and trainer.max_minutes are used up: nothing is" in said


class Killed(Exception):
    """What a program that was not given the time to stop does not see."""


@pytest.mark.parametrize("every", [2, 3])  # Due at that update, and only at the end.
def test_the_evaluation_after_the_last_update_is_made_by_the_resumed_run(
    folder: Path,
    ended: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    every: int,
) -> None:
    """A TERM signal within it writes a checkpoint at once."""
    inner, calm, run = DecodeCallback.measure, ended, tmp_path / "run"

    def killed(self: DecodeCallback, module: Any, **more: Any) -> Any:
        if module.updates == 4:
            signal.raise_signal(signal.SIGTERM)
            raise Killed
        return inner(self, module, **more)

    more = [*SHORT, f"eval.every={every}", "checkpoint.every=50", "checkpoint.keep=0"]
    if every != 2:  # That of `ended`.
        calm = tmp_path / "calm"
        fit.main(words(folder, calm, *more))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(DecodeCallback, "measure", killed)
        fit.main(words(folder, run, *more))
    state = read_checkpoint(run / "checkpoints" / "last.ckpt")
    assert state["progress"]["updates"] == 4 != state["decode"]["measured_at"]
    fit.main([*words(folder, run, *more), "resume=last"])
    assert "its last evaluation was cut off, and is made now" in capsys.readouterr().out
    for name in ("last", "best"):
        ours, theirs = (
            read_checkpoint(one / "checkpoints" / f"{name}.ckpt") for one in (run, calm)
        )
        assert ours["keeper"] == theirs["keeper"] and same(ours["weights"], theirs["weights"])
        assert ours["decode"]["evaluations"] == theirs["decode"]["evaluations"]
