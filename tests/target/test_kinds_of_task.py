"""Sets whose rows name their kind of task: written, read, split, grown."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from drafttrain import synthesize as door
from drafttrain.data import conversations
from drafttrain.data.conversations import (
    HELD_OUT,
    MANIFEST,
    TENSORS,
    TRAIN,
    ConversationSet,
    read_set,
    rows_of,
)
from drafttrain.data.named import NO_CATEGORY
from drafttrain.data.people import KINDS, TALK, PeoplePrompts
from drafttrain.errors import InputError
from tests.helpers import save_target, tiny_chat_target

LIMITS = ["writing.max_answer=2", "writing.max_length=2000", "writing.max_user=300", "slots=16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_target(tiny_chat_target(), tmp_path_factory.mktemp("target"))
    settings = json.loads((folder / "config.json").read_text())
    settings["max_position_embeddings"] = 2000  # The tiny tokenizer has a token for each letter.
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def write(folder: Path, out: Path, *words: str) -> ConversationSet:
    target = ["target=hf", f"target.path={folder}", "target.device=cpu", "target.dtype=float32"]
    door.main([f"out={out}", *target, *LIMITS, *words])
    return read_set(out)


def kinds(data: ConversationSet, split: int) -> Counter[str]:
    return Counter(data.category_of(index) for index in data.indices(split))


def test_held_out_rows_are_those_of_held_out_patterns(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["prompts=people", "held_out=13", "prompts.turns=[1]"]
    data = write(folder, tmp_path / "out", *words, "rows=52")
    assert re.search(r"maths +│ 4, [01] of them held out", capsys.readouterr().out)
    assert data.rows[data.indices(HELD_OUT)].tolist() == [4, 9, 14, 19, 24, 29, 34, 39, 44, 49]
    source = PeoplePrompts().holding_out(13)
    assert all(
        data.category_of(index) == source.kind(int(row))[0] for index, row in enumerate(data.rows)
    )
    grown = write(folder, tmp_path / "out", *words, "rows=70")  # No row is written again.
    assert list(rows_of(grown))[:52] == list(rows_of(data))
    assert kinds(grown, HELD_OUT) == dict.fromkeys(KINDS, 1)
    fewer = write(folder, tmp_path / "out", *words, "rows=20")
    assert kinds(fewer, TRAIN) == kinds(grown, TRAIN) and len(fewer) == 70
    with pytest.raises(SystemExit):
        write(folder, tmp_path / "out", "prompts=people", "held_out=9", "rows=70")
    assert "prompts.held_out was 13, is 9" in capsys.readouterr().err


def test_a_mixture_has_the_targets_own_talk(folder: Path, tmp_path: Path) -> None:
    words = ["prompts=mixture", "prompts.people=0.5", "held_out=14", "rows=70"]
    words += ["prompts.turns=[1]", "writing.temperatures=[0.7]"]
    data = write(folder, tmp_path / "out", *words)
    assert kinds(data, HELD_OUT) == dict.fromkeys((*KINDS, TALK), 1)
    # Acceptance is measured on the held-out rows, greedily.
    assert set(data.temperature[data.indices(HELD_OUT)]) == {0.0}
    assert set(data.temperature[data.indices(TRAIN)]) == {np.float32(0.7)}
    assert kinds(data, TRAIN)[TALK] == 28
    assert data.by_category(range(70))[TALK] == 29


def test_a_file_names_kinds(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": "a", "category": "maths"},
        {"prompt": "b", "task": "qa"},
        {"prompt": "c"},
        {"prompt": "d", "category": "", "task": "maths"},
        {"prompt": "e", "task": "Write a long text about this and that, " * 3},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["prompts=jsonl", f"prompts.path={path}", "held_out=1"]
    data = write(folder, tmp_path / "out", *words, "rows=null")
    assert [data.category_of(i) for i in range(5)] == [
        "maths", "qa", NO_CATEGORY, "maths", NO_CATEGORY
    ]  # fmt: skip
    assert data.by_category([0, 1, 2]) == {NO_CATEGORY: 1, "maths": 1, "qa": 1}
    assert NO_CATEGORY in capsys.readouterr().out
    again = write(folder, tmp_path / "out", *words, "rows=2")  # Kinds of other rows are kept.
    assert again.by_category(range(5)) == data.by_category(range(5))
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"prompt": "a"}\n' * 2)
    none = write(folder, tmp_path / "none", "prompts=jsonl", f"prompts.path={plain}", "rows=null")
    assert none.category is None and none.by_category([0]) == {}
    assert none.category_of(0) == NO_CATEGORY


def test_too_many_kinds_are_none(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "MOST_CATEGORIES", 2)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "a", "task": "{i}"}}\n' for i in range(3)))
    data = write(folder, tmp_path / "out", "prompts=jsonl", f"prompts.path={path}", "rows=null")
    assert data.category is None and "3 categories, more than 2" in capsys.readouterr().err


def test_several_files_keep_kinds(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    for name in ("maths", "qa"):
        (prompts / f"{name}.jsonl").write_text(f'{{"prompt": "a", "category": "{name}"}}\n' * 5)
    words = ["prompts=jsonl", f"prompts.path={prompts}", "rows=null", "held_out=2"]
    data = write(folder, tmp_path / "out", *words)
    for index in range(10):
        assert data.source is not None
        name = data.manifest[conversations.SOURCES][int(data.source[index])]
        assert name == f"{data.category_of(index)}.jsonl"


def test_a_kind_that_there_is_none_of_is_refused(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(folder, out, "prompts=people", "rows=13", "held_out=1", "prompts.turns=[1]")
    tensors = load_file(out / TENSORS)
    tensors["category"] = tensors["category"] + np.uint16(1)
    save_file(tensors, out / TENSORS)
    manifest = json.loads((out / MANIFEST).read_text())
    del manifest[conversations.CHECKSUM]
    (out / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="category: a name of a row that there is none of"):
        read_set(out)
