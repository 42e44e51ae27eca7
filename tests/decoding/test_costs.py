"""Costs are times of the real work, all of it timed in turn."""

from __future__ import annotations

import time

import pytest
import torch

from drafttrain.decoding.costs import interleaved_seconds, measure_costs
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.nn.sampling import Policy
from drafttrain.target.model import Target
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters

TREES = [Tree.chain(2), Tree.eagle1_static(), Dynamic(depth=2, top_k=2, total=4)]


@pytest.mark.parametrize("policy", [Policy(), Policy(1.0)], ids=["greedy", "sampled"])
def test_a_round_is_drafting_and_verifying(
    target: Target, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    grown: list[int] = []
    real, drafter = target.step, drafters.make(Eagle1, target).eval()
    propose = drafter.propose

    def counted(ids, *given, **more):
        passes.append(ids.shape[1])
        return real(ids, *given, **more)

    def noted(state, committed, tree, *given, **more):
        grown.append(tree.size)
        return propose(state, committed, tree, *given, **more)

    monkeypatch.setattr(target, "step", counted)
    monkeypatch.setattr(drafter, "propose", noted)
    costs = measure_costs(target, drafter, policy, TREES, context=20, repeats=2)
    assert passes == [
        20,
        *[1, 3, 5, 26] * 3,
    ]  # the context once, then a warm-up and two times of each
    assert grown == [2, *[2, 25, 4] * 3]
    for tree in TREES:
        assert (
            costs.round(tree)
            == costs.drafted[tree] + costs.verified[tree.size]
            > costs.drafted[tree]
            > 0
        )
    assert costs.round(Tree.chain(0)) == costs.verified[0] > 0


def test_the_median_leaves_the_first_time_out() -> None:
    slow = iter([0.2, 0.0, 0.0, 0.0])
    order: list[str] = []
    jobs = {
        "a": lambda: (order.append("a"), time.sleep(next(slow))),
        "b": lambda: order.append("b"),
    }
    found = interleaved_seconds(jobs, torch.device("cpu"), 3)
    assert found["a"] < 0.1 and order == ["a", "b"] * 4
