"""Tokens and loss mask side by side, for the eye."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from drafttrain.reporting.console import console


def show_row(title: str, ids: Sequence[int], mask: Sequence[bool], tokenizer: Any) -> None:
    """Print one row, a line for each token: place, id, text as the tokenizer shows it, and whether
    the loss counts it."""
    drawn = Table(title=Text(title), title_justify="left")
    for name, side in (
        ("place", "right"),
        ("id", "right"),
        ("token", "left"),
        ("supervised", "left"),
    ):
        drawn.add_column(name, justify=side)  # type: ignore[arg-type]
    for place, (token, counts) in enumerate(zip(ids, mask, strict=True)):
        style = "green" if counts else "dim"
        shown = repr(tokenizer.decode([token]))[1:-1]
        drawn.add_row(
            str(place),
            str(token),
            Text(shown, style=style),
            Text("yes" if counts else "no", style=style),
        )
    console().print(drawn)
