"""What an encoding loses is bounded, for every token by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafttrain.target.encoding import ENCODINGS


def vectors() -> Tensor:
    """(n d): ordinary ones, one with an outlier, one of zeros, very small and very large ones."""
    chance = torch.Generator().manual_seed(0)
    values = torch.randn(64, 48, generator=chance)
    values[1, 7] = 900.0
    values[2] = 0
    values[3] *= 1e-30
    values[4] *= 1e30
    values[5] = 1e-42
    values[6] = -values[6].abs()
    return values


@pytest.mark.parametrize(("name", "dtype"), [("float32", torch.float32), ("bf16", torch.bfloat16)])
def test_plain_encodings_are_a_change_of_dtype(name: str, dtype: torch.dtype) -> None:
    code, values = ENCODINGS[name], vectors()
    codes, scales = code.encode(values)
    assert (
        scales is None
        and code.served == dtype
        and torch.equal(code.decode(codes, None), values.to(dtype))
    )
    assert code.bytes_of(48) == 48 * dtype.itemsize == codes[0].numel() * codes.element_size()


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_scaled_encodings_keep_their_bounds(name: str) -> None:
    code, values = ENCODINGS[name], vectors()
    codes, scales = code.encode(values)
    assert scales is not None and codes.element_size() == 1 and scales.shape == (64,)
    assert code.bytes_of(48) == 48 + 4
    found = code.decode(codes, scales)
    assert found.dtype == torch.float32 and bool(torch.isfinite(found).all())
    gap, size, step = (
        (found.double() - values).abs(),
        values.double().abs(),
        scales.double()[:, None],
    )
    bound = step / 2 if name == "int8" else torch.maximum(size / 16, step * 2**-10)
    assert bool((gap <= bound * (1 + 1e-4)).all())
    # The bound is the code's own: half of it would not hold.
    assert bool((gap > bound / 2).any())
    assert not found[2].any()
    # The largest value of each vector is kept to rounding, so the scale is no larger than it needs
    # to be.
    ordinary = [0, 1, 3, 4, 6]
    largest = values[ordinary].abs().amax(-1)
    torch.testing.assert_close(found[ordinary].abs().amax(-1), largest, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", sorted(ENCODINGS))
def test_a_token_does_not_depend_on_its_neighbours(name: str) -> None:
    code, values = ENCODINGS[name], vectors()
    codes, scales = code.encode(values)
    for place in (0, 1, 5):
        single, own = code.encode(values[place : place + 1])
        assert torch.equal(single.view(torch.uint8), codes[place : place + 1].view(torch.uint8))
        assert scales is None or (own is not None and torch.equal(own[0], scales[place]))
    shaped = code.decode(codes.view(4, 16, 48), None if scales is None else scales.view(4, 16))
    assert torch.equal(shaped.view(64, 48), code.decode(codes, scales))
