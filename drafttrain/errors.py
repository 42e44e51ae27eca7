"""The one kind of error a person can mend: it says what was given, what is needed and how to get
it; and what systems refuse."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence

try:
    import resource
except ImportError:  # Not on Windows.
    resource = None  # type: ignore[assignment]


class InputError(Exception):
    """Wrong input, settings or files. Doors print only the message and leave with exit code 2."""


class NotFinite(ValueError):
    """Logits or weights that no token can be chosen from; who knows the text makes an InputError of
    it, see `nn.finite`.

    Args:
        ids: the text that they follow, where the one who notices knows it.
    """

    def __init__(self, said: str, ids: Sequence[int] = ()) -> None:
        super().__init__(said)
        self.ids = list(ids)


class LostCompanion(Exception):
    """Another process of the run is gone or has failed. Doors print only the message and leave with
    exit code 1."""


def room(size: float) -> str:
    """Bytes as 512 bytes, 3.2 MB or 1.05 TB."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} bytes" if units[0] == "bytes" else f"{size:.3g} {units[0]}"


_REFUSED = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
}


def refused_by_system(error: BaseException) -> str:
    """A message if the error, or what led to it, says that disk or memory are full, or that a file
    or a port may not be used; else nothing."""
    return disk_full(error) or _file_refused(error) or _memory_full(error) or _address_taken(error)


_FREE = "free some space, or write elsewhere (run_dir=, cache folders)"
_UNWRITTEN = {
    errno.EFBIG: (
        "a file grew larger than this system allows",
        "raise the limit (ulimit -f), or write elsewhere (run_dir=)",
    ),
    errno.ENOSPC: ("the disk is full", _FREE),
    errno.EDQUOT: ("the disk quota is used up", _FREE),
    errno.EROFS: ("the disk takes no writes any more", "write elsewhere (run_dir=, cache folders)"),
}
"""What keeps an open file from being written completely, and what to do about it."""
_TORCH = ("PytorchStreamWriter failed", "unexpected pos ", "iostream error")
"""What torch says when its writer of archives could not write; it does not say why."""


def disk_full(error: BaseException) -> str:
    """A message if the error, or what led to it, says that a file could not be written completely;
    else nothing.

    The disk is full or takes no writes, a quota is used up, or the file is too large.
    """
    for one in _chain(error):
        number, named = _number_of(one), one.filename if isinstance(one, OSError) else None
        if number is not None and not (number == errno.EROFS and named):
            what, remedy = _UNWRITTEN[number]
            return f"{what}{_where(one, named)}{_room_at(one, number, named)}: {remedy}"
    for one in _chain(error):
        if any(words in str(one) for words in _TORCH):
            return (
                f"a file could not be written completely{_where(one)}; the disk may be full, or a "
                f"limit of file sizes met: {_FREE}"
            )
    return ""


def _number_of(error: BaseException) -> int | None:
    """Of `_UNWRITTEN`; None for another error. Libraries in other languages pass only the system's
    words."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in _UNWRITTEN else None
    return next((known for known in _UNWRITTEN if os.strerror(known) in str(error)), None)


def _where(error: BaseException, file: object = None) -> str:
    return f" while writing {file}" if file else f" ({first_line(error)})"


def _room_at(error: BaseException, number: int, file: object) -> str:
    """How much the file needs, and how much there is, as far as that is known."""
    found = []
    needed = getattr(error, "needed", None)
    if needed is not None:
        found.append(f"it needs {room(needed)}")
    if number == errno.EFBIG and resource is not None:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        found += [] if limit == resource.RLIM_INFINITY else [f"{room(limit)} are allowed"]
    elif isinstance(file, str):
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(os.path.dirname(file) or ".").free
            found.append(f"{room(free)} are free on that disk")
    return f" ({', '.join(found)})" if found else ""


@contextlib.contextmanager
def writing(path: os.PathLike[str] | str, needed: int | None = None) -> Iterator[None]:
    """While a file is written: what says that it could not be, in the system's words, names it.

    Args:
        needed: bytes of it, for the message.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, InputError):
            raise
        number, named = _number_of(error), os.fspath(path)
        if not isinstance(error, OSError) and number is not None:
            raise _needing(OSError(number, os.strerror(number), named), needed) from error
        if isinstance(error, OSError) and error.filename is None:
            error.filename = named
            _needing(error, needed)
        raise


def _needing(error: OSError, needed: int | None) -> OSError:
    if needed is not None:
        error.needed = needed  # type: ignore[attr-defined]
    return error


def refuse_full_disk(
    folder: os.PathLike[str] | str, needed: float, *, what: str, remedy: str, reserve: int = 0
) -> None:
    """Raise InputError unless a disk has room for this many bytes more.

    Args:
        folder: on the disk; it exists.
        what: is to be written, as the message begins.
        reserve: bytes that are left free in any case.
    """
    free = shutil.disk_usage(folder).free
    if free < needed + reserve:
        kept = f", {room(reserve)} of a disk are kept in reserve" if reserve else ""
        raise InputError(
            f"{what}: the disk of {os.fspath(folder)} has no room for {room(needed)} more "
            f"({room(free)} are free{kept}). {remedy}"
        )


def _file_refused(error: BaseException) -> str:
    one: BaseException | None = error
    while one is not None:
        if isinstance(one, OSError) and one.errno in _REFUSED and one.filename is not None:
            return f"{one.filename} cannot be used: {one.strerror}"
        if isinstance(one, FileNotFoundError) and isinstance(one.filename, str):
            folder = os.path.dirname(one.filename) or "."
            # A wrong name in a folder that is there would be a fault of this program.
            if not os.path.exists(folder):
                return f"{one.filename} cannot be used: {folder} is gone"
        one = one.__cause__
    return ""


def _address_taken(error: BaseException) -> str:
    for one in _chain(error):
        number = one.errno if isinstance(one, OSError) else None
        if number == errno.EADDRINUSE or "EADDRINUSE" in str(one):
            return (
                f"a port is taken ({first_line(one)[:160]}): give another MASTER_PORT, the same to "
                "every process"
            )
    return ""


def _memory_full(error: BaseException) -> str:
    for one in _chain(error):
        # By name, since torch is not imported for it.
        if (
            isinstance(one, MemoryError)
            or type(one).__name__ == "OutOfMemoryError"
            or "can't allocate memory" in str(one)
        ):
            return (
                f"memory is full ({first_line(one)[:160]}): fewer or shorter rows at a time "
                "(trainer.batch_tokens, batch, slots), a smaller model, or more memory"
            )
    return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then what led to it."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


def panicked(error: BaseException) -> bool:
    """Did a library written in Rust, such as `tokenizers`, break off? Its error is no Exception."""
    return type(error).__name__ == "PanicException"


_CONTROLS = re.compile(r"[\x00-\x1f\x7f\x80-\x9f]+")


def one_line(text: str) -> str:
    """A text that may quote anything, as one line for a terminal: names in files may hold line ends
    and control characters."""
    return _CONTROLS.sub(" ", writable(text))


def writable(text: str) -> str:
    """A text that may quote anything, as UTF-8 can hold it: half of a surrogate pair becomes its
    escape, which JSON reads as the very same."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def first_line(error: BaseException) -> str:
    """What an error says, as far as it fits into a sentence; its class where it says nothing."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):  # What it announces is on the next one.
        lines[0] = f"{lines[0]} {lines[1][:200]}"
    return lines[0].rstrip(".") if lines else type(error).__name__
