"""Which files of a folder are read, what is said of the others, and where a row is found again.

F78, neighbours: shards of one source, several sources, both; rows that cannot be read, that the
template refuses, whose columns it does not read, that the target could not write, that are too
long; a limit that ends within a shard; a file in the middle that is cut. Of names: upper case,
`.ndjson`, packed ones, links to files and folders, to a folder above, to nowhere; hidden ones.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from drafttrain.data.numbered import Prompts, by_reason, not_given, nothing_left, unread_columns
from drafttrain.data.prompts import PromptFile
from drafttrain.data.sources import files_of
from drafttrain.data.template import ChatPieces
from drafttrain.data.tokens import TokenData
from drafttrain.errors import InputError
from tests.helpers import CHATML, tiny_tokenizer

GOOD, BAD = {"prompt": "a"}, {"prompt": ""}
TOOLS = {"prompt": "a", "tools": [{"name": "f"}]}
SHARDS = ["x-00000-of-00002.jsonl", "x-00001-of-00002.jsonl"]


def lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(folder: Path, limit: int | None = None) -> Prompts:
    return PromptFile(path=str(folder)).read(limit)


@pytest.mark.field("F78")
@pytest.mark.parametrize("other", [False, True])
def test_rows_are_named_by_file_and_line(tmp_path: Path, other: bool) -> None:
    for name in SHARDS:
        lines(tmp_path / name, [GOOD, BAD, TOOLS])
    if other:
        lines(tmp_path / "y.jsonl", [TOOLS, BAD])
    found = read(tmp_path)
    files = [*SHARDS, "y.jsonl"] if other else SHARDS
    assert {(item.file, item.row) for item in found.skipped} == {(name, 2) for name in files}
    assert by_reason(found.skipped) == {f"an empty user turn, in {name}": [2] for name in files}
    unread = found.by_file(unread_columns(found, ChatPieces(tiny_tokenizer(), ())))
    assert unread == {f"tools, in {name}": [1 if name == "y.jsonl" else 3] for name in files}
    where = {found.place(row) for row, _ in found.rows}
    assert where == {(name, n) for name in SHARDS for n in (1, 3)} | (
        {("y.jsonl", 1)} if other else set()
    )
    everywhere = found.places(row for row, _ in found.rows)
    assert everywhere.startswith(f"{SHARDS[0]} 1, 3; {SHARDS[1]} 1, 3")
    found.leave_out(found.rows[-1][0], "too long")
    assert found.skipped[-1].file in files
    assert f"1 too long, in {found.skipped[-1].file} (rows" in str(nothing_left("x", found))


@pytest.mark.field("F78")
def test_beyond_what_was_read_a_row_has_its_number_in_the_source(tmp_path: Path) -> None:
    for name in SHARDS:
        lines(tmp_path / name, [GOOD] * 4)
    found = read(tmp_path, 5)
    assert [found.place(row) for row in (4, 5, 8)] == [(SHARDS[0], 4), (SHARDS[1], 1), ("", 8)]
    single = read(tmp_path / SHARDS[0])
    assert single.place(3) == ("", 3) and single.files == {} and not single.passed_over


def test_a_file_that_cannot_be_read_is_the_one_named(tmp_path: Path) -> None:
    for place in range(3):
        name = tmp_path / f"x-{place:05d}-of-00003.jsonl.gz"
        packed = gzip.compress(b'{"prompt": "a"}\n' * 1000, mtime=0)
        name.write_bytes(packed[:40] if place == 1 else packed)
    with pytest.raises(InputError, match=r"x-00001-of-00003\.jsonl\.gz cannot be read"):
        read(tmp_path)
    for place in range(3):
        (tmp_path / f"x-{place:05d}-of-00003.jsonl.gz").write_bytes(gzip.compress(b'{"q": 1}\n'))
    with pytest.raises(InputError, match=r"00000-of-00003\.jsonl\.gz and 2 more: no row has"):
        read(tmp_path)


def test_files_of_any_spelling_are_read_and_the_others_named(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    names = ["a.ndjson", "b.JSONL", "c.Json", "deep/d.jsonl", "deep/er/e.jsonl"]
    for name in names:
        lines(folder / name, [GOOD])
    (folder / "f.NDJSON.GZ").write_bytes(gzip.compress(b'{"prompt": "a"}\n'))
    lines(tmp_path / "outside" / "g.jsonl", [GOOD])
    lines(folder / ".hidden.jsonl", [GOOD])
    lines(folder / ".git" / "h.jsonl", [GOOD])
    for name in ("README.md", "i.csv", "deep/j.jsonl.zst"):
        (folder / name).write_text("x")
    (folder / "a_link").symlink_to(tmp_path / "outside")
    (folder / "file.jsonl").symlink_to(tmp_path / "outside" / "g.jsonl")
    (folder / "deep" / "up").symlink_to(folder)
    for name in ("aaa", "zzz"):  # Both before and after what they lead to.
        (folder / name).symlink_to(folder / "deep" / "er")
    (folder / "b_link.jsonl").symlink_to(folder / "a.ndjson")
    (folder / "z.jsonl").symlink_to(tmp_path / "none.jsonl")
    found = files_of(folder)
    expected = {*names, "f.NDJSON.GZ", "a_link/g.jsonl"}
    assert {str(path.relative_to(folder)) for path in found.files} == expected
    assert set(found.passed_over) == {
        "1 hidden files (.hidden.jsonl)",
        "3 files with other endings (README.md, deep/j.jsonl.zst, i.csv)",
        "1 links that lead to no file (z.jsonl)",
        "3 links to folders that are read anyway (aaa, deep/up, zzz)",
        "2 links to files that are read anyway (b_link.jsonl, file.jsonl)",
    }
    prompts = read(folder)
    assert len(prompts.rows) == len(expected) and prompts.passed_over == found.passed_over
    for name in ("k", "l", "m", "n"):
        (folder / f"{name}.txt").write_text("x")
    assert any("k.txt, l.txt and 2 more)" in words for words in files_of(folder).passed_over)
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "a.csv").write_text("x")
    with pytest.raises(InputError, match=r"it has 1 files with other endings \(a\.csv\)"):
        read(tmp_path / "csv")


def test_a_folder_that_may_not_be_read_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines(tmp_path / "a.jsonl", [GOOD])
    (tmp_path / "locked").mkdir()
    listed = Path.iterdir

    def refusing(path: Path) -> Any:
        if path.name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refusing)
    with pytest.raises(InputError, match=r"cannot be read: .*locked"):
        read(tmp_path)


@pytest.mark.field("F80")
def test_token_rows_of_a_folder_are_read_again_when_any_file_changed(tmp_path: Path) -> None:
    """Written again, in the same size and second too; added; taken away; in a folder below."""

    def row(first: int) -> dict[str, Any]:
        return {"input_ids": [first, 6, 7], "loss_mask": [0, 1, 1]}

    def firsts() -> list[int]:
        data = TokenData(tmp_path, held_out=0)
        return sorted(int(data.row(i)[0][0]) for i in range(len(data)))

    lines(tmp_path / "a.jsonl", [row(1)])
    below = lines(tmp_path / "deep" / "b.jsonl", [row(2)])
    before = below.stat()
    assert firsts() == [1, 2]
    lines(below, [row(3)])
    os.utime(below, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert firsts() == [1, 3]
    lines(tmp_path / "c.jsonl", [row(4)])
    assert firsts() == [1, 3, 4]
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "notes.txt").write_text("x")
    assert firsts() == [3, 4]
    assert "; not read: 1 files with other endings (notes.txt)" in (
        TokenData(tmp_path, held_out=0).summary()
    )


@pytest.mark.field("F78")
def test_shards_that_are_not_there_are_missed(tmp_path: Path) -> None:
    """Neighbours: two sources, each of its own count; a count of one; all of them there."""
    for name in ("x-00000-of-00003", "x-00002-of-00003", "y-00001-of-00002", "z-00000-of-00001"):
        lines(tmp_path / f"{name}.jsonl", [GOOD])
    assert files_of(tmp_path).passed_over == (
        "1 of 3 shards of x.jsonl, which are not there",
        "1 of 2 shards of y.jsonl, which are not there",
    )
    for name in SHARDS:
        lines(tmp_path / "all" / name, [GOOD])
    assert files_of(tmp_path / "all").passed_over == ()


@pytest.mark.field("F79")
def test_columns_that_the_template_looks_up_and_is_not_given(tmp_path: Path) -> None:
    """Neighbours: a name that it does not look up; one that is given; one that is decided here; a
    template's word; another name for the prompt."""
    thinks = "{% if enable_thinking %}<|im_start|>{{ tools }}{{ question }}{% endif %}" + CHATML
    path = tmp_path / "a.jsonl"
    row = {"question": "a", "enable_thinking": True, "id": 3, "add_generation_prompt": True}
    lines(path, [{**row, "tools": [{"name": "f"}], "if": 1, "chat_template": "x"}])
    found = PromptFile(path=str(path), columns={"prompt": "question"}).read(None)
    assert not_given(found, ChatPieces(tiny_tokenizer(thinks), ())) == ["enable_thinking"]
    assert not_given(found, ChatPieces(tiny_tokenizer(), ())) == []
