"""What is Medusa's alone; what it shares with other heads is tested in test_heads.py."""

import torch

from drafttrain.drafter.medusa import Medusa
from drafttrain.target import load
from tests.drafter.test_heads import logits_behind_two_siblings, make


def test_a_head_is_one_square_block():
    target = load.tiny()
    d = target.width
    assert sum(p.numel() for p in Medusa(target, heads=2).parameters()) == 2 * (d * d + d)
    assert all(not p.detach().any() for p in Medusa(target, heads=2, blocks=2).parameters())


def test_what_was_drafted_changes_nothing_behind_it():
    target, drafter = make("medusa")
    first, second = logits_behind_two_siblings(target, drafter)
    assert torch.equal(first, second)
