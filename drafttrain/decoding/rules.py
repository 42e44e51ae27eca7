"""Acceptance rules: which drafted tokens stay, and which token follows them.

Pure functions of the target's laws, the proposal and uniform numbers: the same input gives the same answer, and a
row's answer does not depend on the other rows. A rule is exact only for the law by which the proposal was drawn, so
each checks that first.

What all rules share:
    p: (b n+1 v) target probabilities after the sampling policy; row 0 follows the anchor, row i+1 follows node i.
    u: (b n+1) uniform numbers in [0, 1). u[:, i] judges node i, u[:, n] draws the token that follows the accepted ones.
    A token stays if u < ratio, strictly: at u = 0 a token of target probability 0 is still refused.
    Siblings are judged in index order; the order must not depend on the drawn tokens.
    `path` of the answer is as wide as the deepest node of the batch (a chain's length), padded with -1.
    Arithmetic is float64 on one (b v) residual; p and q are read row by row and never copied whole.
    Raises InputError if the rule does not fit the proposal or shapes disagree, ValueError if a drafted token has q = 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from drafttrain.errors import InputError
from drafttrain.flow import Acceptance, Law, Proposal
from drafttrain.nn.sampling import draw, untried
from drafttrain.tree.topology import children_of, depths_of


def greedy(argmax: Tensor, proposal: Proposal) -> Acceptance:
    """Follow the target's argmaxes through the tree as far as drafted tokens equal them; integers, so no rounding.

    Emits what plain greedy decoding emits: Miao et al. 2023 (arXiv:2305.09781), Algorithm 2, VerifyGreedy. Departs from
    it: where siblings repeat a token, the one with the longest matching continuation is followed.

    Args:
        argmax: (b n+1) int64 target argmaxes; column 0 follows the anchor, column i+1 follows node i.
        proposal: of any law.
    Returns: the accepted path; its next token is the argmax after it.
    Raises: InputError if shapes disagree.
    """
    tokens, parents = proposal.tokens, proposal.parents
    b, n = _check_tree("greedy", proposal)
    if argmax.shape != (b, n + 1):
        raise InputError(
            f"rule greedy got argmaxes of shape {tuple(argmax.shape)}, needs {(b, n + 1)}: one per node and the anchor"
        )
    depths = depths_of(parents)  # b n
    width = _deepest(depths)
    rows = torch.arange(b, device=tokens.device)
    match = tokens == argmax.gather(1, parents + 1)  # b n
    reached = torch.nn.functional.pad(match, (1, 0), value=True)  # b n+1
    for _ in range(width - 1):  # each pass carries a mismatch one level further down
        reached = torch.nn.functional.pad(match & reached.gather(1, parents + 1), (1, 0), value=True)
    count = torch.where(reached[:, 1:], depths, 0).amax(1) if n else tokens.new_zeros(b)
    deepest = reached[:, 1:] & (depths == count[:, None])  # b n, all false where nothing was accepted
    index = torch.arange(n, device=tokens.device)
    leaf = torch.where(deepest, index, n).amin(1) if n else tokens.new_full((b,), -1)
    leaf = torch.where(count > 0, leaf, -1)
    path = tokens.new_full((b, width), -1)
    node = leaf
    for step in range(width - 1, -1, -1):
        here = count > step
        path[:, step] = torch.where(here, node, -1)
        if n:
            node = torch.where(here, parents[rows, node.clamp(min=0)], node)
    return Acceptance(path, count, argmax[rows, leaf + 1])


def ratio(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """Keep each drafted token of a chain with probability min(1, p/q); at the first refusal draw norm(max(0, p - q)).

    Exact for the target's distribution: Leviathan et al. 2023 (arXiv:2211.17192), Algorithm 1. Departs from it: where
    rounding leaves the residual empty, the token is drawn from p and counted in `fallbacks`.

    Args:
        p: (b n+1 v) target probabilities.
        proposal: a chain under Law.IID, with q.
        u: (b n+1) uniform numbers.
    Returns: accepted path, count, and the correction or, if all n stay, the bonus token.
    Raises: InputError on a tree or another law; ValueError if a drafted token has q = 0.
    """
    b, n = _check("ratio", p, proposal, u, laws=(Law.IID,))
    chain = torch.arange(-1, n - 1, device=proposal.parents.device)
    if not bool((proposal.parents == chain).all()):
        raise InputError(
            "rule ratio needs a chain, each node the only child of the one before; this is a tree: use multi_step"
        )
    tokens, rows = proposal.tokens, torch.arange(b, device=p.device)
    u = u.to(p.device, torch.float64)
    if n == 0:
        return Acceptance(tokens.new_empty((b, 0)), tokens.new_zeros(b), draw(p[:, 0], u[:, 0]))
    assert proposal.q is not None and proposal.q_rows is not None
    steps = torch.arange(n, device=p.device)
    wanted = p[rows[:, None], steps, tokens].double()  # b n
    drafted = proposal.q[rows[:, None], proposal.q_rows, tokens].double()  # b n
    _refuse_undrawable(drafted, tokens)
    count = (u[:, :n] < wanted / drafted).long().cumprod(1).sum(1)  # b
    weights = p[rows, count].double()  # b v
    refused = rows[count < n]
    law = proposal.q[refused, proposal.q_rows[refused, count[refused]]].double()
    rest, empty = _minus(weights[refused], law)
    weights[refused] = torch.where(empty[:, None], weights[refused], rest)
    path = torch.where(steps < count[:, None], steps, -1)
    return Acceptance(path, count, draw(weights, u[:, n]), int(empty.sum()))


def multi_step(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """Judge the children of a node one after the other, each against what the earlier ones left of the target's law.

    With R = p at first: keep child c with probability min(1, R(c) / d(c)), else R = norm(max(0, R - d)) and go on;
    where no child stays, draw from R. Under Law.IID d is q, also for a repeated token (which is refused again and
    still changes R), and siblings may have different rows of q, as from several drafters; one that repeats another's path
    leads on to that one's children (`Proposal.lands`). Under Law.WOR d is q without
    the earlier siblings, renormalised; once they hold all of q, d is uniform over the tokens not tried.

    Exact for the target's distribution: Miao et al. 2023 (arXiv:2305.09781), Algorithm 2, VerifyStochastic; without
    replacement: Chen et al. 2024 (arXiv:2402.12374), Algorithm 2. Departs from the first: siblings are judged in index
    order, not in an order drawn anew. Departs from both: where rounding leaves the residual empty, the remaining
    siblings are dropped, the token is drawn from p, and `fallbacks` counts it.

    Args:
        p: (b n+1 v) target probabilities.
        proposal: any tree, rows may differ in shape; Law.IID or Law.WOR, with q.
        u: (b n+1) uniform numbers.
    Returns: accepted path, count, and the token drawn from the last residual, or after a leaf from p.
    Raises: InputError on another law; ValueError if a judged token has d = 0, as a repeated sibling has under Law.WOR.
    """
    _check("multi_step", p, proposal, u, laws=(Law.IID, Law.WOR))
    return _walk(p, proposal, u)


def one_hot(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """Keep child c with probability R(c), R = p at first; else R(c) = 0, renormalise, go on; at the end draw R.

    This is `multi_step` with a point mass for each d: exact for the target's distribution if the drafted tokens are a
    function of the committed text alone (argmax, top-k, n-gram), whatever the drafter's own probabilities were. A node
    keeps one of its children with the target's probability of all of them. Miao et al. 2023 (arXiv:2305.09781),
    Algorithm 2. Departs from it: as `multi_step` does.

    Args:
        p: (b n+1 v) target probabilities.
        proposal: any tree under Law.ONE_HOT; rows may differ in shape, q is not read.
        u: (b n+1) uniform numbers.
    Returns: accepted path, count, and the token drawn from the last residual, or after a leaf from p.
    Raises: InputError on another law.
    """
    _check("one_hot", p, proposal, u, laws=(Law.ONE_HOT,))
    return _walk(p, proposal, u)


RULES: dict[str, Callable[..., Acceptance]] = {
    "greedy": greedy,
    "ratio": ratio,
    "multi_step": multi_step,
    "one_hot": one_hot,
}

GUARANTEES: dict[str, str] = {
    "greedy": "greedy",
    "ratio": "distribution",
    "multi_step": "distribution",
    "one_hot": "distribution",
}
"""What each rule keeps of the target used: "greedy" the ids of greedy decoding, "distribution" the law of sampling."""


def rule_for(law: Law, greedy: bool, is_chain: bool) -> str:
    """Name of the rule that fits a proposal: its law, whether decoding is greedy, whether each node has one child.

    Raises: InputError where no rule is exact: tokens of unknown law cannot be judged above temperature 0.
    """
    if greedy:
        return "greedy"
    if law is Law.IID and is_chain:
        return "ratio"
    if law in (Law.IID, Law.WOR):
        return "multi_step"
    if law is Law.ONE_HOT:
        return "one_hot"
    raise InputError(
        f"no rule is exact for a proposal of law {law.value} at temperature above 0: decode greedily (temperature 0), "
        "or have the drafter say how its tokens were drawn"
    )


def _walk(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """Descend from the anchor, every row at its own node; only rows that still have a child to judge take part."""
    tokens, law = proposal.tokens, proposal.law
    b, n = tokens.shape
    u = u.to(p.device, torch.float64)
    table = children_of(proposal.parents)  # b n+1 k
    width = _deepest(depths_of(proposal.parents))
    path = tokens.new_full((b, width), -1)
    node = tokens.new_full((b,), -1)
    residual = p[:, 0].double()  # b v
    live = torch.arange(b, device=p.device)  # rows whose last node was accepted
    fallbacks = 0
    for step in range(width):
        moved = []
        for rank in range(table.shape[-1]):
            siblings = table[live, node[live] + 1, : rank + 1]  # rows rank+1, all present if the last one is
            present = siblings[:, rank] >= 0
            live, siblings = live[present], siblings[present]
            if not len(live):
                break
            child = siblings[:, rank]
            token = tokens[live, child]
            here = residual[live]  # rows v
            wanted = here.gather(1, token[:, None])[:, 0]
            if law is Law.ONE_HOT:
                rest, empty = _without(here, token)
                keep = u[live, child] < wanted
            else:
                assert proposal.q is not None and proposal.q_rows is not None
                drawn_from = proposal.q[live, proposal.q_rows[live, child]].double()  # rows v
                if law is Law.WOR:
                    drawn_from = untried(drawn_from, tokens[live[:, None], siblings[:, :rank]])
                drafted = drawn_from.gather(1, token[:, None])[:, 0]
                _refuse_undrawable(drafted, token)
                rest, empty = _minus(here, drawn_from)
                keep = u[live, child] < wanted / drafted
            residual[live] = rest
            # An accepted child brings its own law; a residual emptied by rounding gives way to the law of its node.
            empty = empty & ~keep
            fallbacks += int(empty.sum())
            landed = child if proposal.lands is None else proposal.lands[live, child]
            node[live[keep]] = landed[keep]
            path[live[keep], step] = landed[keep]
            fresh = live[keep | empty]
            residual[fresh] = p[fresh, node[fresh] + 1].double()
            moved.append(live[keep])
            live = live[~(keep | empty)]
        live = torch.cat(moved) if moved else live[:0]
        if not len(live):
            break
    return Acceptance(path, (path >= 0).sum(1), draw(residual, u[:, n]), fallbacks)


def _minus(law: Tensor, drawn_from: Tensor) -> tuple[Tensor, Tensor]:
    """norm(max(0, law - drawn_from)), (b v), and (b) bool where nothing, or no number, is left of it."""
    return _norm((law - drawn_from).clamp_(min=0))


def _without(law: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """norm(law with the token at 0), (b v), and (b) bool where nothing is left of it."""
    return _norm(law.scatter(1, token[:, None], 0.0))


def _norm(weights: Tensor) -> tuple[Tensor, Tensor]:
    total = weights.sum(-1, keepdim=True)
    return weights / total, ~(total > 0)[:, 0]


def _deepest(depths: Tensor) -> int:
    return int(depths.max()) if depths.numel() else 0


def _refuse_undrawable(drafted: Tensor, tokens: Tensor) -> None:
    bad = ~(drafted > 0)
    if bool(bad.any()):
        raise ValueError(
            f"token {int(tokens[bad][0])} was drafted, but the law it is said to come from gives it probability 0: "
            "pass on the very tensor that was drawn from, with the rows and the order of the draw"
        )


def _check_tree(rule: str, proposal: Proposal) -> tuple[int, int]:
    tokens, parents = proposal.tokens, proposal.parents
    if tokens.ndim != 2 or parents.shape != tokens.shape:
        raise InputError(
            f"rule {rule} got tokens {tuple(tokens.shape)} and parents {tuple(parents.shape)}, needs both (b n)"
        )
    index = torch.arange(tokens.shape[1], device=parents.device)
    if bool(((parents < -1) | (parents >= index)).any()):
        raise InputError(f"rule {rule} got a node whose parent is neither -1 (anchor) nor an earlier node")
    return tokens.shape[0], tokens.shape[1]


def _check(rule: str, p: Tensor, proposal: Proposal, u: Tensor, *, laws: tuple[Law, ...]) -> tuple[int, int]:
    b, n = _check_tree(rule, proposal)
    if proposal.law not in laws:
        fitting = {Law.IID: "multi_step, or ratio on a chain", Law.WOR: "multi_step", Law.ONE_HOT: "one_hot"}
        instead = fitting.get(proposal.law, "greedy at temperature 0, for nothing else is exact")
        raise InputError(
            f"rule {rule} is exact for proposals of law {' or '.join(law.value for law in laws)}, this one is "
            f"{proposal.law.value}: use {instead}"
        )
    if p.ndim != 3 or p.shape[:2] != (b, n + 1):
        raise InputError(
            f"rule {rule} got p of shape {tuple(p.shape)}, needs {(b, n + 1)} and the vocabulary: a law for the anchor "
            "and for each node"
        )
    if u.shape != (b, n + 1):
        raise InputError(
            f"rule {rule} got uniforms of shape {tuple(u.shape)}, needs {(b, n + 1)}: one per node and one for "
            "the next token"
        )
    if proposal.law is not Law.ONE_HOT and n:
        if proposal.q is None or proposal.q_rows is None:
            raise InputError(
                f"rule {rule} needs q and q_rows, the laws that the tokens were drawn from; this proposal has none"
            )
        if proposal.q.ndim != 3 or proposal.q.shape[0] != b or proposal.q.shape[-1] != p.shape[-1]:
            raise InputError(
                f"rule {rule} got q of shape {tuple(proposal.q.shape)} for p of shape {tuple(p.shape)}, needs one "
                "batch and one vocabulary: scatter a smaller draft vocabulary into the target's"
            )
        if proposal.q_rows.shape != (b, n):
            raise InputError(
                f"rule {rule} got q_rows of shape {tuple(proposal.q_rows.shape)}, needs {(b, n)}: one per node"
            )
    return b, n
