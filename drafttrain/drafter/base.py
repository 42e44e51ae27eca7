"""What a drafter must offer. The four bases differ in how the tokens of one block depend on each other."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Law, Loss, Needs, Proposal
from drafttrain.nn.cache import KVCache
from drafttrain.nn.processing import Text
from drafttrain.nn.sampling import Policy
from drafttrain.target.model import Target
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.growth import grow
from drafttrain.tree.topology import Growth, Tree, check_size


@dataclass(frozen=True)
class Fresh:
    """What became true since the last proposal: features of positions, each with the token that follows it."""

    features: Features
    """(b s d) features of positions read by the target."""
    tokens: Tensor
    """(b s) int64, the committed token behind each position; a row's last one is the anchor."""
    counts: Tensor
    """(b) int64 positions that are real; the rest is padding."""
    text: Text | None = None
    """All that is committed, the anchor included, where the policy reads it."""


class Drafter(nn.Module, abc.ABC):
    """A trainable guesser. Frozen parts of the target (embedding, head) are borrowed, never owned or saved."""

    needs: ClassVar[Needs]
    growths: ClassVar[tuple[type[Growth], ...]] = (Tree,)
    """Kinds of trees that it can fill."""
    target: Target

    def __init__(self, target: Target) -> None:
        super().__init__()
        # Not an attribute that nn.Module would register: the target is neither saved nor moved with the drafter.
        object.__setattr__(self, "target", target)

    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """Keyword arguments, apart from the target, that build this drafter again; plain JSON values."""

    @abc.abstractmethod
    def loss(self, batch: Batch, features: Features, *, generator: torch.Generator | None = None) -> Loss:
        """Loss of one batch as sums over supervised positions.

        Args:
            generator: source of training noise; None means no noise (validation).
        """

    @abc.abstractmethod
    def open(self, rows: int, capacity: int) -> Any:
        """A decoding state for some rows: what the drafter remembers between rounds."""

    @abc.abstractmethod
    def propose(
        self, state: Any, fresh: Fresh, tree: Growth, policy: Policy, u: Tensor | None, law: Law = Law.WOR
    ) -> Proposal:
        """Take in what became true, then grow a tree of drafts behind the anchor.

        Args:
            u: (b n) uniform numbers to draw the tokens with; None asks for a deterministic proposal.
            law: how siblings are drawn, where tokens are drawn at all: Law.WOR or Law.IID.
        """

    @abc.abstractmethod
    def select(self, state: Any, rows: Tensor) -> None:
        """Keep only some rows of a state."""

    @property
    def max_depth(self) -> int | None:
        """Deepest tree this drafter can fill; None is no limit of its own."""
        return None

    @property
    def choices(self) -> int:
        """How many different tokens this drafter can propose."""
        ids = getattr(self, "draft_ids", None)
        return self.target.vocab_size if ids is None else len(ids)

    def check(self, tree: Growth, where: str = "the tree") -> None:
        """Raise InputError if this drafter cannot fill a tree, or the target not check it in one pass."""
        check_size(max(tree.size, tree.reads), where)
        if tree.size and not isinstance(tree, self.growths):
            kinds = ", ".join(kind.__name__ for kind in self.growths)
            raise InputError(f"{where} is a {type(tree).__name__}, {type(self).__name__} can fill: {kinds}")
        if self.max_depth is not None and tree.max_depth > self.max_depth:
            raise InputError(
                f"{where} is {tree.max_depth} deep, this drafter fills {self.max_depth}: give a shallower tree"
            )
        if tree.max_children > self.choices:
            raise InputError(
                f"{where}: a node has {tree.max_children} children, this drafter proposes from {self.choices} tokens: give "
                "a narrower tree, or train with a larger draft_vocab"
            )

    def at(self, dtype: torch.dtype) -> Drafter:
        """A copy of this drafter in another dtype, in evaluation mode, for decoding."""
        copy = type(self)(target=self.target, **self.settings())
        copy.load_state_dict(self.state_dict())
        return copy.to(device=next(self.parameters()).device, dtype=dtype).eval().requires_grad_(False)

    def guesses(self, batch: Batch, features: Features) -> Tensor | None:
        """(b s) int64 teacher-forced: the token guessed for each position from the true text before it, -1 where none is made.

        None for a drafter that has no such guess.
        """
        return None

    def describe(self) -> dict[str, Any]:
        """Facts worth printing at the start of a run."""
        return {"trainable parameters": sum(p.numel() for p in self.parameters() if p.requires_grad)}


@dataclass
class AutoregressiveState:
    cache: KVCache


class Autoregressive(Drafter):
    """One call gives the logits of the children of given nodes, growing a draft cache."""

    growths = (Tree, Dynamic, Confident)

    @abc.abstractmethod
    def extend(self, state: AutoregressiveState, fresh: Fresh) -> tuple[Tensor, Tensor]:
        """Read true features and commit them. Returns (b d) the output at the anchor, (b w) logits of its children."""

    @abc.abstractmethod
    def expand(
        self, state: AutoregressiveState, tokens: Tensor, hidden: Tensor, depth: int, among: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `drafttrain.tree.speaker.Speaker`. What is written here is scratch: `propose` takes it back."""

    @abc.abstractmethod
    def to_target_ids(self, ids: Tensor) -> Tensor: ...

    @abc.abstractmethod
    def to_target_law(self, probs: Tensor) -> Tensor: ...

    def open(self, rows: int, capacity: int) -> AutoregressiveState:
        return AutoregressiveState(KVCache(rows, capacity, self.target.device))

    def select(self, state: AutoregressiveState, rows: Tensor) -> None:
        state.cache.select(rows)

    def propose(
        self,
        state: AutoregressiveState,
        fresh: Fresh,
        tree: Growth,
        policy: Policy,
        u: Tensor | None,
        law: Law = Law.WOR,
    ) -> Proposal:
        hidden, logits = self.extend(state, fresh)
        true_rows = state.cache.lengths
        proposal = grow(self, state, hidden, logits, tree, policy, u, law, fresh.text)
        # Only rows made from the target's own features stay.
        state.cache.set_lengths(true_rows)
        return proposal
