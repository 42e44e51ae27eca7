"""Which tensors of a checkpoint reach a model: an engine may pass over one that it has no place
for, without a word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

LOADED: dict[str, dict[str, list[str]]] = {}
"""By the path that a checkpoint was loaded from: the names of its tensors, `read` and `unread`."""

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
"""What makes the same tensor again, perhaps in another dtype."""


class Reads(TorchDispatchMode):
    """While it lasts, counts the elements that are copied out of tensors which are held, of all of
    them or of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.path = ""
        """Of the checkpoint."""
        self._held: list[tuple[str, Tensor]] = []
        self._sizes: dict[str, int] = {}
        self._taken: dict[str, int] = {}

    def hold(self, name: str, tensor: Tensor) -> None:
        """Watch a tensor. It is kept, so that its place in memory is no other's meanwhile."""
        self._held.append((name, tensor))
        self._sizes[name] = tensor.numel()
        self._taken.setdefault(name, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and (name := self._name_of(args[1])):
            self._taken[name] += args[1].numel()
        if func in _COPIES and (name := self._name_of(args[0])):
            self._held.append((name, found))
        return found

    def summary(self, model: nn.Module) -> dict[str, list[str]]:
        """Names of what was read to the last element, or was taken as a parameter as it is, and of
        what was not."""
        for tensor in (*model.parameters(), *model.buffers()):
            if (name := self._name_of(tensor)) and tensor.numel() == self._sizes[name]:
                self._taken[name] = tensor.numel()
        found: dict[str, list[str]] = {"read": [], "unread": []}
        for name, size in self._sizes.items():
            found["read" if self._taken[name] >= size else "unread"].append(name)
        return found

    def _name_of(self, tensor: Tensor) -> str | None:
        if tensor.device.type == "meta" or not (place := tensor.data_ptr()):
            return None
        for name, held in self._held:
            start = held.data_ptr()
            if start <= place < start + held.numel() * held.element_size():
                return name
        return None


def watch(loader: Any) -> None:
    """Keep in LOADED what the loading of each checkpoint read.

    Args:
        loader: vLLM's class with `load_model`, which gives the model, and
            `get_all_weights(model_config, ...)`, which it takes the checkpoint's (name, tensor)
            from.
    """
    weights, load = loader.get_all_weights, loader.load_model
    watching: list[Reads] = []

    def get_all_weights(
        self: Any, model_config: Any, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights(self, model_config, *args, **kwargs):
            if watching:
                watching[-1].path = str(model_config.model)
                watching[-1].hold(name, tensor)
            yield name, tensor

    def load_model(self: Any, *args: Any, **kwargs: Any) -> nn.Module:
        with Reads() as reads:
            watching.append(reads)
            try:
                model: nn.Module = load(self, *args, **kwargs)
            finally:
                watching.pop()
        LOADED[reads.path] = reads.summary(model)
        return model

    loader.get_all_weights, loader.load_model = get_all_weights, load_model
