"""Processes of one run end together, each naming the one that was lost and why; one that takes long
is waited for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain import companions, processes, rendezvous
from drafttrain.errors import InputError, LostCompanion, refused_by_system
from drafttrain.wiring.doors import door
from tests.messages import said

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """
import os, signal, sys, time
from drafttrain import companions
from drafttrain.errors import InputError, LostCompanion
from drafttrain.wiring.doors import _ended_by_term

companions.POLL_SECONDS, companions.GRACE_SECONDS = 0.1, 0.4
companions.FAREWELL_SECONDS, companions.FIRST_SECONDS = 0.4, 0.2
CLOSED = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:8"

def work(what):
    if what in ("quick rate", "slow rate"):
        from drafttrain.fitting.agreement import check_agreement
        rate, device = (0.1, "cuda:0") if what == "quick rate" else (0.2, "cuda:1")
        values = {"optim": {"lr": rate}, "target": {"device": device}, "seed": 0}
        check_agreement(values)
    companions.at("loads the target")
    if what == "slow":
        time.sleep(0.8)
    companions.meet("the first update")
    companions.at("trains")
    print("met", flush=True)
    if what == "refused":
        raise InputError("rows 3, 4 are not finite")
    if what == "bug":
        raise KeyError("loss")
    if what == "collective":
        time.sleep(0.4)
        raise RuntimeError(CLOSED)
    if what == "both":
        # A launcher that found one process dead sends the others a signal, just when a collective
        # has failed.
        why = companions.Companions.why
        def signalled(self, seconds):
            os.kill(os.getpid(), signal.SIGTERM)
            return why(self, seconds)
        companions.Companions.why = signalled
        time.sleep(0.4)
        raise RuntimeError(CLOSED)
    if what == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    if what in ("works", "signal"):
        time.sleep(30)

with _ended_by_term():
    try:
        with companions.together("fit"):
            work(sys.argv[1])
    except LostCompanion as error:
        sys.exit(f"fit: {error}")
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
"""


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Without a door, nobody hears a signal again once an end is announced."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def port() -> int:
    return 20000 + time.time_ns() // 1000 % 30000


def start(rank: int, port: int, what: str, *, machines: int = 1) -> subprocess.Popen[str]:
    """On one machine, or as on two."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank if machines == 1 else 0),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": str(2 // machines),
    }
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, what]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(*processes: subprocess.Popen[str]) -> list[tuple[int, str]]:
    said = [process.communicate(timeout=180)[1] for process in processes]
    return [(process.returncode, one) for process, one in zip(processes, said, strict=True)]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("what", "code", "cause"),
    [
        ("refused", 2, "rank 1 failed: rows 3, 4 are not finite"),
        ("bug", 1, "rank 1 failed: KeyError: 'loss'"),
    ],
)
def test_a_failure_ends_the_others_with_its_cause(
    port: int, what: str, code: int, cause: str
) -> None:
    other, failing = ended(start(0, port, "works"), start(1, port, what))
    assert failing[0] == code and ("Traceback" in failing[1]) == (what == "bug")
    assert (
        other[0] == 1
        and f"{cause}; this process ends too" in other[1]
        and "resume=last" in other[1]
    )


@pytest.mark.processes
@pytest.mark.parametrize("what", ["collective", "both"])
def test_a_killed_process_is_named_and_a_collective_s_error_is_explained(
    port: int, what: str
) -> None:
    killed, working = start(1, port, "works"), start(0, port, what)
    assert killed.stdout is not None and killed.stdout.readline() == "met\n"
    killed.send_signal(signal.SIGKILL)
    (code, printed), _ = ended(working, killed)
    assert code == 1 and "Traceback" not in printed
    assert (
        f"fit: rank 1 (process {killed.pid}) is gone: it was killed" in printed
        and "at this: trains" in printed
    )


@pytest.mark.processes
@pytest.mark.parametrize("machines", [1, 2])
def test_processes_compare_their_settings(port: int, machines: int) -> None:
    """A rate that only one has is refused by both; a device of its own is nobody else's
    business."""
    rates = enumerate(("quick rate", "slow rate"))
    for code, printed in ended(*(start(r, port, rate, machines=machines) for r, rate in rates)):
        assert (
            code == 2
            and "ranks 0 and 1 were started with different settings (optim.lr is 0.1 and 0.2): "
            "give all"
            in printed
        )
        assert "device" not in printed
    alike = [start(r, port + 1, "quick rate", machines=machines) for r in range(2)]
    for code, printed in ended(*alike):
        assert code == 0, printed


@pytest.mark.processes
def test_a_slow_process_is_waited_for_and_named(port: int) -> None:
    slow = start(1, port, "slow")  # First, so that it is there when the other one waits.
    (code, printed), (other, _) = ended(start(0, port, "quick"), slow)
    assert code == other == 0, printed
    assert "waits before the first update for rank 1 (loads the target)" in printed


@pytest.mark.processes
def test_one_that_has_done_its_part_is_not_missed(port: int) -> None:
    working, done = start(0, port, "collective"), start(1, port, "quick")
    (own, printed), (code, _) = ended(working, done)
    assert (
        code == 0
        and own == 1
        and "Connection closed by peer" in printed
        and "this process ends too" not in printed
    )


@pytest.mark.slow
@pytest.mark.processes
def test_a_signal_ends_with_its_own_code(port: int) -> None:
    (code, _), (other, said) = ended(start(0, port, "signal"), start(1, port, "works"))
    assert code == 143 and other == 1 and "rank 0 failed: ended by Terminated" in said


@pytest.fixture
def set_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int) -> Any:
    """Sets variables of a run of two, as people do without a launcher; what processes say to each
    other stays in a folder of the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

    def set_to(**given: str) -> None:
        for name in names:
            monkeypatch.delenv(name, raising=False)
        usual = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in {**usual, **given}.items():
            if value:
                monkeypatch.setenv(name, value)

    return set_to


def refused(what: str) -> None:
    with pytest.raises(InputError, match=what), companions.together("fit"):
        pytest.fail("it was let in")


# The kind: variables of which each is well formed and which together describe no run; then all wait
# for a process that cannot come. Neighbours: a local rank twice, ranks and sizes out of bounds or
# no numbers, a size without ranks, no port or address, two processes of one rank, a port that
# another program has.
@pytest.mark.field("F84")
def test_variables_that_contradict_each_other_are_refused_at_once(set_by_hand: Any) -> None:
    contradiction = r"LOCAL_RANK=.* contradict each other: on one machine LOCAL_RANK is RANK"
    for given, what in (
        ({"RANK": "1", "LOCAL_RANK": "0"}, contradiction),
        ({"RANK": "0", "LOCAL_RANK": "1"}, contradiction),
        ({"RANK": "2", "LOCAL_RANK": "2"}, contradiction),
        ({"RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}, contradiction),
        ({"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, contradiction),
        ({"RANK": "1", "WORLD_SIZE": ""}, contradiction),
        ({"RANK": "one", "LOCAL_RANK": "1"}, "RANK=one: needs an integer"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE=two: needs an integer of at least 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: needs"),
        ({"RANK": "0"}, "LOCAL_RANK not set"),
        ({"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": ""}, "MASTER_PORT not set"),
        (
            {"RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": ""},
            "MASTER_ADDR not set",
        ),
        ({"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "70000"}, "MASTER_PORT=70000: needs"),
    ):
        set_by_hand(**given)
        refused(what)


@pytest.mark.field("F84")
def test_a_rank_or_a_port_that_another_has_is_refused_at_once(
    set_by_hand: Any, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    set_by_hand(RANK="0", LOCAL_RANK="0")
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        mark = {"pid": other.pid, "started": processes._started(other.pid), "at": "trains"}
        processes.write_note(processes.mark_file(0), mark)
        refused(f"RANK=0 is process {other.pid} already")
    finally:
        other.communicate()
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        refused(f"MASTER_PORT={port} cannot be used here")
        with pytest.raises(Exception, match="EADDRINUSE") as late:  # Taken since it was tried.
            torch.distributed.TCPStore("127.0.0.1", port, 1, True)
        assert refused_by_system(late.value).startswith("a port is taken (")
    # What was refused is what the others read of it.
    set_by_hand(RANK="1", LOCAL_RANK="1")
    with pytest.raises(LostCompanion, match=r"rank 0 failed: MASTER_PORT|never came"):
        with companions.together("fit"):
            companions.current._began = 0.0  # type: ignore[union-attr]
            companions.meet("the first update")


@pytest.mark.field("F84")
def test_a_wait_for_another_machine_is_reported_and_a_signal_ends_it(
    set_by_hand: Any, port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_by_hand(RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    monkeypatch.setattr(rendezvous, "FIRST_SECONDS", 0.05)

    @door("fit", together=True)
    def main(cfg: Any) -> None:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        companions.settings_of_all({"seed": 0})

    with pytest.raises(SystemExit) as left:
        main(["experiment=smoke", "data.path=x"])
    printed = capsys.readouterr().err
    assert left.value.code == 143 and "waits for rank 1 of 2 at 127.0.0.1:" in printed
    assert "before the settings are compared" in printed and companions.machines is None
    monkeypatch.setattr(rendezvous, "WAIT_SECONDS", 0.2)
    # The first store lives as long as the error that ended its use.
    monkeypatch.setenv("MASTER_PORT", str(port + 1))
    with pytest.raises(LostCompanion, match="waited 0 s for rank 1 of 2"):
        with companions.together("fit"):
            companions.meet("the first update")


def test_one_that_never_comes_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_PORT": str(port),
        "TMPDIR": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(companions, "WAIT_SECONDS", 0.2)
    with pytest.raises(LostCompanion, match=said("wiring.never_came")):
        with companions.together("fit"):
            companions.meet("the first update")
    assert companions.current is None


def test_a_signal_while_another_end_is_announced_ends_with_its_own_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @door("fit")
    def main(cfg: Any) -> None:
        raise InputError("refused")

    monkeypatch.setattr(
        "drafttrain.wiring.doors._complain", lambda *_: signal.raise_signal(signal.SIGTERM)
    )
    with pytest.raises(SystemExit) as left:
        main(["experiment=smoke", "data.path=x"])
    assert left.value.code == 143 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("before", [signal.SIG_DFL, lambda *_: None], ids=["default", "own"])
def test_a_door_leaves_signals_as_they_were(before: Any) -> None:
    @door("fit")
    def main(cfg: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # As when a lost process is announced.
        raise InputError("refused")

    signal.signal(signal.SIGTERM, before)
    with pytest.raises(SystemExit):
        main(["experiment=smoke", "data.path=x"])
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_door_says_which_one_and_leaves_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    @door("fit", together=True)
    def main(cfg: Any) -> None:
        companions.at("trains")
        companions.meet("the first update")  # One by itself has nobody to wait for.
        raise LostCompanion("rank 1 (process 7) is gone")

    with pytest.raises(SystemExit) as left:
        main(["experiment=smoke", "data.path=x"])
    assert (
        left.value.code == 1
        and capsys.readouterr().err == "drafttrain.fit: rank 1 (process 7) is gone\n"
    )
