"""Processes of one run that cannot go on without each other: the loss of one ends all, and each
says which it was, and why.

Every process leaves a mark in the machine's temporary folder: who it is, what it is at, where it
waits, how it ended. A thread looks at the others' marks. So a process that was killed is named by
its rank; one that failed is quoted; one that takes long is waited for as long as it runs, and named
meanwhile. None of this needs torch.distributed, whose collectives only fail after a timeout.

Marks reach as far as the machine. On several machines each watches its own processes, what a
launcher or a collective finds out ends the others, and they meet by `drafttrain.rendezvous`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from drafttrain.errors import InputError, LostCompanion, first_line, refused_by_system
from drafttrain.processes import (
    WAIT_SECONDS,
    address,
    check_variables,
    identity,
    is_alive,
    local_ranks,
    mark_file,
    rank,
    read_note,
    world_size,
    write_note,
)
from drafttrain.rendezvous import Rendezvous, agent_keeps_store, over_machines

STOPPED_BY_SIGNAL = 143
"""Exit code of processes that a signal reached, and that agreed to stop."""
POLL_SECONDS = 0.5
GRACE_SECONDS = 20.0
"""How long a process that has lost another may take to end by itself, in a collective's own error
for instance."""
FIRST_SECONDS, REMIND_SECONDS = 5.0, 30.0
"""After how long a wait is reported, and reported again."""
FAREWELL_SECONDS = 3.0
"""How long a process whose collective failed waits to learn which other one is gone."""
_BROKEN = (
    "gloo",
    "nccl",
    "xccl",
    "closed by peer",
    "connection reset",
    "broken pipe",
    "tcpstore",
    "process group",
)
"""Words in what a collective says when another process is gone."""


class Companions:
    """The others on this machine, as one process sees them."""

    def __init__(self, door: str) -> None:
        self.door = door
        self._began = time.time()
        self._own: dict[str, Any] = {
            **identity(),
            "at": "starts",
            "met": 0,
            "failed": None,
            "left": 0.0,
        }
        self._seen: dict[int, dict[str, Any]] = {}
        """The last mark of every other process that was seen alive."""
        self._done = threading.Event()
        self._said = threading.Lock()
        _refuse_second(read_note(mark_file(rank())))
        mark_file(rank()).unlink(missing_ok=True)
        self._write()

    # What this process says -----------------------------------------------------------------------
    def at(self, what: str) -> None:
        """Say what this process does from now on, such as "loads the target"."""
        self._own["at"] = what
        self._write()

    def failed(self, why: str) -> None:
        self._own["failed"] = why
        self._write()

    def leave(self) -> None:
        """It has ended as it should: nobody misses it. The last one removes all marks."""
        self._done.set()
        self._own["left"] = time.time()
        self._write()
        notes = [read_note(mark_file(other)) for other in local_ranks()]
        if all(note is None or note.get("left") for note in notes):
            for other in local_ranks():
                mark_file(other).unlink(missing_ok=True)

    def _write(self) -> None:
        self._own["wrote"] = time.time()
        with contextlib.suppress(OSError):  # A full temporary folder must not end a run.
            write_note(mark_file(rank()), self._own)

    # What it learns of the others -----------------------------------------------------------------
    def lost(self) -> str:
        """Which process is missing, and why as far as that is known; empty while none is."""
        for other in local_ranks():
            if other == rank():
                continue
            note, before = read_note(mark_file(other)), self._seen.get(other)
            if note is not None and is_alive(note):
                self._seen[other] = note
                if note.get("failed"):
                    return f"rank {other} failed: {note['failed']}"
            elif note is not None and not note.get("left") and self._is_of_this_run(note, before):
                if note.get("failed"):
                    return f"rank {other} failed: {note['failed']}"
                return (
                    f"rank {other} (process {note['pid']}) is gone: it was killed, by a signal or "
                    f"for lack of memory, when it was at this: {note.get('at')}"
                )
        return ""

    def _is_of_this_run(self, note: dict[str, Any], before: dict[str, Any] | None) -> bool:
        """Of a process that is gone: was it seen alive, or did it write since this one began? Marks
        of an earlier run are older."""
        return (before is not None and note["pid"] == before["pid"]) or float(
            note.get("wrote") or 0
        ) > self._began

    def meet(self, what: str) -> None:
        """Wait, without a collective, until every process on this machine has come here, however
        long one takes.

        Raises: LostCompanion if one is gone or never came.
        """
        self._own["met"] += 1
        self._write()
        began = time.monotonic()
        remind = began + FIRST_SECONDS
        while True:
            missing = [r for r in local_ranks() if r != rank() and not self._has_met(r)]
            if not missing:
                return
            lost = self.lost()
            if lost:
                raise LostCompanion(lost)
            unseen = [r for r in missing if r not in self._seen]
            if unseen and time.monotonic() - began > WAIT_SECONDS:
                raise LostCompanion(
                    f"rank {unseen[0]} was waited for {WAIT_SECONDS:.0f} s before {what}, and "
                    "never came"
                )
            if time.monotonic() > remind:
                remind = time.monotonic() + REMIND_SECONDS
                busy = ", ".join(f"rank {r} ({self._known_of(r)})" for r in missing)
                self._print(f"waits before {what} for {busy}")
            time.sleep(0.05)

    def _known_of(self, other: int) -> str:
        """What a process that is waited for was last at."""
        if other in self._seen:
            return str(self._seen[other]["at"])
        failed = (read_note(mark_file(other)) or {}).get("failed")
        never = f"not started on this machine with MASTER_PORT={address()[1]}"
        return f"{never}; an earlier one ended: {failed}" if failed else never

    def settings_of_all(self, own: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Of every process on this machine, this one's included, once all have said theirs.

        Args:
            own: plain values.
        Raises: LostCompanion as `meet` does.
        """
        self._own["settings"] = own
        self.meet("the settings are compared")
        notes = {other: read_note(mark_file(other)) for other in local_ranks()}
        return {
            other: note["settings"]
            for other, note in notes.items()
            if note is not None and "settings" in note
        }

    def _has_met(self, other: int) -> bool:
        note = read_note(mark_file(other))
        if note is None:  # One that has ended as it should was here.
            return other in self._seen
        came = int(note.get("met", 0)) >= self._own["met"]
        if is_alive(note):
            self._seen[other] = note
            return came
        # It may have come and ended between two looks: what it said here is known, and its end is
        # heard of afterwards.
        ended_well = float(note.get("left") or 0) > self._began
        return ended_well or (came and self._is_of_this_run(note, self._seen.get(other)))

    # The watch ------------------------------------------------------------------------------------
    def watch(self) -> None:
        """End this process if another is lost, and it does not end by itself within the grace."""
        lost = ""
        while not lost:
            if self._done.wait(POLL_SECONDS):
                return
            lost = self.lost()
        if self._done.wait(FAREWELL_SECONDS):
            return
        self.announce(lost)
        if not self._done.wait(GRACE_SECONDS):
            os._exit(1)

    def announce(self, lost: str) -> None:
        """Say once why this process ends."""
        if self._said.acquire(blocking=False):
            self._print(_ends(lost))

    def _print(self, text: str) -> None:
        print(f"drafttrain.{self.door} (rank {rank()}): {text}", file=sys.stderr, flush=True)

    def why(self, seconds: float) -> str:
        """`lost`, waited for: what breaks a collective may be seen before the process that is
        gone."""
        end = time.monotonic() + seconds
        while not (found := self.lost()) and time.monotonic() < end:
            time.sleep(0.05)
        return found


def _refuse_second(mark: dict[str, Any] | None) -> None:
    """Raise InputError if another process of this rank is at work."""
    if mark is None or mark["pid"] == os.getpid() or mark.get("left") or mark.get("failed"):
        return
    if is_alive(mark):
        raise InputError(
            f"RANK={rank()} is process {mark['pid']} already: give every process a RANK of its "
            "own, and every run a MASTER_PORT of its own"
        )


def _refuse_taken_port() -> None:
    """Raise InputError if rank 0 could not listen where all meet."""
    if rank() != 0 or agent_keeps_store():
        return
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", address()[1]))
        except OSError as error:
            raise InputError(
                f"MASTER_PORT={address()[1]} cannot be used here ({error.strerror}): give another "
                "one, the same to every process"
            ) from error


def _check_start() -> None:
    """Raise InputError if the processes of a run could not come together; those that have come find
    the reason in this one's mark."""
    try:
        check_variables(meets=True)
        if world_size() > 1:
            _refuse_taken_port()
    except InputError as error:
        if world_size() > 1:
            mark = {**identity(), "at": "starts", "failed": str(error), "wrote": time.time()}
            with contextlib.suppress(OSError):
                write_note(mark_file(rank()), mark)
        raise


current: Companions | None = None
machines: Rendezvous | None = None


def at(what: str) -> None:
    """Say what this process does, where others watch it."""
    if current is not None:
        current.at(what)


def meet(what: str) -> None:
    """Wait for the other processes of the run, where there are any; see `Companions.meet`."""
    if current is not None:
        current.meet(what)
    if machines is not None:
        machines.gather(what, None)


def settings_of_all(own: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Those of every process, on all machines; see `Companions.settings_of_all`."""
    here = {} if current is None else current.settings_of_all(own)
    return here if machines is None else machines.gather("the settings are compared", own)


@contextlib.contextmanager
def together(door: str) -> Iterator[None]:
    """While it lasts, the processes of a run end together.

    Raises: LostCompanion in the place of a collective's error, where that came of another process's
    end.
    """
    global current, machines
    _check_start()
    if world_size() < 2:
        yield
        return
    mine = current = Companions(door)
    threading.Thread(target=mine.watch, name="companions", daemon=True).start()
    try:
        machines = Rendezvous(mine._print) if over_machines() else None
        yield
    except SystemExit as error:
        if error.code in (None, 0, STOPPED_BY_SIGNAL):
            mine.leave()
        else:
            mine.failed(f"exit code {error.code}")
        raise
    except Exception as error:
        _hear_no_signal()
        own = str(error) if isinstance(error, InputError) else refused_by_system(error)
        lost = str(error) if isinstance(error, LostCompanion) else ""
        if not own and not lost and _is_broken(error):
            lost = mine.why(FAREWELL_SECONDS)
        mine.failed(own or lost or f"{type(error).__name__}: {first_line(error)}")
        if lost:
            raise LostCompanion(_ends(lost)) from error
        raise
    except BaseException as error:
        lost = mine.why(1.0)  # A launcher that finds one process dead sends the others a signal.
        if lost:
            mine.announce(lost)
        mine.failed(lost or f"ended by {type(error).__name__.strip('_')}")
        raise
    else:
        mine.leave()
    finally:
        mine._done.set()
        current = machines = None


def _hear_no_signal() -> None:
    """It ends already, and is about to say why: what a launcher sends for the same reason must not
    come between."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _ends(lost: str) -> str:
    return (
        f"{lost}; this process ends too. What the last checkpoint holds is kept: go on with the "
        "same command and resume=last"
    )


def _is_broken(error: BaseException) -> bool:
    said = f"{type(error).__name__} {error}".lower()
    return type(error).__name__.startswith("Dist") or any(word in said for word in _BROKEN)
