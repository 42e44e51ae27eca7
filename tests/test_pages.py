"""What the pages promise: messages of the code, figures of a first run, commands and links."""

from __future__ import annotations

import ast
import functools
import re
import shlex
from pathlib import Path

import pytest

from drafttrain.wiring.composing import compose
from drafttrain.wiring.sweeps import sweep_of

ROOT = Path(__file__).resolve().parent.parent
LONGEST_README = 170
LONGEST_LINE = 100
FOLDERS = ("drafttrain", "scripts", "notebooks")
ROOMS = sorted(path for name in FOLDERS for path in (ROOT / name).rglob("README.md"))
FILES = (ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOMS)
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
FRONT, MAP = "README.md", "drafttrain/README.md"
CHOICES = re.compile(r"(?<![\w.@])(experiment|drafter|tree|target|data|features|logger)=(\w+)")
COMMAND = re.compile(r"-m drafttrain\.(\w+)([^`\n]*)")


def section(page: str, title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGES[page], re.DOTALL | re.MULTILINE)
    assert found, title
    return found[1]


def text_of(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "\0"


def texts_of_the_code() -> list[str]:
    """Every string of the program; what is filled in is a NUL."""
    found = []
    for path in sorted((ROOT / "drafttrain").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(map(text_of, node.values)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def said(message: str, text: str) -> bool:
    """Has a text the parts of a message in this order, with anything in the place of `...`?"""
    first, *more = message.split("...")
    at = 0
    for number, part in enumerate([first, *more]):
        part = part.strip()
        place = text.find(part, at)
        if place < 0 or (number == 0 and part and place and text[place - 1] not in "\0 "):
            return False
        at = place + len(part)
    return True


def test_a_message_is_found_with_its_parts_in_order() -> None:
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
    lines = section(MAP, "When things go wrong").splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    cells = [row.split(" | ")[0] for row in rows]
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) == len(set(messages)) >= len(rows) > 50
    lost = [message for message in messages if not any(said(message, text) for text in texts)]
    assert lost == []
    assert all(re.search(r"\| .{10,} \|$", row) for row in rows), "a row without what to do"


@pytest.mark.field("F65")
def test_a_first_run_is_announced_with_its_figures() -> None:
    """Duration, memory, tau and speed, next to those of the full set: two different runs."""
    expected = section(FRONT, "Two commands")
    assert "scripts/quickstart.sh" in expected
    assert re.search(r"\d+\s+minutes", expected) and re.search(r"[\d.]+ GB of memory", expected)
    tau = r"\d\.\d\d \(\d\.\d\d\.\.\d\.\d\d\)"
    measured = rf"^\| \d+ .*prompts .*\| {tau} \| {tau} \| {tau} \|$"
    assert len(re.findall(measured, PAGES[FRONT], re.MULTILINE)) == 2
    for name in ("eagle1", "quickstart"):
        lines = PAGES["drafttrain/drafter/README.md"].splitlines()
        row = next(line for line in lines if line.startswith(f"| `{name}` | chain"))
        assert re.search(rf"\d\.\d\dx \(.*\) \| {tau} \|", row) and "min" in row


def test_pages_are_short_enough_to_read() -> None:
    assert len(PAGES[FRONT].splitlines()) <= LONGEST_README
    lines = [(page, line) for page, text in PAGES.items() for line in text.splitlines()]
    assert [(page, line) for page, line in lines if len(line) > LONGEST_LINE] == []


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def rooms_imported(room: Path) -> set[str]:
    """Names of the rooms that a room's files import from, at any place."""
    found = set()
    for path in room.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("drafttrain"):
                found |= {f"{node.module}.{name.name}".split(".")[1] for name in node.names}
    return {name for name in found if (ROOT / "drafttrain" / name).is_dir()} - {room.name}


def test_rooms_import_only_from_rooms_above_them_on_the_map() -> None:
    lines = re.findall(r"^\| \[?`\w+/`.*?\|", section(MAP, "Rooms"), re.MULTILINE)
    order = [name for line in lines for name in re.findall(r"`(\w+)/`", line)]
    rooms = {path.parent.name for path in (ROOT / "drafttrain").glob("*/__init__.py")}
    assert len(order) == len(set(order)) and set(order) == rooms
    for number, name in enumerate(order):
        assert rooms_imported(ROOT / "drafttrain" / name) <= set(order[:number]), name


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", PAGES[page])
    links += re.findall(r"^\[\w+\]: (\S+)", PAGES[page], re.MULTILINE)
    for link in links:
        if not link.startswith("https://"):
            path, _, title = link.partition("#")
            place = (ROOT / page).parent / path
            assert place.is_file() and (not title or title in anchors(place)), link


def test_every_page_is_linked_from_the_front() -> None:
    assert [page for page in PAGES if page != FRONT and f"({page})" not in PAGES[FRONT]] == []


def test_every_drafter_and_tree_has_a_row() -> None:
    for group in ("drafter", "tree"):
        page = PAGES[f"drafttrain/{group}/README.md"]
        rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
        assert {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")} <= set(rows)


def commands(page: str) -> list[tuple[str, list[str]]]:
    """(door, words) of each command of a page, with an x for whatever is left to the reader."""
    text = re.sub(r"\s*\\\n\s*", " ", PAGES[page])
    text = re.sub(r"(?<!`)`[^`]+`(?!`)", lambda found: " ".join(found[0].split()), text)
    named = COMMAND.findall(re.sub(r"<[^<>\n]*>", "x", text))
    return [(door, shlex.split(words.rstrip("& "), comments=True)) for door, words in named]


@functools.cache
def composed(door: str, *words: str) -> None:
    texts = ("prompt",) if door == "synthesize" else ("prompt", "prompts")
    compose(door, words, text=texts, check_missing=False)


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_choices_exist(page: str) -> None:
    """A door and its settings are composed as the command would, without running anything."""
    for group, choice in CHOICES.findall(PAGES[page]):
        assert (ROOT / "conf" / group / f"{choice}.yaml").is_file(), f"{group}={choice}"
    for door, words in commands(page):
        assert (ROOT / "conf" / f"{door}.yaml").is_file(), door
        settings = [word for word in words if "=" in word]
        if "-m" in words:
            sweep_of(door, settings, check_missing=False)
        elif "--config-dir" not in words:
            composed(door, *settings)


def test_commands_are_found_as_they_are_written() -> None:
    found = commands("drafttrain/training/README.md")
    assert ("fit", ["experiment=medusa2", "init_from=runs/heads/package"]) in found
    further = ["joint.lambda_0=1.0", "optim.lr=1e-3", "joint.head_lr_factor=2.0"]
    assert ("fit", ["experiment=medusa2", *further]) in found
