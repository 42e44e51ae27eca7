"""Acceptance computed on sampled texts is that of decoding, for every exact rule; what cannot be
computed is refused in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

from drafttrain.decoding.measure import measure_acceptance
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.simulated import cannot, simulate
from drafttrain.decoding.texts import KeptText, sampled_texts
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.early_exit import EarlyExit
from drafttrain.drafter.ensemble import Ensemble
from drafttrain.drafter.medusa import Medusa
from drafttrain.drafter.ngram import NGram
from drafttrain.drafter.ssm import Ssm
from drafttrain.drafter.suffix import Suffix
from drafttrain.errors import InputError
from drafttrain.nn.sampling import Chance, Policy
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Tree
from tests.decoding.models import SMALL
from tests.drafter.make import make

LIMIT, STOP, COUNT = 10, (5,), 400
PROMPTS = [[1 + i % 7, i // 7 % 8, i // 56 % 8, 3] for i in range(COUNT)]


@lru_cache
def target() -> Target:
    return load.tiny(**SMALL)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "eagle1": lambda: make(Eagle1, target()),
    "ssm": lambda: make(Ssm, target(), layers=[0]),
    "medusa": lambda: make(Medusa, target()),
    "ngram": lambda: make(NGram, target()),
    "ensemble": lambda: Ensemble(
        target(), members=[make(Ssm, target(), layers=[0]), make(NGram, target())]
    ),
}


@lru_cache
def drafter(name: str) -> Drafter:
    torch.manual_seed(0)
    return DRAFTERS[name]().eval()


@lru_cache
def texts_of(policy: Policy, count: int = COUNT) -> list[KeptText]:
    return sampled_texts(
        target(), PROMPTS[:count], policy, max_new_tokens=LIMIT, batch=200, stop_ids=STOP
    )


T, FORK = Policy(1.0), Tree.expansion([2, 2])
IRREGULAR = Tree.from_paths([[0], [1], [2], [0, 0], [0, 0, 0], [1, 0], [1, 1]])
DRAWN = {
    "ratio": Plan(Tree.chain(3), T, rule="ratio"),
    "block": Plan(Tree.chain(3), T),
    "block, by confidence": Plan(Confident(k=3, stop_below=0.3), T),
    "without replacement": Plan(Tree.expansion([3, 2, 1]), Policy(0.7)),
    "without replacement, filtered": Plan(FORK, Policy(1.0, 6, 0.95)),
    "without replacement, irregular": Plan(IRREGULAR, T),
    "k_seq": Plan(Tree.expansion([3, 2]), T, rule="k_seq"),
    "drawn and matched": Plan(FORK, T, rule="sample_and_match", sampled=True),
}
LIKELY = {
    "one_hot": Plan(FORK, T, sampled=False),
    "one_hot, a chain": Plan(Tree.chain(3), T, sampled=False),
    "one_hot, dynamic": Plan(Dynamic(depth=3, top_k=2, total=5), T),
    "sample_and_match": Plan(IRREGULAR, T, rule="sample_and_match"),
}
CASES = [(name, plan) for name in ("eagle1", "ssm", "medusa") for plan in (*DRAWN, *LIKELY)]
CASES += [("ngram", "one_hot"), ("ngram", "sample_and_match"), ("ensemble", "one_hot")]
CASES += [("ensemble", "drawn and matched")]


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_computed_acceptance_is_that_of_decoding(name: str, plan: str) -> None:
    asked = {**DRAWN, **LIKELY}[plan]
    common = {"max_new_tokens": LIMIT, "batch": 200}
    found = simulate(target(), drafter(name), texts_of(asked.policy), asked, **common)
    decoded = measure_acceptance(
        target(), drafter(name), PROMPTS, asked, seed=7, stop_ids=STOP, **common
    )
    assert found.impossible == 0
    compare(
        [(text.emitted, text.rounds) for text in found.texts],
        [(tally.emitted, tally.rounds) for tally in decoded.tallies],
    )
    for k in range(asked.tree.max_depth):
        compare(
            [(text.kept[k], text.offered[k]) for text in found.texts],
            [((*t.kept, 0, 0, 0)[k], (*t.offered, 0, 0, 0)[k]) for t in decoded.tallies],
        )
        if k == 0:
            rounds = decoded.tally.rounds
            offered = sum(text.offered[0] for text in found.texts) / found.rounds
            assert offered == pytest.approx(decoded.tally.offered[0] / rounds, abs=0.03)


def compare(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> None:
    """Two ratios of sums over texts agree within 4 standard deviations of their difference."""
    (a, room), (b, more) = (ratio(np.array(pairs, dtype=float)) for pairs in (ours, theirs))
    if a is not None and b is not None:
        assert abs(a - b) <= 4 * np.hypot(room, more) + 1e-9, (a, room, b, more)


def ratio(pairs: np.ndarray) -> tuple[float | None, float]:
    """A ratio of sums and its standard deviation; None where less than 100 are counted."""
    above, below = pairs.T
    if below.sum() < 100:
        return None, 0.0
    value = above.sum() / below.sum()
    return value, float(np.sqrt(((above - value * below) ** 2).sum()) / below.sum())


def test_what_is_computed_varies_less_than_what_is_decoded() -> None:
    """The same texts' accept@1: chances in place of kept or not."""
    plan, common = DRAWN["ratio"], {"max_new_tokens": LIMIT, "batch": 200}
    found = simulate(target(), drafter("medusa"), texts_of(T), plan, **common)
    decoded = measure_acceptance(
        target(), drafter("medusa"), PROMPTS, plan, seed=7, stop_ids=STOP, **common
    )
    assert found.accept_at_interval[0] is not None and decoded.accept_at_interval[0] is not None
    ours, theirs = (np.ptp(one.accept_at_interval[0]) for one in (found, decoded))
    assert ours < theirs / 2


@pytest.mark.parametrize("plan", ["block", "without replacement, irregular", "drawn and matched"])
def test_a_text_counts_the_same_in_every_batch(plan: str) -> None:
    asked = DRAWN[plan]
    texts = texts_of(T)[:9]
    one, five = (
        simulate(target(), drafter("eagle1"), texts, asked, max_new_tokens=LIMIT, batch=batch)
        for batch in (1, 5)
    )
    for ours, theirs in zip(one.texts, five.texts, strict=True):
        assert ours.rounds == pytest.approx(theirs.rounds, rel=1e-4)
        assert ours.kept == pytest.approx(theirs.kept, rel=1e-4, abs=1e-6)
        assert ours.offered == pytest.approx(theirs.offered, rel=1e-4, abs=1e-6)


def test_what_is_drawn_does_not_know_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one seed, a text's numbers are never those that its siblings are drawn with."""
    used: list[set[int]] = []
    seeded = Chance.seeded

    def watched(seed: int, rows: Sequence[int]) -> Chance:
        used.append(set(rows))
        return seeded(seed, rows)

    monkeypatch.setattr(Chance, "seeded", watched)
    texts = sampled_texts(target(), PROMPTS[:4], T, max_new_tokens=4, batch=2)
    asked = DRAWN["without replacement, irregular"]
    simulate(target(), drafter("eagle1"), texts, asked, max_new_tokens=4, batch=2)
    assert used[:2] == [{0, 1}, {2, 3}] and len(used) == 4
    assert not (used[0] | used[1]) & (used[2] | used[3])


def test_few_probabilities_at_a_time_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, texts = DRAWN["block"], texts_of(T)[:5]
    common = {"max_new_tokens": LIMIT, "batch": 5}
    wanted = simulate(target(), drafter("eagle1"), texts, plan, **common).tau
    monkeypatch.setattr("drafttrain.decoding.simulated._AT_ONCE", 1)
    assert simulate(target(), drafter("eagle1"), texts, plan, **common).tau == pytest.approx(wanted)


def test_texts_that_end_at_once_have_no_rounds() -> None:
    texts = [replace(text, answer=text.answer[:1]) for text in texts_of(T)[:3]]
    found = simulate(target(), drafter("eagle1"), texts, DRAWN["block"], max_new_tokens=LIMIT)
    assert found.tau is None and found.rounds == 0 and found.accept_at == [None] * 3
    assert found.row()["sim/tau_interval"] is None


def test_a_drafter_that_remembers_has_the_texts_of_the_batches_before() -> None:
    """Each text comes twice: in a later batch all of it can be copied."""
    copies = make(Suffix, target(), remember=4000)
    texts = [text for text in texts_of(T)[:30] if len(text.answer) == LIMIT][:6]
    common = {"max_new_tokens": LIMIT}
    after = simulate(target(), copies, texts * 2, LIKELY["one_hot, a chain"], batch=6, **common)
    at_once = simulate(target(), copies, texts * 2, LIKELY["one_hot, a chain"], batch=12, **common)
    first, second = (sum(text.rounds for text in after.texts[i : i + 6]) for i in (0, 6))
    assert second < 0.7 * first
    assert at_once.rounds == pytest.approx(2 * first)


def test_the_rows_name_what_is_computed() -> None:
    row = simulate(
        target(), drafter("eagle1"), texts_of(T)[:4], DRAWN["ratio"], max_new_tokens=LIMIT
    ).row()
    assert {"sim/tau", "sim/tau_interval", "sim/accept@1", "sim/accept@3", "sim/rounds"} <= set(row)
    assert "tau" not in row and row["rule"] == "ratio" and row["texts"] == 4
    assert row["sim/tau"] == pytest.approx(1 + row["sim/accepted_per_round"], abs=0.5)


REFUSED: dict[str, tuple[str, Plan, str]] = {
    "an approximate rule": ("eagle1", Plan(FORK, T, rule="typical"), "typical writes other texts"),
    "temperature 0": ("eagle1", Plan(FORK), "temperature 0"),
    "a policy that reads": ("eagle1", Plan(FORK, Policy(1.0, repetition_penalty=2.0)), "reads the"),
    "several drafters": ("ensemble", Plan(FORK, T), "Ensemble draws drafts in a way of its own"),
    "no drafts": ("eagle1", Plan(Tree.chain(0), T), "drafts nothing"),
    "a rule for chains": ("eagle1", Plan(FORK, T, rule="block"), "judges a chain"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_is_refused(name: str) -> None:
    who, plan, words = REFUSED[name]
    with pytest.raises(InputError, match=words):
        simulate(target(), drafter(who), texts_of(T)[:2], plan, max_new_tokens=LIMIT)


def test_a_part_of_the_target_is_refused() -> None:
    inside = make(EarlyExit, target())
    assert "own cache" in str(cannot(Plan(FORK, T, sampled=False), inside))


def test_texts_that_cannot_serve_are_refused() -> None:
    texts, plan = texts_of(T)[:4], DRAWN["block"]

    def refused(changed: list[KeptText], words: str, limit: int = LIMIT) -> None:
        with pytest.raises(InputError, match=words):
            simulate(target(), drafter("eagle1"), changed, plan, max_new_tokens=limit)

    long = next(i for i, text in enumerate(texts) if len(text.answer) > 3)
    refused(texts, f"text {long} .*max_new_tokens is 3", limit=3)
    cut = replace(texts[long], hidden=texts[long].hidden[:5])
    refused([cut], "features of 5 tokens")
    refused([replace(texts[0], prompt=[])], "no prompt")
    spoilt = replace(texts[long], hidden=texts[long].hidden * torch.nan)
    refused([texts[0], spoilt], "text 1")
    layered = make(Eagle1, target())
    layered.needs = replace(layered.needs, layers=(1,))
    with pytest.raises(InputError, match=r"layers \[1\].*keep them"):
        simulate(target(), layered, texts, plan, max_new_tokens=LIMIT)


def test_texts_of_another_policy_are_noticed() -> None:
    """At top_k 2 most of their tokens have probability 0."""
    plan = Plan(Tree.chain(3), Policy(1.0, top_k=2))
    with pytest.raises(InputError, match="not sampled by this target with these settings"):
        simulate(target(), drafter("eagle1"), texts_of(T)[:20], plan, max_new_tokens=LIMIT)


def test_scores_that_are_no_numbers_are_named() -> None:
    spoilt = make(Eagle1, target()).eval()
    with torch.no_grad():
        next(spoilt.parameters()).fill_(torch.nan)
    for plan in (DRAWN["block"], LIKELY["one_hot"]):
        with pytest.raises(InputError, match="Eagle1"):
            simulate(target(), spoilt, texts_of(T)[:2], plan, max_new_tokens=LIMIT)


def test_layers_are_kept_with_their_text() -> None:
    [text] = sampled_texts(target(), PROMPTS[:1], T, max_new_tokens=4, layers=(0,), stop_ids=())
    ids = torch.tensor([text.ids])
    features = target().features(ids, torch.tensor([8]), replace(_all(), layers=(0,)))
    assert text.prompt == PROMPTS[0] and len(text.answer) == 4
    assert torch.allclose(text.layers[0], features.layers[0][0])
    assert features.last_hidden is not None
    assert torch.allclose(text.hidden, features.last_hidden[0])


def _all():
    return make(Eagle1, target()).needs
