"""A run's folder with everything that a page shows, and hostile texts that a browser must not
execute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.packaging.collection import read_entries
from drafttrain.reporting.loggers import CsvLogger
from drafttrain.reporting.records import NOTED, Record, read_record
from drafttrain.target.model import Target
from tests.drafter import make as drafters
from tests.packaging.made import packed
from tests.packaging.measured import SETTINGS, TRAINING, row

EVIL = '</script><img src=x onerror="hit()"><!-- \'"> &lt;'
"""As a prompt, an answer, a label, a command, a setting."""
NAME = 'run"><img src=x onerror=hit()> é'
"""As a folder's name."""
STAGES = {"prefill": 0.5, "draft": 1.0, "verify": 2.25, "host": 0.25}
TREE = [
    {"parent": parent, "kept": kept, "offered": offered}
    for parent, kept, offered in (
        (-1, 40, 100),
        (-1, 20, 100),
        (-1, 0, 100),
        (0, 10, 40),
        (0, 4, 40),
        (1, 5, 20),
        (2, 0, 0),
    )
]
ROWS = [
    row(None, 1.8, "chain 4", label="chain_4", measured="acceptance"),
    row(
        None,
        2.4,
        "static 7",
        label=f"static {EVIL}",
        measured="acceptance",
        growth="static",
        nodes=7,
        depth=2,
        node_counts=TREE,
        rank_rates=[[0.4, 0.2, 0.0], [0.25, 0.1]],
        accept_at=[0.6, 0.25],
        accept_counts=[[60, 100], [15, 60]],
        accept_at_interval=[[0.5, 0.75], None],
        reach=[0.6, 0.15],
    ),
    row(
        1.4,
        1.75,
        label="chain_3 timed",
        seconds=STAGES,
        tokens=200,
        plain_seconds={**STAGES, "draft": 0.0, "verify": 5.0},
        plain_tokens=200,
    ),
    row(1.2, 2.0, "dynamic 24", growth="dynamic", label="dynamic_24 timed"),
]
ANSWERS: list[dict[str, Any]] = [
    {
        "prompt": f"user\n{EVIL}",
        "finish": "stop",
        "passes": [
            {"tokens": 1, "drafts": [], "own": "Sure"},
            {"tokens": 3, "drafts": [", <b>", "\x1b[31m\x00"], "own": EVIL},
            {"tokens": 6, "drafts": [" a", "", " b", " \ud800", " c"], "own": ""},
        ],
    }
]
SECONDS = {"loading": 2.0, "training": 100.0, "measuring": 30.5, "packaging": 0.5}
SAMPLES: dict[str, Any] = {
    "tree": "chain 3",
    "temperature": 0.0,
    "rule": "greedy",
    "guarantee": "greedy",
    "written_in": "text",
    "answers": ANSWERS,
}


def recorded(folder: Path, target: Target) -> Path:
    """A run's folder with a package of an untrained drafter."""
    run = folder / NAME
    torch.manual_seed(0)
    provenance = {
        "command": f"python -m drafttrain.fit {EVIL}",
        "date": "2026-01-01",
        "commit": EVIL,
        "versions": {EVIL: EVIL, "torch": "2.13"},
        "training": {**TRAINING, "updates": 20, "best_update": 20, "epochs": 1.0},
    }
    metrics = {"settings": {**SETTINGS, "odd": EVIL}, "rows": ROWS}
    packed(
        run / "package",
        drafters.make(Eagle1, target),
        target,
        metrics=metrics,
        provenance=provenance,
    )
    (run / "config.yaml").write_text(f"seed: 0\n# {EVIL}\n")
    log = CsvLogger(run)
    for step in range(1, 21):
        log.log_metrics({"train/loss": 5.0 / step}, step)
        if step % 10 == 0:
            log.log_metrics(
                {
                    "val/tau": 1 + step / 40,
                    "sim/forced_tau": 1.5,
                    "sim/loss": 3.0,
                    "val/rounds": 400,
                },
                step,
            )
            log.log_metrics({f"val/accept@{k}": 0.5 / k for k in (1, 2, 3)}, step)
            log.log_metrics({f"val/accept@{k}_count": 100.0 * k for k in (1, 2, 3)}, step)
    # Not by `write_noted`: half a surrogate pair can be read from JSON and never written as UTF-8.
    (run / NOTED).write_text(json.dumps({"format": 1, "seconds": SECONDS, "samples": SAMPLES}))
    return run


def record_of(run: Path) -> Record:
    (entry,) = read_entries([run / "package"], measured=True)
    return read_record(entry)
