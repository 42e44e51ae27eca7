"""Chunked losses against the direct computation."""

import pytest
import torch

from drafttrain.errors import InputError
from drafttrain.nn import losses


@pytest.mark.parametrize("name", sorted(losses.DIVERGENCES))
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_chunks_do_not_change_value_or_gradient(name, chunk):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(13, 5, generator=generator)
    teacher = torch.randn(7, 5, generator=generator)
    hidden = torch.randn(7, 5, generator=generator)
    divergence = losses.divergence(name)

    one = hidden.clone().requires_grad_()
    direct = divergence(one @ weight.T, teacher @ weight.T).sum()
    (0.3 * direct).backward()

    other = hidden.clone().requires_grad_()
    total, choices = losses.over_vocabulary(other, teacher, lambda h: h @ weight.T, divergence, chunk=chunk)
    (0.3 * total).backward()
    torch.testing.assert_close(total, direct)
    torch.testing.assert_close(other.grad, one.grad)
    assert torch.equal(choices, (hidden @ weight.T).argmax(-1))


def test_nothing_is_differentiated_where_nothing_is_learned():
    weight = torch.randn(13, 5, generator=torch.Generator().manual_seed(0))
    hidden, teacher = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(1))
    asked = []

    def head(h):
        asked.append(torch.is_grad_enabled())
        return h @ weight.T

    live = hidden.clone().requires_grad_()
    total, choices = losses.over_vocabulary(live, teacher, head, losses.soft_cross_entropy, chunk=4)
    assert any(asked)
    asked.clear()
    with torch.no_grad():
        quiet, same = losses.over_vocabulary(live, teacher, head, losses.soft_cross_entropy, chunk=4)
    assert len(asked) == 4 and not any(asked) and not quiet.requires_grad
    torch.testing.assert_close(quiet, total.detach())
    assert torch.equal(choices, same)


def test_divergences_by_hand():
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.2, 0.6]])
    logits = q.log(), p.log()
    kl = float((p * (p / q).log()).sum())
    assert float(losses.forward_kl(*logits)) == pytest.approx(kl, abs=1e-6)
    entropy = float(-(p * p.log()).sum())
    assert float(losses.soft_cross_entropy(*logits)) == pytest.approx(kl + entropy, abs=1e-6)
    assert float(losses.total_variation(*logits)) == pytest.approx(0.4, abs=1e-6)
    assert float(losses.acceptance_log(*logits).exp()) == pytest.approx(1 / 0.6, abs=1e-5)


def test_no_positions_give_zero_and_no_nan():
    hidden = torch.zeros(0, 4, requires_grad=True)
    total, choices = losses.over_vocabulary(hidden, torch.zeros(0, 4), lambda h: h @ torch.ones(4, 3), losses.forward_kl)
    total.backward()
    assert float(total.detach()) == 0.0 and choices.shape == (0,)


def test_unknown_divergence_lists_the_known():
    with pytest.raises(InputError, match="soft_cross_entropy"):
        losses.divergence("mse")
