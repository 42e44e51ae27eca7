"""Rows and settings as a package's `metrics.json` has them, and runs whose packages hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.ngram import NGram
from drafttrain.target.model import Target
from tests.drafter import make as drafters
from tests.packaging.made import packed

SETTINGS: dict[str, Any] = {
    "prompts": 4,
    "max_new_tokens": 16,
    "batch": 4,
    "speed_prompts": 2,
    "speed_new_tokens": 12,
    "split": "held_out",
    "seed": 0,
    "prompts_digest": "0123456789abcdef",
    "target_dtype": "float32",
    "device": "cpu",
    "threads": 1,
}
TRAINING = {"seconds": 100.0, "evaluation_seconds": 40.0, "supervised_tokens_seen": 5000}


def row(speedup: float | None, tau: float, tree: str = "chain 3", **more: Any) -> dict[str, Any]:
    return {
        "label": f"{tree} timed",
        "measured": "speed",
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "growth": "chain",
        "tree": tree,
        "nodes": 3,
        "depth": 3,
        "rule": "greedy",
        "tau": tau,
        "tau_interval": [tau - 0.1, tau + 0.1],
        "accepted_per_round": tau - 1,
        "accept_at": [0.5, 0.25, None],
        "accept_counts": [[10, 20], [2, 8], [0, 0]],
        "speedup": speedup,
        "speedup_interval": None if speedup is None else [speedup - 0.2, speedup + 0.2],
        "tokens_per_second": 30.0,
        "remember": 0,
        "repeated_prompts": 0,
        "plain_tokens_per_second": 20.0,
        "prompts": 2,
        "rounds": 20,
        "same_as_plain": 2,
        "guarantee": "greedy",
        **more,
    }


SLOW = [
    row(None, 9.0, "static 25", measured="acceptance", prompts=4),
    row(0.8, 1.5, "chain 4"),
    row(1.1, 1.25),
]
FAST = [row(1.6, 1.75), row(1.4, 1.9, "static 9")]
OLD = [row(1.3, 1.5)]


def write_runs(target: Target, folder: Path) -> Path:
    """Three runs with packages (fast, old, slow), a run without one (stopped), and a file."""
    (folder / "stopped" / "checkpoints").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    torch.manual_seed(0)
    eagle = drafters.make(Eagle1, target)
    metrics = {"settings": {**SETTINGS, "drafter_dtype": "float32"}, "rows": SLOW}
    config = {"init_from": "elsewhere/first/package"}
    provenance: dict[str, Any] = {"training": TRAINING, "config": config}
    packed(folder / "slow" / "package", eagle, target, metrics=metrics, provenance=provenance)
    metrics = {"settings": {**SETTINGS, "drafter_dtype": None}, "rows": FAST}
    packed(
        folder / "fast" / "package",
        drafters.make(NGram, target),
        target,
        metrics=metrics,
        provenance={"training": None},
    )
    packed(folder / "old" / "package", eagle, target, metrics={"settings": SETTINGS, "rows": OLD})
    return folder
