"""Medusa's and Hydra's heads for tests."""

from __future__ import annotations

import torch

from drafttrain.drafter.base import Committed
from drafttrain.drafter.hydra_heads import HydraHeads
from drafttrain.drafter.medusa import Medusa
from drafttrain.flow import Features, Needs
from drafttrain.target import load
from tests.drafter import make as drafters

KINDS = {"medusa": Medusa, "hydra_heads": HydraHeads}


def stirred(drafter, seed=0):
    """Weights that are not where training starts."""
    with torch.no_grad():
        for p in drafter.parameters():
            p += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
    return drafter.eval()


def make(kind="medusa", family="llama", stir=True, target=None, **settings):
    target = target or load.tiny(family=family)
    drafter = drafters.make(KINDS[kind], target, **{"heads": 3, **settings})
    return target, stirred(drafter) if stir else drafter.eval()


def logits_after_two_siblings(target, drafter):
    """(2 w) what is drafted after each of two different children of the anchor."""
    x = torch.tensor([[7, 8, 9, 10, 11]])
    hidden = target.features(x[:, :-1], torch.tensor([4]), Needs(last_hidden=True)).last_hidden
    with torch.inference_mode():
        state = drafter.open(1, 32)
        committed = Committed(Features(hidden), x[:, 1:], torch.tensor([4]))
        start, _ = drafter.extend(state, committed, 2)
        tree_mask, above = torch.eye(2, dtype=torch.bool)[None], start.expand(-1, 2, -1)
        _, found = drafter.expand(state, torch.tensor([[30, 40]]), above, 1, tree_mask)
    return found.logits[0]
