"""What a drafter must offer. The four bases differ in how the tokens of one block depend on each
other."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Loss, Needs, Proposal, Sampling
from drafttrain.nn.cache import KVCache
from drafttrain.nn.processing import Text
from drafttrain.nn.sampling import Policy
from drafttrain.target.model import Target
from drafttrain.tree.confident import Confident
from drafttrain.tree.copied import Continuations, copied, proposal_of
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.growth import grow
from drafttrain.tree.topology import Growth, Tree, check_size

SLACK = 1 << 24
"""Weights beyond a package's that may be made before tensors are compared by name, which says
more."""


@dataclass(frozen=True)
class Committed:
    """What became true since the last proposal: features of positions, each with the token that
    follows it."""

    features: Features
    """(b s d) features of positions read by the target, as far as the drafter needs them."""
    tokens: Tensor
    """(b s) int64, the committed token behind each position; a row's last one is the anchor."""
    counts: Tensor
    """(b) int64 positions that are real; the rest is padding."""
    text: Text | None = None
    """All that is committed, the anchor included, where the policy reads it."""
    first: Tensor | None = None
    """(b) int64 each row's very first token, which stands behind no position; given at the first
    proposal alone."""


class Drafter(nn.Module, abc.ABC):
    """A trainable guesser. Frozen parts of the target (embedding, head) are borrowed, never owned
    or saved."""

    needs: Needs
    """Of the class, or of an object where it depends on the settings."""
    growths: ClassVar[tuple[type[Growth], ...]] = (Tree,)
    """Kinds of trees that it can fill."""
    learns: ClassVar[bool] = True
    """Whether a run trains it. False: it is measured and packaged as it is."""
    writes: ClassVar[bool] = False
    """Whether it is a language model that reads tokens alone, whose loss counts labels by their
    weights. Where its teacher-forced guesses of a text are right, it would have written the same
    text by itself."""
    can_draw: bool = True
    """Whether it has laws that drafts can be drawn from. False: its drafts are a function of the
    text at any temperature."""
    inside: ClassVar[bool] = False
    """Whether it is a part of the target, and drafts on the target's own cache."""
    target: Target

    def __init__(self, target: Target) -> None:
        super().__init__()
        # Not an attribute that nn.Module would register: the target is neither saved nor moved with
        # the drafter.
        object.__setattr__(self, "target", target)

    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """Keyword arguments, apart from the target, that build this drafter again; plain JSON
        values."""

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

    def attach(self, state: Any, cache: KVCache) -> None:
        """Told once, behind `open`: the target's own cache of these rows, whose committed entries
        are the tokens before the anchor.

        It is for drafters that are `inside`. They may write behind the committed entries, where the
        pass that verifies writes too; to commit, and to select rows, is not theirs.
        """

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
        """Take in what became true, then grow a tree of drafts behind the anchor.

        Args:
            u: (b n) uniform numbers to draw the tokens with; None asks for a deterministic
                proposal.
            law: how siblings are drawn, where tokens are drawn at all: Law.WOR or Law.IID.
        """

    @abc.abstractmethod
    def select(self, state: Any, rows: Tensor) -> None:
        """Keep only some rows of a state."""

    @property
    def remembers(self) -> int:
        """Tokens of texts decoded earlier that may be drafted from; 0 for a drafter that keeps
        none."""
        return 0

    def remember_texts(self, texts: Sequence[Sequence[int]]) -> None:
        """Told behind every call that decodes: whole texts, each a prompt and its answer, in the
        order of the rows. Nothing is kept of them, unless a drafter says otherwise."""

    def without_memory(self) -> Drafter:
        """This drafter as one that has kept nothing, and keeps for itself what it decodes; itself
        where none is ever kept. A measurement decodes with one of these: it must not see what
        another one wrote."""
        return self

    @property
    def max_depth(self) -> int | None:
        """Deepest tree this drafter can fill; None is no limit of its own."""
        return None

    @property
    def shared_layer(self) -> int | None:
        """The target's last layer that drafts have been through when they are verified; None: they
        begin anew."""
        return None

    @property
    def dtype(self) -> torch.dtype | None:
        """Of its weights; None where it has none."""
        return next((p.dtype for p in self.parameters()), None)

    @property
    def device(self) -> torch.device:
        """Where its weights are; without any, where the target is."""
        return next((p.device for p in self.parameters()), self.target.device)

    @property
    def choices(self) -> int:
        """How many different tokens this drafter can propose."""
        ids = getattr(self, "draft_ids", None)
        return self.target.vocab_size if ids is None else len(ids)

    def check(self, tree: Growth, where: str = "the tree") -> None:
        """Raise InputError if this drafter cannot fill a tree, or the target not check it in one
        pass."""
        check_size(max(tree.size, tree.reads), where)
        if tree.size and not isinstance(tree, self.growths):
            kinds = ", ".join(kind.__name__ for kind in self.growths)
            raise InputError(
                f"{where} is a {type(tree).__name__}, {type(self).__name__} can fill: {kinds}"
            )
        if self.max_depth is not None and tree.max_depth > self.max_depth:
            raise InputError(
                f"{where} is {tree.max_depth} deep, this drafter fills {self.max_depth}: give a "
                f"shallower tree"
            )
        if tree.max_children > self.choices:
            raise InputError(
                f"{where}: a node has {tree.max_children} children, this drafter proposes from "
                f"{self.choices} tokens: give "
                "a narrower tree, or train with a larger draft_vocab"
            )

    def check_packing(self) -> None:
        """Raise InputError unless its loss keeps rows apart that were joined into one sequence
        (`Batch.packing`)."""
        raise InputError(
            f"trainer.pack: {type(self).__name__} does not learn from joined rows, set "
            f"trainer.pack=null"
        )

    def shaped(self, tree: Growth) -> Growth:
        """A tree as this drafter grows it: itself, unless several drafters grow one each."""
        return tree

    def at(self, dtype: torch.dtype, target: Target | None = None) -> Drafter:
        """A copy of this drafter in another dtype, in evaluation mode, for decoding.

        Args:
            target: the one that it shall draft for, where it is not its own.
        """
        copy = type(self)(target=target or self.target, **self.settings())
        copy.load_state_dict(self.state_dict())
        return copy.to(device=self.device, dtype=dtype).eval().requires_grad_(False)

    @classmethod
    def check_held(
        cls, target: Target, settings: Mapping[str, Any], tensors: int, weights: int
    ) -> None:
        """Raise InputError if settings ask for far more than a package holds: it would be made
        before it is compared.

        Args:
            settings: of the types that the class takes, not checked further.
            tensors, weights: how many the package holds.
        """

    @property
    def owns_all(self) -> bool:
        """Is it a language model by itself, that borrows nothing of the target? A package then
        keeps it as one."""
        return False

    @property
    def trained_vocabulary(self) -> tuple[str, ...]:
        """Names of tensors that stand in the place of the target's embedding or head, and are this
        drafter's own."""
        return ()

    def standalone(self) -> tuple[Any, dict[str, Tensor]] | None:
        """As a causal LM of `transformers`, with copies of what it borrows: its config and its
        tensors; None for a drafter that cannot stand alone.

        Raises: InputError if what is borrowed cannot be written.
        """
        return None

    @property
    def loss_parts(self) -> tuple[str, ...]:
        """Names of the parts that `loss` reports; every process logs the same ones, whatever rows
        it has."""
        return ()

    def guesses(self, batch: Batch, features: Features) -> Tensor | None:
        """(b s k) int64 teacher-forced: the token guessed for each position at depths 1..k of a
        draft, from the target's true features, -1 where none is made. k = 1 where every depth
        guesses alike.

        None for a drafter that has no such guess.
        """
        return None

    @property
    def has_heads(self) -> bool:
        """Can `hits` count how often each head is right?"""
        return False

    def hits(self, batch: Batch, features: Features, ranks: int) -> tuple[Tensor, Tensor]:
        """How often each head's j-th choice is the text's token, teacher-forced, for a drafter with
        heads.

        Returns: (k ranks) int64 hits, (k) int64 comparisons really made.
        """
        raise InputError(f"{type(self).__name__} has no heads to count hits of")

    def describe(self) -> dict[str, Any]:
        """Facts worth printing at the start of a run."""
        return {
            "trainable parameters": sum(p.numel() for p in self.parameters() if p.requires_grad)
        }


class Growing(Drafter):
    """A drafter that trees are grown with, level by level: it reads what became true, then gives
    the logits of the children of nodes that were drafted."""

    growths = (Tree, Dynamic, Confident)

    @abc.abstractmethod
    def extend(self, state: Any, committed: Committed) -> tuple[Tensor, Tensor]:
        """Read what became true. Returns (b e) the output at the anchor, (b w) logits of its
        children."""

    @abc.abstractmethod
    def expand(
        self, state: Any, tokens: Tensor, hidden: Tensor, depth: int, tree_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `drafttrain.tree.speaker.Speaker`."""

    def scratch(self, state: Any) -> contextlib.AbstractContextManager[None]:
        """While a tree is grown: what `expand` writes into the state is taken back behind it."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def to_target_ids(self, ids: Tensor) -> Tensor:
        """(...) int64 places in the draft vocabulary -> (...) ids of the target."""

    @abc.abstractmethod
    def to_target_probs(self, probs: Tensor) -> Tensor:
        """(... w) over the draft vocabulary -> (... v) over the target's, 0 for what cannot be
        proposed."""

    def propose(
        self,
        state: Any,
        committed: Committed,
        tree: Growth,
        policy: Policy,
        u: Tensor | None,
        sampling: Sampling = Sampling.WOR,
    ) -> Proposal:
        hidden, logits = self.extend(state, committed)
        with self.scratch(state):
            return grow(self, state, hidden, logits, tree, policy, u, sampling, committed.text)


@dataclass
class AutoregressiveState:
    """What a drafter with a cache of its own remembers of what is committed; while a tree is grown,
    its drafts too."""

    cache: KVCache


class Autoregressive(Growing):
    """One call gives the logits of the children of given nodes, growing a draft cache."""

    def open(self, rows: int, capacity: int) -> AutoregressiveState:
        return AutoregressiveState(KVCache(rows, capacity, self.target.device))

    def select(self, state: AutoregressiveState, rows: Tensor) -> None:
        state.cache.select(rows)

    @contextlib.contextmanager
    def scratch(self, state: AutoregressiveState) -> Iterator[None]:
        """Only rows made from the target's own features stay."""
        true_rows = state.cache.lengths
        yield
        state.cache.set_lengths(true_rows)


class Heads(Growing):
    """K heads fill K depths from the features of one position; nothing is remembered between
    rounds."""

    @property
    @abc.abstractmethod
    def count(self) -> int:
        """K, the number of heads."""

    @property
    def max_depth(self) -> int:
        return self.count

    def open(self, rows: int, capacity: int) -> None:
        return None

    def select(self, state: None, rows: Tensor) -> None:
        return None


class Parallel(Heads):
    """One call gives the logits of a place to come whatever tokens stand before it: all nodes of a
    depth share one law."""

    @abc.abstractmethod
    def place(self, hidden: Tensor, k: int) -> Tensor:
        """(b d) the last position's features -> (b w) logits of depth k, 1 for the anchor's
        children."""

    def extend(self, state: None, committed: Committed) -> tuple[Tensor, Tensor]:
        hidden = last_of(committed)
        return hidden, self.place(hidden, 1)

    def expand(
        self, state: None, tokens: Tensor, hidden: Tensor, depth: int, tree_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits = self.place(hidden[:, 0], depth + 1)  # b w
        return hidden, logits[:, None].expand(-1, tokens.shape[1], -1)


class SemiAutoregressive(Heads):
    """Heads that read the position's features and the tokens drafted behind it, without a cache: a
    node's output carries what its children's head will read."""


class RowText(Continuations, Protocol):
    """What a drafter that copies remembers of one row: its committed ids, the anchor last, so that
    what followed is found."""

    def append(self, token: int) -> None:
        """Take in the next committed token."""
        ...

    def root(self) -> Any:
        """The place behind the anchor, whose continuations are drafted; None where nothing like the
        text's end is known."""
        ...


class Retrieval(Drafter):
    """Drafts copied from text: tokens, no probabilities. Learns nothing and reads nothing of the
    target.

    It works on the host, every row by its own text. How continuations fill a tree:
    `drafttrain.tree.copied`.
    """

    needs = Needs()
    learns = False
    can_draw = False

    @abc.abstractmethod
    def memory(self) -> RowText:
        """Of a new row."""

    def reading(self) -> contextlib.AbstractContextManager[Any]:
        """Held while rows' texts go on and are read, for memories that several threads share."""
        return contextlib.nullcontext()

    def open(self, rows: int, capacity: int) -> list[RowText]:
        return [self.memory() for _ in range(rows)]

    def select(self, state: list[RowText], rows: Tensor) -> None:
        state[:] = [state[row] for row in rows.tolist()]

    def propose(
        self,
        state: list[RowText],
        committed: Committed,
        tree: Growth,
        policy: Policy,
        u: Tensor | None,
        sampling: Sampling = Sampling.ONE_HOT,
    ) -> Proposal:
        """Remember what became true, then copy what followed earlier. Rows may have fewer nodes
        than the tree, or none."""
        counts = committed.counts.to(committed.tokens.device)
        if committed.first is not None:
            counts, new = counts + 1, torch.cat((committed.first[:, None], committed.tokens), 1)
        else:
            new = committed.tokens
        rows = []
        with self.reading():
            for text, (count, *ids) in zip(
                state, torch.cat((counts[:, None], new), 1).tolist(), strict=True
            ):
                for token in ids[:count]:
                    text.append(token)
                rows.append(copied(text, text.root(), tree))
        return proposal_of(rows, new.device)

    def loss(
        self, batch: Batch, features: Features, *, generator: torch.Generator | None = None
    ) -> Loss:
        raise InputError(
            f"{type(self).__name__} has no weights: there is nothing to train, python -m "
            f"drafttrain.fit measures it"
        )

    def at(self, dtype: torch.dtype, target: Target | None = None) -> Drafter:
        """Itself, unless for another target: it has no weights to convert."""
        if target is None or target is self.target:
            return self.eval()
        return super().at(dtype, target)

    def describe(self) -> dict[str, Any]:
        return {"learns": "nothing, it copies its drafts from the text", **self.settings()}


def last_of(committed: Committed) -> Tensor:
    """(b d) features of each row's last position that the target has read."""
    hidden = committed.features.last_hidden
    assert hidden is not None
    return hidden[
        torch.arange(len(hidden), device=hidden.device), committed.counts.to(hidden.device) - 1
    ]
