"""An unrolled layer: what a row reads, two ways to read it, and gradients made at once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from drafttrain.nn.unrolled import AtOnce, Unrolled, at_labels, unroll


def oracle(rows: int, step: int) -> torch.Tensor:
    """(r r*(step+1)): entries of step 0 up to the row, and its own of every later step."""
    q, kv = torch.arange(rows)[:, None], torch.arange(rows * (step + 1))[None]
    return ((kv < rows) & (kv <= q)) | ((kv >= rows) & ((kv - q) % rows == 0))


@pytest.mark.parametrize("rows", [1, 5])
def test_the_mask_is_the_published_one(rows: int) -> None:
    steps, x = Unrolled(), torch.zeros(1, 1, rows, 2)
    for step in range(4):
        assert torch.equal(steps.mask(rows, x.device)[0, 0], oracle(rows, step))
        steps.update(x, x, 0)
        assert steps.get_seq_length() == rows * (step + 1)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_both_ways_to_read_are_one(kv_heads: int, joined: bool) -> None:
    """A product with step 0 and a score for each later step, against one product with all entries
    under the mask; gradients too."""
    generator = torch.Generator().manual_seed(0)
    first = None
    if joined:
        rows_of = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 1, 1]])
        first = (rows_of[:, :, None] == rows_of[:, None]).tril()[:, None]
    one, other = Unrolled(first), Unrolled(first)
    given, wide, narrow = [], 0.0, 0.0
    for _ in range(4):
        q, k, v = (
            torch.randn(2, h, 6, 8, generator=generator, dtype=torch.float64).requires_grad_()
            for h in (4, kv_heads, kv_heads)
        )
        weights = torch.randn(2, 4, 6, 8, generator=generator, dtype=torch.float64)
        given += [q, k, v]
        mask = other.mask(6, q.device)
        keys, values = other.update(k, v, 0)
        expected = functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, enable_gqa=True
        )
        found = one.attend(q, k, v, 0)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        wide, narrow = wide + (found * weights).sum(), narrow + (expected * weights).sum()
    for mine, theirs in zip(
        torch.autograd.grad(wide, given), torch.autograd.grad(narrow, given), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_rows_stay_and_tokens_and_positions_move() -> None:
    positions = torch.arange(4)[None]  # of a text of six tokens
    seen = []

    def step(hidden, tokens, places, _cache):
        seen.append((hidden.flatten().tolist(), tokens.tolist(), places[0].tolist()))
        return hidden * 10, hidden + 1

    outs = list(unroll(step, torch.zeros(1, 4, 1), positions, 3))
    # The last row of steps 1 and 2 has no token left, nor a label.
    assert [tokens for _, tokens, _ in seen] == [[1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 5]]
    assert [places for *_, places in seen] == [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]
    assert [hidden[0] for hidden, *_ in seen] == [0.0, 1.0, 2.0]
    assert [float(out[0, 0, 0]) for out in outs] == [0.0, 10.0, 20.0]


def test_a_label_is_reached_from_one_place_less_at_every_step() -> None:
    rows = torch.arange(4.0).reshape(1, 4, 1)
    where = torch.tensor([0, 0, 0]), torch.tensor([2, 3, 5])
    assert at_labels(rows, where, 0).flatten().tolist() == [0, 1, 3]
    assert at_labels(rows, where, 1).flatten().tolist() == [0, 0, 2]  # x_2 has no row at step 1


def test_gradients_made_at_once_are_those_of_the_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 3, generator=generator).requires_grad_()
    unused, frozen = torch.ones(2).requires_grad_(), torch.ones(2)
    losses = [torch.randn(4, 3, generator=generator) for _ in range(3)]
    each = AtOnce([weight, unused, frozen])
    for x in losses:
        each.add((x @ weight).square().sum())
    total = each.total()
    (2 * total).backward()
    expected = sum((x @ weight).square().sum() for x in losses)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(weight.grad, torch.autograd.grad(2 * expected, weight)[0])
    assert unused.grad.tolist() == [0, 0]
    with torch.no_grad():
        none = AtOnce([weight])
        none.add((losses[0] @ weight).sum())
        assert not none.total().requires_grad
