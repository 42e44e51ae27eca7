"""Candidates of nodes: the whole vocabulary, a part of it, or a few tokens chosen for each node."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from drafttrain.nn.processing import Text
from drafttrain.nn.sampling import Policy
from drafttrain.tree.candidates import Candidates

V = 7
OWN = torch.tensor([[[4, 1], [0, 6]], [[2, 5], [3, 1]]])  # b m w
IDS = {"all": None, "part": torch.tensor([1, 3, 4]), "own": OWN}


def made(kind: str) -> Candidates:
    ids = IDS[kind]
    width = V if ids is None else ids.shape[-1]
    logits = torch.randn(2, 2, width, generator=torch.Generator().manual_seed(0))
    return Candidates(logits, V, ids)


def slowly(found: Candidates, values: Tensor, missing: float) -> Tensor:
    wide = torch.full((2, values.shape[1], V), missing)
    for b in range(2):
        for m in range(values.shape[1]):
            for place in range(values.shape[2]):
                token = found.to_ids(torch.full((2, values.shape[1], 1), place))[b, m, 0]
                wide[b, m, token] = values[b, m, place]
    return wide


@pytest.mark.parametrize("kind", IDS)
def test_values_are_spread_over_the_targets_vocabulary(kind: str) -> None:
    found = made(kind)
    for missing in (0.0, -math.inf):
        wide = found.spread(found.logits, missing)
        assert torch.equal(wide, slowly(found, found.logits, missing))


@pytest.mark.parametrize("kind", IDS)
def test_some_nodes_have_what_they_have_among_all(kind: str) -> None:
    found = made(kind)
    for nodes in ([1], [1, 0], [0, 0, 1]):
        some = found.at(nodes)
        assert torch.equal(some.logits, found.logits[:, nodes])
        assert torch.equal(some.spread(some.logits), found.spread(found.logits)[:, nodes])
        places = torch.ones(2, len(nodes), 1, dtype=torch.int64)
        assert torch.equal(some.to_ids(places), found.to_ids(torch.ones(2, 2, 1).long())[:, nodes])


@pytest.mark.parametrize("kind", IDS)
def test_a_processor_may_raise_a_token_that_is_no_candidate(kind: str) -> None:
    found, policy = made(kind), Policy(1.0, logit_bias={2: 5.0})
    text = Text.of([[1], [2]], [[], []], [], torch.device("cpu"))
    after = found.processed(policy, text, torch.empty(2, 2, 0, dtype=torch.int64))
    assert after.ids is None and after.logits.shape == (2, 2, V)
    before = found.spread(found.logits, -math.inf)
    others = [token for token in range(V) if token != 2]
    assert torch.equal(after.logits[..., others], before[..., others])
    assert torch.equal(after.logits[..., 2], before[..., 2] + 5.0)
