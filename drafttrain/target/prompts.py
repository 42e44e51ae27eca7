"""Prompts to decode from, as a target's ids: the held-out part of a conversation set, or a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from drafttrain.checks import path_of
from drafttrain.data.conversations import MANIFEST, ConversationSet, check_vocabulary, read_set
from drafttrain.data.datamodule import BUILTIN, set_folder
from drafttrain.data.prompts import PromptFile, Prompts, Skipped, by_reason, nothing_left, some
from drafttrain.data.template import ChatPieces
from drafttrain.errors import InputError
from drafttrain.target import fingerprint
from drafttrain.target.model import Target, outside


@dataclass
class Source:
    """Where prompts come from: a set of conversations, or a file."""

    label: str
    data: ConversationSet | None = None
    prompts: Prompts | None = None
    left_out: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The label without folders, which are of no interest elsewhere."""
        return self.label if self.label.startswith(BUILTIN) else Path(self.label).name

    def ids(self, target: Target, limit: int | None, say: Callable[[str], None]) -> list[list[int]]:
        """Prompts as token ids, those that leave no room in the target's context left out and
        counted.

        Args:
            limit: at most this many; None takes all.
            say: prints what was left out.

        Raises: InputError if the set was written by another target, or if no prompt is left.
        """
        if self.data is not None:
            # A tuned target is asked what its original was asked.
            own = (target.original or target).fingerprint
            fingerprint.refuse_other(self.data.manifest["target"]["fingerprint"], own, self.label)
            check_vocabulary(self.data, target.vocab_size, self.label)
            found = [
                (number, ids) for number, ids in enumerate(self.data.prompts(limit), start=1) if ids
            ]
            if not found:
                raise InputError(
                    f"{self.label} has no held-out conversations to decode from: give a file of "
                    "prompts"
                )
        else:
            assert self.prompts is not None
            found = self._encoded(target, limit)
        kept = [ids for _, ids in found if len(ids) < target.context]
        if len(kept) < len(found):
            rows = [str(number) for number, ids in found if len(ids) >= target.context]
            self.left_out.append(
                f"{len(rows)} prompts as long as the target's context of {target.context_words}: "
                f"{', '.join(rows[:8])}"
            )
        if not kept:
            raise InputError(f"{self.label}: nothing to evaluate; {'; '.join(self.left_out)}")
        for reason in self.left_out:
            say(f"left out {reason}")
        return kept

    def _encoded(self, target: Target, limit: int | None) -> list[tuple[int, list[int]]]:
        """The first turn of every row of a file."""
        assert self.prompts is not None
        pieces = ChatPieces(target.tokenizer, target.stop_ids)
        found: list[tuple[int, list[int]]] = []
        refused = list(self.prompts.skipped)
        for number, prompt in self.prompts.rows:
            if prompt is None or (limit is not None and len(found) == limit):
                continue
            try:
                ids = pieces.first_prompt(
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
        if refused:
            self.left_out += [
                f"rows {some(rows)}: {reason}" for reason, rows in by_reason(refused).items()
            ]
        return found


def open_prompts(prompts: object, columns: dict[str, str | None]) -> Source:
    """Read the prompts' file or set; needs no target.

    Args:
        prompts: `builtin:<name>` or the folder of a conversation set, whose held-out prompts are
            meant; or a file.
        columns: what that file's columns are called, where it is not as usual.
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
    found = PromptFile(path=str(path), columns=columns).read(None)
    if not found.rows:
        raise nothing_left(prompts, found)
    return Source(prompts, prompts=found)
