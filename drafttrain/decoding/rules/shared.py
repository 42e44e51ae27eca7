"""What rules refuse, and the residual arithmetic that several of them share."""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.errors import InputError
from drafttrain.flow import Proposal, Sampling

INSTEAD = {
    Sampling.IID: "multi_step, or ratio or block on a chain",
    Sampling.WOR: "multi_step",
    Sampling.ONE_HOT: "one_hot",
    Sampling.UNKNOWN: "sample_and_match",
}
"""Which exact rules serve a law, in words."""


def minus(law: Tensor, drawn_from: Tensor) -> tuple[Tensor, Tensor]:
    """norm(max(0, law - drawn_from)), (b v), and (b) bool where nothing, or no number, is left of
    it."""
    return norm((law - drawn_from).clamp_(min=0))


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
            f"token {int(tokens[bad][0])} was drafted, but the law it is said to come from gives "
            f"it probability 0: "
            "pass on the very tensor that was drawn from, with the rows and the order of the draw"
        )


def check_tree(rule: str, proposal: Proposal) -> tuple[int, int]:
    tokens, parents = proposal.tokens, proposal.parents
    if tokens.ndim != 2 or parents.shape != tokens.shape:
        raise InputError(
            f"rule {rule} got tokens {tuple(tokens.shape)} and parents {tuple(parents.shape)}, "
            f"needs both (b n)"
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
        laws: those that the rule is made for.
        chain: every node must be the only child of the one before.
        reads_q: the rule reads q; a point mass has none.
    Raises: InputError saying what does not fit.
    """
    b, n = check_tree(rule, proposal)
    if proposal.sampling not in samplings:
        raise InputError(
            f"rule {rule} is made for proposals of law "
            f"{' or '.join(one.value for one in samplings)}, this one is "
            f"{proposal.sampling.value}: use {INSTEAD[proposal.sampling]}"
        )
    if chain and not bool(
        (proposal.parents == torch.arange(-1, n - 1, device=proposal.parents.device)).all()
    ):
        raise InputError(
            f"rule {rule} needs a chain, each node the only child of the one before; this is a "
            f"tree: use multi_step"
        )
    if p.ndim != 3 or p.shape[:2] != (b, n + 1):
        raise InputError(
            f"rule {rule} got p of shape {tuple(p.shape)}, needs {(b, n + 1)} and the vocabulary: "
            f"a law for the anchor "
            "and for each node"
        )
    if u.shape != (b, n + 1):
        raise InputError(
            f"rule {rule} got uniforms of shape {tuple(u.shape)}, needs {(b, n + 1)}: one per node "
            f"and one for "
            "the next token"
        )
    if reads_q and proposal.sampling is not Sampling.ONE_HOT and n:
        _check_q(rule, p, proposal)
    return b, n


def _check_q(rule: str, p: Tensor, proposal: Proposal) -> None:
    b, n = proposal.tokens.shape
    if proposal.q is None or proposal.q_rows is None:
        raise InputError(
            f"rule {rule} needs q and q_rows, the laws that the tokens were drawn from; this "
            f"proposal has none"
        )
    if proposal.q.ndim != 3 or proposal.q.shape[0] != b or proposal.q.shape[-1] != p.shape[-1]:
        raise InputError(
            f"rule {rule} got q of shape {tuple(proposal.q.shape)} for p of shape "
            f"{tuple(p.shape)}, needs one "
            "batch and one vocabulary: scatter a smaller draft vocabulary into the target's"
        )
    if proposal.q_rows.shape != (b, n):
        raise InputError(
            f"rule {rule} got q_rows of shape {tuple(proposal.q_rows.shape)}, needs {(b, n)}: one "
            f"per node"
        )
