"""Generated ids as text, while they come."""

from __future__ import annotations

from typing import Any

_UNFINISHED = "\ufffd"
_LONGEST_CHARACTER = 8
"""Tokens after which text that is no complete character is shown as it is."""


class Unfolding:
    """Ids to text, piece by piece; bytes of an unfinished character wait for the rest of it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.drafted: list[bool] = []
        self.before = self.shown = 0
        """Ids from `before` on are decoded for the next piece, those before `shown` have been
        shown."""

    def add(self, token: int, drafted: bool) -> tuple[str, bool] | None:
        """The text that is complete now, and whether the token that completed it was drafted; None
        while none is."""
        self.ids.append(token)
        self.drafted.append(drafted)
        return self._piece(force=len(self.ids) - self.shown >= _LONGEST_CHARACTER)

    def rest(self) -> tuple[str, bool] | None:
        """What still waits at the end."""
        return self._piece(force=True) if self.shown < len(self.ids) else None

    def _piece(self, *, force: bool) -> tuple[str, bool] | None:
        old = self._decode(self.ids[self.before : self.shown])
        new = self._decode(self.ids[self.before :])
        if new.endswith(_UNFINISHED) and not force:
            return None
        drafted = self.drafted[-1]
        # The last shown token stays, since a word's blank may depend on what comes before it.
        self.before, self.shown = self.shown, len(self.ids)
        return new[len(old) :], drafted

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
