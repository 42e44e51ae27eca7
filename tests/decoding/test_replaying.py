"""Decoding by looking the target's answers up: the counts of decoding with the target.

Neighbours that were thought of: rows of unlike lengths, rows that end at unlike rounds, stop tokens
within drafts, limits within drafts and of one token, a prompt that occurs twice, a text that ends
with the context, answers that go on past the limit asked for, drafters that read no features, some
layer, or all of them, drafters that remember texts, several plans on one set of answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from drafttrain.data.conversations import Row, read_set, write_set
from drafttrain.decoding.loop import decode
from drafttrain.decoding.measure import measure_acceptance
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.replaying import (
    Replays,
    answered,
    obstacle,
    refuse_unread,
    replay_acceptance,
)
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.medusa import Medusa
from drafttrain.drafter.suffix import Suffix
from drafttrain.errors import InputError
from drafttrain.flow import Needs
from drafttrain.nn.sampling import Policy
from drafttrain.target import answers, load
from drafttrain.target.replay import Answer, Replay, keep
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters
from tests.drafter.contract import NAMES, TREES, build, fills, made

FEW = {"vocab_size": 13, "sharpness": 1.0, "layers": 3}
"""So few tokens that an untrained drafter is often right."""
PROMPTS = [[3, 5, 7, 3, 5], [11, 12], [1, 2, 4, 8, 3, 6, 12, 11, 9, 5], [10], [3, 5, 7, 3, 5]]
REPLAYED = [name for name in NAMES if not made(name).runs_target]


def target_of(family="qwen3", **more):
    """Without stop tokens of its own: with so few tokens, texts would end at once."""
    target = load.tiny(**{**FEW, "family": family, **more})
    target.config.eos_token_id = target.model.generation_config.eos_token_id = None
    return target


def counts(outputs, tally):
    return (
        [(o.ids, o.runs, o.nodes, o.finish, o.tally) for o in outputs],
        (tally.rounds, tally.drafted, tally.accepted, tally.emitted, tally.offered, tally.kept),
    )


def both(target, drafter, plan, limit=24, **settings):
    """What decoding counts, and what replaying counts."""
    known = answers.write(target, PROMPTS, limit)
    replay = Replays(target, lambda: known).of(drafter.needs)
    assert replay.lacks(PROMPTS, limit, None) is None
    settings = {"max_new_tokens": limit, **settings}
    real = decode(target, drafter, PROMPTS, plan, **settings)
    return counts(*real), counts(*decode(replay, drafter, PROMPTS, plan, **settings))


@pytest.mark.parametrize(
    ("name", "tree"),
    [(name, tree) for name in REPLAYED for tree in TREES if fills(made(name), TREES[tree])],
)
def test_every_drafter_and_tree(name, tree):
    drafter = build(name, target_of())
    real, replayed = both(drafter.target, drafter, Plan(TREES[tree]))
    assert replayed == real
    assert real[1][2] > 0, "no draft was accepted, so nothing was shown"


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gemma2", "qwen3"])
def test_every_family(family):
    target = target_of(family)
    for name in ("eagle1", "medusa"):
        drafter = build(name, target)
        for tree in (Tree.chain(3), Tree.expansion([3, 2, 1]), TREES["dynamic"]):
            real, replayed = both(target, drafter, Plan(tree))
            assert replayed == real


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_limits_within_drafts(limit):
    drafter = build("eagle1", target_of())
    for tree in TREES.values():
        real, replayed = both(drafter.target, drafter, Plan(tree), limit)
        assert replayed == real


def test_stop_tokens_within_drafts():
    target = target_of()
    plain, _ = decode(target, None, PROMPTS, Plan(Tree.chain(0)), max_new_tokens=24, stop_ids=())
    target.model.generation_config.eos_token_id = [plain[0].ids[5], plain[2].ids[9]]
    assert target.stop_ids
    drafter = build("eagle1", target)
    for tree in TREES.values():
        real, replayed = both(target, drafter, Plan(tree))
        assert replayed == real
        assert {"stop"} <= {finish for *_, finish, _tally in real[0]}
        # More stop tokens than the answers ended at.
        more = (*target.stop_ids, plain[1].ids[3])
        real, replayed = both(target, drafter, Plan(tree), stop_ids=more)
        assert replayed == real


def test_a_text_that_ends_with_the_context():
    target = target_of(max_position_embeddings=20)
    drafter = build("eagle1", target)
    for tree in TREES.values():
        real, replayed = both(target, drafter, Plan(tree), 18)
        assert replayed == real
        assert "context" in {finish for *_, finish, _tally in real[0]}


def test_answers_that_go_on_past_the_limit():
    drafter = build("eagle1", target_of())
    replay = Replays(drafter.target, lambda: answers.write(drafter.target, PROMPTS, 30)).of(
        drafter.needs
    )
    plan = Plan(Tree.chain(3))
    for limit in (4, 9):
        real = decode(drafter.target, drafter, PROMPTS, plan, max_new_tokens=limit)
        assert counts(*decode(replay, drafter, PROMPTS, plan, max_new_tokens=limit)) == counts(
            *real
        )


def test_measurements_agree_in_batches_and_with_memory():
    target = target_of()
    for name in ("eagle1", "suffix"):
        drafter = build(name, target)
        replays = Replays(target, lambda: answers.write(target, PROMPTS, 20))
        for batch in (1, 2, 5):
            settings = {"max_new_tokens": 20, "batch": batch}
            plan = Plan(Tree.chain(3))
            real = measure_acceptance(target, drafter, PROMPTS, plan, **settings)
            found = replay_acceptance(replays.of(drafter.needs), drafter, PROMPTS, plan, **settings)
            assert found.replayed and not real.replayed
            there, here = real.row(), found.row()
            for row in (there, here):
                row.pop("seconds"), row.pop("replayed")
            assert here == there
            assert found.rates == real.rates


def test_many_rows_are_replayed_together_but_not_where_texts_are_remembered():
    target = target_of()
    answers_of = Replays(target, lambda: answers.write(target, PROMPTS, 20))
    seen: list[int] = []

    def watch(steps: Sequence[int], what: str) -> Sequence[int]:
        seen.append(len(steps))
        return steps

    for drafter in (
        build("eagle1", target),
        drafters.make(Suffix, target, remember=0),
        drafters.make(Suffix, target, remember=100),
    ):
        replay_acceptance(
            answers_of.of(drafter.needs),
            drafter,
            PROMPTS,
            Plan(Tree.chain(3)),
            max_new_tokens=20,
            batch=2,
            watch=watch,
        )
    assert seen == [1, 1, -(-len(PROMPTS) // 2)]


def test_features_are_read_once_for_all_that_need_the_same(monkeypatch):
    target = target_of()
    replays = Replays(target, lambda: answers.write(target, PROMPTS, 5))
    first = replays.of(Needs(last_hidden=True))
    assert replays.of(Needs()) is first and replays.of(Needs(last_hidden=True)) is first
    wider = replays.of(Needs(layers=(1,)))
    assert wider is not first
    assert wider.serves(Needs(last_hidden=True, layers=(1,)))
    assert not first.serves(Needs(layers=(1,)))
    assert replays.of(Needs(layers=(0,))).serves(Needs(last_hidden=True, layers=(0, 1)))


def test_the_features_are_those_of_decoding():
    target = target_of()
    known = answers.write(target, PROMPTS, 6)
    kept = keep(target, known, Needs(last_hidden=True, layers=(0, 2)))
    for prompt, answer in known.items():
        ids = torch.tensor([[*prompt, *answer.ids]])
        start = kept.starts[prompt]
        found = target.features(ids, torch.tensor([ids.shape[1]]), Needs(True, (0, 2)))
        part = slice(start, start + ids.shape[1])
        assert kept.ids[part].tolist() == ids[0].tolist()
        torch.testing.assert_close(kept.hidden[part], found.last_hidden[0], atol=1e-5, rtol=1e-4)
        for layer in (0, 2):
            torch.testing.assert_close(
                kept.layers[layer][part], found.layers[layer][0], atol=1e-4, rtol=1e-4
            )


def test_no_pass_of_the_target(monkeypatch):
    drafter = build("eagle1", target_of())
    target = drafter.target
    replay = Replays(target, lambda: answers.write(target, PROMPTS, 12)).of(drafter.needs)

    def run(*_args, **_kwargs):
        raise AssertionError("a layer of the target ran")

    monkeypatch.setattr(target.decoder_layers[0], "forward", run)
    monkeypatch.setattr(target.decoder_layers[0].self_attn, "forward", run)
    found = replay_acceptance(replay, drafter, PROMPTS, Plan(Tree.chain(3)), max_new_tokens=12)
    assert found.tally.rounds


# What cannot be replayed --------------------------------------------------------------------------
def test_what_must_be_decoded_is_named():
    target = target_of()
    eagle = build("eagle1", target)
    assert obstacle(eagle, Plan(Tree.chain(2))) is None
    assert "temperature 0.7" in obstacle(eagle, Plan(Tree.chain(2), Policy(0.7)))
    assert "processors" in obstacle(eagle, Plan(Tree.chain(2), Policy(min_new_tokens=3)))
    for name in ("selfspec", "early_exit"):
        assert "layers of the target" in obstacle(build(name, target), Plan(Tree.chain(2)))
        refuse_unread(None, build(name, target))
        with pytest.raises(InputError, match=r"answers=a would not be read: .* layers of the"):
            refuse_unread("a", build(name, target))
    refuse_unread("a", build("eagle1", target))


def refused(match, replay, drafter, prompts=PROMPTS, **settings):
    with pytest.raises(InputError, match=match):
        replay_acceptance(
            replay, drafter, prompts, Plan(Tree.chain(2)), **{"max_new_tokens": 6, **settings}
        )


def test_answers_that_do_not_serve_are_refused():
    target = target_of()
    drafter, known = build("eagle1", target), answers.write(target, PROMPTS, 6)
    replay = Replays(target, lambda: known).of(drafter.needs)
    refused("1 of 6 prompts have no answer", replay, drafter, [*PROMPTS, [7, 7]])
    refused("5 of 5 answers are shorter than 7", replay, drafter, max_new_tokens=7)
    refused("reads the last hidden state", Replays(target, lambda: known).of(Needs()), drafter)
    ends = dataclasses.replace(replay.kept, answers=known)
    target.model.generation_config.eos_token_id = [4]
    refused("own stop tokens", Replay(target, ends), drafter, stop_ids=())
    assert Replay(target, ends).lacks(PROMPTS, 6, (9, 4)) is None
    with pytest.raises(InputError, match="no logits"):
        decode(replay, drafter, PROMPTS, Plan(Tree.chain(2), Policy(1.0)), max_new_tokens=2)


def test_an_answer_says_whether_it_is_complete():
    assert Answer((1, 2), ended=True).covers(9)
    assert Answer((1, 2), ended=False).covers(2) and not Answer((1, 2), ended=False).covers(3)


def test_several_heads_and_layers_share_one_set_of_answers():
    target = target_of()
    torch.manual_seed(0)
    replays = Replays(target, lambda: answers.write(target, PROMPTS, 10))
    for kind in (Eagle1, Medusa):
        drafter = drafters.make(kind, target).eval()
        plan = Plan(Tree.chain(2))
        real = measure_acceptance(target, drafter, PROMPTS, plan, max_new_tokens=10)
        found = replay_acceptance(
            replays.of(drafter.needs), drafter, PROMPTS, plan, max_new_tokens=10
        )
        assert found.tally.kept == real.tally.kept and found.tally.rounds == real.tally.rounds


# Features from one run to the next ----------------------------------------------------------------
def test_features_in_a_folder_are_not_read_again(tmp_path, monkeypatch):
    target = target_of()
    known = answers.write(target, PROMPTS, 6)
    first = keep(target, known, Needs(last_hidden=True), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["last_hidden.safetensors"]
    asked = []
    features = target.features

    def counted(ids, lengths, needs):
        asked.append(needs)
        return features(ids, lengths, needs)

    monkeypatch.setattr(target, "features", counted)
    again = keep(target, known, Needs(last_hidden=True), tmp_path)
    assert not asked and torch.equal(again.hidden, first.hidden) and again.starts == first.starts
    wider = keep(target, known, Needs(last_hidden=True, layers=(1,)), tmp_path)
    assert {needs.layers for needs in asked} == {(1,)}
    assert not any(needs.last_hidden for needs in asked) and torch.equal(wider.hidden, first.hidden)
    # Of other answers, or damaged: they are read.
    asked.clear()
    fewer = {prompt: answer for prompt, answer in known.items() if prompt != (10,)}
    keep(target, fewer, Needs(last_hidden=True), tmp_path)
    assert asked
    asked.clear()
    path = tmp_path / "last_hidden.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    keep(target, fewer, Needs(last_hidden=True), tmp_path)
    assert asked


def test_features_in_a_folder_that_are_not_finite_are_not_used(tmp_path):
    target = target_of()
    known = answers.write(target, PROMPTS, 6)
    first = keep(target, known, Needs(last_hidden=True), tmp_path)
    path = tmp_path / "last_hidden.safetensors"
    with safe_open(path, "pt") as file:
        marks = file.metadata()
    spoilt = first.hidden.clone()
    spoilt[3, 1] = float("nan")
    save_file({"last_hidden": spoilt}, path, marks)
    again = keep(target, known, Needs(last_hidden=True), tmp_path)
    assert torch.equal(again.hidden, first.hidden)


def test_features_too_large_are_not_kept(tmp_path, monkeypatch):
    target = target_of()
    monkeypatch.setattr("drafttrain.target.replay.MOST_KEPT", 100)
    keep(target, answers.write(target, PROMPTS, 6), Needs(last_hidden=True), tmp_path)
    assert not list(tmp_path.iterdir())


def test_features_that_are_not_finite_end_the_run(monkeypatch):
    target = target_of()
    known = answers.write(target, PROMPTS, 6)
    with torch.no_grad():
        target.decoder_layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(InputError, match="a held-out prompt with its answer"):
        keep(target, known, Needs(last_hidden=True))


def test_answers_of_a_set_are_taken_for_the_prompts_only(tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "cache_dir", lambda: tmp_path)
    target, said = target_of(), []
    known = answers.write(target, PROMPTS, 6)
    rows = [
        Row(number, (*prompt, *answer.ids), ((len(prompt), len(prompt) + 6),), ("length",), 0.0)
        for number, (prompt, answer) in enumerate(known.items())
    ]
    manifest = {"target": {"name": "tiny", "fingerprint": target.fingerprint}}
    write_set(tmp_path / "set", rows, manifest=manifest, held_out=1)
    taken = answered(target, PROMPTS[:2], 6, rows=read_set(tmp_path / "set"), say=said.append)
    assert list(taken) == [tuple(prompt) for prompt in PROMPTS[:2]] and "own rows" in said[0]
    longer = answered(target, PROMPTS[:2], 9, rows=read_set(tmp_path / "set"), say=said.append)
    assert all(len(answer.ids) == 9 for answer in longer.values()) and str(tmp_path) in said[1]
