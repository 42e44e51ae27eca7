"""Drafters that copy text, in the loop: the text is the target's own, rows are independent,
nothing of the target is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drafttrain.decoding import rules
from drafttrain.decoding.costs import measure_costs
from drafttrain.decoding.loop import decode
from drafttrain.decoding.measure import measure_acceptance
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.speculator import Speculator
from drafttrain.drafter.base import Committed
from drafttrain.drafter.heads import VocabularyHeads
from drafttrain.drafter.ngram import NGram
from drafttrain.drafter.retrieval import Retrieval
from drafttrain.drafter.suffix import Suffix
from drafttrain.errors import InputError
from drafttrain.flow import Acceptance, Batch, Features, Needs, Proposal, Sampling
from drafttrain.nn.sampling import Policy
from drafttrain.target import load
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Growth, Tree
from tests.decoding.models import SMALL, p_value
from tests.drafter.copying import committed_of, drafts, propose, rows_of
from tests.drafter.make import make
from tests.messages import said

PLAIN = Plan(Tree.chain(0))
LIMIT = 40
TEXT = [20, 21, 22, 23, 24, 20, 21, 22]
MADE: dict[str, tuple[type[Retrieval], dict[str, Any], Growth]] = {
    "ngram, chain": (NGram, {}, Tree.chain(4)),
    "ngram, tree": (NGram, {"prefer": "recent"}, Tree.eagle1_static()),
    "suffix, chain": (Suffix, {}, Tree.chain(6)),
    "suffix, tree": (Suffix, {"max_match": 3}, Tree.expansion([3, 2, 1])),
    "suffix, dynamic": (Suffix, {"max_match": 2}, Dynamic(depth=4, top_k=3, total=9)),
    "suffix, confident": (Suffix, {}, Confident(k=5, stop_below=0.5)),
    "suffix, corpus": (
        Suffix,
        {"corpus": "texts", "corpus_ids": [*TEXT, -1, *range(40, 80), -1]},
        Tree.expansion([2, 1]),
    ),
}


@pytest.fixture(scope="module")
def own() -> Any:
    """A target with three prompts of different lengths, two of which hold parts of their answers:
    drafts are really kept."""
    target = load.tiny()
    starts = [[3, 5, 7, 9], [11], TEXT]
    answers, _ = decode(target, None, starts, PLAIN, max_new_tokens=LIMIT, stop_ids=())
    prompts = [
        [*starts[0], *answers[0].ids[:30], *starts[0]],
        starts[1],
        [*TEXT, *answers[2].ids[:12], *TEXT],
    ]
    plain, _ = decode(target, None, prompts, PLAIN, max_new_tokens=LIMIT, stop_ids=())
    # The continuation of each prompt occurs in it where the target repeats itself; put it there
    # where it does not.
    prompts[0] = [*plain[0].ids[:9], *prompts[0][-4:]]
    plain, _ = decode(target, None, prompts, PLAIN, max_new_tokens=LIMIT, stop_ids=())
    return target, prompts, [output.ids for output in plain]


@pytest.mark.field("F52")
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("stop", ["none", "mid", "first"])
@pytest.mark.parametrize("limit", [LIMIT, 1, 2, 5])
def test_greedy_text_is_the_targets_own(own: Any, name: str, stop: str, limit: int) -> None:
    target, prompts, plain = own
    kind, settings, tree = MADE[name]
    stop_ids = {"none": (), "mid": (plain[0][4], plain[1][9]), "first": (plain[0][0],)}[stop]
    outputs, tally = decode(
        target,
        make(kind, target, **settings),
        prompts,
        Plan(tree),
        max_new_tokens=limit,
        stop_ids=stop_ids,
    )
    for ids, output in zip(plain, outputs, strict=True):
        end = next((i + 1 for i, token in enumerate(ids) if token in stop_ids), len(ids))
        assert output.ids == ids[: min(end, limit)]
        assert output.finish == ("stop" if end <= limit and ids[end - 1] in stop_ids else "length")
    assert tally.emitted == sum(len(o.ids) for o in outputs) - len(outputs)
    if limit == LIMIT and stop == "none":
        assert tally.drafted and tally.accepted > 3, (
            "nothing was kept: this test would show nothing"
        )
        assert tally.drafted < tally.rounds * tree.size, (
            "some round had less to copy than the tree has room for"
        )


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize(
    "policy",
    [Policy(), Policy(0.8), Policy(0.8, repetition_penalty=1.2)],
    ids=["greedy", "sampled", "penal"],
)
def test_a_rows_text_and_counts_are_its_own(own: Any, name: str, policy: Policy) -> None:
    target, prompts, plain = own
    kind, settings, tree = MADE[name]
    drafter, plan = make(kind, target, **settings), Plan(tree, policy)
    stop = (plain[0][7], plain[2][3])
    together, tally = decode(
        target, drafter, prompts, plan, max_new_tokens=LIMIT, stop_ids=stop, seed=4
    )
    assert len({len(output.runs) for output in together}) > 1, "rows finish at different times"
    for row, prompt in enumerate(prompts):
        (single,), _ = decode(
            target,
            drafter,
            [prompt],
            plan,
            max_new_tokens=LIMIT,
            stop_ids=stop,
            seed=4,
            row_numbers=[row],
        )
        assert (single.ids, single.runs, single.nodes) == (
            together[row].ids,
            together[row].runs,
            together[row].nodes,
        )
        assert single.tally == together[row].tally
    small = measure_acceptance(
        target, drafter, prompts, plan, max_new_tokens=LIMIT, batch=2, stop_ids=stop, seed=4
    )
    assert small.tally.accept_at == tally.accept_at and small.tally.drafted == tally.drafted
    assert small.row()["rule"] == ("greedy" if policy.greedy else "one_hot")
    assert small.row()["guarantee"] == ("greedy" if policy.greedy else "distribution")


@pytest.mark.parametrize("kind", [NGram, Suffix])
def test_the_loop_hands_over_every_token_and_no_features(
    own: Any, kind: type[Retrieval], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompts, plain = own
    seen: list[Committed] = []
    propose_as_it_is = Retrieval.propose

    def recorded(self: Retrieval, state: Any, committed: Committed, *arguments: Any) -> Proposal:
        seen.append(committed)
        return propose_as_it_is(self, state, committed, *arguments)

    monkeypatch.setattr(Retrieval, "propose", recorded)
    assert kind.needs == Needs()
    for prompt, ids in zip(prompts, plain, strict=True):
        seen.clear()
        decode(
            target,
            make(kind, target),
            [prompt],
            Plan(Tree.chain(3)),
            max_new_tokens=LIMIT,
            stop_ids=(),
        )
        assert all(committed.features == Features() for committed in seen)
        text = [
            token
            for committed in seen
            for token in committed.tokens[0, : int(committed.counts[0])].tolist()
        ]
        assert seen[0].first is not None and seen[0].first.tolist() == prompt[:1]
        assert all(committed.first is None for committed in seen[1:])
        assert [*prompt[:1], *text] == [*prompt, *ids][: 1 + len(text)] and len(text) > len(prompt)


@pytest.mark.parametrize("kind", [NGram, Suffix])
def test_a_text_in_parts_is_the_text(kind: type[Retrieval]) -> None:
    target = load.tiny()
    drafter, tree = make(kind, target), Tree.expansion([2, 2])
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 1, 2]
    state = drafter.open(2, 0)
    for start, end in ((0, 5), (5, 6), (6, 10), (10, 12)):
        committed = committed_of([text[start:end], text[start:end][:1]], new=start == 0)
        found = drafter.propose(state, committed, tree, Policy(), None)
    assert rows_of(found)[0] == drafts(drafter, text, tree) != []
    drafter.select(state, torch.tensor([0]))
    (row,) = rows_of(drafter.propose(state, committed_of([[3]], new=False), tree, Policy(), None))
    assert row == drafts(drafter, [*text, 3], tree)


@pytest.mark.parametrize("kind", [NGram, Suffix])
def test_rows_do_not_see_each_other(kind: type[Retrieval]) -> None:
    target = load.tiny()
    found = propose(make(kind, target), [[1, 2, 3, 4, 1], [1], [5, 9, 5]], Tree.chain(3))
    assert rows_of(found) == [[(2, -1), (3, 0), (4, 1)], [], [(9, -1), (5, 0)]]
    assert found.sampling is Sampling.ONE_HOT and found.q is None


@pytest.mark.parametrize("kind", [NGram, Suffix])
def test_what_it_has_not(kind: type[Retrieval]) -> None:
    target = load.tiny()
    drafter = make(kind, target)
    assert not list(drafter.parameters()) and not drafter.state_dict() and not drafter.learns
    assert (
        drafter.dtype is None
        and drafter.device == target.device
        and drafter.at(torch.bfloat16) is drafter
    )
    assert type(drafter)(target, **drafter.settings()).settings() == drafter.settings()
    nothing = torch.empty(1, 0, dtype=torch.int64)
    batch = Batch(nothing, nothing.bool(), torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(InputError, match=said("drafter.nothing_to_train")):
        drafter.loss(batch, Features())
    assert drafter.guesses(batch, Features()) is None and not isinstance(drafter, VocabularyHeads)
    costs = measure_costs(
        target, drafter, Policy(1.0), [Tree.chain(2), Tree.expansion([2, 1])], context=9, repeats=1
    )
    assert len(costs.drafted) == 2 and all(seconds > 0 for seconds in costs.drafted.values())


# The distribution of sampled text -----------------------------------------------------------------


def test_nothing_is_drawn(own: Any) -> None:
    target, prompts, _ = own
    drafter = make(NGram, target)
    plan = Plan(Tree.chain(3), Policy(1.0))
    assert (
        plan.rule_name == "block"
        and plan.made_by(drafter).rule_name == "one_hot"
        and not plan.made_by(drafter).draws
    )
    assert (
        plan.made_by(None) == plan
        and Plan(Tree.chain(0), Policy(1.0)).made_by(drafter).sampled is None
    )
    assert Speculator(target, drafter, plan).plan.guarantee == "distribution"
    with pytest.raises(InputError, match=said("drafter.draws_none")):
        decode(
            target,
            drafter,
            prompts,
            Plan(Tree.chain(3), Policy(1.0), sampled=True),
            max_new_tokens=3,
        )
    with pytest.raises(InputError, match="rule ratio"):
        decode(
            target,
            drafter,
            prompts,
            Plan(Tree.chain(3), Policy(1.0), rule="ratio"),
            max_new_tokens=3,
        )


REPEATING = (3, 5, 2, 5, 1, 3, 5, 0, 3, 2, 2, 5, 7, 6, 4, 0, 1)
"""Every token occurs in it, so that whatever the target draws first has a continuation."""
SAMPLED: dict[str, tuple[type[Retrieval], dict[str, Any], Plan]] = {
    "ngram, chain": (NGram, {}, Plan(Tree.chain(2), Policy(1.0))),
    "ngram, tree": (NGram, {}, Plan(Tree.expansion([2, 2]), Policy(1.0))),
    "ngram, matched": (
        NGram,
        {},
        Plan(Tree.expansion([2, 1]), Policy(1.0), rule="sample_and_match"),
    ),
    "suffix, tree": (Suffix, {}, Plan(Tree.expansion([3, 1]), Policy(0.8, 6, 0.95))),
    "suffix, dynamic": (
        Suffix,
        {"max_match": 1},
        Plan(Dynamic(depth=2, top_k=2, total=4), Policy(1.0)),
    ),
}


@pytest.mark.field("F53")
@pytest.mark.parametrize("name", SAMPLED)
def test_first_three_tokens_follow_the_targets_distribution(name: str) -> None:
    target = load.tiny(**SMALL)
    kind, settings, plan = SAMPLED[name]
    drafter = make(kind, target, **settings)
    assert p_value(target, drafter, plan, rows=8_000, prompt=REPEATING) > 1e-3
    _, tally = decode(target, drafter, [list(REPEATING)] * 100, plan, max_new_tokens=3, stop_ids=())
    assert tally.drafted > tally.rounds / 2 and 0 < tally.accepted < tally.drafted


def always_kept(p: torch.Tensor, proposal: Proposal, u: torch.Tensor) -> Acceptance:
    """Mistake: a draft is kept whatever the target says."""
    return rules.one_hot(
        p, proposal, torch.zeros_like(u).where(torch.arange(u.shape[1]) < u.shape[1] - 1, u)
    )


def test_the_test_of_distributions_notices_a_planted_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = load.tiny(**SMALL)
    kind, settings, plan = SAMPLED["ngram, chain"]
    monkeypatch.setitem(rules.RULES, "one_hot", always_kept)
    assert (
        p_value(target, make(kind, target, **settings), plan, rows=8_000, prompt=REPEATING) < 1e-6
    )


# Counting -----------------------------------------------------------------------------------------


def test_rates_by_rank_are_of_the_nodes_asked_for(own: Any) -> None:
    """A tree with holes is numbered as the full one, or calibration would take one rank for
    another."""
    target, prompts, plain = own
    tree = Tree.expansion([3, 2])
    drafter = make(NGram, target)
    found = measure_acceptance(
        target, drafter, prompts, Plan(tree), max_new_tokens=LIMIT, stop_ids=()
    )
    assert found.rates is not None
    hits, rounds = [0, 0, 0], 0
    for prompt, ids in zip(prompts, plain, strict=True):
        (output,), _ = decode(
            target, drafter, [prompt], Plan(tree), max_new_tokens=LIMIT, stop_ids=()
        )
        place = 1
        for number, (emitted, _) in enumerate(output.runs[1:]):
            if number < len(output.runs) - 2:
                level = [
                    token
                    for token, parent in drafts(drafter, [*prompt, *ids[:place]], tree)
                    if parent < 0
                ]
                hits = [
                    hit + (rank < len(level) and level[rank] == ids[place])
                    for rank, hit in enumerate(hits)
                ]
                rounds += 1
            place += emitted
    assert found.rates[0] == pytest.approx([hit / rounds for hit in hits]) and sum(hits)
