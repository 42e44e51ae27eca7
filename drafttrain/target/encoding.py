"""How features are written down: exactly, in two bytes, or in one byte and a scale for every token.

Scales: a vector of d values is divided by its own largest size over the code's largest, so that
nothing overflows and a token with small features loses nothing to one with large ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Encoding:
    """One way of writing down vectors of d values."""

    dtype: torch.dtype
    """Of the codes."""
    kind: str
    """The same in a safetensors header."""
    largest: float | None = None
    """Largest code; None: codes are the values themselves, without a scale."""

    @property
    def served(self) -> torch.dtype:
        """What decoding gives."""
        return self.dtype if self.largest is None else torch.float32

    def bytes_of(self, width: int) -> int:
        """Bytes of one vector, its scale included."""
        return width * self.dtype.itemsize + (0 if self.largest is None else SCALE.itemsize)

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """(n d) -> codes (n d), and scales (n) where there are any.

        int8: no value moves by more than half its vector's scale. fp8: none by more than 1/16 of
        itself or 2^-10 scales, whichever is more. Values must be finite.
        """
        if self.largest is None:
            return values.to(self.dtype), None
        values = values.to(SCALE)
        scales = self._scales(values.abs())
        codes = (values / scales[:, None]).clamp(-self.largest, self.largest)
        return (codes if self.dtype.is_floating_point else codes.round()).to(self.dtype), scales

    def decode(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        """Codes (... d) and scales (...) -> (... d) in the dtype `served`."""
        values = codes.to(self.served)
        return values if scales is None else values * scales[..., None]

    def rounded(self, values: Tensor) -> Tensor:
        """(n d) float32 as they are read again, in float32."""
        return self.decode(*self.encode(values)).to(values.dtype)

    def loss(self, values: Tensor) -> Tensor:
        """(n d) float32: by how much each value may move, see `encode`."""
        size = values.abs()
        if self.largest is None:
            return size * (0.0 if self.dtype == values.dtype else torch.finfo(self.dtype).eps / 2)
        steps = self._scales(size)[:, None]
        if self.dtype.is_floating_point:
            return torch.maximum(size / 16, steps * 2**-10).broadcast_to(size.shape)
        return (steps / 2).broadcast_to(size.shape)

    def _scales(self, size: Tensor) -> Tensor:
        """(n) for the sizes of vectors (n d): never 0, and so large that no quotient overflows."""
        assert self.largest is not None
        return (size.amax(-1) / self.largest).clamp_min(torch.finfo(SCALE).tiny)


SCALE = torch.float32
ENCODINGS = {
    "float32": Encoding(torch.float32, "F32"),
    "bf16": Encoding(torch.bfloat16, "BF16"),
    "int8": Encoding(torch.int8, "I8", 127.0),
    "fp8": Encoding(torch.float8_e4m3fn, "F8_E4M3", 448.0),
}
"""By name; float32 is exact for targets that compute in it or less."""
