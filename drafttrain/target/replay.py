"""A stand-in for the target where its greedy answers are known: decoding without a pass of it.

At temperature 0 the text does not depend on the drafter. So what the target would say of a draft
can be looked up: after a token of its answer, the answer's next token, with the features that the
target had there. A draft off the answer hangs below one that is refused, so what is said of it is
never used. The drafter, its cache, its trees, the rule, stop tokens and limits are those of real
decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.errors import InputError
from drafttrain.flow import Needs, PartialPass
from drafttrain.nn.cache import KVCache
from drafttrain.target.model import Pass, Target

_AT_ONCE = 4096
"""Tokens that the target reads in one pass for their features."""


@dataclass(frozen=True)
class Answer:
    """What the target writes after a prompt at temperature 0."""

    ids: tuple[int, ...]
    ended: bool
    """Does the text end here, by a stop token or the end of the target's context?"""

    def covers(self, limit: int) -> bool:
        """Is this all that is written within that many tokens?"""
        return self.ended or len(self.ids) >= limit


Answers = dict[tuple[int, ...], Answer]
"""{ids of a prompt: its answer}"""


@dataclass(frozen=True)
class Kept:
    """Texts with the features that the target had at each of their tokens, one after another."""

    answers: Answers
    starts: dict[tuple[int, ...], int]
    """{prompt: place of its first token}"""
    ids: Tensor
    """(t) int64, prompts and answers."""
    hidden: Tensor
    """(t d) last hidden states; (t 0) where none are kept."""
    layers: dict[int, Tensor]
    """{l: (t d)} outputs of layers."""

    @property
    def bytes(self) -> int:
        """Of the features."""
        return sum(part.nbytes for part in (self.hidden, *self.layers.values()))


@torch.inference_mode()
def keep(target: Target, answers: Answers, needs: Needs) -> Kept:
    """Read every answer once, and keep the features that a drafter needs.

    Raises: InputError for features that are not finite.
    """
    texts = [(prompt, [*prompt, *answer.ids]) for prompt, answer in answers.items()]
    texts.sort(key=lambda one: len(one[1]))
    starts, flat, hidden = dict[tuple[int, ...], int](), list[int](), list[Tensor]()
    layers: dict[int, list[Tensor]] = {layer: [] for layer in needs.layers}
    for group in _groups(texts):
        lengths = [len(text) for _, text in group]
        for prompt, text in group:
            starts[prompt] = len(flat)
            flat += text
        if not needs.last_hidden and not layers:
            continue
        rows = [text + text[-1:] * (max(lengths) - len(text)) for _, text in group]
        found = target.features(torch.tensor(rows), torch.tensor(lengths), needs)
        if found.last_hidden is not None:
            hidden += _real(found.last_hidden, lengths)
        for layer, parts in layers.items():
            parts += _real(found.layers[layer], lengths)
    ids = torch.tensor(flat, dtype=torch.int64, device=target.device)
    none = torch.empty(len(flat), 0, dtype=target.dtype, device=target.device)
    return Kept(
        answers,
        starts,
        ids,
        torch.cat(hidden) if hidden else none,
        {layer: torch.cat(parts) for layer, parts in layers.items()},
    )


def _groups(
    texts: list[tuple[tuple[int, ...], list[int]]],
) -> list[list[tuple[tuple[int, ...], list[int]]]]:
    """Texts that are read together, those of like length; they come sorted by length."""
    groups: list[list[tuple[tuple[int, ...], list[int]]]] = []
    for one in texts:
        if groups and (len(groups[-1]) + 1) * len(one[1]) <= _AT_ONCE:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _real(values: Tensor, lengths: list[int]) -> list[Tensor]:
    """(b s d) -> per row, (length d), copies that hold no padding."""
    return [row[:length].clone() for row, length in zip(values, lengths, strict=True)]


class _Places(KVCache):
    """Remembers of every row where its text lies, and how much of it has been read."""

    def __init__(self, starts: Tensor, ends: Tensor, capacity: int) -> None:
        super().__init__(len(starts), capacity, starts.device)
        self.starts, self.ends = starts, ends

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.starts, self.ends = self.starts[rows], self.ends[rows]


class Replay(Target):
    """Decodes as the target does, at temperature 0 and from known prompts.

    Args:
        target: whose answers these are; its facts, embedding and head are used, its layers are not.
    """

    def __init__(self, target: Target, kept: Kept) -> None:
        # The target has been tried already, so `Target.__init__` is left out.
        vars(self).update(vars(target))
        self.kept = kept

    def serves(self, needs: Needs) -> bool:
        """Are the features kept that a drafter reads?"""
        there = self.kept.hidden.shape[-1] > 0 or not needs.last_hidden
        return there and set(needs.layers) <= self.kept.layers.keys()

    def lacks(
        self, prompts: Sequence[Sequence[int]], limit: int, stop_ids: Sequence[int] | None
    ) -> str | None:
        """Why the answers do not show what decoding would write; None if they do.

        Args:
            limit: new tokens that are asked for.
            stop_ids: tokens that end a text; None: the target's own.
        """
        if stop_ids is not None and not set(self.stop_ids) <= set(stop_ids):
            return "the answers end at the target's own stop tokens"
        answers = [self.kept.answers.get(tuple(prompt)) for prompt in prompts]
        unknown = sum(answer is None for answer in answers)
        if unknown:
            return f"{unknown} of {len(prompts)} prompts have no answer"
        short = sum(answer is not None and not answer.covers(limit) for answer in answers)
        if short:
            return f"{short} of {len(prompts)} answers are shorter than {limit} tokens"
        return None

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> KVCache:
        known = [tuple(prompt) for prompt in prompts]
        starts = [self.kept.starts[prompt] for prompt in known]
        ends = [
            start + len(prompt) + len(self.kept.answers[prompt].ids)
            for start, prompt in zip(starts, known, strict=True)
        ]
        device = self.kept.ids.device
        return _Places(
            torch.tensor(starts, device=device), torch.tensor(ends, device=device), capacity
        )

    def step(
        self,
        ids: Tensor,
        cache: KVCache,
        *,
        tree_mask: Tensor | None = None,
        depths: Tensor | None = None,
        layers: tuple[int, ...] = (),
        partial_pass: PartialPass | None = None,
    ) -> Pass:
        """Look up the features at each token's place in its text; arguments as for a target.

        Places after the end of a text give those of its last token.
        """
        assert isinstance(cache, _Places) and partial_pass is None
        if depths is None:
            depths = torch.arange(ids.shape[1], device=ids.device)[None]
        places = (cache.starts + cache.lengths)[:, None] + depths
        last = cache.ends[:, None] - 1
        places = places.minimum(last)
        kept = self.kept
        return Pass(
            hidden=kept.hidden[places],
            layers={layer: kept.layers[layer][places] for layer in layers},
            following=kept.ids[(places + 1).minimum(last)],
        )

    def choices(self, out: Pass) -> Tensor:
        assert out.following is not None
        return out.following

    def head(self, hidden: Tensor) -> Tensor:
        raise InputError(
            "kept answers hold what the target chose at temperature 0, no logits: decode with the "
            "target itself"
        )
