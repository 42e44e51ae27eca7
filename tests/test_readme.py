"""What the README promises: messages that the code really says, and the figures of a first run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)
    assert found, title
    return found[1]


def texts_of_the_code() -> list[str]:
    """Every string of the program; what is filled in stands as a NUL."""
    found = []
    for path in sorted((ROOT / "drafttrain").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "\0"
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def said(message: str, text: str) -> bool:
    """Do the parts of a message stand in a text, one behind the other, with something filled in
    wherever it has `...`?"""
    first, *more = message.split("...")
    at = 0
    for number, part in enumerate([first, *more]):
        part = part.strip()
        place = text.find(part, at)
        if place < 0 or (number == 0 and part and place and text[place - 1] not in "\0 "):
            return False
        at = place + len(part)
    return True


def test_messages_are_looked_for_as_they_stand() -> None:
    text = "\0 is not a conversation set (\0): make one"
    for message, right in (
        ("... is not a conversation set ...", True),
        ("... is no conversation set ...", False),
        ("... make one ... is not", False),
        ("not a conversation", True),
        ("ot a conversation", False),
    ):
        assert said(message, text) == right, message


def test_what_goes_wrong_is_said_by_the_code() -> None:
    texts = texts_of_the_code()
    rows = [line for line in section("When things go wrong").splitlines() if line.startswith("| `")]
    messages = [
        message for row in rows for message in re.findall(r"`([^`]+)`", row.split(" | ")[0])
    ]
    assert len(rows) >= 40 and len(messages) == len(set(messages)) > len(rows)
    assert [message for message in messages if not any(said(message, text) for text in texts)] == []
    assert all(re.search(r"\| .{10,} \|$", row) for row in rows), "a row without what to do"


@pytest.mark.field("F65")
def test_a_first_run_is_announced_with_its_figures() -> None:
    """How long, how much memory, which tau and speed; and the same of the whole set, so that the
    small run is not taken for it."""
    expected = section("Two commands")
    assert (
        "scripts/quickstart.sh" in expected
        and re.search(r"\d+ min", expected)
        and re.search(r"[\d.]+ GB of memory", expected)
    )
    rows = [line for line in README.splitlines() if line.startswith("| `eagle1`")][:2]
    assert len(rows) == 2 and "the whole set" in rows[0] and "scripts/quickstart.sh" in rows[1]
    assert all(
        re.search(r"\d\.\d\d \(\d\.\d\d\.\.\d\.\d\d\)", row) and re.search(r"\d\.\d\dx", row)
        for row in rows
    )
