"""Write a package to a scratch folder, then move it to its place."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.standalone import Standalone
from drafttrain.errors import InputError, refuse_full_disk, writing
from drafttrain.files import even_modes, new_folder
from drafttrain.packaging.checking import some
from drafttrain.packaging.contents import (
    config_of,
    files_of,
    language_model_of,
    tensors_of,
    texts_of,
    texts_of_plan,
)
from drafttrain.packaging.decoding import fit
from drafttrain.packaging.manifest import (
    ALL_FILES,
    DTYPES,
    FOLDERS,
    STANDALONE_TENSORS,
    is_package,
    read_config,
    read_metrics,
)
from drafttrain.packaging.portable import portable
from drafttrain.target.model import Target


def save_package(
    folder: str | os.PathLike[str],
    *,
    drafter: Drafter,
    target: Target,
    plan: Plan,
    metrics: dict[str, Any],
    provenance: dict[str, Any],
    trained_length: int | None = None,
    trained_on: Mapping[str, str] | None = None,
    dtype: str = "float32",
    licence: str | None = None,
    export_assistant: bool = False,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Write a complete package, then move it to its place; an earlier package is replaced.

    Args:
        folder: a new or empty folder, or an earlier package; not a link, nor one with other files.
        target: the one that the drafter drafts for; of a tuned one the adapter is packaged too.
        plan: how it decodes by default.
        metrics: `{"settings": {...}, "rows": [...]}`, rows as `Measurement.row` gives them.
        provenance: how it was trained, plain JSON values. Of absolute paths, here and in metrics,
            only the last name is kept.
        trained_length: most tokens of a row in training; by itself that of provenance, if any.
        trained_on: fingerprint of the target in the set that was trained on, whose mode (chat
            template and arguments) the package names; None is the target's own.
        dtype: of the stored weights: float32 (bit for bit) or bfloat16 (half the size).
        licence: the target's; None looks it up by the target's name.
        export_assistant: write a drafter that is a language model as a directory of transformers
            too, with copies of what it borrows. One that borrows nothing is always written so.
        say: is given a sentence about the size.
    Returns: the folder.
    Raises: InputError if the place cannot be used or the weights are not finite; OSError if the
        disk is full. What was there before is then unchanged.
    """
    folder = Path(os.path.abspath(Path(folder).expanduser()))
    check_place(folder)
    _check_given(dtype, metrics)
    plan = fit(plan, drafter)
    check_export(drafter, export_assistant)
    tensors = tensors_of(drafter, target, dtype)
    model = language_model_of(drafter, dtype, asked=export_assistant)
    files = files_of(tensors, drafter, target.adapter)
    if model is not None:
        files[STANDALONE_TENSORS] = model[1]
    length = provenance.get("trained_length") if trained_length is None else trained_length
    config = config_of(drafter, target, tensors, dtype, length, licence, provenance, trained_on)
    text = None if model is None else model[0]
    texts = texts_of(portable(config), portable(metrics), plan, text)
    _write(folder, texts, files)
    if say:
        weights, size = sum((folder / name).stat().st_size for name in files), size_of(folder)
        say(f"package {folder}: {size / 1e6:.2f} MB, of it {weights / 1e6:.2f} MB {dtype} weights")
    return folder


def _check_given(dtype: str, metrics: Any) -> None:
    if dtype not in DTYPES:
        raise InputError(f"package dtype is {dtype}: give one of {', '.join(DTYPES)}")
    if not isinstance(metrics, dict) or not isinstance(metrics.get("rows"), list):
        raise ValueError('metrics need the form {"settings": {...}, "rows": [...]}')


def _write(folder: Path, texts: Mapping[str, str], files: Mapping[str, dict[str, Tensor]]) -> None:
    """Everything into a scratch folder, onto the disk, and then into its place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    refuse_full_disk(
        folder.parent,
        sum(_bytes(tensor) for held in files.values() for tensor in held.values()),
        what=f"package {folder}",
        remedy="Free some space, or give a folder on another disk (a run: resume=last)",
    )
    scratch = new_folder(folder.parent, folder.name)
    try:
        for name in {str(Path(name).parent) for name in (*texts, *files)} - {"."}:
            (scratch / name).mkdir()
        for name, held in files.items():
            with writing(folder / name, sum(map(_bytes, held.values()))):
                save_file(held, scratch / name, metadata={"format": "pt"})
        for name, text in texts.items():
            with writing(folder / name):
                (scratch / name).write_text(text, encoding="utf-8")
        for name in (*texts, *files):
            with writing(folder / name), (scratch / name).open("rb") as file:
                os.fsync(file.fileno())
        even_modes(scratch)
        check_place(folder)
        _put(scratch, folder)
    finally:
        _remove(scratch)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def change_plan(folder: str | os.PathLike[str], plan: Plan) -> None:
    """Put another plan into a package: `decoding.yaml`, and the card that describes it. Each file
    is replaced at once.

    Raises: InputError if it is not a package or cannot be written to; the file is then unchanged.
    """
    folder = Path(folder).expanduser()
    as_model = (folder / STANDALONE_TENSORS).is_file()
    texts = texts_of_plan(read_config(folder), read_metrics(folder), plan, as_model=as_model)
    for name, text in texts.items():
        scratch = folder / f".{name}.new"
        try:
            scratch.unlink(missing_ok=True)
            # A new file, never one that is there: a file that came with the package may be a link
            # to elsewhere.
            with scratch.open("x", encoding="utf-8") as file:
                file.write(text)
            even_modes(folder, scratch.name)
            scratch.replace(folder / name)
        except OSError as error:
            raise InputError(f"{folder / name} cannot be written: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)


def check_change(folder: str | os.PathLike[str]) -> None:
    """Raise InputError if another plan could not be put into a package. Worth calling before long
    work, and before the package is read; reading checks whether it is one."""
    folder = Path(folder).expanduser()
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(
            f"{folder} cannot be written to: make it writable, or leave it as it is with "
            "write=false"
        )


def check_place(folder: str | os.PathLike[str]) -> None:
    """Raise InputError unless a package can be written there without touching anything that is not
    a package's.

    Worth calling before long work.
    """
    folder = Path(os.path.abspath(Path(folder).expanduser()))
    if folder.is_symlink():
        raise InputError(
            f"{folder} is a link: give the folder itself, what a link points to is never replaced"
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
        old = new_folder(folder.parent, f"{folder.name}-old")
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


def clear_left(folder: Path) -> None:
    """Remove what a writer of a package that was killed left next to it; an earlier package that it
    had moved away and not yet replaced is put back.

    Only for a folder that no other process can be writing to.
    """
    names = re.compile(rf"\.{re.escape(folder.name)}-(old-)?[a-z0-9_]{{8}}")
    for left in sorted(folder.parent.glob(f".{folder.name}-*")):
        if not names.fullmatch(left.name) or left.is_symlink() or not left.is_dir():
            continue
        with contextlib.suppress(OSError):
            if "-old-" in left.name and is_package(left) and not folder.exists():
                left.rename(folder)
            else:
                _remove(left)


def _remove(folder: Path) -> None:
    """A package's own files and the folders they leave empty; nothing else is ever removed."""
    for name in ALL_FILES:
        (folder / name).unlink(missing_ok=True)
    for path in (*(folder / name for name in FOLDERS), folder):
        try:
            path.rmdir()
        except OSError:
            pass


def check_export(drafter: Drafter, export_assistant: bool) -> None:
    """Raise InputError if a drafter is to be written as a language model and is none. Worth calling
    before long work."""
    if export_assistant and not isinstance(drafter, Standalone):
        raise InputError(
            f"export_assistant=true: {type(drafter).__name__} is no language model by itself; set "
            "it to false"
        )
