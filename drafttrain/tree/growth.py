"""How a tree is filled by an autoregressive drafter, level by level: one pass of the drafter a
level, all rows together.

In a tree of fixed shape, which children exist and which is checked first is fixed before any token
is drawn: a condition for exact sampling (SpecInfer, Miao et al. 2023, arXiv:2305.09781, section
4.3). How growths of changing shape keep to it stands in their files.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from drafttrain.errors import InputError
from drafttrain.flow import Proposal, Sampling
from drafttrain.nn.processing import Text
from drafttrain.nn.sampling import Policy, draw, draw_without_replacement
from drafttrain.tree.confident import Confident, grow_confident
from drafttrain.tree.dynamic import Dynamic, grow_dynamic
from drafttrain.tree.laws import draft_logits
from drafttrain.tree.speaker import Speaker
from drafttrain.tree.topology import Growth, Tree


@dataclass(frozen=True)
class _Level:
    nodes: tuple[int, ...]
    asked: tuple[int, ...]
    """Places in the frontier of the parents that have children here."""
    ways: Tensor
    """(asked depth-1) nodes on the way to each of them, itself last."""
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


def _way(tree: Tree, node: int) -> list[int]:
    return [] if node < 0 else [*_way(tree, tree.parents[node]), node]


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
                ways=torch.tensor([_way(tree, parent) for parent in parents], dtype=torch.int64),
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
    speaker: Speaker,
    state: Any,
    hidden: Tensor,
    logits: Tensor,
    tree: Growth,
    policy: Policy,
    u: Tensor | None,
    sampling: Sampling = Sampling.WOR,
    text: Text | None = None,
) -> Proposal:
    """Grow a tree of any kind.

    Args:
        hidden: (b d) the drafter's output at the anchor; logits: (b w) of the anchor's children.
        policy: makes q from the draft's logits when tokens are drawn.
        u: (b n) in [0, 1), one number per node: children are drawn. None: children are the top-k, a
            deterministic function of the prefix.
        law: how siblings are drawn: Law.WOR without replacement, Law.IID independently, repeats
            kept. A chain has none.
        text: what a policy that processes logits reads, on the draft's as on the target's. Without
            it, and in a dynamic tree, drafts are made from the drafter's own logits; the text keeps
            its law, fewer are accepted.
    Raises: InputError if tokens are to be drawn where the growth looks at their values.
    """
    if isinstance(tree, Tree):
        return _fill(
            speaker,
            state,
            hidden,
            logits,
            tree,
            policy,
            u,
            sampling,
            text if policy.processes else None,
        )
    if isinstance(tree, Confident):
        return grow_confident(
            speaker, state, hidden, logits, tree, policy, u, text if policy.processes else None
        )
    if not isinstance(tree, Dynamic):
        raise TypeError(f"no way to grow a {type(tree).__name__} is known")
    if u is not None:
        raise InputError(
            "a dynamic tree takes the likeliest tokens and draws none: leave sampled at auto, or "
            "use another tree"
        )
    return grow_dynamic(speaker, state, hidden, logits, tree)


def _as_it_is(value: Tensor) -> Tensor:
    return value


def _fill(
    speaker: Speaker,
    state: Any,
    hidden: Tensor,
    logits: Tensor,
    tree: Tree,
    policy: Policy,
    u: Tensor | None,
    sampling: Sampling,
    text: Text | None,
) -> Proposal:
    b, device = hidden.shape[0], hidden.device
    tokens = torch.empty(b, tree.size, dtype=torch.int64, device=device)
    laws: list[Tensor] = []
    q_rows = torch.empty(tree.size, dtype=torch.int64)
    hidden, logits = hidden[:, None], logits[:, None]  # b p ..
    levels = _plan(tree)
    # Processed logits are over the target's vocabulary, so that ids and laws made of them need no
    # translation.
    to_ids = speaker.to_target_ids if text is None else _as_it_is
    to_law = speaker.to_target_probs if text is None else _as_it_is
    for depth, level in enumerate(levels, start=1):
        asked = logits[:, list(level.asked)]  # b p w
        if text is not None:
            asked = draft_logits(
                speaker, asked, policy, text, tokens[:, level.ways.to(device)]
            )  # b p v
        if u is None:
            best = (
                asked.topk(level.most, dim=-1).indices
                if level.most > 1
                else asked.argmax(-1, keepdim=True)
            )
            chosen = to_ids(best)  # b p most
        else:
            probs = policy.probs(asked)
            flat = probs.flatten(0, 1)
            numbers = u[:, level.numbers.to(device)].flatten(0, 1)  # (b p) most
            q_rows[list(level.nodes)] = level.pick[0] + sum(q.shape[1] for q in laws)
            laws.append(to_law(probs))
            if level.most == 1 or sampling is Sampling.IID:
                drawn = to_ids(
                    torch.stack([draw(flat, number) for number in numbers.unbind(-1)], -1)
                )
            elif bool(((flat > 0).sum(-1) < level.most).any()):
                # Once a law is used up, the next child is uniform over all tokens not tried, as the
                # rule counts them: the target's, of which the draft vocabulary may be a part.
                drawn = draw_without_replacement(laws[-1].flatten(0, 1), numbers)
            else:
                drawn = to_ids(draw_without_replacement(flat, numbers))
            chosen = drawn.reshape(b, -1, level.most)
        parent, rank = (index.to(device) for index in level.pick)
        tokens[:, list(level.nodes)] = chosen[:, parent, rank]
        if level.grown:
            hidden, logits = speaker.expand(
                state,
                tokens[:, list(level.grown)],
                hidden[:, level.grown_parent.to(device)],
                depth,
                level.tree_mask.to(device),
            )
    parents = torch.tensor(tree.parents, dtype=torch.int64, device=device).expand(b, -1)
    read = _reading(tree).to(device).expand(b, -1)
    if u is None:
        return Proposal(tokens, parents, Sampling.ONE_HOT, read=read)
    drawn_by = Sampling.IID if tree.is_chain else sampling
    return Proposal(
        tokens, parents, drawn_by, torch.cat(laws, 1), q_rows.to(device).expand(b, -1), read=read
    )
