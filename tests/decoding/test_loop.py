"""The loop on real (tiny) models: greedy identity, stops and limits, batches, and the distribution
of sampled text."""

import itertools

import pytest
import torch

from drafttrain.decoding import rules
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.errors import InputError
from drafttrain.flow import Acceptance, Proposal, Sampling
from drafttrain.nn.sampling import Policy, draw
from drafttrain.target import load
from drafttrain.tree.topology import Tree
from drafttrain.wiring.defaults import default_settings
from tests.decoding.models import PLAIN, PROMPTS, SAMPLED, SMALL, TREES, make, p_value, sharpened
from tests.drafter import make as drafters
from tests.messages import said


@pytest.fixture(scope="module", params=load.TINY)
def family(request):
    target, drafter = make(request.param)
    plain, _ = decode(target, None, PROMPTS, PLAIN, max_new_tokens=32, stop_ids=())
    return target, drafter, [output.ids for output in plain]


@pytest.mark.field("F57")
def test_plain_decoding_equals_the_library(family):
    target, _, plain = family
    for prompt, ids in zip(PROMPTS, plain, strict=True):
        out = target.model.generate(
            torch.tensor([prompt]),
            max_new_tokens=32,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert out[0, len(prompt) :].tolist() == ids


@pytest.mark.field("F57")
@pytest.mark.parametrize(
    "settings",
    [
        {"family": "qwen2"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"tie_word_embeddings": True},
        {"head_dim": 24},
    ],
    ids=str,
)
def test_what_a_target_has_next_to_its_matrices_is_computed(settings):
    """Biases, which a fresh model has at zero, are given values here."""
    target, _ = make(**settings)
    chance = torch.Generator().manual_seed(7)
    biases = [p for name, p in target.model.named_parameters() if name.endswith(".bias")]
    assert bool(biases) == ("tie_word_embeddings" not in settings and "head_dim" not in settings)
    for bias in biases:
        bias.data.normal_(generator=chance)
    drafter = drafters.make(Eagle1, target).eval()
    plain, _ = decode(target, None, PROMPTS, PLAIN, max_new_tokens=16, stop_ids=())
    for prompt, output in zip(PROMPTS, plain, strict=True):
        out = target.model.generate(
            torch.tensor([prompt]),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert out[0, len(prompt) :].tolist() == output.ids
    for tree in TREES.values():
        drafted, _ = decode(target, drafter, PROMPTS, Plan(tree), max_new_tokens=16, stop_ids=())
        assert [output.ids for output in drafted] == [output.ids for output in plain]


@pytest.mark.field("F52", "F55", "F56")
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("stop", ["none", "mid", "first"])
@pytest.mark.parametrize("limit", [32, 1, 2, 5])
def test_greedy_output_is_the_targets_own(family, tree, rows, stop, limit):
    target, drafter, plain = family
    stop_ids = {"none": (), "mid": (plain[0][4], plain[1][9]), "first": (plain[0][0],)}[stop]
    outputs, tally = decode(
        target, drafter, PROMPTS[:rows], Plan(TREES[tree]), max_new_tokens=limit, stop_ids=stop_ids
    )
    for ids, output in zip(plain, outputs, strict=False):
        end = next((i + 1 for i, token in enumerate(ids) if token in stop_ids), len(ids))
        assert output.ids == ids[: min(end, limit)]
        assert output.finish == ("stop" if end <= limit and ids[end - 1] in stop_ids else "length")
        assert sum(n for n, _ in output.runs) == len(output.ids)
    assert tally.emitted == sum(len(o.ids) for o in outputs) - len(outputs)


def perfect(target, drafter, prompt, limit):
    """A drafter that proposes the target's own continuation, so that every stop and limit falls
    inside a run."""
    ids = decode(target, None, [prompt], PLAIN, max_new_tokens=limit + 8, stop_ids=())[0][0].ids

    class Perfect(Eagle1):
        def propose(self, state, committed, tree, policy, u, sampling):
            self.seen = getattr(self, "seen", 0) + int(committed.counts[0])
            start = self.seen - len(prompt) + 1
            tokens = torch.tensor([(ids[start:] + [0] * tree.size)[: tree.size]])
            return Proposal(tokens, torch.tensor([tree.parents]), Sampling.ONE_HOT)

    drafter = Perfect(target, **default_settings(Eagle1))
    return ids, drafter


@pytest.mark.field("F51")
@pytest.mark.parametrize("limit", [0, 1, 2, 3, 5, 9, 17])
def test_limit_is_exact_with_a_perfect_drafter(limit):
    target, drafter = make()
    ids, drafter = perfect(target, drafter, PROMPTS[0], 17)
    outputs, tally = decode(
        target, drafter, [PROMPTS[0]], Plan(Tree.chain(8)), max_new_tokens=limit, stop_ids=()
    )
    assert outputs[0].ids == ids[:limit]
    if limit == 17:
        assert (
            tally.rounds == 2 and tally.tau == 8.0
        )  # 1 from the prefill, then 9 and, one short of its tree, 7


@pytest.mark.field("F50")
def test_stop_token_at_every_place_of_a_block():
    target, _ = make()
    for place in range(20):
        ids, drafter = perfect(target, None, PROMPTS[0], 24)
        stop = (ids[place],)
        first = ids.index(ids[place])
        streamed = []
        outputs, tally = decode(
            target,
            drafter,
            [PROMPTS[0]],
            Plan(Tree.chain(6)),
            max_new_tokens=24,
            stop_ids=stop,
            listener=lambda row, new, accepted, streamed=streamed: streamed.extend(new),
        )
        assert outputs[0].ids == ids[: first + 1] == streamed
        assert outputs[0].finish == "stop"
        assert tally.emitted == first


@pytest.mark.field("F51", "F55")
def test_context_limit_ends_as_plain_decoding_does():
    target, drafter = make(max_position_embeddings=24)
    prompt = list(range(3, 21))
    for tree in (Tree.chain(0), Tree.chain(4), Tree.eagle1_static()):
        outputs, _ = decode(target, drafter, [prompt], Plan(tree), max_new_tokens=50, stop_ids=())
        assert len(outputs[0].ids) == 6 and outputs[0].finish == "context"
    with pytest.raises(InputError, match=said("decoding.context")):
        decode(target, drafter, [list(range(24))], PLAIN, max_new_tokens=1)


@pytest.mark.field("F55")
@pytest.mark.parametrize(
    ("prompt", "fault"), [([], "empty_prompt"), ([400], "unknown_id"), ([-1], "unknown_id")]
)
def test_bad_prompts_are_refused(prompt, fault):
    target, drafter = make()
    with pytest.raises(InputError, match=said(f"decoding.{fault}")):
        decode(target, drafter, [[3], prompt], PLAIN, max_new_tokens=4)


def test_plans_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="sampled=true"):
        _ = Plan(Tree.chain(2), Policy(), sampled=True).draws
    with pytest.raises(InputError, match="rule magic"):
        _ = Plan(Tree.chain(2), Policy(1.0), rule="magic").rule_name
    for rule in rules.RULES:
        with pytest.raises(InputError, match=f"rule {rule}"):
            _ = Plan(Tree.chain(2), Policy(1.0 if rule == "greedy" else 0.0), rule=rule).rule_name
    for rule in ("ratio", "block"):
        with pytest.raises(InputError, match=said("decoding.rule_for_chains")):
            _ = Plan(Tree.expansion([2]), Policy(1.0), rule=rule).rule_name
        with pytest.raises(InputError, match="sampled=false"):
            _ = Plan(Tree.chain(2), Policy(1.0), False, rule).rule_name
    with pytest.raises(InputError, match="sampled=true"):
        _ = Plan(Tree.expansion([2]), Policy(1.0), True, "one_hot").rule_name
    target, drafter = make()
    with pytest.raises(InputError):
        decode(
            target,
            drafter,
            [[3]],
            Plan(Tree.eagle1_static(), Policy(1.0), rule="ratio"),
            max_new_tokens=4,
        )
    with pytest.raises(InputError, match=said("decoding.no_drafter")):
        decode(target, None, [[3]], Plan(Tree.chain(2)), max_new_tokens=4)


@pytest.mark.parametrize(
    ("rule", "tree", "sampling", "guarantee"),
    [
        (None, "chain", Sampling.IID, "distribution"),
        (None, "tree", Sampling.WOR, "distribution"),
        ("ratio", "chain", Sampling.IID, "distribution"),
        ("block", "chain", Sampling.IID, "distribution"),
        ("multi_step", "chain", Sampling.IID, "distribution"),
        ("multi_step", "tree", Sampling.WOR, "distribution"),
        ("one_hot", "tree", Sampling.ONE_HOT, "distribution"),
        ("k_seq", "tree", Sampling.IID, "distribution"),
        ("sample_and_match", "tree", Sampling.ONE_HOT, "distribution"),
        ("typical", "tree", Sampling.ONE_HOT, "approximate"),
        ("typical:0.02:0.1", "chain", Sampling.ONE_HOT, "approximate"),
    ],
)
def test_drafts_are_made_as_suits_the_rule(rule, tree, sampling, guarantee):
    plan = Plan(TREES[tree], Policy(1.0), rule=rule)
    assert (plan.sampling, plan.guarantee, plan.draws) == (
        sampling,
        guarantee,
        sampling is not Sampling.ONE_HOT,
    )
    assert (
        Plan(TREES[tree], Policy(1.0), sampled=sampling is not Sampling.ONE_HOT, rule=rule).sampling
        is sampling
    )
    target, drafter = make()
    outputs, tally = decode(target, drafter, PROMPTS, plan, max_new_tokens=6, stop_ids=())
    assert all(len(output.ids) == 6 for output in outputs) and tally.rounds


@pytest.mark.field("F54")
@pytest.mark.parametrize("policy", [Policy(1.0), Policy(0.7, 20, 0.9)])
@pytest.mark.parametrize("tree", ["chain", "tree"])
@pytest.mark.parametrize("sampled", [True, False])
def test_a_sampled_row_does_not_depend_on_its_neighbours(policy, tree, sampled):
    target, drafter = make()
    plan = Plan(TREES[tree], policy, sampled)
    together, _ = decode(target, drafter, PROMPTS, plan, max_new_tokens=24, stop_ids=(), seed=4)
    again, _ = decode(target, drafter, PROMPTS, plan, max_new_tokens=24, stop_ids=(), seed=4)
    other, _ = decode(target, drafter, PROMPTS, plan, max_new_tokens=24, stop_ids=(), seed=5)
    assert [o.ids for o in together] == [o.ids for o in again] != [o.ids for o in other]
    for row, prompt in enumerate(PROMPTS):
        single, _ = decode(
            target,
            drafter,
            [prompt],
            plan,
            max_new_tokens=24,
            stop_ids=(),
            seed=4,
            row_numbers=[row],
        )
        assert single[0].ids == together[row].ids


@pytest.mark.field("F54")
def test_decoding_does_not_touch_the_global_random_state():
    target, drafter = make()
    before = torch.get_rng_state()
    decode(target, drafter, PROMPTS, Plan(TREES["tree"], Policy(1.0)), max_new_tokens=8)
    assert torch.equal(before, torch.get_rng_state())


# The distribution of sampled text
# --------------------------------------------------------------------------
@pytest.fixture(scope="module")
def small():
    return make(**SMALL)


@pytest.mark.field("F53")
@pytest.mark.parametrize("name", SAMPLED)
def test_first_three_tokens_follow_the_targets_distribution(small, name):
    assert p_value(*small, SAMPLED[name]) > 1e-3


def resampled_from_p(p, proposal, u):
    """Mistake: after a refusal the correction is drawn from p, not from the residual."""
    right = rules.ratio(p, proposal, u)
    rows = torch.arange(len(p))
    return Acceptance(right.path, right.count, draw(p[rows, right.count], u[:, -1]))


def as_independent(p, proposal, u):
    """Mistake: children drawn without replacement are judged as if they were independent draws."""
    return rules.multi_step(p, type(proposal)(**(vars(proposal) | {"sampling": Sampling.IID})), u)


def always_kept(p, proposal, u):
    """Mistake: every first child is accepted."""
    return rules.one_hot(
        p, proposal, torch.zeros_like(u).where(torch.arange(u.shape[1]) < u.shape[1] - 1, u)
    )


@pytest.mark.parametrize(
    ("name", "rule", "mistake"),
    [
        ("chain ratio", "ratio", resampled_from_p),
        ("chain ratio", "ratio", sharpened),
        ("tree without replacement", "multi_step", as_independent),
        ("tree one-hot", "one_hot", always_kept),
    ],
)
def test_the_test_of_distributions_notices_a_planted_mistake(
    small, monkeypatch, name, rule, mistake
):
    plan = SAMPLED[name]
    assert plan.rule_name == rule
    original = rules.RULES[rule]
    monkeypatch.setitem(rules.RULES, rule, mistake)
    assert rules.RULES[rule] is not original
    assert p_value(*small, plan) < 1e-6


@pytest.mark.field("F45", "F46")
def test_counts_are_consistent_with_a_brute_force_count():
    target, drafter = make()
    outputs, tally = decode(
        target, drafter, PROMPTS, Plan(TREES["tree"], Policy(1.0)), max_new_tokens=24, stop_ids=()
    )
    rounds = list(itertools.chain.from_iterable(o.runs[1:] for o in outputs))
    assert tally.rounds == len(rounds)
    assert tally.emitted == sum(n for n, _ in rounds)
    assert tally.accepted == sum(kept for _, kept in rounds)
    for depth in range(5):
        assert tally.kept[depth] == sum(kept > depth for _, kept in rounds)
        assert 0 <= tally.kept[depth] <= tally.offered[depth] <= tally.rounds
    # Every accepted draft and every round's own token is emitted, but for rounds cut by the limit.
    assert tally.accepted <= tally.emitted <= tally.accepted + tally.rounds
