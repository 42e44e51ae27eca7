"""Mask ids of drafts that are guessed in parallel, wherever a config has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafttrain.layouts.inspection import Inspection

MASKS = ("pard_token", "mask_token_id", "ptd_token_id", "dspark_noise_token_id")
"""Where parallel draft models have their mask id."""


def check_masks(inspection: Inspection[Any], vocab_size: int | None) -> None:
    """Mask ids of a draft that guesses in parallel are in the vocabulary."""
    inner = inspection.config.get("dflash_config")
    nested = inner.get("mask_token_id") if isinstance(inner, Mapping) else None
    places = {
        **{key: inspection.config.get(key) for key in MASKS},
        "dflash_config.mask_token_id": nested,
    }
    for key, value in places.items():
        if value is None or vocab_size is None:
            continue
        if type(value) is not int or not 0 <= value < vocab_size:
            inspection.add(
                "mask-token-out-of-range",
                f"{key} is {str(value)[:40]}, the vocabulary ends at {vocab_size - 1}: engines "
                "die at the first request",
            )
