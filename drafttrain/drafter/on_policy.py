"""Answers that a drafter writes itself, to be judged by the target: the text on which a draft
really goes wrong.

DistillSpec (Zhou et al. 2024, arXiv:2310.08461, section 4): student-written text, mixed with the
set's by a share of the rows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from drafttrain.data.datamodule import collate
from drafttrain.errors import InputError, NotFinite
from drafttrain.flow import Batch
from drafttrain.nn import finite
from drafttrain.nn.cache import KVCache
from drafttrain.nn.causal import CausalLM
from drafttrain.nn.sampling import Policy
from drafttrain.target import generation
from drafttrain.target.model import Pass, Target


@dataclass(frozen=True)
class OnPolicy:
    """Which rows the drafter writes, and how. Raises: InputError for settings out of range."""

    share: float
    """Of training rows."""
    tokens: int
    """Most that are written after a prompt."""
    temperature: float

    def __post_init__(self) -> None:
        share = self.share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise InputError(f"on_policy={share}: needs a share from 0 to 1")
        if type(self.tokens) is not int or self.tokens < 1:
            raise InputError(f"on_policy_tokens={self.tokens}: needs an integer of at least 1")
        Policy(self.temperature)

    def chosen(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """(b) bool, on the CPU: the rows to write. Rows without a label stay as they are."""
        rows = len(batch.lengths)
        if not self.share:
            return torch.zeros(rows, dtype=torch.bool)
        picked = torch.rand(rows, generator=generator, device=generator.device) < self.share
        return picked.cpu() & batch.loss_mask.any(1).cpu()


class Writer(Protocol):
    """A drafter that is a language model."""

    @property
    def dtype(self) -> torch.dtype | None: ...

    @property
    def target(self) -> Target: ...

    @property
    def network(self) -> CausalLM: ...

    @property
    def draft_ids(self) -> Tensor | None: ...

    def head(self, hidden: Tensor) -> Tensor: ...


class _Pen:
    """A drafter as plain generation reads it: logits are over the target's vocabulary."""

    def __init__(self, drafter: Writer) -> None:
        self.drafter = drafter
        self.device = drafter.network.device

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        return self.drafter.network.new_cache(rows, capacity)

    def step(self, ids: Tensor, cache: KVCache) -> Pass:
        return Pass(self.drafter.network.read(ids, cache), {})

    def head(self, hidden: Tensor) -> Tensor:
        logits = self.drafter.head(hidden)
        if self.drafter.draft_ids is None:
            return logits
        wide = logits.new_full((*logits.shape[:-1], self.drafter.target.vocab_size), -torch.inf)
        wide[..., self.drafter.draft_ids] = logits
        return wide


@torch.no_grad()
def write_answers(
    drafter: Writer, batch: Batch, rows: Tensor, settings: OnPolicy, generator: torch.Generator
) -> Batch:
    """Answers after prompts of some rows; the labels are the tokens written.

    A prompt is all that comes before one of the row's answers, drawn uniformly; where every token
    is a label, all before a place drawn uniformly. What is written depends only on the generator,
    the rows and the drafter's weights.

    Args:
        rows: (b) bool, each with a label.
        generator: gives every row a seed of its own.
    """
    places = rows.nonzero()[:, 0].tolist()
    seeds = torch.randint(
        0, 1 << 62, (len(places),), generator=generator, device=generator.device
    ).tolist()
    chances = [random.Random(seed) for seed in seeds]
    prompts = [_prompt(batch, place, chance) for place, chance in zip(places, chances, strict=True)]
    room = min(drafter.target.context, drafter.network.context)
    limits = [max(1, min(settings.tokens, room - len(prompt))) for prompt in prompts]
    policy, stop_ids = Policy(settings.temperature), drafter.target.stop_ids
    answers: list[list[int]] = [[] for _ in prompts]

    def script(number: int) -> generation.Script:
        answers[number] = yield generation.Segment(
            prompts[number], limits[number], policy, stop_ids
        )

    scripts = ((script(number), chance) for number, chance in enumerate(chances))
    capacity = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)) + 2
    try:
        for _ in generation.run(_Pen(drafter), scripts, slots=len(prompts), capacity=capacity):
            pass
    except NotFinite as error:
        raise finite.drafter_fault(drafter, drafter.dtype, "text that it writes") from error
    made: list[tuple[Tensor, Tensor, int]] = []
    numbers: list[Any] = batch.row_ids[rows.to(batch.row_ids.device)].tolist()
    for prompt, answer, number in zip(prompts, answers, numbers, strict=True):
        mask = torch.arange(len(prompt) + len(answer)) >= len(prompt)
        made.append((torch.tensor(prompt + answer), mask, number))
    return collate(made)


def _prompt(batch: Batch, place: int, chance: random.Random) -> list[int]:
    length = int(batch.lengths[place])
    ids, mask = batch.input_ids[place, :length].tolist(), batch.loss_mask[place, :length].tolist()
    if all(mask[1:]):
        return ids[: chance.randrange(1, length)]
    starts = [i for i in range(1, length) if mask[i] and not mask[i - 1]]
    return ids[: chance.choice(starts)]
