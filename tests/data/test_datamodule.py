"""Rows become batches: cut alike, counted when dropped, each once an epoch, equally many on every
process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.data.conversations import Row, write_set
from drafttrain.data.datamodule import ConversationData, EpochSampler, collate, set_folder
from drafttrain.data.sequences import PackedSampler
from drafttrain.errors import InputError
from tests.data.sets import ABOUT
from tests.messages import said


def row(number: int, prompt: int, answer: int) -> Row:
    ids = tuple(range(1, prompt + answer + 1))
    return Row(number, ids, ((prompt, prompt + answer),), ("stop",))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        row(0, 5, 5),
        row(1, 5, 5),
        row(2, 60, 20),
        row(3, 30, 20),
        row(4, 4, 6),
        row(5, 10, 30),
        row(6, 2, 3),
    ]
    write_set(tmp_path, rows, manifest=ABOUT, held_out=2)
    return tmp_path


@pytest.mark.field("F16")
def test_padding_is_never_supervised_and_an_end_token_equal_to_it_is() -> None:
    rows = [
        (torch.tensor([7, 0, 0]), torch.tensor([False, True, True]), 4),
        (torch.tensor([9]), torch.tensor([False]), 2),
    ]
    batch = collate(rows, pad_to_multiple=4)
    assert batch.input_ids.tolist() == [[7, 0, 0, 0], [9, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[False, True, True, False], [False] * 4]
    assert batch.lengths.tolist() == [3, 1] and batch.row_ids.tolist() == [4, 2]
    assert batch.padding.tolist() == [[True, True, True, False], [True, False, False, False]]


@pytest.mark.field("F05", "F07")
def test_long_rows_are_cut_or_dropped_and_counted(folder: Path) -> None:
    uncut = ConversationData(folder)
    assert (
        uncut.indices == [2, 3, 4, 5, 6]
        and uncut.lengths == [80, 50, 10, 40, 5]
        and uncut.supervised == 79
    )
    data = ConversationData(folder, max_length=40)
    assert data.indices == [3, 4, 5, 6] and data.lengths == [40, 10, 40, 5]
    assert data.counts == {"no supervised token in the first 40 tokens": 1} and data.cut == 1
    ids, mask = data.row(0)
    assert len(ids) == len(mask) == 40 and ids.tolist() == list(range(1, 41))
    assert mask.nonzero().flatten().tolist() == list(range(30, 40))
    assert "1 rows cut to 40" in data.summary() and "(52%)" in data.summary()
    assert ConversationData(folder, split="held_out").indices == [0, 1]


def test_a_part_is_data_of_its_own(folder: Path) -> None:
    every = ConversationData(folder, max_length=60)
    part = every.part([0, 2, 3])
    assert part.indices == [every.indices[i] for i in (0, 2, 3)] and part.lengths == [
        every.lengths[i] for i in (0, 2, 3)
    ]
    assert (
        part.supervised == sum(every.supervised_per_row[i] for i in (0, 2, 3))
        and part.weights is None
        and len(part) == 3
    )
    for mine, theirs in enumerate((0, 2, 3)):
        assert all(
            torch.equal(a, b) for a, b in zip(part.row(mine), every.row(theirs), strict=True)
        )
    assert part.batch([0, 1]).weights is None and part.part([1, 2]).indices == part.indices[1:]
    assert (
        every.digest is None
        and part.digest != every.part([0, 2]).digest
        and part.digest == every.part([0, 2, 3]).digest
    )
    assert len(every) == 4 and "left out" in every.summary() and "left out" not in part.summary()
    with pytest.raises(InputError, match=said("data.no_row_left")):
        every.part([])


def test_labels_of_a_part_may_have_weights(folder: Path) -> None:
    every = ConversationData(folder)
    weights = [
        torch.rand(every.lengths[i], generator=torch.Generator().manual_seed(i)) for i in range(3)
    ]
    part = every.part([0, 1, 2], weights)
    batch = part.batch([2, ~0])
    assert batch.weights is not None and batch.weights.shape == batch.input_ids.shape
    assert (
        torch.equal(batch.weights[0, : every.lengths[2]], weights[2])
        and not batch.weights[0, every.lengths[2] :].any()
    )
    assert torch.equal(batch.weights[1], weights[0]) and not batch.loss_mask[1].any()
    moved = batch.to("cpu")
    assert moved.weights is not None and torch.equal(moved.weights, batch.weights)
    assert part.digest not in (
        every.part([0, 1, 2]).digest,
        every.part([0, 1, 2], [2 * one for one in weights]).digest,
    )
    with pytest.raises(ValueError, match=said("data.weights_of_another_shape")):
        every.part([0, 1], weights[1:])


@pytest.mark.field("F07", "F63")
def test_nothing_left_gives_the_counts(folder: Path) -> None:
    with pytest.raises(InputError, match=said("data.no_usable_row")) as refused:
        ConversationData(folder, max_length=2)
    assert "5 no supervised token in the first 2 tokens" in str(refused.value)
    with pytest.raises(InputError, match="split=test"):
        ConversationData(folder, split="test")
    with pytest.raises(InputError, match="max_length=0"):
        ConversationData(folder, max_length=0)


def test_limits_take_the_first_rows(folder: Path) -> None:
    data = ConversationData(folder, limit_tokens=45)
    assert (
        data.indices == [2, 3] and data.supervised == 40 and data.counts == {"past limit_tokens": 3}
    )
    assert ConversationData(folder, limit_tokens=1).indices == [2]
    assert ConversationData(folder, limit_rows=3).counts == {"past limit_rows": 2}


def test_rows_can_be_chosen_by_temperature(tmp_path: Path) -> None:
    rows = [Row(i, (1, 2, 3), ((1, 3),), ("stop",), (0.0, 0.7, 1.0)[i % 3]) for i in range(7)]
    write_set(tmp_path, rows, manifest=ABOUT, held_out=1)
    data = ConversationData(tmp_path, temperatures=[0.0, 0.7])
    assert data.indices == [1, 3, 4, 6] and data.counts == {"of another temperature": 2}
    assert int(data.label_counts(5).sum()) == 12  # all labels of the split, whatever was chosen
    with pytest.raises(InputError, match=r"data\.temperatures=null") as refused:
        ConversationData(tmp_path, temperatures=[0.5])
    assert "6 of another temperature" in str(refused.value)


def test_all_tokens_but_the_first_can_be_labels(folder: Path) -> None:
    answers, data = (
        ConversationData(folder, max_length=40),
        ConversationData(folder, max_length=40, labels="all"),
    )
    assert data.indices == answers.indices and data.counts == answers.counts
    assert data.supervised == data.tokens - len(data) == sum(data.supervised_per_row)
    batch = data.batch([1, 3])
    assert batch.loss_mask.tolist() == [[False] + [True] * 9, [False] + [True] * 4 + [False] * 5]
    assert not data.batch([~1]).loss_mask.any()
    assert torch.equal(data.label_counts(100), answers.label_counts(100))
    with pytest.raises(InputError, match="labels=questions"):
        ConversationData(folder, labels="questions")


def test_a_first_token_is_no_label(tmp_path: Path) -> None:
    rows = [Row(i, (1, 2, 3), ((0, 3),), ("stop",)) for i in range(2)] + [
        Row(2, (1, 2), ((0, 1),), ("stop",))
    ]
    write_set(tmp_path, rows, manifest=ABOUT, held_out=1)
    data = ConversationData(tmp_path)
    assert data.supervised == 2 and data.row(0)[1].tolist() == [False, True, True]
    assert data.counts == {"no supervised token": 1}


def test_a_batch_may_weigh_nothing(folder: Path) -> None:
    data = ConversationData(folder)
    batch = data.batch([1, ~2])
    assert batch.row_ids.tolist() == [3, 4] and batch.loss_mask.sum(1).tolist() == [20, 0]
    assert batch.input_ids[1, :10].tolist() == list(range(1, 11))


def test_unknown_builtin_sets_are_refused() -> None:
    with pytest.raises(InputError, match=r"builtin:\.\./\.\."):
        set_folder("builtin:../..")
    assert set_folder("some/folder") == Path("some/folder")


@pytest.mark.field("F23")
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=120),
    world=st.integers(1, 4),
    accumulate=st.integers(1, 3),
    limits=st.sampled_from([(None, 1), (None, 8), (400, None), (1500, None), (1500, 5)]),
    seed=st.integers(0, 3),
)
def test_every_row_once_and_equally_many_batches(
    lengths: list[int],
    world: int,
    accumulate: int,
    limits: tuple[int | None, int | None],
    seed: int,
) -> None:
    tokens, rows = limits
    samplers = [
        EpochSampler(
            lengths,
            batch_tokens=tokens,
            batch_rows=rows,
            seed=seed,
            rank=r,
            world=world,
            accumulate=accumulate,
        )
        for r in range(world)
    ]
    for epoch in (0, 1, 7):
        parts = [sampler.batches(epoch) for sampler in samplers]
        assert {len(part) for part in parts} == {len(samplers[0])}
        assert sorted(i for part in parts for batch in part for i in batch if i >= 0) == list(
            range(len(lengths))
        )
        for batch in (batch for part in parts for batch in part):
            assert batch and (rows is None or len(batch) <= rows)
            width = max(lengths[i if i >= 0 else ~i] for i in batch)
            assert tokens is None or width * len(batch) <= tokens
            assert all(i >= 0 for i in batch) or len(batch) == 1


@pytest.mark.field("F21")
@pytest.mark.parametrize("pack", [None, 400])
def test_an_update_has_the_same_rows_in_any_number_of_processes(pack: int | None) -> None:
    """In the same order of micro-batches, so that their noise is the same too."""
    lengths = [random.Random(0).randint(20, 400) for _ in range(200)]

    def updates(world: int, accumulate: int) -> list[list[list[int]]]:
        common: dict[str, Any] = {"seed": 3, "world": world, "accumulate": accumulate}
        if pack is None:
            samplers = [
                EpochSampler(lengths, batch_tokens=700, rank=r, **common) for r in range(world)
            ]
        else:
            samplers = [
                PackedSampler(lengths, sequence=pack, sequences=2, rank=r, **common)
                for r in range(world)
            ]
        mine = [sampler.batches(1) for sampler in samplers]
        assert {len(batches) for batches in mine} == {len(samplers[0])} and len(
            samplers[0]
        ) % accumulate == 0
        # What all processes read one after another, micro-batch by micro-batch.
        read = [batch for together in zip(*mine, strict=True) for batch in together]
        return [read[i : i + 6] for i in range(0, len(read), 6)]

    single = updates(1, 6)
    assert len(single) > 3 and sorted(
        i for update in single for batch in update for i in batch if i >= 0
    ) == list(range(200))
    assert any(batch[0] < 0 for update in single for batch in update), "the last is filled up"
    assert single == updates(2, 3) == updates(3, 2) == updates(6, 1)


def test_batches_depend_only_on_seed_and_epoch() -> None:
    lengths = [random.Random(0).randint(20, 400) for _ in range(200)]
    sampler = EpochSampler(lengths, batch_rows=8, seed=3)
    assert sampler.batches(2) == EpochSampler(lengths, batch_rows=8, seed=3).batches(2)
    assert sampler.batches(2) != sampler.batches(3)
    assert sampler.batches(2) != EpochSampler(lengths, batch_rows=8, seed=4).batches(2)
    stream = sampler.from_step(1, 20)
    taken = [next(stream) for _ in range(10)]
    expected = [(1, k, b) for k, b in enumerate(sampler.batches(1))][20:] + [
        (2, k, b) for k, b in enumerate(sampler.batches(2))
    ]
    assert taken == expected[:10]


def test_rows_of_like_length_share_a_batch() -> None:
    chance = random.Random(0)
    lengths = [chance.randint(40, 448) for _ in range(2000)]
    batches = EpochSampler(lengths, batch_tokens=4096).batches(0)
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    assert sum(lengths) / padded > 0.92
    partners = {frozenset(batch) for batch in batches} & {
        frozenset(batch) for batch in EpochSampler(lengths, batch_tokens=4096).batches(1)
    }
    assert not partners


def test_wrong_batch_settings_are_refused() -> None:
    with pytest.raises(InputError, match="batch_tokens=40"):
        EpochSampler([10, 50], batch_tokens=40)
    with pytest.raises(InputError, match="batch_tokens or batch_rows"):
        EpochSampler([10])
    with pytest.raises(InputError, match=said("data.no_rows_to_batch")):
        EpochSampler([], batch_rows=1)
    with pytest.raises(InputError, match="batch_rows=0"):
        EpochSampler([10], batch_rows=0)
    with pytest.raises(InputError, match="rank=2"):
        EpochSampler([10], batch_rows=1, rank=2, world=2)
