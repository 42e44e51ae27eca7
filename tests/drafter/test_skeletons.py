"""Drafters of kinds to come fit the contract: exact at once, with trees, temperatures and
batches."""

from __future__ import annotations

import pytest
import torch

from drafttrain.data.datamodule import collate
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.growing import Block
from drafttrain.nn.sampling import Policy
from drafttrain.target import load
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Tree
from tests.decoding.models import PLAIN, PROMPTS, SMALL, p_value
from tests.drafter.skeletons import Blocks, Chosen, Corrected, Fused

KINDS = {"fused": Fused, "blocks": Blocks, "chosen": Chosen, "corrected": Corrected}
TREES = {
    "chain": Tree.chain(4),
    "tree": Tree.expansion([3, 2, 1]),
    "dynamic": Dynamic(depth=3, top_k=3, total=8),
    "confident": Confident(k=4, stop_below=0.01),
}
PLANS = {
    "ratio": Plan(Tree.chain(3), Policy(1.0), rule="ratio"),
    "block": Plan(Tree.chain(3), Policy(1.0)),
    "without replacement": Plan(Tree.expansion([3, 2]), Policy(0.8)),
}


def made(kind: str, *, draft_ids: list[int] | None = None, **target: object) -> Drafter:
    torch.manual_seed(0)
    settings = {"taps": [0, 1], "draft_ids": draft_ids}
    return KINDS[kind](load.tiny(**target), **settings).eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("part", [False, True])
def test_greedy_output_is_the_targets_own(kind: str, tree: str, part: bool) -> None:
    drafter = made(kind, family="qwen3", draft_ids=list(range(0, 320, 2)) if part else None)
    target = drafter.target
    plain, _ = decode(target, None, PROMPTS, PLAIN, max_new_tokens=16, stop_ids=())
    plan = Plan(TREES[tree])
    for rows in (1, 3):
        prompts = PROMPTS[:rows]
        out, tally = decode(target, drafter, prompts, plan, max_new_tokens=16, stop_ids=())
        assert [one.ids for one in out] == [one.ids for one in plain[:rows]]
        assert tally.drafted > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PLANS)
def test_sampled_text_keeps_the_targets_distribution(kind: str, name: str) -> None:
    drafter = made(kind, **SMALL)
    assert p_value(drafter.target, drafter, PLANS[name], rows=6000) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_a_text(kind: str) -> None:
    drafter = made(kind, seed=5).train()
    target, prompt = drafter.target, [3, 4, 5, 6, 7, 8]
    plain, _ = decode(target, None, [prompt], PLAIN, max_new_tokens=24, stop_ids=())
    ids = prompt + plain[0].ids
    rows = [  # cut at many lengths, since a block drafter learns from one anchor a row
        (torch.tensor(ids[:n]), torch.tensor([False] * 6 + [True] * (n - 6)), n)
        for n in range(12, 31)
    ]
    batch = collate(rows)
    features = target.features(batch.input_ids, batch.lengths, drafter.needs)
    features = type(features)(
        features.last_hidden.clone(), {k: v.clone() for k, v in features.layers.items()}
    )
    optimiser = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    for _ in range(80):
        loss = drafter.loss(batch, features)
        optimiser.zero_grad()
        (loss.total / loss.count).backward()
        optimiser.step()
    if not isinstance(drafter, Corrected):  # its loss is the block's, its steps are not trained
        plan = Plan(Tree.chain(3))
        _, tally = decode(target, drafter.eval(), [prompt], plan, max_new_tokens=24, stop_ids=())
        assert tally.tau > 2.5, tally
    assert isinstance(drafter, Block) == (kind != "fused")
