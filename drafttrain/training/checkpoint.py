"""Checkpoints: the weights that are trained, the optimiser's state and the place in the run.
Tensors and plain values only.

Files are replaced at once, so a kill or a full disk leaves the old ones. They are read with
`weights_only`, which runs no code of the file's. When they are written: `keeper.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from drafttrain.checks import is_count
from drafttrain.errors import InputError
from drafttrain.files import write_atomic
from drafttrain.nn.spoilt import SPOILT, spoilt
from drafttrain.packaging.checking import some
from drafttrain.training.optim import moments_of

_PARTS: dict[str, tuple[str, ...]] = {
    "weights": (),
    "optimiser": (),
    "progress": ("position", "updates", "empty_windows", "supervised", "seconds"),
    "keeper": ("best", "best_update", "without_progress"),
    "decode": ("measured_at", "evaluations", "seconds"),
    "facts": ("target",),
    "settings": (),
}
"""What a checkpoint holds in addition to its format."""
FORMAT = 2
_MOST_VALUES, _DEEPEST = 1 << 17, 64
"""Of what a checkpoint holds in addition to its tensors' numbers."""
_MOST_BATCHES = 1 << 40
"""Of a run, which no number in a checkpoint exceeds."""
LAST, BEST = "last.ckpt", "best.ckpt"
NAMED = {"last": LAST, "best": BEST}
"""What `resume` may name, and the file in the run's folder."""


def numbered(updates: int) -> str:
    """The name of a checkpoint that is kept next to these two."""
    return f"update-{updates:08d}.ckpt"


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Raises: OSError if it cannot be written; the earlier file is then still complete."""

    def write(scratch: Path) -> None:
        with scratch.open("wb") as file:
            noted = _Noted(file)
            whole = {"format": FORMAT, **state, "sums": sums_of(state)}
            torch.save(whole, noted)  # type: ignore[arg-type]
            if noted.failed is not None:
                raise noted.failed

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, write)


class _Noted:
    """A file for `torch.save`. What the system refuses is noted, and nothing further is written:
    through torch's own writer it would come out as another error, which does not say why."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.failed: OSError | None = None

    def write(self, data: memoryview | bytes) -> int:
        self._try(lambda: self.file.write(data))
        return len(data)

    def flush(self) -> None:
        self._try(self.file.flush)

    def _try(self, work: Callable[[], Any]) -> None:
        try:
            if self.failed is None:
                work()
        except OSError as error:
            self.failed = error


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint on the CPU. Raises InputError for a file that is missing, damaged, of
    another format, or changed since it was written."""
    try:
        _check_archive(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise InputError(f"there is no checkpoint {path}") from error
    except PermissionError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # The file may be anything, and is read by a library's own rules.
        raise InputError(
            f"{path} cannot be read as a checkpoint: it is damaged or not one of this program's"
        ) from error
    if not _is_plain(state, tensors=True):
        raise InputError(
            f"{path} cannot be read as a checkpoint: it holds other things than tensors and plain "
            "values"
        )
    form = state.get("format") if isinstance(state, dict) else None
    if type(form) is not int or form != FORMAT:
        raise InputError(f"{path}: checkpoint format {str(form)[:40]}, this version reads {FORMAT}")
    _refuse_changed(state, path)
    return state


def _check_archive(path: Path) -> None:
    """Raise ValueError unless what a file unfolds to is no larger than the file, since torch.save
    packs nothing, and its bytes are those that were written."""
    if path.exists() and not path.is_file():
        raise ValueError("not a file")
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
        packed = any(
            part.compress_type != zipfile.ZIP_STORED or part.file_size != part.compress_size
            for part in parts
        )
        if packed or sum(part.file_size for part in parts) > path.stat().st_size:
            raise ValueError("packed")
        if archive.testzip() is not None:
            raise ValueError("a checksum is another")


def _is_plain(value: Any, *, tensors: bool) -> bool:
    """Is it made of plain values, of moderate number and depth? A few bytes can refer to one
    another so often that looking at all of it would take for ever.

    Args:
        tensors: may there be tensors too?
    """
    waiting, left = [(value, 0)], _MOST_VALUES
    while waiting:
        one, depth = waiting.pop()
        inner: list[Any] = []
        if isinstance(one, dict):
            inner = [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            inner = list(one)
        elif isinstance(one, int):
            if one.bit_length() > 64:
                return False
        elif not (
            one is None
            or isinstance(one, str | float | bytes)
            or (tensors and isinstance(one, torch.Tensor))
        ):
            return False
        left -= len(inner)
        if left < 0 or depth > _DEEPEST:
            return False
        waiting += [(part, depth + 1) for part in inner]
    return True


def digest_of(weights: Mapping[str, torch.Tensor]) -> str:
    """What identifies weights: of their names, shapes, dtypes and bytes."""
    found = hashlib.sha256()
    for name in sorted(weights):
        weight = weights[name].detach().cpu().contiguous()
        found.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        held: Any = weight.reshape(-1).view(torch.uint8).numpy()
        found.update(held)
    return found.hexdigest()


_SUMS = ("weights", "moments", "numbers")


def sums_of(state: Mapping[str, Any]) -> dict[str, str]:
    """{part: digest} of what a run goes on from, by which a change from outside is noticed."""
    tensors = tensors_of({"weights": {}, "optimiser": {"state": {}}, **state})
    own = {name: value for name, value in tensors.items() if name in state.get("weights", {})}
    moments = {name: value for name, value in tensors.items() if name not in own}
    rest = [state.get(part) for part in ("progress", "keeper", "decode", "facts")]
    text = json.dumps(rest, sort_keys=True, default=str)
    sums = digest_of(own), digest_of(moments), hashlib.sha256(text.encode()).hexdigest()
    return dict(zip(_SUMS, sums, strict=True))


def _refuse_changed(state: dict[str, Any], path: Path) -> None:
    """Take the digests out of a state that was read, and compare them."""
    known = state.pop("sums", None)
    if known is None:  # Earlier versions noted none.
        return
    try:
        found = sums_of(state)
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError):  # Of no known form.
        found = {}
    named = known if isinstance(known, dict) else {}
    odd = [part for part in _SUMS if part not in found or named.get(part) != found[part]]
    if odd:
        raise InputError(
            f"{path} was changed since it was written ({', '.join(odd)}): give the checkpoint as "
            "it was, or start a new run with init_from=<a package>"
        )


def check_facts(state: Mapping[str, Any], path: Path) -> None:
    """Raise InputError unless a checkpoint says which run it is of."""
    _check_parts(state, path, ("facts", "settings"))


def check_complete(state: Mapping[str, Any], path: Path) -> None:
    """Raise InputError unless a checkpoint holds all that a run goes on from."""
    _check_parts(state, path, _PARTS)
    _check_counts(state, path)
    held = state["weights"]
    odd = [name for name in held if not (isinstance(name, str) and _is_numbers(held[name]))]
    if odd:
        raise InputError(
            f"{path} holds weights that are no tensors ({some(odd)}): it is damaged, give another "
            "one"
        )
    _check_optimiser(state, path)
    odd = spoilt(tensors_of(state))
    if odd:
        raise InputError(f"{path}: {SPOILT} {some(odd)}: give another one")


def _check_counts(state: Mapping[str, Any], path: Path) -> None:
    progress, keeper, decode = state["progress"], state["keeper"], state["decode"]
    at = [is_count(progress[name]) for name in ("position", "updates", "empty_windows")]
    at.append(is_count(progress.get("spoilt_windows", 0)))  # Earlier versions counted none.
    took = [_is_amount(progress[name]) for name in ("supervised", "seconds")]
    if not all((*at, *took)) or not progress["updates"] <= progress["position"] < _MOST_BATCHES:
        raise InputError(
            f"{path} says that its run was at {str(progress)[:120]}: it is damaged, give another "
            "one"
        )
    best, at_update = keeper["best"], keeper["best_update"]
    found = (best is None and at_update is None) or (
        _is_amount(best) and is_count(at_update) and at_update <= progress["updates"]
    )
    digest = keeper.get("best_digest")  # Earlier versions noted none.
    named = digest is None or isinstance(digest, str)
    counted = all(_are_counts(keeper.get(name)) for name in ("peak", "progress"))
    if not (found and named and counted and is_count(keeper["without_progress"])):
        raise InputError(
            f"{path} says that its best was {str(keeper)[:120]}: it is damaged, give another one"
        )
    if decode is None:
        return
    never = decode["measured_at"] is None
    counted = is_count(decode["evaluations"]) and (never or is_count(decode["measured_at"]))
    if not (counted and _is_amount(decode["seconds"])):
        raise InputError(
            f"{path} says that it had measured {str(decode)[:120]}: it is damaged, give another one"
        )


def _are_counts(value: Any) -> bool:
    """Are these tokens and rounds of each prompt? Earlier versions noted none."""
    return value is None or (
        isinstance(value, list)
        and all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in value)
        and all(is_count(number) for pair in value for number in pair)
    )


def _check_optimiser(state: Mapping[str, Any], path: Path) -> None:
    """Raise InputError unless there are moments of every weight, as one update makes them."""
    optimiser, updates = state["optimiser"], state["progress"]["updates"]
    held, groups = optimiser.get("state"), optimiser.get("param_groups")
    counted = isinstance(groups, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(map(is_count, group["params"]))
        for group in groups
    )
    if not (isinstance(held, dict) and counted):
        raise InputError(
            f"{path} lacks optimiser: state, param_groups: it is damaged, give another one"
        )
    kept = {n: moments_of(group) for group in groups for n in group["params"]} if updates else {}
    lacking = [
        f"{name} of weight {number}"
        for number, names in kept.items()
        for name in names
        if not _is_numbers(_entry(held, number, name))
    ]
    if lacking:
        raise InputError(
            f"{path} lacks moments of the optimiser ({some(lacking)}): it is damaged, give "
            "another one"
        )
    for number in (number for number, names in kept.items() if "step" in names):
        step = held[number]["step"]
        if step.numel() != 1 or not 1 <= step.item() <= updates:
            raise InputError(
                f"{path} says that weight {number} was changed {str(step.tolist())[:40]} times in "
                f"{updates} updates: it is damaged, give another one"
            )


def _entry(held: Mapping[Any, Any], number: object, name: str) -> object:
    moments = held.get(number)
    return moments.get(name) if isinstance(moments, dict) else None


def tensors_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Weights and moments of a checkpoint, by names that people can read."""
    found = {str(name): value for name, value in state["weights"].items()}
    for number, moments in state["optimiser"]["state"].items():
        own = moments.items() if isinstance(moments, dict) else ()
        found |= {f"{name} of weight {number}": value for name, value in own}
    return {name: value for name, value in found.items() if _is_numbers(value)}


def _is_numbers(value: object) -> bool:
    """Is it a tensor whose numbers can be read and compared?"""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not (value.is_quantized or value.is_complex() or value.is_meta)
        and not (value.is_floating_point() and value.dtype.itemsize == 1)
    )


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _check_parts(state: Mapping[str, Any], path: Path, parts: Iterable[str]) -> None:
    for part in parts:
        names, found = _PARTS[part], state.get(part)
        if part == "decode" and part in state and found is None:
            continue
        lacking = [name for name in names if not isinstance(found, dict) or name not in found]
        if (
            isinstance(found, dict)
            and part not in ("weights", "optimiser")
            and not _is_plain(found, tensors=False)
        ):
            raise InputError(
                f"{path} holds {part} that are no plain values: it is damaged, give another one"
            )
        if lacking or not isinstance(found, dict):
            raise InputError(
                f"{path} lacks {part}{': ' if lacking else ''}{', '.join(lacking)}: it is damaged, "
                "give another one"
            )
