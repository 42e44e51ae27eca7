"""What the target writes greedily after each row's first prompt, and how much of it a drafter would
write by itself."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from drafttrain.data.datamodule import ConversationData, collate
from drafttrain.drafter.base import Drafter
from drafttrain.flow import Features
from drafttrain.nn.sampling import Policy
from drafttrain.target import generation
from drafttrain.target.model import Target

_WIDTH = 4096
"""Tokens of a batch, padding counted, that a model reads at once while it marks."""


@dataclass(frozen=True)
class Reference:
    """What the target writes greedily after a prompt."""

    prompt: list[int]
    answer: list[int]

    def covered(self, matched: int, match: int | None) -> bool:
        """Are that many matched tokens enough? An answer that ends earlier is matched in full."""
        return matched >= (len(self.answer) if match is None else min(match, len(self.answer)))


def references(
    target: Target, data: ConversationData, tokens: int, *, slots: int = 16
) -> list[Reference]:
    """For each row its first prompt, and at most `tokens` tokens of the target's greedy answer.

    Rows that were written greedily hold it; after the prompts of others the target writes it now.
    """
    found: list[Reference | None] = []
    prompts: dict[int, list[int]] = {}
    for place, index in enumerate(data.indices):
        ids, mask = (value[: data.lengths[place]] for value in data.set.row(index))
        answer = mask[1:].nonzero()[:, 0] + 1
        start = int(answer[0])
        end = next((i for i in range(start, len(ids)) if not mask[i]), len(ids))
        found.append(
            Reference(ids[:start].tolist(), ids[start : min(end, start + tokens)].tolist())
        )
        if data.set.temperature[index] != 0:
            prompts[place] = ids[:start].tolist()

    def script(place: int, prompt: list[int]) -> generation.Script:
        room = max(1, min(tokens, target.context - len(prompt)))
        written = yield generation.Segment(prompt, room, Policy(), target.stop_ids)
        found[place] = Reference(prompt, written)

    if prompts:
        scripts = ((script(place, prompt), random.Random(0)) for place, prompt in prompts.items())
        capacity = max(map(len, prompts.values())) + tokens + 2
        for _ in generation.run(target, scripts, slots=min(slots, len(prompts)), capacity=capacity):
            pass
    return [one for one in found if one is not None]


def matched(drafter: Drafter, wanted: Sequence[Reference]) -> list[int]:
    """Tokens of each reference that the drafter would write by itself, up to the first that it
    would not."""
    lengths = [0] * len(wanted)
    sizes = [len(one.prompt) + len(one.answer) for one in wanted]
    drafter.eval()
    for group in similar_sizes(sizes):
        rows = []
        for place in group:
            ids = torch.tensor(wanted[place].prompt + wanted[place].answer)
            rows.append((ids, torch.arange(len(ids)) >= len(wanted[place].prompt), place))
        batch = collate(rows)
        guesses = drafter.guesses(batch, Features())
        assert guesses is not None and guesses.shape[-1] == 1
        right = guesses[:, :, 0].cpu() == batch.input_ids  # b s
        for row, place in enumerate(group):
            own = right[row, len(wanted[place].prompt) : sizes[place]]
            lengths[place] = int(own.long().cumprod(0).sum())
    return lengths


def similar_sizes(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Groups of rows of similar size, at most `_WIDTH` tokens each."""
    group: list[int] = []
    for place in sorted(range(len(sizes)), key=lambda place: sizes[place]):
        if group and (len(group) + 1) * sizes[place] > _WIDTH:
            yield group
            group = []
        group.append(place)
    if group:
        yield group
