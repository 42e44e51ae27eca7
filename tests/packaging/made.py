"""A drafter that knows a few texts by heart, so that drafts are really accepted, and its
package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.flow import Batch
from drafttrain.nn.sampling import Policy
from drafttrain.packaging.writing import save_package
from drafttrain.target.adapter import Adapter, Trained
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters


def overfitted(
    target: Target,
    prompts: list[list[int]],
    *,
    steps: int = 120,
    tokens: int = 40,
    policy: Policy | None = None,
    stop_ids: tuple[int, ...] = (),
    **settings: Any,
) -> Eagle1:
    """Trained on the target's own greedy answers to these prompts, until it has learned most of
    them."""
    outputs, _ = decode(
        target,
        None,
        prompts,
        Plan(Tree.chain(0), policy or Policy()),
        max_new_tokens=tokens,
        stop_ids=stop_ids,
    )
    rows = [prompt + output.ids for prompt, output in zip(prompts, outputs, strict=True)]
    longest = max(map(len, rows))
    batch = Batch(
        torch.tensor([row + [0] * (longest - len(row)) for row in rows]),
        torch.tensor(
            [
                [len(p) <= i < len(r) for i in range(longest)]
                for p, r in zip(prompts, rows, strict=True)
            ]
        ),
        torch.tensor([len(row) for row in rows]),
        torch.arange(len(rows)),
    )
    features = target.features(batch.input_ids, batch.lengths, Eagle1.needs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = drafters.make(
            Eagle1,
            target,
            **{"regression": 0.2, "classification": 1.0, "balance_input": True, **settings},
        )
    adam = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    for _ in range(steps):
        adam.zero_grad()
        loss = drafter.loss(batch, features)
        (loss.total / loss.count).backward()
        adam.step()
    return drafter.eval()


def adapter_of(target: Target, linears: Any = "all") -> Adapter:
    """An adapter that changes the target's text; the target stays the original."""
    adapter = Trained(target, rank=4, alpha=8.0, dropout=0.0, linears=linears, seed=0)
    chance = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in adapter.weights.items():
            if name.endswith("/B"):
                weight.normal_(0, 0.2, generator=chance)
    found = adapter.adapter()
    adapter.remove()
    return found


def packed(folder: Path, drafter: Drafter, target: Target, **settings: Any) -> Path:
    """Saved with a chain of 4 by default."""
    arguments: dict[str, Any] = {
        "plan": Plan(Tree.chain(4)),
        "metrics": {"settings": {}, "rows": []},
        "provenance": {"command": "a test"},
        "trained_length": 64,
    }
    return save_package(folder, drafter=drafter, target=target, **(arguments | settings))
