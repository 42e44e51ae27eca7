"""A drafter whose distribution depends on the whole path, with a brute-force twin of its steps."""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.tree.candidates import Candidates

Path = tuple[int, ...]


class Toy:
    """Depends on the path through the parent's output, and through what the mask lets it read. Its
    draft vocabulary is the target's without id 0."""

    def __init__(self, width: int, *, scale: float = 2.0, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.words = torch.randn(width, 6, generator=g, dtype=torch.float64)
        self.mix = torch.randn(6, 6, generator=g, dtype=torch.float64)
        self.head = scale * torch.randn(6, width, generator=g, dtype=torch.float64)
        self.ids = torch.arange(1, width + 1)
        self.asked: list[int] = []

    def candidates(self, hidden: Tensor) -> Candidates:
        """(b m 6) outputs -> candidates of their children."""
        return Candidates(hidden @ self.head, len(self.ids) + 1, self.ids)

    def expand(
        self, state: list[Tensor], tokens: Tensor, hidden: Tensor, depth: int, tree_mask: Tensor
    ) -> tuple[Tensor, Candidates]:
        self.asked.append(tokens.shape[1])
        state.append(self.words[tokens - 1])
        read = torch.cat(state, 1)  # b t d
        assert tree_mask.shape[-2:] == (tokens.shape[1], read.shape[1])
        out = torch.tanh(hidden @ self.mix + tree_mask.double() @ read)
        return out, self.candidates(out)

    def log_probs(self, anchor: Tensor, path: Path) -> Tensor:
        """(w) log-probabilities of a path's children, one step at a time."""
        out, read = anchor, torch.zeros(6, dtype=torch.float64)
        for token in path:
            read = read + self.words[token]
            out = torch.tanh(out @ self.mix + read)
        return (out @ self.head).float().log_softmax(-1)
