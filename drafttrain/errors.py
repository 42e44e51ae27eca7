"""The one kind of error a person can mend: it says what was given, what is needed and how to get it; and the full disk."""

from __future__ import annotations

import errno


class InputError(Exception):
    """Wrong input, settings or files. Doors print the message alone and leave with exit code 2."""


def disk_full(error: BaseException) -> str:
    """A message if the error, or one behind it, says that the disk is full; else nothing."""
    seen: BaseException | None = error
    while seen is not None:
        full = isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT)
        said = str(seen)
        if full or "No space left on device" in said or "PytorchStreamWriter failed writing" in said:
            where = f" while writing {seen.filename}" if isinstance(seen, OSError) and seen.filename else f" ({first_line(seen)})"
            return f"the disk is full{where}: free some space, or write elsewhere (run_dir=, cache folders)"
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return ""


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
