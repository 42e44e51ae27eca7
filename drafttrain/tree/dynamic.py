"""EAGLE-2's tree (Li et al. 2024, arXiv:2406.16858): wide where the drafter is sure of a path,
narrow where it is not.

A node's value is the product of the drafter's probabilities on the path to it, at temperature 1.
*Expand*: each level takes the `top_k` most likely children of the `top_k` most valuable nodes of
the level before. *Rerank*: of all candidates the `total` most valuable stay; among equals the
shallower, so that none stays without its parent.

Departs from the paper: ties are broken as said (the public code leaves them to the device, and a
child of probability 1.0 may then stay without its parent), and probabilities are added up as
float32 logarithms.

The tree is a function of the prefix only: nothing is drawn, which `grow_dynamic` could not do,
having no source of chance. Its `Sampling` is thus `ONE_HOT` at every temperature, and its rule the
one that judges a node only by the target's probability. Drawing tokens and reranking them by their
own probability would change the distribution of the text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from drafttrain.errors import InputError
from drafttrain.flow import Proposal, Sampling
from drafttrain.later import torch
from drafttrain.tree.candidates import Candidates, Expands
from drafttrain.tree.topology import Growth, Tree

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Dynamic(Growth):
    """EAGLE-2's growth. The paper drafts 6 deep with top_k 10, and verifies 60 nodes (7B), 50 (13B)
    or 48 (70B)."""

    depth: int
    """Levels of drafts, each one pass of the drafter."""
    top_k: int
    """Nodes read in a pass, and children taken of each."""
    total: int
    """Nodes that stay, which the target checks in one pass."""

    can_draw = False

    def __post_init__(self) -> None:
        for name in ("depth", "top_k", "total"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InputError(
                    f"tree.{name} is {value!r}, a dynamic tree needs an integer of at least 1"
                )
        if self.total < self.depth:
            raise InputError(
                f"tree.total is {self.total}, below tree.depth {self.depth}: a path that deep "
                f"would not fit; give total={self.depth} or more, or depth={self.total} or less"
            )
        if self.total > self.candidates:
            raise InputError(
                f"tree.total is {self.total}, but depth {self.depth} and top_k {self.top_k} make "
                f"only {self.candidates} candidates: give total={self.candidates} or less, or a "
                "larger depth or top_k"
            )

    @property
    def candidates(self) -> int:
        """Nodes that exist before the rerank."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def size(self) -> int:
        return self.total

    @property
    def max_depth(self) -> int:
        return self.depth

    @property
    def max_children(self) -> int:
        return self.top_k

    @property
    def reads(self) -> int:
        return (self.depth - 1) * self.top_k

    @property
    def kind(self) -> str:
        return "dynamic"

    @property
    def title(self) -> str:
        return f"dynamic {self.depth}x{self.top_k}x{self.total}"

    def capped(self, depth: int) -> Growth:
        if depth < 1:
            return Tree(()).capped(depth)
        shallow = min(depth, self.depth)
        return replace(
            self, depth=shallow, total=min(self.total, self.top_k + (shallow - 1) * self.top_k**2)
        )

    def spec(self) -> dict[str, Any]:
        return {"growth": "dynamic", "depth": self.depth, "top_k": self.top_k, "total": self.total}


def grow_dynamic(
    drafter: Expands, state: Any, hidden: Tensor, candidates: Candidates, tree: Dynamic
) -> Proposal:
    """Expand and rerank, every row by its own values.

    Args:
        hidden: (b 1 e) the drafter's output at the anchor.
        candidates: for the anchor's children, of one node.
    Returns: `tree.total` nodes in every row, by depth; siblings by falling probability.
    """
    b, k, device = len(hidden), tree.top_k, hidden.device
    found = candidates.logits.float().log_softmax(-1).topk(k)
    value, tokens = found.values[:, 0], candidates.to_ids(found.indices)[:, 0]  # b k, read next
    above = hidden.expand(-1, k, -1)  # b k e, outputs at their parents
    place = torch.arange(k, device=device).expand(b, k)  # their numbers among the candidates
    tree_mask = torch.eye(k, dtype=torch.bool, device=device).expand(b, k, k)
    values, ids, parents = [value], [tokens], [torch.full_like(tokens, -1)]
    read: list[Tensor] = []
    for depth in range(1, tree.depth):
        read.append(place)
        out, candidates = drafter.expand(state, tokens, above, depth, tree_mask)
        found = candidates.logits.float().log_softmax(-1).topk(k)  # b k k
        children = (value[:, :, None] + found.values).flatten(1)  # b k*k
        child_ids = candidates.to_ids(found.indices).flatten(1)
        values.append(children)
        ids.append(child_ids)
        parents.append(place.repeat_interleave(k, 1))
        if depth + 1 == tree.depth:
            break
        best = _largest(children, k)  # b k
        parent = best // k
        value, tokens = children.gather(1, best), child_ids.gather(1, best)
        above = out.gather(1, parent[:, :, None].expand(-1, -1, out.shape[-1]))
        place = k + (depth - 1) * k * k + best
        seen = tree_mask.gather(1, parent[:, :, None].expand(-1, -1, tree_mask.shape[-1]))
        tree_mask = torch.cat(
            (seen, torch.eye(k, dtype=torch.bool, device=device).expand(b, k, k)), -1
        )
    kept = (
        _largest(torch.cat(values, 1), tree.total).sort(-1).values
    )  # b total, parents before children
    number = torch.full(
        (b, tree.candidates + 1), -1, device=device
    )  # of each candidate in the tree; last the anchor's
    number.scatter_(1, kept, torch.arange(tree.total, device=device).expand(b, -1))
    above_kept = torch.cat(parents, 1).gather(1, kept)  # b total, -1 = anchor
    reading = torch.full(
        (b, tree.candidates), -1, device=device
    )  # number of each candidate among those read
    if read:
        reading.scatter_(
            1, torch.cat(read, 1), torch.arange(len(read) * k, device=device).expand(b, -1)
        )
    return Proposal(
        torch.cat(ids, 1).gather(1, kept),
        number.gather(1, torch.where(above_kept < 0, tree.candidates, above_kept)),
        Sampling.ONE_HOT,
        read=reading.gather(1, kept),
    )


def _largest(values: Tensor, k: int) -> Tensor:
    """(b k) places of the largest values, falling; the earlier, which is never the deeper, wins
    ties."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
