"""The target's answers at temperature 0: written once, found in sets, kept in folders.

They are a conversation set like any other: a row for each prompt, its answer the supervised part.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from drafttrain.checks import pasted
from drafttrain.data.conversations import ConversationSet, Row, read_set, rows_of, write_set
from drafttrain.errors import InputError, NotFinite
from drafttrain.nn import finite
from drafttrain.nn.sampling import Policy
from drafttrain.target import fingerprint, generation
from drafttrain.target.embedded import cache_dir
from drafttrain.target.model import Target
from drafttrain.target.replay import Answer, Answers

SLOTS = 16
"""Prompts answered at the same time."""
Watch = Callable[[Sequence[int], str], Iterable[int]]
"""(items, what is done) -> the items, shown to a person as they are worked through."""


def _unwatched(items: Sequence[int], _what: str) -> Iterable[int]:
    return items


def write(
    target: Target,
    prompts: Sequence[Sequence[int]],
    limit: int,
    *,
    slots: int = SLOTS,
    watch: Watch = _unwatched,
) -> Answers:
    """Let the target answer, at temperature 0.

    Args:
        limit: new tokens per answer, a stop token included; its context may hold fewer.
    Raises: InputError for a prompt that is empty or leaves no room in the context, and for values
        of the target that are not finite.
    """
    wanted = list(dict.fromkeys(tuple(prompt) for prompt in prompts))
    for number, prompt in enumerate(wanted):
        if not 0 < len(prompt) < target.context:
            raise InputError(
                f"prompt {number} has {len(prompt)} tokens; an answer needs at least 1, and room "
                f"in the target's context of {target.context_words}"
            )
    written = _written(target, wanted, limit, slots)
    found = dict(next(written) for _ in watch(range(len(wanted)), "prompts answered"))
    return {prompt: found[prompt] for prompt in wanted}


def _written(
    target: Target, prompts: Sequence[tuple[int, ...]], limit: int, slots: int
) -> Iterator[tuple[tuple[int, ...], Answer]]:
    """Prompts with their answers, in the order in which these end."""
    if not prompts:
        return
    ended: list[tuple[tuple[int, ...], Answer]] = []

    def script(number: int, prompt: tuple[int, ...]) -> generation.Script:
        room = min(limit, target.context - len(prompt))
        try:
            ids = yield generation.Segment(list(prompt), room, Policy(), target.stop_ids)
        except NotFinite as error:
            raise finite.fault(target, error.ids, f"prompt {number}") from error
        ended.append((prompt, _answer(target, prompt, ids)))

    scripts = ((script(n, prompt), random.Random(0)) for n, prompt in enumerate(prompts))
    capacity = max(map(len, prompts)) + limit + 2
    for _ in generation.run(target, scripts, slots=min(slots, len(prompts)), capacity=capacity):
        yield from ended
        ended.clear()
    yield from ended


def _answer(target: Target, prompt: Sequence[int], ids: Sequence[int]) -> Answer:
    ended = ids[-1] in target.stop_ids or len(prompt) + len(ids) >= target.context
    return Answer(tuple(ids), ended)


def of_set(data: ConversationSet, target: Target, what: str) -> Answers:
    """Every answer of a set that is the target's own at temperature 0, turn by turn.

    Args:
        what: the set's name in messages.
    Raises: InputError for a set of another target, dtype or chat template.
    """
    fingerprint.refuse_other(
        data.manifest["target"]["fingerprint"],
        target.fingerprint,
        what,
        dtype=True,
        mode=True,
        own=target.tokenizer,
    )
    found: Answers = {}
    for row in rows_of(data):
        for start, end in row.spans if row.temperature == 0 else ():
            prompt = row.ids[:start]
            if prompt:
                found[prompt] = _answer(target, prompt, row.ids[start:end])
    return found


def in_folder(
    folder: Path, target: Target, prompts: Sequence[Sequence[int]], limit: int
) -> Answers:
    """The answers to some prompts out of a set in a folder.

    Raises: InputError for a set of another target, and where an answer lacks or is too short.
    """
    known = of_set(read_set(folder), target, f"{folder}")
    wanted = [tuple(prompt) for prompt in prompts]
    lacking = [p for p in wanted if p not in known or not known[p].covers(limit)]
    if lacking:
        short = sum(prompt in known for prompt in lacking)
        few = f", {short} of them shorter than {limit} tokens" if short else ""
        raise InputError(
            f"{folder} lacks the target's answers at temperature 0 to {len(lacking)} of "
            f"{len(wanted)} prompts{few}: write them with python -m drafttrain.synthesize "
            f"'writing.temperatures=[0]' {pasted('writing.max_answer', limit)}, or leave the "
            "folder out, then they are written here"
        )
    return {prompt: known[prompt] for prompt in wanted}


def cached(
    target: Target,
    prompts: Sequence[Sequence[int]],
    limit: int,
    *,
    known: Answers | None = None,
    slots: int = SLOTS,
    watch: Watch = _unwatched,
) -> tuple[Answers, Path]:
    """The answers to some prompts, written on the first call and read from the cache folder on
    later ones; and where they lie.

    Args:
        known: answers that need not be written.
    """
    wanted = list(dict.fromkeys(tuple(prompt) for prompt in prompts))
    folder = folder_of(target, wanted, limit)
    if folder.is_dir():
        try:
            return in_folder(folder, target, wanted, limit), folder
        except InputError:
            pass  # Damaged, or of an earlier version: it is written again.
    here = {p: a for p, a in (known or {}).items() if a.covers(limit)}
    missing = [prompt for prompt in wanted if prompt not in here]
    here |= write(target, missing, limit, slots=slots, watch=watch)
    answers = {prompt: _cut(here[prompt], limit) for prompt in wanted}
    save(folder, target, answers, limit)
    return answers, folder


def save(folder: Path, target: Target, answers: Answers, limit: int) -> None:
    """Write answers as a conversation set; what lies in the folder is replaced."""
    manifest = {
        "target": {"name": target.name, "fingerprint": target.fingerprint},
        "answers_of": {"temperature": 0, "limit": limit, "stop_ids": list(target.stop_ids)},
    }
    write_set(folder, _rows(answers), manifest=manifest, held_out=0)


def _rows(answers: Answers) -> Iterator[Row]:
    for number, (prompt, answer) in enumerate(answers.items()):
        ids = (*prompt, *answer.ids)
        finish = "stop" if answer.ended else "length"
        yield Row(number, ids, ((len(prompt), len(ids)),), (finish,), 0.0)


def _cut(answer: Answer, limit: int) -> Answer:
    if len(answer.ids) <= limit:
        return answer
    return Answer(answer.ids[:limit], ended=False)


def folder_of(target: Target, prompts: Sequence[Sequence[int]], limit: int) -> Path:
    """Where the answers to these prompts are kept, and their features."""
    listed = list(dict.fromkeys(tuple(prompt) for prompt in prompts))
    what = json.dumps([target.fingerprint, listed, limit, target.stop_ids], sort_keys=True)
    return cache_dir() / "answers" / hashlib.sha256(what.encode()).hexdigest()[:24]
