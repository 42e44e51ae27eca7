"""What tests of drafters that are a part of the target share: which layers read how many tokens,
and what is left in its cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Committed
from drafttrain.drafter.inside import Inside, InsideState
from drafttrain.nn.cache import KVCache
from drafttrain.target.model import Target
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Growth, Tree

PLAIN = Plan(Tree.chain(0))
PROMPTS = [[3, 5, 7, 9], [11], list(range(20, 50))]
"""Of ragged lengths, one beyond the window of the sliding families."""
TREES: dict[str, Growth] = {
    "chain": Tree.chain(4),
    "tree": Tree.expansion([2, 2, 1]),
    "dynamic": Dynamic(depth=4, top_k=3, total=9),
    "confident": Confident(k=4, stop_below=0.001),
}


def texts(outputs: list[Any]) -> list[list[int]]:
    return [output.ids for output in outputs]


@contextlib.contextmanager
def counted(target: Target) -> Iterator[list[int]]:
    """Tokens that each of the target's own layers reads meanwhile."""
    counts = [0] * len(target.decoder_layers)
    handles = []
    for number, layer in enumerate(target.decoder_layers):

        def hook(_module: Any, given: tuple[Any, ...], _out: Any, number: int = number) -> None:
            counts[number] += given[0].shape[0] * given[0].shape[1]

        handles.append(layer.register_forward_hook(hook))
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def watched(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[list[tuple[list[int], list[torch.Tensor]]]]:
    """At the beginning of every round: lengths of the target's cache, and copies of its keys and
    values."""
    seen: list[tuple[list[int], list[torch.Tensor]]] = []
    propose = Inside.propose

    def spy(self: Inside, state: InsideState, committed: Committed, *more: Any) -> Any:
        cache = state.shared
        assert isinstance(cache, KVCache)
        seen.append(
            (cache.lengths.tolist(), [tensor.clone() for tensor in (*cache.keys, *cache.values)])
        )
        out = propose(self, state, committed, *more)
        assert cache.lengths.tolist() == seen[-1][0], "nothing that was drafted is committed"
        return out

    with monkeypatch.context() as patch:
        patch.setattr(Inside, "propose", spy)
        yield seen


def check_entries(
    target: Target, outputs: list[Any], seen: list[tuple[list[int], list[torch.Tensor]]]
) -> int:
    """Committed entries must be those of one plain pass over the text. Returns how many rounds of
    how many rows were compared."""
    compared = 0
    for row, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        text = torch.tensor([prompt + output.ids])
        cache = target.new_cache(1, text.shape[1])
        target.step(text, cache)
        for lengths, tensors in seen:
            if len(lengths) < len(PROMPTS):
                continue  # rows have left
            for mine, theirs in zip(tensors, (*cache.keys, *cache.values), strict=True):
                torch.testing.assert_close(
                    mine[row, :, : lengths[row]], theirs[0, :, : lengths[row]], rtol=1e-3, atol=1e-3
                )
            compared += 1
    return compared
