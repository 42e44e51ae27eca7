"""Are weights in bfloat16 and weights in float16 roundings of the same ones?

A digest cannot say: what float16 rounds to the middle between two values of bfloat16 may have been
nearer to either. So a few values of every tensor are recorded, and compared as ranges. Files in one
of the two may be loaded in a wider dtype; their values still are of the narrow one.
"""

from __future__ import annotations

import base64
import binascii

import torch
from torch import Tensor, nn

EACH, ALL = 8, 4096
"""Values of a tensor, and of all together unless there are more tensors."""
KINDS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def recorded(model: nn.Module, dtype: torch.dtype) -> str:
    """The sample of a model that was loaded in a dtype. Of a wider one it is named in which of two
    bytes all its values are ("float16:..."); empty where they are in none."""
    name = str(dtype).removeprefix("torch.")
    if name in KINDS:
        return sample(model, dtype)
    own = _sampled(model)
    for kind, narrow in KINDS.items():
        if len(own) and torch.equal(own.to(narrow).float(), own):
            return f"{kind}:{sample(model, narrow)}"
    return ""


def kind_of(text: str, dtype: str) -> tuple[str, str]:
    """(dtype of a sample's values, the sample as base64).

    Args:
        dtype: in which its model was loaded.
    """
    named, _, values = text.rpartition(":")
    return named or dtype, values


def sample(model: nn.Module, dtype: torch.dtype) -> str:
    """An even sample of each tensor's values in a dtype of two bytes, as base64; by name, as
    digests have them."""
    values = _sampled(model).to(dtype)
    return base64.b64encode(values.view(torch.uint8).numpy().tobytes()).decode()


def _sampled(model: nn.Module) -> Tensor:
    """(n) float32."""
    tensors = [t for _, t in sorted(model.state_dict().items()) if t.is_floating_point()]
    each = max(1, min(EACH, ALL // max(1, len(tensors))))
    found = [_spread(tensor.detach().reshape(-1), each) for tensor in tensors if tensor.numel()]
    return torch.cat(found) if found else torch.empty(0)


def _spread(flat: Tensor, count: int) -> Tensor:
    """(n) values in the middles of equal parts, float32."""
    n = min(count, len(flat))
    places = (torch.arange(n) * 2 + 1) * len(flat) // (2 * n)
    return flat[places.to(flat.device)].to("cpu", torch.float32)


def may_be_one(brain: str, half: str) -> bool:
    """Is there, for every place of two samples, a weight that bfloat16 and float16 round so?

    Args:
        brain: a sample in bfloat16; half: of the same places in float16.
    """
    b, h = (_values(text, dtype) for text, dtype in zip((brain, half), KINDS.values(), strict=True))
    if b is None or h is None or len(b) != len(h) or not len(b):
        return False
    # Half a place of each, the smallest one of float16 where it has no smaller numbers.
    room = _half_place(b, 8) + _half_place(h, 11).clamp_min(2.0**-25)
    beyond = (b.abs() >= 65504) & torch.isinf(h) & (b.sign() == h.sign())
    return bool((((b - h).abs() <= room) | beyond).all())


def neighbours(one: str, other: str) -> bool:
    """Do two samples in bfloat16 differ by at most one place, as two roundings of one may?"""
    a, b = (_values(text, torch.bfloat16) for text in (one, other))
    if a is None or b is None or len(a) != len(b):
        return False
    return bool(((a - b).abs() <= 2 * torch.minimum(_half_place(a, 8), _half_place(b, 8))).all())


def _half_place(values: Tensor, digits: int) -> Tensor:
    """Half of the last place of numbers of so many binary digits."""
    found = torch.ldexp(torch.ones_like(values), torch.frexp(values).exponent - digits - 1)
    return found.masked_fill(values == 0, 0)


def _values(text: str, dtype: torch.dtype) -> Tensor | None:
    """(n) float64; None for an edited text."""
    try:
        raw = bytearray(base64.b64decode(text, validate=True))
        return torch.frombuffer(raw, dtype=dtype).double() if raw else None
    except (ValueError, binascii.Error):
        return None
