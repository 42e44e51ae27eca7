"""The search for what selfspec leaves out: the best of its own trials, the same for the same seed,
on training prompts."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from drafttrain.data.conversations import HELD_OUT
from drafttrain.data.datamodule import ConversationData
from drafttrain.decoding.measure import measure_acceptance
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.selfspec import SelfSpec
from drafttrain.errors import InputError
from drafttrain.flow import Tally
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.training.skips import (
    SkipSearch,
    first_guesses,
    harm,
    prompts_of,
    texts_of,
    tokens_per_cost,
)
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters
from tests.messages import said
from tests.training.parts import write_tiny_set

SETTINGS: dict[str, Any] = {
    "trials": 12,
    "prompts": 3,
    "max_new_tokens": 10,
    "batch": 2,
    "objective": "cost",
    "first_tokens": 24,
}
TREE = Tree.chain(2)


@pytest.fixture(scope="module")
def target() -> Target:
    return load.tiny(layers=4)


@pytest.fixture(scope="module")
def data(target: Target, tmp_path_factory: pytest.TempPathFactory) -> ConversationData:
    return ConversationData(
        write_tiny_set(target, tmp_path_factory.mktemp("set"), rows=10, held_out=3), labels="all"
    )


@pytest.fixture
def search() -> SkipSearch:
    pytest.importorskip("optuna")
    return SkipSearch(**SETTINGS)


def test_the_best_of_its_trials_is_chosen(
    target: Target, data: ConversationData, search: SkipSearch
) -> None:
    drafter = drafters.make(SelfSpec, target, skip_attention=[3], draft_ids=list(range(0, 320, 2)))
    found = search.run(drafter, TREE, data, seed=3)
    assert len(found.trials) == 12 and found.trials[0].choice == ((3,), ())
    assert (
        found.best.value
        == max(trial.value for trial in found.trials)
        > min(trial.value for trial in found.trials)
    )
    assert (
        tuple(found.drafter.config.skip_attention),
        tuple(found.drafter.config.skip_mlp),
    ) == found.best.choice
    assert found.drafter.choices == 160 and not found.drafter.training
    prompts = prompts_of(data, 3, 400)
    for trial in found.trials[:4]:
        again = drafters.make(
            SelfSpec,
            target,
            skip_attention=trial.choice[0],
            skip_mlp=trial.choice[1],
            draft_ids=drafter.draft_ids,
        )
        tally = measure_acceptance(
            target, again, prompts, Plan(TREE), max_new_tokens=10, batch=2
        ).tally
        assert trial.tau == tally.tau and trial.value == tokens_per_cost(tally, TREE, again.share)
    row = found.row()
    assert row["best"] == {
        "skip_attention": list(found.best.choice[0]),
        "skip_mlp": list(found.best.choice[1]),
        "value": found.best.value,
        "tau": found.best.tau,
    }
    assert (row["trials"], row["objective"], row["prompts"]) == (12, "cost", 3)


def test_the_same_seed_tries_the_same(
    target: Target, data: ConversationData, search: SkipSearch
) -> None:
    drafter = drafters.make(SelfSpec, target)
    few = replace(search, prompts=1, max_new_tokens=4, first_tokens=0, trials=14)
    once, again, other = (few.run(drafter, TREE, data, seed=seed).trials for seed in (0, 0, 1))
    assert once == again != other
    assert len({trial.choice for trial in once}) > 5


def test_speed_is_tokens_a_second(
    target: Target, data: ConversationData, search: SkipSearch
) -> None:
    began = time.perf_counter()
    found = replace(search, objective="speed", trials=2, prompts=2, first_tokens=0).run(
        drafters.make(SelfSpec, target), TREE, data
    )
    slowest = 2 * 10 / (time.perf_counter() - began)
    assert found.trials[0].tau == TREE.max_depth + 1 and all(
        trial.value > slowest for trial in found.trials
    )
    assert found.best.value == max(trial.value for trial in found.trials)


def test_prompts_are_those_of_training_rows_that_fit(data: ConversationData) -> None:
    held_out = {tuple(prompt) for prompt in data.set.prompts()}
    assert len(held_out) == len(data.set.indices(HELD_OUT)) == 3
    found = prompts_of(data, 5, 8)
    assert (
        found and not held_out & {tuple(prompt) for prompt in found} and max(map(len, found)) <= 8
    )
    for prompt in found:
        assert any(
            data.row(place)[0].tolist()[: len(prompt)] == prompt for place in range(len(data))
        )
    assert len(prompts_of(data, 2, 100)) == 2 and len(prompts_of(data, 100, 100)) == len(data) == 7
    with pytest.raises(InputError, match=said("training.no_room")):
        prompts_of(data, 5, 3)
    texts = texts_of(data, 40)
    assert sum(text.shape[1] for text in texts) == 40 and len(texts) == 2


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_harm_is_the_divergence_of_the_target_without_a_part(family: str) -> None:
    target = load.tiny(family=family)
    texts = [torch.arange(3, 12)[None], torch.arange(40, 45)[None]]
    found = harm(target, texts)
    assert found.keys() == {(part, layer) for part in ("attention", "mlp") for layer in range(3)}
    with torch.no_grad():
        complete = [target.model(input_ids=text).logits[0].log_softmax(-1) for text in texts]
        silent = {
            "attention": ("self_attn.o_proj", "attention.dense"),
            "mlp": ("mlp.down_proj", "mlp.dense_4h_to_h"),
        }
        for (part, layer), value in found.items():
            lacking = load.tiny(family=family)
            for name, module in lacking.decoder_layers[layer].named_modules():
                if name in silent[part]:
                    for parameter in module.parameters():
                        parameter.zero_()
            expected = 0.0
            for text, log_p in zip(texts, complete, strict=True):
                log_q = lacking.model(input_ids=text).logits[0].log_softmax(-1)
                expected += float((log_p.exp() * (log_p - log_q)).sum())
            assert value == pytest.approx(expected, rel=1e-3) and value > 0


def test_first_guesses_leave_out_what_harms_least() -> None:
    harms = {
        (part, layer): float(10 * layer + (part == "mlp"))
        for part in ("attention", "mlp")
        for layer in range(10)
    }
    guesses = first_guesses(harms, 10)
    assert (
        guesses[0] == ((0,), (0,))
        and guesses[1] == ((0, 1), (0, 1))
        and guesses[-1] == (tuple(range(6)), tuple(range(6)))
    )
    assert len(guesses) == 6
    assert first_guesses({("attention", 0): 1.0, ("mlp", 0): 2.0}, 1) == [((0,), ())]


def test_tokens_per_cost() -> None:
    tally = Tally(rounds=10, drafted=30, accepted=20, emitted=30)
    assert tokens_per_cost(tally, Tree.chain(3), 0.5) == 30 / (10 + 30 * 0.5)
    assert tokens_per_cost(tally, Tree.expansion([2, 2]), 0.5) == 30 / (10 + 20 * 0.5)
    assert tokens_per_cost(tally, Dynamic(depth=2, top_k=2, total=4), 0.25) == 30 / (10 + 20 * 0.25)
    assert tokens_per_cost(tally, Confident(k=5, stop_below=0.5), 0.5) == 30 / (10 + 40 * 0.5)
    assert tokens_per_cost(
        replace(tally, drafted=50), Confident(k=5, stop_below=0.5), 0.5
    ) == 30 / (10 + 50 * 0.5)
    assert tokens_per_cost(Tally(rounds=7, emitted=7), Tree.chain(0), 0.5) == 1.0, "plain decoding"
    assert tokens_per_cost(Tally(), Tree.chain(2), 0.5) == 0.0


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"trials": 0}, r"search\.trials=0"),
        ({"prompts": 1.5}, r"search\.prompts=1\.5"),
        ({"max_new_tokens": 1}, r"search\.max_new_tokens=1"),
        ({"batch": True}, r"search\.batch=True"),
        ({"first_tokens": -1}, r"search\.first_tokens=-1"),
        ({"objective": "tau"}, r"search\.objective=tau"),
    ],
)
def test_bad_settings_are_refused(changed: dict[str, Any], fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        SkipSearch(**SETTINGS | changed)


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "optuna" else find(name, *more),
    )
    with pytest.raises(InputError, match=said("training.needs_optuna")):
        SkipSearch(**SETTINGS)


def test_other_drafters_are_refused(search: SkipSearch) -> None:
    search.check(SelfSpec)
    with pytest.raises(InputError, match=said("training.nothing_left_out")):
        search.check(Eagle1)
