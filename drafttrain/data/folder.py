"""The folder a set grows in.

It has these files:

    settings.json
        target fingerprint, prompts and sampling; rows of other settings are never mixed in
    journal-0000.jsonl, ...
        finished rows, one file a process, while the set is being made
    conversations.safetensors, manifest.json
        the set, once every row is there; the journals are then removed
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from drafttrain.data.conversations import (
    MANIFEST,
    TENSORS,
    ConversationSet,
    Row,
    read_set,
    rows_of,
    write_set,
)
from drafttrain.data.growing import GRACE, SETTINGS, GrowingFolder
from drafttrain.data.journal import is_journal, journals
from drafttrain.data.named import NO_CATEGORY
from drafttrain.data.row_journal import Journal, read_journals, write_journal
from drafttrain.errors import InputError

BASE = "journal-base.jsonl"


class SetFolder(GrowingFolder):
    """What is in an output folder, and what is still to be written."""

    parts = ("target", "prompts", "writing")

    def belongs(self, name: str) -> bool:
        return name == TENSORS or super().belongs(name)

    def check(self, *, resume: bool, adopt: bool = False) -> list[str]:
        """As of any such folder; `adopt` says whether journals without settings are taken as made
        with the settings at hand."""
        names = super().check(resume=resume)
        if (
            any(map(is_journal, names))
            and SETTINGS not in names
            and MANIFEST not in names
            and not adopt
        ):
            raise InputError(
                f"out={self.path} holds journals without {SETTINGS}: if they were made with these "
                "very settings and this target, take them over with adopt=true; else give another "
                "folder"
            )
        return names

    def current(self) -> ConversationSet | None:
        """The finished set, if there is one. Raises InputError if it is damaged."""
        if not (self.path / TENSORS).exists() and not (self.path / MANIFEST).exists():
            return None
        return read_set(self.path)

    def finished(self) -> tuple[dict[int, Row], dict[int, str]]:
        """Rows written and rows skipped (with the reason), in journals and in the set."""
        for attempt in range(3):
            rows, skipped = read_journals(self.path)
            try:
                found = self.current()
                break
            except InputError:
                # Rank 0 may just be replacing it, or was killed doing so; the journals are complete
                # then.
                if rows and attempt == 2:
                    return rows, skipped
                if attempt == 2:
                    raise
                time.sleep(0.5)
        if found is not None:
            for row in rows_of(found):
                rows.setdefault(row.row, row)
            for reason, numbers in _skipped_of(found).items():
                for number in numbers:
                    if number not in rows:
                        skipped.setdefault(number, reason)
        return rows, skipped

    def reopen(self, rows: Iterable[Row], skipped: dict[int, str]) -> None:
        """Before rows are added to a finished set: keep its rows as a journal, until the next set
        is complete."""
        if (self.path / MANIFEST).exists() and not (self.path / BASE).exists():
            write_journal(self.path / BASE, rows, skipped)

    def open_journal(self, rank: int) -> Journal:
        return Journal(self.path, rank)

    def await_rows(
        self, wanted: set[int], world: int, say: Callable[[str], None], *, grace: float = GRACE
    ) -> tuple[dict[int, Row], dict[int, str]]:
        """Rank 0: wait until every wanted row is finished, whoever writes it. Arguments and errors
        as in `await_work`."""
        found: tuple[dict[int, Row], dict[int, str]] = {}, {}

        def missing() -> set[int]:
            nonlocal found
            found = self.finished()
            rows, skipped = found
            return wanted - rows.keys() - skipped.keys()

        self.await_work(missing, world, say, what="rows", grace=grace)
        return found

    def write(
        self,
        rows: Iterable[Row],
        manifest: dict[str, Any],
        *,
        held_out: int | Collection[int],
        sources: Mapping[int, str] | None = None,
        categories: Mapping[int, str] | None = None,
    ) -> dict[str, Any]:
        """The set, in place of an earlier one, as `write_set` does; kinds of task that the earlier
        one has are kept. Returns its manifest."""
        return write_set(
            self.path,
            rows,
            manifest=manifest,
            held_out=held_out,
            sources=sources,
            categories={**self._categories(), **(categories or {})},
        )

    def _categories(self) -> dict[int, str]:
        """{row number: its kind of task} of the set that is there."""
        try:
            found = self.current()
        except InputError:
            return {}  # Cut short while it was replaced: its rows are in the journals.
        if found is None or found.category is None:
            return {}
        kinds = {int(row): found.category_of(index) for index, row in enumerate(found.rows)}
        return {row: kind for row, kind in kinds.items() if kind != NO_CATEGORY}

    def clear(self) -> None:
        """Remove what the finished set no longer needs: journals, and scratch files that a kill
        left."""
        for path in (*journals(self.path), *self.path.glob(".*")):
            if is_journal(path.name) or path.name.startswith(
                (f".{TENSORS}-", f".{MANIFEST}-", f".{SETTINGS}-", ".journal-")
            ):
                path.unlink(missing_ok=True)

    @property
    def size(self) -> int:
        """Bytes of the set."""
        return sum((self.path / name).stat().st_size for name in (TENSORS, MANIFEST))


def _skipped_of(data: ConversationSet) -> dict[str, list[int]]:
    """{reason: row numbers} that the target could not write."""
    found = data.manifest.get("not_written", {})
    return {
        str(reason): [n for n in numbers if isinstance(n, int)]
        for reason, numbers in (found.items() if isinstance(found, dict) else ())
        if isinstance(numbers, list)
    }
