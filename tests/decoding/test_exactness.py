"""The exactness check: right rules pass, wrong ones are found, and its numbers are what they are
called."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats

from drafttrain.decoding import exactness, rules
from drafttrain.decoding.exactness.cells import LEAST_CELL, Cells
from drafttrain.decoding.exactness.chi_square import (
    POWER,
    critical,
    fit_of,
    holm,
    noticed_distance,
    power,
    tail,
)
from drafttrain.decoding.exactness.distribution import CONTROL, SharedPrompt, same_distribution
from drafttrain.decoding.exactness.greedy import gap_of, same_text
from drafttrain.decoding.exactness.logits import last_logits
from drafttrain.decoding.exactness.verdict import judged
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.speculator import Speculator
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.errors import InputError
from drafttrain.flow import Acceptance
from drafttrain.nn.sampling import Policy, draw
from drafttrain.target import load
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters

WARM = Policy(1.0)
PROMPTS = [[3, 5, 7, 2, 4], [6, 2, 7], [5, 4, 3, 2]]
PLANS = {
    "chain": Plan(Tree.chain(3), WARM),
    "block": Plan(Tree.chain(2), WARM, rule="block"),
    "tree": Plan(Tree.expansion([2, 2]), Policy(1.0)),
    "filtered": Plan(Tree.chain(2), Policy(0.9, 6, 0.9)),
    "typical": Plan(Tree.chain(2), WARM, rule="typical"),
}
COMMON = {"draws": 1600, "places": 2, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def speculator():
    target = load.tiny(vocab_size=24)
    torch.manual_seed(0)
    return Speculator(
        target, drafters.make(Eagle1, target).eval(), Plan(Tree.chain(3)), dtype="float32"
    )


@pytest.fixture(scope="module")
def found(speculator):
    greedy = {"greedy chain": Plan(Tree.chain(4)), "greedy tree": Plan(Tree.eagle1_static())}
    return exactness.check(
        speculator, PROMPTS, {**greedy, **PLANS, "plain": Plan(Tree.chain(0))}, **COMMON
    )


def test_right_rules_pass_and_the_control_is_noticed(found):
    assert [row["verdict"] for row in found["greedy"]] == ["identical"] * 2
    assert all(row["same"] == 2 and row["tokens"] > 4 for row in found["greedy"])
    verdicts = {row["label"]: row["verdict"] for row in found["law"]}
    control = f"T=1 {CONTROL}"
    assert verdicts == {
        **dict.fromkeys(("chain", "block", "tree", "filtered"), "no difference found"),
        "typical": "differs, as is expected of an approximate rule",
        control: "noticed, as it should be",
        control.replace("=1", "=0.9"): "noticed, as it should be",
    }
    for row in found["law"]:
        assert (
            row["draws"] == 1600
            and row["df"] == row["cells"] - row["prompts"]
            and row["prompts"] == 2
        )
        assert (
            row["false_alarm"] == exactness.FALSE_ALARM / 4 and 0.04 < row["noticed_distance"] < 0.1
        )
        assert row["p_corrected"] >= row["p"] and (row["outside"] == 0 or row["control"])
    said = " ".join(exactness.words(found))
    assert "2 of 2 ways of drafting wrote plain decoding's text" in said
    assert (
        "no difference from the target's distribution found in 4 ways of drafting; a difference of "
        "more than 0.0" in said
    )
    assert "90% probability" in said and "DIFFERS" not in said and "WEAK" not in said
    assert said.count("a decoder that keeps every draft was noticed") == 2


def resampled_from_p(p, proposal, u):
    """Mistake: after a refusal the correction is drawn from p, not from the residual."""
    right = rules.ratio(p, proposal, u)
    return Acceptance(right.path, right.count, draw(p[torch.arange(len(p)), right.count], u[:, -1]))


def test_a_planted_wrong_rule_is_found(speculator, monkeypatch):
    monkeypatch.setitem(rules.RULES, "ratio", resampled_from_p)
    plans = {"chain": dataclasses.replace(PLANS["chain"], rule="ratio"), "block": PLANS["block"]}
    found = exactness.check(speculator, PROMPTS, plans, **COMMON)
    wrong, right, _ = found["law"]
    assert wrong["verdict"] == "DIFFERS" and right["verdict"] == "no difference found"
    lines = exactness.words(found)
    assert any(line.startswith("chain: DIFFERS from the target's distribution") for line in lines)
    assert not any("no difference" in line for line in lines)


def test_wrong_greedy_text_is_shown_with_its_gap(speculator, monkeypatch):
    right = rules.greedy

    def next_but_one(best, proposal):
        """Mistake: the token after the accepted drafts is another one than the target's; plain
        decoding is spared."""
        answer = right(best, proposal)
        return Acceptance(answer.path, answer.count, (answer.next_token + (proposal.size > 0)) % 24)

    monkeypatch.setattr(rules, "greedy", next_but_one)
    (row,) = same_text(speculator, PROMPTS, {"chain": Plan(Tree.chain(2))}, max_new_tokens=8)
    assert row["verdict"] == "DIFFERS" and row["same"] == 0 and row["tokens"] >= 2 * len(PROMPTS)
    for difference in row["differences"]:
        assert difference["place"] >= 1 and difference["drafted"] == (difference["plain"] + 1) % 24
        assert difference["gap"] > 2 * difference["rounding"] and not difference["near_tie"]


@pytest.mark.field("F52")
def test_rounding_is_kept_apart_from_a_difference(speculator):
    target, ids = speculator.target, PROMPTS[0]
    logits = last_logits(target, [ids])[0]
    best, second = logits.topk(2).indices.tolist()
    far = gap_of(target, ids, best, second)
    assert not far["near_tie"] and far["gap"] == pytest.approx(float(logits[best] - logits[second]))
    assert far["rounding"] < 1e-4
    weight = target.output.weight
    kept = weight[second].clone()
    weight.data[second] = weight[best]
    near = gap_of(target, ids, best, second)
    weight.data[second] = kept
    assert near["near_tie"] and abs(near["gap"]) <= 2 * near["rounding"]
    row = {
        "label": "x",
        "verdict": "DIFFERS",
        "tokens": 1,
        "differences": [{"prompt": 0, "place": 4, **far}],
    }
    said = exactness.words({"greedy": [row], "law": []})[1]
    assert (
        said.startswith(f"x: DIFFERS: prompt 0, token 5: {best} plainly, {second} with drafts")
        and "no near-tie" in said
    )
    assert gap_of(target, ids, best, None)["near_tie"] is False


@pytest.mark.field("F70")
def test_passes_that_compute_another_thing_are_no_rounding(speculator, monkeypatch):
    """A target whose cached pass is off by far more than numbers are rounded by, as one with a
    table of positions for each length."""
    target, ids = speculator.target, PROMPTS[0]
    real = type(target).step

    def other(self, *given, **more):
        found = real(self, *given, **more)
        return dataclasses.replace(found, hidden=found.hidden * 0.7)

    best, second = last_logits(target, [ids])[0].topk(2).indices.tolist()
    monkeypatch.setattr(type(target), "step", other)
    found = gap_of(target, ids, best, second)
    assert not found["near_tie"] and found["rounding"] < 1e-3


def test_cells_are_the_targets_distribution(speculator):
    """Brute force: all sequences of three tokens, their probability by plain passes, added up by
    cell."""
    target, prompt = speculator.target, PROMPTS[0]
    for policy in (WARM, Policy(0.7, 5, 0.9)):
        cells = Cells.of(target, prompt, policy, 1000)
        prefixes, joint = [()], torch.ones(1, dtype=torch.float64)
        for _ in range(3):
            probs = policy.probs(
                last_logits(target, [[*prompt, *prefix] for prefix in prefixes])
            ).double()
            joint = (joint[:, None] * probs).flatten()
            prefixes = [(*prefix, token) for prefix in prefixes for token in range(24)]
        summed = torch.zeros_like(cells.probs)
        for prefix, mass in zip(prefixes, joint.tolist(), strict=True):
            cell, never = cells.place(prefix)
            summed[cell] += mass
            assert not (never and mass)
        torch.testing.assert_close(summed, cells.probs, rtol=0, atol=1e-6)
        assert float(cells.probs.sum()) == pytest.approx(1) and 4 <= len(cells.probs) <= 10
        first = policy.probs(last_logits(target, [prompt]))[0].max()
        assert float(cells.probs[1:].min()) >= max(0.01, LEAST_CELL * float(first)) - 1e-6
        assert {prefix[:1] for prefix in cells.tables if prefix} == {
            (int(joint.reshape(24, -1).sum(1).argmax()),)
        }


def test_a_shared_prompt_changes_nothing(speculator):
    shared, plan = SharedPrompt(speculator.target), PLANS["tree"]
    rows = [PROMPTS[0]] * 6
    ours, _ = decode(shared, speculator.drafter, rows, plan, max_new_tokens=6, seed=3)
    theirs, _ = decode(speculator.target, speculator.drafter, rows, plan, max_new_tokens=6, seed=3)
    assert [output.ids for output in ours] == [output.ids for output in theirs]
    mixed, _ = decode(shared, speculator.drafter, PROMPTS, plan, max_new_tokens=6, seed=3)
    apart, _ = decode(
        speculator.target, speculator.drafter, PROMPTS, plan, max_new_tokens=6, seed=3
    )
    assert [output.ids for output in mixed] == [output.ids for output in apart]


def test_chi_square_agrees_with_scipy():
    for df, x in ((1, 0.3), (7, 20.0), (40, 90.0)):
        assert tail(x, df) == pytest.approx(stats.chi2.sf(x, df), rel=1e-9)
        assert critical(df, 0.003) == pytest.approx(stats.chi2.isf(0.003, df), rel=1e-9)
        expected = stats.ncx2.sf(stats.chi2.isf(0.003, df), df, x)
        assert power(df, x, 0.003) == pytest.approx(expected, rel=1e-6)
    assert power(5, 0.0, 0.01) == pytest.approx(0.01)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


def test_power_and_false_alarms_agree_with_simulation():
    """At the distance that is promised, the least favourable difference is noticed about as often
    as is said."""
    n, probs = 2000, np.array([0.25, 0.2, 0.15, 0.15, 0.125, 0.125])
    draws = np.random.default_rng(0)
    df, alarm = 5, 0.01
    distance = noticed_distance(df, n, alarm)
    sign = np.array([1, -1, 1, 1, -1, -1])
    # Cauchy-Schwarz is tight where |r - p| is in proportion to p; the halves balance as nearly as
    # six cells allow.
    up, down = probs[sign > 0].sum(), probs[sign < 0].sum()
    shifted = probs + distance * np.where(sign > 0, probs / up, -probs / down)
    assert np.abs(shifted - probs).sum() / 2 == pytest.approx(distance)

    def noticed(truth):
        counts = draws.multinomial(n, truth, 4000)
        return (((counts - n * probs) ** 2 / (n * probs)).sum(1) > critical(df, alarm)).mean()

    assert noticed(probs) == pytest.approx(alarm, abs=0.006)
    assert noticed(shifted) == pytest.approx(POWER, abs=0.04)


def test_nothing_to_compare_is_said(speculator):
    row = fit_of([torch.tensor([100.0])], [torch.tensor([1.0])])
    assert row["p"] is None and row["df"] == 0
    more = {
        "label": "a",
        "guarantee": "distribution",
        "control": False,
        "outside": 0,
        "temperature": 1.0,
    }
    found = {"greedy": [], "law": judged([row | more])}
    assert exactness.words(found) == [
        "a: not tested: the target leaves no choice after these prompts"
    ]
    cold = same_distribution(
        speculator, PROMPTS[:1], {"a": Plan(Tree.chain(1), Policy(1e-4))}, draws=40
    )
    assert cold[0]["p"] is None


def test_a_test_that_misses_a_wrong_decoder_says_so():
    probs = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    common = {"temperature": 1.0, "outside": 0, **fit_of([probs * 40], [probs])}
    rows = [
        {"label": "a", "guarantee": "distribution", "control": False, **common},
        {"label": "b", "guarantee": "approximate", "control": True, **common},
    ]
    found = {"greedy": [], "law": judged(rows)}
    assert [row["verdict"] for row in found["law"]] == ["no difference found", "NOT NOTICED"]
    assert "THE TEST IS WEAK at temperature 1" in exactness.words(found)[-1]


@pytest.mark.parametrize(
    ("draws", "prompts", "message"),
    [
        (39, 1, "exactness_draws=39: 1 .*40"),
        (100, 4, "exactness_draws=100: 4 .*160"),
        (1e4, 1, "exactness_draws=10000.0"),
        (True, 1, "exactness_draws=True"),
        (1000, 0, "exactness_prompts=0"),
        (1000, None, "exactness_prompts=None"),
    ],
)
def test_bad_numbers_are_refused(draws, prompts, message):
    with pytest.raises(InputError, match=message):
        exactness.check_draws(draws, prompts)
