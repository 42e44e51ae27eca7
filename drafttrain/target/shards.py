"""What a store of features keeps, and how its files look: contents, shards, the layout of a shard's
file, and the digests by which they are known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from drafttrain.checks import is_count
from drafttrain.data.datamodule import ConversationData
from drafttrain.flow import Needs
from drafttrain.target.configs import digest
from drafttrain.target.encoding import ENCODINGS, SCALE, Encoding
from drafttrain.target.features import names_of

FORMAT = 1
PARTS = ("target", "set", "contents", "batches")
"""What a manifest says next to its shards: the settings that the store was made with."""
_ALIGN = 64


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What is kept of every token."""

    width: int
    last_hidden: bool
    layers: tuple[int, ...]
    """Ascending."""
    encoding: str

    @property
    def code(self) -> Encoding:
        return ENCODINGS[self.encoding]

    @property
    def needs(self) -> Needs:
        return Needs(last_hidden=self.last_hidden, layers=self.layers)

    @property
    def names(self) -> list[str | int]:
        return names_of(self.needs)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return self.code.bytes_of(self.width) * len(self.names)

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {**asdict(self), "layers": list(self.layers)}

    def words(self) -> str:
        """As settings of the capture that makes such a store."""
        last, layers = str(self.last_hidden).lower(), ",".join(map(str, self.layers))
        return f"last_hidden={last} layers=[{layers}] encoding={self.encoding}"


@dataclass(frozen=True)
class Shard:
    """Rows of one file, in their order there."""

    number: int
    rows: tuple[int, ...]
    """Numbers of rows in the conversation set."""
    lengths: tuple[int, ...]
    """Tokens kept of each."""

    @property
    def name(self) -> str:
        return f"shard-{self.number:05d}.safetensors"

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class Piece:
    """A tensor's place in a file: (n w) bytes from `start` on, n the shard's tokens."""

    start: int
    width: int


@dataclass(frozen=True)
class Layout:
    """How a shard's file looks."""

    head: bytes
    """Its safetensors header with the length before it."""
    pieces: dict[str, Piece]
    """By the tensor's name, in the file's order."""
    size: int
    """Bytes of the entire file."""


def layout_of(shard: Shard, contents: Contents, stamp: str) -> Layout:
    """The layout of a shard.

    Tensors: `last_hidden` and `layer.<number>`, (n d) each, the rows' tokens one after the other.
    Where the encoding has scales, they precede them all: `<name>.scale`, (n) float32.

    Args:
        stamp: marks the files of one store, see `stamp_of`.
    """
    code, n = contents.code, shard.tokens
    names = [tensor_name(name) for name in contents.names]
    tensors: dict[str, tuple[str, list[int], int]] = {}
    if code.largest is not None:
        tensors |= {f"{name}.scale": ("F32", [n], SCALE.itemsize) for name in names}
    tensors |= {
        name: (code.kind, [n, contents.width], contents.width * code.dtype.itemsize)
        for name in names
    }
    said: dict[str, Any] = {
        "__metadata__": {"format": str(FORMAT), "store": stamp, "shard": str(shard.number)}
    }
    pieces: dict[str, Piece] = {}
    at = 0
    for name, (kind, shape, width) in tensors.items():
        said[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + n * width]}
        pieces[name] = Piece(at, width)
        at += n * width
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    head = len(text).to_bytes(8, "little") + text
    return Layout(
        head,
        {name: Piece(len(head) + p.start, p.width) for name, p in pieces.items()},
        len(head) + at,
    )


def tensor_name(name: str | int) -> str:
    return name if isinstance(name, str) else f"layer.{name}"


def set_facts(data: ConversationData) -> dict[str, Any]:
    """What of a conversation set is kept."""
    chosen = [
        np.asarray(numbers, dtype=np.int64).tobytes() for numbers in (data.indices, data.lengths)
    ]
    return {
        "digest": data.set.digest,
        "rows": len(data),
        "tokens": data.tokens,
        "max_length": data.max_length,
        "chosen": digest(*chosen),
    }


def stamp_of(settings: Mapping[str, Any]) -> str:
    """What marks the files of one store, by the settings that it is made with."""
    return digest(json.dumps({part: settings[part] for part in PARTS}, sort_keys=True).encode())


def digest_of(manifest: Mapping[str, Any]) -> str:
    """Of all that a manifest says, but for when and by which versions the store was made."""
    said = {name: value for name, value in manifest.items() if name not in ("digest", "made")}
    return digest(json.dumps(said, sort_keys=True).encode())


def fits(value: Any) -> bool:
    """An integer that may count rows or tokens, or be a checksum of 32 bits?"""
    return is_count(value, 1 << 32)


def is_sha256(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None
