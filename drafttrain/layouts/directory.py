"""A directory of some engine's as data: config.json, and the headers of its safetensors files.

It may come from anywhere. Nothing in it is run, no pickle is opened, and no tensor is read before
its shape and dtype are known.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafttrain.errors import InputError
from drafttrain.packaging.checking import check_regular, read_json, some
from drafttrain.packaging.manifest import PICKLED, is_package

CONFIG = "config.json"
FLOATS = ("F32", "F16", "BF16")
"""Dtypes of weights that are read, as a safetensors header spells them."""
INDEX = "model.safetensors.index.json"
_LARGEST_CONFIG = 16 << 20
_MOST_TENSORS = 1 << 16


@dataclass(frozen=True)
class Entry:
    """What a header says of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    file: Path

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Directory:
    path: Path
    config: dict[str, Any]
    tensors: dict[str, Entry]
    """Of all safetensors files together."""
    pickled: tuple[str, ...]
    """Names of files next to them that could run code when read."""
    indexed: dict[str, Any] = field(default_factory=dict)
    """By tensor, what an index of several files has for the name of its file."""

    def read(self, name: str) -> Tensor:
        entry = self.tensors[name]
        try:
            with safe_open(entry.file, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise InputError(f"{entry.file} cannot be read: {error}") from error
        return tensor

    def weight(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A weight in float32, once its shape and dtype are what they must be.

        Raises: InputError if it is not there, is of another shape, no plain weight, or holds a
        value that is no number.
        """
        if name not in self.tensors:
            raise InputError(f"{self.path} lacks {name}")
        entry = self.tensors[name]
        if entry.shape != shape or entry.dtype not in FLOATS:
            raise InputError(
                f"{self.path}: {some([name])} is {entry}, needs {list(shape)} of "
                f"{', '.join(FLOATS)}"
            )
        tensor = self.read(name).to(torch.float32)
        if not bool(tensor.isfinite().all()):
            raise InputError(
                f"{self.path}: NaN or infinite values in {some([name])}: it is damaged, get it "
                "again"
            )
        return tensor


def open_directory(path: str | os.PathLike[str], what: str) -> Directory:
    """What is in a directory, without any tensor's values.

    Args:
        what: the setting that names it, for messages.
    Raises: InputError if it is no directory with a config.json, or a file is damaged.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise InputError(
            f"{what}={path} {'is a file' if folder.exists() else 'does not exist'}: give a "
            "directory"
        )
    if is_package(folder):
        raise InputError(
            f"{what}={path} is a drafttrain package, no engine's directory: export it with "
            "package=<folder> to=..."
        )
    if not os.path.lexists(folder / CONFIG):
        raise InputError(
            f"{what}={path} has no {CONFIG}: give the directory that an engine is given"
        )
    config = read_json(folder / CONFIG, _LARGEST_CONFIG, "an engine's config")
    if not isinstance(config, dict):
        raise InputError(f"{folder / CONFIG} is {type(config).__name__}, needs a mapping")
    tensors: dict[str, Entry] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, entry in _header(file).items():
            if name in tensors:
                raise InputError(
                    f"{folder}: {some([name])} is in {tensors[name].file.name} and in {file.name}"
                )
            tensors[name] = entry
    pickled = tuple(
        sorted(file.name for file in folder.iterdir() if file.suffix.lower() in PICKLED)
    )
    return Directory(folder, config, tensors, pickled, _indexed(folder))


def _indexed(folder: Path) -> dict[str, Any]:
    if not os.path.lexists(folder / INDEX):
        return {}
    found = read_json(folder / INDEX, _LARGEST_CONFIG, "an index of tensors")
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict):
        raise InputError(f"{folder / INDEX} has no weight_map")
    return names


def _header(path: Path) -> dict[str, Entry]:
    check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            if len(names) > _MOST_TENSORS:
                raise InputError(f"{path} has {len(names)} tensors: not a head")
            slices = {name: file.get_slice(name) for name in names}
            return {
                name: Entry(tuple(s.get_shape()), str(s.get_dtype()), path)
                for name, s in slices.items()
            }
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def how_to_convert(names: tuple[str, ...]) -> str:
    """How a person turns a pickle into safetensors without running what may be in it."""
    return (
        f"{some(names)} can run code when read, so it is not: convert it, with nothing but tensors "
        "allowed in it: python -c 'import sys, torch; from safetensors.torch import save_file; "
        'd = torch.load(sys.argv[1], map_location="cpu", weights_only=True); '
        'save_file({k: v.clone().contiguous() for k, v in d.items()}, "model.safetensors")\' '
        f"{shlex.quote(names[0])} in its directory, then move the pickle away"
    )
