"""Frozen products whose weights are laid out for oneDNN: cheaper on a CPU, small products most of
all.

A verification pass multiplies a handful of positions by every weight. The general routine that
PyTorch calls on a CPU then costs up to twice as much as a single position. With weights laid out
beforehand, a dozen positions cost little more than one. The numbers are the same, up to the order
of summation. `scripts/bench/decode.py` and `train_step.py` measure the difference.
"""

from __future__ import annotations

import os
import platform
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from drafttrain.errors import InputError

_POSITIONS = 12
"""The layout is chosen for products of about this many rows; it is good for others too."""


class PackedLinear(nn.Module):
    """A frozen `nn.Linear` with a packed copy of its weight. The weight itself is kept too, shared,
    so that it can be read."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), None
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _POSITIONS)

    def forward(self, x: Tensor) -> Tensor:
        """(... i) -> (... o)."""
        if x.requires_grad and torch.is_grad_enabled():
            return functional.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


class FrozenProduct:
    """x -> x W^T for a frozen W, differentiable in x. On a CPU in float32, W is laid out for oneDNN
    for the forward and the backward pass if there is room for both copies; otherwise this is
    `linear`."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self._there: Tensor | None = None
        size = 2 * weight.numel() * weight.element_size()
        plain = weight.dtype == torch.float32 and weight.device.type == "cpu"
        if plain and should_pack("auto", size):
            self._there = torch.ops.mkldnn._reorder_linear_weight(
                self.weight.contiguous(), _POSITIONS
            )
            self._back = torch.ops.mkldnn._reorder_linear_weight(
                self.weight.t().contiguous(), _POSITIONS
            )

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """(... i) -> (... o)."""
        general = self._there is None or x.dtype != torch.float32 or not x.numel()
        if general or torch.is_autocast_enabled("cpu"):
            return functional.linear(x, self.weight, bias)
        out: Tensor = _Product.apply(x, self._there, self._back)
        return out if bias is None else out + bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, there: Tensor, back: Tensor
    ) -> Tensor:
        ctx.back = back
        return torch.ops.mkldnn._linear_pointwise(x, there, None, "none", [], "")

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (
            torch.ops.mkldnn._linear_pointwise(slope.contiguous(), ctx.back, None, "none", [], ""),
            None,
            None,
        )


def pack(module: nn.Module) -> int:
    """Replace every float32 `nn.Linear` on the CPU below a module; weights tied elsewhere stay
    tied. Returns the number replaced."""
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if (
                type(child) is nn.Linear
                and child.weight.dtype == torch.float32
                and child.weight.device.type == "cpu"
            ):
                packed = PackedLinear(child.weight, child.bias)
                # The same parameter object, since it may be tied.
                packed.weight = cast(nn.Parameter, child.weight)
                setattr(parent, name, packed.train(child.training))
                count += 1
    return count


def check(setting: object) -> None:
    """Raise InputError unless a setting says whether to pack."""
    if not isinstance(setting, bool) and setting != "auto":
        raise InputError(f"pack={str(setting)[:80]}: give auto, true or false")


def should_pack(setting: str | bool, size: int) -> bool:
    """Should layers of this many bytes be packed here?

    The answer depends only on the machine, not on how busy it is, so that a resumed run computes
    what it computed before.

    Args:
        setting: true, false, or auto: on an x86 processor whose memory is at least four times the
            size of the copies.
    Raises: InputError for another setting, or if packing is asked for and not possible.
    """
    check(setting)
    there = torch.backends.mkldnn.is_available() and hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    )
    if setting is True and not there:
        raise InputError(
            "pack=true needs a PyTorch built with oneDNN: give pack=auto or pack=false"
        )
    if setting != "auto" or not there:
        return setting is True
    return platform.machine().lower() in ("x86_64", "amd64") and size * 4 <= _memory()


def _memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0
