"""What only Medusa has; what it shares with other heads is tested in test_heads.py."""

import torch

from tests.drafter.heads import logits_after_two_siblings, make


def test_a_head_is_one_square_block():
    target, drafter = make("medusa", stir=False, heads=2)
    d = target.width
    assert sum(p.numel() for p in drafter.parameters()) == 2 * (d * d + d)
    _, deeper = make("medusa", stir=False, target=target, heads=2, blocks=2)
    assert all(not p.detach().any() for p in deeper.parameters())


def test_what_was_drafted_changes_nothing_after_it():
    target, drafter = make("medusa")
    first, second = logits_after_two_siblings(target, drafter)
    assert torch.equal(first, second)
