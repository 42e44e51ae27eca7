"""Costs are times of the real work, taken once for each size and tree."""

from __future__ import annotations

import pytest
import torch

from drafttrain.decoding.costs import Costs, median_seconds
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.nn.sampling import Policy
from drafttrain.target.model import Target
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Tree
from tests.helpers import tiny_chat_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_chat_target()


@pytest.mark.parametrize("policy", [Policy(), Policy(1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tree", [Tree.chain(2), Tree.eagle1_static(), Dynamic(depth=2, top_k=2, total=4)], ids=str)
def test_a_round_is_drafting_and_verifying(target: Target, policy: Policy, tree, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Eagle1(target).eval()
    costs = Costs(target, drafter, policy, context=20, repeats=2)
    passes: list[int] = []
    real = target.step

    def counted(ids, *given, **more):
        passes.append(ids.shape[1])
        return real(ids, *given, **more)

    monkeypatch.setattr(target, "step", counted)
    assert costs.round(tree) == costs.draft(tree) + costs.verify(tree.size) > 0
    assert passes == [20, *[tree.size + 1] * 3]  # the context once, then a warm-up and two times
    assert costs.round(tree) == costs.draft(tree) + costs.verify(tree.size)
    assert len(passes) == 4 and costs.draft(Tree.chain(0)) == 0.0


def test_the_median_leaves_the_first_time_out() -> None:
    seconds = iter([0.2, 0.0, 0.0, 0.0])
    taken = median_seconds(lambda: __import__("time").sleep(next(seconds)), torch.device("cpu"), 3)
    assert taken < 0.1
