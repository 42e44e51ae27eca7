from __future__ import annotations

from pathlib import Path

import pytest

from drafttrain.target import load
from drafttrain.target.model import Target
from tests.training.parts import write_tiny_set


@pytest.fixture(scope="module")
def target() -> Target:
    return load.tiny()


@pytest.fixture(scope="module")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some rows name their kind of task."""
    kinds = {row: "maths" for row in range(0, 24, 2)}
    return write_tiny_set(target, tmp_path_factory.mktemp("set"), categories=kinds)
