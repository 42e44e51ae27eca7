"""Exports, foreign directories, and one changed thing in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain import adopt
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Drafter
from drafttrain.layouts.checking import check_directory
from drafttrain.layouts.directory import open_directory
from drafttrain.layouts.origin import read_origin
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree

Edit = Callable[[Path], Any]
PROMPTS = [[5, 6, 7], [9, 11, 13, 40]]


def stirred(drafter: Drafter, seed: int = 0) -> Any:
    """Weights that are not where training starts."""
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in drafter.parameters():
            p += 0.05 * torch.randn(p.shape, generator=chance)
    return drafter.eval()


def directory(
    path: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str = "model.safetensors"
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / file)
    return path


def config(**changes: Any) -> Edit:
    """Set keys of config.json; a dotted name is a nested one, DROP takes a key away."""

    def edit(path: Path) -> None:
        found = json.loads((path / "config.json").read_text())
        for key, value in changes.items():
            *outer, last = key.split("__")
            place = found
            for name in outer:
                place = place.setdefault(name, {})
            if value is DROP:
                place.pop(last, None)
            else:
                place[last] = value
        (path / "config.json").write_text(json.dumps(found))

    return edit


DROP = object()


def tensors(change: Callable[[dict[str, Tensor]], Any], file: str = "model.safetensors") -> Edit:
    def edit(path: Path) -> None:
        held = load_file(path / file)
        change(held)
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, path / file)

    return edit


def put(name: str, *shape: int, value: float = 0.5) -> Edit:
    return tensors(lambda held: held.update({name: torch.full(shape, value)}))


def drop(name: str) -> Edit:
    return tensors(lambda held: held.pop(name))


def both(*edits: Edit) -> Edit:
    return lambda path: [edit(path) for edit in edits]


def names(path: Path, engine: str | None = None, target: Path | None = None) -> dict[str, bool]:
    """{fault: is it fatal} of a directory."""
    against = None if target is None else open_directory(target, "against")
    found = check_directory(open_directory(path, "check"), engine, against)
    return {finding.name: finding.fatal for finding in found}


def read_back(path: Path, target: Target) -> Any:
    head = open_directory(path, "head")
    return adopt.read_drafter(head, target, read_origin(head))


def same(mine: Drafter, theirs: Drafter) -> bool:
    """Bit for bit."""
    a, b = mine.state_dict(), theirs.state_dict()
    return a.keys() == b.keys() and all(
        torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a
    )


def drafts(target: Target, drafter: Drafter, depth: int = 3) -> list[Any]:
    """Greedy text and how much of it was drafted, round by round."""
    outputs, _ = decode(
        target, drafter, PROMPTS, Plan(Tree.chain(depth)), max_new_tokens=6, stop_ids=()
    )
    return [(output.ids, output.runs) for output in outputs]
