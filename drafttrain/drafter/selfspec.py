"""Draft & Verify (Zhang et al. 2024, arXiv:2309.08168): the target drafts for itself, with some of
its attention and some of its MLP sub-layers left out. Nothing is trained.

What is left out is given, or searched by decoding (`search=skips`).

As in the source, a draft reads the keys and values that the full target has made of the text, and
those of drafted tokens are its own, until verification overwrites them. Departs from it:

- Layers before the first with something left out do in a draft what they do in the target.
  Verification does not run them again for tokens that the draft has read.
- The tree decides where a draft ends: `tree=chain tree.stop_below=0.6` ends it before a token that
  is unsure. The source ends it after one, at a threshold that follows the rate of acceptance.
- A reduced draft vocabulary is possible: the head, which the source runs in full, is a large part
  of a small target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafter.base import Committed, Drafter
from drafttrain.drafter.inside import Inside, InsideState
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Loss, Needs
from drafttrain.target.model import Target
from drafttrain.tree.candidates import Candidates

SKIPS = ("skip_attention", "skip_mlp")


@dataclass(frozen=True, kw_only=True)
class SelfSpecConfig:
    """Settings of `SelfSpec`."""

    skip_attention: Sequence[int]
    """Numbers of the layers, from 0, whose attention is left out; kept ascending."""
    skip_mlp: Sequence[int]
    """Of those whose MLP is left out. A layer that is named in both is left out entirely."""
    draft_ids: Sequence[int] | None
    """(w) ascending ids that can be proposed; None is the whole vocabulary."""

    def __post_init__(self) -> None:
        for name in SKIPS:
            given = getattr(self, name)
            if isinstance(given, list | tuple) and all(type(layer) is int for layer in given):
                object.__setattr__(self, name, sorted(given))


class SelfSpec(Inside):
    """The target without some of its sub-layers.

    Raises: InputError for layers that are not there, if nothing is left to draft with, and for a
        target whose layers cannot be taken apart.
    """

    Config = SelfSpecConfig
    config: SelfSpecConfig
    needs = Needs()
    learns = False

    def __init__(self, target: Target, **settings: Any) -> None:
        super().__init__(target, **settings)
        skips, count = self.config, len(target.decoder_layers)
        for name in SKIPS:
            given = getattr(skips, name)
            listed = isinstance(given, list)
            numbers = listed and all(type(n) is int and 0 <= n < count for n in given)
            if not numbers or len(set(given)) < len(given):
                raise InputError(
                    f"{name}={given}: needs a list of layers of target {target.name}, numbers from "
                    f"0 to {count - 1}, each once; [] for none"
                )
        if len(skips.skip_attention) == len(skips.skip_mlp) == count:
            raise InputError(
                f"skip_attention and skip_mlp name all {count} layers of target {target.name}: "
                "leave some to draft with"
            )
        steps = target.stack.without(skips.skip_attention, skips.skip_mlp)
        first = min((*skips.skip_attention, *skips.skip_mlp), default=count)
        self.common, self.rest = steps[:first], steps[first:]
        self.to(target.device)

    @property
    def dtype(self) -> torch.dtype:
        """The target's: these are its own layers."""
        return self.target.dtype

    @property
    def share(self) -> float:
        """Of the target's parameters, embedding left out, those that a draft reads: what a draft
        costs where weights bound it."""
        attention, mlp = self.target.stack.sizes()
        head, skips = self.target.output.weight.numel(), self.config
        kept = sum(n for layer, n in enumerate(attention) if layer not in skips.skip_attention)
        kept += sum(n for layer, n in enumerate(mlp) if layer not in skips.skip_mlp)
        drafting = head * self.choices / self.target.vocab_size
        return (kept + drafting) / (sum(attention) + sum(mlp) + head)

    def describe(self) -> dict[str, Any]:
        return {
            "learns": "nothing, it is the target with sub-layers left out",
            "skip_attention": list(self.config.skip_attention),
            "skip_mlp": list(self.config.skip_mlp),
            "reads of the target's weights": f"{self.share:.0%}",
        }

    def at(self, dtype: torch.dtype, target: Target | None = None) -> Drafter:
        """Itself, unless for another target: it has no weights to convert."""
        if target is None or target is self.target:
            return self.eval()
        return type(self)(target, **self.settings()).eval()

    def head(self, hidden: Tensor) -> Tensor:
        return self.target.head(hidden) if self.draft_ids is None else super().head(hidden)

    def loss(
        self, batch: Batch, features: Features, *, generator: torch.Generator | None = None
    ) -> Loss:
        raise InputError(
            "SelfSpec has no weights: there is nothing to train, python -m drafttrain.fit "
            "measures it"
        )

    # Decoding -------------------------------------------------------------------------------------
    def extend(
        self, state: InsideState, committed: Committed, depth: int
    ) -> tuple[Tensor, Candidates]:
        out = self.target.stack.norm(self.read_anchor(state, committed))  # b 1 d
        return out, self.candidates(self.head(out[:, 0])[:, None])

    def expand(
        self, state: InsideState, tokens: Tensor, hidden: Tensor, depth: int, tree_mask: Tensor
    ) -> tuple[Tensor, Candidates]:
        out = self.target.stack.norm(self.read_drafts(state, tokens, depth, tree_mask))
        return out, self.candidates(self.head(out))
