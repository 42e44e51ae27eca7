"""Sets and journals: what is written is read back, what is damaged is refused, a kill loses nothing
finished."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from drafttrain.data import journal as journal_module
from drafttrain.data.conversations import (
    CHECKSUM,
    HELD_OUT,
    MANIFEST,
    TENSORS,
    TRAIN,
    Row,
    check_vocabulary,
    read_set,
    rows_of,
    sha256_of,
    write_set,
)
from drafttrain.data.folder import BASE, SetFolder
from drafttrain.data.row_journal import Journal, read_journals, write_journal
from drafttrain.errors import InputError
from drafttrain.files import write_json
from tests.data.sets import ABOUT
from tests.messages import said


def some_rows(count: int = 20, seed: int = 0, largest: int = 300) -> list[Row]:
    chance = random.Random(seed)
    rows = []
    for number in range(count):
        ids = [chance.randrange(largest) for _ in range(chance.randint(12, 40))]
        spans = ((3, 6), (8, len(ids))) if number % 3 == 0 else ((5, len(ids)),)
        finish = ("stop",) * (len(spans) - 1) + (chance.choice(("stop", "length", "template")),)
        rows.append(Row(number * 7 + 1, tuple(ids), spans, finish, chance.choice((0.0, 0.7, 1.0))))
    return rows


def test_a_set_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    rows = some_rows()
    manifest = write_set(tmp_path, reversed(rows), manifest=ABOUT, held_out=4)
    found = read_set(tmp_path)
    assert list(rows_of(found)) == rows
    assert found.indices(HELD_OUT) == [0, 1, 2, 3] and len(found.indices(TRAIN)) == 16
    assert manifest["supervised_tokens"] == found.supervised == sum(row.supervised for row in rows)
    assert found.ids.dtype == np.uint16
    ids, mask = found.row(0)
    assert ids.tolist() == list(rows[0].ids) and torch.nonzero(mask)[0] == 3
    assert found.prompts(2) == [list(rows[0].ids[:3]), list(rows[1].ids[:5])]
    assert not list(tmp_path.glob(".*"))


def test_held_out_rows_that_are_asked_in_training_too_are_counted(tmp_path: Path) -> None:
    """Neighbours: the same prompt with another answer; a prompt that goes on; a later turn alike;
    prompts of one token; held-out rows alike among themselves."""
    asked = [(5, 6), (5, 6, 7), (8,), (9, 9), (5, 6), (8,), (9, 9, 9), (5, 6)]
    rows = [
        Row(n, (*prompt, 20 + n, 5, 6, 20 + n), ((len(prompt), len(prompt) + 1),), ("stop",), 0.0)
        for n, prompt in enumerate(asked)
    ]
    write_set(tmp_path, rows, manifest=ABOUT, held_out=4)
    found = read_set(tmp_path)
    assert found.asked_also([4, 5, 6, 7]) == 1 and found.asked_also([5, 6]) == 0
    assert found.asked_also([1]) == 1


def test_large_vocabularies_are_kept(tmp_path: Path) -> None:
    rows = some_rows(largest=150_000)
    write_set(tmp_path, rows, manifest=ABOUT, held_out=0)
    found = read_set(tmp_path)
    assert list(rows_of(found)) == rows
    check_vocabulary(found, 150_000)
    with pytest.raises(InputError, match=said("data.beyond_vocabulary")):
        check_vocabulary(found, 100_000)


def test_a_set_needs_rows_and_each_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said("data.no_conversation")):
        write_set(tmp_path, [], manifest=ABOUT, held_out=0)
    with pytest.raises(ValueError, match=said("data.row_number_twice")):
        write_set(tmp_path, some_rows(2) * 2, manifest=ABOUT, held_out=0)


def negative(tensors: dict[str, np.ndarray]) -> None:
    tensors["ids"] = tensors["ids"].astype(np.int32)
    tensors["ids"][3] = -1


def backwards(tensors: dict[str, np.ndarray]) -> None:
    tensors["offsets"][1:3] = tensors["offsets"][1:3][::-1].copy()


def overflowing(tensors: dict[str, np.ndarray]) -> None:
    tensors["offsets"][1] = np.iinfo(np.int64).max


def doubled(tensors: dict[str, np.ndarray]) -> None:
    tensors["rows"][1] = tensors["rows"][0]


def of_floats(tensors: dict[str, np.ndarray]) -> None:
    tensors["ids"] = tensors["ids"].astype(np.float32)


def short_mask(tensors: dict[str, np.ndarray]) -> None:
    tensors["mask_bits"] = tensors["mask_bits"][:-1].copy()


def wide_offsets(tensors: dict[str, np.ndarray]) -> None:
    tensors["offsets"] = tensors["offsets"][:, None].copy()


def no_split(tensors: dict[str, np.ndarray]) -> None:
    del tensors["split"]


def odd_split(tensors: dict[str, np.ndarray]) -> None:
    tensors["split"][0] = 7


def other_mask(tensors: dict[str, np.ndarray]) -> None:
    tensors["mask_bits"][0] ^= 1


@pytest.mark.parametrize(
    "harm",
    [
        negative,
        backwards,
        overflowing,
        doubled,
        of_floats,
        short_mask,
        wide_offsets,
        no_split,
        odd_split,
        other_mask,
    ],
)
def test_a_damaged_set_is_refused(tmp_path: Path, harm: Any) -> None:
    write_set(tmp_path, some_rows(), manifest=ABOUT, held_out=4)
    tensors = load_file(tmp_path / TENSORS)
    harm(tensors)
    save_file(tensors, tmp_path / TENSORS)
    with pytest.raises(InputError, match=said("data.set_checksum")):
        read_set(tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    write_json(tmp_path / MANIFEST, manifest | {CHECKSUM: sha256_of(tmp_path / TENSORS)})
    with pytest.raises(InputError, match=said("data.set_damaged_or_contradicts")) as refused:
        read_set(tmp_path)
    assert "checksum" not in str(refused.value)


def test_a_single_bit_is_noticed_and_an_older_set_without_a_checksum_is_read(
    tmp_path: Path,
) -> None:
    write_set(tmp_path, some_rows(), manifest=ABOUT | {CHECKSUM: "of an earlier set"}, held_out=4)
    before = read_set(tmp_path).digest
    intact = (tmp_path / TENSORS).read_bytes()
    (tmp_path / TENSORS).write_bytes(intact[:-200] + bytes([intact[-200] ^ 1]) + intact[-199:])
    with pytest.raises(InputError, match=said("data.set_damaged")):
        read_set(tmp_path)
    (tmp_path / TENSORS).write_bytes(intact)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    del manifest[CHECKSUM]
    write_json(tmp_path / MANIFEST, manifest)
    assert read_set(tmp_path).digest == before


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"format": 2}', '{"format": 1}', "[" * 100_000, '{"format": 1, "target": 3}'],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, content: str) -> None:
    write_set(tmp_path, some_rows(), manifest=ABOUT, held_out=4)
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(InputError):
        read_set(tmp_path)


def test_a_cut_file_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"drafttrain\.synthesize"):
        read_set(tmp_path)
    write_set(tmp_path, some_rows(), manifest=ABOUT, held_out=4)
    data = (tmp_path / TENSORS).read_bytes()
    (tmp_path / TENSORS).write_bytes(data[:-100])
    with pytest.raises(InputError, match=said("data.set_damaged")):
        read_set(tmp_path)


def test_a_journal_gives_back_its_rows_and_heals(tmp_path: Path) -> None:
    rows = some_rows()
    journal = Journal(tmp_path)
    for row in rows[:5]:
        journal.add(row)
    journal.skip(999, "empty user turn")
    journal.close()
    with journal.path.open("ab") as file:
        file.write(b'{"row":1000,"ids":[1,2')
    assert sorted(read_journals(tmp_path)[0]) == [row.row for row in rows[:5]]
    again, other = Journal(tmp_path), Journal(tmp_path, rank=1)
    again.add(rows[5])
    other.add(rows[6])
    other.add(rows[0])  # Once is enough.
    found, skipped = again.finished()
    assert [found[number] for number in sorted(found)] == rows[:7]
    assert skipped == {999: "empty user turn"}


def test_a_journal_that_its_writer_removed_just_now_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, taken = journal_module._lock, []

    def removing(file: Any, patience: float = 2.0) -> bool:
        if not taken:
            journal_module.journal_path(tmp_path, 0).unlink()
        taken.append(file)
        return lock(file, patience)

    monkeypatch.setattr(journal_module, "_lock", removing)
    lines = journal_module.Lines(tmp_path)
    lines.write({"row": 1})
    lines.close()
    assert len(taken) == 2 and lines.path.read_text() == '{"row":1}\n'


def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    with pytest.raises(InputError, match=said("data.written_by_another")):
        Journal(tmp_path)
    first.close()
    assert not first.path.exists()  # Nothing was written.
    Journal(tmp_path).close()


GOOD = {"row": 3, "ids": [1, 2, 3], "spans": [[1, 3]], "finish": ["stop"], "temperature": 0.0}


@pytest.mark.parametrize(
    "harm",
    [
        {"row": -1},
        {"row": "3"},
        {"row": True},
        {"row": 1 << 40},
        {"ids": []},
        {"ids": [1, -2, 3]},
        {"ids": [1, 2.0, 3]},
        {"ids": "123"},
        {"ids": None},
        {"spans": []},
        {"spans": [[1, 4]]},
        {"spans": [[2, 2]]},
        {"spans": [[1, 3], [0, 1]]},
        {"spans": [[1, 2, 3]]},
        {"spans": 3},
        {"finish": []},
        {"finish": ["because"]},
        {"finish": [["stop"]]},
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"temperature": -1},
        {"skipped": 3},
    ],
    ids=str,
)
def test_a_damaged_journal_names_file_and_line(tmp_path: Path, harm: dict[str, Any]) -> None:
    (tmp_path / "journal-0002.jsonl").write_text(
        json.dumps(GOOD) + "\n" + json.dumps(GOOD | {"row": 4} | harm) + "\n"
    )
    with pytest.raises(InputError, match=r"journal-0002\.jsonl, line 2"):
        read_journals(tmp_path)


@pytest.mark.parametrize("line", [b"[]", b"nothing", b"\xff\xfe", b"[" * 100_000, b"\0\0\0"])
def test_a_line_that_is_no_record_is_named_too(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "journal-0000.jsonl").write_bytes(line + b"\n" + json.dumps(GOOD).encode() + b"\n")
    with pytest.raises(InputError, match=r"journal-0000\.jsonl, line 1"):
        read_journals(tmp_path)


def test_a_folder_refuses_what_is_not_its_own(tmp_path: Path) -> None:
    folder = SetFolder(tmp_path / "out")
    folder.check(resume=True, adopt=False)
    assert not folder.path.exists()
    folder.create()
    (folder.path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"out=.*\(notes\.txt\)"):
        folder.check(resume=True, adopt=False)
    (folder.path / "notes.txt").unlink()
    write_journal(folder.path / "journal-0000.jsonl", some_rows(2), {})
    with pytest.raises(InputError, match="adopt=true"):
        folder.check(resume=True, adopt=False)
    folder.check(resume=True, adopt=True)
    folder.record(ABOUT)
    folder.check(resume=True, adopt=False)
    with pytest.raises(InputError, match="resume=false"):
        folder.check(resume=False, adopt=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=said("data.out_is_a_file")):
        SetFolder(tmp_path / "file").check(resume=True, adopt=False)
    (folder.path / "settings.json").write_text("{}")
    with pytest.raises(InputError, match=said("data.settings_lack_parts")):
        folder.recorded()


def test_rows_of_a_set_count_as_finished_and_survive_its_replacement(tmp_path: Path) -> None:
    folder, rows = SetFolder(tmp_path), some_rows()
    folder.write(rows[:10], {**ABOUT, "not_written": {"empty user turn": [500]}}, held_out=2)
    assert folder.recorded() == ABOUT
    done, skipped = folder.finished()
    assert list(done.values()) == rows[:10] and skipped == {500: "empty user turn"}
    folder.reopen(done.values(), skipped)
    assert (tmp_path / BASE).exists()
    # A kill between the set's two files: the journals still have every row.
    write_set(tmp_path / "other", rows, manifest=ABOUT, held_out=2)
    (tmp_path / "other" / TENSORS).replace(tmp_path / TENSORS)
    assert folder.finished() == (done, skipped)
    folder.write(rows, ABOUT, held_out=2)
    folder.clear()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [TENSORS, MANIFEST]


@pytest.mark.field("F24")
def test_a_stopped_process_is_named_not_waited_for(tmp_path: Path) -> None:
    folder, rows = SetFolder(tmp_path), some_rows()
    write_journal(tmp_path / "journal-0000.jsonl", [row for row in rows if row.row % 2 == 0], {})
    wanted = {row.row for row in rows}
    with pytest.raises(InputError, match=said("data.process_stopped")):
        folder.await_rows(wanted, 2, lambda text: None, grace=0.6)
    write_journal(tmp_path / "journal-0001.jsonl", [row for row in rows if row.row % 2 == 1], {})
    assert list(folder.await_rows(wanted, 2, lambda text: None)[0]) == [
        row.row for row in rows if row.row % 2 == 0
    ] + [row.row for row in rows if row.row % 2 == 1]
    with pytest.raises(InputError, match=said("data.first_process_stopped")):
        folder.await_settings(lambda text: None, seconds=0.3)
