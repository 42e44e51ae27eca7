"""What one round keeps, given the tokens that the text goes on with; see `simulated`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from drafttrain.decoding.plan import Plan
from drafttrain.decoding.rules.given import masses, share_after
from drafttrain.drafter.base import Committed, Drafter
from drafttrain.drafter.growing import Growing
from drafttrain.errors import NotFinite
from drafttrain.flow import Proposal
from drafttrain.nn.finite import usable as can_choose
from drafttrain.tree.confident import Confident, goes_on
from drafttrain.tree.topology import Tree, depths_of

TargetAt = Callable[[int], Tensor]
"""k -> (b v) the target's distribution k places after the anchor, which judges the draft k + 1."""


@dataclass(frozen=True)
class Chances:
    """Of one round of every row, float64."""

    reached: Tensor
    """(b k+1) that at least 0, 1, .. drafts are kept and are the text's tokens, given the text."""
    offered: Tensor
    """(b k) that a draft at this place is judged."""
    kept: Tensor
    """(b k) that one is kept, whatever the text goes on with there."""

    @classmethod
    def none(cls, b: int, depth: int, device: torch.device) -> Chances:
        """Nothing judged yet."""
        reached = torch.zeros(b, depth + 1, dtype=torch.float64, device=device)
        reached[:, 0] = 1
        return cls(reached, torch.zeros_like(reached[:, 1:]), torch.zeros_like(reached[:, 1:]))


class Draws:
    """Drafts drawn from the drafter's distributions, of which it is asked for those after the
    text's own tokens: along the text all nodes of one depth have the same."""

    def __init__(self, drafter: Drafter, plan: Plan) -> None:
        self.drafter, self.plan, self.rule = cast("Growing", drafter), plan, plan.rule_name
        tree = plan.tree
        self.stop_below = tree.stop_below if isinstance(tree, Confident) else 0.0
        self.tree = tree if isinstance(tree, Tree) else Tree.chain(tree.max_depth)
        self.levels = [_by_children(self.tree, depth) for depth in range(tree.max_depth)]
        self.numbers = sum(count - 1 for level in self.levels for count in level)
        """Uniform numbers of a round."""

    def chances(
        self,
        state: Any,
        committed: Committed,
        tokens: Tensor,
        target_at: TargetAt,
        usable: Tensor,
        u: Tensor,
    ) -> Chances:
        """Let the drafter read what became true, and judge its distributions.

        Args:
            tokens: (b k) the text's next ones.
            usable: (b k) bool, the places at which a draft counts.
            u: (b numbers) uniform numbers.
        Raises: NotFinite for scores of which none can be chosen.
        """
        b, depth = tokens.shape
        found = Chances.none(b, depth, tokens.device)
        nodes = found.reached.new_zeros(b, self.tree.size + 1)  # the anchor first
        nodes[:, 0] = 1
        share = found.reached[:, 0].clone()
        going = torch.ones_like(usable[:, 0])
        hidden, candidates = self.drafter.extend(state, committed, depth)
        with self.drafter.scratch(state):
            for k in range(depth):
                if not bool(can_choose(candidates.logits).all()):
                    raise NotFinite("no token can be chosen from these candidates")
                going &= usable[:, k]
                if self.stop_below:
                    going &= goes_on(candidates.logits[:, 0], self.stop_below)
                p, token = target_at(k).double(), tokens[:, k]
                q = candidates.spread(self.plan.policy.probs(candidates.logits))[:, 0].double()
                u = self._judge(k, nodes, going, found, (p, q / share[:, None], token), u)
                if k == depth - 1 or not bool((found.reached[:, k + 1] > 0).any()):
                    break
                if self.rule == "block":
                    at = token[:, None]
                    share = share_after(share, p.gather(1, at)[:, 0], q.gather(1, at)[:, 0])
                mask = torch.ones(1, 1, k + 1, dtype=torch.bool, device=tokens.device)
                hidden, candidates = self.drafter.expand(state, token[:, None], hidden, k + 1, mask)
        return found

    def _judge(
        self,
        k: int,
        nodes: Tensor,
        going: Tensor,
        found: Chances,
        here: tuple[Tensor, Tensor, Tensor],
        u: Tensor,
    ) -> Tensor:
        """Judge the children of all nodes of depth k, whose chances are in `nodes`, where rows are
        `going` on; the numbers that are left."""
        p, q, token = here
        wanted = p.gather(1, token[:, None])  # b 1
        for count, (parents, children) in self.levels[k].items():
            numbers, u = u[:, : count - 1], u[:, count - 1 :]
            of_token, total = masses(self.rule, p, q, token, count, self.plan.sampling, numbers)
            given = torch.where(wanted > 0, of_token / wanted, 0)  # b count
            above = nodes[:, parents] * going[:, None]  # b m
            nodes[:, children] = (above[:, :, None] * given[:, None]).flatten(1)
            found.offered[:, k] += above.sum(1)
            found.kept[:, k] += above.sum(1) * total
            found.reached[:, k + 1] += nodes[:, children].sum(1)
        return u


def _by_children(tree: Tree, depth: int) -> dict[int, tuple[list[int], list[int]]]:
    """{number of children: (nodes of this depth that have it, all their children in order)}, each
    node by its row, the anchor's 0."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    level = [-1] if depth == 0 else [n for n in range(tree.size) if tree.depths[n] == depth]
    for node in level:
        own = tree.children(node)
        if own:
            parents, children = found.setdefault(len(own), ([], []))
            parents.append(node + 1)
            children += [child + 1 for child in own]
    return found


class Follows:
    """Drafts that do not depend on the text's next tokens: the drafter makes them as in decoding,
    and those that the text has are kept."""

    def __init__(self, drafter: Drafter, plan: Plan) -> None:
        self.drafter, self.plan = drafter, plan
        self.all_repeats = plan.rule_name == "sample_and_match"
        self.numbers = plan.tree.size if plan.draws else 0
        """Uniform numbers of a round."""

    def chances(
        self,
        state: Any,
        committed: Committed,
        tokens: Tensor,
        target_at: TargetAt,
        usable: Tensor,
        u: Tensor,
    ) -> Chances:
        """As `Draws.chances`."""
        plan, (b, depth) = self.plan, tokens.shape
        found = Chances.none(b, depth, tokens.device)
        numbers = u if plan.draws else None
        one = self.drafter.propose(state, committed, plan.tree, plan.policy, numbers, plan.sampling)
        if not one.size:
            return found
        depths = depths_of(one.parents, depth)
        reached = torch.zeros(b, one.size + 1, dtype=torch.bool, device=tokens.device)
        reached[:, 0] = True  # the anchor
        for k in range(depth):
            above = reached.any(1) & usable[:, k]
            child = reached.gather(1, one.parents + 1) & _real(one) & (depths == k + 1)  # b n
            p = target_at(k)
            drafted = torch.zeros_like(p).scatter_reduce_(1, one.tokens, child.to(p), "amax")
            rate = (p * drafted).double().sum(1)
            # Where siblings repeat a token, decoding ends at the first of them, which may have no
            # children where another has.
            first = reached.int().argmax(1, keepdim=True) - 1
            judged = (child & (one.parents == first)).any(1)
            found.offered[:, k] = above * torch.where(judged, 1.0, rate)
            found.kept[:, k] = above * rate
            match = child & (one.tokens == tokens[:, k : k + 1]) & above[:, None]
            if not self.all_repeats:
                match &= match.cumsum(1) == 1
            reached = torch.nn.functional.pad(match, (1, 0))
            found.reached[:, k + 1] = match.any(1)
        return found


def _real(one: Proposal) -> Tensor:
    """(b n) bool, the nodes that are no padding."""
    if one.counts is None:
        return torch.ones_like(one.tokens, dtype=torch.bool)
    return torch.arange(one.size, device=one.tokens.device) < one.counts[:, None]
