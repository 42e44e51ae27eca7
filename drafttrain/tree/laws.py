"""Laws of tree nodes under a policy that reads the text: that of a node is made of the drafts on
the way to it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from drafttrain.nn.processing import Text
from drafttrain.nn.sampling import Policy
from drafttrain.tree.speaker import Speaker


def ways(tokens: Tensor, tree_mask: Tensor, depths: Tensor, deepest: int) -> Tensor:
    """The drafts on the way to every node, itself included.

    Args:
        tokens, depths: (b n) of the nodes.
        among: (b n+1 n+1) who sees whom, as `ancestor_mask`.
    Returns: (b n+1 deepest) int64, row 0 the anchor's; -1 behind a way's end.
    """
    b, n = tokens.shape
    # Place 0, the anchor's, takes what is not on the way.
    place = torch.where(tree_mask[:, :, 1:], depths[:, None], 0)  # b n+1 n
    found = tokens.new_full((b, n + 1, deepest + 1), -1)
    return found.scatter(2, place, tokens[:, None].expand(-1, n + 1, -1))[:, :, 1:]


def draft_logits(
    speaker: Speaker, logits: Tensor, policy: Policy, text: Text, drafted: Tensor
) -> Tensor:
    """Draft logits as the policy processes them. A processor may raise a token that the drafter
    does not know: q is a law over the target's vocabulary.

    Args:
        logits: (b p w) of the children of p nodes.
        drafted: (b p k) the drafts on the way to these nodes, -1 behind a way's end.
    Returns: (b p v) float32.
    """
    logits = logits.float()
    known = speaker.to_target_probs(torch.ones_like(logits[0, 0])) > 0  # v
    return policy.processed(
        speaker.to_target_probs(logits).masked_fill(~known, -math.inf), text, drafted
    )[0]
