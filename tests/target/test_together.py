"""One dtype of the target for all that fill a folder, and the one switch over what auto means."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafttrain.data.folder import SetFolder
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.speculator import Speculator
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.errors import InputError
from drafttrain.target.load import AUTO_DTYPE_VARIABLE, resolve_dtype, tiny
from drafttrain.target.together import auto_dtype, enter
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_variable_decides_what_auto_means(
    dtype: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(AUTO_DTYPE_VARIABLE, dtype)
    for work in ("decode", "throughput"):
        assert resolve_dtype("auto", torch.device(device), work) == getattr(torch, dtype)
    assert auto_dtype(device) == dtype
    assert resolve_dtype("float16", torch.device(device), "decode") == torch.float16


def test_without_the_variable_auto_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AUTO_DTYPE_VARIABLE, raising=False)
    seconds = {torch.float32: 2.0, torch.bfloat16: 1.0}
    monkeypatch.setattr("drafttrain.target.load._seconds", lambda dtype, _: seconds[dtype])
    assert auto_dtype("cpu") == auto_dtype("meta") == "bfloat16"
    seconds[torch.float32] = 0.5
    assert auto_dtype("cpu") == "float32" and auto_dtype("meta") == "bfloat16"


def test_another_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AUTO_DTYPE_VARIABLE, "float16")
    with pytest.raises(InputError, match=AUTO_DTYPE_VARIABLE) as caught:
        auto_dtype("cpu")
    assert "\n" not in str(caught.value)


def test_a_folder_keeps_the_dtype_that_it_was_started_in(tmp_path: Path) -> None:
    found = ["bfloat16", "float32"]
    folder = SetFolder(tmp_path / "set")
    journal, dtype = enter(folder, lambda: found.pop(0), print)
    assert dtype == {"dtype": "bfloat16"}
    folder.record({"target": {"fingerprint": {"dtype": "bfloat16"}}, "prompts": {}, "writing": {}})
    journal.close()
    journal, dtype = enter(folder, lambda: found.pop(0), print)
    assert dtype == {"dtype": "bfloat16"} and found == ["float32"]
    journal.close()
    journal, dtype = enter(folder, None, print)
    assert dtype == {}
    journal.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_variable_decides_what_auto_means_of_a_drafter(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(AUTO_DTYPE_VARIABLE, str(dtype).removeprefix("torch."))
    target = tiny(width=32, layers=2)
    drafter = drafters.make(Eagle1, target).eval()
    decoding = Speculator(target, drafter, Plan(Tree.chain(2))).drafter
    assert {p.dtype for p in decoding.parameters() if p.dim() > 1} == {dtype}
    named = Speculator(target, drafter, Plan(Tree.chain(2)), dtype="float32").drafter
    assert {p.dtype for p in named.parameters()} == {torch.float32}
