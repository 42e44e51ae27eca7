"""Prompts to decode from, as a target's ids: the held-out part of a conversation set, or a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from drafttrain.checks import path_of
from drafttrain.data import named
from drafttrain.data.conversations import (
    HELD_OUT,
    MANIFEST,
    ConversationSet,
    check_vocabulary,
    read_set,
)
from drafttrain.data.datamodule import BUILTIN, set_folder, words_of
from drafttrain.data.numbered import (
    Prompts,
    Skipped,
    by_reason,
    nothing_left,
    some,
    spelt_by_rows,
    unread_columns,
)
from drafttrain.data.prompts import PromptFile, Watch, unwatched
from drafttrain.data.template import ChatPieces
from drafttrain.errors import InputError
from drafttrain.target import fingerprint
from drafttrain.target.model import Target, outside
from drafttrain.target.turns import Turn, later_turns, turn_words


@dataclass
class Source:
    """Where prompts come from: a set of conversations, or a file."""

    label: str
    data: ConversationSet | None = None
    prompts: Prompts | None = None
    left_out: list[str] = field(default_factory=list)
    by_turn: list[int] = field(default_factory=list)
    """Of every prompt that `ids` gave, the turn of its conversation."""
    categories: list[str] = field(default_factory=list)
    """Of every prompt that `ids` gave, its kind of task, NO_CATEGORY where it names none; empty
    where they are too many to be kinds."""
    turns_left_out: int = 0
    """Later turns that `ids` did not give."""
    watch: Watch = unwatched
    """Shows rows to a person as they are read."""

    @property
    def name(self) -> str:
        """The label without folders, which are of no interest elsewhere."""
        return self.label if self.label.startswith(BUILTIN) else Path(self.label).name

    def ids(
        self,
        target: Target,
        limit: int | None,
        say: Callable[[str], None],
        *,
        turns: int | None = 1,
        answer: int = 128,
    ) -> list[list[int]]:
        """Prompts as token ids, those that leave no room in the target's context left out and
        counted. All first turns come first, then all second ones, and so on.

        Args:
            limit: at most this many; None takes all.
            say: prints what was left out.
            turns: of a conversation, at most; None takes all. `by_turn` then has the turn of every
                prompt, and `turns_left_out` what was not taken.
            answer: tokens at most of an answer that the target writes to an earlier turn, where
                the prompts come without answers.

        Raises: InputError if the set was written by another target, or if no prompt is left.
        """
        found, later = (
            self._of_file(target, limit, turns, answer)
            if self.data is None
            else self._of_set(target, limit, turns, say)
        )
        spelt = spelt_by_rows(self.prompts, target.tokenizer) if self.prompts else {}
        for token, spelling in spelt.items():
            say(f"rows {some(spelling)} spell {token}, which is read as the control token")
        kept = [one for one in found if len(one[2]) < target.context]
        if len(kept) < len(found):
            rows = [str(number) for number, _, ids in found if len(ids) >= target.context]
            self.left_out.append(
                f"{len(rows)} prompts as long as the target's context of {target.context_words}: "
                f"{', '.join(rows[:8])}"
            )
        if not kept:
            raise InputError(f"{self.label}: nothing to evaluate; {'; '.join(self.left_out)}")
        self.by_turn = [turn for _, turn, _ in kept]
        self.categories, note = named.kinds(self._categories([number for number, *_ in kept]))
        if note:
            say(note)
        self.turns_left_out = later - sum(turn > 1 for turn in self.by_turn)
        if later:
            say(f"prompts by turn: {turn_words(self.by_turn)}")
        if self.turns_left_out:
            self.left_out.append(
                f"{self.turns_left_out} later turns (past limit or turns, without room, or where "
                "the template shows the earlier answer otherwise)"
            )
        for reason in self.left_out:
            say(f"left out {reason}")
        return [ids for *_, ids in kept]

    def _categories(self, numbers: Sequence[int]) -> list[str]:
        """The kinds of task of rows with these numbers."""
        if self.data is not None:
            return self.data.categories_asked(numbers)
        assert self.prompts is not None
        return [self.prompts.category.get(number, named.NO_CATEGORY) for number in numbers]

    def _of_set(
        self, target: Target, limit: int | None, turns: int | None, say: Callable[[str], None]
    ) -> tuple[list[Turn], int]:
        """Turns of the held-out rows, and how many later ones there are."""
        assert self.data is not None
        # A tuned target is asked what its original was asked.
        own = (target.original or target).fingerprint
        fingerprint.refuse_other(
            self.data.manifest["target"]["fingerprint"], own, self.label, own=target.tokenizer
        )
        check_vocabulary(self.data, target.vocab_size, self.label)
        every = [one for one in self.data.asked() if one[2]]
        found = [one for one in every if turns is None or one[1] <= turns][:limit]
        if not found:
            raise InputError(
                f"{self.label} has no held-out conversations to decode from: give a file of prompts"
            )
        places = self.data.indices(HELD_OUT)
        sources = self.data.by_source(places[number - 1] for number, *_ in found)
        if sources:
            say(f"{len(found)} held-out prompts{words_of(sources)}")
        return found, sum(turn > 1 for _, turn, _ in every)

    def _of_file(
        self, target: Target, limit: int | None, turns: int | None, answer: int
    ) -> tuple[list[Turn], int]:
        """Turns of a file's rows, and how many later ones there are."""
        assert self.prompts is not None
        first = self._encoded(target, limit)
        found = [(number, 1, ids) for number, ids in first]
        found += self._later(target, first, limit, turns, answer)
        later = sum(len(p.users) - 1 for _, p in self.prompts.rows if p is not None)
        return found, later

    def _later(
        self,
        target: Target,
        first: list[tuple[int, list[int]]],
        limit: int | None,
        turns: int | None,
        answer: int,
    ) -> list[Turn]:
        """Later turns of a file's rows, as far as the limit has room for any."""
        assert self.prompts is not None
        room = None if limit is None else limit - len(first)
        if room == 0:
            return []
        prompts = {number: prompt for number, prompt in self.prompts.rows if prompt is not None}
        rows = [
            (number, replace(prompts[number], users=prompts[number].users[:turns]), ids)
            for number, ids in first
        ]
        pieces = ChatPieces(target.tokenizer, target.stop_ids)
        return later_turns(target, pieces, rows, answer=answer)[:room]

    def _encoded(self, target: Target, limit: int | None) -> list[tuple[int, list[int]]]:
        """The first turn of every row of a file."""
        assert self.prompts is not None
        pieces = ChatPieces(target.tokenizer, target.stop_ids)
        found: list[tuple[int, list[int]]] = []
        refused = list(self.prompts.skipped)
        for number, prompt in self.watch(self.prompts.rows):
            if prompt is None or (limit is not None and len(found) == limit):
                continue
            try:
                ids = pieces.given(prompt.arguments).first_prompt(
                    [*prompt.lead(), {"role": "user", "content": prompt.users[0]}]
                )
                if not ids:
                    raise InputError("no tokens")
                if max(ids) >= target.vocab_size:
                    raise InputError(outside(max(ids), target))
                found.append((number, ids))
            except InputError as error:
                refused.append(Skipped(number, str(error)))
        if not found:
            self.prompts.skipped = refused
            raise nothing_left(self.label, self.prompts)
        for name, rows in unread_columns(self.prompts, pieces).items():
            self.left_out.append(
                f"column {name} of rows {some(rows)}, which the chat template does not read"
            )
        for what, rows in self.prompts.overlooked.items():
            self.left_out.append(f"{what}, of rows {some(rows)}")
        if refused:
            self.left_out += [
                f"rows {some(rows)}: {reason}" for reason, rows in by_reason(refused).items()
            ]
        return found


def open_prompts(
    prompts: object, columns: dict[str, str | None], watch: Watch = unwatched
) -> Source:
    """Read the prompts' file or set; needs no target.

    Args:
        prompts: `builtin:<name>` or the folder of a conversation set, whose held-out prompts are
            meant; or a file.
        columns: what that file's columns are called, where it is not as usual.
        watch: shows rows to a person as they are read.
    Raises: InputError if it cannot be used.
    """
    if not isinstance(prompts, str) or not prompts.strip():
        raise InputError(
            f"prompts={prompts}: give {BUILTIN}smollm2, the folder of a conversation set, or a file"
        )
    path = path_of("prompts", prompts)
    if prompts.startswith(BUILTIN) or path.is_dir():
        folder = set_folder(prompts, "prompts")
        if path.is_dir() and not (path / MANIFEST).is_file():
            raise InputError(
                f"prompts={prompts} is a folder without {MANIFEST}: give a conversation set or a "
                "file"
            )
        return Source(prompts, data=read_set(folder))
    if not path.is_file():
        raise InputError(
            f"prompts={prompts} does not exist: give {BUILTIN}smollm2, a conversation set or a file"
        )
    found = PromptFile(path=str(path), columns=columns).read(None, watch)
    if not found.rows:
        raise nothing_left(prompts, found)
    return Source(prompts, prompts=found, watch=watch)
