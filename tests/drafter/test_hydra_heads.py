"""What only Hydra has; what it shares with other heads is tested in test_heads.py."""

import torch

from drafttrain.drafter.hydra_heads import TokenBlock
from tests.drafter.heads import logits_after_two_siblings, make


def test_the_first_block_takes_features_and_tokens_to_the_targets_width():
    target, drafter = make("hydra_heads", heads=2)
    d = target.width
    assert sum(p.numel() for p in drafter.parameters()) == sum(
        2 * (k + 1) * d * d + d for k in (1, 2)
    )
    z = torch.randn(5, 3 * d)
    torch.testing.assert_close(TokenBlock(d, 2)(z), z[:, :d])


def test_embeddings_weigh_as_much_as_features():
    target, drafter = make("hydra_heads")
    with torch.no_grad():
        target.embedding.weight.mul_(0.01)
    _, quiet = make("hydra_heads", target=target, heads=2)
    ids = torch.arange(3, 300)
    torch.testing.assert_close(quiet.embed(ids), drafter.embed(ids), rtol=0.1, atol=0.1)
    torch.testing.assert_close(
        quiet.embed(ids).pow(2).mean().sqrt(), torch.tensor(1.0), rtol=0.1, atol=0.1
    )


def test_what_was_drafted_is_read_after_it():
    target, drafter = make("hydra_heads")
    first, second = logits_after_two_siblings(target, drafter)
    assert float((first - second).abs().max()) > 1e-3
