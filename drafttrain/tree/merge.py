"""Trees of several drafters as one (Miao et al. 2023, SpecInfer, arXiv:2305.09781, Definition 3.2).

Two nodes are the same where their *paths* are, token by token from the anchor. A path that was
proposed twice is read by the target as one, but judged as often as it was proposed, each time by
the distribution that it was drawn from: joining equal tokens into one proposal would change the
distribution of the text. So every proposal stays a node, with its own distribution; of those with
the same path the first has all the children, and the others lead on to them
(`Proposal.merged_into`).

Siblings are judged by drafter, then in each drafter's own order. Neither looks at a drawn token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.errors import InputError
from drafttrain.flow import Proposal, Sampling
from drafttrain.nn.sampling import untried
from drafttrain.tree.topology import children_of


@dataclass(frozen=True)
class Merged:
    """Several proposals for the same rows, as one."""

    proposal: Proposal
    """All their nodes. Of Sampling.ONE_HOT if all of them are; else IID, with the distribution of
    each node in its own row of q: that of a draw without replacement leaves out what its own
    drafter drew before, that of a deterministic token is a point mass."""
    drafter: Tensor
    """(b n) int64: which of the proposals a node comes from, -1 for padding."""
    node: Tensor
    """(b n) int64: its number there, -1 for padding."""

    def origins(self, row: int) -> dict[tuple[int, ...], list[tuple[int, int]]]:
        """{path of token ids: every (drafter, node) that proposed it} of one row, in the order of
        judging."""
        parents, tokens = self.proposal.parents[row].tolist(), self.proposal.tokens[row].tolist()
        paths: list[tuple[int, ...]] = []
        found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for place, (drafter, node) in enumerate(
            zip(self.drafter[row].tolist(), self.node[row].tolist(), strict=True)
        ):
            parent = parents[place]
            paths.append((*(paths[parent] if parent >= 0 else ()), tokens[place]))
            if drafter >= 0:
                found.setdefault(paths[place], []).append((drafter, node))
        return found


def merge(proposals: Sequence[Proposal], vocab_size: int | None = None) -> Merged:
    """Merge by path.

    Args:
        proposals: of the same rows, full trees of any sampling but UNKNOWN; rows may differ in
            shape and in size.
        vocab_size: where given, the result is IID also if every proposal is ONE_HOT, with point
            masses over that many tokens: which rule judges it does not depend then on what happened
            to be proposed.
    Raises: InputError if there are none, one is of unknown sampling, or is itself merged.
    """
    if not proposals:
        raise InputError("nothing to merge: give the proposals of at least one drafter")
    for number, one in enumerate(proposals):
        if one.sampling is Sampling.UNKNOWN or one.merged_into is not None:
            reason = (
                "is merged already"
                if one.merged_into is not None
                else "does not say how its tokens were drawn"
            )
            raise InputError(
                f"proposal {number} {reason}: merge trees of known sampling, all in one call"
            )
    b, device = proposals[0].tokens.shape[0], proposals[0].tokens.device
    sizes = [one.size for one in proposals]
    offsets = [sum(sizes[:number]) for number in range(len(sizes))]
    tokens = torch.cat([one.tokens for one in proposals], 1)  # b n
    parents = torch.cat(
        [
            torch.where(one.parents < 0, -1, one.parents + offset)
            for one, offset in zip(proposals, offsets, strict=True)
        ],
        1,
    )
    node = torch.cat([torch.arange(size, device=device) for size in sizes]).expand(b, -1)
    drafter = torch.cat(
        [torch.full((size,), number, device=device) for number, size in enumerate(sizes)]
    ).expand(b, -1)
    real = torch.cat([_real(one) for one in proposals], 1)
    merged_into = _first_of_path(tokens, parents, real)
    parents = torch.where(parents < 0, -1, merged_into.gather(1, parents.clamp(min=0)))
    sampling, q, q_rows = _distributions(proposals, tokens, vocab_size)
    if any(one.counts is not None for one in proposals):
        # Padding goes after the real nodes of all drafters; their order stays.
        order = (~real).long().argsort(dim=1, stable=True)
        place = order.argsort(1)
        tokens, drafter, node, real, parents, merged_into = (
            value.gather(1, order) for value in (tokens, drafter, node, real, parents, merged_into)
        )
        merged_into = place.gather(1, merged_into)
        parents = torch.where((parents < 0) | ~real, -1, place.gather(1, parents.clamp(min=0)))
        drafter, node = torch.where(real, drafter, -1), torch.where(real, node, -1)
        q_rows = None if q_rows is None else q_rows.gather(1, order)
        counts = real.sum(1)
    else:
        counts = None
    return Merged(
        Proposal(tokens, parents, sampling, q, q_rows, counts, merged_into), drafter, node
    )


def without_repeats(one: Proposal) -> Proposal:
    """A merged ONE_HOT proposal with every path once, so that the target reads it once.

    A second proposal of a path changes nothing here: where its token was refused, the
    target's distribution has none of it left. Of a token that was drawn this does not hold.
    """
    assert one.sampling is Sampling.ONE_HOT and one.merged_into is not None
    kept = _real(one) & (one.merged_into == torch.arange(one.size, device=one.tokens.device))
    counts = kept.sum(1)
    n = int(counts.max())
    order = (
        (~kept).long().argsort(dim=1, stable=True)
    )  # of the nodes that stay, in their order, the others after them
    place = order.argsort(1)
    tokens, parents = (value.gather(1, order)[:, :n] for value in (one.tokens, one.parents))
    there = torch.arange(n, device=tokens.device) < counts[:, None]
    parents = torch.where((parents < 0) | ~there, -1, place.gather(1, parents.clamp(min=0)))
    return Proposal(tokens, parents, Sampling.ONE_HOT, counts=counts)


def _real(one: Proposal) -> Tensor:
    """(b n) bool."""
    if one.counts is None:
        return torch.ones_like(one.tokens, dtype=torch.bool)
    return torch.arange(one.size, device=one.tokens.device) < one.counts[:, None]


def _first_of_path(tokens: Tensor, parents: Tensor, real: Tensor) -> Tensor:
    """(b n): the first node with the same path; padding is its own."""
    b, n = tokens.shape
    first = torch.arange(n, device=tokens.device).expand(b, n)
    alike = (tokens[:, :, None] == tokens[:, None, :]) & real[:, :, None] & real[:, None, :]
    alike |= torch.eye(n, dtype=torch.bool, device=tokens.device)
    while True:
        # A node is known once its parent is, so each pass settles one level more.
        above = torch.where(parents < 0, -1, first.gather(1, parents.clamp(min=0)))
        found = (alike & (above[:, :, None] == above[:, None, :])).int().argmax(2)
        if torch.equal(found, first):
            return first
        first = found


def _distributions(
    proposals: Sequence[Proposal], tokens: Tensor, vocab_size: int | None
) -> tuple[Sampling, Tensor | None, Tensor | None]:
    """The sampling of the merged proposal, and each node's own distribution as a row of q."""
    if vocab_size is None and all(
        one.sampling is Sampling.ONE_HOT or not one.size for one in proposals
    ):
        return Sampling.ONE_HOT, None, None
    v = max((one.q.shape[-1] for one in proposals if one.q is not None), default=vocab_size or 0)
    q_of, rows = [], []
    offset = 0
    for one in proposals:
        if not one.size:
            continue
        if one.sampling is Sampling.ONE_HOT:
            q = torch.nn.functional.one_hot(one.tokens, v).float()
            q_rows = torch.arange(one.size, device=tokens.device).expand_as(one.tokens)
        elif one.q is None or one.q_rows is None:
            raise InputError(
                f"a proposal of sampling {one.sampling.value} came without q: its tokens cannot be "
                "judged"
            )
        else:
            q, q_rows = one.q, one.q_rows
            if one.sampling is Sampling.WOR:
                q, q_rows = _one_by_one(one, q, q_rows)
        q_of.append(q)
        rows.append(q_rows + offset)
        offset += q.shape[1]
    return Sampling.IID, torch.cat(q_of, 1), torch.cat(rows, 1)


def _one_by_one(one: Proposal, q: Tensor, q_rows: Tensor) -> tuple[Tensor, Tensor]:
    """A row of q for every node: the distribution of its draw once its earlier siblings were
    out."""
    n, v = one.size, q.shape[-1]
    table = children_of(one.parents)  # b n+1 k
    q_of = q.gather(1, q_rows[:, :, None].expand(-1, -1, v))  # b n v
    for rank in range(1, table.shape[-1]):
        row, parent = (table[:, :, rank] >= 0).nonzero(as_tuple=True)
        siblings = table[row, parent]  # nodes k
        drawn = siblings[:, rank]
        q_of[row, drawn] = untried(
            q_of[row, drawn], one.tokens[row[:, None], siblings[:, :rank]]
        ).to(q_of.dtype)
    return q_of, torch.arange(n, device=q.device).expand(len(q), n)
