"""Drafters that are language models by themselves."""

from __future__ import annotations

import abc
from typing import Any

from torch import Tensor

from drafttrain.drafter.base import Drafter


class Standalone(abc.ABC):
    """A language model that reads tokens only.

    Where its teacher-forced guesses of a text are right, it would have written the same text by
    itself. Its loss counts labels by their weights.
    """

    @property
    @abc.abstractmethod
    def owns_all(self) -> bool:
        """Does it borrow nothing of the target? A package then keeps it as a language model."""

    @abc.abstractmethod
    def standalone(self) -> tuple[Any, dict[str, Tensor]]:
        """As a causal LM of `transformers`, with copies of what it borrows: its config and its
        tensors.

        Raises: InputError if what is borrowed cannot be written.
        """


def owns_all(drafter: Drafter) -> bool:
    """Is a drafter a language model that borrows nothing of the target?"""
    return isinstance(drafter, Standalone) and drafter.owns_all
