"""Ratios and intervals against direct sums."""

import dataclasses

import pytest
import torch

from drafttrain.data.named import NO_CATEGORY
from drafttrain.decoding import measure, rules
from drafttrain.decoding.conditions import conditions, digest_of, dtype_name
from drafttrain.decoding.loop import Output
from drafttrain.decoding.measure import (
    Entrant,
    Measurement,
    measure_acceptance,
    measure_speed,
    race,
    rank_rates,
    tau_behind,
)
from drafttrain.decoding.measurement import by_category, taus
from drafttrain.decoding.plan import UNKEPT, Plan
from drafttrain.decoding.speculator import Speculator
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.ngram import NGram
from drafttrain.evaluating.measuring import row_of
from drafttrain.flow import Acceptance, Tally
from drafttrain.nn.sampling import Policy
from drafttrain.target import load
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters

PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11], [12], [13, 14]]


@pytest.fixture(scope="module")
def pair():
    target = load.tiny()
    torch.manual_seed(0)
    return target, drafters.make(Eagle1, target).eval()


@pytest.mark.parametrize("policy", [Policy(), Policy(1.0)])
def test_acceptance_is_the_same_for_every_batch_size(pair, policy):
    plan = Plan(Tree.chain(3), policy)
    stop = (17, 60, 200)
    rows = [
        measure_acceptance(*pair, PROMPTS, plan, max_new_tokens=16, batch=b, stop_ids=stop)
        for b in (1, 2, 5)
    ]
    assert len({str(dataclasses.replace(m.tally, seconds={})) for m in rows}) == 1
    row = rows[0].row()
    assert row["tau"] == sum(t.emitted for t in rows[0].tallies) / sum(
        t.rounds for t in rows[0].tallies
    )
    low, high = row["tau_interval"]
    assert low <= row["tau"] <= high and row["prompts"] == 5
    assert row["speedup"] is None
    assert (row["guarantee"], row["rule"]) == (
        ("greedy", "greedy") if policy.greedy else ("distribution", "block")
    )


@pytest.mark.field("F46")
def test_unconditional_rates_add_up_to_the_accepted_length(pair):
    measured = measure_acceptance(
        *pair, PROMPTS, Plan(Tree.chain(3), Policy(1.0)), max_new_tokens=16, stop_ids=()
    )
    row = measured.row()
    assert row["accepted_per_round"] == pytest.approx(sum(row["reach"]))
    assert all(0 <= rate <= 1 for rate in row["reach"])


@pytest.mark.field("F59")
def test_speed_is_interleaved_and_compares_the_same_tokens(pair):
    plans = [Plan(Tree.chain(2)), Plan(Tree.eagle1_static())]
    measured = measure_speed(*pair, PROMPTS[:3], plans, max_new_tokens=12, stop_ids=())
    for one in measured:
        row = one.row()
        assert one.same_as_plain == 3 and one.tokens == one.plain_tokens == [12] * 3
        assert row["speedup"] == pytest.approx(sum(one.plain_seconds) / sum(one.seconds))
        assert row["speedup_interval"][0] <= row["speedup"] <= row["speedup_interval"][1]
        assert (
            set(row["seconds"]) == {"prefill", "draft", "verify", "host"}
            and row["guarantee"] == "greedy"
        )


@pytest.mark.field("F70")
@pytest.mark.parametrize(("dtype", "claimed"), [("float32", UNKEPT), ("bfloat16", "greedy")])
def test_a_guarantee_that_was_seen_not_to_hold_is_not_claimed(monkeypatch, dtype, claimed):
    """A rule that writes another token after its drafts: in float32 no rounding does that."""
    target = load.tiny(dtype=dtype)
    drafter = drafters.make(Eagle1, target).eval()
    right = rules.greedy

    def wrong(best, proposal):
        found = right(best, proposal)
        token = (found.next_token + (proposal.size > 0)) % 320
        return Acceptance(found.path, found.count, token)

    monkeypatch.setattr(rules, "greedy", wrong)
    (one,) = measure_speed(
        target, drafter, PROMPTS[:2], [Plan(Tree.chain(2))], max_new_tokens=6, stop_ids=()
    )
    assert one.same_as_plain == 0 and one.row()["guarantee"] == claimed
    row = row_of(one.plan, dataclasses.replace(one, guarantee="greedy"), one)
    assert row["guarantee"] == claimed, "also where acceptance was measured apart"


def test_differences_are_told_prompt_by_prompt():
    """Prompts from easy to hard, each better by 0.2: the intervals of tau overlap, that of the
    difference does not reach 0."""
    tau = torch.linspace(1.2, 3.0, 10)
    worse, better = (
        Measurement(
            Plan(Tree.chain(2)), each, Tally(1000, emitted=sum(one.emitted for one in each)), []
        )
        for each in (
            [Tally(rounds=100, emitted=round(100 * float(t) + gain)) for t in tau]
            for gain in (0, 20)
        )
    )
    gap, (low, high) = tau_behind(better, worse)
    assert gap == pytest.approx(0.2) and low == pytest.approx(0.2) == high
    assert worse.tau_interval[1] > better.tau_interval[0]
    none = Measurement(Plan(Tree.chain(2)), [], Tally(), [])
    assert tau_behind(none, none) == (None, None)
    with pytest.raises(ValueError, match="10 prompts against 0"):
        tau_behind(better, none)


def test_drafters_race_in_turn_against_plain_decoding_of_their_own_target(pair, monkeypatch):
    target, drafter = pair
    other = load.tiny(seed=1)
    jobs = []
    original = measure.decode

    def record(target, drafter, prompts, plan, **settings):
        if settings["max_new_tokens"] == 12:
            jobs.append((target, drafter, prompts[0], plan.tree.size))
        return original(target, drafter, prompts, plan, **settings)

    monkeypatch.setattr(measure, "decode", record)
    copies = drafters.make(NGram, target)
    entrants = [
        Entrant(target, drafter, Plan(Tree.chain(2))),
        Entrant(target, copies, Plan(Tree.chain(4))),
        Entrant(other, drafters.make(NGram, other), Plan(Tree.chain(3))),
        Entrant(target, None, Plan(Tree.chain(0))),
    ]
    found = race(entrants, PROMPTS[:2], max_new_tokens=12, stop_ids=(), seed=3)
    # Two plain decodings, one for each target, shared by all that draft for it; every prompt in
    # every way, one after the other.
    assert (
        len(jobs) == 2 * 6
        and [prompt for _, _, prompt, _ in jobs] == [PROMPTS[0]] * 6 + [PROMPTS[1]] * 6
    )
    sizes = [[size for *_, size in jobs[start : start + 6]] for start in (0, 6)]
    assert sizes[0] == [0, 0, 2, 4, 3, 0] and sizes[1] == [0, 2, 4, 3, 0, 0]
    assert [one.same_as_plain for one in found] == [2, 2, 2, 2]
    first, second, third, plain = found
    assert first.plain_seconds == second.plain_seconds == plain.plain_seconds != third.plain_seconds
    single = measure_acceptance(
        target, copies, PROMPTS[:2], Plan(Tree.chain(4)), max_new_tokens=12, stop_ids=(), seed=3
    )
    assert second.tally.tau == single.tally.tau and second.plan.sampled is False
    assert plain.row()["tau"] == 1.0


def test_conditions_tell_prompts_apart_and_not_their_form(pair):
    target, _ = pair
    assert digest_of([[1, 2], [3]]) == digest_of([(1, 2), (3,)])
    assert (
        len(
            {
                digest_of(prompts)
                for prompts in ([[1, 2], [3]], [[3], [1, 2]], [[1], [2, 3]], [[1, 2]], [])
            }
        )
        == 5
    )
    found = conditions(target, PROMPTS)
    assert found == {
        "prompts_digest": digest_of(PROMPTS),
        "target_dtype": "float32",
        "device": "cpu",
        "threads": torch.get_num_threads(),
    }
    assert (dtype_name(torch.bfloat16), dtype_name(None)) == ("bfloat16", None)


@pytest.mark.field("F49")
def test_nothing_to_measure_is_none_and_not_nan(pair):
    for prompts, limit in (([], 8), (PROMPTS, 0), (PROMPTS, 1)):
        measured = measure_acceptance(*pair, prompts, Plan(Tree.chain(2)), max_new_tokens=limit)
        row = measured.row()
        assert row["tau"] is None and row["tau_interval"] is None and row["rounds"] == 0
        assert row["accepted_per_round"] is None and row["speedup"] is None


def test_without_a_seed_every_call_draws_other_texts(pair):
    speculator = Speculator(*pair, Plan(Tree.chain(3), Policy(1.0)), dtype="float32")
    given = {"max_new_tokens": 12, "stop_ids": ()}

    def written(**more):
        return speculator.generate([PROMPTS[0]], **given, **more)[0][0].ids

    def streamed(**more):
        return [t for ids, _ in speculator.stream(PROMPTS[0], **given, **more) for t in ids]

    assert len({tuple(one()) for one in (written, written, streamed, streamed)}) == 4
    assert written(seed=3) == written(seed=3) == streamed(seed=3) != written(seed=4)
    torch.manual_seed(5)
    first = written()
    torch.manual_seed(5)
    assert written() == first, "as in transformers"
    before = torch.random.get_rng_state()
    speculator.generate([PROMPTS[0]], plan=Plan(Tree.chain(3)), **given)
    assert torch.equal(torch.random.get_rng_state(), before), "greedy decoding uses no chance"


def test_speculator_streams_what_it_generates_and_follows_live_weights(pair):
    target, drafter = pair
    speculator = Speculator(target, drafter, Plan(Tree.chain(3)), dtype="float32")
    outputs, _ = speculator.generate([PROMPTS[0]], max_new_tokens=20, stop_ids=())
    streamed = [
        token
        for ids, _ in speculator.stream(PROMPTS[0], max_new_tokens=20, stop_ids=())
        for token in ids
    ]
    assert streamed == outputs[0].ids
    for _ in speculator.stream(PROMPTS[0], max_new_tokens=200, stop_ids=()):
        break  # a reader that leaves early does not hang
    with torch.no_grad():
        drafter.fc.weight += 0.5
    assert not torch.equal(speculator.drafter.fc.weight, drafter.fc.weight)
    speculator.refresh(drafter)
    assert torch.equal(speculator.drafter.fc.weight, drafter.fc.weight)
    with torch.no_grad():
        drafter.fc.weight -= 0.5


def test_every_node_of_a_tree_is_counted():
    """Each answer's last round is left out. By depth and rank the counts add up to the rates that
    Sequoia reads."""
    tree = Tree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    outputs = [
        Output(nodes=[(0, 2, 5), (1,), (), (0, 3)]),
        Output(nodes=[(0, 3), (0, 2)]),
        Output(nodes=[(0,)]),
        Output(),
    ]
    found = Measurement(
        Plan(tree), [], Tally(), [], rates=rank_rates(tree, outputs), outputs=outputs
    )
    counts = [(-1, 2, 4), (-1, 1, 4), (0, 1, 2), (0, 1, 2), (1, 0, 1), (2, 1, 1)]
    row = found.row()
    assert row["node_counts"] == [
        {"parent": parent, "kept": kept, "offered": offered} for parent, kept, offered in counts
    ]
    assert row["rank_rates"] == [[2 / 4, 1 / 4], [1 / 3, 1 / 2], [1.0]]
    assert dataclasses.replace(found, outputs=[]).node_counts is None
    assert (
        dataclasses.replace(found, plan=Plan(Dynamic(depth=2, top_k=2, total=3))).node_counts
        is None
    )
    assert dataclasses.replace(found, plan=Plan(Tree.chain(0))).node_counts is None


def test_positions_have_intervals_over_prompts(pair):
    tallies = [Tally(rounds=10, offered=[10, k], kept=[k, 0]) for k in range(1, 10)] + [
        Tally(rounds=1, offered=[1], kept=[0])
    ]
    total = Tally()
    for one in tallies:
        total += one
    found = Measurement(Plan(Tree.chain(2)), tallies, total, [])
    (low, high), nothing = found.row()["accept_at_interval"]
    assert low < total.accept_at[0] < high and nothing == [0.0, 0.0]
    even = [Tally(rounds=10, offered=[10], kept=[5])] * 10
    same = Measurement(Plan(Tree.chain(1)), even, Tally(offered=[100], kept=[50]), [])
    assert same.row()["accept_at_interval"] == [[0.5, 0.5]]
    single = Measurement(Plan(Tree.chain(1)), even[:1], even[0], [])
    assert single.row()["accept_at_interval"] == [None]


def _talk(rounds, emitted):
    return Tally(rounds=rounds, emitted=emitted)


def test_tau_over_rounds_and_as_the_mean_of_prompts():
    """A long answer counts more over rounds; one that ended at once is in neither."""
    tallies = [_talk(10, 40), _talk(0, 0), _talk(90, 90)]
    row = Measurement(Plan(Tree.chain(4)), tallies, Tally(), []).row()
    assert (row["tau"], row["tau_prompt_mean"]) == (1.3, 2.5)
    assert (row["prompts"], row["prompts_without_rounds"], row["rounds"]) == (3, 1, 100)
    assert row["tau_interval"] == row["tau_prompt_mean_interval"] == [1.0, 4.0]
    lengthy = [_talk(10, 40), _talk(90, 90), _talk(10, 20), _talk(10, 30)]
    low, high = taus(lengthy)["tau_prompt_mean_interval"]
    assert 1.0 < low < taus(lengthy)["tau_prompt_mean"] == 2.5 < high < 4.0
    even = taus([_talk(10, 40), _talk(10, 10)])
    assert even["tau"] == even["tau_prompt_mean"] == 2.5
    nothing = taus([_talk(0, 0)])
    assert nothing["tau"] is None and nothing["tau_prompt_mean"] is None
    # One prompt with rounds has no interval, whatever others there are.
    single = taus([_talk(10, 20), _talk(0, 0), _talk(0, 0)])
    assert single["tau_interval"] is None and single["tau_prompt_mean_interval"] is None


def test_kinds_of_task_add_up_to_the_total(pair):
    measured = measure_acceptance(
        *pair, PROMPTS, Plan(Tree.chain(3)), max_new_tokens=16, stop_ids=()
    )
    kinds = ["maths", NO_CATEGORY, "code", "maths", "code"]
    row, found = measured.row(), by_category(measured, kinds)["by_category"]
    assert [(one["category"], one["prompts"]) for one in found] == [
        *(("code", 2), ("maths", 2), (NO_CATEGORY, 1))
    ]
    assert sum(one["rounds"] for one in found) == row["rounds"]
    assert sum(one["tau"] * one["rounds"] for one in found) == pytest.approx(
        sum(one.emitted for one in measured.tallies)
    )
    assert sum(one["tau_prompt_mean"] * one["prompts"] for one in found) / 5 == pytest.approx(
        row["tau_prompt_mean"]
    )
    maths = Tally()
    for place in (0, 3):
        maths += measured.tallies[place]
    assert (
        found[1]["tau"] == maths.tau and found[1]["tau_interval"] and not found[2]["tau_interval"]
    )
    # Of fewer prompts than there are kinds of: the first ones.
    few = dataclasses.replace(measured, tallies=measured.tallies[:2])
    assert [one["prompts"] for one in by_category(few, kinds)["by_category"]] == [1, 1]
    for none in ([], ["maths"] * 5, [NO_CATEGORY] * 5):
        assert by_category(measured, none) == {}
    assert by_category(None, kinds) == {}
    with pytest.raises(ValueError, match="zip"):
        by_category(measured, kinds[:3])


def test_plain_decoding_s_stages_stand_beside(pair):
    plans = [Plan(Tree.chain(2)), Plan(Tree.eagle1_static())]
    chain, tree = measure_speed(*pair, PROMPTS[:2], plans, max_new_tokens=12, stop_ids=())
    for one in (chain, tree):
        row = one.row()
        assert (row["tokens"], row["plain_tokens"]) == (24, 24) and len(
            row["node_counts"]
        ) == one.plan.tree.size
        assert set(row["plain_seconds"]) == {"prefill", "draft", "verify", "host"}
        # The timed pieces are parts of what was timed from outside.
        assert 0 < sum(row["plain_seconds"].values()) <= sum(one.plain_seconds)
        assert 0 < sum(row["seconds"].values()) <= sum(one.seconds)
    assert chain.row()["plain_seconds"] == tree.row()["plain_seconds"]
    single = measure_acceptance(
        *pair, PROMPTS[:2], Plan(Tree.chain(2)), max_new_tokens=12, stop_ids=()
    )
    assert single.row()["plain_seconds"] is None and single.row()["plain_tokens"] is None
