"""Drafters of the embedded target that know some of its answers by heart: made in seconds, and
really accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.eagle3 import Eagle3
from drafttrain.drafter.medusa import Medusa
from drafttrain.drafter.mtp import Mtp
from drafttrain.drafter.ssm import Ssm
from drafttrain.flow import Batch
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree
from scripts.engines import proof
from scripts.engines.proof import Job
from tests.drafter import make as drafters
from tests.packaging.made import packed

EAGLE3: dict[str, dict[str, Any]] = {
    "Eagle3 of three, reduced": {},
    "Eagle3 of three, whole": {
        "own_head": False, "layers": 2, "rotary": {"rope_theta": 10000.0},
    },
    "Eagle3 of five, reduced": {"taps": [1, 7, 14, 20, 29], "fc_norm": True, "norm_output": True},
    "Eagle3 of five, whole": {
        "own_head": False, "taps": [0, 7, 14, 20, 26], "qk_norm": True,
        "norm_before_fc": True, "norm_before_residual": True,
    },
}  # fmt: skip
"""Layers read and vocabularies, and all that engines compute by a setting."""
KINDS = ("Eagle1", "Medusa", "Mtp", "Ssm", *EAGLE3)
LEARNED = 4
"""Answers of a job's that are learned; the others are new to the drafter."""
STEPS = 100


def learned(kind: str, job: Job, folder: Path) -> Path:
    """A package of one of KINDS."""
    rows = [prompt + text for prompt, text in zip(job.prompts, job.texts, strict=True)][:LEARNED]
    longest = max(map(len, rows))
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    starts = torch.tensor([len(prompt) for prompt in job.prompts[: len(rows)]])
    places = torch.arange(longest)[None]
    written = (starts[:, None] <= places) & (places < lengths[:, None])
    batch = Batch(ids, written, lengths, torch.arange(len(rows)))
    words = sorted({*batch.input_ids.flatten().tolist(), *range(4000)})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter, rate = made(kind, job.target, words)
    features = job.target.features(batch.input_ids, batch.lengths, drafter.needs)
    adam = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], lr=rate)
    for _ in range(STEPS):
        adam.zero_grad()
        loss = drafter.loss(batch, features)
        (loss.total / loss.count).backward()
        adam.step()
    if kind.endswith("whole"):  # learned with fewer words, which takes less time
        drafter = proof.over_full_vocabulary(drafter)
    return packed(folder, drafter.eval(), job.target, plan=Plan(Tree.chain(3)))


def made(kind: str, target: Target, words: list[int]) -> tuple[Drafter, float]:
    """A new drafter, and a rate to learn at."""
    settings: dict[str, Any] = {"draft_ids": words, "chunk": 128}
    if kind == "Eagle1":
        return drafters.make(
            Eagle1, target, regression=10.0, classification=1.0, balance_input=True, **settings
        ), 3e-3
    if kind in EAGLE3:
        return drafters.make(Eagle3, target, **{**settings, "steps": 2, **EAGLE3[kind]}), 1e-3
    if kind == "Mtp":
        return drafters.make(Mtp, target, **settings), 1e-3
    if kind == "Medusa":
        return drafters.make(Medusa, target, heads=3, **settings), 2e-3
    return drafters.make(Ssm, target, layers=[0, 1, 29], **settings), 5e-4
