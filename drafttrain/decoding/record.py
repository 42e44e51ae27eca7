"""What every row has written, where its text ends, and the counts of its rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from drafttrain.decoding.counting import Drafts, count
from drafttrain.errors import InputError
from drafttrain.flow import Tally
from drafttrain.nn.processing import Text
from drafttrain.target.model import Target


@dataclass
class Output:
    """What one row was given and what came of it."""

    ids: list[int] = field(default_factory=list)
    """Generated ids, a stop token included."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """(emitted, of these accepted drafts) of every target pass, the prefill first."""
    nodes: list[tuple[int, ...]] = field(default_factory=list)
    """For every pass but the prefill, the nodes of the plan's tree that those drafts were."""
    finish: str = "length"
    """"stop", "length" (the limit asked for) or "context" (the target's own)."""
    tally: Tally = field(default_factory=Tally)
    """This row's counts; seconds are kept for the whole batch."""


Listener = Callable[[int, list[int], int], None]
"""(row, newly emitted ids, how many of the first of them were drafted)."""
Ends = Callable[[int, list[int]], bool]
"""(row, what it has written so far, the newest token last): does its text end there?"""


class Record:
    """The outputs of one call of `decode`, row by row.

    Args:
        limit: new tokens per row that were asked for; the target's context may hold fewer.
        stop: tokens that end a text.
        numbers: of the rows, as people and their chance know them.
        ends, listener: as for `decode`.
    Raises: InputError for a prompt that the target cannot continue.
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        *,
        limit: int,
        stop: frozenset[int],
        numbers: Sequence[int],
        listener: Listener | None,
        ends: Ends | None,
    ) -> None:
        _check_prompts(target, prompts)
        self.prompts = [list(prompt) for prompt in prompts]
        self.outputs = [Output() for _ in prompts]
        self.limits = [min(limit, target.context - len(prompt)) for prompt in self.prompts]
        self.stop, self.numbers = stop, numbers
        self._asked, self._listener, self._ends = limit, listener, ends

    def room(self, row: int) -> int:
        """Tokens that a row may still emit."""
        return self.limits[row] - len(self.outputs[row].ids)

    def text(self, rows: Sequence[int], device: torch.device) -> Text:
        """Prompts and answers so far, for policies that read them."""
        answers = [self.outputs[row].ids for row in rows]
        return Text.of([self.prompts[row] for row in rows], answers, sorted(self.stop), device)

    def written(self, row: int) -> tuple[list[int], str]:
        """A row's prompt and answer so far, and what people call it."""
        answer = self.outputs[row].ids
        name = f"prompt {self.numbers[row]}" + (" with its answer" if answer else "")
        return self.prompts[row] + answer, name

    def texts(self) -> list[list[int]]:
        """Every prompt with its answer, where there is one."""
        pairs = zip(self.prompts, self.outputs, strict=True)
        return [prompt + output.ids for prompt, output in pairs if output.ids]

    def tally(self) -> Tally:
        """The counts of all rows, without seconds."""
        total = Tally()
        for output in self.outputs:
            total += output.tally
        return total

    def emit(self, row: int, new: list[int], drafts: Drafts | None, deepest: int) -> bool:
        """Cut new tokens at a stop token and at the limit, and record them; whether the row goes
        on.

        Args:
            new: accepted drafts, and last the token that the target chose.
            drafts: None for the prefill, which is no round.
            deepest: depth of the plan's tree.
        """
        output, room, accepted = self.outputs[row], self.room(row), len(new) - 1
        end = self._end_of(row, new[:room])
        stopped, full = end is not None, len(new) >= room
        if end is not None:
            new, output.finish = new[:end], "stop"
        elif full:
            new = new[:room]
            output.finish = "length" if self.limits[row] == self._asked else "context"
        # A round's last place is the target's own, so drafts deeper than room - 1 could not count.
        # They are there only because neighbours have more room, and a row's counts must not depend
        # on its neighbours.
        kept = min(accepted, len(new), room - 1)
        output.ids += new
        output.runs.append((len(new), kept))
        if drafts is not None:
            output.nodes.append(drafts.nodes[:kept])
            # A draft that was accepted and cut off leaves nothing to refuse, nor does a stop token
            # that was drafted.
            cut = kept < accepted or (stopped and len(new) == kept)
            count(
                output.tally,
                min(deepest, room - 1),
                drafted=drafts.size,
                accepted=kept,
                emitted=len(new),
                refused=drafts.has_next and not cut,
            )
        if self._listener:
            self._listener(row, new, kept)
        return not (stopped or full)

    def _end_of(self, row: int, new: list[int]) -> int | None:
        """How many of the new tokens belong to a text that ends in them; None if it goes on."""
        for length, token in enumerate(new, start=1):
            if token in self.stop or self._ends_with(row, new[:length]):
                return length
        return None

    def _ends_with(self, row: int, new: list[int]) -> bool:
        return self._ends is not None and self._ends(row, self.outputs[row].ids + new)


def _check_prompts(target: Target, prompts: Sequence[Sequence[int]]) -> None:
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise InputError(
                f"prompt {number} is empty: at least one token is needed to decode from"
            )
        if len(prompt) >= target.context:
            raise InputError(
                f"prompt {number} has {len(prompt)} tokens, the target's context holds "
                f"{target.context_words}: shorten it"
            )
        if not 0 <= min(prompt) <= max(prompt) < target.vocab_size:
            raise InputError(
                f"prompt {number} has an id outside the target's vocabulary "
                f"0..{target.vocab_size - 1}"
            )
