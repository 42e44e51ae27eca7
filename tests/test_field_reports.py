"""Every report of a fault has a test that carries its number."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.field_reports import REPORTS

TESTS = Path(__file__).resolve().parent


def marked() -> dict[str, list[str]]:
    """{number: tests that carry it}"""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body if "mark.field" in text else ():
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.field":
                    for number in mark.args:
                        assert isinstance(number, ast.Constant) and node.name.startswith("test_"), (
                            path,
                            node.name,
                        )
                        found.setdefault(str(number.value), []).append(f"{path.stem}.{node.name}")
    return found


def test_every_report_has_a_test() -> None:
    numbers = [f"F{number:02d}" for number in range(1, 103)]
    assert list(REPORTS) == numbers and all(
        brought and happens for brought, happens in REPORTS.values()
    )
    found = marked()
    assert sorted(found.keys() - REPORTS.keys()) == [], "numbers that no report has"
    assert [number for number in numbers if number not in found] == [], "reports without a test"
