"""Processes of several machines meet before their first collective, and exchange plain values: by
the store that torch.distributed keeps at the launcher's address.

Waiting is done here, in short steps, and not in the library, which says nothing while it waits and
hears no signal. On one machine, marks in its temporary folder do the same without a network:
`drafttrain.companions`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from drafttrain.errors import LostCompanion
from drafttrain.processes import address, local_ranks, rank, world_size

WAIT_SECONDS = 600.0
"""How long a process of another machine is waited for, since machines are started one by one."""
LINGER_SECONDS = 10.0
"""How long the process that keeps the store stays for others that have not read it yet."""
FIRST_SECONDS, REMIND_SECONDS = 5.0, 30.0
"""After how long a wait is reported, and reported again."""
_TRY = timedelta(seconds=1)


def over_machines() -> bool:
    """Are there processes of this run on other machines?"""
    return len(local_ranks()) < world_size()


def agent_keeps_store() -> bool:
    """Does torchrun keep the store, and not rank 0?"""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class Rendezvous:
    """The processes of all machines, as one of them sees them.

    Args:
        say: is given what is waited for, where that takes long.
    Raises: LostCompanion if nobody answers at the launcher's address.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        from torch.distributed import PrefixStore

        self._say = say
        self._calls = 0
        self._keeps = rank() == 0 and not agent_keeps_store()
        name = f"drafttrain/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        # The store stays: the process group is made at the same address.
        self._store: Any = PrefixStore(name, self._open())

    def _open(self) -> Any:
        from torch.distributed import DistError, TCPStore

        host, port = address()
        wait = _Wait(self._say)
        while True:
            try:
                return TCPStore(
                    host,
                    port,
                    world_size(),
                    self._keeps,
                    _TRY,
                    wait_for_workers=False,
                    multi_tenant=self._keeps,
                )
            except DistError as error:
                if self._keeps:
                    raise
                wait.on(f"rank 0, which keeps {host}:{port}", error)

    def gather(self, what: str, own: Any) -> dict[int, Any]:
        """What every process gave here, by rank, once all have come: the n-th call of one meets the
        n-th call of the others.

        Args:
            what: names the place in messages.
            own: plain values.
        Raises: LostCompanion if one never came.
        """
        self._calls += 1
        keys = [f"{self._calls}/{other}" for other in range(world_size())]
        self._store.set(keys[rank()], json.dumps(own))
        wait = _Wait(self._say)
        while missing := [r for r, key in enumerate(keys) if not self._has([key])]:
            listed = ", ".join(f"rank {other}" for other in missing[:8])
            host, port = address()
            wait.on(f"{listed} of {world_size()} at {host}:{port}, before {what}")
        found = {r: json.loads(self._store.get(key)) for r, key in enumerate(keys)}
        self._store.set(f"{keys[rank()]}/read", "")
        if self._keeps:
            self._linger([f"{key}/read" for key in keys])
        return found

    def _linger(self, read: list[str]) -> None:
        """Who keeps the store may be about to end: the others have read what it holds before."""
        end = time.monotonic() + LINGER_SECONDS
        while not self._has(read) and time.monotonic() < end:
            time.sleep(0.05)

    def _has(self, keys: list[str]) -> bool:
        from torch.distributed import DistError

        try:
            return bool(self._store.check(keys))
        except DistError as error:
            host, port = address()
            raise LostCompanion(
                f"what was at {host}:{port} is gone (rank 0, or torchrun's agent there)"
            ) from error


class _Wait:
    """Short steps, reports and an end."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._began = say, time.monotonic()
        self._next = self._began + FIRST_SECONDS

    def on(self, whom: str, error: Exception | None = None) -> None:
        now = time.monotonic()
        if now - self._began > WAIT_SECONDS:
            raise LostCompanion(
                f"waited {WAIT_SECONDS:.0f} s for {whom}: start every process, with the same "
                "MASTER_ADDR and MASTER_PORT that all machines can reach"
            ) from error
        if now > self._next:
            self._next = now + REMIND_SECONDS
            self._say(f"waits for {whom}")
        time.sleep(0.05)
