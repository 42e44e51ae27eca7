"""The contract of every drafter. What only some can do is in their files: `growing`, `retrieval`,
`inside`, `standalone`, `heads`, `remembered`."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Loss, Needs, Proposal, Sampling
from drafttrain.nn.processing import Text
from drafttrain.nn.sampling import Policy
from drafttrain.target.model import Target
from drafttrain.tree.topology import Growth, Tree, check_room, check_size


@dataclass(frozen=True)
class Committed:
    """What became true since the last proposal: features of positions, each with the token that
    follows it."""

    features: Features
    """(b s d) features of positions that the target has read, as far as the drafter needs them."""
    tokens: Tensor
    """(b s) int64, the committed token after each position; a row's last one is the anchor."""
    counts: Tensor
    """(b) int64 positions that are real; the rest is padding."""
    text: Text | None = None
    """All that is committed, the anchor included, where the policy reads it."""
    first: Tensor | None = None
    """(b) int64 each row's very first token, which follows no position; given at the first proposal
    only."""


class Drafter(nn.Module, abc.ABC):
    """A trainable guesser of the target's next tokens.

    Frozen parts of the target (embedding, head) are borrowed, never owned or saved.

    Args:
        target: the frozen model.
        settings: the fields of `Config`, all of them.
    Raises: InputError for settings that contradict each other or do not fit the target.
    """

    Config: ClassVar[type]
    """Its settings: a frozen dataclass without defaults, which are in `conf/drafter/`."""
    config: Any
    """This object's, of type `Config`."""
    needs: Needs
    """What it reads of the target, while learning and while decoding."""
    growths: tuple[type[Growth], ...] = (Tree,)  # kinds of trees that it can fill
    learns: bool = True
    """Does a run train it? False: it is measured and packaged as it is."""
    can_draw: bool = True
    """Can drafts be drawn from its distributions? False: they are a function of the text."""
    runs_target: bool = False
    """Does it draft with layers of the target, which then must run?"""
    target: Target

    def __init__(self, target: Target, **settings: Any) -> None:
        super().__init__()
        # Not an attribute that nn.Module would register: the target is neither saved nor moved
        # with the drafter.
        object.__setattr__(self, "target", target)
        plain = {n: v.tolist() if isinstance(v, Tensor) else v for n, v in settings.items()}
        self.config = self.Config(**plain)

    def settings(self) -> dict[str, Any]:
        """Keyword arguments, apart from the target, that build this drafter again; plain JSON
        values."""
        return dataclasses.asdict(self.config)

    @abc.abstractmethod
    def loss(
        self, batch: Batch, features: Features, *, generator: torch.Generator | None = None
    ) -> Loss:
        """Loss of one batch as sums over supervised positions.

        Args:
            generator: source of training noise; None means no noise (validation).
        """

    @abc.abstractmethod
    def open(self, rows: int, capacity: int) -> Any:
        """A decoding state for some rows: what the drafter remembers between rounds."""

    @abc.abstractmethod
    def propose(
        self,
        state: Any,
        committed: Committed,
        tree: Growth,
        policy: Policy,
        u: Tensor | None,
        sampling: Sampling = Sampling.WOR,
    ) -> Proposal:
        """Take in what became true, then grow a tree of drafts after the anchor.

        Args:
            u: (b n) uniform numbers to draw the tokens with; None asks for a deterministic
                proposal.
            sampling: how siblings are drawn, where tokens are drawn at all: Sampling.WOR or
                Sampling.IID.
        """

    @abc.abstractmethod
    def select(self, state: Any, rows: Tensor) -> None:
        """Keep only some rows of a state."""

    # What the loop, training and packages ask -----------------------------------------------------
    @classmethod
    def deepest(cls, config: Any) -> int | None:
        """Deepest tree that drafters of these settings can fill; None is no limit of their own."""
        return None

    @property
    def max_depth(self) -> int | None:
        """Deepest tree this drafter can fill; None is no limit of its own."""
        return self.deepest(self.config)

    @property
    def choices(self) -> int:
        """How many different tokens it can propose."""
        return self.target.vocab_size

    @property
    def dtype(self) -> torch.dtype | None:
        """Of its weights; None where it has none."""
        return next((p.dtype for p in self.parameters()), None)

    @property
    def device(self) -> torch.device:
        """Where its weights are; without any, where the target is."""
        return next((p.device for p in self.parameters()), self.target.device)

    def check(self, tree: Growth, where: str = "the tree") -> None:
        """Raise InputError if this drafter cannot fill a tree, or the target not check it in one
        pass."""
        check_size(max(tree.size, tree.reads), where)
        if tree.size and not isinstance(tree, self.growths):
            kinds = ", ".join(kind.__name__ for kind in self.growths)
            raise InputError(
                f"{where} is a {type(tree).__name__}, {type(self).__name__} can fill: {kinds}"
            )
        check_room(tree, self.max_depth, self.choices, where)

    def shaped(self, tree: Growth) -> Growth:
        """A tree as this drafter grows it: itself, unless several drafters grow one each."""
        return tree

    def check_packing(self) -> None:
        """Raise InputError unless its loss keeps rows apart that were joined into one sequence
        (`Batch.packing`)."""
        raise InputError(
            f"trainer.pack: {type(self).__name__} does not learn from joined rows, set "
            "trainer.pack=null"
        )

    @property
    def loss_parts(self) -> tuple[str, ...]:
        """Names of the parts that `loss` reports, the same on every process."""
        return ()

    def guesses(self, batch: Batch, features: Features) -> Tensor | None:
        """(b s k) int64 teacher-forced: the token guessed for each position at depths 1..k of a
        draft, from the target's true features, -1 where none is made. k = 1 where every depth
        guesses alike. None for a drafter that has no such guess."""
        return None

    def at(self, dtype: torch.dtype, target: Target | None = None) -> Drafter:
        """A copy of this drafter in another dtype, in evaluation mode, for decoding.

        Args:
            target: the one to draft for, where it is not its own.
        """
        copy = type(self)(target or self.target, **self.settings())
        copy.load_state_dict(self.state_dict())
        return copy.to(device=self.device, dtype=dtype).eval().requires_grad_(False)

    @classmethod
    def check_held(
        cls, target: Target, settings: Mapping[str, Any], tensors: int, weights: int
    ) -> None:
        """Raise InputError if a package's settings ask for far more than the tensors and weights
        that it holds: they would be made before they are compared."""

    def describe(self) -> dict[str, Any]:
        """Facts worth printing at the start of a run."""
        trained = sum(p.numel() for p in self.parameters() if p.requires_grad)
        return {"trainable parameters": trained}
