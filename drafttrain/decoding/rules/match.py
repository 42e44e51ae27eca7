"""Rules that keep a drafted token where it is the token that the target chooses: its argmax, or its
own draw."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drafttrain.decoding.rules.shared import check, check_tree, deepest, path_to
from drafttrain.errors import InputError
from drafttrain.flow import Acceptance, Proposal, Sampling
from drafttrain.later import torch
from drafttrain.nn.sampling import draw
from drafttrain.tree.topology import depths_of

if TYPE_CHECKING:
    from torch import Tensor


def greedy(argmax: Tensor, proposal: Proposal) -> Acceptance:
    """Follow the target's argmaxes through the tree as far as drafted tokens equal them; integers,
    so no rounding.

    Emits what plain greedy decoding emits: Miao et al. 2023 (arXiv:2305.09781), Algorithm 2,
    VerifyGreedy. Departs from it: where siblings repeat a token, the one with the longest matching
    continuation is followed.

    Args:
        argmax: (b n+1) int64 target argmaxes; column 0 follows the anchor, column i+1 follows node
            i.
        proposal: drawn in any way.
    Returns: the accepted path; its next token is the argmax after it.
    Raises: InputError if shapes disagree.
    """
    tokens, parents = proposal.tokens, proposal.parents
    b, n = check_tree("greedy", proposal)
    if argmax.shape != (b, n + 1):
        raise InputError(
            f"rule greedy got argmaxes of shape {tuple(argmax.shape)}, needs {(b, n + 1)}: one per "
            "node and the anchor"
        )
    depths = depths_of(parents)  # b n
    width = deepest(depths)
    rows = torch.arange(b, device=tokens.device)
    match = tokens == argmax.gather(1, parents + 1)  # b n
    reached = torch.nn.functional.pad(match, (1, 0), value=True)  # b n+1
    for _ in range(width - 1):  # each pass carries a mismatch one level further down
        reached = torch.nn.functional.pad(
            match & reached.gather(1, parents + 1), (1, 0), value=True
        )
    count = torch.where(reached[:, 1:], depths, 0).amax(1) if n else tokens.new_zeros(b)
    last = reached[:, 1:] & (depths == count[:, None])  # b n, all false where nothing was accepted
    index = torch.arange(n, device=tokens.device)
    leaf = torch.where(last, index, n).amin(1) if n else tokens.new_full((b,), -1)
    leaf = torch.where(count > 0, leaf, -1)
    return Acceptance(path_to(leaf, count, parents, width), count, argmax[rows, leaf + 1])


def sample_and_match(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """Draw what follows from the target and go on as long as it was drafted: every emitted token is
    the target's draw.

    Exact for the target's distribution whatever the proposal is, also where nobody knows how it
    came about; this is the naive sampling that Miao et al. 2023 (arXiv:2305.09781), section 4.3,
    compare with. A deterministic draft is kept with p(x), as by `one_hot`; a draft x drawn from q
    only with sum_x p(x) q(x), where `ratio` keeps sum_x min(p, q). Where siblings repeat a token,
    all of them are followed, and the longest match counts.

    Args:
        p: (b n+1 v) target probabilities.
        proposal: any tree, drawn in any way; q is not read.
        u: (b n+1) uniform numbers; u[:, k] draws the token k + 1 places after the anchor.
    Returns: the accepted path, and the draw that no draft matched, or the one after a leaf.
    Raises: InputError if shapes disagree.
    """
    _, n = check("sample_and_match", p, proposal, u, samplings=tuple(Sampling), reads_q=False)
    tokens, parents = proposal.tokens, proposal.parents
    u = u.to(p.device, torch.float64)
    depths = torch.nn.functional.pad(depths_of(parents), (1, 0))  # b n+1, the anchor in front
    reached = depths == 0
    drawn = torch.full_like(depths, -1)  # nobody drafts token -1
    for depth in range(deepest(depths) + 1):
        here = reached & (depths == depth)
        live = here.any(1).nonzero()[:, 0]
        if not len(live):
            break
        # More than one node only where siblings repeat a token: then they follow one text and share
        # its distribution.
        node = here[live].int().argmax(1)
        token = draw(p[live, node], u[live, depth])
        drawn[live] = torch.where(here[live], token[:, None], drawn[live])
        if n:
            reached[:, 1:] |= here.gather(1, parents + 1) & (tokens == drawn.gather(1, parents + 1))
    return greedy(drawn, proposal)
