"""The API reference: everything in it says what it is, and it builds without a warning."""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scripts import docs

KINDS = (staticmethod, classmethod, property, functools.cached_property)


def undocumented(module: ModuleType) -> Iterator[str]:
    """Names of what is public and defined in a module, its methods too, without a docstring of its
    own or of what it overrides."""
    if not module.__doc__:
        yield module.__name__
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value) and not inspect.getdoc(value):
            yield name
        if inspect.isclass(value):
            # Without one, dataclasses make a docstring of their signature, and enums have that of
            # their kind.
            own = value.__dict__.get("__doc__")
            if not own or own.startswith(f"{name}(") or own == enum.Enum.__doc__:
                yield name
            yield from (f"{name}.{method}" for method in methods(value))


def methods(kind: type) -> Iterator[str]:
    for name, value in vars(kind).items():
        if name.startswith("_") or not (inspect.isfunction(value) or isinstance(value, KINDS)):
            continue
        if not any(
            inspect.getdoc(inspect.getattr_static(base, name, None))
            for base in kind.__mro__
            if name in vars(base)
        ):
            yield name


@pytest.mark.parametrize("name", docs.API)
def test_everything_documented_says_what_it_is(name: str) -> None:
    assert list(undocumented(importlib.import_module(name))) == []


def test_what_says_nothing_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "from dataclasses import dataclass",
        "def silent(): ...",
        "@dataclass",
        "class Plain:",
        "    x: int = 0",
    ]
    lines += [
        "class Told:",
        "    'Is told.'",
        "    def said(self):",
        "        'Said.'",
        "    def unsaid(self): ...",
    ]
    lines += ["class Later(Told):", "    'Is told too.'", "    def said(self): ..."]
    module = written(tmp_path, monkeypatch, "half_told", *lines)
    assert list(undocumented(module)) == ["half_told", "silent", "Plain", "Told.unsaid"]


def written(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, *lines: str) -> Any:
    (folder / f"{name}.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module(name)


def test_the_reference_builds_without_a_warning(tmp_path: Path) -> None:
    assert docs.build(tmp_path) == []
    pages = {str(page.relative_to(tmp_path)) for page in tmp_path.rglob("*.html")}
    assert pages == {"index.html", *(f"{name.replace('.', '/')}.html" for name in docs.API)}
    page = (tmp_path / "drafttrain" / "decoding" / "loop.html").read_text(encoding="utf-8")
    assert 'id="decode"' in page and "exact limit per row, a stop token included" in page
    assert 'id="load"' in (tmp_path / "drafttrain.html").read_text(encoding="utf-8")


def test_an_annotation_that_cannot_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        "'A module.'",
        "from __future__ import annotations",
        "def lost(x: Nowhere) -> int:",
        "    'Lost.'",
    ]
    written(tmp_path, monkeypatch, "half_typed", *lines)
    monkeypatch.setattr(docs, "API", ("half_typed",))
    assert any("Nowhere" in line for line in docs.build(tmp_path / "out"))
