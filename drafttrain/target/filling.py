"""Fill a store of features: batch by batch, by several processes, and on from where a kill stopped.

    settings.json
        while the store is made: target, set, contents, batches; work of other settings is never
        mixed in
    journal-0000.jsonl, ...
        finished batches and shards, one file a process
    shard-00000.safetensors.part
        a shard that is being filled, its room on the disk already taken
    shard-00000.safetensors, ...
        complete shards
    manifest.json
        written once every shard is complete; settings and journals are then removed

The place of every row is known before the first one is read. So every batch goes to its place at
once and is then named in the journal: what a journal names is not read again, whoever goes on. A
shard belongs to one process, that of its number % processes.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from drafttrain.data.conversations import MANIFEST, sha256_of
from drafttrain.data.datamodule import ConversationData, EpochSampler
from drafttrain.data.growing import SETTINGS, GrowingFolder
from drafttrain.data.journal import Lines, journals, records
from drafttrain.errors import InputError, refuse_full_disk, writing
from drafttrain.files import write_atomic
from drafttrain.flow import Batch
from drafttrain.target.batches import Batches
from drafttrain.target.features import SLACK, SPARE, take_room
from drafttrain.target.shards import (
    FORMAT,
    PARTS,
    Contents,
    Layout,
    Shard,
    digest_of,
    fits,
    is_sha256,
    layout_of,
    set_facts,
    tensor_name,
)
from drafttrain.target.store import Store

PART = ".part"
SMALLEST, LARGEST, WANTED = 16 << 20, 1 << 30, 64
"""Where no size of shards is asked for: bytes that one has at least and at most, and how many are
wanted, so that several processes have equal shares."""


@dataclass(frozen=True)
class Plan:
    """Every batch and its place."""

    contents: Contents
    stamp: str
    shards: list[Shard]
    batches: list[list[list[int]]]
    """[shard][k] -> places of rows in the data, in the order of the shard."""
    first: list[int]
    """Number of each shard's first batch; batches are numbered through."""

    def layout(self, shard: Shard) -> Layout:
        return layout_of(shard, self.contents, self.stamp)

    @property
    def bytes(self) -> int:
        return sum(self.layout(shard).size for shard in self.shards)


def settings_of(
    target: Mapping[str, Any], data: ConversationData, contents: Contents, batches: Batches
) -> dict[str, Any]:
    """What settings.json holds: plain JSON values. `target`: name and fingerprint."""
    return {
        "target": dict(target),
        "set": set_facts(data),
        "contents": contents.plain(),
        "batches": asdict(batches),
    }


def planned(data: ConversationData, contents: Contents, batches: Batches, stamp: str) -> Plan:
    """Rows are read in the batches of a training run's first epoch. With that run's rows, limits of
    a micro-batch and seed, features in float32 are the very bits that it would compute.

    Raises: InputError as `EpochSampler` does.
    """
    sampler = EpochSampler(
        data.lengths,
        batch_tokens=batches.batch_tokens,
        batch_rows=batches.batch_rows,
        seed=batches.seed,
    )
    limit: float = min(max(data.tokens * contents.token_bytes // WANTED, SMALLEST), LARGEST)
    if batches.shard_mb is not None:
        limit = batches.shard_mb * (1 << 20)
    plan = Plan(contents, stamp, [], [], [])
    gathered: list[list[int]] = []
    size = number = 0
    groups = sampler.batches(0)
    for number, group in enumerate(groups, start=1):
        gathered.append(group)
        size += sum(data.lengths[i] for i in group) * contents.token_bytes
        if size < limit and number < len(groups):
            continue
        places = [i for batch in gathered for i in batch]
        rows = tuple(data.indices[i] for i in places)
        lengths = tuple(data.lengths[i] for i in places)
        plan.shards.append(Shard(len(plan.shards), rows, lengths))
        plan.batches.append(gathered)
        plan.first.append(number - len(gathered))
        gathered, size = [], 0
    return plan


class StoreFolder(GrowingFolder):
    """The folder of a store, while it is filled and afterwards."""

    parts = PARTS

    def belongs(self, name: str) -> bool:
        return re.fullmatch(
            r"shard-\d{5,}\.safetensors(\.part)?", name
        ) is not None or super().belongs(name)

    def check(self, *, resume: bool) -> list[str]:
        names = super().check(resume=resume)
        if names and SETTINGS not in names and MANIFEST not in names:
            raise InputError(
                f"out={self.path} holds {names[0]} without {SETTINGS}: give another folder"
            )
        return names

    @property
    def finished(self) -> bool:
        """Is a manifest there? Shards may have been lost or damaged since."""
        return (self.path / MANIFEST).is_file()

    def progress(self) -> tuple[dict[int, int], dict[int, str]]:
        """{batch: checksum of its bytes} and {shard: sha256 of its file}, as journals and the
        manifest name them."""
        batches: dict[int, int] = {}
        shards: dict[int, str] = (
            dict(enumerate(Store(self.path).checksums)) if self.finished else {}
        )
        for kind, number, value in records(self.path, _parsed, "its batch or shard done again"):
            if kind == "batch":
                batches[number] = value
            else:
                shards[number] = value
        return batches, shards

    def missing(self, plan: Plan) -> list[Shard]:
        """Shards that are not complete."""
        _, sums = self.progress()
        return [
            shard
            for shard in plan.shards
            if shard.number not in sums or not (self.path / shard.name).is_file()
        ]

    def discard_damaged(self, plan: Plan) -> list[Shard]:
        """Remove shards of a finished store whose bytes are no longer those of its manifest.
        Returns them."""
        _, sums = self.progress()
        found = []
        for shard in plan.shards:
            path = self.path / shard.name
            if path.is_file() and sums.get(shard.number) != sha256_of(path):
                path.unlink()
                found.append(shard)
        return found

    def needed(self, plan: Plan, shards: Iterable[Shard]) -> int:
        """Bytes of shards for which no room has been taken yet."""
        total = 0
        for shard in shards:
            if not (self.path / shard.name).is_file():
                part = self.path / (shard.name + PART)
                total += max(
                    0, plan.layout(shard).size - (part.stat().st_size if part.is_file() else 0)
                )
        return total

    def check_room(self, needed: int) -> None:
        """Raise InputError unless the disk has room for this many bytes more."""
        if needed:
            refuse_full_disk(
                self.path,
                needed * SLACK,
                what=f"out={self.path}",
                remedy="Free some space, give out=<folder on another disk>, keep less "
                "(encoding=bf16, int8 or fp8; fewer layers; data.limit_rows=...), or train without "
                "a store (features=online)",
                reserve=SPARE,
            )

    def unread(self, plan: Plan, shards: Iterable[Shard]) -> int:
        """Tokens of batches that no journal names."""
        done, _ = self.progress()
        total = 0
        for shard in shards:
            if (self.path / shard.name).is_file():
                continue
            lengths = iter(shard.lengths)
            for number, group in enumerate(
                plan.batches[shard.number], start=plan.first[shard.number]
            ):
                tokens = sum(next(lengths) for _ in group)
                total += 0 if number in done else tokens
        return total

    def fill(
        self,
        plan: Plan,
        shards: Iterable[Shard],
        data: ConversationData,
        journal: Lines,
        read: Callable[[Batch], Mapping[str | int, Tensor]],
    ) -> Iterator[int]:
        """Fill shards that are missing, and seal those that were filled. Yields the tokens of every
        batch that is read.

        Args:
            data: the rows that the plan was made of.
            read: {name: (b s d)} of a batch's rows.
        """
        done, sums = self.progress()
        for shard in shards:
            path, part = self.path / shard.name, self.path / (shard.name + PART)
            layout = plan.layout(shard)
            if path.is_file() and not _has_layout(path, layout):
                path.unlink()
            if not path.is_file():
                started = _has_layout(part, layout)
                if not started:
                    part.unlink(missing_ok=True)
                    take_room(part, layout.size)
                with part.open("r+b") as file:
                    if not started:
                        with writing(part, layout.size):
                            file.write(layout.head)
                            file.flush()
                    at = 0
                    for number, group in enumerate(
                        plan.batches[shard.number], start=plan.first[shard.number]
                    ):
                        tokens = sum(data.lengths[i] for i in group)
                        place = _Place(file, layout, at, tokens)
                        at += tokens
                        if started and number in done and place.checksum() == done[number]:
                            continue
                        batch = data.batch(group)
                        crc = place.write(plan.contents, batch.lengths.tolist(), read(batch))
                        journal.write({"batch": number, "crc": crc})
                        yield tokens
                    with writing(part, layout.size):
                        os.fsync(file.fileno())
                part.replace(path)
                sums.pop(shard.number, None)
            if shard.number not in sums:
                journal.write({"shard": shard.number, "sha256": sha256_of(path)})

    def finish(self, plan: Plan, settings: Mapping[str, Any], made: Mapping[str, Any]) -> None:
        """Write the manifest, once every shard is complete.

        Args:
            made: when and by what, for people.
        """
        _, sums = self.progress()
        manifest: dict[str, Any] = {"format": FORMAT, **{part: settings[part] for part in PARTS}}
        manifest["shards"] = [
            {
                "file": shard.name,
                "sha256": sums[shard.number],
                "rows": list(shard.rows),
                "lengths": list(shard.lengths),
            }
            for shard in plan.shards
        ]
        manifest |= {"digest": digest_of(manifest), "made": dict(made)}
        text = _readable(manifest)
        write_atomic(
            self.path / MANIFEST, lambda scratch: scratch.write_text(text, encoding="utf-8")
        )

    def clear(self) -> None:
        """Remove what a finished store no longer needs: settings, journals, and what a kill
        left."""
        left = (
            path
            for pattern in (f".{SETTINGS}-*", f".{MANIFEST}-*", f"*{PART}")
            for path in self.path.glob(pattern)
        )
        for path in (*journals(self.path), self.path / SETTINGS, *left):
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Place:
    """Of a batch, in a shard that is being filled."""

    file: BinaryIO
    layout: Layout
    at: int
    """Tokens of the shard before it."""
    tokens: int

    def write(
        self, contents: Contents, lengths: list[int], values: Mapping[str | int, Tensor]
    ) -> int:
        """Encode a batch's features, (b s d) of each name, and put them there. Returns the
        checksum."""
        parts: dict[str, Tensor] = {}
        for name in contents.names:
            rows = torch.cat([value[:n] for value, n in zip(values[name], lengths, strict=True)])
            codes, scales = contents.code.encode(rows)
            parts[tensor_name(name)] = codes
            if scales is not None:
                parts[f"{tensor_name(name)}.scale"] = scales
        crc = 0
        for name, piece in self.layout.pieces.items():
            content = parts[name].cpu().contiguous().view(torch.uint8).numpy().tobytes()
            if len(content) != self.tokens * piece.width:
                raise ValueError(
                    f"{name}: {len(content)} bytes for {self.tokens} tokens of {piece.width}"
                )
            with writing(self.file.name, self.layout.size):
                self.file.seek(piece.start + self.at * piece.width)
                self.file.write(content)
                self.file.flush()  # Before the journal names the batch.
            crc = zlib.crc32(content, crc)
        return crc

    def checksum(self) -> int:
        """Of what is there: after a kill what was written, after a power failure perhaps not."""
        crc = 0
        for piece in self.layout.pieces.values():
            self.file.seek(piece.start + self.at * piece.width)
            crc = zlib.crc32(self.file.read(self.tokens * piece.width), crc)
        return crc


def _has_layout(path: Path, layout: Layout) -> bool:
    if not path.is_file() or path.stat().st_size != layout.size:
        return False
    with path.open("rb") as file:
        return file.read(len(layout.head)) == layout.head


def _parsed(record: Any) -> tuple[str, int, Any]:
    """Check a journal's record. Raises ValueError saying what is wrong with it."""
    for kind, name, check in (("batch", "crc", fits), ("shard", "sha256", is_sha256)):
        if (
            isinstance(record, dict)
            and set(record) == {kind, name}
            and fits(record[kind])
            and check(record[name])
        ):
            return kind, record[kind], record[name]
    raise ValueError("neither a batch nor a shard with its checksum")


def _readable(manifest: Mapping[str, Any]) -> str:
    """JSON with a line for every shard."""
    lines = []
    for name, value in manifest.items():
        if name == "shards":
            shards = ",\n    ".join(json.dumps(shard, separators=(",", ":")) for shard in value)
            lines.append(f'  "shards": [\n    {shards}\n  ]')
        else:
            lines.append(f"  {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
