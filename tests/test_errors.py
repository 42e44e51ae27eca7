"""What systems and libraries refuse, in one line each."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from drafttrain.errors import disk_full, first_line, refused_by_system, writing
from tests.messages import said

TORN = "[enforce fail at inline_container.cc:664] . unexpected pos 192 vs 86"
FAILED = (
    "[enforce fail at inline_container.cc:862] . PytorchStreamWriter failed writing file data/0: "
    "file write failed"
)


def refused(number: int, *file: str) -> OSError:
    return OSError(number, os.strerror(number), *file)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            refused(errno.EFBIG),
            r"a file grew larger than this system allows \(\[Errno 27\].*: raise the limit "
            r"\(ulimit -f\)",
        ),
        (
            refused(errno.EFBIG, "x/y"),
            "a file grew larger than this system allows while writing x/y: raise",
        ),
        (refused(errno.ENOSPC, "x/y"), "the disk is full while writing x/y: free some space"),
        (
            refused(errno.EDQUOT, "x/y"),
            "the disk quota is used up while writing x/y: free some space",
        ),
        (refused(errno.EROFS), "the disk takes no writes any more .*: write elsewhere"),
        (refused(errno.EROFS, "x/y"), "x/y cannot be used: Read-only file system"),
        # As safetensors and torch say it.
        (
            RuntimeError("Error while serializing: I/O error: File too large (os error 27)"),
            "a file grew larger",
        ),
        (
            RuntimeError(
                "Error while serializing: I/O error: No space left on device (os error 28)"
            ),
            "the disk is full",
        ),
        (
            RuntimeError("Error while serializing: I/O error: Disk quota exceeded (os error 122)"),
            "the disk quota is used up",
        ),
        (
            RuntimeError(TORN),
            said("wiring.uncompleted") + " .*; the disk may be full, or a limit of file sizes met",
        ),
        (RuntimeError(FAILED), said("wiring.uncompleted")),
        (RuntimeError("basic_ios::clear: iostream error"), said("wiring.uncompleted")),
    ],
)
def test_what_keeps_a_file_from_being_complete(error: Exception, words: str) -> None:
    assert re.match(words, refused_by_system(error)), refused_by_system(error)
    assert refused_by_system(ValueError("unexpected position 3")) == ""


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    """Where the folder is there, a name that is not there is a fault of the program, which a
    traceback shows."""
    gone = tmp_path / "gone"
    for place, words in (
        (gone / "x", f"{gone}/x cannot be used: {gone} is gone"),
        (tmp_path / "x", ""),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            place.read_bytes()
        assert refused_by_system(caught.value) == words


def test_what_a_first_line_announces_belongs_to_it() -> None:
    assert (
        first_line(ValueError("loading failed:\n  Missing key(s): a, b.\n  more"))
        == "loading failed: Missing key(s): a, b"
    )
    assert first_line(ValueError(" one.\ntwo")) == "one" and first_line(KeyError()) == "KeyError"


def test_the_reason_wins_over_what_it_led_to() -> None:
    try:
        try:
            raise refused(errno.EFBIG, "x/y")
        finally:
            raise RuntimeError(TORN)
    except RuntimeError as error:
        assert disk_full(error).startswith(
            "a file grew larger than this system allows while writing x/y"
        )


def test_an_error_that_names_no_file_is_about_the_one_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"full\.bin"), writing(tmp_path / "full.bin"):
        raise refused(errno.ENOSPC)
    with pytest.raises(OSError, match=r"other\.bin"), writing(tmp_path / "full.bin"):
        raise refused(errno.ENOSPC, "other.bin")
