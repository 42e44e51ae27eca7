"""Write a package beside its place, then put it there whole."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.standalone import Standalone, owns_all, trained_vocabulary
from drafttrain.errors import InputError
from drafttrain.packaging.card import REQUIREMENTS, card, generate_file
from drafttrain.packaging.checking import some
from drafttrain.packaging.decoding import fit, write_plan
from drafttrain.packaging.manifest import (
    ADAPTER,
    ALL_FILES,
    CARD,
    CONFIG,
    CUSTOM,
    DECODING,
    DTYPES,
    FOLDERS,
    FORMAT,
    MEMBERS,
    METRICS,
    STANDALONE_CONFIG,
    STANDALONE_TENSORS,
    STORED,
    TENSORS,
    class_of,
    is_package,
    needs_of,
    owned,
    place_of,
    read_config,
    read_metrics,
)
from drafttrain.packaging.portable import portable
from drafttrain.target.model import Target
from drafttrain.target.naming import short
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
    export_assistant: bool = False,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Write a package beside its place, then put it there whole; an earlier package is replaced.

    Args:
        folder: a new or empty folder, or an earlier package. A folder with other files is refused,
            a link too.
        target: the one that the drafter drafts for; of a tuned one the adapter is packaged too.
        plan: how it decodes unless told otherwise.
        metrics: `{"settings": {...}, "rows": [...]}`, rows as `Measurement.row` gives them; may
            have no rows.
        provenance: how it was trained, plain JSON values. Of absolute paths, here and in metrics,
            the last name alone is kept.
        trained_length: most tokens of a row in training; None takes provenance["trained_length"],
            if it is there.
        dtype: of the stored weights: float32 (bit for bit) or bfloat16 (half the size).
        licence: the target's; None looks it up by the target's name.
        export_assistant: write a drafter that is a language model as a whole directory of
            transformers too, with copies of what it borrows of the target. One that borrows nothing
            is always written so.
        say: is told the size.
    Returns: the folder.
    Raises: InputError if the place cannot be used or the weights are not finite; OSError if the
        disk is full. What lay there before is then still whole.
    """
    folder = Path(os.path.abspath(Path(folder).expanduser()))
    check_place(folder)
    if dtype not in DTYPES:
        raise InputError(f"package dtype is {dtype}: give one of {', '.join(DTYPES)}")
    if not isinstance(metrics, dict) or not isinstance(metrics.get("rows"), list):
        raise ValueError('metrics need the form {"settings": {...}, "rows": [...]}')
    plan = fit(plan, drafter)
    check_export(drafter, export_assistant)
    kept = getattr(torch, dtype)
    tensors = _tensors_of(drafter, target, kept)
    files: dict[str, dict[str, Tensor]] = {TENSORS: {}, **_by_file(tensors, drafter)}
    if owns_all(drafter) or export_assistant:
        standalone_config, files[STANDALONE_TENSORS] = _whole(drafter, kept)
    adapter, original = target.adapter, target.original or target
    if adapter is not None:
        _refuse_odd(adapter.tensors, "adapter")
        files[ADAPTER] = dict(adapter.tensors)
    if trained_length is None:
        trained_length = provenance.get("trained_length")
    config: dict[str, Any] = {
        "format": FORMAT,
        "made_with": f"drafttrain {version()}",
        "drafter": {
            "_target_": f"{type(drafter).__module__}.{type(drafter).__qualname__}",
            **_settings_of(drafter),
        },
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
            "name": short(target.name),
            "model_type": target.config.model_type,
            "licence": licence or LICENCES.get(target.name),
            "fingerprint": original.fingerprint,
        },
        "training": provenance,
    }
    if adapter is not None:
        config["adapter"] = {
            "rank": adapter.rank,
            "alpha": adapter.alpha,
            "linears": list(adapter.linears),
            "parameters": adapter.size,
            "digest": adapter.digest,
        }
    for node in (config["drafter"], *config["drafter"].get(MEMBERS, ())):
        class_of(node["_target_"], "this drafter")
    config, metrics = portable(config), portable(metrics)
    texts = {
        CONFIG: _json(config),
        DECODING: write_plan(plan),
        METRICS: _json(metrics),
        CARD: card(config, metrics, plan, as_model=STANDALONE_TENSORS in files),
        f"{CUSTOM}/generate.py": generate_file(tuned=adapter is not None),
        f"{CUSTOM}/requirements.txt": REQUIREMENTS,
    }
    if STANDALONE_TENSORS in files:
        texts[STANDALONE_CONFIG] = standalone_config
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name in {str(Path(name).parent) for name in (*texts, *files)} - {"."}:
            (scratch / name).mkdir()
        for name, held in files.items():
            save_file(held, scratch / name, metadata={"format": "pt"})
        for name, text in texts.items():
            (scratch / name).write_text(text, encoding="utf-8")
        for name in (*texts, *files):
            with (scratch / name).open("rb") as file:
                os.fsync(file.fileno())
            (scratch / name).chmod(0o644)
        scratch.chmod(0o755)
        check_place(folder)
        _put(scratch, folder)
    finally:
        _remove(scratch)
    if say:
        weights, size = sum((folder / name).stat().st_size for name in files), size_of(folder)
        say(f"package {folder}: {size / 1e6:.2f} MB, of it {weights / 1e6:.2f} MB {dtype} weights")
    return folder


def change_plan(folder: str | os.PathLike[str], plan: Plan) -> None:
    """Put another plan into a package: `decoding.yaml`, and the card that describes it. Each file
    is replaced whole.

    Raises: InputError if it is not a package or cannot be written to; what lay there is then still
    whole.
    """
    folder = Path(folder).expanduser()
    for name, text in _texts_of_plan(folder, plan).items():
        scratch = folder / f".{name}.new"
        try:
            scratch.unlink(missing_ok=True)
            # A new file, never one that lies there: what came with the package may be a link to
            # elsewhere.
            with scratch.open("x", encoding="utf-8") as file:
                file.write(text)
            scratch.chmod(0o644)
            scratch.replace(folder / name)
        except OSError as error:
            raise InputError(f"{folder / name} cannot be written: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)


def check_change(folder: str | os.PathLike[str]) -> None:
    """Raise InputError if another plan could not be put into a package. Worth calling before long
    work, and before the package is read: whether it is one, reading tells."""
    folder = Path(folder).expanduser()
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(
            f"{folder} cannot be written to: make it writable, or leave it as it is with "
            f"write=false"
        )


def _texts_of_plan(folder: Path, plan: Plan) -> dict[str, str]:
    """The files that say how a package decodes."""
    as_model = (folder / STANDALONE_TENSORS).is_file()
    return {
        DECODING: write_plan(plan),
        CARD: card(read_config(folder), read_metrics(folder), plan, as_model=as_model),
    }


def check_place(folder: str | os.PathLike[str]) -> None:
    """Raise InputError unless a package can be written there without touching anything that is not
    a package's.

    Worth calling before long work.
    """
    folder = Path(os.path.abspath(Path(folder).expanduser()))
    if folder.is_symlink():
        raise InputError(
            f"{folder} is a link: give the folder itself, what a link leads to is never replaced"
        )
    if not folder.exists():
        above = next(parent for parent in folder.parents if parent.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise InputError(
                f"{folder} cannot be made: {above} is not a folder that can be written to"
            )
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file: give a folder")
    here = Path.cwd().resolve()
    if here == folder.resolve() or folder.resolve() in here.parents:
        raise InputError(
            f"{folder} holds the folder this program runs in: give a folder of its own"
        )
    if not os.access(folder.parent, os.W_OK | os.X_OK):
        raise InputError(f"{folder} cannot be replaced: {folder.parent} cannot be written to")
    held = _held(folder)
    foreign = [name for name in held if name not in (*ALL_FILES, *FOLDERS)]
    links = [name for name in held if (folder / name).is_symlink()]
    if foreign or links:
        what = f"other files ({some(foreign)})" if foreign else f"links ({some(links)})"
        raise InputError(f"{folder} holds {what}, which would be lost: give a folder of its own")
    if held and not is_package(folder):
        raise InputError(
            f"{folder} holds {some(held)} but is not a drafttrain package: give a folder of its own"
        )


def size_of(folder: str | os.PathLike[str]) -> int:
    """Bytes of a package."""
    return sum(
        (Path(folder) / name).stat().st_size
        for name in ALL_FILES
        if (Path(folder) / name).is_file()
    )


def _held(folder: Path) -> list[str]:
    """Names in a folder, those in a package's own folders included."""
    names = []
    for entry in sorted(folder.iterdir()):
        names.append(entry.name)
        if entry.name in FOLDERS and entry.is_dir() and not entry.is_symlink():
            names += [f"{entry.name}/{inner.name}" for inner in sorted(entry.iterdir())]
    return names


def _put(scratch: Path, folder: Path) -> None:
    """The new package in the place of nothing, an empty folder, or an earlier one, which is kept
    until the new one is there."""
    old = None
    if folder.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
        old.rmdir()  # some systems do not rename onto a folder that exists
    try:
        if old is not None:
            folder.rename(old)
        scratch.rename(folder)
    except BaseException:  # also a signal
        if old is not None and old.exists() and not folder.exists():
            old.rename(folder)
        raise
    if old is not None:
        _remove(old)


def _remove(folder: Path) -> None:
    """A package's own files and the folders they leave empty; nothing else is ever removed."""
    for name in ALL_FILES:
        (folder / name).unlink(missing_ok=True)
    for path in (*(folder / name for name in FOLDERS), folder):
        try:
            path.rmdir()
        except OSError:
            pass


def _tensors_of(drafter: Drafter, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in owned(drafter).items():
        tensor = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
    _refuse_odd(tensors, "drafter")
    for name, tensor in owned(drafter).items():
        if name in trained_vocabulary(drafter):
            continue
        for borrowed in (
            target.embedding.weight,
            target.output.weight if target.output is not None else None,
        ):
            if (
                borrowed is not None
                and tensor.shape == borrowed.shape
                and torch.equal(tensor.to(borrowed), borrowed)
            ):
                raise ValueError(
                    f"{name} is the target's own embedding or head: it is borrowed, not packaged"
                )
    return tensors


def _refuse_odd(tensors: Mapping[str, Tensor], what: str) -> None:
    bad = [
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]
    if bad:
        raise InputError(
            f"the {what} holds NaN or infinite weights in {some(bad)}: it is not packaged; train "
            f"it again"
        )


def check_export(drafter: Drafter, export_assistant: bool) -> None:
    """Raise InputError if a drafter is to be written as a language model and is none. Worth calling
    before long work."""
    if export_assistant and not isinstance(drafter, Standalone):
        raise InputError(
            f"export_assistant=true: {type(drafter).__name__} is no language model that could "
            f"stand alone; set it to false"
        )


def _by_file(tensors: dict[str, Tensor], drafter: Drafter) -> dict[str, dict[str, Tensor]]:
    files: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        file, there = place_of(name, drafter)
        files.setdefault(file, {})[there] = tensor
    return files


def _whole(drafter: Drafter, dtype: torch.dtype) -> tuple[str, dict[str, Tensor]]:
    """The config's text and the tensors of a drafter as a directory of transformers."""
    assert isinstance(drafter, Standalone)
    found = drafter.standalone()
    config, tensors = copy.deepcopy(found[0]), found[1]
    config.dtype = dtype
    kept = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        kept[name] = tensor.clone(memory_format=torch.contiguous_format)
    return config.to_json_string(), kept


def _settings_of(drafter: Drafter) -> dict[str, Any]:
    """Settings apart from those that are stored as tensors."""
    found = _unstored(drafter.settings())
    if MEMBERS in found:
        found[MEMBERS] = [_unstored(member) for member in found[MEMBERS]]
    return found


def _unstored(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in STORED}


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
