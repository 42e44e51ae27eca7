"""Several processes of a door that fill one folder: whether they may, and one dtype of the target
for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def auto_dtype(device: str) -> str:
    """What dtype=auto comes out as on a device, for work on many positions at once."""
    found = resolve_dtype("auto", resolve_device(device), "throughput")
    return str(found).removeprefix("torch.")


def enter(
    folder: GrowingFolder, find_dtype: Callable[[], str] | None, say: Callable[[str], None]
) -> tuple[Any, dict[str, str]]:
    """Take this process's journal, and settle on one dtype of the target for all processes: the one
    that the folder's work was recorded with, else the one that rank 0 finds.

    Args:
        find_dtype: names the dtype to start with, on rank 0; None where the target's dtype was
            given, so that there is nothing to settle.
    Returns: the journal, and the arguments to load the target with: dtype, or nothing.
    """
    if rank() == 0:
        try:
            dtype = _settled(folder, find_dtype)
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
    return journal, {"dtype": dtype} if find_dtype is not None and dtype else {}


def _settled(folder: GrowingFolder, find_dtype: Callable[[], str] | None) -> str:
    """Empty if there is nothing to settle, or if what is there does not name its dtype."""
    if find_dtype is None:
        return ""
    there = folder.recorded()
    if there is None:
        return find_dtype()
    dtype: str = there["target"]["fingerprint"].get("dtype", "")
    return dtype
