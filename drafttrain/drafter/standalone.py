"""Drafters that are language models by themselves."""

from __future__ import annotations

import abc
from typing import Any

from torch import Tensor

from drafttrain.drafter.base import Drafter
from drafttrain.drafter.ensemble import Ensemble


class Standalone(abc.ABC):
    """A language model that reads tokens only.

    Where its teacher-forced guesses of a text are right, it would have written the same text by
    itself. Its loss counts labels by their weights.
    """

    @property
    @abc.abstractmethod
    def owns_all(self) -> bool:
        """Does it borrow nothing of the target? A package then keeps it as a language model."""

    @property
    @abc.abstractmethod
    def trained_vocabulary(self) -> tuple[str, ...]:
        """Names of tensors that take the place of the target's embedding or head, and are this
        drafter's own."""

    @abc.abstractmethod
    def standalone(self) -> tuple[Any, dict[str, Tensor]]:
        """As a causal LM of `transformers`, with copies of what it borrows: its config and its
        tensors.

        Raises: InputError if what is borrowed cannot be written.
        """


def owns_all(drafter: Drafter) -> bool:
    """Is a drafter a language model that borrows nothing of the target?"""
    return isinstance(drafter, Standalone) and drafter.owns_all


def trained_vocabulary(drafter: Drafter) -> tuple[str, ...]:
    """Names of a drafter's tensors that take the place of the target's embedding or head; of an
    ensemble those of all members."""
    if isinstance(drafter, Ensemble):
        return tuple(
            f"members.{number}.{name}"
            for number, member in enumerate(drafter.drafters)
            for name in trained_vocabulary(member)
        )
    return drafter.trained_vocabulary if isinstance(drafter, Standalone) else ()
