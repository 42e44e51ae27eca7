"""Answers that the drafter writes itself: after the right prompts, its own, the same again, and
judged by the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.data.datamodule import ConversationData, collate
from drafttrain.drafter.on_policy import OnPolicy, write_answers
from drafttrain.drafter.ssm import Ssm
from drafttrain.flow import Batch, Needs
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.training.checkpoint import read_checkpoint
from tests.drafter.make import make
from tests.training.parts import (
    Watch,
    fit,
    keeper,
    module_for,
    same,
    tiny,
    weights_of,
    write_tiny_set,
)

EVERY = torch.ones(3, dtype=torch.bool)


@pytest.fixture(scope="module")
def target() -> Target:
    return load.tiny()


def batch() -> Batch:
    """One turn, two turns, and a row in which every token is a label."""
    one = (torch.arange(10, 22), torch.arange(12) >= 5, 7)
    two = (torch.arange(40, 56), (torch.arange(16) // 4) % 2 == 1, 8)
    every = (torch.arange(80, 90), torch.arange(10) > 0, 9)
    return collate([one, two, every])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drafter_of(target: Target, **settings: Any) -> Ssm:
    torch.manual_seed(0)
    return make(Ssm, target, **{"layers": [0, 2], **settings})


def test_answers_depend_only_on_the_generator(target: Target) -> None:
    drafter = drafter_of(target)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = write_answers(drafter, batch(), EVERY, OnPolicy(1.0, 12, 1.0), generator())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = write_answers(drafter, batch(), EVERY, OnPolicy(1.0, 12, 1.0), generator())
    other = write_answers(drafter, batch(), EVERY, OnPolicy(1.0, 12, 1.0), generator(1))
    assert torch.equal(first.input_ids, again.input_ids) and torch.equal(
        first.loss_mask, again.loss_mask
    )
    assert first.input_ids.shape != other.input_ids.shape or not torch.equal(
        first.input_ids, other.input_ids
    )


def test_a_prompt_ends_where_an_answer_starts(target: Target) -> None:
    drafter, seen = drafter_of(target), set()
    for seed in range(12):
        written = write_answers(drafter, batch(), EVERY, OnPolicy(1.0, 3, 1.0), generator(seed))
        starts = written.loss_mask.int().argmax(1).tolist()
        assert starts[0] == 5 and starts[1] in (4, 12) and 1 <= starts[2] <= 9
        for place, (start, length) in enumerate(zip(starts, written.lengths.tolist(), strict=True)):
            assert (
                written.input_ids[place, :start].tolist()
                == batch().input_ids[place, :start].tolist()
            )
            assert written.loss_mask[place].nonzero()[:, 0].tolist() == list(range(start, length))
            assert 1 <= length - start <= 3
        seen |= {("two", starts[1]), ("every", starts[2])}
    assert {("two", 4), ("two", 12)} <= seen and len(seen) > 5
    assert written.row_ids.tolist() == [7, 8, 9]


def test_greedy_answers_are_the_drafters_own_text(target: Target) -> None:
    drafter = drafter_of(target, own=["embedding", "norm", "head"]).eval()
    written = write_answers(drafter, batch(), EVERY, OnPolicy(1.0, 9, 0.0), generator())
    for ids, mask, length in zip(
        written.input_ids, written.loss_mask, written.lengths.tolist(), strict=True
    ):
        start = int(mask.int().argmax())
        out = drafter.model.generate(
            ids[None, :start],
            max_new_tokens=9,
            do_sample=False,
            eos_token_id=list(target.stop_ids),
            pad_token_id=0,
        )
        assert out[0].tolist() == ids[:length].tolist()


def test_answers_end_on_a_stop_token(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = drafter_of(target)
    longer = write_answers(drafter, batch(), EVERY, OnPolicy(1.0, 9, 0.0), generator())
    rows = list(zip(longer.input_ids, longer.loss_mask, longer.lengths.tolist(), strict=True))
    answers = [ids[:length][mask[:length]].tolist() for ids, mask, length in rows]
    assert [len(answer) for answer in answers] == [9, 9, 9]
    stop = answers[0][4]
    monkeypatch.setattr(Target, "stop_ids", property(lambda self: (stop,)))
    ended = write_answers(drafter, batch(), EVERY, OnPolicy(1.0, 9, 0.0), generator())
    for ids, mask, length, answer in zip(
        ended.input_ids, ended.loss_mask, ended.lengths.tolist(), answers, strict=True
    ):
        end = answer.index(stop) + 1 if stop in answer else 9
        assert ids[:length][mask[:length]].tolist() == answer[:end]


def test_only_what_can_be_proposed_is_written(target: Target) -> None:
    drafter = drafter_of(target, draft_ids=list(range(200, 240)))
    written = write_answers(drafter, batch(), EVERY, OnPolicy(1.0, 8, 1.0), generator())
    answers = written.input_ids[written.loss_mask]
    assert len(answers) == 24 and int(answers.min()) >= 200 and int(answers.max()) < 240


def test_the_context_is_not_overrun() -> None:
    short = load.tiny(max_position_embeddings=18)
    written = write_answers(drafter_of(short), batch(), EVERY, OnPolicy(1.0, 64, 1.0), generator())
    assert int(written.lengths.max()) <= 18


def test_the_share_of_rows() -> None:
    ids, mask = torch.ones(400, 4, dtype=torch.int64), torch.ones(400, 4, dtype=torch.bool)
    mask[:100] = False
    rows = Batch(ids, mask, torch.full((400,), 4), torch.arange(400))
    assert not OnPolicy(0.0, 64, 1.0).chosen(rows, generator()).any()
    assert torch.equal(OnPolicy(1.0, 64, 1.0).chosen(rows, generator()), mask[:, 0])
    some = OnPolicy(0.25, 64, 1.0).chosen(rows, generator())
    assert not some[:100].any() and 45 <= int(some.sum()) <= 105
    assert torch.equal(some, OnPolicy(0.25, 64, 1.0).chosen(rows, generator()))


def test_the_loss_on_its_own_answers_by_hand(target: Target) -> None:
    """The target's distribution there, and no text to learn by heart."""
    drafter = drafter_of(
        target, loss={"reverse_kl": 1.0, "cross_entropy": 1.0}, on_policy=1.0, on_policy_tokens=6
    )
    given = batch()
    features = target.features(given.input_ids, given.lengths, Needs(last_hidden=True))
    loss = drafter.loss(given, features, generator=generator(3))
    chance = generator(3)
    rows = drafter.on_policy.chosen(given, chance)
    written = write_answers(drafter, given, rows, drafter.on_policy, chance)
    expected = 0.0
    for ids, mask, length in zip(
        written.input_ids, written.loss_mask, written.lengths.tolist(), strict=True
    ):
        with torch.no_grad():
            p = target.model(input_ids=ids[None, :length]).logits[0].log_softmax(-1)
            q = drafter.model(input_ids=ids[None, :length]).logits[0].log_softmax(-1)
        kl = (q.exp() * (q - p)).sum(-1)
        expected += float(kl[:-1][mask[1:length]].sum())
    assert float(loss.total.detach()) == pytest.approx(expected, rel=1e-3)
    assert int(loss.count) == int(written.loss_mask.sum())
    assert float(loss.parts["cross_entropy"][0]) == 0 and int(loss.parts["cross_entropy"][1]) == 0
    assert int(loss.parts["accuracy"][1]) == 0
    # Without a generator, as in validation, the set's text is judged.
    assert int(drafter.loss(given, features).count) == int(given.loss_mask.sum())


def test_both_kinds_of_rows_in_one_batch(target: Target) -> None:
    drafter = drafter_of(target, on_policy=0.5, on_policy_tokens=6)
    given = batch()
    features = target.features(given.input_ids, given.lengths, Needs(last_hidden=True))
    seed = next(
        s for s in range(50) if int(drafter.on_policy.chosen(given, generator(s)).sum()) == 1
    )
    loss = drafter.loss(given, features, generator=generator(seed))
    chance = generator(seed)
    rows = drafter.on_policy.chosen(given, chance)
    written = write_answers(drafter, given, rows, drafter.on_policy, chance)
    stays = (~rows).nonzero()[:, 0].tolist()
    kept = Batch(
        given.input_ids[stays], given.loss_mask[stays], given.lengths[stays], given.row_ids[stays]
    )
    apart = drafter.loss(
        kept, target.features(kept.input_ids, kept.lengths, Needs(last_hidden=True))
    )
    own = drafter.loss(
        written, target.features(written.input_ids, written.lengths, Needs(last_hidden=True))
    )
    torch.testing.assert_close(loss.total, apart.total + own.total, rtol=1e-4, atol=1e-4)
    assert int(loss.count) == int(apart.count) + int(own.count)
    loss.total.backward()
    assert all(
        p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in drafter.parameters()
    )


def test_a_resumed_run_writes_and_learns_the_same_bits(tmp_path: Path) -> None:
    target = tiny()
    data = ConversationData(write_tiny_set(target, tmp_path / "set"))
    settings: dict[str, Any] = {"accumulate": 2, "max_steps": 7, "batch_tokens": 320}
    own: dict[str, Any] = {"layers": [0], "on_policy": 0.5, "on_policy_tokens": 8}
    unbroken, stream = module_for(data, target, drafter=drafter_of(target, **own), **settings)
    fit(unbroken, stream)

    first, stream = module_for(data, target, drafter=drafter_of(target, **own), **settings)
    fit(first, stream, Watch(stop_at=3), keeper(tmp_path / "run", every=100))
    assert first.stopped == "signal" and first.updates < 7
    torch.manual_seed(9)  # a new process has another random state
    second, stream = module_for(data, target, drafter=make(Ssm, target, **own), **settings)
    second.continue_from(read_checkpoint(tmp_path / "run" / "last.ckpt"))
    stream.position = second.position
    fit(second, stream)
    assert (
        same(weights_of(second), weights_of(unbroken)) and second.supervised == unbroken.supervised
    )
    plain, stream = module_for(data, target, drafter=drafter_of(target, layers=[0]), **settings)
    fit(plain, stream)
    assert not same(weights_of(plain), weights_of(unbroken))
