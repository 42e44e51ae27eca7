"""Read a package: only safetensors, and only after everything about it was checked."""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from drafttrain.checks import path_of
from drafttrain.decoding.speculator import Speculator
from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError
from drafttrain.nn.spoilt import SPOILT, spoilt
from drafttrain.packaging.checking import some
from drafttrain.packaging.decoding import read_plan
from drafttrain.packaging.manifest import (
    ADAPTER,
    CONFIG,
    DECODING,
    DTYPES,
    MEMBERS,
    STANDALONE_TENSORS,
    TENSORS,
    check_target,
    class_of,
    needs_of,
    owned,
    place_of,
    read_config,
)
from drafttrain.packaging.settings import checked_settings, json_types_of
from drafttrain.target.adapter import Adapter, shapes_of, tuned
from drafttrain.target.model import Target

_HEADER_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


def load(
    folder: str | os.PathLike[str], target: Target | nn.Module, *, dtype: str = "auto"
) -> Speculator:
    """A package and the target it was trained for, ready to `generate` and `stream`.

    Args:
        target: a `Target`, or a transformers causal LM, which is then frozen. A package that was
            trained jointly with its target decodes with the tuned one, see `target_for`; the target
            given keeps its weights.
        dtype: the drafter's while decoding, see `Speculator`.
    Does not move the random state.

    Raises: InputError naming what is missing, unknown, damaged, or meant for another target.
    """
    if isinstance(target, nn.Module):
        target = Target(
            target, None, getattr(target.config, "_name_or_path", "") or type(target).__name__
        )
    folder = path_of("package", folder)
    target = target_for(folder, target)
    drafter = load_drafter(folder, target)
    plan = read_plan(folder / DECODING, drafter)
    with _chance_kept(target):
        return Speculator(target, drafter, plan, dtype=dtype)


def target_for(folder: str | os.PathLike[str], target: Target) -> Target:
    """The target that a package decodes with: the one given, or, where the package was trained
    jointly with it, a second one with the adapter added to its weights.

    The one given is never altered, whoever else uses it. The second shares its other tensors, and
    costs as much memory as the linears that the adapter changes. Its fingerprint has one more part,
    so that packages for one are refused by the other.

    Raises: InputError for another target, and for an adapter that is damaged or does not fit.
    """
    folder = Path(folder).expanduser()
    config = read_config(folder)
    check_target(config, target, folder)
    if "adapter" not in config or target.adapter is not None:
        return target
    return tuned(target, read_adapter(folder, target))


def read_adapter(folder: str | os.PathLike[str], target: Target) -> Adapter:
    """What a package adds to its target's weights: exactly the tensors that its config announces.

    Raises: InputError.
    """
    folder = Path(folder).expanduser()
    noted = read_config(folder)["adapter"]
    path = folder / ADAPTER
    try:
        shapes = shapes_of(target, noted["rank"], noted["linears"])
    except InputError as error:
        raise InputError(f"{folder / CONFIG}: adapter.{error}") from error
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: _facts(file, name) for name in file.keys()}  # noqa: SIM118 - not a dict
            _compare(found, {name: (shape, "F32") for name, shape in shapes.items()}, path)
            tensors = {name: file.get_tensor(name) for name in shapes}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    _refuse_odd(tensors, path)
    adapter = Adapter(noted["rank"], noted["alpha"], tuple(noted["linears"]), tensors)
    if adapter.digest != noted["digest"]:
        raise InputError(
            f"{path} is not the adapter of this package (its digest is another): get the package "
            "again"
        )
    return adapter


def load_drafter(folder: str | os.PathLike[str], target: Target) -> Drafter:
    """The drafter of a package as it was trained, in evaluation mode.

    Only safetensors is read, and only after everything about it was checked: a class of
    drafttrain.drafter, exact settings, this target, names, shapes and dtypes of all tensors. Does
    not move the random state.

    Args:
        target: as `target_for` gives it.
    Raises: InputError.
    """
    folder = Path(folder).expanduser()
    config = read_config(folder)
    described = _described(config["drafter"], config["shape"]["draft_vocab"], folder)
    check_target(config, target, folder)
    if "adapter" in config and target.adapter is None:
        raise InputError(
            f"{folder} drafts for a tuned target, this is the original: open it with "
            "drafttrain.load"
        )
    path = folder / TENSORS
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: _facts(file, name) for name in file.keys()}  # noqa: SIM118 - not a dict
            drafter = _built(described, file, found, target, folder)
            if (needs := needs_of(drafter)) != config["needs"]:
                raise InputError(
                    f"{folder / CONFIG}: needs are {config['needs']}, this drafter has {needs}"
                )
            expected = {
                name: (tuple(t.shape), _stored(t, config)) for name, t in owned(drafter).items()
            }
            here, of_model = (
                {n: e for n, e in expected.items() if place_of(n, drafter)[0] == at}
                for at in (TENSORS, STANDALONE_TENSORS)
            )
            _compare(found, here, path)
            tensors = {name: file.get_tensor(name) for name in here}
        if of_model:
            path = folder / STANDALONE_TENSORS
            if not path.is_file():
                raise InputError(
                    f"{folder} lacks {STANDALONE_TENSORS}, the drafter's tensors: get the package "
                    "again"
                )
            with safe_open(path, framework="pt") as file:
                names = {place_of(name, drafter)[1]: name for name in of_model}
                found = {
                    names.get(name, name): _facts(file, name)
                    for name in file.keys()  # noqa: SIM118 - not a dict
                }
                _compare(found, of_model, path)
                tensors |= {name: file.get_tensor(there) for there, name in names.items()}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    _refuse_odd(tensors, path)
    # Of tied names one is there, and no others can be missing.
    drafter.load_state_dict(tensors, strict=False)
    return drafter.eval()


@dataclass(frozen=True)
class _Described:
    """A drafter as config.json has it: the package's own, or a member of that."""

    kind: type[Drafter]
    settings: dict[str, Any]
    """Apart from those that are stored as tensors, and from members."""
    draft_vocab: Any
    members: tuple[_Described, ...] = ()
    prefix: str = ""
    """Of its tensors' names."""


def _described(node: dict[str, Any], draft_vocab: Any, folder: Path) -> _Described:
    """What can be checked of a drafter, and of its members, without its tensors."""
    where = f"{folder / CONFIG}: drafter"
    kind = class_of(node["_target_"], str(folder / CONFIG))
    settings = checked_settings(node, kind, where)
    if MEMBERS not in json_types_of(kind):
        return _Described(kind, settings, draft_vocab)
    listed, members = settings.pop(MEMBERS), []
    if not isinstance(listed, list) or not listed:
        raise InputError(f"{where}.{MEMBERS} is {str(listed)[:40]}, needs a list of drafters")
    for number, inner in enumerate(listed):
        here = f"{where}.{MEMBERS}[{number}]"
        if not isinstance(inner, dict) or not isinstance(inner.get("_target_"), str):
            raise InputError(f"{here} lacks _target_, the name of its class")
        own = class_of(inner["_target_"], here)
        if MEMBERS in json_types_of(own):
            raise InputError(f"{here} is {own.__name__}: a member has no members of its own")
        given = checked_settings(inner, own, here, also=("draft_vocab",))
        members.append(
            _Described(own, given, given.pop("draft_vocab"), prefix=f"{MEMBERS}.{number}.")
        )
    return _Described(kind, settings, draft_vocab, tuple(members))


def _chance_kept(target: Target) -> AbstractContextManager[None]:
    """New modules draw their first weights; what a package loads replaces them, so the random state
    stays as it was."""
    devices = [target.device] if target.device.type == "cuda" else []
    return torch.random.fork_rng(devices=devices)


def _refuse_larger(
    kind: type[Drafter],
    target: Target,
    settings: dict[str, Any],
    found: dict[str, Any],
    folder: Path,
) -> None:
    """Raise InputError if the settings ask for more than the files hold; so far only their headers
    are read."""
    held = [shape for shape, _ in found.values()]
    path = folder / STANDALONE_TENSORS
    if path.is_file():
        try:
            with safe_open(path, framework="pt") as file:
                held += [_facts(file, name)[0] for name in file.keys()]  # noqa: SIM118 - not a dict
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} cannot be read: {error}") from error
    try:
        with _chance_kept(target):
            kind.check_held(target, settings, len(held), sum(map(math.prod, held)))
    except InputError as error:
        raise InputError(f"{folder / CONFIG}: drafter: {error}") from error


def _built(
    described: _Described, file: Any, found: dict[str, Any], target: Target, folder: Path
) -> Drafter:
    """The drafter with its first weights. Everything that decides its size is checked before.

    Args:
        found: names, shapes and dtypes of the tensors in the file.
    """
    kind, settings, path = described.kind, dict(described.settings), folder / TENSORS
    names = json_types_of(kind)
    if "draft_ids" in names:
        settings["draft_ids"] = _draft_ids(file, found, described, target, path)
    if "corpus_ids" in names:
        settings["corpus_ids"] = _corpus_ids(file, found, described, path)
    if MEMBERS in names:
        settings[MEMBERS] = [
            _built(member, file, found, target, folder) for member in described.members
        ]
    _refuse_larger(kind, target, settings, found, folder)
    try:
        with _chance_kept(target):
            return kind(target=target, **settings)
    except (TypeError, ValueError, InputError) as error:
        raise InputError(
            f"{folder / CONFIG}: {kind.__name__} cannot be built from its settings: {error}"
        ) from error


def _facts(file: Any, name: str) -> tuple[tuple[int, ...], str]:
    """Shape and dtype, by the header only."""
    part = file.get_slice(name)
    return tuple(part.get_shape()), str(part.get_dtype())


def _stored(tensor: Tensor, config: dict[str, Any]) -> str:
    return (
        DTYPES[config["shape"]["dtype"]]
        if tensor.is_floating_point()
        else _HEADER_DTYPES.get(tensor.dtype, "?")
    )


def _draft_ids(
    file: Any, found: dict[str, Any], described: _Described, target: Target, path: Path
) -> list[int] | None:
    """The reduced draft vocabulary, read and checked before anything is sized by it."""
    name, size = f"{described.prefix}draft_ids", described.draft_vocab
    if name not in found:
        if size != target.vocab_size:
            raise InputError(
                f"{path} lacks {name}, the ids of its {str(size)[:40]} draft tokens: the package "
                "is damaged"
            )
        return None
    (shape, dtype), v = found[name], target.vocab_size
    if dtype != "I64" or len(shape) != 1 or not 2 <= shape[0] <= v or shape[0] != size:
        raise InputError(
            f"{path}: {name} is {dtype} of shape {list(shape)}, needs I64 of {size} ids, at most "
            f"the target's {v}"
        )
    ids = file.get_tensor(name)
    if int(ids.min()) < 0 or int(ids.max()) >= v or not bool((ids[1:] > ids[:-1]).all()):
        raise InputError(
            f"{path}: {name} must ascend within the target's vocabulary 0..{v - 1}, each id once"
        )
    return ids.tolist()


def _corpus_ids(
    file: Any, found: dict[str, Any], described: _Described, path: Path
) -> Tensor | None:
    """The text that a drafter copies from: the one in the package, never the file that its setting
    `corpus` names."""
    name, corpus = f"{described.prefix}corpus_ids", described.settings["corpus"]
    if corpus is None:
        return None
    if found.get(name, ((), ""))[1] != "I64":
        raise InputError(
            f"{path} lacks {name}, the text of its corpus {str(corpus)[:80]}: the package is "
            "damaged"
        )
    ids: Tensor = file.get_tensor(name)
    return ids


def _refuse_odd(tensors: dict[str, Tensor], path: Path) -> None:
    bad = spoilt(tensors)
    if bad:
        raise InputError(f"{path}: {SPOILT} {some(bad)}: the package is damaged, get it again")


def _compare(found: dict[str, Any], expected: dict[str, Any], path: Path) -> None:
    """Raise InputError listing every tensor that is missing, unknown, or of another shape or
    dtype."""
    complaints = []
    if missing := sorted(expected.keys() - found.keys()):
        complaints.append(f"missing {some(missing)}")
    if extra := sorted(found.keys() - expected.keys()):
        complaints.append(f"unexpected {some(extra)}")
    odd = [
        f"{name} is {found[name][1]} {list(found[name][0])}, needs {expected[name][1]} "
        f"{list(expected[name][0])}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
    if odd:
        complaints.append(f"wrong shape or dtype: {some(odd)}")
    if complaints:
        raise InputError(
            f"{path}: {'; '.join(complaints)}. Nothing is loaded in part: get the package again"
        )
