"""Several processes of one run: who this one is, and one word that rank 0 gives to the others
before torch.distributed exists.

The word goes through a file in the machine's temporary folder, named after the launcher's address,
port and run id. A word whose giver is no longer alive belongs to an earlier run and is ignored.
Processes that rank 0 itself starts (Lightning's own launcher) find the word in their environment.
How they watch each other afterwards: `drafttrain.companions`.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from drafttrain.errors import InputError, writing

WAIT_SECONDS = 120.0
"""How long the others wait for a rank 0 of which nothing is known; for one that is at work they
wait as long as that lasts."""
LINGER_SECONDS = 2.0
"""How long a refusing rank 0 stays, so that the others can read why."""
_VARIABLE = "DRAFTTRAIN_WORD"
_calls = 0


def rank() -> int:
    """This process's place among all; 0 where there is one. Read from the environment, so it is
    right before torch.distributed is."""
    for name in ("RANK", "LOCAL_RANK"):
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return 0


def world_size() -> int:
    value = os.environ.get("WORLD_SIZE", "")
    return int(value) if value.isdigit() else 1


def local_ranks() -> range:
    """The processes on this machine, this one included."""
    first = rank() - _number("LOCAL_RANK", rank())
    return range(first, first + _number("LOCAL_WORLD_SIZE", world_size()))


def address() -> tuple[str, int]:
    """Where the processes of a run meet."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1"), _number("MASTER_PORT", 0)


def check_variables(*, meets: bool = False) -> None:
    """Raise InputError where what a launcher says of this process contradicts itself.

    Args:
        meets: do processes of this door meet at an address?
    """
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        least = int(name.endswith("SIZE"))
        if os.environ.get(name) and _number(name, -1) < least:
            raise InputError(f"{name}={os.environ[name]}: needs an integer of at least {least}")
    own, world = rank(), world_size()
    local, here = _number("LOCAL_RANK", own), _number("LOCAL_WORLD_SIZE", world)
    first = own - local
    if not (own < world and local < here and 0 <= first <= world - here):
        given = {"RANK": own, "LOCAL_RANK": local, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": here}
        listed = ", ".join(
            f"{name}={value}{'' if os.environ.get(name) else ' (not set)'}"
            for name, value in given.items()
        )
        raise InputError(
            f"{listed} contradict each other: on one machine LOCAL_RANK is RANK, on several "
            "LOCAL_WORLD_SIZE is the number of processes on this one; accelerate launch and "
            "torchrun set all of them"
        )
    if not meets or world < 2:
        return
    lacking = [n for n in ("LOCAL_RANK", "MASTER_PORT") if not os.environ.get(n)]
    lacking += ["MASTER_ADDR"] if here < world and not os.environ.get("MASTER_ADDR") else []
    if lacking:
        raise InputError(
            f"WORLD_SIZE={world}, and {' and '.join(lacking)} not set: accelerate launch and "
            "torchrun set all that is needed"
        )
    if not 0 < address()[1] < 1 << 16:
        raise InputError(f"MASTER_PORT={os.environ['MASTER_PORT']}: needs a number from 1 to 65535")


def _number(name: str, otherwise: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else otherwise


def peak_memory() -> str:
    """The most memory that this process ever held, such as "2.1 GB"; the accelerator's own is not
    in it."""
    try:
        import resource
    except ImportError:  # Windows has no such count.
        return "an unknown amount"
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    return f"{size / 1e9:.1f} GB"


def on_another_machine() -> bool:
    """True on a machine that does not hold rank 0: files in the temporary folder are not shared
    with it."""
    return 0 not in local_ranks()


def give_word(word: str, *, refuse: bool = False) -> None:
    """Rank 0: give the other processes a word, or the reason why there is none. The n-th call
    answers their n-th wait."""
    global _calls
    _calls += 1
    if not refuse:
        os.environ[_VARIABLE] = f"{os.getpid()}:{word}"
    if world_size() < 2:
        return
    path = _meeting_file(_calls)
    write_note(path, {"word": word, "refused": refuse, **identity()})
    atexit.register(_forget, path, os.getpid())
    if refuse:
        time.sleep(LINGER_SECONDS)


def await_word(what: str) -> str:
    """The others: wait for rank 0's word.

    Args:
        what: what is waited for, for the message of a long wait.
    Raises: InputError: rank 0 refused (with its reason), or said nothing for `WAIT_SECONDS`.
    """
    global _calls
    _calls += 1
    parent, _, inherited = os.environ.get(_VARIABLE, "").partition(":")
    # torchrun sets RANK, Lightning's launcher does not.
    if parent == str(os.getppid()) and "RANK" not in os.environ:
        return inherited
    path = _meeting_file(_calls)
    began, reminded = time.monotonic(), False
    while time.monotonic() - began < WAIT_SECONDS or is_alive(read_note(mark_file(0))):
        message = read_note(path)
        if message is not None and is_alive(message):
            if message["refused"]:
                raise InputError(message["word"])
            return str(message["word"])
        if not reminded and time.monotonic() - began > 10:
            print(
                f"rank {rank()} waits for rank 0 to choose {what} ({path})",
                file=sys.stderr,
                flush=True,
            )
            reminded = True
        time.sleep(0.05)
    raise InputError(
        f"rank {rank()} waited {WAIT_SECONDS:.0f} s for rank 0 to choose {what} ({path}): did rank "
        "0 stop?"
    )


def identity() -> dict[str, Any]:
    """Of this process, so that another one with its number is not taken for it."""
    return {"pid": os.getpid(), "started": _started(os.getpid())}


def is_alive(note: dict[str, Any] | None) -> bool:
    """Does the process that wrote a note still run?"""
    return note is not None and _started(note["pid"]) == note["started"]


def write_note(path: Path, note: dict[str, Any]) -> None:
    """Replace a file at once."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with writing(path), os.fdopen(handle, "w") as file:
        json.dump(note, file)
    os.replace(temporary, path)


def read_note(path: Path) -> dict[str, Any] | None:
    """What a process of this user wrote; None where there is nothing of that kind."""
    try:
        with path.open() as file:
            # Anybody may write into the temporary folder.
            own = not hasattr(os, "getuid") or os.fstat(file.fileno()).st_uid == os.getuid()
            note = json.load(file) if own else None
    except (OSError, ValueError):
        return None
    return (
        note
        if isinstance(note, dict) and type(note.get("pid")) is int and "started" in note
        else None
    )


def mark_file(of: int) -> Path:
    """Where the process of some rank says that it is there, see `drafttrain.companions`."""
    return _meeting_file(f"rank{of}")


def _meeting_file(call: int | str) -> Path:
    """A file known to every process that one launcher started on this machine."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    parts = [os.environ.get(n, "") for n in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")]
    return (
        Path(tempfile.gettempdir())
        / f"drafttrain-{user}-{re.sub(r'[^A-Za-z0-9.]+', '_', '-'.join(parts))}-{call}.json"
    )


def _started(pid: int) -> str:
    """When a process started, in its own system's units; empty when it is gone, or has ended and
    nobody has asked how."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if words[0] in "ZX" else words[19]
    except (OSError, IndexError):
        if Path("/proc/self/stat").exists():
            return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass
    return "alive"


def _forget(path: Path, pid: int) -> None:
    if os.getpid() == pid:
        path.unlink(missing_ok=True)
