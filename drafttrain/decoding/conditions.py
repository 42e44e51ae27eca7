"""What two measurements must have in common, in addition to how much is decoded, before their
numbers may be put in one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from drafttrain.target.configs import digest
from drafttrain.target.model import Target


def conditions(target: Target, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Plain JSON values: which prompts, the target's precision, where it ran."""
    return {
        "prompts_digest": digest_of(prompts),
        "target_dtype": dtype_name(target.dtype),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
    }


def digest_of(prompts: Sequence[Sequence[int]]) -> str:
    """Equal for equal ids in equal order, whatever file they came from."""
    return digest(*(np.asarray(prompt, dtype="<i8").tobytes() for prompt in prompts))


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """As settings write it; None for a drafter without weights."""
    return None if dtype is None else str(dtype).removeprefix("torch.")
