"""A chain that ends where the drafter is no longer sure.

Whether a k-th token is drafted is settled before it is drawn, by the largest probability of the law
it would be drawn from: a function of the prefix and of the drafts before it. The text therefore
keeps the target's law. Dropping a token that was drawn because *its* probability is low, as some
engines do, changes the law: for p = (.7, .3) and q = (.5, .5), a scheduler that keeps the first
token only when it was the first emits (.85, .15).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.errors import InputError
from drafttrain.flow import Proposal, Sampling
from drafttrain.nn.processing import Text
from drafttrain.nn.sampling import Policy, draw
from drafttrain.tree.laws import draft_logits
from drafttrain.tree.speaker import Speaker
from drafttrain.tree.topology import Growth, Tree


@dataclass(frozen=True, kw_only=True)
class Confident(Growth):
    """At most k drafts one behind the other, ended before the first whose law is unsure."""

    k: int
    stop_below: float
    """Least probability that the likeliest next token must have, at temperature 1, for the draft to
    go on."""

    def __post_init__(self) -> None:
        if type(self.k) is not int or self.k < 1:
            raise InputError(
                f"tree.k is {self.k!r}, a chain that ends by confidence needs a whole number of at "
                f"least 1"
            )
        if type(self.stop_below) not in (int, float) or not 0 < self.stop_below < 1:
            raise InputError(
                f"tree.stop_below is {self.stop_below!r}, needs a probability above 0 and below 1; "
                f"0 is a chain of fixed length"
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
    speaker: Speaker,
    state: Any,
    hidden: Tensor,
    logits: Tensor,
    tree: Confident,
    policy: Policy,
    u: Tensor | None,
    text: Text | None = None,
) -> Proposal:
    """Draft until no row is sure enough, by its own logits. Arguments as in `grow`.

    Returns: as many nodes as the longest row has, with `counts`.
    """
    b, device = len(hidden), hidden.device
    going = goes_on(logits, tree.stop_below)
    counts = torch.zeros(b, dtype=torch.int64, device=device)
    tokens: list[Tensor] = []
    laws: list[Tensor] = []
    while bool(going.any()):
        counts += going
        if text is not None:
            before = torch.stack(tokens, 1) if tokens else counts.new_empty(b, 0)
            logits = draft_logits(speaker, logits[:, None], policy, text, before[:, None])[
                :, 0
            ]  # b v
        if u is None:
            chosen = logits.argmax(-1)
        else:
            law = policy.probs(logits)
            chosen = draw(law, u[:, len(tokens)])
            laws.append(law if text is not None else speaker.to_target_probs(law))
        tokens.append(chosen if text is not None else speaker.to_target_ids(chosen))
        depth = len(tokens)
        if depth == tree.k:
            break
        tree_mask = torch.ones(1, 1, depth, dtype=torch.bool, device=device)
        out, more = speaker.expand(state, tokens[-1][:, None], hidden[:, None], depth, tree_mask)
        hidden, logits = out[:, 0], more[:, 0]
        going = going & goes_on(logits, tree.stop_below)
    n = len(tokens)
    nodes = torch.arange(n, device=device).expand(b, n)
    drafted = torch.stack(tokens, 1) if tokens else counts.new_empty(b, 0)
    read = torch.where(nodes < tree.k - 1, nodes, -1)  # the last of a whole chain is not read
    if u is None or not laws:
        return Proposal(
            drafted,
            nodes - 1,
            Sampling.ONE_HOT if u is None else Sampling.IID,
            counts=counts,
            read=read,
        )
    return Proposal(
        drafted, nodes - 1, Sampling.IID, torch.stack(laws, 1), nodes, counts, read=read
    )
