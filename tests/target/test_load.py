"""Loading a target changes no settings of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from transformers.utils import logging as theirs

from drafttrain.errors import InputError
from drafttrain.target import load
from drafttrain.target.model import Target
from tests.helpers import save_target
from tests.messages import said

AS_TESTED: dict[str, Any] = {"dtype": "float32", "device": "cpu", "attention": "sdpa"}


def test_no_bars_of_transformers_and_its_settings_as_found(
    target: Target,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(theirs, "_tqdm_active", True)
    folder = save_target(target, tmp_path / "target")
    AutoModelForCausalLM.from_pretrained(folder)
    assert "Loading weights" in capfd.readouterr().err, "by itself it shows a bar"
    seen: list[Any] = []

    def own(factory: Any, args: Any, settings: Any) -> Any:
        seen.append(settings)
        return factory(*args, **settings)

    before = theirs.set_tqdm_hook(own)
    try:
        load.hf(str(folder), **AS_TESTED)
        (folder / "model.safetensors").write_bytes(b"nothing")
        with pytest.raises(InputError, match=said("target.not_loaded")):
            load.hf(str(folder), **AS_TESTED)
    finally:
        assert theirs.set_tqdm_hook(before) is own
    assert "Loading weights" not in capfd.readouterr().err
    assert not seen and theirs.is_progress_bar_enabled()
