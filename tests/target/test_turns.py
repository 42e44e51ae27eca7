"""Later turns of a conversation are decoded after the answers to the turns before them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drafttrain.data.conversations import HELD_OUT, Row, read_set, write_set
from drafttrain.data.datamodule import ConversationData, set_folder
from drafttrain.data.named import NO_CATEGORY
from drafttrain.data.numbered import Prompts
from drafttrain.data.shapes import Prompt
from drafttrain.data.template import ChatPieces
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.record import Output
from drafttrain.errors import InputError
from drafttrain.generate import Conversation
from drafttrain.target.model import Target
from drafttrain.target.prompts import Source
from drafttrain.target.turns import counted, later_turns
from drafttrain.training.prepare import usable_prompts
from drafttrain.tree.topology import Tree
from tests.helpers import CHATML, tiny_chat_target
from tests.target.test_synthesis import written

# F76: whoever decodes held-out prompts must not take only first turns without a word. Tried: sets
# and files; answers that end and that are cut; a template that rewrites earlier answers; a system
# text; limits of prompts, of turns and of the context; sets of one turn, and the one that ships,
# whose first prompts must stay those that they were.

LONG = [Prompt(("the", "an inner", "then")), Prompt(("error",)), Prompt(("in", "x y"), "Be brief.")]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_chat_target()


def asked(target: Target, prompts: list[Prompt]) -> list[tuple[int, Prompt, list[int]]]:
    pieces = ChatPieces(target.tokenizer, target.stop_ids)
    lead = [[*p.lead(), {"role": "user", "content": p.users[0]}] for p in prompts]
    return [
        (number, prompt, pieces.first_prompt(messages))
        for number, (prompt, messages) in enumerate(zip(prompts, lead, strict=True), start=1)
    ]


@pytest.mark.field("F76")
@pytest.mark.parametrize("answer", [3, 60])
def test_a_later_turn_follows_the_targets_own_answers(target: Target, answer: int) -> None:
    """Turn by turn as a person would ask, with the decoding loop's greedy answers."""
    pieces, rows = ChatPieces(target.tokenizer, target.stop_ids), asked(target, LONG)
    end = pieces.turn_end()
    expected = []
    for number, prompt, ids in rows:
        for turn, user in enumerate(prompt.users[1:], start=2):
            (output,), _ = decode(target, None, [ids], Plan(Tree.chain(0)), max_new_tokens=answer)
            closed = [] if output.finish == "stop" else [end]
            ids = [*ids, *output.ids, *closed, *pieces.answer_to_answer(user)]
            expected.append((number, turn, ids))
    expected.sort(key=lambda one: (one[1], one[0]))
    found = later_turns(target, pieces, rows, answer=answer)
    assert found == expected and counted(turn for _, turn, _ in found) == {"2": 2, "3": 1}
    assert later_turns(target, pieces, rows, answer=answer, slots=1) == found


@pytest.mark.field("F76")
def test_a_later_turn_is_shown_with_the_rows_own_arguments() -> None:
    """Here every turn of the user begins with them."""
    marked = "{{ mark if message.role == 'user' }}{{ message.content"
    target = tiny_chat_target(CHATML.replace("{{ message.content", marked))
    pieces = ChatPieces(target.tokenizer, target.stop_ids)
    prompt = Prompt(("the", "an"), arguments={"mark": "in "})
    first = pieces.given(prompt.arguments).first_prompt([{"role": "user", "content": "the"}])
    ((_, _, ids),) = later_turns(target, pieces, [(1, prompt, first)], answer=3)
    assert pieces.tokenizer.decode(ids).count("user\nin ") == 2


@pytest.mark.field("F76")
def test_no_later_turn_where_earlier_answers_are_shown_otherwise() -> None:
    target = tiny_chat_target("{{ 'x' * (messages | length) }}" + CHATML)
    pieces = ChatPieces(target.tokenizer, target.stop_ids)
    assert not pieces.grows(with_system=False)
    assert later_turns(target, pieces, asked(target, LONG[:1]), answer=3) == []


# The kind: what is between two turns was rendered as in a conversation of two turns, without a
# system text. Templates number turns, repeat the system text, or show the latest turn otherwise.
INDEXED = CHATML.replace("{{ message.role }}", "{{ message.role }} {{ loop.index }}").replace(
    "assistant\n", "assistant {{ messages | length + 1 }}\n"
)
REPEATING = CHATML.replace(
    "{{ message.content",
    "{{ messages[0].content if message.role == 'user' and loop.index > 2 and "
    "messages[0].role == 'system' }}{{ message.content",
)
SYSTEM = Prompt(("in", "x y", "the", "then"), "Be brief.")


@pytest.mark.field("F04")
@pytest.mark.parametrize("template", [INDEXED, REPEATING])
@pytest.mark.parametrize("prompt", [SYSTEM, Prompt(SYSTEM.users)])
def test_turns_are_what_the_template_makes_of_the_conversation(
    template: str, prompt: Prompt, tmp_path: Path
) -> None:
    """In prompts of evaluations, in sets and on the console, at any turn."""
    target = tiny_chat_target(template, stop_bias=4.0)
    pieces = ChatPieces(target.tokenizer, target.stop_ids)

    def shown(ids: list[int], answers: list[list[int]]) -> None:
        messages = prompt.lead()
        for user, answer in zip(prompt.users, [*answers, None], strict=False):
            messages.append({"role": "user", "content": user})
            if answer is not None:
                said = pieces.tokenizer.decode([i for i in answer if i not in target.stop_ids])
                messages.append({"role": "assistant", "content": said})
        assert pieces.tokenizer.decode(ids) == pieces.render(messages, prompt=True)

    row = written(target, [prompt], tmp_path / "set", max_length=400)[0]
    answers = [list(row.ids[start:end]) for start, end in row.spans]
    assert len(answers) == 4 and all(answer[-1] in target.stop_ids for answer in answers)
    for place, (start, _) in enumerate(row.spans):
        shown(list(row.ids[:start]), answers[:place])
    found = later_turns(target, pieces, asked(target, [prompt]), answer=24)
    assert [ids for *_, ids in found] == [list(row.ids[:start]) for start, _ in row.spans[1:]]
    talk = Conversation(target, chat=True, system=prompt.system)
    for user, (start, _), answer in zip(prompt.users, row.spans, answers, strict=True):
        ids = talk.prompt(user, 10)
        assert ids == list(row.ids[:start])
        talk.keep(ids, Output(answer, finish="stop"))


@pytest.mark.field("F04")
def test_turns_that_the_target_writes_itself_are_numbered_too(tmp_path: Path) -> None:
    target = tiny_chat_target(INDEXED)
    rows = written(target, [None] * 12, tmp_path, turns=[3], max_length=400, max_user=60)
    texts = [target.tokenizer.decode(list(row.ids)) for row in rows.values() if len(row.spans) == 3]  # type: ignore[union-attr]
    assert texts
    for text in texts:
        roles = ["user 1", "assistant 2", "user 3", "assistant 4", "user 5", "assistant 6"]
        assert re.findall(r"<\|im_start\|>(\w+ \d)", text) == roles


@pytest.mark.field("F04")
def test_the_third_turn_must_grow_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Here only the last two turns of the user are shown."""
    target = tiny_chat_target("{% set messages = messages[-3:] %}" + CHATML)
    pieces = ChatPieces(target.tokenizer, target.stop_ids)
    assert not pieces.grows(with_system=False)
    assert later_turns(target, pieces, asked(target, LONG[:1]), answer=3) == []
    talk = Conversation(target, chat=True)
    talk.keep(talk.prompt("the", 10), Output([5, 2], finish="stop"))
    talk.prompt("an", 10)
    assert "would show earlier turns otherwise" in capsys.readouterr().err


def two_turns(target: Target, folder: Path, rows: int = 30) -> Source:
    """A set whose six held-out rows have two turns each."""
    written = [
        Row(i, (5, 6, 7 + i, 40, 2, 8, 9, 41, 2), ((3, 5), (7, 9)), ("stop", "stop"))
        for i in range(rows)
    ]
    manifest = {"target": {"name": target.name, "fingerprint": target.fingerprint}}
    write_set(folder, written, manifest=manifest, held_out=6)
    return Source("set", data=read_set(folder))


@pytest.mark.field("F76")
def test_turns_of_a_set_are_taken_and_counted(target: Target, tmp_path: Path) -> None:
    source, said = two_turns(target, tmp_path), list[str]()
    first = [[5, 6, 7 + i] for i in range(6)]
    second = [[5, 6, 7 + i, 40, 2, 8, 9] for i in range(6)]
    assert source.ids(target, None, said.append, turns=None) == first + second
    assert source.by_turn == [1] * 6 + [2] * 6 and source.turns_left_out == 0
    assert said == ["prompts by turn: turn 1: 6, turn 2: 6"]
    for limit, turns, taken in ((8, None, 2), (None, 1, 0), (6, None, 0), (7, 2, 1)):
        source = Source("set", data=source.data)
        found = source.ids(target, limit, said.append, turns=turns)
        assert found == first + second[:taken] and source.turns_left_out == 6 - taken
        assert said[-1].startswith(f"left out {6 - taken} later turns")


@pytest.mark.field("F76")
def test_turns_of_a_file_are_taken_and_counted(target: Target) -> None:
    for limit, turns, by_turn in (
        (None, None, {"1": 3, "2": 2, "3": 1}),
        (None, 2, {"1": 3, "2": 2}),
        (None, 1, {"1": 3}),
        (4, None, {"1": 3, "2": 1}),
        (2, None, {"1": 2}),
    ):
        source = Source("file", prompts=Prompts(list(enumerate(LONG, start=1))))
        ids = source.ids(target, limit, lambda _: None, turns=turns, answer=4)
        assert counted(source.by_turn) == by_turn and len(ids) == sum(by_turn.values())
        assert source.turns_left_out == 3 - sum(by_turn.values()) + by_turn["1"]


@pytest.mark.field("F76")
def test_a_turn_without_room_is_left_out_and_counted() -> None:
    target = tiny_chat_target(max_position_embeddings=64)
    source = Source("file", prompts=Prompts([(1, Prompt(("the", "an " * 40, "in")))]))
    assert len(source.ids(target, None, lambda _: None, turns=None, answer=4)) == 1
    assert source.turns_left_out == 2


@pytest.mark.field("F76")
def test_first_turns_are_the_prompts_that_they_were() -> None:
    """Of the set that ships, some of the held-out rows have further turns."""
    data = read_set(set_folder("builtin:smollm2"))
    first = []
    for index in data.indices(HELD_OUT):
        ids, mask = data.row(index)
        first.append(ids[: int(mask.long().argmax())].tolist())
    assert data.prompts() == first == [ids for *_, ids in data.asked()][:111]
    assert data.prompts(7) == first[:7]
    assert counted(turn for _, turn, _ in data.asked()) == {"1": 111, "2": 21, "3": 11}


def test_rows_without_an_answer_are_no_prompts(target: Target, tmp_path: Path) -> None:
    source = two_turns(target, tmp_path)
    assert source.data is not None
    source.data.mask[:] = False
    with pytest.raises(InputError, match="no held-out conversations"):
        source.ids(target, None, lambda _: None)


@pytest.mark.field("F76")
def test_a_run_decodes_every_turn_that_its_numbers_of_prompts_have_room_for(
    target: Target, tmp_path: Path
) -> None:
    two_turns(target, tmp_path)
    data, said = ConversationData(tmp_path), list[str]()

    def usable(turns: int | None, prompts: int) -> list[int]:
        settings: Any = SimpleNamespace(
            longest_answer=4,
            eval=SimpleNamespace(max_new_tokens=4, prompts=prompts, turns=turns),
            final=SimpleNamespace(
                max_new_tokens=4, speed_new_tokens=4, prompts=100, speed_prompts=0
            ),
        )
        ids, kinds = usable_prompts(target, data, settings, said.append)
        assert kinds == [NO_CATEGORY] * len(ids)
        return [len(one) for one in ids]

    assert usable(None, 8) == [3] * 6 + [7] * 6
    expected = "held-out prompts: turn 1: 6, turn 2: 6; eval.prompts takes "
    assert said == [expected + "turn 1: 6, turn 2: 2; final.prompts takes turn 1: 6, turn 2: 6"]
    assert usable(1, 8) == [3] * 6
    assert said[1:] == [expected + "turn 1: 6; final.prompts takes turn 1: 6"]


@pytest.mark.field("F76")
def test_a_turn_that_the_template_refuses_ends_the_conversation() -> None:
    """Two turns of one kind, or none at all after the first."""
    for most, expected in ((3, {"2": 1}), (1, {})):
        refusal = "{{ raise_exception('no more') }}"
        guard = f"{{% if messages[-1].content == 'then' or messages | length > {most} %}}"
        target = tiny_chat_target(guard + refusal + "{% endif %}" + CHATML)
        pieces = ChatPieces(target.tokenizer, target.stop_ids)
        rows = asked(target, [Prompt(("the", "an inner", "then", "in"))])
        assert (
            counted(turn for _, turn, _ in later_turns(target, pieces, rows, answer=3)) == expected
        )
