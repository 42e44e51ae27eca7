"""Features computed by the target while training: once per row, then kept in memory or in a file,
or computed every epoch.

A row's features never depend on when they are asked for: the target reads the batches of the first
epoch, and a row that is missing later (in a resumed run) is read again together with its batch of
the first epoch. So a resumed run sees the same bits.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from drafttrain.checks import shown
from drafttrain.data.datamodule import ConversationData
from drafttrain.data.joining import laid_out, taken_apart
from drafttrain.errors import InputError, writing
from drafttrain.flow import Batch, Features, Needs
from drafttrain.nn import finite
from drafttrain.target.model import Target

GB = 1 << 30
KEEP = ("bfloat16", "float16", "float32")
LAST = "last_hidden"
SPARE = 1 << 28
"""Bytes of a disk that are left free."""
SLACK = 1.02
"""A file takes more of a disk than its bytes."""


class FeatureSource(Protocol):
    """Where the features of a run come from."""

    def features(self, batch: Batch) -> Features:
        """What the drafter needs of a batch's rows: (b s d), zero on padding, without grad."""
        ...

    def describe(self) -> str:
        """One line."""
        ...

    def facts(self) -> dict[str, Any]:
        """Settings that decide the values it gives; a run is only resumed where they are equal."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


def names_of(needs: Needs) -> list[str | int]:
    """Names of the parts of features: LAST, and the numbers of layers."""
    return [*([LAST] if needs.last_hidden else []), *needs.layers]


def check_layers(layers: Sequence[int], target: Target) -> None:
    """Raise InputError for a layer that the target does not have."""
    beyond = [layer for layer in layers if not 0 <= layer < len(target.decoder_layers)]
    if beyond:
        raise InputError(
            f"layer {beyond[0]} asked for; target {target.name} has layers "
            f"0..{len(target.decoder_layers) - 1}"
        )


def computed(target: Target, batch: Batch, needs: Needs) -> dict[str | int, Tensor]:
    """{name: (b s d)} by one pass over a batch, in the target's own precision.

    Raises: InputError naming the rows whose features are not finite.
    """
    found = target.features(batch.input_ids, batch.lengths, needs, batch.packing)
    values: dict[str | int, Tensor] = {layer: value for layer, value in found.layers.items()}
    if found.last_hidden is not None:
        values[LAST] = found.last_hidden
    for value in values.values():
        if not bool(torch.isfinite(value.sum())):
            padding = batch.padding.to(value.device)[:, :, None]
            bad = ~torch.isfinite(value.masked_fill(~padding, 0)).all(-1)  # b s
            if bool(bad.any()):
                raise _not_finite(target, batch, bad.to(batch.input_ids.device))
    return values


def _not_finite(target: Target, batch: Batch, bad: Tensor) -> InputError:
    """For features (b s) that are not finite: names all their rows, traces the first."""
    first, *rest = batch.rows_with(bad)
    more = f"; also in rows {', '.join(map(str, rest))}" if rest else ""
    return finite.fault(target, _texts(batch)[first], f"row {first} of the set", more)


def _texts(batch: Batch) -> dict[int, list[int]]:
    """{number in the set: ids} of a batch's rows."""
    rows = taken_apart(batch.input_ids[:, :, None], batch)
    texts = (row[:, 0].tolist() for row in rows)
    return dict(zip(batch.row_ids.tolist(), texts, strict=True))


def fault_in(target: Target, batches: Iterable[Batch]) -> InputError | None:
    """What of a target, its head included, is not finite for some rows, read one by one; None where
    all of it is finite."""
    for batch in batches:
        for row, text in _texts(batch).items():
            if found := finite.trace(target, text, every=True):
                return finite.fault_of(target, found, f"row {row} of the set")
    return None


def has_room(folder: Path, size: float) -> bool:
    """Does a disk have room for that many more bytes?"""
    return shutil.disk_usage(folder).free >= size * SLACK + SPARE


def take_room(path: Path, size: int) -> None:
    """Make a file of this size, its room on the disk taken now: a full disk would kill the process
    later.

    Raises: OSError if there is no room; the file is then gone.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with writing(path, size):
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, size)
            else:
                os.ftruncate(handle, size)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


class LiveFeatures:
    """The features of a target that changes while it is trained: computed for every batch, in its
    own precision; nothing is kept."""

    def __init__(self, target: Target, needs: Needs) -> None:
        self.target, self.needs = target, needs

    def features(self, batch: Batch) -> Features:
        """What the drafter needs of a batch's rows: (b s d), zero on padding, without grad."""
        found = computed(self.target, batch, self.needs)
        padding = ~batch.padding.to(self.target.device)[:, :, None]
        values = {name: value.masked_fill(padding, 0) for name, value in found.items()}
        return Features(values.get(LAST), {layer: values[layer] for layer in self.needs.layers})

    def describe(self) -> str:
        """One line."""
        return (
            "features: computed for every batch, since the target changes; features.* has no effect"
        )

    def facts(self) -> dict[str, Any]:
        """The target's weights decide, and they are in the checkpoint."""
        return {}

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, kw_only=True)
class OnlineConfig:
    """Settings of `OnlineFeatures`."""

    budget_gb: float = 3.0
    """Keep features in memory if those of all rows take at most this."""
    disk_gb: float = 50.0
    """Otherwise keep them in a file if they take at most this and the disk has room."""
    keep_dtype: str = "bfloat16"
    """How features are kept. bfloat16 has the precision of most targets' passes and half the size
    of float32; its rounding (relative 2^-9) is far below the noise that training adds. It applies
    also where nothing is kept, so that results do not depend on whether features are kept."""

    def __post_init__(self) -> None:
        if self.keep_dtype not in KEEP:
            raise InputError(
                f"features.keep_dtype={shown(self.keep_dtype)}: give one of {', '.join(KEEP)}"
            )
        for name in ("budget_gb", "disk_gb"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not value >= 0:
                raise InputError(f"features.{name}={shown(value)}: needs a number of at least 0")


class OnlineFeatures:
    """The features of a data set's rows, computed when first needed.

    Args:
        target: the frozen model.
        needs: what to keep; nothing else is computed or stored.
        data: the rows; a batch's `row_ids` are numbers of rows in its set.
        groups: batches of row places of the first epoch, over all processes. A row that is asked
            for and missing is computed together with the rows of its group. None: together with the
            rows of the batch asked for.
        spill_dir: a folder of the run for the file; None forbids one.
        shared: several processes on one machine share what they compute, through a file in
            `spill_dir`. It may hold their earlier work, but not another run's.
        settings: the fields of `Config`.
    """

    Config = OnlineConfig

    def __init__(
        self,
        target: Target,
        needs: Needs,
        *,
        data: ConversationData,
        groups: Sequence[Sequence[int]] | None = None,
        spill_dir: Path | str | None = None,
        shared: bool = False,
        **settings: Any,
    ) -> None:
        config = OnlineConfig(**settings)
        check_layers(needs.layers, target)
        self.target, self.needs, self.data = target, needs, data
        self.dtype: torch.dtype = getattr(torch, config.keep_dtype)
        self.rows_computed = 0
        """Rows that the target has read, each time counted."""
        self._names = names_of(needs)
        self._place = {row: place for place, row in enumerate(data.indices)}
        starts = [0]
        for length in data.lengths:
            starts.append(starts[-1] + length)
        self._starts = starts
        self._groups = (
            None if groups is None else [[p if p >= 0 else ~p for p in group] for group in groups]
        )
        self._group_of: dict[int, int] = {}
        for number, group in enumerate(self._groups or ()):
            for place in group:
                self._group_of.setdefault(place, number)
        self.bytes = starts[-1] * target.width * self.dtype.itemsize * len(self._names)
        """Size of all rows' features."""
        self._file: Path | None = None
        self.mode = self._choose(config.budget_gb * GB, config.disk_gb * GB, spill_dir, shared)
        """"memory", "file" or "recompute"."""

    def features(self, batch: Batch) -> Features:
        """What the drafter needs of a batch's rows: (b s d), zero on padding, without grad."""
        if not self._names:
            return Features()
        places = [self._place[row] for row in batch.row_ids.tolist()]
        with torch.no_grad(), torch.autocast(self.target.device.type, enabled=False):
            if self.mode == "recompute":
                found = self._read(batch)
                padding = ~batch.padding.to(self.target.device)[:, :, None]
                values = {name: value.masked_fill(padding, 0) for name, value in found.items()}
            else:
                self._fill(batch, places)
                values = {name: self._serve(name, places, batch) for name in self._names}
        return Features(values.get(LAST), {layer: values[layer] for layer in self.needs.layers})

    def describe(self) -> str:
        """One line: the estimate and what it led to."""
        if not self._names:
            return "features: this drafter learns only from the text"
        size = f"{self.bytes / GB:.2f} GB in {str(self.dtype).removeprefix('torch.')}"
        return {
            "memory": f"features: {size}, computed once and kept in memory",
            "file": f"features: {size}, computed once and kept in {self._file}",
            "recompute": f"features: {size} would exceed memory and disk budgets, "
            f"computed again every epoch",
        }[self.mode]

    def facts(self) -> dict[str, Any]:
        return {"keep_dtype": str(self.dtype).removeprefix("torch.")}

    def close(self) -> None:
        """Forget everything and remove the file."""
        self._stores: dict[str | int, Tensor] = {}
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            try:
                self._file.parent.rmdir()
            except OSError:
                pass

    # Inside ---------------------------------------------------------------------------------------
    def _choose(
        self, memory: float, disk: float, spill_dir: Path | str | None, shared: bool
    ) -> str:
        tokens, d = self._starts[-1], self.target.width
        if self.bytes <= memory and not shared:
            self._stores = {name: torch.empty(tokens, d, dtype=self.dtype) for name in self._names}
            self._done = torch.zeros(len(self.data), dtype=torch.uint8)
            return "memory"
        if (
            spill_dir is None
            or self.bytes > max(disk, memory if shared else 0)
            or not self._open(Path(spill_dir))
        ):
            self._stores = {}
            return "recompute"
        return "file"

    def _open(self, folder: Path) -> bool:
        """Map the file; its room is taken now, since a full disk would kill the process later.
        False if there is no room."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "features.bin"
        flags = -(-len(self.data) // 4096) * 4096
        size = flags + self.bytes
        there = path.stat().st_size if path.exists() else 0
        if there < size:
            if not has_room(folder, size - there):
                return False
            try:
                take_room(path, size)
            except OSError:
                return False
        self._file = path
        raw = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        self._done = raw[: len(self.data)]
        values = (
            raw[flags:].view(self.dtype).view(len(self._names), self._starts[-1], self.target.width)
        )
        self._stores = dict(zip(self._names, values, strict=True))
        return True

    def _fill(self, batch: Batch, places: list[int]) -> None:
        for place in places:
            if self._done[place]:
                continue
            if self._groups is None:
                self._keep(batch, places)
                return
            group = self._groups[self._group_of[place]]
            self._keep(batch if group == places else self.data.batch(group), group)

    def _keep(self, batch: Batch, places: Sequence[int]) -> None:
        for name, value in self._read(batch).items():
            rows = taken_apart(value.cpu(), batch)
            for row, place in zip(rows, places, strict=True):
                self._stores[name][self._starts[place] : self._starts[place + 1]] = row
        # The mark comes last: another process that sees it finds all values written.
        self._done[list(places)] = 1

    def _read(self, batch: Batch) -> dict[str | int, Tensor]:
        found = computed(self.target, batch, self.needs)
        self.rows_computed += len(batch.row_ids)
        return {name: self._narrowed(value, batch) for name, value in found.items()}

    def _narrowed(self, value: Tensor, batch: Batch) -> Tensor:
        """As it is kept. Raises: InputError naming the rows whose values are too large for that."""
        kept = value.to(self.dtype)
        # A wider dtype takes all, and a sum of many large values may overflow by itself.
        if torch.finfo(self.dtype).max >= torch.finfo(value.dtype).max or bool(
            torch.isfinite(kept.sum())
        ):
            return kept
        padding = batch.padding.to(kept.device)[:, :, None]
        bad = ~torch.isfinite(kept.masked_fill(~padding, 0)).all(-1)  # b s
        if bool(bad.any()):
            rows = ", ".join(map(str, batch.rows_with(bad.to(batch.input_ids.device))))
            name = str(self.dtype).removeprefix("torch.")
            wider = "bfloat16" if self.dtype == torch.float16 else "float32"
            raise InputError(
                f"features.keep_dtype={name} holds numbers up to "
                f"{torch.finfo(self.dtype).max:,.6g}, features of rows {rows} are larger: give "
                f"features.keep_dtype={wider}"
            )
        return kept

    def _serve(self, name: str | int, places: Sequence[int], batch: Batch) -> Tensor:
        store = self._stores[name]
        rows = [store[self._starts[place] : self._starts[place + 1]] for place in places]
        return laid_out(rows, batch).to(self.target.device)
