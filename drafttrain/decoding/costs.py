"""What a round of speculative decoding costs on a device: seconds of drafting a tree, and of
verifying its nodes."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from drafttrain.decoding.measure import Watch, unwatched
from drafttrain.drafter.base import Committed, Drafter
from drafttrain.drafter.inside import Inside
from drafttrain.flow import Features, PartialPass
from drafttrain.nn.sampling import Policy
from drafttrain.target.model import Target
from drafttrain.tree.topology import Growth

REPEATS = 7
"""Times of which the median counts; neighbours on a machine make single ones worthless."""
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Costs:
    """Seconds on one device, for one row after some context."""

    verified: dict[int, float]
    """{drafts checked: seconds of one target pass over them and the anchor, vocabulary and choice
    included}."""
    drafted: dict[Growth, float]
    """{tree: seconds of growing it once}."""

    def round(self, tree: Growth) -> float:
        """Seconds of a round: draft and verify. What the host does between them is not in it."""
        return self.drafted.get(tree, 0.0) + self.verified[tree.size]


@torch.inference_mode()
def measure_costs(
    target: Target,
    drafter: Drafter,
    policy: Policy,
    trees: Sequence[Growth],
    *,
    context: int,
    emitted: int = 2,
    repeats: int = REPEATS,
    watch: Watch = unwatched,
) -> Costs:
    """Costs of some trees, and of a plain pass.

    Args:
        drafter: its decoding copy.
        context: committed tokens that attention reads; costs grow with it.
        emitted: true features that a drafter takes in at the start of a round, about tau.
        watch: shown the rounds in which everything is timed once.
    """
    sizes = sorted({0, *(tree.size for tree in trees)})
    growing = [tree for tree in dict.fromkeys(trees) if tree.size]
    verify = _verifier(target, drafter, policy, context, sizes[-1])
    draft = _grower(target, drafter, policy, context, emitted, growing, repeats)
    jobs: dict[int | Growth, Callable[[], object]] = {}
    jobs |= {size: functools.partial(verify, size) for size in sizes}
    jobs |= {tree: functools.partial(draft, tree) for tree in growing}
    seconds = interleaved_seconds(jobs, target.device, repeats, watch)
    return Costs({size: seconds[size] for size in sizes}, {tree: seconds[tree] for tree in growing})


def interleaved_seconds(
    jobs: Mapping[Name, Callable[[], object]],
    device: torch.device,
    repeats: int = REPEATS,
    watch: Watch = unwatched,
) -> dict[Name, float]:
    """The median of several times of each job, all jobs in turn, the first round, which warms up,
    left out.

    In turn, since a machine's speed swings: what is timed in one stretch is compared with what was
    timed in another.
    """
    found: dict[Name, list[float]] = {name: [] for name in jobs}
    for _ in watch(range(repeats + 1), "costs timed"):
        for name, work in jobs.items():
            start = time.perf_counter()
            work()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def _verifier(
    target: Target, drafter: Drafter, policy: Policy, context: int, most: int
) -> Callable[[int], object]:
    """A function that checks a number of drafts, after a context that is read here."""
    device = target.device
    cache = target.new_cache(1, context + most + 1)
    ids = torch.arange(context, device=device)[None] % target.vocab_size
    target.step(ids, cache)
    cache.commit(torch.tensor([context], device=device))

    def verify(drafts: int) -> object:
        positions = drafts + 1
        new = ids[:, :1].expand(1, positions)
        # A star: every draft sees only the anchor. The shape of a tree changes no cost of a
        # pass.
        tree_mask = torch.eye(positions, dtype=torch.bool, device=device)
        tree_mask[:, 0] = True
        depths = torch.ones(1, positions, dtype=torch.int64, device=device)
        depths[0, 0] = 0
        partial_pass = None
        layer = drafter.shared_layer if isinstance(drafter, Inside) else None
        if layer is not None and drafts:
            # As of a chain, of which only the last draft has been through none of the layers.
            places = torch.arange(positions, device=device)[None]
            places[0, -1] = -1
            partial_pass = PartialPass(layer, target.embed(new[:, :-1]), places)
        layers = drafter.needs.layers
        hidden = target.step(
            new,
            cache,
            tree_mask=tree_mask[None],
            depths=depths,
            layers=layers,
            partial_pass=partial_pass,
        ).hidden
        logits = target.head(hidden)
        return logits.argmax(-1).tolist() if policy.greedy else policy.probs(logits).sum().item()

    return verify


def _grower(
    target: Target,
    drafter: Drafter,
    policy: Policy,
    context: int,
    emitted: int,
    trees: Sequence[Growth],
    repeats: int,
) -> Callable[[Growth], object]:
    """A function that grows a tree once, after a context that is read here and is `emitted` longer
    each time."""
    device = target.device
    most = max((max(tree.size, tree.reads) for tree in trees), default=0)
    state: Any = drafter.open(1, context + len(trees) * (repeats + 1) * emitted + most + 1)
    if isinstance(drafter, Inside):
        cache = target.new_cache(1, context + most + 1)
        target.step(torch.arange(context, device=device)[None] % target.vocab_size, cache)
        cache.commit(torch.tensor([context], device=device))
        drafter.attach(state, cache)

    def committed(count: int) -> Committed:
        ids = torch.arange(count, device=device)[None] % target.vocab_size
        value = target.embed(ids)
        features = Features(value, {layer: value for layer in drafter.needs.layers})
        return Committed(features, ids, torch.tensor([count], device=device))

    def draft(tree: Growth, given: Committed) -> object:
        draws = tree.can_draw and drafter.can_draw and not policy.greedy
        u = torch.full((1, tree.size), 0.5, dtype=torch.float64, device=device) if draws else None
        return drafter.propose(state, given, tree, policy, u).tokens.tolist()

    for tree in trees[:1]:
        draft(tree, committed(context))
    step = committed(emitted)
    return lambda tree: draft(tree, step)
