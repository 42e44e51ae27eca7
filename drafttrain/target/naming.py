"""A target's name for other readers: never a folder of this machine."""

from __future__ import annotations

from pathlib import Path

HUB_IDS = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Hub ids of targets that are known by name."""


def short(name: str) -> str:
    """A target's name; for a directory, its last part."""
    local = Path(name).expanduser()
    return local.resolve().name if local.is_absolute() or local.exists() else name


def public(name: str) -> str:
    """As `short`, or the hub id where it is known."""
    return HUB_IDS.get(name) or short(name)
