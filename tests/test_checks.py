"""Numbers, switches and paths as settings may have them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from drafttrain.checks import integer, number, path_of, replay_words, switch
from drafttrain.errors import InputError
from tests.messages import said


def test_integers() -> None:
    for value in (2, 7, (1 << 31) - 1):
        integer("k", value, 2)
    integer("k", None, null="no limit")
    for value in (1, 1.0, 2.5, True, "2", None, [], math.nan, math.inf):
        with pytest.raises(InputError, match=rf"^k=.*: {said('wiring.integer')} of at least 2$"):
            integer("k", value, 2)
    with pytest.raises(InputError, match=f"{said('wiring.integer')} from 2 to 2147483647"):
        integer("k", 10**30, 2)
    with pytest.raises(
        InputError, match=f"^k=9: {said('wiring.integer')} from 0 to 8, or null for none"
    ):
        integer("k", 9, 0, 8, null="none")


def test_numbers() -> None:
    for value in (0, 0.0, 3, 2.5, 1e300):
        number("lr", value)
    number("lr", None, null="none")
    for value in (-1, -0.1, math.nan, math.inf, 10**400, True, "1", None, [1]):
        with pytest.raises(InputError, match=f"{said('wiring.number')} of at least 0"):
            number("lr", value)
    with pytest.raises(InputError, match=f"^lr=0: {said('wiring.number')} above 0"):
        number("lr", 0, above=0)


def test_switches() -> None:
    switch("a", True)
    for value in ("no", "false", 0, 1, None):
        with pytest.raises(InputError, match=said("wiring.switch")):
            switch("a", value)


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert path_of("out", "~/a b/ü") == tmp_path / "a b" / "ü"
    assert path_of("out", tmp_path / "none" / "deeper") == tmp_path / "none" / "deeper"
    (tmp_path / "file").touch()
    assert path_of("out", str(tmp_path / "file" / "below"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for given, fault in (
        (2024, said("wiring.quotes")),
        ("", said("wiring.path")),
        (None, said("wiring.path")),
        ("~nobody-of-that-name/x", said("wiring.no_path")),
        ("a\0b", said("wiring.no_path")),
        ("a\udcff", said("wiring.not_utf8")),
        ("x" * 5000, "File name too long"),
        (tmp_path / "loop", "symbolic links"),
    ):
        with pytest.raises(InputError, match=f"^out=.*{fault}"):
            path_of("out", given)


def test_answers_are_there_and_read(tmp_path: Path) -> None:
    """Neighbours: a file, a set by its name, a folder that is not there; a sampled run, with and
    without answers; replay that is off."""
    (tmp_path / "file").touch()
    for folder in (None, tmp_path, str(tmp_path)):
        replay_words(True, folder)
        replay_words(True, folder, greedy=True)
    replay_words(True, None, greedy=False)
    replay_words(False, None)
    for given, settings, fault in (
        (tmp_path, {"greedy": False}, "would not be read"),
        (tmp_path / "none", {}, "is no folder"),
        (tmp_path / "file", {}, "is no folder"),
        ("builtin:smollm2", {}, "is no folder"),
    ):
        with pytest.raises(InputError, match=f"^eval.answers=.*{fault}"):
            replay_words(True, given, "eval.", **settings)
    with pytest.raises(InputError, match="leave one of them out"):
        replay_words(False, tmp_path)
