"""The page as a browser without a network shows it: scripts/browser.sh installs one and runs
this."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drafttrain import report
from drafttrain.reporting.page.document import page, title_of, write_page
from drafttrain.target import load
from tests.packaging.measured import write_runs
from tests.reporting.recorded import record_of, recorded

pytestmark = pytest.mark.browser
LOOK = Path(__file__).resolve().parents[2] / "scripts" / "look.py"
WIDTHS = (390, 1280)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of a run with hostile texts, and one of several runs."""
    folder, target = tmp_path_factory.mktemp("browser"), load.tiny()
    record = record_of(recorded(folder, target))
    write_page(folder / "one.html", page(title_of([record]), [record]))
    report.main([f"runs={write_runs(target, folder / 'runs')}", f"run_dir={folder / 'out'}"])
    return {"one": folder / "one.html", "several": folder / "out" / report.PAGE}


def seen(path: Path, *more: str) -> list[dict[str, Any]]:
    python = os.environ.get("DRAFTTRAIN_BROWSER_PYTHON", sys.executable)
    words = [python, str(LOOK), str(path), *(f"--width={width}" for width in WIDTHS), *more]
    found = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]
    return [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]


def luminance(colour: str) -> float:
    """Relative, as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("name", ["one", "several"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_all_of_it_and_asks_for_nothing(
    pages: dict[str, Path], name: str, scheme: str
) -> None:
    found = seen(pages[name], *(["--dark"] if scheme == "dark" else []))
    assert [one["width"] for one in found] == [*WIDTHS]
    for one in found:
        assert one["loaded"] is True and one["console"] == []
        assert one["requests"] == [one["page"]] and one["resources"] == [] and one["active"] == 0
        assert one["scroll_width"] <= one["width"] and one["too_wide"] == []
        assert len(one["drawings"]) > 8 and all(
            side > 0 for boxes in one["drawings"] for box in boxes for side in box
        )
        assert one["smallest_letter"] >= 8.5 and one["text"] > 3000
        ink, paper = map(luminance, one["colours"])
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 7
        assert (paper < 0.1) == (scheme == "dark")
