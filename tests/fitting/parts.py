"""What several tests of fits share: settings that make one small, and what it leaves."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain import fit
from drafttrain.reporting.progress import ConsoleProgress
from drafttrain.training.checkpoint import read_checkpoint

QUICK = [
    "final.prompts=2",
    "final.max_new_tokens=6",
    "final.speed_prompts=1",
    "final.speed_new_tokens=6",
]
UNMEASURED = [
    "eval.every=null",
    "eval.prompts=0",
    "eval.sim_rows=0",
    "final.prompts=0",
    "final.speed_prompts=0",
]


def words(folder: Path, run: Path, *more: str) -> list[str]:
    return ["experiment=smoke", f"data.path={folder}", f"run_dir={run}", *more]


def refusal(capsys: pytest.CaptureFixture[str], words: Sequence[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        fit.main(words)
    assert stopped.value.code == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("drafttrain.fit: ") and "\n" not in said, said
    return said


def weights(run: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return read_checkpoint(run / "checkpoints" / f"{name}.ckpt")["weights"]


class Signal(ConsoleProgress):
    """Sends this process a signal after update 7."""

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if args[1].updates == 7:
            signal.raise_signal(signal.SIGTERM)
