"""What rules refuse, and the residual arithmetic that several of them share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drafttrain.errors import InputError
from drafttrain.flow import Proposal, Sampling
from drafttrain.later import torch

if TYPE_CHECKING:
    from torch import Tensor

INSTEAD = {
    Sampling.IID: "multi_step, or block or ratio on a chain",
    Sampling.WOR: "multi_step",
    Sampling.ONE_HOT: "one_hot",
    Sampling.UNKNOWN: "sample_and_match",
}
"""Which exact rules serve drafts made in each way, in words."""


def minus(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """norm(max(0, p - q)), (b v), and (b) bool where nothing, or no number, is left of it."""
    return norm((p - q).clamp_(min=0))


def norm(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (b v) made to add up to 1, and (b) bool where they cannot."""
    total = weights.sum(-1, keepdim=True)
    return weights / total, ~(total > 0)[:, 0]


def deepest(depths: Tensor) -> int:
    return int(depths.max()) if depths.numel() else 0


def path_to(leaf: Tensor, count: Tensor, parents: Tensor, width: int) -> Tensor:
    """(b width) nodes from the anchor down to each row's leaf, padded with -1.

    Args:
        leaf: (b) int64; not read where count is 0.
        count: (b) int64 depth of the leaf.
    """
    path = leaf.new_full((len(leaf), width), -1)
    rows, node = torch.arange(len(leaf), device=leaf.device), leaf.clamp(min=0)
    for step in range(width - 1, -1, -1):
        here = count > step
        path[:, step] = torch.where(here, node, -1)
        node = torch.where(here, parents[rows, node], node).clamp(min=0)
    return path


def refuse_undrawable(drafted: Tensor, tokens: Tensor) -> None:
    bad = ~(drafted > 0)
    if bool(bad.any()):
        raise ValueError(
            f"token {int(tokens[bad][0])} was drafted, but the q that it should come from gives it "
            "probability 0: pass the same tensor that was drawn from, with the rows and the order "
            "of the draw"
        )


def check_tree(rule: str, proposal: Proposal) -> tuple[int, int]:
    tokens, parents = proposal.tokens, proposal.parents
    if tokens.ndim != 2 or parents.shape != tokens.shape:
        raise InputError(
            f"rule {rule} got tokens {tuple(tokens.shape)} and parents {tuple(parents.shape)}, "
            "needs both (b n)"
        )
    index = torch.arange(tokens.shape[1], device=parents.device)
    if bool(((parents < -1) | (parents >= index)).any()):
        raise InputError(
            f"rule {rule} got a node whose parent is neither -1 (anchor) nor an earlier node"
        )
    return tokens.shape[0], tokens.shape[1]


def check(
    rule: str,
    p: Tensor,
    proposal: Proposal,
    u: Tensor,
    *,
    samplings: tuple[Sampling, ...],
    chain: bool = False,
    reads_q: bool = True,
) -> tuple[int, int]:
    """Sizes (b, n) of a proposal that a rule can judge.

    Args:
        samplings: the ways of drawing that the rule is made for.
        chain: every node must be the only child of the one before.
        reads_q: the rule reads q; a point mass has none.
    Raises: InputError saying what does not fit.
    """
    b, n = check_tree(rule, proposal)
    if proposal.sampling not in samplings:
        raise InputError(
            f"rule {rule} is made for {' or '.join(one.value for one in samplings)} drafts, these "
            f"are {proposal.sampling.value}: use {INSTEAD[proposal.sampling]}"
        )
    if chain and not bool(
        (proposal.parents == torch.arange(-1, n - 1, device=proposal.parents.device)).all()
    ):
        raise InputError(
            f"rule {rule} needs a chain, each node the only child of the one before; this is a "
            "tree: use multi_step"
        )
    if p.ndim != 3 or p.shape[:2] != (b, n + 1):
        raise InputError(
            f"rule {rule} got p of shape {tuple(p.shape)}, needs {(b, n + 1)} and the vocabulary: "
            "a distribution for the anchor and for each node"
        )
    if u.shape != (b, n + 1):
        raise InputError(
            f"rule {rule} got uniforms of shape {tuple(u.shape)}, needs {(b, n + 1)}: one per node "
            "and one for the next token"
        )
    if reads_q and proposal.sampling is not Sampling.ONE_HOT and n:
        _check_q(rule, p, proposal)
    return b, n


def _check_q(rule: str, p: Tensor, proposal: Proposal) -> None:
    b, n = proposal.tokens.shape
    if proposal.q is None or proposal.q_rows is None:
        raise InputError(
            f"rule {rule} needs q and q_rows, the distributions that the tokens were drawn from; "
            "this proposal has none"
        )
    if proposal.q.ndim != 3 or proposal.q.shape[0] != b or proposal.q.shape[-1] != p.shape[-1]:
        raise InputError(
            f"rule {rule} got q of shape {tuple(proposal.q.shape)} for p of shape "
            f"{tuple(p.shape)}, needs one batch and one vocabulary: scatter a smaller draft "
            "vocabulary into the target's"
        )
    if proposal.q_rows.shape != (b, n):
        raise InputError(
            f"rule {rule} got q_rows of shape {tuple(proposal.q_rows.shape)}, needs {(b, n)}: one "
            "per node"
        )
