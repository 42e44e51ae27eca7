"""Draft & Verify (Zhang et al. 2024, arXiv:2309.08168): the target drafts for itself, with some of
its attention and some of its MLP sub-layers left out. Nothing is trained.

What is left out is given, or searched by decoding (`search=skips`).

As in the source, a draft reads the keys and values that the whole target has made of the text, and
those of drafted tokens are its own, until verification overwrites them. Departs from it:

- Layers before the first with something left out do in a draft what they do in the target.
  Verification does not run them again for tokens that the draft has read.
- Where a draft ends is the tree's business: `tree=chain tree.stop_below=0.6` ends it before a token
  that is unsure. The source ends it behind one, at a threshold that follows the rate of acceptance.
- A reduced draft vocabulary is possible: the head, which the source runs whole, is a large part of
  a small target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafter.base import Committed, Drafter
from drafttrain.drafter.inside import Inside, InsideState
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Loss, Needs
from drafttrain.target.model import Target


class SelfSpec(Inside):
    """The target without some of its sub-layers.

    Args:
        target: the frozen model.
        skip_attention, skip_mlp: numbers of the layers, from 0, whose attention, whose MLP is left
            out. A layer that is named in both is left out whole.
        draft_ids: (w) ascending ids that can be proposed; None is the whole vocabulary.
    Raises: InputError for layers that are not there, if nothing is left to draft with, and for a
        target whose layers cannot be taken apart.
    """

    needs = Needs()
    learns = False

    def __init__(
        self,
        target: Target,
        *,
        skip_attention: Sequence[int] = (),
        skip_mlp: Sequence[int] = (),
        draft_ids: Tensor | list[int] | None = None,
    ) -> None:
        super().__init__(target, draft_ids)
        count = len(target.decoder_layers)
        self.skip_attention = _numbers("skip_attention", skip_attention, count, target)
        self.skip_mlp = _numbers("skip_mlp", skip_mlp, count, target)
        if len(self.skip_attention) == len(self.skip_mlp) == count:
            raise InputError(
                f"skip_attention and skip_mlp name all {count} layers of target {target.name}: "
                f"leave some to draft with"
            )
        steps = target.stack.without(self.skip_attention, self.skip_mlp)
        first = min((*self.skip_attention, *self.skip_mlp), default=count)
        self.common, self.rest = steps[:first], steps[first:]
        self.to(target.device)

    def settings(self) -> dict[str, Any]:
        return {
            "skip_attention": list(self.skip_attention),
            "skip_mlp": list(self.skip_mlp),
            "draft_ids": None if self.draft_ids is None else self.draft_ids.tolist(),
        }

    @property
    def dtype(self) -> torch.dtype:
        """The target's: these are its own layers."""
        return self.target.dtype

    @property
    def share(self) -> float:
        """Of the target's parameters, embedding left out, those that a draft reads: what a draft
        costs where weights bound it."""
        attention, mlp = self.target.stack.sizes()
        head = self.target.output.weight.numel()
        kept = sum(n for layer, n in enumerate(attention) if layer not in self.skip_attention)
        kept += sum(n for layer, n in enumerate(mlp) if layer not in self.skip_mlp)
        drafting = head * self.choices / self.target.vocab_size
        return (kept + drafting) / (sum(attention) + sum(mlp) + head)

    def describe(self) -> dict[str, Any]:
        return {
            "learns": "nothing, it is the target with sub-layers left out",
            "skip_attention": list(self.skip_attention),
            "skip_mlp": list(self.skip_mlp),
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
            "SelfSpec has no weights: there is nothing to train, python -m drafttrain.fit measures "
            "it"
        )

    # Decoding -------------------------------------------------------------------------------------
    def extend(self, state: InsideState, committed: Committed) -> tuple[Tensor, Tensor]:
        out = self.target.stack.norm(self.read_anchor(state, committed))[:, 0]
        return out, self.head(out)

    def expand(
        self, state: InsideState, tokens: Tensor, hidden: Tensor, depth: int, tree_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        out = self.target.stack.norm(self.read_drafts(state, tokens, depth, tree_mask))
        return out, self.head(out)


def _numbers(name: str, given: Sequence[int], count: int, target: Target) -> tuple[int, ...]:
    """Ascending numbers of layers. Raises: InputError for anything else."""
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    if (
        not listed
        or not all(type(layer) is int and 0 <= layer < count for layer in given)
        or len(set(given)) < len(given)
    ):
        raise InputError(
            f"{name}={given}: needs a list of layers of target {target.name}, numbers from 0 to "
            f"{count - 1}, each once; [] for none"
        )
    return tuple(sorted(given))
