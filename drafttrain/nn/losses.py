"""Losses over a vocabulary, in chunks: peak memory holds one chunk's logits, never those of a whole batch.

All of them compare the draft's law q with the target's law p at supervised positions, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from drafttrain.errors import InputError

Divergence = Callable[[Tensor, Tensor], Tensor]
"""(t w) draft logits, (t w) target logits -> (t) loss per position."""


def soft_cross_entropy(draft: Tensor, target: Tensor) -> Tensor:
    """-sum p log q; its gradient is that of forward KL. EAGLE-1 (Li et al. 2024, arXiv:2401.15077), section 3.2."""
    return -(target.softmax(-1) * draft.log_softmax(-1)).sum(-1)


def forward_kl(draft: Tensor, target: Tensor) -> Tensor:
    """KL(p || q) = sum p log(p / q)."""
    log_p = target.log_softmax(-1)
    return (log_p.exp() * (log_p - draft.log_softmax(-1))).sum(-1)


def total_variation(draft: Tensor, target: Tensor) -> Tensor:
    """1/2 sum |p - q|, one minus the acceptance probability of a sampled token (Leviathan et al. 2023, Theorem 3.5)."""
    return 0.5 * (target.softmax(-1) - draft.softmax(-1)).abs().sum(-1)


def acceptance_log(draft: Tensor, target: Tensor) -> Tensor:
    """-log sum min(p, q): total variation's gradient divided by the acceptance (LK losses, arXiv:2602.23881)."""
    return -torch.minimum(target.softmax(-1), draft.softmax(-1)).sum(-1).clamp_min(1e-6).log()


DIVERGENCES: dict[str, Divergence] = {
    "soft_cross_entropy": soft_cross_entropy,
    "forward_kl": forward_kl,
    "total_variation": total_variation,
    "acceptance_log": acceptance_log,
}


def divergence(name: str) -> Divergence:
    if name not in DIVERGENCES:
        raise InputError(f"loss {name} is not known: give one of {', '.join(DIVERGENCES)}")
    return DIVERGENCES[name]


def smooth_l1(prediction: Tensor, goal: Tensor) -> Tensor:
    """(t d), (t d) -> (t): smooth L1 (beta 1), mean over the width, float32."""
    return functional.smooth_l1_loss(prediction.float(), goal.float(), reduction="none").mean(-1)


def _soft_cross_entropy_and_slope(draft: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The loss per position and its gradient q - p, in half the passes over memory that automatic differentiation takes."""
    p = target.softmax(-1)
    log_z = draft.logsumexp(-1)
    return log_z - torch.linalg.vecdot(p, draft), (draft - log_z[:, None]).exp_().sub_(p)


class _Chunked(torch.autograd.Function):
    """Computes each chunk's gradient while its logits exist, so that none are kept for the backward pass."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, teacher: Tensor, head: Callable[[Tensor], Tensor], loss: Divergence, chunk: int
    ) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(hidden)
        total, choices = _in_chunks(hidden, teacher, head, loss, chunk, gradient)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(choices)
        return total, choices

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _choices: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * grad_total.to(gradient.dtype), None, None, None, None


def _in_chunks(
    hidden: Tensor,
    teacher: Tensor,
    head: Callable[[Tensor], Tensor],
    loss: Divergence,
    chunk: int,
    gradient: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum and argmaxes; fills `gradient` (t d), the sum's by `hidden`, if there is one."""
    total = hidden.new_zeros((), dtype=torch.float32)
    choices = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        with torch.no_grad():
            goal = head(teacher[part]).float()
        with torch.set_grad_enabled(gradient is not None):
            piece = hidden[part].detach().requires_grad_(gradient is not None)
            logits = head(piece).float()
            if gradient is not None and loss is soft_cross_entropy:
                values, slope = _soft_cross_entropy_and_slope(logits.detach(), goal)
                value = values.sum()
                (gradient[part],) = torch.autograd.grad(logits, piece, slope)
            else:
                value = loss(logits, goal).sum()
                if gradient is not None:
                    (gradient[part],) = torch.autograd.grad(value, piece)
        total += value.detach()
        choices[part] = logits.detach().argmax(-1)
    return total, choices


def over_vocabulary(
    hidden: Tensor, teacher: Tensor, head: Callable[[Tensor], Tensor], loss: Divergence, *, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Sum of a divergence between head(hidden) and head(teacher) over positions, and the draft's argmaxes.

    Args:
        hidden: (t d) with grad; teacher: (t d) the target's own, no grad. Where no gradient is asked for, none is computed.
        head: (t d) -> (t w) logits, frozen: gradients flow through it into `hidden`, not into its weights.
        chunk: positions whose logits exist at one time.
    Returns: () float32 sum with grad, (t) int64 argmax of the draft's logits.
    """
    # Decided here: inside of the function's forward pass gradients are always off.
    if not (torch.is_grad_enabled() and hidden.requires_grad):
        return _in_chunks(hidden, teacher, head, loss, chunk)
    total, choices = _Chunked.apply(hidden, teacher, head, loss, chunk)
    return total, choices
