"""A reduced draft vocabulary in the engines' words: ids that ascend, to offsets and marks, and
back.

`d2t` (w) int64 has offsets: target id = draft id + d2t[draft id]. `t2d` (v) bool is true where a
target's token can be drafted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drafttrain.errors import InputError

if TYPE_CHECKING:
    from drafttrain.layouts.inspection import Inspection

MAPS = ("d2t", "t2d")


def maps_of(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """d2t and t2d of ids that can be drafted.

    Args:
        ids: (w) int64, ascending.
    Raises: ValueError for ids that do not ascend within the vocabulary.
    """
    check_ids(ids, vocab_size)
    marks = torch.zeros(vocab_size, dtype=torch.bool)
    marks[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": marks}


def ids_of(d2t: Tensor) -> Tensor:
    """(w) int64 the ids that offsets lead to."""
    return d2t.to(torch.int64) + torch.arange(len(d2t))


def check_ids(ids: Tensor, vocab_size: int) -> None:
    if (
        ids.ndim != 1
        or not len(ids)
        or int(ids.min()) < 0
        or int(ids.max()) >= vocab_size
        or bool((ids[1:] <= ids[:-1]).any())
    ):
        raise ValueError(f"draft ids must ascend within 0..{vocab_size - 1}, each once")


def read_ids(name: str, tensor: Tensor, vocab_size: int) -> Tensor:
    """A list of ids from a foreign file, checked but not sorted.

    Raises: InputError.
    """
    if (
        tensor.dtype not in (torch.int64, torch.int32)
        or tensor.ndim != 1
        or not 2 <= len(tensor) <= vocab_size
    ):
        raise InputError(
            f"{name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}: needs 2 "
            f"to {vocab_size} ids of int64"
        )
    ids = tensor.to(torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) != len(ids):
        raise InputError(
            f"{name} must have each of its ids once, all of them from 0 to {vocab_size - 1}"
        )
    return ids


def check(
    inspection: Inspection[Any],
    vocab_size: int | None,
    draft_size: int | None,
    *,
    read: bool = True,
) -> None:
    """d2t, t2d and the head's rows against the two sizes.

    Args:
        read: does this engine read a draft vocabulary at all?
    """
    held = inspection.head.tensors
    if vocab_size is None or draft_size is None:
        return
    reduced = draft_size != vocab_size
    if draft_size > vocab_size:
        inspection.add(
            "draft-vocab-size", f"draft_vocab_size is {draft_size}, vocab_size only {vocab_size}"
        )
        return
    if not reduced:
        if any(name in held for name in MAPS):
            inspection.add(
                "d2t-for-whole-vocabulary",
                "d2t or t2d is there though every token can be drafted: leave it out",
                fatal=False,
            )
        return
    if not read:
        inspection.add(
            "draft-vocab-not-read",
            f"{inspection.engine} drafts from the target's full head: no reduced vocabulary",
        )
        return
    if "d2t" not in held:
        inspection.add(
            "d2t-missing",
            f"drafts from {draft_size} of {vocab_size} tokens, but d2t is not there: drafts would "
            "be the first ids",
        )
        return
    entry = held["d2t"]
    if entry.shape != (draft_size,) or entry.dtype not in ("I64", "I32"):
        inspection.add("d2t-shape", f"d2t is {entry}, needs I64 [{draft_size}]")
        return
    if "t2d" not in held:
        inspection.add(
            "t2d-missing",
            "d2t is there without t2d: engines pass over t2d, trainers and drafttrain.adopt "
            "compare the two; write it",
            fatal=False,
        )
    _compare_maps(inspection, vocab_size, draft_size)


def _compare_maps(inspection: Inspection[Any], vocab_size: int, draft_size: int) -> None:
    offsets = inspection.head.read("d2t").to(torch.int64)
    marks = _marks(inspection, vocab_size)
    _check_offsets(inspection, offsets, marks, vocab_size)
    if marks is not None and not inspection.found("d2t-absolute"):
        ids = ids_of(offsets)
        fits = bool(((ids >= 0) & (ids < vocab_size)).all())
        if int(marks.sum()) != draft_size or (fits and not bool(marks[ids].all())):
            inspection.add("t2d-disagrees", "t2d does not mark the tokens that d2t leads to")


def _marks(inspection: Inspection[Any], vocab_size: int) -> Tensor | None:
    entry = inspection.head.tensors.get("t2d")
    if entry is None:
        return None
    if entry.shape != (vocab_size,) or entry.dtype != "BOOL":
        inspection.add("t2d-shape", f"t2d is {entry}, needs BOOL [{vocab_size}]")
        return None
    return inspection.head.read("t2d")


def _check_offsets(
    inspection: Inspection[Any], offsets: Tensor, marks: Tensor | None, vocab_size: int
) -> None:
    ids = ids_of(offsets)
    inside = bool(((ids >= 0) & (ids < vocab_size)).all())
    # Ids where offsets belong: they ascend within the vocabulary, and as offsets they lead beyond
    # it or to unmarked tokens.
    as_ids = bool(((offsets >= 0) & (offsets < vocab_size)).all()) and bool(
        (offsets[1:] > offsets[:-1]).all()
    )
    if as_ids and (
        bool(marks[offsets].all()) and not bool(marks[ids % vocab_size].all())
        if marks is not None
        else not inside
    ):
        inspection.add(
            "d2t-absolute", "d2t holds ids; it needs offsets: target id = draft id + d2t[draft id]"
        )
        return
    if not inside:
        inspection.add(
            "d2t-out-of-range",
            f"d2t leads to ids beyond 0..{vocab_size - 1}: engines die at the first request",
        )
    elif bool((ids[1:] <= ids[:-1]).any()):
        inspection.add(
            "d2t-not-ascending", "d2t leads to the same token twice, or not in ascending order"
        )


def draft_size_of(
    config: Mapping[str, Any], inspection: Inspection[Any], vocab_size: int | None
) -> int | None:
    """`draft_vocab_size`, the full vocabulary where it is not given."""
    if config.get("draft_vocab_size") is None:
        return vocab_size
    return inspection.integer(config, "draft_vocab_size")
