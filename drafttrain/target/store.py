"""A store of features: what drafters read of a target, of every token of a conversation set, in
files that are mapped into memory.

    shard-00000.safetensors, ...
        features of some rows each; `filling.py` writes them
    manifest.json
        what they are of: target, set, contents; each shard's rows, their lengths, and its checksum

The manifest decides each shard's header and size to the byte. Only a file that has exactly these is
mapped, so nothing in a file decides how much memory is taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafttrain.data.conversations import MANIFEST, sha256_of
from drafttrain.data.datamodule import ConversationData
from drafttrain.errors import InputError
from drafttrain.target.encoding import ENCODINGS, SCALE
from drafttrain.target.shards import (
    FORMAT,
    PARTS,
    Contents,
    Shard,
    digest_of,
    fits,
    is_sha256,
    layout_of,
    stamp_of,
    tensor_name,
)

AGAIN = "run the same capture again, it writes only what is missing or damaged"
_LARGEST_MANIFEST = 64 << 20
_LARGEST_HEADER = 1 << 20
_ENOUGH = 16
"""Tokens of a row in which features of one layer differ from those of another."""

_verified: set[tuple[str, int, int, str]] = set()
"""Files that this process has read in full and found right, with size, time and checksum."""


class Store:
    """A finished store. Shards are mapped when rows of theirs are asked for.

    Raises: InputError for a folder that is no store, and for a manifest that is damaged or
    contradicts itself.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).expanduser()
        manifest = self._read_manifest()
        self.fingerprint: dict[str, str] = manifest["target"]["fingerprint"]
        """Of the target that read the set."""
        self.set: dict[str, Any] = manifest["set"]
        """See `set_facts`."""
        self.digest: str = manifest["digest"]
        self.stamp = stamp_of(manifest)
        self.contents = self._contents(manifest["contents"])
        self.shards: list[Shard] = []
        self.checksums: list[str] = []
        """sha256 of every shard's file."""
        for number, said in enumerate(manifest["shards"]):
            self._add(number, said)
        rows = np.concatenate([np.asarray(shard.rows, dtype=np.int64) for shard in self.shards])
        self._order = np.argsort(rows, kind="stable")
        self._rows = rows[self._order]
        """Numbers of all rows, ascending; `_order` are their places in the order of the shards."""
        if bool((self._rows[1:] == self._rows[:-1]).any()):
            raise self._damaged("a row is named twice")
        self._lengths = np.concatenate(
            [np.asarray(shard.lengths, dtype=np.int64) for shard in self.shards]
        )
        counted = len(rows), int(self._lengths.sum())
        if counted != (self.set.get("rows"), self.set.get("tokens")):
            raise self._damaged(
                "its shards have {} rows of {} tokens, set says otherwise".format(*counted)
            )
        self._shard_of = np.repeat(
            np.arange(len(self.shards)), [len(shard.rows) for shard in self.shards]
        )
        self._starts = np.concatenate(
            [np.cumsum([0, *shard.lengths[:-1]]) for shard in self.shards]
        )
        self._maps: dict[int, dict[str, Tensor]] = {}
        self._files: dict[int, tuple[tuple[int, int], int]] = {}
        """Device, inode and size of each mapped file."""

    @property
    def bytes(self) -> int:
        """Of all shards."""
        return sum(layout_of(shard, self.contents, self.stamp).size for shard in self.shards)

    # The manifest ---------------------------------------------------------------------------------
    def _damaged(self, why: str) -> InputError:
        return InputError(
            f"{self.path / MANIFEST} is damaged ({why}): make the store again in another folder"
        )

    def _read_manifest(self) -> dict[str, Any]:
        path = self.path / MANIFEST
        if not path.is_file():
            raise InputError(
                f"{self.path} is not a finished store of features, it has no {MANIFEST}: make one "
                "with python -m drafttrain.capture out=<folder>; a capture that was stopped goes "
                "on with the same command"
            )
        try:
            if path.stat().st_size > _LARGEST_MANIFEST:
                raise InputError(f"{path} has {path.stat().st_size} bytes: not a manifest")
            found = json.loads(path.read_bytes())
            said = digest_of(found) if isinstance(found, dict) else ""
        except (ValueError, RecursionError, OSError) as error:
            raise InputError(f"{path} cannot be read: {error}") from error
        form = found.get("format") if isinstance(found, dict) else None
        if form != FORMAT or isinstance(form, bool):
            raise InputError(
                f"{path}: format {str(form)[:40]} of stores, this version reads {FORMAT}: make the "
                "store again"
            )
        lacking = [part for part in PARTS if not isinstance(found.get(part), dict)]
        if lacking:
            raise InputError(
                f"{path} is no store's, it lacks {', '.join(lacking)}: give the folder of a store"
            )
        if found.get("digest") != said:
            raise self._damaged("its checksum is another")
        marks = found["target"].get("fingerprint")
        if not isinstance(marks, dict) or not all(isinstance(mark, str) for mark in marks.values()):
            raise self._damaged("no target.fingerprint")
        if not isinstance(found.get("shards"), list) or not found["shards"]:
            raise self._damaged("no shards")
        return found

    def _contents(self, said: dict[str, Any]) -> Contents:
        layers = said.get("layers")
        right = (
            set(said) == {"width", "last_hidden", "layers", "encoding"}
            and fits(said["width"])
            and said["width"] > 0
            and isinstance(said["last_hidden"], bool)
            and isinstance(layers, list)
            and all(map(fits, layers))
            and layers == sorted(set(layers))
            and (said["last_hidden"] or layers)
        )
        if not right:
            raise self._damaged("contents are not width, last_hidden, layers and encoding")
        if not isinstance(said["encoding"], str) or said["encoding"] not in ENCODINGS:
            raise self._damaged(
                f"encoding {str(said['encoding'])[:40]}; known are {', '.join(ENCODINGS)}"
            )
        return Contents(**{**said, "layers": tuple(said["layers"])})

    def _add(self, number: int, said: Any) -> None:
        if (
            not isinstance(said, dict)
            or set(said) != {"file", "sha256", "rows", "lengths"}
            or not is_sha256(said["sha256"])
        ):
            raise self._damaged(f"shard {number} is not file, sha256, rows and lengths")
        rows, lengths = said["rows"], said["lengths"]
        right = (
            isinstance(rows, list) and isinstance(lengths, list) and len(rows) == len(lengths) > 0
        )
        if not right or not all(map(fits, rows)) or not all(fits(n) and n > 0 for n in lengths):
            raise self._damaged(f"rows and lengths of shard {number}")
        shard = Shard(number, tuple(rows), tuple(lengths))
        if said["file"] != shard.name:
            raise self._damaged(
                f"shard {number} is {str(said['file'])[:80]!r}, its file's name is {shard.name}"
            )
        self.shards.append(shard)
        self.checksums.append(said["sha256"])

    # Rows -----------------------------------------------------------------------------------------
    def check_data(self, data: ConversationData) -> None:
        """Raise InputError unless the store holds these rows, as far as they are asked for."""
        again = f"python -m drafttrain.capture out=<folder> {self.contents.words()} data.path=<set>"
        if self.set.get("digest") != data.set.digest:
            raise InputError(
                f"{self.path} is of another conversation set (digest {self.set.get('digest')}; "
                f"that of {data.name} is {data.set.digest}): give the set that it was made of, or "
                f"make a store of this one: {again}"
            )
        rows, lengths = np.asarray(data.indices), np.asarray(data.lengths)
        places = self._find(rows)
        lacking = rows[places < 0]
        if len(lacking):
            raise InputError(
                f"{self.path} lacks {len(lacking)} of the {len(rows)} rows asked for, row "
                f"{lacking[0]} first: train on rows that it has, or make a store with this run's "
                f"data.* settings: {again}"
            )
        short = np.flatnonzero(self._lengths[places] < lengths)
        if len(short):
            first = short[0]
            raise InputError(
                f"{self.path} holds {self._lengths[places[first]]} tokens of row {rows[first]}, "
                f"{lengths[first]} are asked for: set data.max_length={self.set.get('max_length')} "
                f"as it was made with, or make a store with this run's data.max_length: {again}"
            )

    def _find(self, rows: np.ndarray) -> np.ndarray:
        """Places of rows in the order of the shards, -1 for a row that is not there."""
        at = np.searchsorted(self._rows, rows).clip(max=len(self._rows) - 1)
        return np.where(self._rows[at] == rows, self._order[at], -1)

    def shards_of(self, data: ConversationData) -> list[int]:
        """Numbers of the shards that hold a split's rows, which `check_data` has found there."""
        return np.unique(self._shard_of[self._find(np.asarray(data.indices))]).tolist()

    def sample(self, data: ConversationData, shards: Sequence[int]) -> list[int]:
        """A place in the data for each of some shards: a short row of several tokens."""
        found = self._shard_of[self._find(np.asarray(data.indices))]
        lengths = np.asarray(data.lengths)
        places = []
        for number in shards:
            held = np.flatnonzero(found == number)
            # Shorter rows come after all that have enough.
            rank = np.where(lengths[held] >= _ENOUGH, lengths[held], (1 << 40) - lengths[held])
            places.append(int(held[rank.argmin()]))
        return places

    def longest(self, data: ConversationData, shards: Sequence[int]) -> int:
        """The place in the data of the longest row that some shards hold."""
        found = self._shard_of[self._find(np.asarray(data.indices))]
        return int(np.where(np.isin(found, shards), data.lengths, -1).argmax())

    def rows(self, tensor: str, rows: Sequence[int], lengths: Sequence[int]) -> list[Tensor]:
        """(n w) uint8 for each row: the bytes of its first n tokens, as views of the mapped files.

        Raises: ValueError for what `check_data` would have refused; InputError if a file was cut.
        """
        found = []
        places = self._find(np.asarray(rows))
        for number in np.unique(self._shard_of[places[places >= 0]]).tolist():
            self._refuse_cut(number)
        for place, n in zip(places.tolist(), lengths, strict=True):
            if place < 0 or n > self._lengths[place]:
                raise ValueError("a row, or a part of it, that the store does not hold")
            start = int(self._starts[place])
            found.append(self.mapped(int(self._shard_of[place]))[tensor][start : start + n])
        return found

    # Shards ---------------------------------------------------------------------------------------
    def mapped(self, number: int) -> dict[str, Tensor]:
        """{name: (n w) uint8} of a shard, mapped. Raises InputError if its header or size is not
        the one that is announced."""
        if number not in self._maps:
            shard = self.shards[number]
            path, layout = self.path / shard.name, layout_of(shard, self.contents, self.stamp)
            try:
                status = path.stat()
                there = status.st_size
                if not path.is_file():
                    raise InputError(f"{path} is no file: {AGAIN}")
                with path.open("rb") as file:
                    head = file.read(8)
                    head += file.read(min(int.from_bytes(head, "little"), _LARGEST_HEADER))
            except OSError as error:
                raise InputError(f"{path} cannot be read ({error.strerror}): {AGAIN}") from error
            if head != layout.head:
                raise InputError(f"{path} is damaged ({_difference(head, layout.head)}): {AGAIN}")
            if there != layout.size:
                raise InputError(
                    f"{path} is damaged ({there} bytes instead of {layout.size}): {AGAIN}"
                )
            raw = torch.from_file(str(path), shared=False, size=layout.size, dtype=torch.uint8)
            self._files[number] = (status.st_dev, status.st_ino), layout.size
            self._maps[number] = {
                name: raw[piece.start : piece.start + shard.tokens * piece.width].view(
                    shard.tokens, piece.width
                )
                for name, piece in layout.pieces.items()
            }
        return self._maps[number]

    def _refuse_cut(self, number: int) -> None:
        """Raise InputError if a mapped file was made shorter since: to read what it has lost ends
        the process. One that was removed or replaced can still be read."""
        if number not in self._maps:
            return
        path, (file, size) = self.path / self.shards[number].name, self._files[number]
        try:
            now = path.stat()
        except OSError:
            return
        if (now.st_dev, now.st_ino) == file and now.st_size < size:
            raise InputError(
                f"{path} is damaged (cut to {now.st_size} of {size} bytes while it is read): "
                f"{AGAIN}"
            )

    def verify(self, number: int) -> None:
        """Read a shard in full, once in a process.

        Raises: InputError if its checksum is another, or if features are not finite (naming their
        rows).
        """
        shard, tensors = self.shards[number], self.mapped(number)
        path = self.path / shard.name
        status = path.stat()
        mark = (str(path.resolve()), status.st_size, status.st_mtime_ns, self.checksums[number])
        if mark in _verified:
            return
        if sha256_of(path) != self.checksums[number]:
            raise InputError(f"{path} is damaged (its checksum is another): {AGAIN}")
        bad: set[int] = set()
        edges = np.cumsum(shard.lengths)
        chunk = max(1, (1 << 22) // self.contents.width)
        for name in self.contents.names:
            for start in range(0, shard.tokens, chunk):
                self._refuse_cut(number)
                values = self.decoded(
                    name, {part: found[start : start + chunk] for part, found in tensors.items()}
                )
                odd = (~torch.isfinite(values).all(-1)).nonzero()[:, 0].numpy() + start
                bad |= {
                    shard.rows[place]
                    for place in np.searchsorted(edges, odd, side="right").tolist()
                }
        if bad:
            listed = ", ".join(map(str, sorted(bad)[:10])) + (
                f" and {len(bad) - 10} more" if len(bad) > 10 else ""
            )
            raise InputError(
                f"{path}: features of rows {listed} are not finite: make the store again with "
                "target.dtype=float32, or leave these rows out of the set"
            )
        _verified.add(mark)

    def tensors_of(self, name: str | int) -> list[str]:
        """Names of the tensors that hold a part of the features."""
        tensor = tensor_name(name)
        return [tensor] if self.contents.code.largest is None else [tensor, f"{tensor}.scale"]

    def decoded(self, name: str | int, parts: Mapping[str, Tensor]) -> Tensor:
        """(... d) features in the dtype that the encoding serves.

        Args:
            parts: bytes (... w) of each of `tensors_of(name)`.
        """
        code, tensor = self.contents.code, tensor_name(name)
        scales = None if code.largest is None else parts[f"{tensor}.scale"].view(SCALE)[..., 0]
        return code.decode(parts[tensor].view(code.dtype), scales)

    def close(self) -> None:
        """Let go of the mapped files."""
        self._maps.clear()


def _difference(found: bytes, wanted: bytes) -> str:
    """How a shard's header differs from the one it should have."""
    length = int.from_bytes(found[:8], "little")
    if length > _LARGEST_HEADER:
        return f"its header claims {length} bytes"
    try:
        there, right = json.loads(found[8:]), json.loads(wanted[8:])
    except (ValueError, RecursionError):
        return "its header cannot be read"
    if not isinstance(there, dict) or there.get("__metadata__") != right["__metadata__"]:
        return "it is a shard of another store, or another shard of this one"
    odd = [name for name in right if there.get(name) != right[name]] + [
        name for name in there if name not in right
    ]
    if not odd:
        return "its header is written otherwise"
    return f"{odd[0]} is {str(there.get(odd[0]))[:120]}, needs {right.get(odd[0])}"
