"""A copy of a model's directory in which some tensors have other values: every other byte is the
same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.errors import InputError
from drafttrain.files import json_text
from drafttrain.layouts.directory import CONFIG, INDEX

ADDED = "model-mtp.safetensors"
"""The file of tensors that a model in several files did not have."""
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH = 8
"""Bytes before a header, which say how long it is."""


def copy(
    source: Path, out: Path, tensors: Mapping[str, Tensor], counts: Sequence[str] = ()
) -> None:
    """Copy a directory's files, links followed, but for those whose names begin with a dot.

    Args:
        out: an empty folder.
        tensors: those that are there get these values, in the dtype that they have there; others
            are added, to the one file that there is or in a file of their own.
        counts: settings of config.json; where none of them is above 0, the first becomes 1.
    Raises: InputError if a tensor has another shape there, or is no finite number in that dtype.
    """
    for entry in sorted(source.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            shutil.copytree(entry, out / entry.name)
        else:
            shutil.copyfile(entry, out / entry.name)
    left = dict(tensors)
    files = sorted(out.glob("*.safetensors"))
    for path in files:
        with path.open("r+b") as file:
            for name in _patch(file, left, path.name):
                del left[name]
    if left:
        _add(out, files, left)
    _promise(out / CONFIG, counts)


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """What a file of safetensors says of its tensors, and where their data begin."""
    file.seek(0)
    length = int.from_bytes(file.read(_LENGTH), "little")
    return json.loads(file.read(length)), _LENGTH + length


def _patch(file: BinaryIO, tensors: Mapping[str, Tensor], where: str) -> list[str]:
    """Put values in the places of those that are there. Returns their names."""
    header, start = _header(file)
    found = sorted(header.keys() & tensors.keys())
    for name in found:
        entry, tensor = header[name], tensors[name]
        if entry["shape"] != list(tensor.shape) or entry["dtype"] not in _DTYPES:
            raise InputError(
                f"{name} of {where} is {entry['dtype']} {entry['shape']}, the drafter's is "
                f"{list(tensor.shape)}: it is of another target"
            )
        file.seek(start + entry["data_offsets"][0])
        file.write(_bytes(name, tensor.to(_DTYPES[entry["dtype"]])))
    return found


def _bytes(name: str, tensor: Tensor) -> bytes:
    if not bool(tensor.isfinite().all()):
        word = str(tensor.dtype).removeprefix("torch.")
        raise InputError(f"{name} is no finite number as {word}, which the target has it in")
    data: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


def _add(out: Path, files: list[Path], tensors: dict[str, Tensor]) -> None:
    index = out / INDEX
    if not index.exists() and len(files) == 1:
        _append(files[0], tensors)
        return
    said = json.loads(index.read_text(encoding="utf-8")) if index.exists() else {}
    save_file(tensors, out / ADDED, metadata={"format": "pt"})
    said.setdefault("weight_map", {}).update(dict.fromkeys(tensors, ADDED))
    if type(size := said.get("metadata", {}).get("total_size")) is int:
        size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        said["metadata"]["total_size"] = size
    index.write_text(json_text(said), encoding="utf-8")


def _append(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file again with more tensors after its own, whose bytes stay as they are."""
    whole = path.with_suffix(".more")
    with path.open("rb") as old, whole.open("wb") as new:
        header, start = _header(old)
        at = old.seek(0, 2) - start
        for name, tensor in tensors.items():
            end = at + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [at, end],
            }
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _LENGTH)
        new.write(len(text).to_bytes(_LENGTH, "little") + text)
        old.seek(start)
        shutil.copyfileobj(old, new)
        for name, tensor in tensors.items():
            new.write(_bytes(name, tensor))
    whole.replace(path)


def _promise(path: Path, counts: Sequence[str]) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else config
    if not counts or any(type(inner.get(key)) is int and inner[key] > 0 for key in counts):
        return
    inner[counts[0]] = 1
    path.write_text(json_text(config), encoding="utf-8")
