"""Every documented shape gives the same prompt; every other row is left out by reason, with its
number."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from drafttrain.data.numbered import Skipped, by_reason, nothing_left, some
from drafttrain.data.prompts import PromptDataset, PromptFile, SelfWritten
from drafttrain.data.shapes import Prompt, parse
from drafttrain.data.sources import drawn
from drafttrain.errors import InputError
from tests.messages import said

ASK = "Why is the sky blue?"
NOT_JSON, NOT_UTF8 = "not JSON: one object or string a line", "not UTF-8: save the file as UTF-8"
SHAPES: list[dict[str, Any]] = [
    {"conversations": [{"from": "human", "value": ASK}, {"from": "gpt", "value": "Scattering."}]},
    {"conversations": [{"from": "user", "value": ASK}]},
    {"conversations": [{"role": "User", "content": ASK}, {"role": "assistant", "content": None}]},
    {
        "messages": [
            {"role": "user", "content": ASK},
            {"role": "assistant", "content": "Scattering."},
        ]
    },
    {"messages": [{"role": "user", "content": [{"type": "text", "text": ASK}]}]},
    {"prompt": ASK, "completion": "Scattering."},
    {"prompt": [ASK]},
    {
        "prompt": [{"role": "user", "content": ASK}],
        "completion": [{"role": "assistant", "content": "Scattering."}],
    },
    {"turns": [ASK], "category": "science"},
    {"instruction": ASK, "input": "", "output": "Scattering."},
    {"instruction": ASK},
    {"messages": None, "prompt": ASK},
    {"conversations": {"from": ["human", "gpt"], "value": [ASK, "Scattering."]}},
]


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.field("F66")
@pytest.mark.parametrize("row", SHAPES, ids=lambda row: "+".join(row))
def test_documented_shapes_give_the_same_prompt(row: dict[str, Any]) -> None:
    assert parse(row) == Prompt((ASK,))


# The kind: of two columns that a prompt may be in, one is taken and the other not read. Often they
# say the same: the first turn of the messages, the same turns in another shape, nothing at all.
OTHER = "which says something else than the one that is read"
MESSAGES = [{"role": role, "content": text} for role, text in (("user", ASK), ("assistant", "x"))]
TWO = [*MESSAGES, {"role": "user", "content": "More?"}]
BESIDES: list[tuple[dict[str, Any], list[str]]] = [
    ({"messages": MESSAGES, "prompt": ASK}, []),
    ({"messages": TWO, "prompt": ASK}, []),
    ({"messages": TWO, "prompt": MESSAGES[:1], "instruction": ""}, []),
    ({"messages": TWO, "turns": [ASK, "More?"], "prompt": None}, []),
    ({"prompt": f"{ASK}\n\nin brief", "instruction": ASK, "input": "in brief"}, []),
    ({"messages": MESSAGES, "prompt": "Another"}, [f"column prompt, {OTHER}"]),
    ({"messages": MESSAGES, "prompt": [ASK, "More?"]}, [f"column prompt, {OTHER}"]),
    ({"conversations": MESSAGES, "messages": TWO}, [f"column messages, {OTHER}"]),
    ({"prompt": ASK, "instruction": ASK, "input": "in brief"}, [f"column instruction, {OTHER}"]),
    ({"prompt": ASK, "turns": [{"role": "tool"}], "messages": []}, []),
    ({"messages": MESSAGES, "turns": [3]}, [f"column turns, {OTHER}"]),
    ({"prompt": ASK, "category": "x" * 61}, ["column category, which is no name of a kind"]),
    ({"prompt": ASK, "task": ["a", "b"]}, ["column task, which is no name of a kind"]),
    ({"prompt": ASK, "category": "", "task": "code"}, []),
    ({"instruction": ASK, "context": "The sky."}, ["column context, which may be a part"]),
    ({"instruction": ASK, "context": ""}, []),
    ({"instruction": ASK, "history": [["a", "b"]]}, ["column history, which may be a part"]),
    ({"prompt": ASK, "system_prompt": "Be brief."}, ["column system_prompt, which may be a part"]),
    ({"prompt": ASK, "input": "in brief"}, ["column input, which may be a part"]),
    ({"prompt": ASK, "input": ""}, []),
]


@pytest.mark.field("F66")
@pytest.mark.parametrize(("row", "said"), BESIDES)
@pytest.mark.parametrize("several", [False, True])
def test_what_a_row_says_besides_is_counted(
    row: dict[str, Any], said: list[str], several: bool, tmp_path: Path
) -> None:
    rows = [{"prompt": "plain"}, row]
    for name in ("a", "b") if several else ("a",):
        write_lines(tmp_path / f"{name}.jsonl", rows)
    path = tmp_path if several else tmp_path / "a.jsonl"
    found = PromptFile(path=str(path)).read(None)
    if len(found.rows) < 2 * (1 + several):
        assert not said and found.skipped  # It cannot be used at all.
        return
    listed = found.by_file(found.overlooked)
    names = [f", in {name}.jsonl" for name in "ab"] if several else [""]
    assert list(listed.values()) == [[2]] * (len(said) * len(names))
    for what in said:
        assert all(any(one.startswith(what) and one.endswith(n) for one in listed) for n in names)


@pytest.mark.field("F66")
@pytest.mark.parametrize(
    "turn",
    [
        {"role": "user", "from": "gpt", "content": ASK},
        {"role": "user", "content": ASK, "value": "Another"},
        {"role": "user", "content": [{"type": "text", "text": ASK}], "text": ASK + "!"},
    ],
)
def test_a_turn_that_says_two_things_is_left_out(turn: dict[str, Any], tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": MESSAGES}, {"messages": [turn]}])
    found = PromptFile(path=str(path)).read(None)
    (left_out,) = found.skipped
    assert left_out.row == 2 and left_out.reason.startswith("a turn with two roles, or two texts")
    same = {"role": "user", "from": "human", "content": ASK, "text": ASK}
    assert parse({"messages": [same]}) == Prompt((ASK,))


def test_renamed_columns_are_named_as_they_are(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"q": ASK, "prompt": "b", "instruction": "c"}])
    found = PromptFile(path=str(path), columns={"prompt": "q"}).read(None)
    assert found.overlooked == {f"column instruction, {OTHER}": [1]}
    path = write_lines(tmp_path / "b.jsonl", [{"instruction": ASK, "context": "b"}])
    found = PromptFile(path=str(path), columns={"input": "context"}).read(None)
    assert found.overlooked == {} and found.rows[0][1].users == (f"{ASK}\n\nb",)  # type: ignore[union-attr]


@pytest.mark.field("F66")
def test_every_container_gives_the_same_rows(tmp_path: Path) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    rows = [{"messages": [{"role": "user", "content": f"question {i} ü"}]} for i in range(5)]
    lines = write_lines(tmp_path / "a.jsonl", rows)
    array = tmp_path / "b.json"
    array.write_text(json.dumps(rows, indent=1))
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    packed_array = tmp_path / "d.json.gz"
    packed_array.write_bytes(gzip.compress(array.read_bytes()))
    marked = tmp_path / "e.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + lines.read_bytes())
    parquet = tmp_path / "f.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "g"))
    expected = [(i + 1, Prompt((f"question {i} ü",))) for i in range(5)]
    for path in (lines, array, packed, packed_array, marked, parquet):
        assert PromptFile(path=str(path)).read(None).rows == expected, path
    assert PromptDataset(path=str(tmp_path / "g")).read(None).rows == expected


def test_turns_of_several_kinds() -> None:
    assert parse({"prompt": ["one", "two"], "system": "Be brief."}) == Prompt(
        ("one", "two"), "Be brief."
    )
    assert parse({"instruction": "Add.", "input": "1 and 2"}) == Prompt(("Add.\n\n1 and 2",))


def conversation(*turns: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns], **more}


@pytest.mark.field("F03")
@pytest.mark.parametrize(
    ("row", "system"),
    [
        (conversation(("system", "S"), ("user", ASK)), "S"),
        (conversation(("user", ASK), system="S"), "S"),
        (conversation(("system", "S"), ("user", ASK), system="S"), "S"),
        (conversation(("system", "S"), ("user", ASK), system=" S\n"), "S"),
        (conversation(("user", ASK)), None),
        (conversation(("user", ASK), system=""), None),
        (conversation(("system", ""), ("user", ASK), system="S"), "S"),
    ],
)
def test_system_text_is_taken_once(row: dict[str, Any], system: str | None) -> None:
    assert parse(row) == Prompt((ASK,), system)


BAD: list[tuple[Any, str]] = [
    (conversation(), "empty conversation"),
    (conversation(("assistant", "Hello."), ("user", ASK)), "starts with an assistant turn"),
    (conversation(("system", "S")), "no user turn"),
    (conversation(("system", "S"), ("assistant", "Hello.")), "no user turn"),
    (conversation(("user", ASK), ("user", "Well?")), "two user turns in a row"),
    (
        conversation(("user", ASK), ("assistant", "a"), ("assistant", "b")),
        "two assistant turns in a row",
    ),
    (conversation(("user", ASK), ("system", "S")), "a system message after the first turn"),
    (conversation(("system", "S"), ("system", "T"), ("user", ASK)), "several system messages"),
    (
        conversation(("system", "S"), ("user", ASK), system="T"),
        "system column and system message differ",
    ),
    (conversation(("user", " \n")), "an empty user turn"),
    (conversation(("user", ASK), ("tool", "42")), "a turn of role tool"),
    (conversation(("user", None)), "content that is not text"),  # type: ignore[arg-type]
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "content that is not text",
    ),
    ({"messages": [{"content": ASK}]}, "a turn without a role"),
    ({"messages": ["hello"]}, "a turn that is not an object"),
    ({"messages": "hello"}, "messages: not a list"),
    ({"prompt": 7}, "prompt: not a list"),
    ({"prompt": None}, "an empty prompt column"),
    ({"prompt": []}, "empty conversation"),
    ({"instruction": ["x"]}, "an instruction or input that is not text"),
    ({"prompt": ASK, "system": 3}, "a system column that is not text"),
    ({"prompt": "\ud800"}, "text that is not Unicode (half of a surrogate pair)"),
    ({"answer": "42"}, "no prompt column"),
    (["hello"], "not an object with keys but a list"),
    ("hello", "not an object with keys but a str"),
    (None, "not an object with keys but a NoneType"),
]


@pytest.mark.field("F01")
def test_unusable_rows_are_counted_with_their_numbers(tmp_path: Path) -> None:
    good = {"prompt": ASK}
    path = write_lines(tmp_path / "bad.jsonl", [good, *(row for row, _ in BAD), good])
    with path.open("ab") as file:
        file.write(b'{"prompt": \n\n{"prompt": "\xff"}\n' + b'{"a":' * 5000 + b"\n")
        file.write(json.dumps(good).encode() + b'\n{"prompt": "a", "prompt": "b"}\n')
    found = PromptFile(path=str(path)).read(None)
    last = len(BAD) + 2
    assert [row for row, _ in found.rows] == [1, last, last + 5]  # An empty line counts as a line.
    expected = [(number, reason) for number, (_, reason) in enumerate(BAD, start=2)]
    expected += [(last + 1, NOT_JSON), (last + 3, NOT_UTF8), (last + 4, NOT_JSON)]
    expected += [(last + 6, "key prompt is given twice")]
    assert [(item.row, item.reason) for item in found.skipped] == expected
    assert by_reason(found.skipped)["no user turn"] == [4, 5]


def test_a_key_given_twice_in_an_array_is_counted_too(tmp_path: Path) -> None:
    rows = [
        '{"prompt": "a", "prompt": "b"}',
        '{"prompt": "a"}',
        '{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
    ]
    (tmp_path / "a.json").write_text(f"[{', '.join(rows)}]")
    found = PromptFile(path=str(tmp_path / "a.json")).read(None)
    assert [row for row, _ in found.rows] == [2]
    reasons = {item.row: item.reason for item in found.skipped}
    assert reasons == {1: "key prompt is given twice", 3: "key content is given twice"}


@pytest.mark.field("F22")
def test_numbers_do_not_depend_on_the_limit(tmp_path: Path) -> None:
    rows = [{"prompt": ASK} if i % 3 else {"prompt": ""} for i in range(30)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    full, part = PromptFile(path=str(path)).read(None), PromptFile(path=str(path)).read(10)
    assert part.rows == [(n, p) for n, p in full.rows if n <= 10]
    assert part.source == full.source and part.more and not full.more
    assert (
        PromptFile(path=str(write_lines(tmp_path / "b.jsonl", rows))).read(5).source == full.source
    )
    assert (
        PromptFile(path=str(write_lines(tmp_path / "c.jsonl", rows[:-1]))).read(5).source
        != full.source
    )


@pytest.mark.field("F63", "F66")
def test_unknown_shape_lists_the_accepted_ones_and_the_keys(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"question": ASK, "answer": "x"}] * 3)
    with pytest.raises(InputError, match=said("data.unknown_shape")):
        PromptFile(path=str(path)).read(None)
    assert PromptFile(path=str(path), columns={"prompt": "question"}).read(None).rows[0] == (
        1,
        Prompt((ASK,)),
    )
    unnamed = PromptFile(path=str(path), columns={"prompt": "question", "messages": None})
    assert unnamed.columns == {"prompt": "question"}
    with pytest.raises(InputError, match=r"prompts\.columns\.prompt=3"):
        PromptFile(path=str(path), columns={"prompt": 3})
    with pytest.raises(InputError, match=r"prompts\.columns\.question"):
        PromptFile(path=str(path), columns={"question": "question"})


def test_a_row_of_only_text_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "Once upon a time"}])
    with pytest.raises(InputError, match=r"prompts\.columns\.prompt=text"):
        PromptFile(path=str(path)).read(None)
    assert PromptFile(path=str(path), columns={"prompt": "text"}).read(None).rows == [
        (1, Prompt(("Once upon a time",)))
    ]


@pytest.mark.field("F63")
def test_nothing_left_is_one_message(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl", [conversation(), conversation(), conversation(("system", "S"))]
    )
    message = str(nothing_left("a.jsonl", PromptFile(path=str(path)).read(None)))
    assert "2 empty conversation (rows 1, 2)" in message and "1 no user turn (rows 3)" in message
    assert "first row's keys: messages" in message
    (tmp_path / "empty.jsonl").write_text("\n\n")
    assert "holds no rows" in str(
        nothing_left("empty", PromptFile(path=str(tmp_path / "empty.jsonl")).read(None))
    )


def test_what_is_too_long_to_be_held_is_left_out_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some kilobytes that gzip unfolds to one endless line."""
    monkeypatch.setattr("drafttrain.data.row_files._LONGEST_LINE", 1000)
    monkeypatch.setattr("drafttrain.data.row_files._LONGEST_ARRAY", 5000)
    good = json.dumps({"prompt": ASK}).encode()
    fits = json.dumps({"prompt": "x" * 985}).encode()
    assert len(fits) == 999
    lines = [
        good,
        json.dumps({"prompt": "x" * 10_000}).encode(),
        fits,
        b" " * 999,
        fits + b" ",
        good,
    ]
    for end in (b"\n", b""):
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines) + end))
        found = PromptFile(path=str(tmp_path / "a.jsonl.gz")).read(None)
        assert [row for row, _ in found.rows] == [1, 3, 6]
        assert [(item.row, item.reason) for item in found.skipped] == [
            (n, "a line of more than 1000 bytes") for n in (2, 5)
        ]
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(b"[" + good + b", " * 5000 + b"]"))
    with pytest.raises(InputError, match=said("data.long_array")):
        PromptFile(path=str(tmp_path / "b.json.gz")).read(None)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.json", b'[{"prompt": "x"}, ', "data.cut_array"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"prompt": "x"}\n' * 1000, mtime=0)[:40],
            "data.cut_archive",
        ),
        ("a.parquet", b"PAR1 and nothing after it", "data.cut_parquet"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, content: bytes, fault: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=said(fault)):
        PromptFile(path=str(tmp_path / name)).read(None)


def test_wrong_paths_say_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prompts\.path=.*none\.jsonl"):
        PromptFile(path=str(tmp_path / "none.jsonl")).read(None)
    with pytest.raises(InputError, match="prompts=dataset"):
        PromptFile(path=str(tmp_path)).read(None)
    with pytest.raises(InputError, match=said("data.no_data_set")):
        PromptDataset(path=str(tmp_path / "none")).read(None)


def test_dataset_split_and_columns(tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_list([{"question": f"q{i}"} for i in range(4)])
    datasets.DatasetDict({"test": data}).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(InputError, match=said("data.no_such_split")):
        PromptDataset(path=str(tmp_path / "d")).read(None)
    found = PromptDataset(
        path=str(tmp_path / "d"), split="test", columns={"prompt": "question"}
    ).read(2)
    assert found.rows == [(1, Prompt(("q0",))), (2, Prompt(("q1",)))]


def test_self_written_rows_need_a_number() -> None:
    assert SelfWritten().read(3).rows == [(0, None), (1, None), (2, None)]
    with pytest.raises(InputError, match="rows="):
        SelfWritten().read(None)


def test_row_numbers_are_shortened() -> None:
    assert some(list(range(14, 0, -1))) == "1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 4 more"
    assert by_reason([Skipped(1, "a"), Skipped(2, "b"), Skipped(3, "b")]) == {"b": [2, 3], "a": [1]}


# --- several sources ------------------------------------------------------------------------------
# F78: what takes "the first rows" of several sources must not take them all from the first source.
# Neighbours of the same cause, all tried below and in test_synthesis.py: a limit of rows, the
# held-out split, data.limit_rows after it, data.set_aside at the end, prompts of an evaluation's
# limit; files of unlike size, in folders below, packed and parquet; data sets of several data
# files; rows that cannot be used. Shards of one file, and every single file, keep their order.


def two_sources(folder: Path, sizes: tuple[int, int] = (50, 50)) -> Path:
    folder.mkdir(parents=True)
    for name, size in zip("AB", sizes, strict=True):
        write_lines(folder / f"{name}.jsonl", [{"prompt": f"{name} {i}"} for i in range(size)])
    return folder


@pytest.mark.field("F78")
def test_any_stretch_has_of_each_source_its_share() -> None:
    sizes = (50, 7, 300, 1)
    order = drawn(sizes, seed=3)
    assert sorted(order) == [(s, i) for s, size in enumerate(sizes) for i in range(size)]
    for start in range(0, len(order), 13):
        for stop in range(start + 1, len(order) + 1, 17):
            part = [source for source, _ in order[start:stop]]
            for source, size in enumerate(sizes):
                assert abs(part.count(source) - len(part) * size / sum(sizes)) < 2.1
    assert drawn(sizes, seed=3) == order != drawn(sizes, seed=4)


@pytest.mark.field("F78")
@pytest.mark.parametrize("kind", [PromptFile, PromptDataset])
def test_a_limit_takes_from_all_files_by_the_seed(kind: Any, tmp_path: Path) -> None:
    folder = two_sources(tmp_path / "two")
    full, part = kind(path=str(folder)).read(None), kind(path=str(folder)).read(20)
    assert part.rows == full.rows[:20] and part.more and not full.more
    assert part.counts(row for row, _ in part.rows) == {"A.jsonl": 10, "B.jsonl": 10}
    assert full.counts(row for row, _ in full.rows) == {"A.jsonl": 50, "B.jsonl": 50}
    row, prompt = part.rows[0]
    name, number = part.origin[row]  # JSON Lines count from 1, the texts from 0.
    assert prompt == Prompt((f"{name[0]} {number - 1}",))
    assert part.places([row]) == f"{name} {number}"
    assert part.source == full.source != kind(path=str(folder), seed=1).read(20).source


@pytest.mark.field("F78")
def test_rows_of_several_files_that_cannot_be_used_are_named_by_file(tmp_path: Path) -> None:
    folder = two_sources(tmp_path / "two", (10, 10))
    (folder / "below").mkdir()
    write_lines(folder / "below" / "C.jsonl", [{"prompt": "C"}, {"prompt": " "}])
    (folder / ".hidden.jsonl").write_text("no")
    (folder / "notes.txt").write_text("no")
    found = PromptFile(path=str(folder)).read(None)
    assert by_reason(found.skipped) == {"an empty user turn, in below/C.jsonl": [2]}
    assert len(found.rows) == 21


@pytest.mark.field("F78")
def test_one_source_keeps_its_order(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}"} for i in range(9)]
    (tmp_path / "a").mkdir()
    for shard in range(3):
        write_lines(
            tmp_path / "a" / f"x-0000{shard}-of-00003.jsonl", rows[shard * 3 : shard * 3 + 3]
        )
    (tmp_path / "b").mkdir()
    single = write_lines(tmp_path / "b" / "x.jsonl", rows)
    expected = PromptFile(path=str(single)).read(5)
    assert expected.rows == [(i + 1, Prompt((str(i),))) for i in range(5)]
    assert PromptFile(path=str(tmp_path / "b")).read(5) == expected
    assert PromptFile(path=str(tmp_path / "a")).read(5).rows == expected.rows
    assert PromptDataset(path=str(tmp_path / "a")).read(5).rows == expected.rows


# --- what is read, and how long it takes ----------------------------------------------------------
# F101: a column that nothing looks at must cost nothing, in parquet and in data sets, with columns
# named otherwise and where no column is known (the first row's keys are still listed).


@pytest.mark.field("F101")
def test_columns_that_nothing_looks_at_are_not_read(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    rows = [{"question": f"question {i}", "wide": f"{i}" * 1000} for i in range(50)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression="none")
    with pyarrow.parquet.ParquetFile(path) as file:
        wide = file.metadata.row_group(0).column(1)
    content = bytearray(path.read_bytes())
    start = min(filter(None, (wide.dictionary_page_offset, wide.data_page_offset)))
    content[start : start + 64] = b"\xff" * 64  # Whoever reads it fails.
    path.write_bytes(content)
    found = PromptFile(path=str(path), columns={"prompt": "question"}).read(None)
    assert found.rows == [(i + 1, Prompt((f"question {i}",))) for i in range(50)]
    assert found.first_keys == ("question", "wide")
    with pytest.raises(InputError, match="first row's keys: question, wide"):
        PromptFile(path=str(path)).read(None)
    with pytest.raises(InputError, match=said("data.cut_parquet")):
        PromptFile(path=str(path), columns={"prompt": "wide"}).read(None)


@pytest.mark.field("F101")
def test_columns_of_a_data_set_are_read_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    rows = [{"prompt": f"question {i}", "wide": "x" * 1000} for i in range(150)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "a"))
    asked: list[list[str]] = []
    select = datasets.Dataset.select_columns
    monkeypatch.setattr(
        datasets.Dataset,
        "select_columns",
        lambda self, names: asked.append(names) or select(self, names),  # type: ignore[func-returns-value]
    )
    found = PromptDataset(path=str(tmp_path / "a")).read(140)
    assert len(found.rows) == 140 and found.more and asked == [["prompt"]]
    with pytest.raises(InputError, match="first row's keys: prompt, wide"):
        PromptDataset(path=str(tmp_path / "a"), columns={"prompt": "none"}).read(None)


@pytest.mark.field("F101")
def test_every_source_shows_what_it_reads(tmp_path: Path) -> None:
    """Files one by one and in a folder, and data sets."""
    import datasets

    folder = two_sources(tmp_path / "two", (3, 2))
    datasets.Dataset.from_list([{"prompt": "a"}] * 5).save_to_disk(str(tmp_path / "saved"))
    for source in (
        PromptFile(path=str(folder)),
        PromptDataset(path=str(folder)),
        PromptDataset(path=str(tmp_path / "saved")),
    ):
        seen: list[int] = []

        def watch(rows: Any, seen: list[int] = seen) -> Any:
            return (row for row in rows if seen.append(row[0]) is None)  # type: ignore[func-returns-value]

        assert len(source.read(None, watch).rows) == len(seen) == 5
