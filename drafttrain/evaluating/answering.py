"""The target's answers on which a door counts acceptance, with what it says and shows of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drafttrain.decoding.replaying import Replays, asked_replays
from drafttrain.reporting.console import track
from drafttrain.target.model import Target
from drafttrain.target.prompts import Source


def replays_for(
    target: Target,
    prompts: Sequence[Sequence[int]],
    limit: int,
    answers: str | None,
    source: Source,
    say: Callable[[str], None],
) -> Replays:
    """The stand-ins for some prompts, see `asked_replays`.

    Args:
        limit: new tokens of an answer; answers: the folder that was asked for.
        source: what the prompts are of.
    """
    return asked_replays(
        target,
        prompts,
        limit,
        answers,
        rows=source.data,
        say=say,
        watch=lambda items, what: track(items, description=what, unit="prompts"),
    )
