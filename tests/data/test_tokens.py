"""Rows of token ids with a mask are taken as they are, or left out by reason with their numbers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.data.tokens import TokenData
from drafttrain.errors import InputError
from drafttrain.target import load
from drafttrain.training.pairing import check_set

# F80: data that is no conversation had no way in. Tried: every container; a mask of numbers and of
# truth values; rows that cannot be used; ids beyond the vocabulary; several files (F78); a limit,
# a cut, a split; a mask that begins with the row.


def row(number: int, **more: Any) -> dict[str, Any]:
    return {"input_ids": [5, 6, 7, 8 + number], "loss_mask": [0, 0, 1, 1], **more}


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


@pytest.mark.field("F80")
def test_rows_of_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [row(i, wide="x" * 100) for i in range(20)]
    rows[3]["loss_mask"] = [False, False, True, True]
    text = lines(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(text.read_bytes()))
    plain = [row(i, wide="x" * 100) for i in range(20)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(plain), tmp_path / "d.parquet")
    for name in ("a.jsonl", "b.json", "c.jsonl.gz", "d.parquet"):
        train = TokenData(tmp_path / name, held_out=3)
        held_out = TokenData(tmp_path / name, held_out=3, split="held_out")
        assert len(train) == 17 and len(held_out) == 3 and train.supervised == 34
        ids, mask = train.row(0)
        assert ids.tolist() == [5, 6, 7, 11] and mask.tolist() == [False, False, True, True]
        assert held_out.set.prompts() == [[5, 6]] * 3
    assert (
        TokenData(text, held_out=100, limit_rows=5, max_length=3)
        .summary()
        .startswith("train: 5 rows, 5 of 15 tokens supervised")
    )
    assert len(TokenData(text, held_out=100, split="held_out")) == 4  # At most a fifth.


@pytest.mark.field("F80")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"labels": [-100, -100, 7, 9]}, []),
        ({"labels": [5, 6, 7, 9]}, ["column labels, which is another mask than loss_mask"]),
        ({"labels": [-100, -100, 7, 8]}, ["column labels, which is another mask than loss_mask"]),
        ({"weights": [1, 1, 2, 2]}, ["column weights"]),
        ({"seq_lens": [2, 2], "segment_ids": None}, ["column seq_lens"]),
    ],
)
def test_other_columns_that_say_what_to_learn_are_named(
    more: dict[str, Any], said: list[str], tmp_path: Path
) -> None:
    rows = [row(i, **(more if i == 1 else {})) for i in range(5)]
    data = TokenData(lines(tmp_path / "a.jsonl", rows), held_out=1)
    assert data.set.manifest["overlooked"] == {what: [2] for what in said}
    assert all(f"not read: {what} (rows 2)" in data.summary() for what in said)


def test_kinds_of_task_are_kept(tmp_path: Path) -> None:
    """Of several files too; what is no name of one is said, and so are too many of them."""
    kinds = ["maths", "", "code", "x" * 61, None] * 4
    rows = [row(i, **({} if kind is None else {"task": kind})) for i, kind in enumerate(kinds)]
    data = TokenData(lines(tmp_path / "a.jsonl", rows), held_out=3)
    assert [data.set.category_of(i) for i in range(5)] == [
        "maths",
        *("(none)", "code"),
        *["(none)"] * 2,
    ]
    assert data.set.by_category(data.indices) == {"(none)": 11, "code": 3, "maths": 3}
    assert "not read: column task, which is no name of a kind" in data.summary()
    assert "characters) (rows 4, 9, 14, 19)" in data.summary()
    folder = tmp_path / "two"
    folder.mkdir()
    for name in ("a", "b"):
        lines(folder / f"{name}.jsonl", [row(i, category=name) for i in range(4)])
    several = TokenData(folder, held_out=1).set
    assert all(several.category_of(i) == "ab"[several.source[i]] for i in range(8))  # type: ignore[index]
    assert (
        TokenData(lines(tmp_path / "c.jsonl", [row(i) for i in range(5)]), held_out=1).set.category
        is None
    )
    many = [row(i, task=f"t{i}") for i in range(1001)]
    data = TokenData(lines(tmp_path / "many.jsonl", many), held_out=1)
    assert data.set.category is None and "1001 categories, more than 1000" in data.summary()


@pytest.mark.field("F80")
def test_rows_that_cannot_be_used_are_counted_with_their_numbers(tmp_path: Path) -> None:
    bad: list[Any] = [
        {"input_ids": [5, 6]},
        row(0, loss_mask=[0, 1]),
        row(0, input_ids=[5, 6, 7, -100]),
        row(0, input_ids=[5, 6, 7, 1.5]),
        row(0, input_ids=[5, 6, 7, True]),
        row(0, loss_mask=[0, 0, 1, 2]),
        row(0, input_ids=[], loss_mask=[]),
        [5, 6],
    ]
    path = lines(tmp_path / "a.jsonl", [row(0), *bad, row(1)])
    data = TokenData(path, held_out=0)
    assert len(data) == 2 and data.counts == {
        "input_ids that are no token ids (rows 4, 5, 6)": 3,
        "input_ids and loss_mask of different lengths, or empty (rows 3, 8)": 2,
        "without a list input_ids and a list loss_mask (rows 2)": 1,
        "a loss_mask of other values than 0 and 1 (rows 7)": 1,
        "not an object with keys but a list (rows 9)": 1,
    }
    with pytest.raises(InputError, match=r"none of its 1 rows can be used.*first row's keys: text"):
        TokenData(lines(tmp_path / "b.jsonl", [{"text": "the"}]), held_out=0)
    with pytest.raises(InputError, match=r"data\.path=.*none\.jsonl"):
        TokenData(tmp_path / "none.jsonl", held_out=0)


@pytest.mark.field("F80")
def test_ids_are_checked_against_the_vocabulary(tmp_path: Path) -> None:
    target = load.tiny(layers=1, width=16)
    good = TokenData(lines(tmp_path / "a.jsonl", [row(0)] * 5), held_out=0)
    check_set(target, good, None, "a.jsonl")
    bad = TokenData(lines(tmp_path / "b.jsonl", [row(0), row(400)]), held_out=0)
    with pytest.raises(InputError, match=r"b\.jsonl holds id 408, .* vocabulary ends at 319"):
        check_set(target, bad, None, "b.jsonl")


@pytest.mark.field("F80", "F78")
def test_several_files_share_limits_and_splits(tmp_path: Path) -> None:
    for name in "AB":
        lines(tmp_path / f"{name}.jsonl", [row(i) for i in range(50)])
    data = TokenData(tmp_path, held_out=20, limit_rows=10)
    assert data.summary().startswith("train: 10 rows (A.jsonl 5, B.jsonl 5), ")
    held_out = TokenData(tmp_path, held_out=20, split="held_out")
    assert data.set.by_source(held_out.indices) == {"A.jsonl": 10, "B.jsonl": 10}


@pytest.mark.field("F80")
def test_a_row_that_is_all_answer_is_decoded_from_its_first_token(tmp_path: Path) -> None:
    rows = [{"input_ids": [9, 6, 7], "loss_mask": [1, 1, 1]}] * 5
    data = TokenData(lines(tmp_path / "a.jsonl", rows), held_out=1)
    assert data.set.prompts() == [[9]]
    assert data.row(0)[1].equal(torch.tensor([False, True, True]))


@pytest.mark.field("F80")
def test_a_file_that_was_written_again_is_read_again(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [row(0)] * 5)
    assert len(TokenData(path, held_out=0)) == 5
    assert len(TokenData(lines(path, [row(0)] * 6), held_out=0)) == 6
    with pytest.raises(InputError, match=r"data\.held_out=-1"):
        TokenData(path, held_out=-1)


@pytest.mark.field("F80")
def test_masks_of_numbers_that_are_0_or_1_in_any_type(tmp_path: Path) -> None:
    clear: list[list[Any]] = [[0.0, 0.0, 1.0, 1.0], [-0.0, 0, True, 1], [False, 0.0, 1, 1.0]]
    path = lines(tmp_path / "a.jsonl", [row(0, loss_mask=mask) for mask in clear])
    data = TokenData(path, held_out=0)
    assert all(data.row(i)[1].tolist() == [False, False, True, True] for i in range(3))
    other: list[list[Any]] = [
        [0, 0, 0.5, 1],
        [0, 0, "1", 1],
        [0, 0, None, 1],
        [0, 0, float("nan"), 1],
    ]
    data = TokenData(lines(path, [row(0), *(row(0, loss_mask=mask) for mask in other)]), held_out=0)
    assert data.counts == {"a loss_mask of other values than 0 and 1 (rows 2, 3, 4, 5)": 4}


@pytest.mark.field("F80")
def test_a_held_out_split_without_rows_says_how_to_get_some(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [row(0)] * 4)
    for asked in (0, 100):
        with pytest.raises(
            InputError, match=f"no rows in split held_out: data.held_out={asked} of 4"
        ):
            TokenData(path, held_out=asked, split="held_out")
    summary = TokenData(path, held_out=100).summary()
    assert summary.endswith("; data.held_out=100: 0 are held out, a fifth of 4 rows")
    assert "held_out" not in TokenData(path, held_out=0).summary()


@pytest.mark.field("F80")
def test_rows_that_are_not_one_text_are_counted(tmp_path: Path) -> None:
    """Neighbours: padding on either side; a mask of numbers or of true; packed texts; columns that
    say nothing else than the row does."""
    fine = [row(0, attention_mask=[1] * 4, position_ids=[0, 1, 2, 3]), row(1, attention_mask=None)]
    fine += [row(n, attention_mask=[True] * 4) for n in range(2, 6)]
    bad = [
        row(0, attention_mask=[0, 1, 1, 1]),
        row(1, attention_mask=[1, 1, 1, False]),
        row(2, attention_mask=[1, 1, 1]),
        row(3, position_ids=[0, 1, 0, 1]),
        row(4, position_ids=[3, 4, 5, 6]),
    ]
    found = TokenData(lines(tmp_path / "a.jsonl", fine + bad), held_out=1)
    assert len(found.set) == len(fine)
    assert {
        reason.partition(" (")[0].partition(":")[0]: n for reason, n in found.counts.items()
    } == {"an attention_mask that hides tokens": 3, "position_ids that do not count from 0": 2}
