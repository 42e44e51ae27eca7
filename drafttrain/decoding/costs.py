"""What a round of speculative decoding costs on a device: seconds of drafting a tree, and of verifying its nodes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from drafttrain.drafter.base import Drafter, Fresh
from drafttrain.flow import Features
from drafttrain.nn.sampling import Policy
from drafttrain.target.model import Target
from drafttrain.tree.topology import Growth

REPEATS = 7
"""Times of which the median counts; neighbours on a machine make single ones worthless."""


@dataclass
class Costs:
    """Seconds on this device, for one row behind a context of so many tokens. Measured when first asked for.

    Args:
        drafter: its decoding copy.
        context: committed tokens that attention reads; costs grow with it.
        emitted: true features that a drafter takes in at the start of a round, about tau.
    """

    target: Target
    drafter: Drafter
    policy: Policy
    context: int
    emitted: int = 2
    repeats: int = REPEATS
    verified: dict[int, float] = field(default_factory=dict)
    """{positions read, the anchor's among them: seconds}."""
    drafted: dict[Growth, float] = field(default_factory=dict)

    def verify(self, nodes: int) -> float:
        """Seconds of one target pass over the anchor and so many drafts, vocabulary and choice included."""
        positions = nodes + 1
        if positions not in self.verified:
            self.verified[positions] = self._verify_seconds(positions)
        return self.verified[positions]

    def draft(self, tree: Growth) -> float:
        """Seconds of growing a tree once."""
        if not tree.size:
            return 0.0
        if tree not in self.drafted:
            self.drafted[tree] = self._draft_seconds(tree)
        return self.drafted[tree]

    def round(self, tree: Growth) -> float:
        """Seconds of a round: draft and verify. What the host does between them is not in it."""
        return self.draft(tree) + self.verify(tree.size)

    @torch.inference_mode()
    def _verify_seconds(self, positions: int) -> float:
        target, device = self.target, self.target.device
        cache = target.new_cache(1, self.context + positions)
        ids = torch.arange(self.context, device=device)[None] % target.vocab_size
        target.step(ids, cache)
        cache.commit(torch.tensor([self.context], device=device))
        new = ids[:, :1].expand(1, positions)
        # A star: every draft sees the anchor alone. The shape of a tree does not change the cost of a pass.
        among = torch.eye(positions, dtype=torch.bool, device=device)
        among[:, 0] = True
        depths = torch.ones(1, positions, dtype=torch.int64, device=device)
        depths[0, 0] = 0
        layers = self.drafter.needs.layers

        def once() -> object:
            hidden = target.step(new, cache, among=among[None], depths=depths, layers=layers).hidden
            logits = target.head(hidden)
            return logits.argmax(-1).tolist() if self.policy.greedy else self.policy.probs(logits).sum().item()

        return median_seconds(once, device, self.repeats)

    @torch.inference_mode()
    def _draft_seconds(self, tree: Growth) -> float:
        drafter, target, device = self.drafter, self.target, self.target.device
        rounds = self.repeats + 2
        room = self.context + rounds * self.emitted + max(tree.size, tree.reads) + 1
        state: Any = drafter.open(1, room)
        draws = tree.can_draw and not self.policy.greedy
        u = torch.full((1, tree.size), 0.5, dtype=torch.float64, device=device) if draws else None

        def fresh(count: int) -> Fresh:
            ids = torch.arange(count, device=device)[None] % target.vocab_size
            value = target.embed(ids)
            features = Features(value, {layer: value for layer in drafter.needs.layers})
            return Fresh(features, ids, torch.tensor([count], device=device))

        drafter.propose(state, fresh(self.context), tree, self.policy, u)
        step = fresh(self.emitted)
        return median_seconds(
            lambda: drafter.propose(state, step, tree, self.policy, u).tokens.tolist(), device, self.repeats
        )


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """The median of several times, the first one, which warms up, left out."""

    def timed() -> float:
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - start

    timed()
    return statistics.median(timed() for _ in range(repeats))
