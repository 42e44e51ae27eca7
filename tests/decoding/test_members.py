"""How far the text goes along each member's tree: as far as that member by itself would have been
followed from there."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from drafttrain.decoding.loop import Output, decode
from drafttrain.decoding.members import followed
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.ensemble import Ensemble
from drafttrain.drafter.ngram import NGram
from drafttrain.drafter.ssm import Ssm
from drafttrain.errors import InputError
from drafttrain.nn.sampling import Policy
from drafttrain.target import load
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.forest import Forest
from drafttrain.tree.share import kept, shared
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters
from tests.messages import said

PROMPTS = [[3, 5, 7, 3, 5], [11, 12], list(range(20, 40)), [9, 9, 9]]
TREE = Tree.expansion([3, 2, 1])
LIMIT = 24


@pytest.fixture(scope="module")
def drafter() -> Ensemble:
    target = load.tiny()
    torch.manual_seed(0)
    return Ensemble(
        target,
        members=[
            drafters.make(Ssm, target, layers=[0, 1]),
            drafters.make(NGram, target),
            drafters.make(Ssm, target, layers=[1, 2]),
        ],
    ).eval()  # type: ignore[return-value]


def whole_rounds(output: Output) -> list[int]:
    """Drafts kept in every round but the last whose text could go along the full depth of the
    tree."""
    found, place = [], 1
    for emitted, count in output.runs[1:-1]:
        found += [count] if LIMIT - place - 1 >= TREE.max_depth else []
        place += emitted
    return found


@pytest.mark.parametrize("policy", [Policy(), Policy(0.7)], ids=["greedy", "sampled"])
def test_each_round_is_followed_as_by_decoding(drafter: Ensemble, policy: Policy) -> None:
    """The longest of a round's paths is what was kept; batches change nothing."""
    target = drafter.target
    found = followed(target, drafter, PROMPTS, TREE, max_new_tokens=LIMIT, policy=policy, batch=3)
    assert found == followed(
        target, drafter, PROMPTS, TREE, max_new_tokens=LIMIT, policy=policy, batch=1
    )
    outputs, _ = decode(target, drafter, PROMPTS, Plan(TREE, policy), max_new_tokens=LIMIT)
    accepted = [count for output in outputs for count in whole_rounds(output)]
    assert len(found) == len(accepted) > 10
    if policy.greedy:
        assert [max(map(len, one)) for one in found] == accepted
    else:
        assert all(max(map(len, one)) >= count for one, count in zip(found, accepted, strict=True))
    assert {len(one) for one in found} == {3} and any(len(set(one)) > 1 for one in found)


def test_a_member_is_followed_as_it_would_be_by_itself(drafter: Ensemble) -> None:
    """After the same text, a member by itself keeps what its tree in the ensemble was
    followed for."""
    target = drafter.target
    found = followed(target, drafter, PROMPTS[:1], TREE, max_new_tokens=LIMIT)
    outputs, _ = decode(target, drafter, PROMPTS[:1], Plan(TREE), max_new_tokens=LIMIT)
    place = 1
    assert found
    for one, (emitted, _) in zip(found, outputs[0].runs[1:], strict=False):
        text = PROMPTS[0] + outputs[0].ids[:place]
        for member, path in zip(drafter.drafters, one, strict=True):
            # The prefill chooses the anchor again, so the draft follows the same text.
            (single,), _ = decode(
                target, member, [text[:-1]], Plan(TREE), max_new_tokens=6, stop_ids=()
            )
            assert single.ids[0] == text[-1]
            nodes = single.nodes[0]
            assert path == (TREE.paths[nodes[-1]] if nodes else ())
        place += emitted


def test_shared_trees_keep_what_was_counted(drafter: Ensemble) -> None:
    found = followed(drafter.target, drafter, PROMPTS, TREE, max_new_tokens=LIMIT)
    forest = shared(found, 5)
    again = followed(drafter.target, drafter, PROMPTS, forest, max_new_tokens=LIMIT)
    assert 1 <= forest.size <= 5
    assert sum(max(map(len, one)) for one in again) > 0
    assert kept([set(tree.paths) for tree in forest.trees], Counter(again)) == sum(
        max(map(len, one)) for one in again
    )  # type: ignore[attr-defined]


def test_trees_that_change_are_refused(drafter: Ensemble) -> None:
    tree = Forest((Tree.chain(2), Tree.chain(2), Dynamic(depth=2, top_k=2, total=3)))
    with pytest.raises(InputError, match=said("decoding.fixed_shape")):
        followed(drafter.target, drafter, PROMPTS, tree, max_new_tokens=4)
