"""What vLLM imports into each of its workers by name (`worker_extension_cls`), before a model is
loaded there."""

from __future__ import annotations

from loading import LOADED, watch
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

watch(DefaultModelLoader)


class Loading:
    def tensors_read(self, path: str) -> dict[str, list[str]] | None:
        """`read` and `unread` names of a checkpoint's tensors; None if it was not loaded."""
        return LOADED.get(path)
