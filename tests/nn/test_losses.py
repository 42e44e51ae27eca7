"""Chunked losses against the direct computation."""

import contextlib

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
    total, choices = losses.over_vocabulary(
        other, teacher, lambda h: h @ weight.T, divergence, chunk=chunk
    )
    (0.3 * total).backward()
    torch.testing.assert_close(total, direct)
    torch.testing.assert_close(other.grad, one.grad)
    assert torch.equal(choices, (hidden @ weight.T).argmax(-1))


@pytest.mark.parametrize("name", sorted(losses.DIVERGENCES))
@pytest.mark.parametrize("quiet", ["no_grad", "inference_mode", "detached"])
def test_without_gradients_the_same_numbers_and_no_gradient_work(name, quiet, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    weight, teacher, hidden = (torch.randn(n, 5, generator=generator) for n in (13, 7, 7))
    divergence = losses.divergence(name)
    learning = hidden.clone().requires_grad_()
    total, choices = losses.over_vocabulary(
        learning, teacher, lambda h: h @ weight.T, divergence, chunk=3
    )
    assert total.requires_grad

    def head(part):
        logits = part @ weight.T
        assert not part.requires_grad and not logits.requires_grad
        return logits

    def refused(*_, **__):
        raise AssertionError("a gradient was computed")

    monkeypatch.setattr(torch.autograd, "grad", refused)
    modes = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "detached": contextlib.nullcontext,
    }
    with modes[quiet]():
        given = hidden if quiet == "detached" else learning
        calm, picked = losses.over_vocabulary(given, teacher, head, divergence, chunk=3)
    assert (
        torch.equal(calm, total.detach())
        and torch.equal(picked, choices)
        and not calm.requires_grad
    )


def test_divergences_by_hand():
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.2, 0.6]])
    logits = q.log(), p.log()
    kl = float((p * (p / q).log()).sum())
    assert float(losses.forward_kl(*logits)) == pytest.approx(kl, abs=1e-6)
    entropy = float(-(p * p.log()).sum())
    assert float(losses.soft_cross_entropy(*logits)) == pytest.approx(kl + entropy, abs=1e-6)
    backward = float((q * (q / p).log()).sum())
    assert float(losses.reverse_kl(*logits)) == pytest.approx(backward, abs=1e-6)
    for beta in (0.1, 0.5, 0.9):
        m = beta * p + (1 - beta) * q
        jsd = float((beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum())
        assert float(losses.generalised_jsd(*logits, beta)) == pytest.approx(jsd, abs=1e-6)
    m = (p + q) / 2
    half = float((p * (p / m).log() + q * (q / m).log()).sum() / 2)
    assert float(losses.jensen_shannon(*logits)) == pytest.approx(half, abs=1e-6)
    assert float(losses.total_variation(*logits)) == pytest.approx(0.4, abs=1e-6)
    assert float(losses.acceptance_log(*logits).exp()) == pytest.approx(1 / 0.6, abs=1e-5)


def test_no_positions_give_zero_and_no_nan():
    hidden = torch.zeros(0, 4, requires_grad=True)
    total, choices = losses.over_vocabulary(
        hidden, torch.zeros(0, 4), lambda h: h @ torch.ones(4, 3), losses.forward_kl
    )
    total.backward()
    assert float(total.detach()) == 0.0 and choices.shape == (0,)


def test_unknown_divergence_lists_the_known():
    with pytest.raises(InputError, match=r"loss mse .*soft_cross_entropy"):
        losses.divergence("mse")
