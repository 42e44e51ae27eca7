"""Decoding while training: what it says, and that it leaves no trace in the weights."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from drafttrain.data.datamodule import ConversationData
from drafttrain.decoding.measure import measure_acceptance
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.replaying import Replays, asked_replays
from drafttrain.decoding.speculator import Speculator
from drafttrain.flow import Tally
from drafttrain.target.features import OnlineFeatures
from drafttrain.target.model import Target
from drafttrain.training.decode_callback import (
    DecodeCallback,
    EvalConfig,
    Evaluated,
    _over_processes,
    measured,
    undisturbed,
)
from drafttrain.training.module import DraftModule
from drafttrain.tree.topology import Tree
from tests.training.parts import EVAL, Memory, fit, module_for, same, weights_of


def callback(
    module: DraftModule,
    target: Target,
    data: ConversationData,
    held_out: ConversationData | None,
    **settings: Any,
) -> DecodeCallback:
    plans = {"tree": Plan(Tree.expansion([2, 2])), "chain": Plan(Tree.chain(3))}
    source = (
        None if held_out is None else OnlineFeatures(target, module.drafter.needs, data=held_out)
    )
    speculator = Speculator(target, module.drafter, plans["tree"], dtype="float32")
    return DecodeCallback(
        speculator,
        data.set.prompts(),
        plans,
        EvalConfig(**EVAL | settings),
        held_out=held_out,
        source=source,
    )


@pytest.mark.field("F47", "F54")
def test_a_run_with_and_without_it_has_identical_weights(
    target: Target, data: ConversationData, held_out: ConversationData
) -> None:
    def states() -> tuple[bytes, float, float]:
        return torch.get_rng_state().numpy().tobytes(), random.random(), float(np.random.rand())

    found = []
    for with_callback in (False, True):
        module, stream = module_for(data, target)
        decode = callback(module, target, data, held_out)
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        fit(module, stream, *([decode] if with_callback else []))
        assert decode.evaluations == 4 * with_callback and module.drafter.training
        found.append((weights_of(module), states()))
    (plain, before), (evaluated, after) = found
    assert same(plain, evaluated) and before == after


@pytest.mark.field("F54")
def test_it_restores_modes_and_every_random_state() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    module[1].eval()
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    with pytest.raises(RuntimeError), undisturbed(module):
        module.eval()
        torch.rand(3), np.random.rand(3), random.random(), torch.manual_seed(7)
        raise RuntimeError
    assert module.training and module[0].training and not module[1].training
    assert torch.equal(states[0], torch.get_rng_state()) and random.getstate() == states[2]
    assert (np.random.get_state()[1] == states[1]).all()  # type: ignore[index]


@pytest.mark.field("F46", "F48")
def test_it_logs_what_decoding_measures(
    target: Target, data: ConversationData, held_out: ConversationData
) -> None:
    module, stream = module_for(data, target, max_steps=4)
    decode = callback(module, target, data, held_out)
    logger = Memory()
    fit(module, stream, decode, logger=logger)
    assert list(logger.values("val/tau")) == [2, 4] and list(logger.values("val/speedup")) == [4]
    plan = decode.plans["tree"]
    tally = measure_acceptance(
        target,
        module.drafter.at(torch.float32),
        data.set.prompts()[:3],
        plan,
        max_new_tokens=8,
        batch=2,
    ).tally
    last = {
        name: values[4] for name in dict(logger.rows[-1][1]) if 4 in (values := logger.values(name))
    }
    assert last["val/tau"] == tally.tau == decode.tau
    assert last["val/accepted_per_round"] == tally.accepted_per_round
    for k, (value, count) in enumerate(zip(tally.accept_at, tally.offered, strict=True), start=1):
        assert last.get(f"val/accept@{k}") == value and last.get(f"val/accept@{k}_count") == (
            count or None
        )
    assert {
        "val/chain/tau",
        "val/seconds_draft",
        "val/seconds_verify",
        "val/seconds_prefill",
    } <= set(last)
    assert all(math.isfinite(value) for _, row in logger.rows for value in row.values())


def test_sim_tau_counts_runs_of_right_guesses(
    target: Target, data: ConversationData, held_out: ConversationData
) -> None:
    module, stream = module_for(data, target, max_steps=12, optim={"schedule": "constant"})
    fit(module, stream)
    decode = callback(module, target, data, held_out)
    assert decode.sim is not None
    found = decode.sim.measure(module.drafter, 2, module.device)
    runs, right, starts = 0, 0, 0
    for i in range(3):
        batch = held_out.batch([i])
        guesses = module.drafter.guesses(batch, decode.sim.source.features(batch))
        assert guesses is not None
        hits = [
            bool(m) and int(g) == int(x)
            for g, x, m in zip(
                guesses[0, :, 0], batch.input_ids[0], batch.loss_mask[0], strict=True
            )
        ]
        for t, supervised in enumerate(batch.loss_mask[0].tolist()):
            if supervised:
                starts += 1
                right += hits[t]
                run = hits[t : t + 2] + [False]
                runs += run.index(False)
    assert 0 < right < starts
    assert found["sim/forced_tau"] == pytest.approx(1 + runs / starts)
    assert found["sim/accuracy"] == pytest.approx(right / starts)
    assert found["sim/loss"] is not None and found["sim/loss"] > 0


@pytest.mark.field("F49")
def test_nothing_to_evaluate_is_not_available(target: Target, data: ConversationData) -> None:
    for settings in ({"prompts": 0}, {"max_new_tokens": 1}):
        module, stream = module_for(data, target, max_steps=2)
        decode = callback(module, target, data, None, speed_prompts=0, **settings)
        logger = Memory()
        fit(module, stream, decode, logger=logger)
        assert decode.evaluations == 1 and decode.tau is None
        assert not logger.values("val/tau") and not logger.values("sim/forced_tau")
        assert all(math.isfinite(value) for _, row in logger.rows for value in row.values())


@pytest.mark.field("F49")
def test_fewer_prompts_than_the_batch(target: Target, data: ConversationData) -> None:
    module, stream = module_for(data, target, max_steps=2)
    decode = callback(module, target, data, None, prompts=1, batch=8)
    fit(module, stream, decode)
    assert decode.tau is not None and decode.tau >= 1


def test_tallies_travel_completely() -> None:
    tally, seconds = Tally(5, 20, 7, 12, offered=[5, 3], kept=[3, 1]), {"draft": 0.5, "host": 0.25}
    found = Evaluated([tally, Tally()], seconds, 1)
    back = _over_processes(found, 2, Plan(Tree.chain(4)), torch.device("cpu"))
    assert back.differs == 1 and back.tallies[1] == Tally(offered=[0] * 4, kept=[0] * 4)
    assert back.seconds == {"prefill": 0.0, "draft": 0.5, "verify": 0.0, "host": 0.25}
    (back, _) = back.tallies
    assert (back.rounds, back.drafted, back.accepted, back.emitted) == (5, 20, 7, 12)
    assert back.offered == [5, 3, 0, 0] and back.kept == [3, 1, 0, 0]


def test_a_tally_is_that_of_its_own_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two processes measures every second prompt."""
    monkeypatch.setattr("drafttrain.training.decode_callback.rank", lambda: 1)
    monkeypatch.setattr("drafttrain.training.decode_callback.world_size", lambda: 2)
    found = Evaluated([Tally(5, 20, 7, 12)], {}, None)
    back = _over_processes(found, 3, Plan(Tree.chain(1)), torch.device("cpu"))
    assert back.counts == [(0, 0), (12, 5), (0, 0)]


def test_other_prompts_limits_and_trees_are_not_compared(
    target: Target, data: ConversationData
) -> None:
    module, _ = module_for(data, target)
    first, same, fewer, shorter, other = (
        callback(module, target, data, None, **settings)
        for settings in ({}, {}, {"prompts": 1}, {"max_new_tokens": 5}, {})
    )
    other.plans.pop("tree")
    assert first.measures == same.measures
    assert len({one.measures for one in (first, fewer, shorter, other)}) == 4


# Acceptance on kept answers -----------------------------------------------------------------------
def replaying(
    target: Target, data: ConversationData, **settings: Any
) -> tuple[DraftModule, Any, DecodeCallback, list[str]]:
    said: list[str] = []
    module, stream = module_for(data, target, max_steps=4)
    decode = callback(module, target, data, None, speed_prompts=0, checked=2, **settings)
    prompts = data.set.prompts()
    known = asked_replays(target, prompts, 8, None, rows=data.set, say=said.append)
    decode.speculator.replays = known
    return module, stream, decode, said


def test_replayed_evaluations_count_what_decoding_counts(
    target: Target, data: ConversationData
) -> None:
    rows = []
    for kept in (True, False):
        module, stream, decode, said = replaying(target, data)
        if not kept:
            decode.speculator.replays = None
        logger = Memory()
        fit(module, stream, decode, logger=logger)
        names = ("val/tau", "val/tau_low", "val/tau_high", "val/rounds", "val/accept@1")
        rows.append({name: logger.values(name) for name in names})
        assert bool(logger.values("val/seconds_draft")) is not kept
        assert set(logger.values("val/replay_differs").values()) == ({0.0} if kept else set())
        assert len(said) == kept
    assert rows[0] == rows[1] and rows[0]["val/tau"]


def test_prompts_that_count_otherwise_are_counted(
    target: Target, data: ConversationData, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, stream, decode, _ = replaying(target, data)
    replays = decode.speculator.replays
    assert replays is not None
    # An answer that is not the target's: its second token is another.
    wrong = {
        prompt: dataclasses.replace(a, ids=(a.ids[0], (a.ids[1] + 1) % 300, *a.ids[2:]))
        for prompt, a in replays.answers.items()
    }
    decode.speculator.replays = Replays(target, lambda: wrong)
    logger = Memory()
    fit(module, stream, decode, logger=logger)
    assert set(logger.values("val/replay_differs").values()) == {2.0}


def test_other_prompts_are_checked_at_every_evaluation(
    target: Target, data: ConversationData
) -> None:
    _, _, decode, _ = replaying(target, data)
    taken = []
    for number in range(3):
        decode.evaluations = number
        taken += decode._checked(3)
    assert taken == [0, 1, 0, 2, 1, 2]


def test_all_prompts_are_taken_where_none_are_named(target: Target, data: ConversationData) -> None:
    module, _ = module_for(data, target)
    decode = callback(module, target, data, None, prompts=None)
    prompts = [[1]] * 40
    assert len(measured(prompts, decode.speculator, decode.config)) == 16
    decode.speculator.replays = Replays(target, dict)
    assert len(measured(prompts, decode.speculator, decode.config)) == 40
