"""Further processes without the seconds that importing takes: each is forked from one that has
imported all and run nothing."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
IMPORTED = (
    "drafttrain.fit",
    "drafttrain.capture",
    "drafttrain.synthesize",
    "transformers.models.llama.modeling_llama",
)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([*IMPORTED, __name__])


class Forked:
    """A function in a process of its own, such as a door's `main`.

    Args:
        function: found again by its module and name, as the files have it.
        said: the file into which the process writes what it says.
        environment: variables in addition to those of this process.
    """

    def __init__(
        self, function: Callable[..., Any], *arguments: Any, said: Path, **environment: str
    ) -> None:
        self._said = said
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
            forkserver.ensure_running()
        # What processes of one run say to each other goes through the temporary folder; nothing of
        # it remains.
        variables = {**os.environ, "TMPDIR": str(said.parent), **environment}
        settings = (said, variables, torch.get_num_threads())
        self._process = _context.Process(target=_run, args=(function, arguments, *settings))
        self._process.start()

    @property
    def runs(self) -> bool:
        return self._process.is_alive()

    @property
    def said(self) -> str:
        return self._said.read_text(errors="replace") if self._said.exists() else ""

    def kill(self) -> None:
        """A signal that nothing can hear, to a process that has not ended."""
        self._process.kill()
        self._process.join()
        assert self._process.exitcode == -9, self.said

    def ended(self, seconds: float = 240) -> int | None:
        """Its exit code, once it has ended; one that does not is killed, and has none."""
        self._process.join(seconds)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            self._process.join()
        return code


def pair(
    function: Callable[..., Any], *arguments: Any, said: Path, **environment: str
) -> tuple[str, str]:
    """Two processes of one run, as a launcher starts them, both of which must end well. Returns
    what each said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        **environment,
    }
    both = [
        Forked(
            function,
            *arguments,
            said=said.with_name(f"{said.name}-{rank}"),
            RANK=rank,
            LOCAL_RANK=rank,
            **common,
        )
        for rank in ("0", "1")
    ]
    codes = [one.ended() for one in both]
    assert codes == [0, 0], (codes, *(one.said[-3000:] for one in both))
    return both[0].said, both[1].said


def _run(
    function: Callable[..., Any],
    arguments: Any,
    said: Path,
    environment: dict[str, str],
    threads: int,
) -> None:
    with said.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    function(*arguments)
