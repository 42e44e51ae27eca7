"""Several drafters at once: the target's own text, each member's own cache and chance, and what
does not fit together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Committed, Drafter
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.ensemble import Ensemble
from drafttrain.drafter.medusa import Medusa
from drafttrain.drafter.ngram import NGram
from drafttrain.drafter.selfspec import SelfSpec
from drafttrain.drafter.ssm import Ssm
from drafttrain.drafter.suffix import Suffix
from drafttrain.errors import InputError
from drafttrain.flow import Needs
from drafttrain.nn.sampling import Policy
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.candidates import Candidates
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.forest import Forest, forest
from drafttrain.tree.topology import Growth, Tree
from tests.decoding.models import SMALL, p_value
from tests.drafter.make import make
from tests.messages import said

PLAIN = Plan(Tree.chain(0))
PROMPTS = [[3, 5, 7, 9, 3, 5], [11], list(range(20, 44))]
MEMBERS: dict[str, Callable[[Target], list[Drafter]]] = {
    "two models": lambda target: [make(Ssm, target, layers=[0, 2]), make(Ssm, target, layers=[1])],
    "alike": lambda target: [make(Ssm, target, layers=[0]), make(Ssm, target, layers=[0])],
    "all kinds": lambda target: [
        make(Eagle1, target),
        make(NGram, target),
        make(Medusa, target, heads=2),
        make(Suffix, target),
    ],
}
FORESTS: dict[tuple[str, str], Growth] = {
    ("two models", "chains"): forest([4, 3]),
    ("two models", "trees"): Forest((Tree.expansion([2, 2]), Dynamic(depth=3, top_k=2, total=5))),
    ("two models", "ended early"): Forest((Confident(k=4, stop_below=0.02), Tree.chain(2))),
    ("two models", "one left out"): forest([0, 3]),
    ("alike", "copies"): Tree.expansion([2, 1]),
    ("all kinds", "chains"): Tree.chain(3),
    ("all kinds", "a tree each"): Forest(
        (
            Tree.expansion([2, 1]),
            Tree.chain(4),
            Tree.expansion([2]),
            Dynamic(depth=2, top_k=2, total=3),
        )
    ),
}
IDS = [" ".join(name) for name in FORESTS]


def made(name: str, target: Target) -> Ensemble:
    torch.manual_seed(0)
    return Ensemble(target, members=MEMBERS[name](target)).eval()  # type: ignore[return-value]


@pytest.fixture(scope="module")
def target() -> Target:
    return load.tiny()


def texts(outputs: list[Any]) -> list[list[int]]:
    return [output.ids for output in outputs]


# --- the text is the target's ---------------------------------------------------------------------


@pytest.mark.field("F52")
@pytest.mark.parametrize("name", FORESTS, ids=IDS)
def test_greedy_output_is_the_targets_own(name: tuple[str, str], target: Target) -> None:
    drafter, plan = made(name[0], target), Plan(FORESTS[name])
    plain = texts(decode(target, None, PROMPTS, PLAIN, max_new_tokens=20, stop_ids=())[0])
    stop = (plain[0][7], plain[1][13])
    for limit in (20, 2):
        outputs, tally = decode(target, drafter, PROMPTS, plan, max_new_tokens=limit, stop_ids=stop)
        for ids, output in zip(plain, outputs, strict=True):
            end = next((i + 1 for i, token in enumerate(ids) if token in stop), len(ids))
            assert output.ids == ids[: min(end, limit)]
        assert bool(tally.drafted) == (limit > 2)


@pytest.mark.parametrize("policy", [Policy(), Policy(1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", [*FORESTS][1::2], ids=IDS[1::2])
def test_a_rows_text_and_counts_are_its_own(
    name: tuple[str, str], policy: Policy, target: Target
) -> None:
    drafter, plan = made(name[0], target), Plan(FORESTS[name], policy)
    stop = (decode(target, None, PROMPTS[:1], PLAIN, max_new_tokens=8, stop_ids=())[0][0].ids[5],)
    together, _ = decode(target, drafter, PROMPTS, plan, max_new_tokens=14, stop_ids=stop, seed=4)
    for row, prompt in enumerate(PROMPTS):
        (single,), _ = decode(
            target,
            drafter,
            [prompt],
            plan,
            max_new_tokens=14,
            stop_ids=stop,
            seed=4,
            row_numbers=[row],
        )
        assert (single.ids, single.runs, single.tally) == (
            together[row].ids,
            together[row].runs,
            together[row].tally,
        )


@pytest.fixture(scope="module")
def small() -> tuple[Target, Ensemble]:
    """Two models over 8 tokens, so that they often propose the same one."""
    target = load.tiny(**{**SMALL, "layers": 3})  # type: ignore[arg-type]
    torch.manual_seed(0)
    return target, Ensemble(
        target, members=[make(Ssm, target, layers=[0]), make(Ssm, target, layers=[0, 1])]
    ).eval()  # type: ignore[return-value]


SAMPLED = {
    "chains": Plan(forest([2, 2]), Policy(1.0)),
    "drawn and most likely": Plan(
        Forest((Tree.expansion([2, 1]), Dynamic(depth=2, top_k=2, total=3))), Policy(0.8)
    ),
    "only the most likely": Plan(forest([2, 2]), Policy(1.0), sampled=False),
    "ended early": Plan(Forest((Confident(k=2, stop_below=0.3), Tree.chain(2))), Policy(1.0)),
}


@pytest.mark.field("F53")
@pytest.mark.parametrize("name", SAMPLED)
def test_first_three_tokens_follow_the_targets_distribution(
    small: tuple[Target, Ensemble], name: str
) -> None:
    assert p_value(*small, SAMPLED[name], rows=3000) > 1e-3


def test_a_member_that_copies_keeps_the_distribution_too() -> None:
    """Where the copying member has nothing to copy and nothing is drawn, the rule is the same."""
    target = load.tiny(**SMALL)  # type: ignore[arg-type]
    prompt = (3, 5, 2, 3, 5)
    for other in (make(Ssm, target, layers=[0]), make(Suffix, target)):
        members = [make(NGram, target), other]
        drafter = Ensemble(target, members=members).eval()
        assert (
            p_value(
                target, drafter, Plan(Tree.expansion([2, 1]), Policy(1.0)), rows=1500, prompt=prompt
            )
            > 1e-3
        )


def test_they_do_propose_the_same_tokens(small: tuple[Target, Ensemble]) -> None:
    target, drafter = small
    outputs, tally = decode(
        target, drafter, [[3, 5, 2]], Plan(forest([2, 2])), max_new_tokens=20, stop_ids=()
    )
    assert tally.drafted < 4 * tally.rounds, (
        "a path that both propose is read once where nothing is drawn"
    )
    assert texts(outputs) == texts(
        decode(target, None, [[3, 5, 2]], PLAIN, max_new_tokens=20, stop_ids=())[0]
    )


def test_each_member_draws_with_numbers_of_its_own(
    small: tuple[Target, Ensemble], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = small
    given: list[Tensor | None] = []
    propose = Ssm.propose
    monkeypatch.setattr(
        Ssm, "propose", lambda self, *more: given.append(more[4]) or propose(self, *more)
    )
    plan = Plan(Forest((Tree.expansion([2, 1]), Tree.chain(3))), Policy(1.0))
    decode(target, drafter, [[3, 5, 2]] * 2, plan, max_new_tokens=2, stop_ids=())
    one, two = given
    assert one is not None and two is not None and (one.shape, two.shape) == ((2, 4), (2, 3))
    assert len(torch.cat((one, two), 1).unique()) == 14
    given.clear()
    plan = Plan(Forest((Tree.chain(2), Dynamic(depth=2, top_k=2, total=3))), Policy(1.0))
    decode(target, drafter, [[3, 5, 2]], plan, max_new_tokens=2)
    assert given[0] is not None and given[1] is None, "what takes the most likely draws nothing"


# --- what each member knows -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "tree",
    [forest([3, 2]), Forest((Tree.expansion([2, 2]), Tree.expansion([2])))],
    ids=["chains", "trees"],
)
def test_after_every_round_each_members_cache_holds_one_plain_forward(
    tree: Forest, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that another member proposed and the target kept is read as true text; refused ones
    leave nothing."""
    drafter = made("two models", target)
    rounds: list[tuple[Ssm, list[int], Tensor]] = []
    extend = Ssm.extend

    def spy(self: Ssm, state: Any, committed: Committed, depth: int) -> tuple[Tensor, Candidates]:
        hidden, candidates = extend(self, state, committed, depth)
        rounds.append((self, state.cache.lengths.tolist(), candidates.logits[:, 0].clone()))
        return hidden, candidates

    monkeypatch.setattr(Ssm, "extend", spy)
    outputs, _ = decode(target, drafter, PROMPTS, Plan(tree), max_new_tokens=12, stop_ids=())
    full = [
        torch.tensor([prompt + output.ids]) for prompt, output in zip(PROMPTS, outputs, strict=True)
    ]
    seen = dict.fromkeys(map(id, drafter.drafters), 0)
    with torch.inference_mode():
        for member, lengths, logits in rounds:
            if len(lengths) < len(PROMPTS):
                continue  # rows have left
            for text, known, found in zip(full, lengths, logits, strict=True):
                plain = member.head(member.network.full_pass(text[:, :known])[:, -1])[0]
                torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-3)
                seen[id(member)] += 1
    assert len(seen) == 2 and min(seen.values()) >= 6


def test_a_member_without_a_tree_is_not_asked(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = made("two models", target)
    asked: list[Drafter] = []
    propose = Ssm.propose
    monkeypatch.setattr(
        Ssm, "propose", lambda self, *given: asked.append(self) or propose(self, *given)
    )
    decode(target, drafter, PROMPTS, Plan(forest([0, 3])), max_new_tokens=6, stop_ids=())
    assert asked and set(map(id, asked)) == {id(drafter.drafters[1])}


def test_rows_are_known_by_their_numbers(target: Target) -> None:
    drafter = made("two models", target)
    state = drafter.open(4, 8)
    drafter.select(state, torch.tensor([1, 3]))
    drafter.select(state, torch.tensor([1]))
    assert state.rows == [3] and all(own.cache.rows == 1 for own in state.members)


# --- what it is -----------------------------------------------------------------------------------


def test_a_copy_for_decoding_is_the_same_ensemble(target: Target) -> None:
    drafter = made("all kinds", target)
    assert drafter.needs == Needs(last_hidden=True) and not drafter.learns and drafter.can_draw
    half = drafter.at(torch.bfloat16)
    assert isinstance(half, Ensemble) and half.settings() == drafter.settings()
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16} and not half.training
    assert not any(p.requires_grad for p in half.parameters()) and any(
        p.requires_grad for p in drafter.parameters()
    )
    outputs, _ = decode(target, half, PROMPTS, Plan(Tree.chain(2)), max_new_tokens=8, stop_ids=())
    assert texts(outputs) == texts(
        decode(target, None, PROMPTS, PLAIN, max_new_tokens=8, stop_ids=())[0]
    )
    copies = Ensemble(target, members=[make(NGram, target), make(Suffix, target)])
    assert not copies.can_draw and copies.dtype is None and copies.needs == Needs()


def test_a_tree_for_one_is_grown_by_each(target: Target) -> None:
    drafter = made("all kinds", target)
    grown = drafter.shaped(Tree.chain(4))
    assert grown == Forest((Tree.chain(4), Tree.chain(4), Tree.chain(2), Tree.chain(4))), (
        "no deeper than a member can"
    )
    assert drafter.shaped(grown) is grown and drafter.shaped(Tree.chain(0)) == Tree.chain(0)
    plan = Plan(Tree.chain(4), Policy(1.0)).made_by(drafter)
    assert (plan.tree, plan.rule_name, plan.guarantee) == (grown, "multi_step", "distribution")
    assert Plan(forest([3, 0, 0, 0]), Policy(1.0)).made_by(drafter).rule_name == "block"


@pytest.mark.parametrize(
    ("tree", "fault"),
    [
        (forest([1, 2]), "trees_for_members"),
        (forest([1, 1, 3, 1]), "member_too_deep"),
        (
            Forest(
                (Tree.chain(1), Dynamic(depth=2, top_k=2, total=3), Tree.chain(1), Tree.chain(1))
            ),
            "member_other_tree",
        ),
        (forest([400, 400, 0, 400]), "too_many_nodes"),
    ],
)
def test_trees_that_do_not_fit_are_refused(tree: Growth, fault: str, target: Target) -> None:
    with pytest.raises(InputError, match=said(f"drafter.{fault}")):
        decode(target, made("all kinds", target), PROMPTS, Plan(tree), max_new_tokens=4)


def test_what_is_no_ensemble_is_refused(target: Target) -> None:
    one = make(Ssm, target, layers=[0])
    with pytest.raises(InputError, match=said("drafter.no_members")):
        Ensemble(target, members=[])
    with pytest.raises(InputError, match=said("drafter.nested_ensemble")):
        Ensemble(target, members=[one, Ensemble(target, members=[one])])
    with pytest.raises(InputError, match=said("drafter.member_inside")):
        Ensemble(target, members=[one, make(SelfSpec, target, skip_mlp=[0])])
    with pytest.raises(InputError, match=said("drafter.member_of_another_target")):
        Ensemble(load.tiny(), members=[one])
    with pytest.raises(InputError, match=said("drafter.ensemble_not_trained")):
        Ensemble(target, members=[one]).loss(None, None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=said("drafter.forest_for_one")):
        decode(target, one, PROMPTS, Plan(forest([2, 2])), max_new_tokens=4)
