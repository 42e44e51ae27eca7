"""A weighted sum of losses over a vocabulary, against the target's distribution and against the
text, in chunks.

Every loss of a position reads the same two rows of logits, which exist for one chunk at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.errors import InputError
from drafttrain.nn import losses
from drafttrain.nn.chunks import in_chunks

TEXT = "cross_entropy"
"""The loss against the text's own tokens; all others are against the target's distribution."""
KNOWN = (TEXT, *losses.DIVERGENCES)


@dataclass(frozen=True)
class Mixture:
    """Losses by name with their weights; those of weight 0 are not computed.

    Raises: InputError for a name that is not known, or weights that leave nothing to learn.
    """

    weights: Mapping[str, float]
    beta: float = 0.5
    """Of `jsd`: above 0 and below 1; near 1 it is like forward KL."""

    def __post_init__(self) -> None:
        if not isinstance(self.weights, Mapping):
            raise InputError(
                f"loss={self.weights}: needs weights by name, such as {{forward_kl: 1.0}}"
            )
        odd = [str(name) for name in self.weights if name not in KNOWN]
        if odd:
            raise InputError(
                f"loss {odd[0]} is not known: give weights for some of {', '.join(KNOWN)}"
            )
        for name, weight in self.weights.items():
            if not _number(weight) or not 0 <= weight < 1e30:
                raise InputError(f"loss.{name}={weight}: needs a number of at least 0")
        if not any(self.weights.values()):
            raise InputError(
                f"all weights of the loss are 0: give one of {', '.join(KNOWN)} a weight above 0"
            )
        if not _number(self.beta) or not 0 < self.beta < 1:
            raise InputError(f"beta={self.beta}: needs a number above 0 and below 1")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the losses that count."""
        return tuple(name for name, weight in self.weights.items() if weight)

    @property
    def reads_target_probs(self) -> bool:
        """Does any of them need the target's distribution?"""
        return any(name != TEXT for name in self.names)

    @property
    def reads_text(self) -> bool:
        return TEXT in self.names

    def divergence(self, name: str) -> losses.Divergence:
        if name == "jsd":
            return functools.partial(losses.generalised_jsd, beta=self.beta)
        return losses.divergence(name)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Mixed:
    """A mixture's losses at some positions."""

    total: Tensor
    """() float32, weighted sum over losses and positions, with grad."""
    sums: dict[str, Tensor]
    """() float32 each: the sum of each loss, unweighted, detached."""
    choices: Tensor
    """(t) int64 argmax of the draft's logits."""


def mixed(
    hidden: Tensor,
    labels: Tensor,
    head: Callable[[Tensor], Tensor],
    mixture: Mixture,
    *,
    teacher: Tensor | None = None,
    teacher_head: Callable[[Tensor], Tensor] | None = None,
    weights: Tensor | None = None,
    trained: Sequence[Tensor] = (),
    chunk: int = 256,
) -> Mixed:
    """The mixture's sum over positions.

    Args:
        hidden: (t d) with grad, what the draft's head reads.
        labels: (t) int64 places of the text's tokens in the draft vocabulary, -1 for none.
        head: (c d) -> (c w) draft logits.
        teacher: (t d') what the target's head reads there; needed where the mixture reads the
            target's distribution.
        teacher_head: (c d') -> (c w) the target's logits of the same vocabulary.
        weights: (t) float32 of the positions in the total; None is all alike.
        trained: parameters that `head` multiplies with, where they are trained.
        chunk: positions whose logits exist at one time.
    """
    if mixture.reads_target_probs and (teacher is None or teacher_head is None):
        raise ValueError(
            "a loss against the target's distribution needs the target's hidden states and head"
        )

    def goal(part: slice) -> Tensor | None:
        if not mixture.reads_target_probs:
            return None
        assert teacher is not None and teacher_head is not None
        return teacher_head(teacher[part]).float()

    def judge(
        _head: int, part: slice, read: Tensor, aim: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = head(read).float()
        values = []
        for name in mixture.names:
            if name == TEXT:
                known = labels[part] >= 0
                values.append(losses.cross_entropy(logits, labels[part].clamp_min(0)) * known)
            else:
                assert aim is not None
                values.append(mixture.divergence(name)(logits, aim))
        each = torch.stack(values)  # m c
        sums = each.sum(-1)
        counted = sums if weights is None else (each * weights[part]).sum(-1)
        by_loss = sums.new_tensor([mixture.weights[name] for name in mixture.names])
        return (by_loss * counted).sum(), sums, logits.detach().argmax(-1)

    made = in_chunks(
        hidden[:, None], goal, judge, parts=len(mixture.names), chunk=chunk, trained=trained
    )
    return Mixed(
        made.total, dict(zip(mixture.names, made.sums[0].unbind(), strict=True)), made.noted[:, 0]
    )
