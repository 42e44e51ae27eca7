"""Several processes of a door that fill one folder: whether they may, and one dtype of the target
for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig

from drafttrain.data.growing import GrowingFolder
from drafttrain.errors import InputError
from drafttrain.processes import await_word, give_word, on_another_machine, rank
from drafttrain.target.load import resolve_device, resolve_dtype


def admit(check: Callable[[], Any]) -> None:
    """Look at the folder; the other processes hear why rank 0 was refused."""
    try:
        check()
    except InputError as error:
        if rank() == 0:
            give_word(str(error), refuse=True)
        raise


def enter(folder: GrowingFolder, cfg: DictConfig, say: Callable[[str], None]) -> Any:
    """Take this process's journal; every process then uses the dtype that rank 0 found fastest or
    recorded earlier."""
    settle = cfg.target.get("dtype") == "auto"
    if rank() == 0:
        try:
            dtype = ""
            if settle:
                there = folder.recorded()
                if there is not None:
                    dtype = there["target"]["fingerprint"].get("dtype", "")
                else:
                    found = resolve_dtype(
                        "auto", resolve_device(cfg.target.get("device", "auto")), "throughput"
                    )
                    dtype = str(found).removeprefix("torch.")
            folder.create()
            journal = folder.open_journal(0)
        except InputError as error:
            give_word(str(error), refuse=True)
            raise
        give_word(dtype)
    else:
        if on_another_machine():
            dtype = folder.await_settings(say)["target"]["fingerprint"].get("dtype", "")
        else:
            dtype = await_word("the target's dtype")
        journal = folder.open_journal(rank())
    if settle and dtype:
        cfg.target.dtype = dtype
    return journal
