"""Features read from a store: the target does no pass over the rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafttrain.checks import path_of, switch
from drafttrain.data.datamodule import ConversationData, collate
from drafttrain.data.joining import laid_out
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Needs
from drafttrain.processes import world_size
from drafttrain.target.encoding import ENCODINGS
from drafttrain.target.features import GB, LAST, check_layers, names_of
from drafttrain.target.fingerprint import refuse_other
from drafttrain.target.matching import ROWS, TOGETHER, TOKENS, check_rows
from drafttrain.target.model import Target
from drafttrain.target.shards import Contents
from drafttrain.target.store import Store


@dataclass(frozen=True, kw_only=True)
class StoredConfig:
    """Settings of `StoredFeatures`."""

    path: Path | str
    """The store's folder."""
    verify: bool = True
    """Read every byte of the rows' shards before the first batch; otherwise features are looked at
    as they are read, and only for values that are not finite."""

    def __post_init__(self) -> None:
        path_of("features.path", self.path)
        switch("features.verify", self.verify)


class StoredFeatures:
    """The features of a data set's rows, as a store holds them.

    A last hidden state that is not stored is recomputed from the last layer's output where that is,
    by the target's final norm.

    Args:
        target: the frozen model that made the store, in the same dtype.
        needs: what the drafter reads.
        data: the rows; a batch's `row_ids` are numbers of rows in its set.
        groups, spill_dir, shared: what a source that computes needs; not read here.
        settings: the fields of `Config`.
    Raises: InputError for a store of another target or set, one that lacks rows or layers, or is
    damaged.
    """

    Config = StoredConfig

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
        del groups, spill_dir, shared
        config = StoredConfig(**settings)
        path, verify = config.path, config.verify
        self.target, self.needs = target, needs
        self.verified = verify
        self.store = Store(path)
        refuse_other(
            self.store.fingerprint, target.fingerprint, f"features.path={path}", dtype=True
        )
        if self.store.contents.width != target.width:
            raise InputError(
                f"features.path={path} holds vectors of {self.store.contents.width}, the target's "
                f"width is {target.width}: make the store again"
            )
        check_layers(self.store.contents.layers, target)
        check_layers(needs.layers, target)
        self.store.check_data(data)
        deepest = len(target.decoder_layers) - 1
        has = self.store.contents
        recomputed = (
            needs.last_hidden
            and not has.last_hidden
            and deepest in has.layers
            and gives_last(target)
        )
        self._last: str | int = deepest if recomputed else LAST
        """Where the last hidden state comes from."""
        self._refuse_lacking(has, recomputed)
        look = self.store.verify if verify else self.store.mapped
        mine = share(self.store.shards_of(data))
        for number in mine:
            look(number)
        self._compare(data, mine)

    def _compare(self, data: ConversationData, shards: Sequence[int]) -> None:
        """Raise InputError if the target computes other features than are stored, of a few rows and
        of the longest one, which is read whole."""
        if not shards or not names_of(self.needs):
            return
        apart = max(1, len(shards) // ROWS)
        rows = [
            (ids[:TOKENS], mask[:TOKENS], data.indices[place])
            for place in self.store.sample(data, shards[::apart][:ROWS])
            for ids, mask in [data.row(place)]
        ]
        place = self.store.longest(data, shards)
        longest = (*data.row(place), data.indices[place])
        wanted = self.store.contents.words()
        again = f"make the store again: python -m drafttrain.capture out=<folder> {wanted}"
        what = f"features.path={self.store.path}"
        code = ENCODINGS[self.store.contents.encoding]
        parts = [rows[start : start + TOGETHER] for start in range(0, len(rows), TOGETHER)]
        for batch in map(collate, [*parts, [longest]]):
            check_rows(self.target, batch, self._parts(batch), code, what, again)

    def _parts(self, batch: Batch) -> dict[str | int, Tensor]:
        """{name: (b s d)} of what is stored and needed."""
        names = [self._last if name == LAST else name for name in names_of(self.needs)]
        return {name: self._read(name, batch) for name in dict.fromkeys(names)}

    def _refuse_lacking(self, has: Contents, recomputed: bool) -> None:
        lacking: list[str] = [
            f"layer {layer}" for layer in self.needs.layers if layer not in has.layers
        ]
        if self.needs.last_hidden and not (has.last_hidden or recomputed):
            lacking.insert(0, "the last hidden state")
        if not lacking:
            return
        held = (["the last hidden state"] if has.last_hidden else []) + [
            f"layer {layer}" for layer in has.layers
        ]
        wanted = Contents(
            width=has.width,
            last_hidden=has.last_hidden or self.needs.last_hidden,
            layers=tuple(sorted({*has.layers, *self.needs.layers})),
            encoding=has.encoding,
        )
        raise InputError(
            f"features.path={self.store.path} lacks {', '.join(lacking)}, which this drafter "
            f"reads; it has {', '.join(held)}: make another store with python -m "
            f"drafttrain.capture out=<folder> {wanted.words()}, or compute features "
            "(features=online)"
        )

    def features(self, batch: Batch) -> Features:
        """What the drafter needs of a batch's rows: (b s d), zero on padding, without grad."""
        if not names_of(self.needs):
            return Features()
        with torch.no_grad(), torch.autocast(self.target.device.type, enabled=False):
            found = self._parts(batch)
            if self.needs.last_hidden:
                hidden = found[self._last]
                if self._last != LAST:
                    padding = ~batch.padding.to(hidden.device)[:, :, None]
                    hidden = (
                        last_of_layer(self.target, hidden).to(hidden.dtype).masked_fill(padding, 0)
                    )
                found[LAST] = hidden
        return Features(found.get(LAST), {layer: found[layer] for layer in self.needs.layers})

    def _read(self, name: str | int, batch: Batch) -> Tensor:
        """(b s d), decoded where the target is."""
        rows, lengths = batch.row_ids.tolist(), batch.row_lengths.tolist()
        parts = {
            tensor: laid_out(self.store.rows(tensor, rows, lengths), batch).to(self.target.device)
            for tensor in self.store.tensors_of(name)
        }
        values = self.store.decoded(name, parts)
        if not self.verified and not bool(torch.isfinite(values.sum())):
            bad = ~torch.isfinite(values).all(-1)  # b s
            if bool(bad.any()):
                listed = ", ".join(map(str, batch.rows_with(bad.to(batch.input_ids.device))))
                raise InputError(
                    f"{self.store.path}: features of rows {listed} are not finite: make the store "
                    "again with target.dtype=float32, or leave these rows out of the set"
                )
        return values

    def describe(self) -> str:
        """One line."""
        if not names_of(self.needs):
            return "features: this drafter learns only from the text; the store is not read"
        has = self.store.contents
        size = f"{self.store.bytes / GB:.2f} GB in {has.encoding}"
        said = f"features: read from {self.store.path}, {size}"
        if self._last == LAST:
            return said
        return f"{said}; the last hidden state is recomputed from layer {self._last}"

    def facts(self) -> dict[str, Any]:
        return {"store": self.store.digest}

    def close(self) -> None:
        self.store.close()


def share(shards: Sequence[int]) -> Sequence[int]:
    """Those of some shards that this process looks at, where others on the same machine look at the
    rest."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    return shards[local :: int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))]


def last_of_layer(target: Target, hidden: Tensor) -> Tensor:
    """(... d) the last layer's output -> the last hidden state, by the target's final norm, in the
    target's dtype."""
    assert target.norm_name is not None
    found: Tensor = getattr(target.base, target.norm_name)(hidden.to(target.dtype))
    return found


def gives_last(target: Target) -> bool:
    """Does the final norm make the last hidden state of the last layer's output, bit for bit? Tried
    on a few tokens."""
    if target.norm_name is None:
        return False
    deepest = len(target.decoder_layers) - 1
    ids = (
        torch.arange(1, 7, device=target.device)[None]
        * max(1, target.vocab_size // 7)
        % target.vocab_size
    )
    found = target.features(ids, torch.tensor([6]), Needs(last_hidden=True, layers=(deepest,)))
    assert found.last_hidden is not None
    with torch.inference_mode():
        return torch.equal(last_of_layer(target, found.layers[deepest]), found.last_hidden)
