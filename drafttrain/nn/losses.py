"""Losses over a vocabulary, in chunks: peak memory holds one chunk's logits, never those of a whole batch.

All but `cross_entropy` compare the draft's law q with the target's law p at supervised positions, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


def reverse_kl(draft: Tensor, target: Tensor) -> Tensor:
    """KL(q || p) = sum q log(q / p): seeks a mode of p where forward KL covers all of it."""
    log_q = draft.log_softmax(-1)
    return (log_q.exp() * (log_q - target.log_softmax(-1))).sum(-1)


def generalised_jsd(draft: Tensor, target: Tensor, beta: float) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q, 0 < beta < 1.

    DistillSpec (Zhou et al. 2024, arXiv:2310.08461), table 1; beta 1/2 is the Jensen-Shannon divergence.
    """
    log_p, log_q = target.log_softmax(-1), draft.log_softmax(-1)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    forward, backward = log_p.exp() * (log_p - log_m), log_q.exp() * (log_q - log_m)
    return (beta * forward + (1 - beta) * backward).sum(-1)


def jensen_shannon(draft: Tensor, target: Tensor) -> Tensor:
    """`generalised_jsd` with beta 1/2."""
    return generalised_jsd(draft, target, 0.5)


def total_variation(draft: Tensor, target: Tensor) -> Tensor:
    """1/2 sum |p - q|, one minus the acceptance probability of a sampled token (Leviathan et al. 2023, Theorem 3.5)."""
    return 0.5 * (target.softmax(-1) - draft.softmax(-1)).abs().sum(-1)


def acceptance_log(draft: Tensor, target: Tensor) -> Tensor:
    """-log sum min(p, q): total variation's gradient divided by the acceptance (LK losses, arXiv:2602.23881)."""
    return -torch.minimum(target.softmax(-1), draft.softmax(-1)).sum(-1).clamp_min(1e-6).log()


DIVERGENCES: dict[str, Divergence] = {
    "soft_cross_entropy": soft_cross_entropy,
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jensen_shannon,
    "total_variation": total_variation,
    "acceptance_log": acceptance_log,
}


def divergence(name: str) -> Divergence:
    if name not in DIVERGENCES:
        raise InputError(f"loss {name} is not known: give one of {', '.join(DIVERGENCES)}")
    return DIVERGENCES[name]


def cross_entropy(draft: Tensor, labels: Tensor) -> Tensor:
    """(t w) draft logits, (t) the text's own tokens -> (t) -log q(label)."""
    return functional.cross_entropy(draft, labels, reduction="none")


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


Goal = Callable[[slice], Tensor]
"""Of some positions: (c w) the target's logits, or (c) int64 labels where the loss is `cross_entropy`."""


@dataclass(frozen=True)
class Judged:
    """What several heads made of the same positions."""

    total: Tensor
    """() float32: the weighted sum over heads and positions, with grad."""
    sums: Tensor
    """(k) float32: each head's own sum, unweighted, detached."""
    ranks: Tensor
    """(t k) int64: how many tokens a head finds likelier than the label; w where the label is none that it knows."""


def heads_over_vocabulary(
    hidden: Tensor,
    valid: Tensor,
    weights: Sequence[float],
    labels: Tensor,
    heads: Sequence[Callable[[Tensor], Tensor]],
    goal: Goal,
    loss: Divergence,
    *,
    trained: Sequence[Tensor] = (),
    chunk: int = 256,
) -> Judged:
    """Losses of k heads that are to guess the same tokens, so that a goal is computed once for all of them.

    Args:
        hidden: (t k d) with grad, what each head reads for each position.
        valid: (t k) bool, where a head has something to learn.
        weights: of each head's loss in the total.
        labels: (t) int64 places of the text's tokens in the vocabulary, -1 for one outside of it.
        heads: (c d) -> (c w) logits each.
        trained: parameters that the heads multiply with, where they are trained.
        chunk: positions whose logits exist at one time.
    """
    wanted = torch.is_grad_enabled() and hidden.requires_grad
    total, sums, ranks = _Heads.apply(hidden, valid, weights, labels, heads, goal, loss, chunk, wanted, *trained)
    return Judged(total, sums, ranks)


class _Heads(torch.autograd.Function):
    """As `_Chunked`: gradients are made while a chunk's logits exist."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        valid: Tensor,
        weights: Sequence[float],
        labels: Tensor,
        heads: Sequence[Callable[[Tensor], Tensor]],
        goal: Goal,
        loss: Divergence,
        chunk: int,
        wanted: bool,
        *trained: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        t, k, _ = hidden.shape
        sums = hidden.new_zeros(k, dtype=torch.float32)
        ranks = torch.zeros(t, k, dtype=torch.int64, device=hidden.device)
        slope = torch.zeros_like(hidden) if wanted else None
        slopes = [torch.zeros_like(p) for p in trained] if wanted else []
        for start in range(0, t, chunk):
            part = slice(start, start + chunk)
            aim = goal(part)
            for head in range(k):
                with torch.set_grad_enabled(wanted):
                    piece = hidden[part, head].detach().requires_grad_(wanted)
                    logits = heads[head](piece).float()
                ranks[part, head] = _rank(logits.detach(), labels[part])
                value, by_logits = _value_and_slope(logits.detach(), aim, loss, wanted)
                sums[head] += (value * valid[part, head]).sum()
                if slope is not None:
                    by_logits = by_logits * (weights[head] * valid[part, head])[:, None]
                    found = torch.autograd.grad(logits, (piece, *trained), by_logits, allow_unused=True)
                    slope[part, head] = found[0]
                    for mine, more in zip(slopes, found[1:], strict=True):
                        if more is not None:
                            mine += more
        ctx.save_for_backward(*([] if slope is None else [slope]), *slopes)
        ctx.mark_non_differentiable(sums, ranks)
        return (sums * sums.new_tensor(list(weights))).sum(), sums, ranks

    @staticmethod
    def backward(ctx: Any, by_total: Tensor, _sums: Tensor, _ranks: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        slope, *slopes = (saved * by_total.to(saved.dtype) for saved in ctx.saved_tensors)
        return slope, *(None,) * 8, *slopes


def _rank(logits: Tensor, labels: Tensor) -> Tensor:
    known = labels >= 0
    own = logits.gather(-1, labels.clamp_min(0)[:, None])
    return torch.where(known, (logits > own).sum(-1), logits.shape[-1])


def _value_and_slope(logits: Tensor, goal: Tensor, loss: Divergence, wanted: bool) -> tuple[Tensor, Tensor]:
    """(t) loss and (t w) its gradient by the logits, empty where none is wanted."""
    if not wanted:
        return loss(logits, goal), logits[:0]
    if loss is soft_cross_entropy:
        return _soft_cross_entropy_and_slope(logits, goal)
    with torch.enable_grad():
        here = logits.requires_grad_()
        value = loss(here, goal)
        (slope,) = torch.autograd.grad(value.sum(), here)
    return value.detach(), slope
