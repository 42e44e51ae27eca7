"""The one kind of error a person can mend: it says what was given, what is needed and how to get it; and what systems refuse."""

from __future__ import annotations

import errno
from collections.abc import Iterator


class InputError(Exception):
    """Wrong input, settings or files. Doors print the message alone and leave with exit code 2."""


_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR}


def refused_by_system(error: BaseException) -> str:
    """A message if the error, or one behind it, says that disk or memory are full or a file may not be used; else nothing."""
    return disk_full(error) or _file_refused(error) or _memory_full(error)


def disk_full(error: BaseException) -> str:
    """A message if the error, or one behind it, says that the disk is full; else nothing."""
    for one in _behind(error):
        said = str(one)
        number = one.errno if isinstance(one, OSError) else None
        where = f" while writing {one.filename}" if isinstance(one, OSError) and one.filename else f" ({first_line(one)})"
        if number == errno.EFBIG or "File too large" in said:
            return f"a file grew larger than this system allows{where}: raise the limit (ulimit -f), or write elsewhere (run_dir=)"
        full = number in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left on device" in said or "PytorchStreamWriter failed writing" in said:
            return f"the disk is full{where}: free some space, or write elsewhere (run_dir=, cache folders)"
    return ""


def _file_refused(error: BaseException) -> str:
    one: BaseException | None = error
    while one is not None:
        if isinstance(one, OSError) and one.errno in _REFUSED and one.filename is not None:
            return f"{one.filename} cannot be used: {one.strerror}"
        one = one.__cause__
    return ""


def _memory_full(error: BaseException) -> str:
    for one in _behind(error):
        # By name, since torch is not imported for it.
        if isinstance(one, MemoryError) or type(one).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(one):
            return (
                f"memory is full ({first_line(one)[:160]}): fewer or shorter rows at a time (trainer.batch_tokens, batch, slots), "
                "a smaller model, or more memory"
            )
    return ""


def _behind(error: BaseException) -> Iterator[BaseException]:
    """The error, then what led to it."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


def panicked(error: BaseException) -> bool:
    """Did a library written in Rust, such as `tokenizers`, break off? Its error is no Exception."""
    return type(error).__name__ == "PanicException"


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
