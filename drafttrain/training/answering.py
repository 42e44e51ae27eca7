"""The target's answers to held-out prompts, on which a run counts acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drafttrain.data.conversations import ConversationSet
from drafttrain.decoding.measure import Watch, unwatched
from drafttrain.decoding.replaying import Replays, asked_replays, obstacle
from drafttrain.decoding.speculator import Speculator
from drafttrain.errors import InputError
from drafttrain.training.job import Settings

Say = Callable[[str], None]


def replays_of(
    speculator: Speculator,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    rows: ConversationSet,
    say: Say,
    watch: Watch = unwatched,
) -> Replays | None:
    """The stand-ins on which a run counts acceptance; None where it decodes. Answers are written,
    or read, when they are first needed.

    Raises: InputError for a folder of answers that does not serve, or that would not be read.
    """
    config, limit = settings.eval, settings.longest_answer
    if not config.replay or not prompts or (config.prompts == settings.final.prompts == 0):
        return None
    reason = obstacle(speculator.drafter, speculator.plan)
    if settings.trains_target:
        reason = "the target learns too, so its answers change"
    if reason is not None:
        if config.answers is not None:
            raise InputError(f"eval.answers={config.answers} would not be read: {reason}")
        say(f"acceptance is measured by decoding: {reason}")
        return None
    return asked_replays(
        speculator.target, prompts, limit, config.answers, rows=rows, say=say, watch=watch
    )
