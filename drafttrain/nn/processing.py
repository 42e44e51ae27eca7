"""What a policy does to logits before temperature, in the order of transformers: bias, penalty,
least length, processors.

All but the bias read the text, so a distribution belongs to one text: the committed ids of a row
and, in a tree of drafts, the tokens on the path to the node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drafttrain.errors import InputError
from drafttrain.later import torch

if TYPE_CHECKING:
    from torch import Tensor

Processor = Callable[["Tensor", "Tensor"], "Tensor"]
"""(r t) ids and (r v) float32 logits -> (r v) logits, as transformers' LogitsProcessor."""


@dataclass(frozen=True)
class Text:
    """The committed text of a batch."""

    ids: Tensor
    """(b t) int64 prompt and answer so far; padding follows a row's length."""
    lengths: Tensor
    """(b) int64."""
    prompts: Tensor
    """(b) int64, how many of the ids are the prompt."""
    stop_ids: tuple[int, ...]
    """Tokens that end a text; a least length puts them off."""

    @classmethod
    def of(
        cls,
        prompts: Sequence[list[int]],
        answers: Sequence[list[int]],
        stop_ids: Sequence[int],
        device: torch.device,
    ) -> Text:
        rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        longest = max(map(len, rows))
        return cls(
            torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device),
            torch.tensor([len(row) for row in rows], device=device),
            torch.tensor([len(prompt) for prompt in prompts], device=device),
            tuple(stop_ids),
        )


def biased(logits: Tensor, bias: Sequence[tuple[int, float]]) -> Tensor:
    """(... v) with numbers added to some tokens' logits.

    Raises: InputError for a token that the vocabulary lacks.
    """
    v = logits.shape[-1]
    odd = [token for token, _ in bias if token >= v]
    if odd:
        raise InputError(f"logit_bias names token {odd[0]}, the target's vocabulary is 0..{v - 1}")
    added = logits.new_zeros(v)
    added[[token for token, _ in bias]] = logits.new_tensor([value for _, value in bias])
    return logits + added


def penalised(logits: Tensor, text: Text, drafted: Tensor, penalty: float) -> Tensor:
    """(b m v) with the logits of tokens in the text, prompt included, divided by the penalty or,
    below 0, multiplied.

    Keskar et al. 2019 (arXiv:1909.05858), section 4.1, with the treatment of negative logits of
    transformers.
    """
    b, m, v = logits.shape
    real = torch.arange(text.ids.shape[1], device=logits.device) < text.lengths[:, None]
    # One place more than there are tokens, for padding and for ids without a logit.
    seen = torch.zeros(b, v + 1, dtype=torch.bool, device=logits.device)
    seen = seen.scatter(1, torch.where(real, text.ids, v).clamp(max=v), True)[:, None].expand(
        b, m, v + 1
    )
    if drafted.shape[-1]:
        seen = seen.scatter(2, torch.where(drafted < 0, v, drafted).clamp(max=v), True)
    return torch.where(
        seen[..., :v], torch.where(logits < 0, logits * penalty, logits / penalty), logits
    )


def unfinished(logits: Tensor, text: Text, drafted: Tensor, least: int) -> Tensor:
    """(b m v) without stop tokens while the answer has fewer than `least` tokens."""
    v = logits.shape[-1]
    stops = [token for token in text.stop_ids if 0 <= token < v]
    if not stops:
        return logits
    stop = torch.zeros(v, dtype=torch.bool, device=logits.device)
    stop[stops] = True
    written = (text.lengths - text.prompts)[:, None] + (drafted >= 0).sum(-1)  # b m
    return logits.masked_fill((written < least)[..., None] & stop, -math.inf)


def processed(
    logits: Tensor, text: Text, drafted: Tensor, processors: Sequence[Processor]
) -> Tensor:
    """(b m v) logits after a caller's processors, which read each node's full text. Texts of one
    length are given together."""
    (b, m, v), k, t = logits.shape, drafted.shape[-1], text.ids.shape[1]
    lengths = (text.lengths[:, None] + (drafted >= 0).sum(-1)).flatten()  # (b m)
    texts = torch.nn.functional.pad(text.ids, (0, k + 1))[:, None].repeat(1, m, 1)  # b m t+k+1
    after = text.lengths[:, None, None] + torch.arange(k, device=logits.device)
    texts = texts.scatter(2, torch.where(drafted < 0, t + k, after), drafted).flatten(0, 1)
    flat = logits.flatten(0, 1).clone()
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero()[:, 0]
        ids, scores = texts[rows, :length], flat[rows]
        for processor in processors:
            found = processor(ids, scores)
            if not isinstance(found, torch.Tensor) or found.shape != scores.shape:
                shape = (
                    tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
                )
                raise InputError(
                    f"processor {type(processor).__name__} gave {shape} for logits of shape "
                    f"{tuple(scores.shape)}: needs the same shape"
                )
            scores = found.float()
        flat[rows] = scores
    return flat.reshape(b, m, v)
