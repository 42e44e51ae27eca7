"""A fault of a directory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What is wrong with a directory."""

    name: str
    """Of the fault; it stays the same between versions."""
    said: str
    """What was found, what comes of it, and what is needed."""
    fatal: bool = True
    """False: it works, but for a reason that may go away."""
