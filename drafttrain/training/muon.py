"""Muon and AdamW as one optimiser: which weights each of them trains, and matrices that processes
share.

Muon is for matrices that take hidden states to hidden states. A row of an embedding, of a
projection to the vocabulary or of a codebook belongs to one token, and most of them have no
gradient in a batch: to make such a matrix orthogonal moves what nothing was learned of. These go to
AdamW, as do low-rank factors, norms, biases and kernels of more than two dimensions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drafttrain.errors import InputError
from drafttrain.training.sharding import gathered, share

VOCABULARY = ("embed", "lm_head", "projections", "codebook", "markov")
"""In the name of a weight whose rows or columns are tokens, or that is a low-rank factor."""


def matrices(drafter: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that Muon trains, by name: two sides of more than 1, no embedding, no projection
    to the vocabulary, no low-rank factor.

    Raises: InputError if there is none.
    """
    embeddings = {id(m.weight) for m in drafter.modules() if isinstance(m, nn.Embedding)}
    found = {
        name: p
        for name, p in drafter.named_parameters()
        if p.requires_grad
        and p.ndim == 2
        and min(p.shape) > 1
        and id(p) not in embeddings
        and not any(word in name for word in VOCABULARY)
    }
    if not found:
        raise InputError(
            f"optim=muon: {type(drafter).__name__} trains no matrix that it is for: set optim=adamw"
        )
    return found


def split(
    groups: Sequence[dict[str, Any]], found: dict[str, nn.Parameter]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Groups of an optimiser -> those of the matrices found, and those of all else."""
    chosen = {id(p) for p in found.values()}
    sides: tuple[list[dict[str, Any]], ...] = ([], [])
    for group in groups:
        for side, inside in zip(sides, (True, False), strict=True):
            own = [p for p in group["params"] if (id(p) in chosen) == inside]
            if own:
                side.append({**group, "params": own})
    return sides[0], sides[1]


def words(drafter: nn.Module, found: Collection[str]) -> str:
    """What trains which weights, in words."""
    trained = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    rest = [name for name in trained if name not in found]
    listed = []
    for title, names in (("Muon", list(found)), ("AdamW", rest)):
        count = sum(trained[name].numel() for name in names)
        short = ", ".join(name.removesuffix(".weight") for name in names) or "nothing"
        listed.append(f"{title}: {short} ({count:,} parameters)")
    return "; ".join(listed)


class Both(torch.optim.Optimizer):
    """Two optimisers of one state and one list of groups, Muon's first.

    A matrix that processes share (FSDP) is gathered, one at a time, and each process makes the step
    of all of it: its share of a matrix has another nearest orthogonal matrix.

    Args:
        adamw: None where there is nothing for it.
    """

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer | None) -> None:
        self.muon, self.adamw = muon, adamw
        super().__init__([group for one in self._parts for group in one.param_groups], {})
        self._share()

    @property
    def _parts(self) -> list[torch.optim.Optimizer]:
        return [one for one in (self.muon, self.adamw) if one is not None]

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for one in self._parts:
            own = [next(groups) for _ in one.param_groups]
            one.__setstate__({"state": self.state, "param_groups": own})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(isinstance(p, DTensor) for group in self.muon.param_groups for p in group["params"]):
            for group in self.muon.param_groups:
                _step_whole(group, self.state)
        else:
            self.muon.step()
        if self.adamw is not None:
            self.adamw.step()
        return loss


def _step_whole(group: dict[str, Any], state: dict[Tensor, Any]) -> None:
    """The step of matrices that processes share; every process must come here, with gradients of
    the same ones."""
    for shared in (p for p in group["params"] if p.grad is not None):
        whole = nn.Parameter(gathered(shared))
        whole.grad = gathered(shared.grad)
        one = torch.optim.Muon([{**group, "params": [whole]}])
        if shared in state:
            one.state[whole] = {name: gathered(value) for name, value in state[shared].items()}
        one.step()
        shared.copy_(share(whole.detach(), shared))
        state[shared] = {name: share(value, shared) for name, value in one.state[whole].items()}
