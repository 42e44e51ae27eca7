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
from drafttrain.nn.chunks import Judged, in_chunks

TEXT = "cross_entropy"
"""The loss against the text's own tokens; all others are against the target's distribution."""
KNOWN = (TEXT, *losses.DIVERGENCES)
Term = Callable[[Tensor, Tensor | None, Tensor], Tensor]
"""(c w) draft logits, (c w) the target's, (c) labels, -1 for none -> (c) loss of each position."""
Terms = Mapping[str, tuple[float, Term]]
"""Losses by name, with their weights."""


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

    @property
    def terms(self) -> Terms:
        return {
            name: (self.weights[name], by_text if name == TEXT else against(self.divergence(name)))
            for name in self.names
        }


def by_text(logits: Tensor, _goal: Tensor | None, labels: Tensor) -> Tensor:
    """The term of cross-entropy on the text; 0 where the label is outside the vocabulary."""
    return losses.cross_entropy(logits, labels.clamp_min(0)) * (labels >= 0)


def against(divergence: losses.Divergence) -> Term:
    """The term of a divergence from the target's distribution."""

    def term(logits: Tensor, goal: Tensor | None, _labels: Tensor) -> Tensor:
        assert goal is not None
        return divergence(logits, goal)

    return term


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
    made = mixed_rows(
        hidden[:, None],
        labels,
        head,
        mixture.terms,
        goal=teacher_goal(teacher, teacher_head) if mixture.reads_target_probs else no_goal,
        weights=None if weights is None else weights[:, None],
        trained=trained,
        chunk=chunk,
    )
    sums = made.sums[0].unbind()
    return Mixed(made.total, dict(zip(mixture.names, sums, strict=True)), made.noted[:, 0])


def mixed_rows(
    hidden: Tensor,
    labels: Tensor,
    head: Callable[[Tensor], Tensor],
    terms: Terms,
    *,
    goal: Callable[[slice], Tensor | None],
    weights: Tensor | None = None,
    valid: Tensor | None = None,
    trained: Sequence[Tensor] = (),
    chunk: int = 256,
) -> Judged:
    """Sums of losses over k rows for every label, such as a row for each step of an unrolled
    layer. The goal is computed once for all rows of a label.

    Args:
        hidden: (t k d) with grad, what the draft's head reads.
        labels: (t) int64 places of the text's tokens in the draft vocabulary, -1 for none.
        head: (c d) -> (c w) draft logits.
        goal: positions -> (c w) the target's logits there, None where no loss reads them.
        weights: (t k) float32 of the rows in the total; None is all alike.
        valid: (t k) bool, the rows that count in the sums; None is all.
        trained, chunk: as of `mixed`.
    Returns: the weighted total; (k m) the sum of each loss, without any weights; (t k) int64 argmax
        of the draft's logits.
    """

    def judge(
        number: int, part: slice, read: Tensor, aim: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = head(read).float()
        each = torch.stack([loss(logits, aim, labels[part]) for _, loss in terms.values()])  # m c
        sums = (each if valid is None else each * valid[part, number]).sum(-1)
        counted = sums if weights is None else (each * weights[part, number]).sum(-1)
        by_loss = sums.new_tensor([weight for weight, _ in terms.values()])
        return (by_loss * counted).sum(), sums, logits.detach().argmax(-1)

    return in_chunks(hidden, goal, judge, parts=len(terms), chunk=chunk, trained=trained)


def teacher_goal(
    teacher: Tensor | None, head: Callable[[Tensor], Tensor] | None
) -> Callable[[slice], Tensor]:
    """The goal of losses against the target's distribution.

    Args:
        teacher: (t d) what the target's head reads for each label; head: (c d) -> (c w).
    """
    assert teacher is not None and head is not None
    return lambda part: head(teacher[part]).float()


def no_goal(_part: slice) -> None:
    """The goal of losses that read none."""
