"""Tokens and loss mask side by side, for the eye."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from drafttrain.data.conversations import Row
from drafttrain.data.numbered import Prompts
from drafttrain.data.shapes import Prompt
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


def show_rows(rows: Sequence[Row], tokenizer: Any) -> None:
    """Tokens and loss mask, and how the answers were written."""
    for row in rows:
        places = range(len(row.ids))
        mask = [any(start <= place < end for start, end in row.spans) for place in places]
        supervised = f"{row.supervised} of {len(row.ids)} tokens supervised"
        ends = f"answers end by {', '.join(row.finish)}"
        title = f"row {row.row}: {supervised}, temperature {row.temperature}, {ends}"
        show_row(title, row.ids, mask, tokenizer)


def show_prompts(
    prompts: Prompts,
    count: int,
    tokenizer: Any,
    before: list[int],
    read: Callable[[Prompt], list[int]],
) -> None:
    """What the target would read; nothing in it is supervised.

    Args:
        before: ids in front of a user turn that it writes itself.
        read: gives a prompt's ids.
    """
    own = False
    for row, prompt in prompts.rows[:count]:
        if prompt is None:
            if not own:
                title = "before every self-written user turn"
                show_row(title, before, [False] * len(before), tokenizer)
            own = True
            continue
        ids = read(prompt)
        more = f" ({len(prompt.users) - 1} more turns follow)" if len(prompt.users) > 1 else ""
        title = f"row {prompts.places([row])}: prompt of {len(ids)} tokens{more}"
        show_row(title, ids, [False] * len(ids), tokenizer)
    console().print(
        "no rows have been written yet: what is shown is read by the target, the answers are "
        "written by it"
    )
