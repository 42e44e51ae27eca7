"""A chain that ends where the drafter is no longer sure.

Whether a k-th token is drafted is settled before it is drawn, by the largest probability of the
distribution it would be drawn from: a function of the prefix and of the drafts before it. The text
therefore keeps the target's distribution. Dropping a token that was drawn because *its* probability
is low, as some engines do, changes the distribution: for p = (.7, .3) and q = (.5, .5), a scheduler
that keeps the first token only when it was the first emits (.85, .15)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from drafttrain.errors import InputError
from drafttrain.flow import Proposal, Sampling
from drafttrain.later import torch
from drafttrain.nn.processing import Text
from drafttrain.nn.sampling import Policy, draw
from drafttrain.tree.candidates import Candidates, Expands
from drafttrain.tree.topology import Growth, Tree

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Confident(Growth):
    """At most k drafts in a row, ended before the first that is unsure."""

    k: int
    stop_below: float
    """Least probability that the most likely next token must have, at temperature 1, for the draft
    to go on."""

    def __post_init__(self) -> None:
        if type(self.k) is not int or self.k < 1:
            raise InputError(
                f"tree.k is {self.k!r}, a chain that ends by confidence needs an integer of at "
                "least 1"
            )
        if type(self.stop_below) not in (int, float) or not 0 < self.stop_below < 1:
            raise InputError(
                f"tree.stop_below is {self.stop_below!r}, needs a probability above 0 and below 1; "
                "0 is a chain of fixed length"
            )

    @property
    def size(self) -> int:
        return self.k

    @property
    def max_depth(self) -> int:
        return self.k

    @property
    def max_children(self) -> int:
        return 1

    @property
    def kind(self) -> str:
        return "chain"

    @property
    def title(self) -> str:
        return f"chain {self.k} above {self.stop_below:g}"

    def capped(self, depth: int) -> Growth:
        return replace(self, k=min(self.k, depth)) if depth > 0 else Tree(()).capped(depth)

    def within(self, depth: int) -> Growth:
        return self.capped(depth)

    def spec(self) -> dict[str, Any]:
        return {"growth": "chain", "k": self.k, "stop_below": self.stop_below}


def chain(k: int, stop_below: float = 0.0) -> Growth:
    """A chain as settings name it: of k drafts, or of at most k where a threshold is given."""
    if (type(stop_below) in (int, float) and stop_below == 0) or (type(k) is int and k == 0):
        return Tree.chain(k)
    return Confident(k=k, stop_below=stop_below)


def goes_on(logits: Tensor, stop_below: float) -> Tensor:
    """(b w) logits of the next draft -> (b) bool: is the drafter sure enough to make it? It sees no
    drawn token."""
    return logits.float().softmax(-1).amax(-1) >= stop_below


def grow_confident(
    drafter: Expands,
    state: Any,
    hidden: Tensor,
    candidates: Candidates,
    tree: Confident,
    policy: Policy,
    u: Tensor | None,
    text: Text | None = None,
) -> Proposal:
    """Draft until no row is sure enough, by its own logits. Arguments as in `grow`.

    Returns: as many nodes as the longest row has, with `counts`.
    """
    b, device = len(hidden), hidden.device
    going = goes_on(candidates.logits[:, 0], tree.stop_below)
    counts = torch.zeros(b, dtype=torch.int64, device=device)
    tokens: list[Tensor] = []  # b 1
    q: list[Tensor] = []  # b 1 v
    while bool(going.any()):
        counts += going
        if text is not None:
            before = torch.cat(tokens, 1) if tokens else counts.new_empty(b, 0)
            candidates = candidates.processed(policy, text, before[:, None])
        if u is None:
            place = candidates.logits.argmax(-1)  # b 1
        else:
            probs = policy.probs(candidates.logits[:, 0])
            place = draw(probs, u[:, len(tokens)])[:, None]
            q.append(candidates.spread(probs[:, None]))
        tokens.append(candidates.to_ids(place[:, :, None])[:, :, 0])
        depth = len(tokens)
        if depth == tree.k:
            break
        tree_mask = torch.ones(1, 1, depth, dtype=torch.bool, device=device)
        hidden, candidates = drafter.expand(state, tokens[-1], hidden, depth, tree_mask)
        going = going & goes_on(candidates.logits[:, 0], tree.stop_below)
    n = len(tokens)
    nodes = torch.arange(n, device=device).expand(b, n)
    drafted = torch.cat(tokens, 1) if tokens else counts.new_empty(b, 0)
    read = torch.where(nodes < tree.k - 1, nodes, -1)  # the last of a full chain is not read
    if u is None or not q:
        how = Sampling.ONE_HOT if u is None else Sampling.IID
        return Proposal(drafted, nodes - 1, how, counts=counts, read=read)
    return Proposal(drafted, nodes - 1, Sampling.IID, torch.cat(q, 1), nodes, counts, read=read)
