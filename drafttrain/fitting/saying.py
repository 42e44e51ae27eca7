"""What a fit says on the console."""

from __future__ import annotations

from drafttrain.processes import rank
from drafttrain.reporting.console import console
from drafttrain.runs import hidden


def say(text: str) -> None:
    """A line on rank 0."""
    if rank() == 0:
        console().print(f"fit: {hidden(text)}", markup=False, highlight=False)
