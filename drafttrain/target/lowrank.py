"""The low-rank change that joint training makes to a target's weights, as plain tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from drafttrain.target.configs import digest


@dataclass(frozen=True)
class Adapter:
    """W grows by alpha / rank * B A for every linear W of the decoder layers that is named."""

    rank: int
    alpha: float
    linears: tuple[str, ...]
    """Last parts of the linears' names, such as q_proj."""
    tensors: Mapping[str, Tensor]
    """{"<module>.A": (r i), "<module>.B": (o r)}, float32 on the CPU, for every such linear of
    every layer."""

    @property
    def digest(self) -> str:
        """Of every value: a target with another adapter is another target."""
        parts = [f"{self.rank} {float(self.alpha)!r} {' '.join(self.linears)}".encode()]
        for name, tensor in sorted(self.tensors.items()):
            parts += [name.encode(), tensor.contiguous().numpy().tobytes()]
        return digest(*parts)

    @property
    def size(self) -> int:
        """Numbers in it."""
        return sum(tensor.numel() for tensor in self.tensors.values())
