"""Rows joined into sequences: where each is, and that every epoch has each once in equally many
sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.data.conversations import Row, write_set
from drafttrain.data.datamodule import ConversationData
from drafttrain.data.joining import join, laid_out, taken_apart
from drafttrain.data.sequences import PackedSampler, fill
from drafttrain.errors import InputError
from tests.data.sets import ABOUT


def rows_of(*lengths: int) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Row i holds 100 i + place, all of it but its first token to be learned, and number 7 i in its
    set."""
    return [(torch.arange(n) + 100 * i, torch.arange(n) > 0, 7 * i) for i, n in enumerate(lengths)]


def test_rows_follow_each_other() -> None:
    batch = join(rows_of(3, 4, 2), 8)
    assert batch.input_ids.tolist() == [
        [0, 1, 2, 100, 101, 102, 103, 0],
        [200, 201, 0, 0, 0, 0, 0, 0],
    ]
    assert batch.loss_mask.tolist() == [
        [False, True, True, False, True, True, True, False],
        [False, True] + [False] * 6,
    ]
    assert batch.packing is not None
    assert batch.packing.document_ids.tolist() == [[0, 0, 0, 1, 1, 1, 1, -1], [2, 2] + [-1] * 6]
    assert batch.packing.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1] + [0] * 6]
    assert batch.lengths.tolist() == [7, 2] and batch.row_ids.tolist() == [0, 7, 14]
    assert batch.row_lengths.tolist() == [3, 4, 2]
    assert batch.padding.tolist() == [[True] * 7 + [False], [True] * 2 + [False] * 6]
    assert batch.lengths_at()[0].tolist()[:7] == [3, 3, 3, 4, 4, 4, 4] and batch.lengths_at()[
        1
    ].tolist()[:2] == [2, 2]
    assert bool((batch.lengths_at() > 0).all())


def test_a_label_needs_tokens_of_its_own_row_before_it() -> None:
    batch = join(rows_of(3, 4), 8)
    assert batch.labels(2)[0].tolist() == [False, False, True, False, False, True, True, False]
    assert batch.labels(3)[0].tolist() == [False] * 6 + [True, False]
    assert torch.equal(batch.labels(1), batch.loss_mask)


def test_values_of_rows_are_laid_out_and_taken_apart_again() -> None:
    batch = join(rows_of(3, 4, 2), 8)
    values = [torch.randn(n, 5, generator=torch.Generator().manual_seed(n)) for n in (3, 4, 2)]
    laid = laid_out(values, batch)
    assert (
        laid.shape == (2, 8, 5)
        and torch.equal(laid[0, 3:7], values[1])
        and not laid[~batch.padding].any()
    )
    assert all(torch.equal(a, b) for a, b in zip(taken_apart(laid, batch), values, strict=True))
    odd = torch.zeros(2, 8, dtype=torch.bool)
    odd[0, 4] = odd[1, 5] = True
    assert batch.rows_with(odd) == [7], "the other place is padding"
    moved = batch.to("cpu")
    assert moved.packing is not None and torch.equal(
        moved.packing.document_ids, batch.packing.document_ids
    )  # type: ignore[union-attr]


def test_data_joins_the_rows_of_a_batch(tmp_path: Path) -> None:
    written = [
        Row(i, tuple(range(1, n + 1)), ((2, n),), ("stop",)) for i, n in enumerate((5, 9, 4, 6))
    ]
    write_set(tmp_path, written, manifest=ABOUT, held_out=0)
    data = ConversationData(tmp_path)
    joined = data.joined(10)
    batch = joined.batch([0, 2, ~1])
    assert (
        batch.input_ids.shape == (2, 10)
        and batch.row_ids.tolist() == [0, 2, 1]
        and batch.lengths.tolist() == [9, 9]
    )
    assert batch.loss_mask.tolist() == [
        [False, False] + [True] * 3 + [False] * 2 + [True] * 2 + [False],
        [False] * 10,
    ]
    assert data.batch([0]).packing is None and data.sequence is None
    with pytest.raises(InputError, match=r"trainer\.pack=8"):
        data.joined(8)
    with pytest.raises(InputError, match=r"trainer\.pack=null"):
        data.part([0], [torch.ones(5)]).joined(10)


def test_bins_are_well_filled() -> None:
    assert sorted(map(sorted, fill([5, 5, 3, 2, 6, 4, 4, 1], 10))) == [[1, 2, 3, 4], [4, 6], [5, 5]]
    widths = [20 + 13 * i % 180 for i in range(500)]
    bins = fill(widths, 512)
    assert sorted(w for one in bins for w in one) == sorted(widths) and all(
        sum(one) <= 512 for one in bins
    )
    assert sum(widths) / (512 * len(bins)) > 0.98


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=100),
    world=st.integers(1, 3),
    sequences=st.integers(1, 5),
    seed=st.integers(0, 2),
)
def test_every_row_once_in_equally_many_sequences(
    lengths: list[int], world: int, sequences: int, seed: int
) -> None:
    common: dict[str, Any] = {"sequence": 300, "sequences": sequences, "seed": seed, "world": world}
    samplers = [PackedSampler(lengths, rank=r, **common) for r in range(world)]
    for epoch in (0, 3):
        parts = [sampler.batches(epoch) for sampler in samplers]
        assert {len(part) for part in parts} == {len(samplers[0])}
        assert sorted(i for part in parts for batch in part for i in batch if i >= 0) == list(
            range(len(lengths))
        )
        for batch in (batch for part in parts for batch in part):
            joined = join(rows_of(*(lengths[i if i >= 0 else ~i] for i in batch)), 300)
            assert joined.input_ids.shape[0] <= sequences
    assert samplers[0].batches(1) == PackedSampler(lengths, rank=0, **common).batches(1)


def test_neighbours_differ_from_epoch_to_epoch() -> None:
    lengths = [20 + 7 * i % 120 for i in range(400)]
    sampler = PackedSampler(lengths, sequence=512, sequences=2)
    assert sampler.filled > 0.95
    pairs = [{tuple(sorted(batch)) for batch in sampler.batches(epoch)} for epoch in (0, 1)]
    assert not pairs[0] & pairs[1]
