"""Conversations written by a target, as ids and a mask: the set that they are kept as.

A set is a folder with `conversations.safetensors` (ids, offsets, packed mask bits, row numbers,
split) and `manifest.json` (format, target fingerprint, settings, counts, checksum). Ids are stored
as generated, never re-encoded.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from drafttrain.data import named
from drafttrain.errors import InputError
from drafttrain.files import write_atomic, write_json

FORMAT = 1
TENSORS = "conversations.safetensors"
MANIFEST = "manifest.json"
CHECKSUM = "sha256"
"""Of the tensors' file, in the manifest."""
SOURCES = "sources"
"""In the manifest: names of the sources, where there are several."""
CATEGORIES = "categories"
"""In the manifest: names of the kinds of task, where rows name any."""
TRAIN, HELD_OUT = 0, 1
FINISH = ("stop", "length", "template")
"""How an answer ends: on a stop token; cut by a limit; on a stop token, with no later turn because
the template would show the answer otherwise there. The place in this tuple is stored."""
_LARGEST_MANIFEST = 64 << 20


@dataclass(frozen=True)
class Row:
    """One conversation."""

    row: int
    """Number of the prompt it was written for."""
    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    """[start, end) of every answer, its end token included."""
    finish: tuple[str, ...] = ()
    """How each answer ended, see FINISH; all but the last are "stop"."""
    temperature: float = 0.0

    @property
    def supervised(self) -> int:
        """Tokens that the target wrote."""
        return sum(end - start for start, end in self.spans)


class ConversationSet:
    """A set in memory: ids and mask of every row, with its manifest."""

    def __init__(
        self,
        ids: np.ndarray,
        offsets: np.ndarray,
        mask: np.ndarray,
        rows: np.ndarray,
        split: np.ndarray,
        manifest: dict[str, Any],
        temperature: np.ndarray,
        cut: np.ndarray,
        source: np.ndarray | None = None,
        category: np.ndarray | None = None,
    ) -> None:
        self.ids, self.offsets, self.mask, self.rows, self.split = ids, offsets, mask, rows, split
        self.temperature, self.cut = temperature, cut
        """Per row: how its answers were sampled, and the place in FINISH of the last one's end."""
        self.manifest = manifest
        self.source = source
        """Per row, where there are several sources: the place of its own in the manifest's."""
        self.category = category
        """Likewise its kind of task, where rows name any."""

    def __len__(self) -> int:
        return len(self.rows)

    def length(self, index: int) -> int:
        """Tokens of one row."""
        return int(self.offsets[index + 1] - self.offsets[index])

    def row(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ids (s) int64 and loss mask (s) bool of one row."""
        part = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        ids, mask = self.ids[part].astype(np.int64), self.mask[part].copy()
        return torch.from_numpy(ids), torch.from_numpy(mask)

    def indices(self, split: int) -> list[int]:
        """Numbers of the rows of a split, TRAIN or HELD_OUT."""
        return np.flatnonzero(self.split == split).tolist()

    def prompts(self, limit: int | None = None) -> list[list[int]]:
        """Ids before the first answer of each held-out row, to decode from."""
        return [ids for _, turn, ids in self.asked() if turn == 1][:limit]

    def asked(self) -> list[tuple[int, int, list[int]]]:
        """Every turn of the held-out rows, to decode from: (which of those rows, turn, ids before
        its answer). Both count from 1. All first turns come first, then all second ones, and so
        on."""
        found = []
        for number, index in enumerate(self.indices(HELD_OUT), start=1):
            ids, mask = self.row(index)
            spans = _spans(mask) or [(0, 0)]
            for turn, (start, end) in enumerate(spans, start=1):
                # A row that is answer from its first token on is decoded from that one.
                found.append((number, turn, ids[: max(start, min(1, end))].tolist()))
        return sorted(found, key=lambda one: one[1])

    def asked_also(self, indices: Iterable[int]) -> int:
        """Held-out rows whose first prompt a row of these numbers has too. Prompts of a single
        token are not compared."""
        there = set(map(self._prompt, indices))
        prompts = map(self._prompt, self.indices(HELD_OUT))
        return sum(len(prompt) > self.ids.itemsize and prompt in there for prompt in prompts)

    def _prompt(self, index: int) -> bytes:
        """The ids before a row's first answer."""
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        return self.ids[start : start + int(self.mask[start:end].argmax())].tobytes()

    def by_source(self, indices: Iterable[int]) -> dict[str, int]:
        """Rows by source, for the rows of these numbers; empty where there is only one source."""
        if self.source is None:
            return {}
        return named.counted(self.manifest[SOURCES], self.source, indices)

    def by_category(self, indices: Iterable[int]) -> dict[str, int]:
        """Rows by kind of task, for the rows of these numbers; empty where no row names one."""
        if self.category is None:
            return {}
        return named.counted(self.manifest[CATEGORIES], self.category, indices)

    def category_of(self, index: int) -> str:
        """The kind of task of a row, NO_CATEGORY where it names none."""
        if self.category is None:
            return named.NO_CATEGORY
        return str(self.manifest[CATEGORIES][int(self.category[index])])

    def categories_asked(self, numbers: Iterable[int]) -> list[str]:
        """The kinds of task of held-out rows, which are counted from 1, as in `asked`."""
        places = self.indices(HELD_OUT)
        return [self.category_of(places[number - 1]) for number in numbers]

    @property
    def supervised(self) -> int:
        """Tokens that the target wrote, over all rows."""
        return int(self.mask.sum())

    @functools.cached_property
    def digest(self) -> str:
        """Of every row's ids, mask and split."""
        content = hashlib.sha256()
        for array in (self.ids, self.offsets, self.mask, self.split):
            content.update(np.ascontiguousarray(array).tobytes())
        return content.hexdigest()[:16]


def write_set(
    folder: Path,
    rows: Iterable[Row],
    *,
    manifest: dict[str, Any],
    held_out: int | Collection[int],
    sources: Mapping[int, str] | None = None,
    categories: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """Write a set atomically. Returns the manifest.

    Args:
        held_out: how many rows, the first ones, form the held-out split; or the row numbers of it.
        sources: {row number: name of its source}, where there are several.
        categories: {row number: its kind of task}, for the rows that name one.
    """
    ordered = sorted(rows, key=lambda row: row.row)
    if not ordered:
        raise InputError(f"no conversation to write into {folder}")
    if len({row.row for row in ordered}) != len(ordered):
        raise ValueError("a row number appears twice")
    flat = np.concatenate([np.asarray(row.ids, dtype=np.int64) for row in ordered])
    kind = np.uint16 if int(flat.max()) < 1 << 16 else np.int32
    mask = np.concatenate([_mask(row) for row in ordered])
    split = _split(ordered, held_out)
    tensors: dict[str, np.ndarray] = {
        "ids": flat.astype(kind),
        "offsets": np.cumsum([0, *(len(row.ids) for row in ordered)]).astype(np.int64),
        "mask_bits": np.packbits(mask),
        "rows": np.asarray(
            [row.row for row in ordered], dtype=np.int64 if ordered[-1].row >= 1 << 31 else np.int32
        ),
        "split": split,
        "temperature": np.asarray([row.temperature for row in ordered], dtype=np.float32),
        "cut": np.asarray([FINISH.index(row.finish[-1]) for row in ordered], dtype=np.uint8),
    }
    if sources:
        names, tensors["source"] = named.encoded([sources[row.row] for row in ordered])
        manifest = {**manifest, SOURCES: names}
    if categories:
        kinds = [categories.get(row.row, named.NO_CATEGORY) for row in ordered]
        names, tensors["category"] = named.encoded(kinds)
        manifest = {**manifest, CATEGORIES: names}
    manifest = {
        "format": FORMAT,
        **manifest,
        "conversations": len(ordered),
        "held_out": int(split.sum()),
        "tokens": len(flat),
        "supervised_tokens": int(mask.sum()),
        "answers": sum(len(row.spans) for row in ordered),
        "answers_cut_by_length": sum(
            reason == "length" for row in ordered for reason in row.finish
        ),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / TENSORS, lambda path: save_file(tensors, path))
    manifest[CHECKSUM] = sha256_of(folder / TENSORS)
    write_json(folder / MANIFEST, manifest)
    return manifest


def _split(rows: list[Row], held_out: int | Collection[int]) -> np.ndarray:
    """TRAIN or HELD_OUT of every row; at least one row is for training where the first ones are
    held out."""
    split = np.zeros(len(rows), dtype=np.uint8)
    if isinstance(held_out, int):
        split[: min(held_out, len(rows) - 1)] = HELD_OUT
    else:
        split[[row.row in held_out for row in rows]] = HELD_OUT
    return split


def sha256_of(path: Path) -> str:
    """Of a file's bytes."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            found.update(chunk)
    return found.hexdigest()


def _mask(row: Row) -> np.ndarray:
    mask = np.zeros(len(row.ids), dtype=bool)
    for start, end in row.spans:
        mask[start:end] = True
    return mask


def read_set(folder: Path | str) -> ConversationSet:
    """Read and check a set. Raises InputError for what is missing, of another format, or
    contradicts itself."""
    folder = Path(folder)
    if not (folder / MANIFEST).is_file() or not (folder / TENSORS).is_file():
        raise InputError(
            f"{folder} is not a conversation set ({MANIFEST} and {TENSORS} are needed): make one "
            "with python -m drafttrain.synthesize out=<folder>"
        )
    manifest = _read_manifest(folder / MANIFEST)
    try:
        if CHECKSUM in manifest and manifest[CHECKSUM] != sha256_of(folder / TENSORS):
            raise _damaged(folder, f"its checksum is not the one in {MANIFEST}")
        tensors = _read_tensors(folder)
    except (SafetensorError, ValueError, OSError) as error:
        raise InputError(f"{folder} cannot be read: {error}") from error
    _check_rows(folder, tensors)
    ids, rows = tensors["ids"], tensors["rows"]
    mask = np.unpackbits(tensors["mask_bits"], count=len(ids)).astype(bool)
    counts = {"conversations": len(rows), "tokens": len(ids), "supervised_tokens": int(mask.sum())}
    for name, value in counts.items():
        if manifest.get(name) != value:
            raise InputError(
                f"{folder}: {MANIFEST} says {name} {manifest.get(name)}, {TENSORS} has {value}; "
                "make the set again"
            )
    offsets, split, temperature, cut = (
        tensors[name] for name in ("offsets", "split", "temperature", "cut")
    )
    columns: list[np.ndarray | None] = []
    for key, name in _NAMED.items():
        column = tensors.get(name) if key in manifest else None
        why = "" if column is None else named.fault(manifest[key], column, len(rows))
        if why:
            raise _damaged(folder, f"{name}: {why}")
        columns.append(column)
    return ConversationSet(ids, offsets, mask, rows, split, manifest, temperature, cut, *columns)


def _damaged(folder: Path, why: str) -> InputError:
    return InputError(f"{folder / TENSORS}: the set is damaged, make it again ({why})")


def _read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a set. Kinds and sizes are looked at before anything is read into memory."""
    with safe_open(folder / TENSORS, framework="np") as file:
        lacking = sorted(_KINDS.keys() - set(file.keys()))
        if lacking:
            raise _damaged(folder, f"it lacks {', '.join(lacking)}")
        parts = {name: file.get_slice(name) for name in _KINDS}
        shapes = {name: part.get_shape() for name, part in parts.items()}
        odd = [
            n
            for n, part in parts.items()
            if part.get_dtype() not in _KINDS[n] or len(shapes[n]) != 1
        ]
        if odd:
            why = f"{', '.join(odd)} of another kind than written by this version"
            raise _damaged(folder, why)
        sizes = {name: int(shape[0]) for name, shape in shapes.items()}
        count = sizes["rows"]
        if not (
            count > 0
            and sizes["offsets"] == count + 1
            and all(sizes[name] == count for name in ("split", "temperature", "cut"))
            and sizes["mask_bits"] == (sizes["ids"] + 7) // 8
        ):
            raise _damaged(folder, f"sizes do not fit together: {sizes}")
        there = set(file.keys()) & set(_NAMED.values())
        more = [name for name in there if file.get_slice(name).get_dtype() == "U16"]
        return {name: file.get_tensor(name) for name in (*_KINDS, *more)}


def _check_rows(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Raise InputError for values that no writer of sets writes."""
    ids, offsets, rows = tensors["ids"], tensors["offsets"], tensors["rows"]
    if not (
        offsets[0] == 0 and offsets[-1] == len(ids) and bool((offsets[1:] > offsets[:-1]).all())
    ):
        raise _damaged(folder, "its rows do not cover the ids")
    if int(ids.min()) < 0 or int(rows.min()) < 0 or len(np.unique(rows)) != len(rows):
        why = "negative ids, or a row number that is negative or appears twice"
        raise _damaged(folder, why)
    if int(tensors["split"].max()) > HELD_OUT:
        raise _damaged(folder, "a split that is neither train nor held-out")
    if int(tensors["cut"].max()) >= len(FINISH) or not bool((tensors["temperature"] >= 0).all()):
        raise _damaged(folder, "a temperature or an end of an answer that there is none of")


_KINDS = {
    "ids": ("U16", "I32"),
    "offsets": ("I64",),
    "mask_bits": ("U8",),
    "rows": ("I32", "I64"),
    "split": ("U8",),
    "temperature": ("F32",),
    "cut": ("U8",),
}


_NAMED = {SOURCES: "source", CATEGORIES: "category"}
"""Columns that a set may have: names in the manifest, places among them in the tensors."""


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        size = path.stat().st_size
        if size > _LARGEST_MANIFEST:
            raise InputError(f"{path} has {size} bytes: not a manifest")
        manifest = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    form = manifest.get("format") if isinstance(manifest, dict) else None
    if form != FORMAT:
        raise InputError(f"{path}: format {form}, this version reads {FORMAT}")
    target = manifest.get("target")
    known = target.get("fingerprint") if isinstance(target, dict) else None
    if not isinstance(known, dict) or not all(isinstance(value, str) for value in known.values()):
        raise InputError(
            f"{path} does not say which target wrote the set (target.fingerprint): make the set "
            "again"
        )
    return manifest


def check_vocabulary(
    data: ConversationSet, vocab_size: int, name: str = "the conversation set"
) -> None:
    """Raise InputError if an id is beyond a target's vocabulary."""
    largest = int(data.ids.max())
    if largest >= vocab_size:
        raise InputError(
            f"{name} holds id {largest}, the target's vocabulary ends at {vocab_size - 1}: use the "
            "target that wrote it"
        )


def rows_of(data: ConversationSet) -> Iterator[Row]:
    """The rows that a set was written from."""
    for index in range(len(data)):
        ids, mask = data.row(index)
        spans = tuple(_spans(mask))
        last = FINISH[int(data.cut[index])]
        finish = ("stop",) * (len(spans) - 1) + (last,)
        yield Row(
            int(data.rows[index]),
            tuple(ids.tolist()),
            spans,
            finish,
            _plain(data.temperature[index]),
        )


def _spans(mask: torch.Tensor) -> list[tuple[int, int]]:
    """[start, end) of every answer that a loss mask (s) has."""
    edges = np.diff(np.concatenate([[0], mask.numpy().astype(np.int8), [0]]))
    return [(int(start), int(end)) for start, end in np.flatnonzero(edges).reshape(-1, 2)]


def _plain(value: np.float32) -> float:
    """The shortest decimal that float32 rounds to this value: 0.7 stays 0.7."""
    return float(str(value))
