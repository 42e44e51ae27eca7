"""Rows of a conversation set as training batches: read, cut to length, grouped by length, padded.

Nothing here holds state: batch k of epoch e is a pure function of the settings, so (e, k) is all
that resuming a run needs.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from drafttrain.checks import integer, path_of, shown
from drafttrain.data.conversations import (
    HELD_OUT,
    TRAIN,
    ConversationSet,
    check_vocabulary,
    read_set,
)
from drafttrain.data.joining import join
from drafttrain.errors import InputError
from drafttrain.flow import Batch

SPLITS = {"train": TRAIN, "held_out": HELD_OUT}
LABELS = ("answers", "all")
BUILTIN = "builtin:"
_BUCKET = 1.125
"""Rows whose lengths differ by less than this factor are mixed freely; it bounds padding at about a
tenth."""


def set_folder(path: Path | str, name: str = "data.path") -> Path:
    """The folder of a set; `builtin:smollm2` is the one that the package ships for the embedded
    target.

    Args:
        name: of the setting.
    Raises: InputError when there is no such built-in set.
    """
    text = str(path)
    if not text.startswith(BUILTIN):
        return path_of(name, text)
    sets = Path(__file__).parent / "sets"
    name = text.removeprefix(BUILTIN)
    found = sorted(p.name for p in sets.iterdir() if p.is_dir()) if sets.is_dir() else []
    if name not in found:
        listed = ", ".join(BUILTIN + f for f in found) or "none"
        raise InputError(
            f"{text}: there is no such set in the package; it has {listed}. A folder made by "
            "synthesize works too"
        )
    return sets / name


def collate(rows: Sequence[tuple[Tensor, Tensor, int]], pad_to_multiple: int = 1) -> Batch:
    """Pad rows on the right.

    Args:
        rows: (ids (s) int64, loss mask (s) bool, number of the row in its set) of each row; at
            least one.
        pad_to_multiple: the width is rounded up to a multiple of this.
    """
    lengths = torch.tensor([len(ids) for ids, _, _ in rows], dtype=torch.int64)
    width = -(-int(lengths.max()) // pad_to_multiple) * pad_to_multiple
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    loss_mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for place, (ids, mask, _) in enumerate(rows):
        input_ids[place, : len(ids)] = ids
        loss_mask[place, : len(mask)] = mask
    return Batch(
        input_ids, loss_mask, lengths, torch.tensor([row for _, _, row in rows], dtype=torch.int64)
    )


class ConversationData:
    """One split of a set, cut to a length; what cannot be trained on is left out and counted.

    Rows keep the set's order. A row's first token is never a label, since nothing precedes it.
    """

    indices: list[int]
    """Number in the set of each row kept."""
    lengths: list[int]
    """Tokens of each row kept, after cutting."""
    supervised_per_row: list[int]
    """Labels of each row kept."""
    counts: dict[str, int]
    """Rows left out, by reason."""
    cut: int
    """Rows kept that were cut to max_length."""
    weights: list[Tensor] | None = None
    """Of the labels of each row kept, (s) float32; None is all alike."""
    digest: str | None = None
    """Which rows a part holds and what they weigh; None for what is no part."""
    sequence: int | None = None
    """Tokens of the sequences that a batch's rows are joined into; None: every row is a
    sequence."""

    def __init__(
        self,
        path: Path | str | ConversationSet,
        *,
        split: str = "train",
        max_length: int | None = None,
        limit_tokens: int | None = None,
        limit_rows: int | None = None,
        temperatures: Sequence[float] | None = None,
        labels: str = "answers",
        set_aside: int = 0,
        take_set_aside: bool = False,
    ) -> None:
        """Read a split.

        Args:
            path: a set's folder, `builtin:<name>`, or a set in memory.
            split: "train" or "held_out".
            max_length: ids and mask are cut here alike; a row without a supervised token left is
                dropped.
            limit_tokens: take rows while their supervised tokens add up to at most this; at least
                one row.
            limit_rows: take at most this many rows.
            temperatures: take only rows whose answers were sampled at one of these; None takes all.
            labels: "answers" supervises what the target answered; "all" every token but a row's
                first. The target's distribution is known at each of them, and where it wrote the
                user turns too, they are its own text.
            set_aside: this many rows at the split's end are left out, to calibrate on.
            take_set_aside: take these, and no others.
        Raises: InputError for an unreadable set, or when no row is left (with the counts by
        reason).
        """
        _check_names(split, labels)
        _check_limits(max_length, limit_tokens, limit_rows, set_aside)
        _check_temperatures(temperatures)
        self.name = str(path) if not isinstance(path, ConversationSet) else "the set"
        self.set = path if isinstance(path, ConversationSet) else read_set(set_folder(path))
        self.split, self.max_length, self.labels = split, max_length, labels
        self.indices, self.lengths, self.supervised_per_row = [], [], []
        self.counts, self.cut, self._supervised = {}, 0, 0
        chosen = self._chosen(set_aside, take_set_aside)
        self._take(chosen, temperatures, limit_tokens, limit_rows)
        if not self.indices:
            raise self._nothing_left(len(chosen))

    def _chosen(self, set_aside: int, take_set_aside: bool) -> list[int]:
        """The split's rows without those set aside, or these only."""
        rows = self.set.indices(SPLITS[self.split])
        if set_aside >= len(rows) > 0 or (take_set_aside and not set_aside):
            raise InputError(
                f"set_aside={set_aside}: needs at least 1 and less than the {len(rows)} rows of "
                f"split {self.split}"
            )
        if not set_aside:
            return rows
        return rows[-set_aside:] if take_set_aside else rows[:-set_aside]

    def _take(
        self,
        chosen: Sequence[int],
        temperatures: Sequence[float] | None,
        limit_tokens: int | None,
        limit_rows: int | None,
    ) -> None:
        """Keep what can be trained on, within the limits; count the rest."""
        for place, index in enumerate(chosen):
            at = self.set.temperature[index]
            if temperatures is not None and not np.isclose(at, temperatures).any():
                self._leave_out("of another temperature")
                continue
            length, labels = self._cut(index)
            is_cut = length < self.set.length(index)
            if not labels:
                where = f" in the first {self.max_length} tokens" if is_cut else ""
                self._leave_out(f"no supervised token{where}")
                continue
            full = limit_rows is not None and len(self.indices) == limit_rows
            over = limit_tokens is not None and self.supervised + labels > limit_tokens
            over = over and bool(self.indices)  # One row is taken whatever the limit.
            if over or full:
                self._leave_out(f"past limit_{'tokens' if over else 'rows'}", len(chosen) - place)
                break
            self.indices.append(index)
            self.lengths.append(length)
            self.supervised_per_row.append(labels)
            self._supervised += labels
            self.cut += is_cut

    def _cut(self, index: int) -> tuple[int, int]:
        """Tokens and labels of a row of the set, cut to max_length."""
        uncut = self.set.length(index)
        length = uncut if self.max_length is None else min(uncut, self.max_length)
        start = int(self.set.offsets[index])
        answered = int(self.set.mask[start + 1 : start + length].sum())
        return length, length - 1 if answered and self.labels == "all" else answered

    def _leave_out(self, why: str, rows: int = 1) -> None:
        self.counts[why] = self.counts.get(why, 0) + rows

    def _nothing_left(self, rows: int) -> InputError:
        if not rows:
            return InputError(f"{self.name} has no rows in split {self.split}: {self._to_fill()}")
        advice = (
            "set data.temperatures=null"
            if "of another temperature" in self.counts
            else "raise max_length"
        )
        return InputError(
            f"{self.name}, split {self.split}: none of its {rows} rows can be used "
            f"({_listed(self.counts)}); {advice}, or give another set"
        )

    def _to_fill(self) -> str:
        """How the split gets rows, in words."""
        return "write the set again, with held_out=<rows> for held-out ones, or give another set"

    @property
    def supervised(self) -> int:
        """Labels over all rows kept."""
        return self._supervised

    @property
    def tokens(self) -> int:
        """Of all rows kept, prompts included."""
        return sum(self.lengths)

    @property
    def fingerprint(self) -> dict[str, str]:
        """Of the target that wrote the set."""
        return dict(self.set.manifest["target"]["fingerprint"])

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InputError if an id of the set is beyond a target's vocabulary."""
        check_vocabulary(self.set, vocab_size, self.name)

    def label_counts(self, vocab_size: int) -> Tensor:
        """(v) int64: how often each id is in an answer of the whole split, whatever limits this
        object was given."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for index in self.set.indices(SPLITS[self.split]):
            ids, mask = self.set.row(index)
            counts += torch.bincount(ids[mask], minlength=vocab_size)
        return counts

    def __len__(self) -> int:
        return len(self.indices)

    def row(self, i: int) -> tuple[Tensor, Tensor]:
        """ids (s) int64 and loss mask (s) bool of the i-th row kept."""
        ids, mask = self.set.row(self.indices[i])
        ids, mask = ids[: self.lengths[i]], mask[: self.lengths[i]]
        if self.labels == "all":
            mask = torch.ones_like(mask)
        mask[0] = False
        return ids, mask

    def part(
        self, places: Sequence[int], weights: Sequence[Tensor] | None = None
    ) -> ConversationData:
        """Some of these rows, as data of their own.

        Args:
            places: of the rows; their order is kept.
            weights: for each of them (s) float32, how much each of its tokens counts as a label.
        Raises: InputError if no row is left.
        """
        if not places:
            raise InputError(f"{self.name}, split {self.split}: no row is left to learn from")
        part = copy.copy(self)
        for name in ("indices", "lengths", "supervised_per_row"):
            setattr(part, name, [getattr(self, name)[place] for place in places])
        part._supervised, part.counts, part.cut = sum(part.supervised_per_row), {}, 0
        part.weights = None if weights is None else [weight.float() for weight in weights]
        marks = hashlib.sha256(",".join(map(str, part.indices)).encode())
        for row, weight in enumerate(part.weights or ()):
            if weight.shape != (part.lengths[row],):
                raise ValueError(
                    f"row {row} has {part.lengths[row]} tokens and weights of shape "
                    f"{tuple(weight.shape)}"
                )
            marks.update(weight.numpy().tobytes())
        part.digest = marks.hexdigest()[:16]
        return part

    def joined(self, sequence: int) -> ConversationData:
        """The same rows, in batches that join them into sequences of this many tokens.

        Raises: InputError for rows that are longer, or whose labels have weights.
        """
        if max(self.lengths) > sequence:
            raise InputError(
                f"trainer.pack={sequence} is less than the longest row, which has "
                f"{max(self.lengths)} tokens: raise it, or lower data.max_length"
            )
        if self.weights is not None:
            raise InputError(
                "trainer.pack: rows whose labels have weights are not joined, set trainer.pack=null"
            )
        twin = copy.copy(self)
        twin.sequence = sequence
        return twin

    def batch(self, places: Sequence[int]) -> Batch:
        """Rows as one batch; a place ~i (that is -i - 1) is row i with nothing supervised, see
        `EpochSampler`."""
        rows = []
        for place in places:
            i = place if place >= 0 else ~place
            ids, mask = self.row(i)
            rows.append((ids, mask if place >= 0 else torch.zeros_like(mask), self.indices[i]))
        if self.sequence is not None:
            return join(rows, self.sequence)
        batch = collate(rows)
        if self.weights is None:
            return batch
        weights = torch.zeros(batch.input_ids.shape)
        for row, place in enumerate(places):
            own = self.weights[place if place >= 0 else ~place]
            weights[row, : len(own)] = own
        return replace(batch, weights=weights)

    def summary(self) -> str:
        """One line for the console: rows, tokens, the supervised share, and what was left out."""
        share = self.supervised / self.tokens
        sources = self.set.by_source(self.indices)
        text = (
            f"{self.split}: {len(self)} rows{words_of(sources)}, {self.supervised} of "
            f"{self.tokens} tokens supervised ({share:.0%})"
        )
        if self.cut:
            text += f"; {self.cut} rows cut to {self.max_length} tokens"
        return text + (f"; left out: {_listed(self.counts)}" if self.counts else "")


def words_of(sources: Mapping[str, int]) -> str:
    """Counts by source, in brackets; empty where there is one source."""
    listed = ", ".join(f"{name} {count}" for name, count in sources.items())
    return f" ({listed})" if sources else ""


def _check_names(split: str, labels: str) -> None:
    if split not in SPLITS:
        raise InputError(f"split={split}: give one of {', '.join(SPLITS)}")
    if labels not in LABELS:
        raise InputError(f"labels={labels}: give one of {', '.join(LABELS)}")


def _check_limits(
    max_length: int | None, limit_tokens: int | None, limit_rows: int | None, set_aside: int
) -> None:
    integer("max_length", max_length, 2, null="no limit")
    integer("limit_tokens", limit_tokens, 1, null="no limit")
    integer("limit_rows", limit_rows, 1, null="no limit")
    integer("set_aside", set_aside, 0)


def _check_temperatures(temperatures: Sequence[float] | None) -> None:
    if temperatures is None:
        return
    listed = isinstance(temperatures, list | tuple) and temperatures
    if not listed or not all(type(one) in (int, float) for one in temperatures):
        raise InputError(
            f"temperatures={shown(temperatures)}: needs a list of numbers such as [0.0], or null "
            "for all"
        )


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())


class EpochSampler:
    """Batches of row places for every epoch and process: shuffled, of like length, equally many on
    every process.

    Every row appears once an epoch over all processes. The number of batches is the same in every
    epoch. An update has `accumulate` batches of each process; which rows an update has depends only
    on `accumulate` times `world`, so that a run may go on in another number of processes. Where the
    batches do not divide evenly, a process gets a batch [~i], which means row i with nothing
    supervised: it takes part in every collective and weighs nothing.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        batch_tokens: int | None = None,
        batch_rows: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        accumulate: int = 1,
    ) -> None:
        """Say how rows become batches.

        Args:
            lengths: tokens of each row.
            batch_tokens: rows times width of a batch is at most this (padding counted).
            batch_rows: rows of a batch. At least one of the two limits must be given.
            accumulate: batches of an update on each process.
        Raises: InputError for no rows, no limit, or a row longer than batch_tokens.
        """
        if not lengths:
            raise InputError("there are no rows to make batches of")
        if batch_tokens is None and batch_rows is None:
            raise InputError("give batch_tokens or batch_rows")
        if batch_rows is not None and batch_rows < 1:
            raise InputError(f"batch_rows={batch_rows}: needs at least 1")
        longest = max(lengths)
        if batch_tokens is not None and batch_tokens < longest:
            raise InputError(
                f"batch_tokens={batch_tokens} is less than the longest row ({longest}): raise it, "
                "or lower max_length"
            )
        if not 0 <= rank < world:
            raise InputError(f"rank={rank} is not one of {world} processes")
        self.seed, self.rank, self.world, self.accumulate = seed, rank, world, accumulate
        self._classes = length_classes(lengths, _BUCKET)
        # Only classes decide where a batch ends, so that every epoch has equally many batches.
        in_order = sorted(self._classes)
        self._sizes: list[int] = []
        rows = 0
        for width in in_order:
            full = batch_rows is not None and rows == batch_rows
            if rows and (full or (batch_tokens is not None and (rows + 1) * width > batch_tokens)):
                self._sizes.append(rows)
                rows = 0
            rows += 1
        self._sizes.append(rows)
        self._filler = ~min(range(len(lengths)), key=lambda i: lengths[i])

    def __len__(self) -> int:
        """Batches of one process in one epoch."""
        return -(-len(self._sizes) // (self.accumulate * self.world)) * self.accumulate

    def batches(self, epoch: int) -> list[list[int]]:
        """This process's batches of an epoch, in order."""
        return [
            batch for update in self._updates(epoch) for batch in update[self.rank :: self.world]
        ]

    def from_step(self, epoch: int, first: int = 0) -> Iterator[tuple[int, int, list[int]]]:
        """(epoch, k, batch) without end, from batch `first` of `epoch` on."""
        while True:
            for k, batch in enumerate(self.batches(epoch)[first:], start=first):
                yield epoch, k, batch
            epoch, first = epoch + 1, 0

    def _updates(self, epoch: int) -> list[list[list[int]]]:
        """[update][batch, those of the first micro-batch of every process before those of the
        second]; the batches of an update are of like length, so that no process waits long."""
        chance = random.Random(f"{self.seed}/{epoch}/batches")
        order = list(range(len(self._classes)))
        chance.shuffle(order)
        order.sort(key=lambda i: self._classes[i])  # Stable: rows of one class stay shuffled.
        batches, start = [], 0
        for size in self._sizes:
            batches.append(order[start : start + size])
            start += size
        return self._shuffled(batches, chance)

    def _shuffled(self, batches: list[list[int]], chance: random.Random) -> list[list[list[int]]]:
        """Batches dealt out to updates, the last filled up."""
        parts = self.accumulate * self.world
        updates = [batches[i : i + parts] for i in range(0, len(batches), parts)]
        updates[-1] += [[self._filler]] * (parts - len(updates[-1]))
        chance.shuffle(updates)
        return updates


def length_classes(lengths: Sequence[int], factor: float) -> list[int]:
    """For each length an upper bound that it shares with lengths smaller by up to a factor; the
    longest is a bound itself."""
    longest = max(lengths)
    edges = [longest]
    while edges[-1] > 1:
        edges.append(min(edges[-1] - 1, int(edges[-1] / factor)))
    edges.reverse()
    found, place = {}, 0
    for length in sorted(set(lengths)):
        while edges[place] < length:
            place += 1
        found[length] = edges[place]
    return [found[length] for length in lengths]
