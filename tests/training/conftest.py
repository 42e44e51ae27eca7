from __future__ import annotations

from pathlib import Path

import pytest

from drafttrain.data.datamodule import ConversationData
from drafttrain.target.model import Target
from tests.training.parts import tiny, write_tiny_set


@pytest.fixture(scope="session")
def target() -> Target:
    return tiny()


@pytest.fixture(scope="session")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_set(target, tmp_path_factory.mktemp("set"))


@pytest.fixture(scope="session")
def data(folder: Path) -> ConversationData:
    return ConversationData(folder)


@pytest.fixture(scope="session")
def held_out(folder: Path) -> ConversationData:
    return ConversationData(folder, split="held_out")
