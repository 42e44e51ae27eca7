"""How siblings are drawn while a tree grows: from the distribution that they are said to be drawn
from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.decoding.rules import multi_step
from drafttrain.flow import Sampling
from drafttrain.nn.sampling import Policy
from drafttrain.tree.candidates import Candidates
from drafttrain.tree.growth import grow
from drafttrain.tree.topology import Tree

V, ROWS = 6, 30_000
IDS = torch.tensor([1, 3, 4])


class Constant:
    """Has the same distribution everywhere, over a part of the target's vocabulary."""

    def __init__(self, probs: list[float]) -> None:
        logits = torch.tensor(probs).log().expand(ROWS, 1, -1)
        self.candidates = Candidates(logits, V, IDS)

    def expand(
        self, state: Any, tokens: Tensor, hidden: Tensor, depth: int, tree_mask: Tensor
    ) -> tuple[Tensor, Candidates]:
        raise AssertionError("these trees have one level")


def grown(probs: list[float], k: int, policy: Policy, how: Sampling) -> Any:
    drafter = Constant(probs)
    u = torch.rand(ROWS, k, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hidden, tree = torch.zeros(ROWS, 1, 1), Tree.expansion([k])
    return grow(drafter, None, hidden, drafter.candidates, tree, policy, u, how)


def shares(tokens: Tensor) -> list[float]:
    return (tokens.bincount(minlength=V) / len(tokens)).tolist()


def test_independent_siblings_repeat() -> None:
    found = grown([0.5, 0.3, 0.2], 2, Policy(1.0), Sampling.IID)
    assert found.sampling is Sampling.IID
    for j in range(2):
        assert shares(found.tokens[:, j]) == pytest.approx([0, 0.5, 0, 0.3, 0.2, 0], abs=0.015)
    assert float((found.tokens[:, 0] == found.tokens[:, 1]).float().mean()) == pytest.approx(
        0.38, abs=0.015
    )


def test_siblings_without_replacement_do_not() -> None:
    found = grown([0.5, 0.3, 0.2], 3, Policy(1.0), Sampling.WOR)
    assert found.sampling is Sampling.WOR
    assert (found.tokens.sort(-1).values == IDS).all()


def test_beyond_its_support_a_distribution_goes_on_over_the_targets_vocabulary() -> None:
    """As the rule counts: uniform over every token not tried, not only over those the drafter can
    say."""
    found = grown([0.5, 0.3, 0.2], 2, Policy(1.0, top_k=1), Sampling.WOR)
    assert (found.tokens[:, 0] == 1).all()
    assert shares(found.tokens[:, 1]) == pytest.approx([0.2, 0, 0.2, 0.2, 0.2, 0.2], abs=0.015)
    target = torch.tensor([0.1, 0.2, 0.1, 0.3, 0.2, 0.1])
    p = target.expand(ROWS, 3, V)
    u = torch.rand(ROWS, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kept = multi_step(p, found, u)
    tokens = torch.cat((found.tokens, kept.next_token[:, None]), 1)
    first = tokens.gather(1, torch.where(kept.count > 0, kept.path[:, 0], 2)[:, None])[:, 0]
    assert shares(first) == pytest.approx(target.tolist(), abs=0.015)
