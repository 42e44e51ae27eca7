"""`fit` in several processes, as people start it: accelerate, torchrun, by hand. Takes minutes:
pytest -m slow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain import fit
from drafttrain.reporting.loggers import read_metrics
from drafttrain.training.checkpoint import read_checkpoint
from tests.fitting.parts import UNMEASURED, weights, words

pytestmark = [pytest.mark.slow, pytest.mark.processes]
ROOT = Path(__file__).resolve().parents[2]
MEASURED = [
    "features.keep_dtype=float32",
    "drafter.noise=0",
    "trainer.batch_tokens=1024",
    "trainer.accelerator=cpu",
]
EPOCH = [*MEASURED, *UNMEASURED]
"""An epoch is an update, so that one process and two have the same rows in each."""


def accelerate(*arguments: str) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
    ]
    return [*command, "--main_process_port", "0", "-m", "drafttrain.fit", *arguments]


def torchrun(*arguments: str) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    return [*command, "-m", "drafttrain.fit", *arguments]


def started(command: Sequence[str], more: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(more or {})}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def by_hand(script: str, arguments: Sequence[str]) -> list[subprocess.Popen[str]]:
    """Both processes without a launcher, which would end one when the other ends."""
    port = str(20000 + time.time_ns() // 1000 % 30000)
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    command = [sys.executable, "-c", script, *arguments]
    return [
        started(command, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]


def said(process: subprocess.Popen[str], code: int | None = 0, timeout: float = 300) -> str:
    text, _ = process.communicate(timeout=timeout)
    assert code is None or process.returncode == code, text[-4000:]
    return " ".join(text.split())


def close(found: Path, expected: Path, tolerance: float) -> None:
    """Relative to each tensor's norm."""
    mine, theirs = weights(found), weights(expected)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        gap = float((mine[name].double() - value.double()).norm() / (value.double().norm() + 1e-30))
        assert gap <= tolerance, (name, gap)


@pytest.fixture(scope="module")
def one(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 updates by one process."""
    run = tmp_path_factory.mktemp("one") / "run"
    fit.main(words(folder, run, *EPOCH, "trainer.accumulate=4", "trainer.max_steps=200"))
    return run


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("launcher", [accelerate, torchrun])
def test_200_steps_of_two_processes_are_those_of_one(
    folder: Path, one: Path, tmp_path: Path, launcher: Any, strategy: str
) -> None:
    run = tmp_path / "run"
    more = [*EPOCH, "trainer.accumulate=2", "trainer.max_steps=200", f"trainer.strategy={strategy}"]
    said(started(launcher(*words(folder, run, *more))))
    close(run, one, 1e-5)
    states = [read_checkpoint(path / "checkpoints" / "last.ckpt") for path in (run, one)]
    assert [state["progress"]["updates"] for state in states] == [200, 200]
    assert states[0]["progress"]["supervised"] == states[1]["progress"]["supervised"]
    rows = [read_metrics(path / "metrics.csv") for path in (run, one)]
    assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]]
    for ours, theirs in zip(*rows, strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-4)
    assert {path.name for path in run.iterdir()} == {path.name for path in one.iterdir()}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_mixed_precision_and_accumulation(folder: Path, tmp_path: Path, strategy: str) -> None:
    common = [*EPOCH, "trainer.precision=bf16-mixed", "trainer.max_steps=20"]
    two, single = tmp_path / "two", tmp_path / "alone"
    said(
        started(
            torchrun(
                *words(folder, two, *common, "trainer.accumulate=2", f"trainer.strategy={strategy}")
            )
        )
    )
    fit.main(words(folder, single, *common, "trainer.accumulate=4"))
    close(two, single, 0.02)
    ours, theirs = (read_metrics(path / "metrics.csv")[-1]["train/loss"] for path in (two, single))
    assert ours == pytest.approx(theirs, rel=0.01)
    assert all(w.dtype == torch.float32 for w in weights(two).values() if w.is_floating_point())


def test_evaluation_while_the_drafter_is_shared_out(folder: Path, tmp_path: Path) -> None:
    """Processes decode different shares and read different numbers of held-out rows, and measure
    what one process measures."""
    more = [
        *MEASURED,
        "trainer.max_steps=4",
        "eval.every=2",
        "eval.prompts=3",
        "eval.sim_rows=3",
        "eval.speed_prompts=1",
    ]
    more += ["final.prompts=2", "final.speed_prompts=0"]
    two, single = tmp_path / "two", tmp_path / "alone"
    said(
        started(
            torchrun(*words(folder, two, *more, "trainer.accumulate=2", "trainer.strategy=fsdp"))
        )
    )
    fit.main(words(folder, single, *more, "trainer.accumulate=4"))
    rows = [read_metrics(path / "metrics.csv") for path in (two, single)]
    measured = [[row for row in one if "val/tau" in row] for one in rows]
    assert len(measured[0]) == len(measured[1]) == 2
    for ours, theirs in zip(*measured, strict=True):
        assert ours["val/rounds"] == theirs["val/rounds"] and ours["val/tau"] == theirs["val/tau"]
        assert ours["sim/loss"] == pytest.approx(theirs["sim/loss"], rel=1e-4)
    assert (two / "package" / "drafter.safetensors").exists()


def test_a_run_goes_on_by_another_strategy(folder: Path, tmp_path: Path) -> None:
    run, calm = tmp_path / "run", tmp_path / "calm"
    more = [
        *EPOCH,
        "trainer.accumulate=2",
        "checkpoint.every=5",
        "trainer.max_steps=20",
        "optim.horizon=20",
    ]
    said(started(torchrun(*words(folder, calm, *more))))
    command = [*words(folder, run, *more, "trainer.strategy=fsdp"), "trainer.max_minutes=0.0001"]
    said(started(torchrun(*command)))
    assert read_checkpoint(run / "checkpoints" / "last.ckpt")["progress"]["updates"] < 20
    printed = said(started(torchrun(*words(folder, run, *more, "resume=last"))))
    assert "trainer.strategy was fsdp, is ddp" in printed
    close(run, calm, 1e-5)


@pytest.mark.parametrize("first", [1, 2])
def test_a_run_goes_on_in_another_number_of_processes(
    folder: Path, tmp_path: Path, first: int
) -> None:
    """Noise is drawn too: it belongs to the micro-batch, whoever reads it."""
    run, calm = tmp_path / "run", tmp_path / "calm"
    more = [
        *UNMEASURED,
        "features.keep_dtype=float32",
        "trainer.batch_tokens=1024",
        "trainer.accelerator=cpu",
        "optim.horizon=12",
    ]

    def part(processes: int, steps: int, *also: str) -> None:
        printed = words(
            folder,
            run,
            *more,
            f"trainer.accumulate={2 // processes}",
            f"trainer.max_steps={steps}",
            *also,
        )
        if processes == 1:
            fit.main(printed)
        else:
            said(started(torchrun(*printed)))

    fit.main(words(folder, calm, *more, "trainer.accumulate=2", "trainer.max_steps=12"))
    part(first, 5)
    part(3 - first, 12, "resume=last")
    states = [read_checkpoint(path / "checkpoints" / "last.ckpt") for path in (run, calm)]
    assert states[0]["progress"]["updates"] == states[1]["progress"]["updates"] == 12
    assert states[0]["progress"]["position"] == states[1]["progress"]["position"] == 24
    assert states[0]["progress"]["supervised"] == states[1]["progress"]["supervised"]
    close(run, calm, 1e-5)


# --- lost, failed, slow ---------------------------------------------------------------------------


def pid_of(rank: int, started_by: int) -> int:
    """The process of some rank below a launcher."""
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                environment = (place / "environ").read_bytes().split(b"\0")
                parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == started_by and f"RANK={rank}".encode() in environment:
                return int(place.name)
    raise AssertionError(f"no process of rank {rank}")


def until(path: Path, process: subprocess.Popen[str], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise AssertionError(process.communicate()[0][-4000:])
        time.sleep(0.1)


LONG = [*EPOCH, "trainer.accumulate=2", "trainer.max_steps=100000", "checkpoint.every=5"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("launcher", [accelerate, torchrun])
def test_killing_one_ends_the_other_within_a_minute(
    folder: Path, tmp_path: Path, launcher: Any, strategy: str
) -> None:
    run = tmp_path / "run"
    process = started(launcher(*words(folder, run, *LONG, f"trainer.strategy={strategy}")))
    until(run / "checkpoints" / "last.ckpt", process)
    other = pid_of(0, process.pid)
    os.kill(pid_of(1, process.pid), signal.SIGKILL)
    began = time.monotonic()
    printed = said(process, None, timeout=60)
    assert process.returncode != 0 and time.monotonic() - began < 60
    assert (
        "drafttrain.fit (rank 0): rank 1 (process " in printed
        and "is gone: it was killed" in printed
    ), printed[-4000:]
    assert not Path(f"/proc/{other}").exists()
    assert read_checkpoint(run / "checkpoints" / "last.ckpt")["progress"]["updates"] >= 5


PLAIN = "import sys; from drafttrain import fit; fit.main(sys.argv[1:])"
REFUSING = """
import os, sys
from drafttrain import fit
from drafttrain.errors import InputError

def refuse(self, batch):
    raise InputError("features of rows 3 are not finite")

if os.environ["RANK"] == "1":
    from drafttrain.target.features import OnlineFeatures
    OnlineFeatures.features = refuse
fit.main(sys.argv[1:])
"""
SLOW = """
import os, sys, time
from drafttrain import companions, fit
from drafttrain.fitting import shared

companions.REMIND_SECONDS = 1.0
load = shared.load_target
if os.environ["RANK"] == "1":
    shared.load_target = lambda *given: (load(*given), time.sleep(8))[0]
fit.main(sys.argv[1:])
"""


def test_without_a_launcher_a_killed_process_ends_the_other_too(
    folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    left, killed = by_hand(PLAIN, words(folder, run, *LONG))
    until(run / "checkpoints" / "last.ckpt", left)
    killed.send_signal(signal.SIGKILL)
    began = time.monotonic()
    printed = said(left, 1, timeout=60)
    assert time.monotonic() - began < 60
    assert (
        f": rank 1 (process {killed.pid}) is gone: it was killed" in printed
        and "Traceback" not in printed
    )
    killed.communicate()


def test_processes_with_different_settings_are_refused(folder: Path, tmp_path: Path) -> None:
    port = str(20000 + time.time_ns() // 1000 % 30000)
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    each = [words(folder, tmp_path / "run", *LONG, *more) for more in ([], ["optim.lr=0.5"])]
    both = [
        started(
            [sys.executable, "-c", PLAIN, *each[rank]],
            {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    for process in both:
        assert (
            "ranks 0 and 1 were started with different settings (optim.lr is 0.002 and 0.5)"
            in said(process, 2, timeout=60)
        )
    assert not (tmp_path / "run").exists()


def test_an_exception_in_one_process_ends_all_with_its_cause(folder: Path, tmp_path: Path) -> None:
    left, failing = by_hand(REFUSING, words(folder, tmp_path / "run", *LONG))
    assert ": features of rows 3 are not finite" in said(failing, 2)
    assert ": rank 1 failed: features of rows 3 are not finite" in said(left, 1, timeout=60)


def test_slow_preparation_hangs_nobody(folder: Path, tmp_path: Path) -> None:
    short = [*EPOCH, "trainer.accumulate=2", "trainer.max_steps=2"]
    left, slow = by_hand(SLOW, words(folder, tmp_path / "run", *short))
    printed = said(left)
    assert (
        "drafttrain.fit (rank 0): waits before the first update for rank 1 (loads the target)"
        in printed
    )
    said(slow)
    assert len(list(tmp_path.iterdir())) == 1
