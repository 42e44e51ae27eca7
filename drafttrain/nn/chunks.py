"""Work over a vocabulary in chunks of positions: peak memory holds the logits of one chunk, never
those of a complete batch.

A chunk's gradient is made while its logits exist, so that none are kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Goal = Callable[[slice], Any]
"""positions -> what they are judged by, such as the target's logits there; made once for all heads,
without gradients."""
Judge = Callable[[int, slice, Tensor, Any], tuple[Tensor, Tensor, Tensor]]
"""(head, positions, (c d) what the head reads there, their goal) -> () the loss to learn from, (m)
sums to report, (c) int64 a note on each position."""


@dataclass(frozen=True)
class Judged:
    """The outcome of all chunks."""

    total: Tensor
    """() float32, sum of the losses, with grad."""
    sums: Tensor
    """(k m) float32 each head's sums, detached."""
    noted: Tensor
    """(t k) int64"""


def in_chunks(
    hidden: Tensor,
    goal: Goal,
    judge: Judge,
    *,
    parts: int,
    chunk: int,
    trained: Sequence[Tensor] = (),
) -> Judged:
    """Judge k heads at t positions. Where no gradient is asked for, none is computed.

    Args:
        hidden: (t k d) what each head reads at each position.
        parts: m, the sums that the judge reports.
        chunk: positions judged at one time.
        trained: parameters that the judge multiplies with, where they are trained.
    """
    # Decided here: in the function's forward pass gradients are always off.
    learn = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (hidden, *trained))
    return Judged(*_InChunks.apply(hidden, goal, judge, parts, chunk, learn, *trained))


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        goal: Goal,
        judge: Judge,
        parts: int,
        chunk: int,
        learn: bool,
        *trained: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        t, k, _ = hidden.shape
        total = hidden.new_zeros((), dtype=torch.float32)
        sums = hidden.new_zeros(k, parts, dtype=torch.float32)
        noted = torch.zeros(t, k, dtype=torch.int64, device=hidden.device)
        slopes = [torch.zeros_like(tensor) for tensor in (hidden, *trained)] if learn else []
        for start in range(0, t, chunk):
            part = slice(start, start + chunk)
            aim = goal(part)
            for head in range(k):
                with torch.set_grad_enabled(learn):
                    read = hidden[part, head].detach().requires_grad_(learn)
                    loss, reported, noted[part, head] = judge(head, part, read, aim)
                total += loss.detach()
                sums[head] += reported.detach()
                if learn:
                    slopes[0][part, head], *more = torch.autograd.grad(
                        loss, (read, *trained), allow_unused=True
                    )
                    for mine, slope in zip(slopes[1:], more, strict=True):
                        if slope is not None:
                            mine += slope
        ctx.save_for_backward(*slopes)
        ctx.mark_non_differentiable(sums, noted)
        return total, sums, noted

    @staticmethod
    def backward(
        ctx: Any, by_total: Tensor, _sums: Tensor, _noted: Tensor
    ) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        by_hidden, *by_trained = (slope * by_total.to(slope.dtype) for slope in ctx.saved_tensors)
        return by_hidden, None, None, None, None, None, *by_trained
