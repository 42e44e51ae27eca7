"""How a tree is filled by an autoregressive drafter, level by level: one pass of the drafter a
level, all rows together.

In a tree of fixed shape, which children exist and which is checked first is fixed before any token
is drawn: a condition for exact sampling (SpecInfer, Miao et al. 2023, arXiv:2305.09781, section
4.3). How growths of changing shape keep to it is in their files.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from drafttrain.errors import InputError, NotFinite
from drafttrain.flow import Proposal, Sampling
from drafttrain.nn.finite import usable
from drafttrain.nn.processing import Text
from drafttrain.nn.sampling import Policy, draw, draw_without_replacement
from drafttrain.tree.candidates import Candidates, Expands
from drafttrain.tree.confident import Confident, grow_confident
from drafttrain.tree.dynamic import Dynamic, grow_dynamic
from drafttrain.tree.topology import Growth, Tree


@dataclass(frozen=True)
class _Level:
    nodes: tuple[int, ...]
    asked: tuple[int, ...]
    """Places in the frontier of the parents that have children here."""
    paths: Tensor
    """(asked depth-1) nodes on the path to each of them, itself last."""
    most: int
    """Most children of any of them."""
    pick: tuple[Tensor, Tensor]
    """For each node, the place of its parent among `asked` and its own rank."""
    numbers: Tensor
    """(asked most) node whose uniform number serves each draw; draws that fill no node reuse the
    first."""
    grown: tuple[int, ...]
    """Nodes of this level that have children."""
    grown_parent: Tensor
    """Their parents' places in the frontier."""
    tree_mask: Tensor
    """(1 m t) bool."""


def _path(tree: Tree, node: int) -> list[int]:
    return [] if node < 0 else [*_path(tree, tree.parents[node]), node]


@lru_cache(maxsize=256)
def _plan(tree: Tree) -> tuple[_Level, ...]:
    mask = tree.ancestor_mask()
    inner = set(tree.parents)
    frontier: list[int] = [-1]
    read: list[int] = []
    plan = []
    for nodes in tree.levels():
        parents = sorted({tree.parents[node] for node in nodes}, key=frontier.index)
        most = max(len(tree.children(parent)) for parent in parents)
        grown = tuple(node for node in nodes if node in inner)
        place = {parent: i for i, parent in enumerate(parents)}
        numbers = [
            [(c := tree.children(parent))[min(k, len(c) - 1)] for k in range(most)]
            for parent in parents
        ]
        read += grown
        rows, columns = (
            torch.tensor(grown, dtype=torch.int64) + 1,
            torch.tensor(read, dtype=torch.int64) + 1,
        )
        plan.append(
            _Level(
                nodes=nodes,
                asked=tuple(frontier.index(parent) for parent in parents),
                paths=torch.tensor([_path(tree, parent) for parent in parents], dtype=torch.int64),
                most=most,
                pick=(
                    torch.tensor([place[tree.parents[node]] for node in nodes]),
                    torch.tensor([tree.ranks[node] for node in nodes]),
                ),
                numbers=torch.tensor(numbers),
                grown=grown,
                grown_parent=torch.tensor(
                    [frontier.index(tree.parents[node]) for node in grown], dtype=torch.int64
                ),
                tree_mask=mask[rows][:, columns][None],
            )
        )
        frontier = list(grown)
    return tuple(plan)


@lru_cache(maxsize=256)
def _reading(tree: Tree) -> Tensor:
    """(n) number of each node among those that are read, -1 for one without children."""
    numbers = torch.full((tree.size,), -1)
    for number, node in enumerate(node for level in _plan(tree) for node in level.grown):
        numbers[node] = number
    return numbers


def grow(
    drafter: Expands,
    state: Any,
    hidden: Tensor,
    candidates: Candidates,
    tree: Growth,
    policy: Policy,
    u: Tensor | None,
    sampling: Sampling = Sampling.WOR,
    text: Text | None = None,
) -> Proposal:
    """Grow a tree of any kind.

    Args:
        hidden: (b 1 e) the drafter's output at the anchor.
        candidates: for the anchor's children, of one node.
        policy: makes q from the draft's logits when tokens are drawn.
        u: (b n) in [0, 1), one number per node: children are drawn. None: children are the top-k, a
            deterministic function of the prefix.
        sampling: how siblings are drawn: Sampling.WOR without replacement, Sampling.IID
            independently, repeats kept. A chain has no siblings.
        text: what a policy that processes logits reads, of the draft as of the target. Without it,
            and in a dynamic tree, drafts are made from the drafter's own logits; the text keeps its
            distribution, fewer drafts are accepted.
    Raises: InputError if tokens are to be drawn where the growth looks at their values; NotFinite
        for candidates of which none can be chosen.
    """
    text = text if policy.processes else None
    watched = _Watched(drafter, candidates)
    proposal = _grown(watched, state, hidden, candidates, tree, policy, u, sampling, text)
    watched.check()
    return proposal


class _Watched:
    """A drafter whose scores are looked at. The answer is asked for once a round: an accelerator
    would be waited for."""

    def __init__(self, drafter: Expands, candidates: Candidates) -> None:
        self.drafter = drafter
        self._usable = usable(candidates.logits).all()

    def expand(
        self, state: Any, tokens: Tensor, hidden: Tensor, depth: int, tree_mask: Tensor
    ) -> tuple[Tensor, Candidates]:
        out, candidates = self.drafter.expand(state, tokens, hidden, depth, tree_mask)
        self._usable &= usable(candidates.logits).all()
        return out, candidates

    def check(self) -> None:
        """Raise NotFinite if any of them are no numbers."""
        if not bool(self._usable):
            raise NotFinite("no token can be chosen from these candidates")


def _grown(
    drafter: Expands,
    state: Any,
    hidden: Tensor,
    candidates: Candidates,
    tree: Growth,
    policy: Policy,
    u: Tensor | None,
    sampling: Sampling,
    text: Text | None,
) -> Proposal:
    if isinstance(tree, Tree):
        return _fill(drafter, state, hidden, candidates, tree, policy, u, sampling, text)
    if isinstance(tree, Confident):
        return grow_confident(drafter, state, hidden, candidates, tree, policy, u, text)
    if not isinstance(tree, Dynamic):
        raise TypeError(f"no way to grow a {type(tree).__name__} is known")
    if u is not None:
        raise InputError(
            "a dynamic tree takes the most likely tokens and draws none: leave sampled at auto, "
            "or use another tree"
        )
    return grow_dynamic(drafter, state, hidden, candidates, tree)


def _fill(
    drafter: Expands,
    state: Any,
    hidden: Tensor,
    candidates: Candidates,
    tree: Tree,
    policy: Policy,
    u: Tensor | None,
    sampling: Sampling,
    text: Text | None,
) -> Proposal:
    b, device = hidden.shape[0], hidden.device
    tokens = torch.empty(b, tree.size, dtype=torch.int64, device=device)
    q: list[Tensor] = []
    q_rows = torch.empty(tree.size, dtype=torch.int64)
    for depth, level in enumerate(_plan(tree), start=1):
        asked = candidates.at(level.asked)  # of p nodes
        if text is not None:
            asked = asked.processed(policy, text, tokens[:, level.paths.to(device)])
        if u is None:
            chosen = _most_likely(asked, level.most)  # b p most
        else:
            q_rows[list(level.nodes)] = level.pick[0] + sum(one.shape[1] for one in q)
            probs = policy.probs(asked.logits)
            q.append(asked.spread(probs))
            independent = level.most == 1 or sampling is Sampling.IID
            chosen = _drawn(asked, probs, q[-1], u[:, level.numbers.to(device)], independent)
        parent, rank = (index.to(device) for index in level.pick)
        tokens[:, list(level.nodes)] = chosen[:, parent, rank]
        if level.grown:
            above = hidden[:, level.grown_parent.to(device)]
            read = tokens[:, list(level.grown)]
            mask = level.tree_mask.to(device)
            hidden, candidates = drafter.expand(state, read, above, depth, mask)
    parents = torch.tensor(tree.parents, dtype=torch.int64, device=device).expand(b, -1)
    order = _reading(tree).to(device).expand(b, -1)
    if u is None:
        return Proposal(tokens, parents, Sampling.ONE_HOT, read=order)
    drawn_by = Sampling.IID if tree.is_chain else sampling
    rows = q_rows.to(device).expand(b, -1)
    return Proposal(tokens, parents, drawn_by, torch.cat(q, 1), rows, read=order)


def _most_likely(asked: Candidates, most: int) -> Tensor:
    """(b p most) ids of the most likely candidates of p nodes, the most likely first."""
    if most > 1:
        return asked.to_ids(asked.logits.topk(most, dim=-1).indices)
    return asked.to_ids(asked.logits.argmax(-1, keepdim=True))


def _drawn(
    asked: Candidates, probs: Tensor, wide: Tensor, numbers: Tensor, independent: bool
) -> Tensor:
    """(b p most) ids drawn for p nodes.

    Args:
        probs: (b p w) over the candidates; wide: (b p v) the same over the target's vocabulary.
        numbers: (b p most) uniform numbers.
    """
    shape, flat = numbers.shape, probs.flatten(0, 1)
    numbers = numbers.flatten(0, 1)  # (b p) most
    if independent:
        places = torch.stack([draw(flat, number) for number in numbers.unbind(-1)], -1)
    elif bool(((flat > 0).sum(-1) < shape[-1]).any()):
        # Once a distribution is used up, the next child is uniform over all tokens not tried, as
        # the rule counts them: the target's, of which the candidates may be a part.
        return draw_without_replacement(wide.flatten(0, 1), numbers).reshape(shape)
    else:
        places = draw_without_replacement(flat, numbers)
    return asked.to_ids(places.reshape(shape))
