"""Rows of token ids with a loss mask, as somebody made them: taken as they are, no target asked.

A row has `input_ids`, a list of ids, and `loss_mask`, of the same length, with 1, 1.0 or true where
a token is to be learned and 0, 0.0 or false elsewhere. A row is one text: with an `attention_mask`
that hides tokens, or `position_ids` that do not count from 0, it is left out. Files as of prompts:
JSON Lines, a JSON array or parquet, or a folder of them. What a target wrote is not known of them,
so they belong to none; ids are checked against the vocabulary of the target at hand.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from drafttrain.checks import integer, path_of
from drafttrain.data import named
from drafttrain.data.conversations import CATEGORIES, HELD_OUT, SOURCES, ConversationSet
from drafttrain.data.datamodule import ConversationData
from drafttrain.data.numbered import by_reason, nothing_left, some
from drafttrain.data.prompts import PromptFile, as_object, sum_of
from drafttrain.data.shapes import CATEGORIES as KINDS
from drafttrain.data.shapes import Unusable, overlooked_category

IDS, MASK, SEEN, PLACES = "input_ids", "loss_mask", "attention_mask", "position_ids"
LABELS = "labels"
OTHERS = ("weights", "seq_lens", "segment_ids", "token_type_ids")
"""Columns that other programs learn by, and that are not read here."""
State = tuple[tuple[str, str], ...]
"""(file, sum of its content) of every file."""
HELD_OUT_SHARE = 5
"""At most one row in five is held out."""


@dataclass(frozen=True, kw_only=True)
class TokenFile(PromptFile):
    """The rows of such files."""

    room: ClassVar[str] = "data"

    def reads(self) -> set[str]:
        return {IDS, MASK, SEEN, PLACES, LABELS, *OTHERS, *KINDS}

    def overlooked(self, row: Any, parsed: Any) -> Iterator[str]:
        ids, mask = parsed
        if row.get(LABELS) not in (None, np.where(mask, ids, -100).tolist()):
            yield f"column {LABELS}, which is another mask than {MASK}"
        yield from (f"column {name}" for name in OTHERS if row.get(name) is not None)
        yield from overlooked_category(row)

    def parse(self, row: Any) -> tuple[np.ndarray, np.ndarray]:
        """Ids (s) int32 and loss mask (s) bool."""
        ids, mask = (as_object(row).get(name) for name in (IDS, MASK))
        if not isinstance(ids, list) or not isinstance(mask, list):
            raise Unusable(f"without a list {IDS} and a list {MASK}")
        if not ids or len(ids) != len(mask):
            raise Unusable(f"{IDS} and {MASK} of different lengths, or empty")
        if not all(type(one) is int and 0 <= one < 1 << 31 for one in ids):
            raise Unusable(f"{IDS} that are no token ids")
        if not all(type(one) in (int, bool, float) and one in (0, 1) for one in mask):
            raise Unusable(f"a {MASK} of other values than 0 and 1")
        if row.get(SEEN) is not None and row[SEEN] != [1] * len(ids):
            raise Unusable(f"an {SEEN} that hides tokens: leave padding out of the row")
        if row.get(PLACES) is not None and row[PLACES] != list(range(len(ids))):
            raise Unusable(f"{PLACES} that do not count from 0: give each text a row of its own")
        return np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=bool)


class TokenData(ConversationData):
    """One split of such rows, otherwise as of a conversation set."""

    def __init__(
        self,
        path: Path | str,
        *,
        held_out: int,
        seed: int = 0,
        split: str = "train",
        max_length: int | None = None,
        limit_tokens: int | None = None,
        limit_rows: int | None = None,
        temperatures: Sequence[float] | None = None,
        labels: str = "answers",
        set_aside: int = 0,
        take_set_aside: bool = False,
    ) -> None:
        """Read a split; arguments as of `ConversationData`, and:

        Args:
            path: of a file or a folder of files.
            held_out: rows, the first ones, that are kept apart; at most a fifth.
            seed: which rows of several files come first.
        """
        path = path_of("data.path", path)
        integer("data.held_out", held_out)
        self.asked = held_out
        integer("data.seed", seed)
        super().__init__(
            _set_of(str(path), seed, held_out, _state_of(path)),
            split=split,
            max_length=max_length,
            limit_tokens=limit_tokens,
            limit_rows=limit_rows,
            temperatures=temperatures,
            labels=labels,
            set_aside=set_aside,
            take_set_aside=take_set_aside,
        )
        self.name = str(path)
        for reason, rows in self.set.manifest["skipped"].items():
            self.counts[f"{reason} (rows {some(rows)})"] = len(rows)

    def summary(self) -> str:
        found = len(self.set.indices(HELD_OUT))
        few = f"; data.held_out={self.asked}: {found} are held out, a fifth of {len(self.set)} rows"
        besides = self.set.manifest["overlooked"].items()
        unread = [
            *self.set.manifest["passed_over"],
            *(f"{what} (rows {some(rows)})" for what, rows in besides),
        ]
        return "".join(
            (
                super().summary(),
                f"; not read: {', '.join(unread)}" * bool(unread),
                few * (self.split == "train" and found < self.asked),
            )
        )

    def _to_fill(self) -> str:
        if self.split == "train":
            return "give more rows"
        return (
            f"data.held_out={self.asked} of {len(self.set)} rows, at most one in "
            f"{HELD_OUT_SHARE} is held out: give data.held_out=1 or more, and at least "
            f"{HELD_OUT_SHARE} rows"
        )


def _state_of(path: Path) -> State:
    """The files at a place and the sums of their contents. They change when a file is written
    again, added or taken away; rows are read once for all splits of a run."""
    found = TokenFile(path=str(path)).files(path).files if path.exists() else []
    return tuple((str(file), sum_of(file)) for file in found)


@functools.lru_cache(maxsize=1)
def _set_of(
    path: str, seed: int, held_out: int, _state: tuple[tuple[str, str], ...]
) -> ConversationSet:
    found = TokenFile(path=path, seed=seed).read(None)
    if not found.rows:
        raise nothing_left(path, found)
    rows: list[Any] = [row for _, row in found.rows]
    ids, masks = ([row[side] for row in rows] for side in (0, 1))
    split = np.zeros(len(ids), dtype=np.uint8)
    split[: min(held_out, len(ids) // HELD_OUT_SHARE)] = HELD_OUT
    names = sorted({name for name, _ in found.origin.values()})
    manifest: dict[str, Any] = {
        "target": {"name": "", "fingerprint": {}},
        "skipped": by_reason(found.skipped),
        "overlooked": found.by_file(found.overlooked),
        "passed_over": found.passed_over,
        SOURCES: names,
    }
    kinds, note = named.kinds([found.category.get(row, named.NO_CATEGORY) for row, _ in found.rows])
    places = None
    if {*kinds} - {named.NO_CATEGORY}:
        manifest[CATEGORIES], places = named.encoded(kinds)
    elif note:
        manifest["overlooked"][note] = [row for row, _ in found.rows]
    source = [names.index(found.origin[row][0]) for row, _ in found.rows if found.origin]
    return ConversationSet(
        np.concatenate(ids),
        np.cumsum([0, *map(len, ids)]).astype(np.int64),
        np.concatenate(masks),
        np.asarray([row for row, _ in found.rows]),
        split,
        manifest,
        np.full(len(ids), np.nan, dtype=np.float32),  # How they were sampled is not known.
        np.zeros(len(ids), dtype=np.uint8),
        np.asarray(source) if source else None,
        places,
    )
