"""Later turns of conversations as prompts: each after the answers to the turns before it.

Where prompts are only the user's side, the target writes those answers, greedily. A set holds them
(`ConversationSet.asked`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence

from drafttrain.data.shapes import Prompt
from drafttrain.data.template import REASONING_END, ChatPieces
from drafttrain.errors import InputError
from drafttrain.nn.sampling import Policy
from drafttrain.target import generation
from drafttrain.target.generation import Script, Segment
from drafttrain.target.model import Target

Turn = tuple[int, int, list[int]]
"""(number of the row, turn, ids up to its answer's first token); turns count from 1."""


def later_turns(
    target: Target,
    pieces: ChatPieces,
    rows: Sequence[tuple[int, Prompt, list[int]]],
    *,
    answer: int,
    slots: int = 8,
) -> list[Turn]:
    """All second turns, then all third ones, and so on.

    A turn is missing, and those after it, where the template refuses it or shows the earlier answer
    otherwise than it was written, and where the target's context has no room for it.

    Args:
        rows: (number, prompt, ids up to its first answer) of each.
        answer: tokens of an earlier answer at most; one that is cut is closed as the template does.
    """
    own = {number: pieces.given(prompt.arguments) for number, prompt, _ in rows}
    more = {number: _later_users(own[number], prompt) for number, prompt, _ in rows}
    todo = [row for row in rows if more[row[0]] and len(row[2]) < target.context]
    if not todo:
        return []
    found: list[Turn] = []
    end = pieces.turn_end()
    closing = [] if end is None else [end]

    def script(number: int, prompt: Prompt, first: list[int]) -> Script:
        text, read = list(first), first
        for turn, later in enumerate(more[number], start=2):
            written = yield Segment(read, answer, Policy(), target.stop_ids)
            text += written
            hidden = not own[number].keeps_reasoning and REASONING_END in pieces.tokenizer.decode(
                written
            )
            if hidden or not own[number].grows(with_system=bool(prompt.system)):
                return
            read = [*([] if written[-1] in target.stop_ids else closing), *later]
            text += read
            if len(text) >= target.context or max(read) >= target.vocab_size:
                return
            found.append((number, turn, list(text)))

    longest = max(
        len(first) + sum(len(ids) + answer + 1 for ids in more[number]) for number, _, first in todo
    )
    scripts = ((script(*row), random.Random(0)) for row in todo)
    capacity = min(longest, target.context) + 2
    for _ in generation.run(target, scripts, slots=min(slots, len(todo)), capacity=capacity):
        pass
    return sorted(found, key=lambda one: (one[1], one[0]))


def _later_users(pieces: ChatPieces, prompt: Prompt) -> list[list[int]]:
    """From after each answer to the next one's first token, up to a turn that the template
    refuses."""
    found = []
    for turn, user in enumerate(prompt.users[1:], start=2):
        try:
            found.append(pieces.answer_to_answer(user, turn, prompt.system))
        except InputError:
            break
    return found


def counted(turns: Iterable[int]) -> dict[str, int]:
    """{turn: prompts}, with names as JSON has them."""
    return {str(turn): count for turn, count in sorted(Counter(turns).items())}


def turn_words(turns: Iterable[int]) -> str:
    """The same in words: "turn 1: 6, turn 2: 6"."""
    return ", ".join(f"turn {turn}: {count}" for turn, count in counted(turns).items())
