"""Several drafters at once, their trees merged into one (Miao et al. 2023, SpecInfer,
arXiv:2305.09781, section 3).

Members may be of any kinds, language models, heads or drafters that copy text. In every round each
reads what became true and grows its own tree with uniform numbers of its own; what they propose is
merged by path, every proposal with the distribution that it was made by (`drafttrain.tree.merge`),
so that the text stays the target's. Members draft one after the other.

Departs from the paper: siblings are judged by member, not in an order drawn again for every round,
which is exact too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from drafttrain.drafter.base import Committed, Drafter
from drafttrain.drafter.inside import Inside
from drafttrain.drafter.remembered import (
    Remembers,
    remember_texts,
    tokens_remembered,
    without_memory,
)
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Loss, Needs, Proposal, Sampling
from drafttrain.nn.sampling import Policy
from drafttrain.target.model import Target
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.forest import Forest
from drafttrain.tree.merge import merge, without_repeats
from drafttrain.tree.topology import Growth, Tree, check_size


@dataclass
class EnsembleState:
    """A state for each member."""

    members: list[Any]
    """Each member's own."""
    rows: list[int]
    """Numbers of the rows, as they were when the state was opened."""


@dataclass(frozen=True, kw_only=True)
class EnsembleConfig:
    """Settings of `Ensemble`."""

    members: Sequence[Drafter]
    """Drafters for the same target, in the order in which their drafts are judged."""

    def __post_init__(self) -> None:
        if not self.members:
            raise InputError("an ensemble has no members: give at least one drafter")
        for number, member in enumerate(self.members, start=1):
            if not isinstance(member, Drafter) or isinstance(member, Ensemble):
                raise InputError(
                    f"member {number} is {type(member).__name__}, needs a drafter by itself"
                )
            if isinstance(member, Inside):
                raise InputError(
                    f"member {number} is {type(member).__name__}, a part of the target that drafts "
                    "on its cache, where there is room for one: give drafters of other kinds"
                )


class Ensemble(Remembers, Drafter):
    """Drafters that draft for the same target at once.

    Each of them grows the tree asked for, unless that has a tree for each.

    Raises: InputError if a member drafts for another target.
    """

    Config = EnsembleConfig
    config: EnsembleConfig
    growths = (Forest, Tree, Dynamic, Confident)
    learns = False

    def __init__(self, target: Target, **settings: Any) -> None:
        super().__init__(target, **settings)
        members = self.config.members
        for number, member in enumerate(members, start=1):
            if member.target is not target:
                raise InputError(f"member {number} drafts for another target than the ensemble's")
        self.members = nn.ModuleList(members)
        needs = [member.needs for member in members]
        self.needs = Needs(
            last_hidden=any(one.last_hidden for one in needs),
            layers=tuple(sorted({layer for one in needs for layer in one.layers})),
            logits=any(one.logits for one in needs),
        )
        self.can_draw = any(member.can_draw for member in members)

    # What it is -----------------------------------------------------------------------------------
    @property
    def drafters(self) -> list[Drafter]:
        """The members, in the order in which their drafts are judged."""
        return cast("list[Drafter]", list(self.members))

    def settings(self) -> dict[str, Any]:
        """Each member as the class that it is, how many tokens it proposes from, and its settings.
        To build the ensemble again, the members are built first."""
        return {
            "members": [
                {"_target_": _name(one), "draft_vocab": one.choices, **one.settings()}
                for one in self.drafters
            ]
        }

    def at(self, dtype: torch.dtype, target: Target | None = None) -> Drafter:
        copies = [member.at(dtype, target) for member in self.drafters]
        return Ensemble(target or self.target, members=copies).eval().requires_grad_(False)

    @property
    def max_depth(self) -> int | None:
        depths = [member.max_depth for member in self.drafters]
        return None if None in depths else max(depth for depth in depths if depth is not None)

    @property
    def remembers(self) -> int:
        return max(tokens_remembered(member) for member in self.drafters)

    def remember_texts(self, texts: Sequence[Sequence[int]]) -> None:
        for member in self.drafters:
            remember_texts(member, texts)

    def without_memory(self) -> Ensemble:
        if not self.remembers:
            return self
        members = [without_memory(member) for member in self.drafters]
        return Ensemble(self.target, members=members).eval()

    @property
    def choices(self) -> int:
        """Of the member that proposes from the most tokens."""
        return max(member.choices for member in self.drafters)

    def describe(self) -> dict[str, Any]:
        described = [
            f"{type(member).__name__} "
            f"({', '.join(f'{name} {value}' for name, value in member.describe().items())})"
            for member in self.drafters
        ]
        return {"members": "; ".join(described)}

    def shaped(self, tree: Growth) -> Growth:
        if isinstance(tree, Forest) or not tree.size:
            return tree
        return Forest(tuple(_as_deep_as(member, tree) for member in self.drafters))

    def check(self, tree: Growth, where: str = "the tree") -> None:
        forest = self.shaped(tree)
        if not isinstance(forest, Forest):
            return
        check_size(max(forest.size, forest.reads), where)
        if len(forest.trees) != len(self.members):
            raise InputError(
                f"{where} has {len(forest.trees)} trees, this ensemble {len(self.members)} "
                "members: give one tree for each"
            )
        pairs = zip(self.drafters, forest.trees, strict=True)
        for number, (member, own) in enumerate(pairs, start=1):
            if own.size:
                member.check(own, f"{where}, member {number}")

    # Training -------------------------------------------------------------------------------------
    def loss(
        self, batch: Batch, features: Features, *, generator: torch.Generator | None = None
    ) -> Loss:
        raise InputError(
            "an ensemble is not trained as one: train its members, each by itself, or with "
            "experiment=specinfer"
        )

    # Decoding -------------------------------------------------------------------------------------
    def open(self, rows: int, capacity: int) -> EnsembleState:
        return EnsembleState(
            [member.open(rows, capacity) for member in self.drafters], list(range(rows))
        )

    def select(self, state: EnsembleState, rows: Tensor) -> None:
        for member, own in zip(self.drafters, state.members, strict=True):
            member.select(own, rows)
        state.rows = [state.rows[row] for row in rows.tolist()]

    def propose(
        self,
        state: EnsembleState,
        committed: Committed,
        tree: Growth,
        policy: Policy,
        u: Tensor | None,
        sampling: Sampling = Sampling.WOR,
    ) -> Proposal:
        if not isinstance(tree, Forest):
            raise TypeError(
                f"an ensemble grows a Forest, this is a {type(tree).__name__}: see Ensemble.shaped"
            )
        drafted = self.drafts(state, committed, tree, policy, u, sampling)
        made = [one for one in drafted if one is not None and one.size]
        if not made:
            nothing = committed.tokens.new_empty(len(committed.tokens), 0)
            return Proposal(nothing, nothing, Sampling.ONE_HOT)
        if u is None:
            return without_repeats(merge(made).proposal)
        return merge(made, vocab_size=self.target.vocab_size).proposal

    def drafts(
        self,
        state: EnsembleState,
        committed: Committed,
        forest: Forest,
        policy: Policy,
        u: Tensor | None,
        sampling: Sampling,
    ) -> list[Proposal | None]:
        """What each member proposes; None of one that is left out, which reads nothing either.

        Args:
            u: (b n) uniform numbers, each member's after those of the members before it.
        """
        found: list[Proposal | None] = []
        start = 0
        for member, own, tree in zip(self.drafters, state.members, forest.trees, strict=True):
            numbers = None
            if u is not None and tree.can_draw and member.can_draw:
                numbers = u[:, start : start + tree.size]
            how = Sampling.ONE_HOT if numbers is None else sampling
            found.append(
                member.propose(own, committed, tree, policy, numbers, how) if tree.size else None
            )
            start += tree.size
        return found


def _name(drafter: Drafter) -> str:
    return f"{type(drafter).__module__}.{type(drafter).__qualname__}"


def _as_deep_as(member: Drafter, tree: Growth) -> Growth:
    most = member.max_depth
    return tree if most is None or tree.max_depth <= most else tree.capped(most)
