"""What a fit says on the console."""

from __future__ import annotations

from drafttrain.processes import rank
from drafttrain.reporting.console import console


def say(text: str) -> None:
    """A line on rank 0."""
    if rank() == 0:
        console().print(f"fit: {text}", markup=False, highlight=False)
