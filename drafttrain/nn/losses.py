"""Losses over a vocabulary, and their sums over positions in chunks.

All but `cross_entropy` compare the draft's distribution q with the target's distribution p at
supervised positions, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from drafttrain.errors import InputError
from drafttrain.nn.chunks import Goal, Judged, in_chunks

Divergence = Callable[[Tensor, Tensor], Tensor]
"""(t w) draft logits, (t w) target logits -> (t) loss per position."""


class _SoftCrossEntropy(torch.autograd.Function):
    """Keeps its gradient q - p: half the passes over memory that automatic differentiation
    takes."""

    @staticmethod
    def forward(ctx: Any, draft: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        p = target.softmax(-1)
        log_z = draft.logsumexp(-1, keepdim=True)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward((draft - log_z).exp_().sub_(p))
        return log_z[..., 0] - torch.linalg.vecdot(p, draft)

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (slope,) = ctx.saved_tensors
        return slope * by_loss[..., None], None


def soft_cross_entropy(draft: Tensor, target: Tensor) -> Tensor:
    """-sum p log q; its gradient is that of forward KL. EAGLE-1 (Li et al. 2024, arXiv:2401.15077),
    section 3.2."""
    loss: Tensor = _SoftCrossEntropy.apply(draft, target)
    return loss


class _Distilled(torch.autograd.Function):
    """Keeps one table, that of its gradient q - p. It is used up by the way back: a second one is
    refused by torch."""

    @staticmethod
    def forward(ctx: Any, draft: Tensor, p: Tensor) -> Tensor:  # type: ignore[override]
        table = torch.mul(p, draft)
        by_p = table.sum(-1)
        torch.softmax(draft, -1, out=table)
        log_z = draft.amax(-1) - table.amax(-1).log()  # The largest q is exp(largest logit - log_z)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(table.sub_(p))
        return log_z - by_p

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (slope,) = ctx.saved_tensors
        return slope.mul_(by_loss[..., None]), None


def distilled(draft: Tensor, p: Tensor) -> Tensor:
    """`soft_cross_entropy` against (t w) probabilities, for several drafts of the same p: few
    passes over memory."""
    loss: Tensor = _Distilled.apply(draft, p)
    return loss


def forward_kl(draft: Tensor, target: Tensor) -> Tensor:
    """KL(p || q) = sum p log(p / q); a token that -inf rules out adds nothing."""
    log_p = target.log_softmax(-1)
    ratio = (log_p - draft.log_softmax(-1)).masked_fill(log_p == -torch.inf, 0)
    return (log_p.exp() * ratio).sum(-1)


def reverse_kl(draft: Tensor, target: Tensor) -> Tensor:
    """KL(q || p) = sum q log(q / p): seeks a mode of p where forward KL covers all of it."""
    log_q = draft.log_softmax(-1)
    return (log_q.exp() * (log_q - target.log_softmax(-1))).sum(-1)


def generalised_jsd(draft: Tensor, target: Tensor, beta: float) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q, 0 < beta < 1.

    DistillSpec (Zhou et al. 2024, arXiv:2310.08461), table 1; beta 1/2 is the Jensen-Shannon
    divergence.
    """
    log_p, log_q = target.log_softmax(-1), draft.log_softmax(-1)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    forward, backward = log_p.exp() * (log_p - log_m), log_q.exp() * (log_q - log_m)
    return (beta * forward + (1 - beta) * backward).sum(-1)


def jensen_shannon(draft: Tensor, target: Tensor) -> Tensor:
    """`generalised_jsd` with beta 1/2."""
    return generalised_jsd(draft, target, 0.5)


def total_variation(draft: Tensor, target: Tensor) -> Tensor:
    """1/2 sum |p - q|, one minus the acceptance probability of a sampled token (Leviathan et al.
    2023, Theorem 3.5)."""
    return 0.5 * (target.softmax(-1) - draft.softmax(-1)).abs().sum(-1)


def acceptance_log(draft: Tensor, target: Tensor) -> Tensor:
    """-log sum min(p, q): total variation's gradient divided by the acceptance (LK losses,
    arXiv:2602.23881)."""
    return -torch.minimum(target.softmax(-1), draft.softmax(-1)).sum(-1).clamp_min(1e-6).log()


def top_cross_entropy(draft: Tensor, target: Tensor, k: int) -> Tensor:
    """-sum p log q over the k most likely tokens of p, whose mass is not made 1. HASS (Zhang et
    al. 2024, arXiv:2408.15766), section 3.1."""
    p, ids = target.softmax(-1).topk(min(k, target.shape[-1]), -1)
    return -(p * draft.log_softmax(-1).gather(-1, ids)).sum(-1)


DIVERGENCES: dict[str, Divergence] = {
    "soft_cross_entropy": soft_cross_entropy,
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jensen_shannon,
    "total_variation": total_variation,
    "acceptance_log": acceptance_log,
}


def divergence(name: str) -> Divergence:
    """The divergence of a name. Raises InputError for any other name."""
    if not isinstance(name, str) or name not in DIVERGENCES:
        raise InputError(
            f"loss {str(name)[:80]} is not known: give one of {', '.join(DIVERGENCES)}"
        )
    return DIVERGENCES[name]


def cross_entropy(draft: Tensor, labels: Tensor) -> Tensor:
    """(t w) draft logits, (t) the text's own tokens -> (t) -log q(label)."""
    return functional.cross_entropy(draft, labels, reduction="none")


def smooth_l1(prediction: Tensor, goal: Tensor) -> Tensor:
    """(t d), (t d) -> (t): smooth L1 (beta 1), mean over the width, float32."""
    return functional.smooth_l1_loss(prediction.float(), goal.float(), reduction="none").mean(-1)


def over_vocabulary(
    hidden: Tensor,
    teacher: Tensor,
    head: Callable[[Tensor], Tensor],
    loss: Divergence,
    *,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Sum of a divergence between head(hidden) and head(teacher) over positions, and the draft's
    argmaxes.

    Args:
        hidden: (t d) with grad; teacher: (t d) of the target, without grad. Where no gradient is
            asked for, none is computed.
        head: (t d) -> (t w) logits, frozen: gradients flow through it into `hidden`, not into its
            weights.
        chunk: positions whose logits exist at one time.
    Returns: () float32 sum with grad, (t) int64 argmax of the draft's logits.
    """

    def judge(
        _head: int, _part: slice, read: Tensor, goal: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = head(read).float()
        value = loss(logits, goal).sum()
        return value, value[None], logits.detach().argmax(-1)

    made = in_chunks(
        hidden[:, None], lambda part: head(teacher[part]).float(), judge, parts=1, chunk=chunk
    )
    return made.total, made.noted[:, 0]


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
    """Losses of k heads that guess the same tokens, so that a goal is computed once for all.

    Args:
        hidden: (t k d) with grad, what each head reads for each position.
        valid: (t k) bool, where a head has something to learn.
        weights: of each head's loss in the total.
        labels: (t) int64 places of the text's tokens in the vocabulary, -1 for one outside it.
        heads: (c d) -> (c w) logits each.
        goal: (c w) the target's logits of some positions, or (c) int64 labels where the loss is
            `cross_entropy`.
        trained: parameters that the heads multiply with, where they are trained.
        chunk: positions whose logits exist at one time.
    Returns: the weighted total; (k 1) each head's own sum; (t k) how many tokens a head finds more
        likely than the label, w where the label is outside the vocabulary.
    """

    def judge(head: int, part: slice, read: Tensor, aim: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = heads[head](read).float()
        value = (loss(logits, aim) * valid[part, head]).sum()
        return weights[head] * value, value[None], _rank(logits.detach(), labels[part])

    return in_chunks(hidden, goal, judge, parts=1, chunk=chunk, trained=trained)


def _rank(logits: Tensor, labels: Tensor) -> Tensor:
    own = logits.gather(-1, labels.clamp_min(0)[:, None])
    return torch.where(labels >= 0, (logits > own).sum(-1), logits.shape[-1])
