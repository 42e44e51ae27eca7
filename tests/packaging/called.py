"""Calls of transformers with a package."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own for the code that transformers copies; drafttrain counts as installed."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    try:
        importlib.metadata.version("drafttrain")
    except importlib.metadata.PackageNotFoundError:
        facts = tmp_path / "site" / "drafttrain-0.0.0.dist-info"
        facts.mkdir(parents=True)
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: drafttrain\nVersion: 0.0.0\n")
        monkeypatch.syspath_prepend(str(facts.parent))


def with_package(model: Any, package: Path, ids: Any, **settings: Any) -> Any:
    return model.generate(
        torch.as_tensor(ids), custom_generate=str(package), trust_remote_code=True, **settings
    )
