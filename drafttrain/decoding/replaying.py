"""Acceptance at temperature 0 from the target's kept answers, in a fraction of decoding's time.

The counts are those of real decoding, one by one, in float32. In lower precision products of
another shape are rounded otherwise, and where two logits nearly tie real decoding may go on with
another text: counts differ by about one in a hundred.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from drafttrain.data.conversations import ConversationSet
from drafttrain.decoding.measure import Measurement, Prompts, Watch, measure_acceptance, unwatched
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.remembered import tokens_remembered
from drafttrain.errors import InputError
from drafttrain.flow import Needs
from drafttrain.target import answers, fingerprint
from drafttrain.target.model import Target
from drafttrain.target.replay import Answer, Answers, Replay, keep
from drafttrain.tree.topology import Tree

_AT_ONCE = 1 << 16
"""Tokens of the rows that are replayed together."""


def obstacle(drafter: Drafter, plan: Plan) -> str | None:
    """Why acceptance can be measured only by decoding; None where answers can stand in."""
    if not plan.policy.greedy:
        return f"at temperature {plan.policy.temperature:g} what is written is drawn"
    if plan.policy.processes:
        return "the policy's processors read the target's logits"
    if drafter.runs_target:
        return f"{type(drafter).__name__} drafts with layers of the target, which must run"
    return None


def refuse_unread(folder: str | None, drafter: Drafter) -> None:
    """Raise InputError for a folder of answers that a drafter which must be decoded does not
    read."""
    reason = obstacle(drafter, Plan(Tree.chain(1)))
    if folder is not None and reason is not None:
        raise InputError(f"answers={folder} would not be read: {reason}")


class Replays:
    """The stand-ins of one target for some prompts; their features are read once for all drafters
    that need the same.

    Args:
        answers: gives the target's answers, at the first time that they are needed.
        folder: where their features are kept from one run to the next; None keeps none.
    """

    def __init__(
        self, target: Target, answers: Callable[[], Answers], folder: Path | None = None
    ) -> None:
        self.target, self._answers, self._folder = target, answers, folder
        self._made: Replay | None = None

    @cached_property
    def answers(self) -> Answers:
        """Of all prompts."""
        return self._answers()

    def of(self, needs: Needs) -> Replay:
        """The stand-in with these features, and those that it had before."""
        if self._made is None:
            self._made = Replay(self.target, keep(self.target, self.answers, needs, self._folder))
        elif not self._made.serves(needs):
            had = self._made.kept
            wider = Needs(
                last_hidden=needs.last_hidden or had.hidden.shape[-1] > 0,
                layers=tuple(sorted({*needs.layers, *had.layers})),
            )
            self._made = None  # Its features need not be held while others are read.
            self._made = Replay(self.target, keep(self.target, self.answers, wider, self._folder))
        return self._made

    def measure(
        self, drafter: Drafter, prompts: Prompts, plan: Plan, **settings: Any
    ) -> Measurement:
        """See `replay_acceptance`."""
        return replay_acceptance(self.of(drafter.needs), drafter, prompts, plan, **settings)


def replay_acceptance(
    replay: Replay,
    drafter: Drafter,
    prompts: Prompts,
    plan: Plan,
    *,
    max_new_tokens: int,
    batch: int = 16,
    stop_ids: Sequence[int] | None = None,
    watch: Watch = unwatched,
) -> Measurement:
    """`measure_acceptance` without the target's passes. More rows go together than where it reads
    them, since each costs little.

    Args:
        batch: the least number of rows that go together; exactly so many with a drafter that
            remembers texts, where later batches see those of earlier ones.

    Raises: InputError for a plan or drafter that must be decoded, features that the drafter needs
        and that were not kept, and answers that lack or are too short.
    """
    reason = obstacle(drafter, plan)
    if reason is None and not replay.serves(drafter.needs):
        needs = drafter.needs
        wanted = ["the last hidden state"] if needs.last_hidden else []
        wanted += [f"layer {layer}" for layer in needs.layers]
        reason = f"{type(drafter).__name__} reads {', '.join(wanted)}, which was not all kept"
    if reason := reason or replay.lacks(prompts, max_new_tokens, stop_ids):
        raise InputError(f"acceptance cannot be replayed: {reason}")
    if not tokens_remembered(drafter):
        longest = max((len(prompt) for prompt in prompts), default=0) + max_new_tokens
        batch = max(batch, _AT_ONCE // longest)
    found = measure_acceptance(
        replay,
        drafter,
        prompts,
        plan,
        max_new_tokens=max_new_tokens,
        batch=batch,
        stop_ids=stop_ids,
        watch=watch,
    )
    return replace(found, replayed=True)


def answered(
    target: Target,
    prompts: Prompts,
    limit: int,
    *,
    rows: ConversationSet | None,
    say: Callable[[str], None],
    watch: Watch = unwatched,
) -> Answers:
    """The target's answers to all prompts: out of a set that holds them, or of the cache folder,
    where those that lack are written.

    Args:
        limit: new tokens of an answer.
        rows: a set, some of whose rows may be this target's at temperature 0, in this dtype.
    """
    began, known = time.monotonic(), dict[tuple[int, ...], Answer]()
    if rows is not None and fingerprint.same(
        rows.manifest["target"]["fingerprint"], target.fingerprint
    ):
        known = answers.of_set(rows, target, "the set")
    ready = [p for p in map(tuple, prompts) if p in known and known[p].covers(limit)]
    where = "the set's own rows"
    if len(ready) == len(prompts):
        known = {prompt: known[prompt] for prompt in ready}
    else:
        known, folder = answers.cached(target, prompts, limit, known=known, watch=watch)
        where = f"{folder}, {time.monotonic() - began:.0f} s"
    dtype, near = str(target.dtype).removeprefix("torch."), ""
    if dtype not in ("float32", "float64"):
        near = f"; in {dtype} near ties may fall otherwise than by decoding, about one in a hundred"
    say(f"acceptance is counted on the target's answers to {len(prompts)} prompts ({where}){near}")
    return known


def asked_replays(
    target: Target,
    prompts: Prompts,
    limit: int,
    folder: str | None,
    *,
    rows: ConversationSet | None = None,
    say: Callable[[str], None],
    watch: Watch = unwatched,
) -> Replays:
    """The stand-ins for some prompts. Answers are written when they are first needed.

    Args:
        limit: new tokens of an answer.
        folder: a set that holds the answers; None: as `answered` finds them.
        rows: the set that the prompts are of, where they are of one.
    Raises: InputError for a folder that does not serve.
    """
    if folder is not None:
        known = answers.in_folder(Path(folder).expanduser(), target, prompts, limit)
        return Replays(target, lambda: known, answers.folder_of(target, prompts, limit))
    return Replays(
        target,
        lambda: answered(target, prompts, limit, rows=rows, say=say, watch=watch),
        answers.folder_of(target, prompts, limit),
    )
