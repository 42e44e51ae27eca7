"""Packed layers compute what plain ones do, and stay tied."""

import pytest
import torch
from torch import nn

from drafttrain.errors import InputError
from drafttrain.nn.packed import FrozenProduct, PackedLinear, pack, should_pack


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7,), (1, 5, 7), (3, 26, 7)])
def test_same_products(bias, shape):
    torch.manual_seed(0)
    plain = nn.Linear(7, 11, bias=bias)
    packed = PackedLinear(
        plain.weight.detach(), None if plain.bias is None else plain.bias.detach()
    )
    x = torch.randn(shape)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), plain(x), rtol=1e-5, atol=1e-6)
    y = x.clone().requires_grad_()
    packed(y).sum().backward()
    torch.testing.assert_close(
        y.grad, plain.weight.sum(0).expand(shape).detach(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("shape", [(1, 7), (3, 5, 7), (0, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_frozen_product_and_its_gradient(shape, bias):
    generator = torch.Generator().manual_seed(0)
    weight, extra = (
        torch.randn(11, 7, generator=generator),
        torch.randn(11, generator=generator) if bias else None,
    )
    product = FrozenProduct(weight)
    x, slope = (
        torch.randn(shape, generator=generator),
        torch.randn(*shape[:-1], 11, generator=generator),
    )
    found = []
    for work in (lambda x: product(x, extra), lambda x: nn.functional.linear(x, weight, extra)):
        y = x.clone().requires_grad_()
        out = work(y)
        out.backward(slope)
        found.append((out.detach(), y.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    half = FrozenProduct(weight.bfloat16())
    torch.testing.assert_close(
        half(x.bfloat16()), nn.functional.linear(x.bfloat16(), weight.bfloat16())
    )


def test_layers_are_replaced_and_tied_weights_stay_tied():
    model = nn.Sequential(
        nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
    ).requires_grad_(False)
    model[2].weight = model[0].weight
    names = set(model.state_dict())
    x = torch.tensor([[1, 2, 3]])
    before = model(x)
    assert pack(model) == 2
    assert model[2].weight is model[0].weight and set(model.state_dict()) == names
    torch.testing.assert_close(model(x), before)
    assert pack(nn.Linear(3, 3).double()) == 0


def test_settings():
    assert should_pack(False, 1) is False and should_pack(True, 1 << 60) is True
    assert should_pack("auto", 1 << 60) is False  # no room for the copies
    with pytest.raises(InputError, match="pack=yes"):
        should_pack("yes", 1)
