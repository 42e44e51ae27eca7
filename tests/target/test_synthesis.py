"""The target writes conversations: ids as generated, the same whoever shares the work and whatever
interrupts it."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain import synthesize as door
from drafttrain.data.conversations import HELD_OUT, Row, read_set, rows_of
from drafttrain.data.datamodule import ConversationData
from drafttrain.data.numbered import Prompts
from drafttrain.data.row_journal import Journal, read_journals
from drafttrain.data.shapes import Prompt
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.errors import InputError
from drafttrain.nn.sampling import Policy
from drafttrain.reporting.written_set import turns_left_out
from drafttrain.target import generation, load
from drafttrain.target.generation import Segment, choose
from drafttrain.target.model import Target
from drafttrain.target.synthesis import SynthesisConfig, synthesize
from drafttrain.tree.topology import Tree
from tests.forked import Forked, pair
from tests.helpers import ALTERNATING, BARE, CHATML, save_target, tiny_chat_target, tiny_tokenizer

SMALL = ["writing.max_answer=24", "writing.max_length=160", "writing.max_user=32"]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_chat_target()


@pytest.fixture(scope="module")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(target, tmp_path_factory.mktemp("target"))


def config(**settings: Any) -> SynthesisConfig:
    common: dict[str, Any] = {
        "temperatures": [0.0],
        "top_k": 0,
        "top_p": 1.0,
        "max_answer": 24,
        "max_length": 160,
        "turns": [1],
        "user": Policy(1.0, 50, 0.95),
        "max_user": 32,
        "system": None,
        "seed": 0,
    }
    return SynthesisConfig(**(common | settings))


def written(
    target: Target, prompts: list[Prompt | None], folder: Path, slots: int = 4, **settings: Any
) -> dict[int, Row]:
    journal = Journal(folder)
    synthesize(target, iter(list(enumerate(prompts))), config(**settings), journal, slots=slots)
    journal.close()
    return journal.finished()[0]


def some_prompts(count: int = 24) -> list[Prompt | None]:
    chance = random.Random(5)
    words = ["the", "then", "an", "inner", "error", "🙂", "x y z"]
    return [
        Prompt((" ".join(chance.choices(words, k=chance.randint(1, 9))),)) for _ in range(count)
    ]


def arguments(folder: Path, out: Path, *more: str) -> list[str]:
    return [
        f"out={out}",
        "target=hf",
        f"target.path={folder}",
        "target.device=cpu",
        "target.dtype=float32",
        "slots=8",
        *SMALL,
        *more,
    ]


def contents(out: Path) -> list[Row]:
    return list(rows_of(read_set(out)))


# --- what is written ------------------------------------------------------------------------------


@pytest.mark.field("F08")
def test_greedy_answers_are_what_transformers_writes(target: Target, tmp_path: Path) -> None:
    prompts = some_prompts(12)
    rows = written(target, prompts, tmp_path)
    assert sorted(rows) == list(range(12))
    for number, prompt in enumerate(prompts):
        assert prompt is not None
        messages = [{"role": "user", "content": prompt.users[0]}]
        lead = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True)[
            "input_ids"
        ]
        ids = torch.tensor([lead])
        reference = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
        )
        assert rows[number].ids == tuple(reference[0].tolist())
        assert rows[number].spans == ((len(lead), len(rows[number].ids)),)


@pytest.mark.field("F60")
def test_batch_and_single_rows_give_the_same_text(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, passes = some_prompts(), 0
    step = Target.step

    def counted(*given: Any, **more: Any) -> Any:
        nonlocal passes
        passes += 1
        return step(*given, **more)

    monkeypatch.setattr(Target, "step", counted)
    single = written(target, prompts, tmp_path / "a", slots=1)
    one_by_one, passes = passes, 0
    assert written(target, prompts, tmp_path / "b", slots=16) == single
    assert passes < one_by_one / 3  # What takes the time is passes, not rows.


@pytest.mark.field("F25")
def test_very_long_rows_are_read_in_this_process(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice, as with a warm cache; and with threads of the tokenizer's own, where it may have
    some."""
    path = tmp_path / "long.jsonl"
    lines = [
        {"prompt": "the"},
        *({"prompt": "then the " * 4500} for _ in range(3)),
        {"prompt": "an"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for number, parallel in enumerate(("false", "true")):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        began = time.monotonic()
        out = tmp_path / f"out{number}"
        door.main(
            arguments(
                folder, out, "prompts=jsonl", f"prompts.path={path}", "writing.temperatures=[0]"
            )
        )
        assert time.monotonic() - began < 120
        assert [row.row for row in contents(out)] == [1, 5]
        assert read_set(out).manifest["skipped"] == {"prompt longer than max_length 160": [2, 3, 4]}
    capsys.readouterr()
    for more in ("num_proc=4", "prompts.num_proc=4", "writing.workers=4"):
        with pytest.raises(SystemExit) as caught:
            door.main(
                arguments(folder, tmp_path / "none", "prompts=jsonl", f"prompts.path={path}", more)
            )
        assert caught.value.code == 2 and "there is no setting" in capsys.readouterr().err


def test_sampled_rows_do_not_depend_on_their_neighbours(target: Target, tmp_path: Path) -> None:
    prompts: list[Prompt | None] = [None] * 24
    settings: dict[str, Any] = {
        "temperatures": [0.0, 0.7, 1.0],
        "turns": [1, 2, 3],
        "top_k": 20,
        "top_p": 0.9,
    }
    few = written(target, prompts, tmp_path / "a", slots=3, **settings)
    assert written(target, prompts, tmp_path / "b", slots=11, **settings) == few
    assert {row.temperature for row in few.values()} == {0.0, 0.7, 1.0}
    assert {len(row.spans) for row in few.values()} == {1, 2, 3}
    other = written(target, prompts, tmp_path / "c", slots=11, seed=1, **settings)
    assert other != few


@pytest.mark.field("F05", "F06")
def test_spans_end_on_the_end_token_unless_cut(target: Target, tmp_path: Path) -> None:
    rows = written(target, [None] * 40, tmp_path, temperatures=[1.0], max_answer=6, turns=[2])
    reasons = set()
    for row in rows.values():
        for (start, end), reason in zip(row.spans, row.finish, strict=True):
            reasons.add(reason)
            answer = row.ids[start:end]
            assert (answer[-1] == 2) == (reason == "stop") and 2 not in answer[:-1]
            assert end - start == 6 or reason == "stop"
        header = target.tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
        assert all(list(row.ids[start - len(header) : start]) == header for start, _ in row.spans)
        assert row.spans[-1][1] == len(row.ids) <= 160
    assert reasons == {"stop", "length"}


@pytest.mark.field("F03")
def test_several_turns_read_like_the_templates_own_rendering(
    target: Target, tmp_path: Path
) -> None:
    prompt = Prompt(("one the", "two\nthen", "three"), "Be brief.")
    row = written(
        target, [prompt], tmp_path, temperatures=[1.0], max_answer=60, max_length=400, seed=3
    )[0]
    assert len(row.spans) == 3 and set(row.finish) == {"stop"}
    answers = [target.tokenizer.decode(list(row.ids[start : end - 1])) for start, end in row.spans]
    messages = prompt.lead()
    for user, answer in zip(prompt.users, answers, strict=True):
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    full = target.tokenizer.apply_chat_template(messages, tokenize=False)
    assert full == target.tokenizer.decode(list(row.ids)) + "\n"
    assert full.count("Be brief.") == 1


@pytest.mark.field("F04")
def test_no_later_turn_where_the_template_shows_the_answer_otherwise(tmp_path: Path) -> None:
    block = CHATML.replace(
        "assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}"
    )
    row = written(
        tiny_chat_target(block), [Prompt(("one", "two"))], tmp_path, max_answer=60, max_length=300
    )[0]
    assert row.finish == ("template",)
    assert "</think>" in tiny_chat_target(block).tokenizer.decode(list(row.ids[: row.spans[0][0]]))


@pytest.mark.field("F02")
def test_a_row_the_template_refuses_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    template = (
        "{% if 'bad' in messages[-1].content %}{{ raise_exception('no bad words') }}{% endif %}"
        + CHATML
    )
    target = tiny_chat_target(template)
    journal = Journal(tmp_path)
    prompts = [
        (1, Prompt(("good",))),
        (2, Prompt(("bad",))),
        (3, Prompt(("fine",))),
        (4, Prompt(("x" * 400,))),
    ]
    synthesize(target, iter(prompts), config(), journal, slots=2)
    rows, skipped = journal.finished()
    assert sorted(rows) == [1, 3]
    assert skipped == {
        2: "the chat template refuses: no bad words",
        4: "prompt longer than max_length 160",
    }


def test_a_row_whose_slot_is_full_keeps_what_it_has(target: Target) -> None:
    seen: list[Any] = []

    def script(first: int) -> Iterator[Any]:
        try:
            seen.append((yield Segment([5] * first, 4, Policy(), ())))
            yield Segment([5] * 30, 4, Policy(), ())
        except generation.Full:
            seen.append("full")

    scripts = ((script(n), random.Random(0)) for n in (3, 9))
    assert sum(generation.run(target, scripts, slots=2, capacity=24)) == 8  # type: ignore[arg-type]
    assert [entry if entry == "full" else len(entry) for entry in seen] == [4, "full", 4, "full"]


def test_an_interrupted_run_does_not_keep_half_rows(target: Target, tmp_path: Path) -> None:
    journal = Journal(tmp_path)

    def stop(rows: int, tokens: int) -> None:
        if rows >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize(
            target, ((i, None) for i in range(40)), config(turns=[3]), journal, slots=8, report=stop
        )
    rows = dict(journal.finished()[0])
    journal.close()
    calm = written(target, [None] * 40, tmp_path / "calm", turns=[3])
    assert rows and all(calm[number] == row for number, row in rows.items())


@pytest.mark.parametrize(
    "settings",
    [
        {"temperatures": []},
        {"temperatures": ["hot"]},
        {"temperatures": [-1.0]},
        {"turns": [0]},
        {"turns": [1.5]},
        {"max_answer": 0},
        {"top_p": 0.0},
        {"user": {"temperature": 1.0, "min_p": 0.1}},
        {"user": {"repetition_penalty": 1.2}},
    ],
    ids=str,
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        config(**settings)


def test_a_length_beyond_the_context_is_refused(target: Target, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="max_length 4096"):
        written(target, [None], tmp_path, max_length=4096)


# --- the door -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of 60 self-written rows."""
    out = tmp_path_factory.mktemp("calm") / "set"
    door.main(arguments(folder, out, "rows=60", "held_out=5"))
    return out


@pytest.mark.field("F08")
def test_the_set_says_how_it_was_made(
    calm: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    found = read_set(calm)
    manifest = found.manifest
    assert manifest["target"]["fingerprint"] == target.fingerprint
    assert (
        manifest["writing"]["temperatures"] == [0.0, 0.0, 0.0, 0.7, 1.0]
        and manifest["writing"]["seed"] == 0
    )
    assert manifest["prompts"] == {"kind": "self"} and manifest["held_out"] == 5
    assert manifest["dtype"] == "float32" and "the same after a kill" in manifest["reproducible"]
    assert (
        sum(manifest["supervised_by_temperature"].values())
        == manifest["supervised_tokens"]
        == found.supervised
    )
    skipped = {number for numbers in manifest["not_written"].values() for number in numbers}
    assert skipped | set(found.rows.tolist()) == set(range(60))
    assert 0 < manifest["reencoding_would_change_rows"] <= len(found)
    assert sorted(path.name for path in calm.iterdir()) == [
        "conversations.safetensors",
        "manifest.json",
        "settings.json",
    ]


@pytest.mark.field("F22")
def test_a_finished_set_is_not_written_again_but_can_grow(
    folder: Path, calm: Path, tmp_path: Path
) -> None:
    before = contents(calm)
    out = tmp_path / "set"
    door.main(arguments(folder, out, "rows=25"))
    small = contents(out)
    # What was finished must not be written by anybody: it would differ from this.
    journal = Journal(out, rank=7)
    journal.add(fake := Row(30, (5, 6, 2), ((1, 3),), ("stop",)))
    journal.close()
    door.main(arguments(folder, out, "rows=60"))
    grown = {row.row: row for row in contents(out)}
    assert grown.pop(30) == fake
    assert (
        list(grown.values()) == [row for row in before if row.row != 30]
        and small == before[: len(small)]
    )
    door.main(arguments(folder, out, "rows=10"))
    assert len(contents(out)) == len(grown) + 1  # A lower limit loses nothing.


def test_rows_are_written_in_float32_on_a_cpu(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Where target.dtype is left at auto, whatever the machine is fastest in."""
    monkeypatch.setenv("DRAFTTRAIN_AUTO_DTYPE", "bfloat16")
    assert load.resolve_dtype("auto", torch.device("cpu"), "throughput") == torch.bfloat16
    out = tmp_path / "set"
    door.main(arguments(folder, out, "rows=6", "target.dtype=auto"))
    assert read_set(out).manifest["dtype"] == "float32"
    assert "neighbours" not in capsys.readouterr().err
    door.main(arguments(folder, tmp_path / "named", "rows=6"))
    assert contents(out) == contents(tmp_path / "named")
    assert door.default_dtype("meta") == "bfloat16"  # Not a CPU: auto stays auto.


def test_low_precision_is_named_in_manifest_and_console(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "set"
    door.main(arguments(folder, out, "rows=6", "target.dtype=bfloat16"))
    manifest, err = read_set(out).manifest, capsys.readouterr().err
    assert manifest["dtype"] == manifest["target"]["fingerprint"]["dtype"] == "bfloat16"
    assert "depend on their neighbours" in manifest["reproducible"]
    assert err.count("depend on their neighbours") == 1
    assert err.index("neighbours") < err.index("writes 6 of 6 rows")
    door.main(arguments(folder, out, "rows=8", "target.dtype=auto"))  # It grows in its own dtype.
    assert read_set(out).manifest["dtype"] == "bfloat16"


def test_a_set_of_an_earlier_version_is_read_and_grows(folder: Path, tmp_path: Path) -> None:
    """Its manifest does not say whether its rows are reproducible."""
    out = tmp_path / "set"
    door.main(arguments(folder, out, "rows=10"))
    manifest = json.loads((out / "manifest.json").read_text())
    older = {key: manifest[key] for key in manifest if key not in ("dtype", "reproducible")}
    (out / "manifest.json").write_text(json.dumps(older))
    assert read_set(out).manifest == older
    before = contents(out)
    door.main(arguments(folder, out, "rows=20"))
    assert contents(out)[: len(before)] == before
    assert read_set(out).manifest["reproducible"] == manifest["reproducible"]


def test_other_settings_are_refused_with_what_differs(
    folder: Path, calm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (calm / "conversations.safetensors").read_bytes()

    def refused(*more: str) -> str:
        with pytest.raises(SystemExit) as caught:
            door.main(arguments(folder, calm, *more))
        assert caught.value.code == 2
        return capsys.readouterr().err

    assert "writing.seed was 0, is 1" in refused("writing.seed=1")
    assert "prompts.kind was self, is file" in refused(
        "prompts=jsonl", f"prompts.path={one_prompt(tmp_path)}"
    )
    assert "resume=false" in refused("resume=false")
    assert "dtype" in refused("rows=70", "target.dtype=float64")
    other = save_target(tiny_chat_target(seed=1), tmp_path / "other")
    assert "weights" in refused("rows=70", f"target.path={other}")
    other = save_target(tiny_chat_target(ALTERNATING), tmp_path / "template")
    assert "chat_template" in refused(f"target.path={other}")
    assert (calm / "conversations.safetensors").read_bytes() == before


def test_prompts_beyond_the_models_vocabulary_are_left_out(tmp_path: Path) -> None:
    """A tokenizer with tokens that the model was never given."""
    few = tiny_chat_target(BARE, vocab_size=260)
    prompts: list[Prompt | None] = [Prompt(("a",)), Prompt(("the",)), Prompt(("an",))]
    journal = Journal(tmp_path / "out")
    synthesize(few, iter(list(enumerate(prompts))), config(), journal, slots=4)
    journal.close()
    rows, skipped = journal.finished()
    assert list(rows) == [0] and {*skipped} == {1, 2}
    assert all(
        "the tokenizer gives id 26" in reason and "ends at 259" in reason
        for reason in skipped.values()
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["out=2024"], "out=2024: needs a path"),
        ([f"out={'a' * 300}"], "File name too long"),
        (["rows=100000000000"], "from 1 to 2147483647"),
        (["rows=2000000000"], "at most 10000000 self-written conversations"),
        (["writing.max_answer=x"], "writing.max_answer=x: needs an integer of at least 1"),
        (["writing.max_length=7"], "writing.max_length=7: needs an integer of at least 8"),
        (["writing.user=5"], "writing.user=5: needs writing.user.temperature"),
        (["writing.system=5"], "writing.system=5: needs text"),
        (
            ["prompts=null"],
            "synthesize needs one prompts, of dataset, jsonl, mixture, people, self",
        ),
        (["prompts=jsonl", "prompts.path=5"], "prompts.path=5: needs a path"),
        (
            ["prompts=jsonl", "prompts.path=x", "prompts.columns=5"],
            "prompts.columns=5: needs names of columns",
        ),
        (["target.pack=1"], "pack=1: give auto, true or false"),
        (["target.dtype=5"], "dtype=5: give auto"),
        (["target.device=[a]"], "device=.* cannot be used here"),
        (["target.trust_remote_code=off"], "target.trust_remote_code=off: needs true or false"),
    ],
)
def test_what_no_setting_can_be(
    folder: Path,
    tmp_path: Path,
    more: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        door.main([*arguments(folder, tmp_path / "out", "rows=2", *more)])
    err = capsys.readouterr().err.strip()
    assert caught.value.code == 2 and re.search(said, err) and "\n" not in err
    assert not list(tmp_path.iterdir())


def one_prompt(folder: Path) -> Path:
    path = folder / "prompt.jsonl"
    path.write_text(json.dumps({"prompt": "the"}) + "\n")
    return path


def test_a_refused_target_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as caught:
        door.main(["target=tiny", f"out={out}", "rows=2", "held_out=0"])
    assert caught.value.code == 2 and "without a tokenizer" in capsys.readouterr().err
    assert not [path for path in out.glob("*") if path.stat().st_size]


@pytest.mark.field("F01", "F02")
def test_bad_rows_are_listed_and_strict_stops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_target(tiny_chat_target(ALTERNATING), tmp_path / "target")
    lines: list[Any] = [{"messages": [{"role": "user", "content": f"the {i}"}]} for i in range(5)]
    lines.insert(2, {"messages": []})
    lines.insert(
        4, {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}
    )
    lines.append({"prompt": "x" * 500})
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = ["prompts=jsonl", f"prompts.path={path}", "writing.temperatures=[0]"]
    door.main(arguments(folder, tmp_path / "out", *source))
    out = capsys.readouterr().out
    assert "skipped: empty conversation" in out and "1 rows: 3" in out
    manifest = read_set(tmp_path / "out").manifest
    assert manifest["skipped"] == {
        "empty conversation": [3],
        "two user turns in a row; the chat template refuses: roles must alternate": [5],
        "prompt longer than max_length 160": [8],
    }
    assert [row.row for row in contents(tmp_path / "out")] == [1, 2, 4, 6, 7]
    with pytest.raises(SystemExit):
        door.main(arguments(folder, tmp_path / "strict", *source, "strict=true"))
    assert "row 3: empty conversation" in capsys.readouterr().err
    assert not (tmp_path / "strict").exists()


# F96: whoever reads the table learns what the run did and what the rows lack. Tried: all rows there
# already, some, a lower limit; turns left out for each way in which an answer may end, of given and
# of self-written conversations.


@pytest.mark.field("F96")
def test_a_finished_folder_is_said_to_be_finished(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for rows, finished in ((4, False), (4, True), (5, False), (3, True)):
        door.main(arguments(folder, out, f"rows={rows}", "writing.max_answer=2"))
        assert ("the target writes none" in capsys.readouterr().err) == finished, rows


@pytest.mark.field("F96")
def test_turns_left_out_are_listed_by_reason() -> None:
    written = config(turns=[3], temperatures=[0.0])
    prompts = {row: Prompt(("a", "b")) for row in (1, 2, 3, 4)} | {5: None, 6: None}
    rows = [
        Row(1, (1, 2, 3), ((1, 2),), ("length",)),
        Row(2, (1, 2, 3), ((1, 2),), ("template",)),
        Row(3, (1, 2, 3), ((1, 2),), ("stop",)),
        Row(4, (1, 2, 3, 4), ((1, 2), (3, 4)), ("stop", "length")),  # Complete.
        Row(5, (1, 2, 3), ((1, 2),), ("length",)),
        Row(6, tuple(range(7)), ((1, 2), (3, 4), (5, 6)), ("stop", "stop", "stop")),
        Row(9, (1, 2, 3), ((1, 2),), ("length",)),  # Of an earlier, higher limit.
    ]
    assert turns_left_out(rows, Prompts(list(prompts.items())), written) == {
        "after an answer cut by a limit": [1, 5],
        "since there the template shows the answer otherwise": [2],
        "too long, or without a user turn": [3],
    }


@pytest.mark.field("F96")
def test_a_cut_answer_ends_a_conversation_in_the_table(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"turns": ["the", "an"]}) + "\n" + json.dumps({"turns": ["a"]}))
    words = ("prompts=jsonl", f"prompts.path={path}", "writing.max_answer=1")
    door.main(arguments(folder, tmp_path / "out", *words, "writing.temperatures=[0]"))
    assert "after an answer cut by a limit" in (shown := capsys.readouterr().out)
    assert "1 rows: 1" in shown


# F80: a target without a chat template had no set at all. Tried: texts as strings, in a column, of
# another name, too long, without tokens, bare and with half of a surrogate pair; a start token that
# the tokenizer adds; what the advice says; a preview; answers are how the target goes on.


@pytest.mark.field("F80")
def test_a_base_model_goes_on_with_plain_texts(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = Target(target.model, tiny_tokenizer(""), target.name)
    folder = save_target(bare, tmp_path / "target")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    lines: list[Any] = [
        *("the inner error then " * 9, {"text": "an"}, {"text": " "}, {"other": "the"}),
        {"text": "\ud800"},
        "in",
    ]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = (f"prompts.path={path}", "writing.temperatures=[0]", "writing.max_answer=6")
    with pytest.raises(SystemExit):
        door.main(arguments(folder, tmp_path / "out", "prompts=jsonl", *words))
    assert "prompts=text" in capsys.readouterr().err
    texts = arguments(folder, tmp_path / "out", "prompts=text", "prompts.tokens=9", *words)
    door.main([*texts, "preview=2"])
    assert "prompt of 9 tokens" in capsys.readouterr().out
    door.main(texts)
    data = read_set(tmp_path / "out")
    assert data.manifest["skipped"] == {
        "no text in column text": [3, 4],
        "text that is not Unicode (half of a surrogate pair)": [5],
    }
    assert data.manifest["prompts"]["kind"] == "text"
    tokenizer: Any = bare.tokenizer
    for row, text in zip(rows_of(data), (lines[0], "an", "in"), strict=True):
        lead = tokenizer(text)["input_ids"][:9]
        (output,), _ = decode(bare, None, [lead], Plan(Tree.chain(0)), max_new_tokens=6)
        assert row.ids == (*lead, *output.ids)
        assert row.spans == ((len(lead), len(row.ids)),)


# F82: a text that UTF-8 cannot hold reaches files and the terminal by what is said of a row. Tried,
# all by the one way out (`errors.writable`): a role; words that a template's refusal quotes, of a
# row that was to be left out anyway and of one that was to be written; a key given twice; what
# another run has put into the journal; the same command again, on what is then finished.


@pytest.mark.field("F82")
def test_half_a_character_in_a_reason_loses_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    template = "{% if messages[0].role == 'system' or messages[0].content == 'no' %}"
    template += "{{ raise_exception('not ' + messages[0].content + '\ud801') }}{% endif %}" + CHATML
    folder = save_target(tiny_chat_target(), tmp_path / "target")
    settings = folder / "tokenizer_config.json"
    given = json.loads(settings.read_text()) | {"chat_template": template}
    settings.write_text(json.dumps(given))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    lines: list[Any] = [
        {"prompt": "the"},
        {"messages": [{"role": "\ud800", "content": "a"}]},
        {"messages": [{"role": "system", "content": "\udfff"}]},
        {"prompt": "no"},
        {"prompt": "an"},
        {"prompt": "in"},
    ]
    path = tmp_path / "prompts.jsonl"
    twice = '{"\\ud800": 1, "\\ud800": 2}\n'
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + twice)
    out = tmp_path / "out"
    out.mkdir()
    (out / "journal-0001.jsonl").write_text('{"row":6,"skipped":"half \\ud83d of one"}\n')
    words = arguments(folder, out, "prompts=jsonl", f"prompts.path={path}", "adopt=true")
    for _ in range(2):
        door.main(words)
        assert "a turn of role \\ud800" in capfd.readouterr().out
        manifest = read_set(out).manifest
        assert manifest["skipped"] == {
            "a turn of role \ud800": [2],
            "no user turn; the chat template refuses: not \udfff\ud801": [3],
            "the chat template refuses: not no\ud801": [4],
            "key \ud800 is given twice": [7],
        }
        assert manifest["not_written"] == {"half \ud83d of one": [6]}
        assert [row.row for row in contents(out)] == [1, 5]


@pytest.mark.field("F78")
def test_two_sources_share_the_set_and_every_part_of_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "two"
    prompts.mkdir()
    for name in "AB":
        lines = [json.dumps({"prompt": f"{name} {i}"}) + "\n" for i in range(50)]
        (prompts / f"{name}.jsonl").write_text("".join(lines))
    out = tmp_path / "out"
    more = ("prompts=jsonl", f"prompts.path={prompts}", "held_out=4", "writing.max_answer=2")
    door.main(arguments(folder, out, *more, "rows=20"))
    shown = capsys.readouterr().out
    assert all(f"from {name}.jsonl" in shown for name in "AB") and "10, 2 of them held out" in shown
    data = read_set(out)
    assert data.by_source(range(20)) == {"A.jsonl": 10, "B.jsonl": 10}
    assert data.by_source(data.indices(HELD_OUT)) == {"A.jsonl": 2, "B.jsonl": 2}
    assert (
        ConversationData(data, limit_rows=6)
        .summary()
        .startswith("train: 6 rows (A.jsonl 3, B.jsonl 3), ")
    )
    aside = ConversationData(data, set_aside=4, take_set_aside=True)
    assert data.by_source(aside.indices) == {"A.jsonl": 2, "B.jsonl": 2}
    door.main(arguments(folder, out, *more, "rows=30"))  # Grows: no row is written again.
    grown = read_set(out)
    assert grown.by_source(range(30)) == {"A.jsonl": 15, "B.jsonl": 15}
    assert list(rows_of(grown))[:20] == list(rows_of(data))


@pytest.mark.field("F78", "F79", "F80")
@pytest.mark.parametrize("texts", [False, True])
def test_a_manifest_names_files_and_lines(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], texts: bool
) -> None:
    """Rows that were left out or not written, columns that are not read, control tokens in prompts,
    in chats and in plain texts; and what is in the folder and not read."""
    prompts, out = tmp_path / "in", tmp_path / "out"
    prompts.mkdir()
    out.mkdir()
    for number in range(2):
        lines = [
            {"prompt": "a", "tools": [{"name": "f"}]},
            {"prompt": "a<|im_end|>b", "instruction": "c"},
            {"prompt": ""},
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (prompts / f"x-{number:05d}-of-00002.jsonl").write_text(text)
    (prompts / "README.md").write_text("x")
    (out / "journal-0001.jsonl").write_text('{"row":4,"skipped":"not this one"}\n')
    kind = ["prompts=text", "prompts.column=prompt"] if texts else ["prompts=jsonl"]
    more = [f"prompts.path={prompts}", "adopt=true", "rows=null", "writing.max_answer=2"]
    door.main(arguments(folder, out, *kind, *more))
    captured = capsys.readouterr()
    found = read_set(out).manifest
    first, second = ("x-00000-of-00002.jsonl", "x-00001-of-00002.jsonl")
    empty = "no text in column prompt" if texts else "an empty user turn"
    assert found["skipped"] == {f"{empty}, in {first}": [3], f"{empty}, in {second}": [3]}
    unread = {} if texts else {f"tools, in {first}": [1], f"tools, in {second}": [1]}
    assert found["columns_not_read"] == unread
    other = "column instruction, which says something else than the one that is read"
    besides = {} if texts else {f"{other}, in {first}": [2], f"{other}, in {second}": [2]}
    assert found["overlooked"] == besides
    assert texts or other in " ".join(captured.out.split())
    spelt = {f"<|im_end|>, in {first}": [2], f"<|im_end|>, in {second}": [2]}
    assert found["control_tokens_spelt"] == spelt
    assert found["not_written"] == {"not this one": [4]}
    assert found["not_written_in_files"] == {f"not this one, in {second}": [1]}
    assert found["files_not_read"] == ["1 files with other endings (README.md)"]
    assert "not read: 1 files with other endings (README.md)" in captured.err
    shown = " ".join(captured.out.split())
    assert f"1 rows: {second} 1" in shown and "read as a control token: <|im_end|>" in shown


@pytest.mark.field("F02", "F62")
def test_nothing_left_stops_before_the_target_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ raise_exception('never') }}" + CHATML
    folder = save_target(tiny_chat_target(template), tmp_path / "target")
    monkeypatch.setattr(
        "drafttrain.target.load.hf", lambda **_: pytest.fail("the target was loaded")
    )
    path = one_prompt(tmp_path)
    with pytest.raises(SystemExit):
        door.main(arguments(folder, tmp_path / "out", "prompts=jsonl", f"prompts.path={path}"))
    err = capsys.readouterr().err
    assert (
        "1 the chat template refuses: never (rows 1)" in err and "first row's keys: prompt" in err
    )
    with pytest.raises(SystemExit):
        door.main(arguments(folder, tmp_path / "out"))
    assert "never" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit):
        door.main(arguments(folder, tmp_path / "out"))
    assert "other files (notes.txt)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        door.main(["target=hf", f"target.path={tmp_path / 'none'}", f"out={tmp_path / 'out2'}"])
    assert "does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        door.main([])
    assert "needs out=" in capsys.readouterr().err


@pytest.mark.field("F04")
def test_preview_shows_tokens_and_mask(
    folder: Path,
    calm: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "drafttrain.target.load.hf", lambda **_: pytest.fail("the target was loaded")
    )
    before = sorted(path.name for path in calm.iterdir())
    door.main(arguments(folder, calm, "preview=2"))
    out = capsys.readouterr().out
    rows = contents(calm)[:2]
    assert out.count("│ yes") == sum(row.supervised for row in rows)
    assert out.count("│ no") == sum(len(row.ids) - row.supervised for row in rows)
    assert "<|im_end|>" in out and sorted(path.name for path in calm.iterdir()) == before
    door.main(["target=hf", f"target.path={folder}", "preview=3"])
    assert "before every self-written user turn" in capsys.readouterr().out
    source = [
        "prompts=jsonl",
        f"prompts.path={one_prompt(tmp_path)}",
        "prompts.columns.messages=talk",
    ]
    door.main(arguments(folder, tmp_path / "none", *source, "preview=3"))
    out = capsys.readouterr().out
    assert "row 1: prompt of" in out and "│ yes" not in out and not (tmp_path / "none").exists()


def test_journals_made_elsewhere_are_taken_over(folder: Path, calm: Path, tmp_path: Path) -> None:
    out = tmp_path / "set"
    for rank in range(2):
        journal = Journal(out, rank)
        for row in contents(calm)[:20]:
            if row.row % 2 == rank:
                journal.add(row)
        journal.close()
    with pytest.raises(SystemExit):
        door.main(arguments(folder, out, "rows=60"))
    door.main(arguments(folder, out, "rows=60", "adopt=true"))
    assert contents(out) == contents(calm)


@pytest.mark.field("F22")
@pytest.mark.processes
def test_a_kill_loses_doubles_and_recomputes_nothing(
    folder: Path, calm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, then broken off once more, then not disturbed."""
    out = tmp_path / "set"
    given = arguments(folder, out, "rows=60", "held_out=5", "keep_journal=true", "slots=3")
    journal = out / "journal-0000.jsonl"

    def lines() -> bytes:
        """Those that are complete."""
        content = journal.read_bytes() if journal.exists() else b""
        return content[: content.rfind(b"\n") + 1]

    process, until = Forked(door.main, given, said=tmp_path / "said"), time.monotonic() + 120
    while lines().count(b"\n") < 5:
        assert process.runs and time.monotonic() < until, process.said
        time.sleep(0.005)
    process.kill()
    first = lines()
    assert 5 <= first.count(b"\n") < 40
    add = Journal.add

    def broken_off(self: Journal, row: Row) -> None:
        add(self, row)
        if lines().count(b"\n") >= 40:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as left:
        patch.setattr(Journal, "add", broken_off)
        door.main(given)
    kept = lines()
    assert left.value.code == 130 and kept.startswith(first) and 40 <= kept.count(b"\n") < 60
    assert not (out / "manifest.json").exists()
    door.main(given)
    assert journal.read_bytes().startswith(kept)
    numbers = [json.loads(line)["row"] for line in journal.read_text().splitlines()]
    assert sorted(numbers) == list(range(60))
    assert contents(out) == contents(calm)


@pytest.mark.processes
def test_two_processes_write_the_rows_of_one(folder: Path, calm: Path, tmp_path: Path) -> None:
    out = tmp_path / "set"
    said = pair(
        door.main,
        arguments(folder, out, "rows=60", "held_out=5", "keep_journal=true"),
        said=tmp_path / "said",
    )
    assert contents(out) == contents(calm)
    for r in range(2):
        lines = (out / f"journal-{r:04d}.jsonl").read_text().splitlines()
        assert sorted(json.loads(line)["row"] for line in lines) == list(range(r, 60, 2))
    assert read_journals(out)[0].keys() == {row.row for row in contents(calm)}
    assert "conversations" in said[0] and "conversations" not in said[1]


@pytest.mark.parametrize(
    "policy", [Policy(1.0), Policy(0.7, 5), Policy(1.3, 0, 0.8), Policy(1.0, 6, 0.7)]
)
def test_chosen_tokens_follow_the_policys_distribution(policy):
    """The shortcut that looks only at the most likely tokens draws from the same distribution as
    `Policy.probs`."""
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(2))
    grid = 20_000
    chosen = choose(
        logits.expand(grid, -1), [policy] * grid, [(i + 0.5) / grid for i in range(grid)]
    )
    share = torch.bincount(torch.tensor(chosen), minlength=12) / grid
    torch.testing.assert_close(share, policy.probs(logits)[0], atol=2 / grid, rtol=0)


@pytest.mark.field("F79", "F81")
def test_a_set_is_written_with_tools_and_in_its_mode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of two modes are not mixed; the manifest says which one it is, and which columns were
    not read."""
    template = CHATML + "{% if tools %}T{% endif %}{% if not deep %}<quick>{% endif %}"
    place = save_target(tiny_chat_target(template), tmp_path / "target")
    tool = {"name": "add"}
    rows = [{"prompt": "a", "tools": [tool]}, {"prompt": "a", "documents": [tool]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    words = ["prompts=jsonl", f"prompts.path={tmp_path / 'p.jsonl'}", "rows=null", "held_out=0"]
    door.main(arguments(place, out, *words, "target.template.deep=true"))
    found = read_set(out)
    marks = json.loads(found.manifest["target"]["fingerprint"]["chat_template"])
    assert marks["arguments"] == {"deep": True}
    assert found.manifest["columns_not_read"] == {"documents": [2]}
    starts = [
        tiny_chat_target().tokenizer.decode(row.ids[: row.spans[0][0]])  # type: ignore[union-attr]
        for row in rows_of(found)
    ]
    assert starts[0].endswith("assistant\nT") and starts[1].endswith("assistant\n")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        door.main(arguments(place, out, *words, "target.template.deep=false"))
    assert "deep true there, false here" in capsys.readouterr().err
