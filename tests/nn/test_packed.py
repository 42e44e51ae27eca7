"""Packed layers compute what plain ones do, and stay tied."""

import pytest
import torch
from torch import nn

from drafttrain.errors import InputError
from drafttrain.nn.packed import PackedLinear, pack, wanted


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7,), (1, 5, 7), (3, 26, 7)])
def test_same_products(bias, shape):
    torch.manual_seed(0)
    plain = nn.Linear(7, 11, bias=bias)
    packed = PackedLinear(plain.weight.detach(), None if plain.bias is None else plain.bias.detach())
    x = torch.randn(shape)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), plain(x), rtol=1e-5, atol=1e-6)
    y = x.clone().requires_grad_()
    packed(y).sum().backward()
    torch.testing.assert_close(y.grad, plain.weight.sum(0).expand(shape).detach(), rtol=1e-5, atol=1e-5)


def test_layers_are_replaced_and_tied_weights_stay_tied():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)).requires_grad_(False)
    model[2].weight = model[0].weight
    names = set(model.state_dict())
    x = torch.tensor([[1, 2, 3]])
    before = model(x)
    assert pack(model) == 2
    assert model[2].weight is model[0].weight and set(model.state_dict()) == names
    torch.testing.assert_close(model(x), before)
    assert pack(nn.Linear(3, 3).double()) == 0


def test_settings():
    assert wanted(False, 1) is False and wanted(True, 1 << 60) is True
    assert wanted("auto", 1 << 60) is False  # no room for the copies
    with pytest.raises(InputError, match="auto, true or false"):
        wanted("yes", 1)
