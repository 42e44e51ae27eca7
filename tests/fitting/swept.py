"""What tests of sweeps share: their words, and what they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drafttrain.fitting import shared
from drafttrain.fitting.book import BOOK
from drafttrain.wiring.sweeps import Sweep, sweep_of
from tests.fitting.parts import words

NOTHING = ["eval.sim_rows=0", "eval.speed_prompts=0", "final.prompts=0", "final.speed_prompts=0"]
SMALL = [*NOTHING, "eval.prompts=2", "eval.max_new_tokens=4", "trainer.max_steps=8"]
"""Of runs that are evaluated twice."""
RATES, WEIGHTS = "optim.lr=1e-3,2e-2", "drafter.regression=1,10"
DRAWN = "optim.lr=tag(log,interval(1e-4,1e-1))"
BARE = [*SMALL, "trainer.max_steps=3", "eval.every=null", "eval.prompts=1"]
"""Of runs whose weights are looked at."""


def swept(folder: Path, run: Path, *more: str) -> list[str]:
    return ["-m", *words(folder, run, *SMALL, *more)]


def rows(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / BOOK).read_text())["runs"]
    return found


def sweep(*words: str, door: str = "fit") -> Sweep:
    return sweep_of(door, ["experiment=smoke", "data.path=x", *words])


def chosen(*words: str) -> list[tuple[str, ...]]:
    return list(sweep(*words).combinations())


def count(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[Any]:
    """Calls of a function, wherever it was imported to."""
    calls, real = list[Any](), getattr(module, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return real(*args, **kwargs)

    for where in (module, shared):
        if getattr(where, name, None) is real:
            monkeypatch.setattr(where, name, counted)
    return calls
