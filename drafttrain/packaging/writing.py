"""Write a package beside its place, then put it there whole."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.decoding.loop import Plan
from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError
from drafttrain.packaging.card import GENERATE, REQUIREMENTS, card
from drafttrain.packaging.checking import some
from drafttrain.packaging.decoding import fit, write_plan
from drafttrain.packaging.manifest import (
    CARD,
    CONFIG,
    CUSTOM,
    DECODING,
    DTYPES,
    FILES,
    FORMAT,
    METRICS,
    STORED,
    TENSORS,
    class_of,
    is_package,
    needs_of,
    read_config,
    read_metrics,
)
from drafttrain.target.model import Target
from drafttrain.version import version

LICENCES = {"smollm2": "Apache-2.0"}
"""Licences of targets that are known by name."""


def save_package(
    folder: str | os.PathLike[str],
    *,
    drafter: Drafter,
    target: Target,
    plan: Plan,
    metrics: dict[str, Any],
    provenance: dict[str, Any],
    trained_length: int | None = None,
    dtype: str = "float32",
    licence: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Write a package beside its place, then put it there whole; an earlier package is replaced.

    Args:
        folder: a new or empty folder, or an earlier package. A folder with other files is refused, a link too.
        plan: how it decodes unless told otherwise.
        metrics: `{"settings": {...}, "rows": [...]}`, rows as `Measurement.row` gives them; may have no rows.
        provenance: how it was trained, plain JSON values.
        trained_length: most tokens of a row in training; None takes provenance["trained_length"], if it is there.
        dtype: of the stored weights: float32 (bit for bit) or bfloat16 (half the size).
        licence: the target's; None looks it up by the target's name.
        say: is told the size.
    Returns: the folder.
    Raises: InputError if the place cannot be used or the weights are not finite; OSError if the disk is full. What lay
        there before is then still whole.
    """
    folder = Path(os.path.abspath(Path(folder).expanduser()))
    check_place(folder)
    if dtype not in DTYPES:
        raise InputError(f"package dtype is {dtype}: give one of {', '.join(DTYPES)}")
    if not isinstance(metrics, dict) or not isinstance(metrics.get("rows"), list):
        raise ValueError('metrics need the form {"settings": {...}, "rows": [...]}')
    plan = fit(plan, drafter)
    tensors = _tensors_of(drafter, target, getattr(torch, dtype))
    if trained_length is None:
        trained_length = provenance.get("trained_length")
    config: dict[str, Any] = {
        "format": FORMAT,
        "made_with": f"drafttrain {version()}",
        "drafter": {"_target_": f"{type(drafter).__module__}.{type(drafter).__qualname__}", **_settings_of(drafter)},
        "needs": needs_of(drafter),
        "shape": {
            "width": target.width,
            "vocab_size": target.vocab_size,
            "draft_vocab": drafter.choices,
            "parameters": sum(t.numel() for t in tensors.values() if t.is_floating_point()),
            "dtype": dtype,
        },
        "trained_length": trained_length,
        "target": {
            "name": _short(target.name),
            "model_type": target.config.model_type,
            "licence": licence or LICENCES.get(target.name),
            "fingerprint": target.fingerprint,
        },
        "training": provenance,
    }
    class_of(config["drafter"]["_target_"], "this drafter")
    texts = {
        CONFIG: _json(config),
        DECODING: write_plan(plan),
        METRICS: _json(metrics),
        CARD: card(config, metrics, plan),
        f"{CUSTOM}/generate.py": GENERATE,
        f"{CUSTOM}/requirements.txt": REQUIREMENTS,
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (scratch / CUSTOM).mkdir()
        save_file(tensors, scratch / TENSORS, metadata={"format": "pt"})
        for name, text in texts.items():
            (scratch / name).write_text(text, encoding="utf-8")
        for name in FILES:
            with (scratch / name).open("rb") as file:
                os.fsync(file.fileno())
            (scratch / name).chmod(0o644)
        scratch.chmod(0o755)
        check_place(folder)
        _put(scratch, folder)
    finally:
        _remove(scratch)
    if say:
        weights, whole = ((folder / TENSORS).stat().st_size, size_of(folder))
        say(f"package {folder}: {whole / 1e6:.2f} MB, of it {weights / 1e6:.2f} MB {dtype} weights")
    return folder


def change_plan(folder: str | os.PathLike[str], plan: Plan) -> None:
    """Put another plan into a package: `decoding.yaml`, and the card that describes it. Each file is replaced whole.

    Raises: InputError if it is not a package or cannot be written to; what lay there is then still whole.
    """
    folder = Path(folder).expanduser()
    texts = {DECODING: write_plan(plan), CARD: card(read_config(folder), read_metrics(folder), plan)}
    for name, text in texts.items():
        scratch = folder / f".{name}.new"
        try:
            scratch.write_text(text, encoding="utf-8")
            scratch.chmod(0o644)
            scratch.replace(folder / name)
        except OSError as error:
            raise InputError(f"{folder / name} cannot be written: {error.strerror}") from error
        finally:
            scratch.unlink(missing_ok=True)


def check_place(folder: str | os.PathLike[str]) -> None:
    """Raise InputError unless a package can be written there without touching anything that is not a package's.

    Worth calling before long work.
    """
    folder = Path(os.path.abspath(Path(folder).expanduser()))
    if folder.is_symlink():
        raise InputError(f"{folder} is a link: give the folder itself, what a link leads to is never replaced")
    if not folder.exists():
        above = next(parent for parent in folder.parents if parent.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise InputError(f"{folder} cannot be made: {above} is not a folder that can be written to")
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file: give a folder")
    here = Path.cwd().resolve()
    if here == folder.resolve() or folder.resolve() in here.parents:
        raise InputError(f"{folder} holds the folder this program runs in: give a folder of its own")
    if not os.access(folder.parent, os.W_OK | os.X_OK):
        raise InputError(f"{folder} cannot be replaced: {folder.parent} cannot be written to")
    held = _held(folder)
    foreign = [name for name in held if name not in (*FILES, CUSTOM)]
    links = [name for name in held if (folder / name).is_symlink()]
    if foreign or links:
        what = f"other files ({some(foreign)})" if foreign else f"links ({some(links)})"
        raise InputError(f"{folder} holds {what}, which would be lost: give a folder of its own")
    if held and not is_package(folder):
        raise InputError(f"{folder} holds {some(held)} but is not a drafttrain package: give a folder of its own")


def size_of(folder: str | os.PathLike[str]) -> int:
    """Bytes of a package."""
    return sum((Path(folder) / name).stat().st_size for name in FILES if (Path(folder) / name).is_file())


def _held(folder: Path) -> list[str]:
    """Names in a folder, those in custom_generate included."""
    names = []
    for entry in sorted(folder.iterdir()):
        names.append(entry.name)
        if entry.name == CUSTOM and entry.is_dir() and not entry.is_symlink():
            names += [f"{CUSTOM}/{inner.name}" for inner in sorted(entry.iterdir())]
    return names


def _put(scratch: Path, folder: Path) -> None:
    """The new package in the place of nothing, an empty folder, or an earlier one, which is kept until the new one is there."""
    old = None
    if folder.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
        old.rmdir()  # some systems do not rename onto a folder that exists
        folder.rename(old)
    try:
        scratch.rename(folder)
    except BaseException:
        if old is not None:
            old.rename(folder)
        raise
    if old is not None:
        _remove(old)


def _remove(folder: Path) -> None:
    """A package's own files and the folders they leave empty; nothing else is ever removed."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    for path in (folder / CUSTOM, folder):
        try:
            path.rmdir()
        except OSError:
            pass


def _tensors_of(drafter: Drafter, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        tensor = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
    bad = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not bool(tensor.isfinite().all())]
    if bad:
        raise InputError(
            f"the drafter holds NaN or infinite weights in {some(bad)}: it is not packaged; train it again"
        )
    for name, tensor in drafter.state_dict().items():
        for borrowed in (target.embedding.weight, target.output.weight if target.output is not None else None):
            if borrowed is not None and tensor.shape == borrowed.shape and torch.equal(tensor.to(borrowed), borrowed):
                raise ValueError(f"{name} is the target's own embedding or head: it is borrowed, not packaged")
    return tensors


def _settings_of(drafter: Drafter) -> dict[str, Any]:
    """Settings apart from those that are stored as tensors."""
    return {name: value for name, value in drafter.settings().items() if name not in STORED}


def _short(name: str) -> str:
    """A target's name without the folders of this machine."""
    local = Path(name).expanduser()
    return local.resolve().name if local.is_absolute() or local.exists() else name


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
