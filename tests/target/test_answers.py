"""The target's answers at temperature 0: what is written, found and kept is what it would write.

Neighbours that were thought of: prompts that occur twice, rows of a set at other temperatures,
later turns, answers shorter than asked for, another target, dtype or template, a damaged folder.
"""

import dataclasses

import pytest

from drafttrain.data.conversations import Row, read_set, write_set
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.replaying import answered
from drafttrain.errors import InputError
from drafttrain.target import answers, load
from drafttrain.tree.topology import Tree
from tests.helpers import CHATML, tiny_chat_target

PROMPTS = [[3, 5, 7], [11, 12], [20, 21, 22, 23], [11, 12]]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "answers"


def target_of(**settings):
    return load.tiny(family="qwen3", **settings)


def decoded(target, limit):
    plain, _ = decode(target, None, PROMPTS, Plan(Tree.chain(0)), max_new_tokens=limit)
    return {tuple(prompt): tuple(output.ids) for prompt, output in zip(PROMPTS, plain, strict=True)}


def test_they_are_what_plain_decoding_writes():
    target = target_of()
    for slots in (1, 2, 9):
        found = answers.write(target, PROMPTS, 12, slots=slots)
        assert {prompt: answer.ids for prompt, answer in found.items()} == decoded(target, 12)


def test_they_end_at_a_stop_token_or_with_the_context():
    target = target_of(max_position_embeddings=8)
    stop = decoded(target, 3)[3, 5, 7][1]
    target.model.generation_config.eos_token_id = stop
    found = answers.write(target, PROMPTS, 12)
    for prompt, answer in found.items():
        assert answer.ended and (
            answer.ids[-1] in target.stop_ids or len(prompt) + len(answer.ids) == 8
        )
    with pytest.raises(InputError, match="prompt 0 has 8 tokens"):
        answers.write(target, [[1] * 8], 2)


def test_they_are_written_once_and_read_afterwards(cache, monkeypatch):
    target = target_of()
    shown = []

    def watch(items, what):
        shown.append((len(items), what))
        return items

    first, folder = answers.cached(target, PROMPTS, 6, watch=watch)
    assert folder.parent == cache and shown == [(3, "prompts answered")]
    assert read_set(folder).manifest["target"]["fingerprint"] == target.fingerprint
    monkeypatch.setattr(answers, "write", lambda *_, **__: pytest.fail("written again"))
    again, same = answers.cached(target, PROMPTS, 6)
    assert again == first and same == folder
    monkeypatch.undo()


@pytest.mark.parametrize("change", ["limit", "weights", "dtype", "stop"])
def test_what_changes_them_makes_others(cache, monkeypatch, change):
    _, before = answers.cached(target_of(), PROMPTS, 6)
    target = target_of(seed=1) if change == "weights" else target_of()
    if change == "dtype":
        target = target_of(dtype="bfloat16")
    if change == "stop":
        target.model.generation_config.eos_token_id = [5, 9]
    _, after = answers.cached(target, PROMPTS, 7 if change == "limit" else 6)
    assert after != before


def test_a_damaged_folder_is_written_again():
    target = target_of()
    first, folder = answers.cached(target, PROMPTS, 6)
    tensors = folder / "rows.safetensors"
    file = tensors if tensors.exists() else next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-3] + b"\x07\x07\x07")
    again, _ = answers.cached(target, PROMPTS, 6)
    assert again == first
    assert answers.in_folder(folder, target, PROMPTS, 6) == first


def test_known_answers_are_not_written_and_are_cut_at_the_limit(monkeypatch):
    target = target_of()
    known = {
        p: dataclasses.replace(a, ended=True) for p, a in answers.write(target, PROMPTS, 9).items()
    }
    monkeypatch.setattr(answers, "write", lambda _t, missing, *_a, **_k: dict.fromkeys(missing))
    found, _ = answers.cached(target, PROMPTS, 6, known=known)
    assert {p: a.ids for p, a in found.items()} == {p: a.ids[:6] for p, a in known.items()}
    # What is cut goes on.
    assert all(a.ended == (len(known[p].ids) <= 6) for p, a in found.items())
    assert not all(answer.ended for answer in found.values())


def test_known_answers_that_are_too_short_are_written():
    target = target_of()
    short, right = (answers.write(target, PROMPTS, limit) for limit in (3, 6))
    assert answers.cached(target, PROMPTS, 6, known=short)[0] == right


# Sets that others made ----------------------------------------------------------------------------
def set_of(folder, target, temperature=0.0, limit=6):
    """Two turns each: the second prompt holds the first answer."""
    rows = []
    for number, prompt in enumerate(map(tuple, PROMPTS[:3])):
        (first,) = answers.write(target, [prompt], limit).values()
        asked = (*prompt, *first.ids, 9, 8)
        (second,) = answers.write(target, [asked], limit).values()
        ids = (*asked, *second.ids)
        spans = ((len(prompt), len(prompt) + len(first.ids)), (len(asked), len(ids)))
        rows.append(Row(number, ids, spans, ("stop", "length"), temperature if number else 0.0))
    manifest = {"target": {"name": target.name, "fingerprint": target.fingerprint}}
    write_set(folder, rows, manifest=manifest, held_out=0)
    return rows


def test_every_turn_of_a_greedy_row_is_known(tmp_path):
    target = target_of()
    rows = set_of(tmp_path / "set", target, temperature=0.7)
    found = answers.of_set(read_set(tmp_path / "set"), target, "set")
    (one, two), ids = rows[0].spans, rows[0].ids
    assert set(found) == {ids[: one[0]], ids[: two[0]]}  # rows 1 and 2 were drawn
    assert found[ids[: two[0]]].ids == ids[two[0] : two[1]]
    known = answers.write(target, list(found), 6)
    assert {p: a.ids for p, a in known.items()} == {p: a.ids for p, a in found.items()}


def test_a_folder_that_lacks_answers_is_refused(tmp_path):
    target = target_of()
    set_of(tmp_path / "set", target, temperature=0.7)
    with pytest.raises(InputError, match="to 2 of 4 prompts: write them with"):
        answers.in_folder(tmp_path / "set", target, [*PROMPTS[:3], PROMPTS[0]], 6)
    with pytest.raises(InputError, match="1 of 1 prompts, 1 of them shorter than 9 tokens"):
        answers.in_folder(tmp_path / "set", target, PROMPTS[:1], 9)


@pytest.mark.parametrize(
    ("other", "words"), [({"seed": 3}, "another target"), ({"dtype": "bfloat16"}, "in dtype")]
)
def test_answers_of_another_target_are_refused(tmp_path, other, words):
    set_of(tmp_path / "set", target_of())
    with pytest.raises(InputError, match=words):
        answers.in_folder(tmp_path / "set", target_of(**other), PROMPTS[:1], 6)


def test_answers_in_another_mode_are_refused(tmp_path):
    set_of(tmp_path / "set", tiny_chat_target())
    other = tiny_chat_target(CHATML.replace("assistant\n", "helper\n"))
    with pytest.raises(InputError, match="the chat template is another"):
        answers.in_folder(tmp_path / "set", other, PROMPTS[:1], 1)


def test_answers_of_a_set_are_used_where_they_are_this_target_s_and_long_enough(tmp_path):
    set_of(tmp_path / "set", target_of(), limit=6)
    rows = read_set(tmp_path / "set")
    for seed, limit, own in ((0, 6, True), (0, 9, False), (1, 6, False)):
        target, said = target_of(seed=seed), []
        found = answered(target, PROMPTS[:1], limit, rows=rows, say=said.append)
        (prompt, right), *_ = answers.write(target, PROMPTS[:1], limit).items()
        assert found[prompt].ids == right.ids
        assert ("the set's own rows" in said[0]) == own


def test_an_answer_knows_where_it_ends():
    target = target_of()
    answer = answers.write(target, PROMPTS[:1], 4)[tuple(PROMPTS[0])]
    assert not answer.ended and answer.covers(4) and not answer.covers(5)
    assert dataclasses.replace(answer, ended=True).covers(5)
