"""Trees that change from row to row and round to round, in the loop: same text, honest counts, rows
on their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.decoding.loop import decode
from drafttrain.decoding.measure import measure_acceptance
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.speculator import Speculator
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.errors import InputError
from drafttrain.flow import Proposal, Sampling
from drafttrain.nn.sampling import Policy
from drafttrain.target import load
from drafttrain.tree import growth
from drafttrain.tree.confident import Confident, goes_on
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.search import expected_tokens, sequoia
from drafttrain.tree.topology import Growth, Tree
from drafttrain.wiring.defaults import default_settings
from tests.decoding.models import SMALL, make, p_value
from tests.drafter import make as drafters
from tests.messages import said
from tests.packaging.made import overfitted

PROMPTS = [[3, 5, 7, 9], [11], [20, 21, 22, 23, 24, 25, 26]]
LIMIT = 24
DYNAMIC = Dynamic(depth=4, top_k=3, total=9)
GROWTHS: dict[str, Growth] = {
    "dynamic": DYNAMIC,
    "dynamic, more read than kept": Dynamic(depth=4, top_k=4, total=4),
    "confident": Confident(k=5, stop_below=0.2),
    "medusa": Tree.medusa(),
}


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Eagle1, list[list[int]]]:
    """A drafter that has learned two of three answers, so that every length of acceptance
    occurs."""
    target = load.tiny()
    drafter = overfitted(target, PROMPTS[:2], steps=60, tokens=LIMIT)
    plain, _ = decode(target, None, PROMPTS, Plan(Tree.chain(0)), max_new_tokens=LIMIT, stop_ids=())
    return target, drafter, [output.ids for output in plain]


@pytest.mark.parametrize("name", GROWTHS)
@pytest.mark.parametrize("stop", ["none", "mid", "first"])
@pytest.mark.parametrize("limit", [LIMIT, 1, 2, 5])
def test_greedy_output_is_the_targets_own(pair: Any, name: str, stop: str, limit: int) -> None:
    target, drafter, plain = pair
    stop_ids = {"none": (), "mid": (plain[0][4], plain[1][9]), "first": (plain[0][0],)}[stop]
    outputs, tally = decode(
        target, drafter, PROMPTS, Plan(GROWTHS[name]), max_new_tokens=limit, stop_ids=stop_ids
    )
    for ids, output in zip(plain, outputs, strict=True):
        end = next((i + 1 for i, token in enumerate(ids) if token in stop_ids), len(ids))
        assert output.ids == ids[: min(end, limit)]
        assert output.finish == ("stop" if end <= limit and ids[end - 1] in stop_ids else "length")
    assert tally.emitted == sum(len(o.ids) for o in outputs) - len(outputs)
    if limit == LIMIT and stop == "none":
        assert tally.accepted_per_round > 0.5
    if limit == 2:
        assert tally.drafted == 0, "a round that can emit one token has no use for drafts"


@pytest.mark.parametrize("name", GROWTHS)
@pytest.mark.parametrize("policy", [Policy(), Policy(0.8)], ids=["greedy", "sampled"])
def test_a_rows_text_and_counts_are_its_own(pair: Any, name: str, policy: Policy) -> None:
    target, drafter, plain = pair
    plan = Plan(GROWTHS[name], policy)
    stop = (plain[0][7], plain[2][3])
    together, tally = decode(
        target, drafter, PROMPTS, plan, max_new_tokens=LIMIT, stop_ids=stop, seed=4
    )
    assert len({len(output.runs) for output in together}) > 1, "rows finish at different times"
    for row, prompt in enumerate(PROMPTS):
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
        assert (single.ids, single.runs, single.finish) == (
            together[row].ids,
            together[row].runs,
            together[row].finish,
        )
        assert single.tally == together[row].tally
    small = measure_acceptance(
        target, drafter, PROMPTS, plan, max_new_tokens=LIMIT, batch=2, stop_ids=stop, seed=4
    )
    assert small.tally.accept_at == tally.accept_at and small.tally.drafted == tally.drafted
    row = small.row()
    assert (
        row["growth"] == plan.tree.kind
        and row["tree"] == plan.tree.title
        and row["nodes"] == plan.tree.size
    )
    exact = {"dynamic": "one_hot", "chain": "block", "static": "multi_step"}
    assert row["rule"] == ("greedy" if policy.greedy else exact[plan.tree.kind])


@pytest.mark.parametrize(
    "tree", [*GROWTHS.values(), Tree.eagle1_static()], ids=[*GROWTHS, "static"]
)
def test_counts_are_those_of_walking_every_tree(
    pair: Any, tree: Growth, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter, plain = pair
    seen: list[Proposal] = []
    propose = type(drafter).propose

    def recorded(self: Eagle1, *arguments: Any) -> Proposal:
        seen.append(propose(self, *arguments))
        return seen[-1]

    monkeypatch.setattr(type(drafter), "propose", recorded)
    for row, prompt in enumerate(PROMPTS):
        seen.clear()
        (output,), tally = decode(
            target, drafter, [prompt], Plan(tree), max_new_tokens=LIMIT, stop_ids=()
        )
        offered, kept, drafted, place = [0] * tree.max_depth, [0] * tree.max_depth, 0, 1
        for number, (emitted, accepted) in enumerate(output.runs[1:]):
            room = LIMIT - place
            proposal = seen[number] if number < len(seen) else None
            size = (
                0
                if proposal is None
                else proposal.size
                if proposal.counts is None
                else int(proposal.counts[0])
            )
            nodes: dict[int, list[int]] = {}
            depths: list[int] = []
            for node in range(size):
                parent = int(proposal.parents[0, node])  # type: ignore[union-attr]
                depths.append(1 + (depths[parent] if parent >= 0 else 0))
                if depths[-1] < room:
                    nodes.setdefault(parent, []).append(node)
                    drafted += 1
            at = -1
            for depth in range(accepted + 1):
                children = nodes.get(at, [])
                if not children:
                    assert depth == accepted
                    break
                offered[depth] += 1
                if depth < accepted:
                    kept[depth] += 1
                    right = [
                        node
                        for node in children
                        if proposal.tokens[0, node] == plain[row][place + depth]
                    ]  # type: ignore[union-attr]
                    at = right[0]
            place += emitted
        assert place == LIMIT
        filled = [
            counts + [0] * (tree.max_depth - len(counts)) for counts in (tally.offered, tally.kept)
        ]
        assert filled == [offered, kept] and tally.drafted == drafted


def test_rates_by_rank_are_those_of_counting(pair: Any) -> None:
    target, drafter, _ = pair
    tree = Tree.expansion([3, 2])
    found = measure_acceptance(
        target, drafter, PROMPTS, Plan(tree), max_new_tokens=LIMIT, stop_ids=()
    )
    outputs, _ = decode(target, drafter, PROMPTS, Plan(tree), max_new_tokens=LIMIT, stop_ids=())
    first = [nodes[0] if nodes else None for output in outputs for nodes in output.nodes[:-1]]
    assert found.rates is not None and found.row()["rank_rates"] == found.rates
    assert found.rates[0] == pytest.approx([first.count(node) / len(first) for node in range(3)])
    second = [nodes for output in outputs for nodes in output.nodes[:-1] if nodes]
    ranks = [tree.ranks[nodes[1]] for nodes in second if len(nodes) > 1]
    assert found.rates[1] == pytest.approx([ranks.count(rank) / len(second) for rank in range(2)])
    for output in outputs:
        assert [len(nodes) for nodes in output.nodes] == [kept for _, kept in output.runs[1:]]
    best = sequoia([[rate or 0.0 for rate in row] for row in found.rates], 4)
    assert best.size == 4 and best.max_depth <= 2 and expected_tokens(best, found.rates) > 1.5
    none = measure_acceptance(
        target, drafter, PROMPTS, Plan(DYNAMIC), max_new_tokens=4, stop_ids=()
    )
    assert none.rates is None


def test_what_does_not_fit_is_refused_before_anything_is_decoded(pair: Any) -> None:
    target, _, _ = pair
    small = drafters.make(Eagle1, target, draft_ids=[1, 2, 3])
    with pytest.raises(InputError, match=said("decoding.too_wide")):
        Speculator(target, small, Plan(Dynamic(depth=2, top_k=4, total=8)), dtype="float32")
    with pytest.raises(InputError, match=said("decoding.too_wide")):
        decode(target, small, PROMPTS, Plan(Dynamic(depth=2, top_k=4, total=8)), max_new_tokens=4)

    class Shallow(Eagle1):
        max_depth = 3
        growths = (Tree,)

    shallow = Shallow(target, **default_settings(Eagle1))
    with pytest.raises(InputError, match=said("decoding.too_deep")):
        decode(target, shallow, PROMPTS, Plan(Tree.chain(4)), max_new_tokens=4)
    with pytest.raises(InputError, match=said("decoding.other_growth")):
        decode(target, shallow, PROMPTS, Plan(DYNAMIC), max_new_tokens=4)


# The distribution of sampled text
# --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Any:
    return make(**SMALL)


SAMPLED = {
    "dynamic": Plan(Dynamic(depth=3, top_k=2, total=5), Policy(1.0)),
    "dynamic filtered": Plan(Dynamic(depth=2, top_k=3, total=4), Policy(0.8, 6, 0.95)),
    "confident drawn": Plan(Confident(k=3, stop_below=0.24), Policy(1.0)),
    "confident one-hot": Plan(Confident(k=3, stop_below=0.24), Policy(1.0), sampled=False),
}


def test_a_dynamic_tree_is_judged_as_a_function_of_the_prefix() -> None:
    plan = SAMPLED["dynamic"]
    assert not plan.draws and plan.rule_name == "one_hot" and plan.guarantee == "distribution"
    assert Plan(plan.tree).guarantee == "greedy"
    with pytest.raises(InputError, match="sampled=true"):
        _ = Plan(plan.tree, Policy(1.0), sampled=True).draws


@pytest.mark.parametrize("name", SAMPLED)
def test_first_three_tokens_follow_the_targets_distribution(small: Any, name: str) -> None:
    assert p_value(*small, SAMPLED[name]) > 1e-3


def test_the_threshold_of_these_plans_really_ends_drafts(small: Any) -> None:
    target, drafter = small
    _, tally = decode(
        target,
        drafter,
        [[3, 5, 2]] * 200,
        SAMPLED["confident drawn"],
        max_new_tokens=3,
        stop_ids=(),
    )
    shares = [offered / tally.rounds for offered in tally.offered]
    assert 0.1 < shares[0] < 1 or 0.1 < shares[1] < 0.9


def dropped_by_its_own_probability(proposal: Proposal, least: float) -> Proposal:
    """A mistake: a chain ends before the first token that was drawn although it is unlikely."""
    assert proposal.q is not None and proposal.q_rows is not None
    drawn = proposal.q.gather(1, proposal.q_rows[:, :, None].expand(-1, -1, proposal.q.shape[-1]))
    sure = drawn.gather(2, proposal.tokens[:, :, None])[:, :, 0] >= least
    return Proposal(
        proposal.tokens,
        proposal.parents,
        proposal.sampling,
        proposal.q,
        proposal.q_rows,
        sure.long().cumprod(1).sum(1),
    )


def likeliest_drawn(proposal: Proposal, keep: int) -> Proposal:
    """A mistake: of children drawn without replacement the most confident stay."""
    assert proposal.q is not None and proposal.q_rows is not None
    chance = proposal.q[:, 0].gather(1, proposal.tokens)
    kept = chance.topk(keep, dim=1).indices.sort(1).values
    return Proposal(
        proposal.tokens.gather(1, kept),
        proposal.parents[:, :keep],
        Sampling.WOR,
        proposal.q,
        proposal.q_rows[:, :keep],
    )


@pytest.mark.parametrize("mistake", ["a chain cut", "children pruned"])
def test_cutting_by_what_was_drawn_is_noticed(
    small: Any, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = growth._fill
    if mistake == "a chain cut":
        plan = Plan(Tree.chain(2), Policy(1.0))
        monkeypatch.setattr(
            growth, "_fill", lambda *a: dropped_by_its_own_probability(fill(*a), 0.15)
        )
    else:
        plan = Plan(Tree.expansion([4]), Policy(1.0))
        monkeypatch.setattr(growth, "_fill", lambda *a: likeliest_drawn(fill(*a), 2))
    assert p_value(*small, plan) < 1e-6


def test_confidence_is_asked_before_each_draw_and_never_after(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drafttrain.tree import confident

    asked: list[Tensor] = []

    def watched(logits: Tensor, stop_below: float) -> Tensor:
        asked.append(logits)
        return goes_on(logits, stop_below)

    events: list[str] = []
    draw = confident.draw
    monkeypatch.setattr(confident, "goes_on", lambda *a: events.append("asked") or watched(*a))
    monkeypatch.setattr(confident, "draw", lambda *a: events.append("drawn") or draw(*a))
    target, drafter = small
    decode(
        target,
        drafter,
        [[3, 5, 2]],
        Plan(Confident(k=3, stop_below=1e-6), Policy(1.0)),
        max_new_tokens=2,
        stop_ids=(),
    )
    assert events == ["asked", "drawn"] * 3
    assert torch.stack(asked).shape[0] == 3
