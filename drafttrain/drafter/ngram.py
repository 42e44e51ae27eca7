"""Prompt lookup: what followed the last tokens where they stood before is drafted again.

Saxena 2023, "Prompt Lookup Decoding" (https://github.com/apoorvumang/prompt-lookup-decoding).
Learns nothing, has no weights, and reads nothing of the target: good where answers repeat their
prompts (summaries, code, questions about a text).

Departs from the source, which copies one stretch of text, the earliest that is long enough: all
places where the longest known n-gram stood are followed at once, so that different continuations
become a tree; and where a tree has room that they leave free, those of shorter n-grams are taken.
"""

from __future__ import annotations

from typing import Any

from drafttrain.checks import integer
from drafttrain.drafter.base import Retrieval, RowText
from drafttrain.errors import InputError
from drafttrain.target.model import Target

PREFER = ("recent", "frequent")
LONGEST = 64
"""Match that is looked for: each length costs a look-up and a key of that length with every token.
`suffix` has no such cost."""


class NGram(Retrieval):
    """Follows the places where the last `max_ngram` tokens, or fewer, down to `min_ngram`, stood
    before.

    Continuations of a node are ranked by the longest match that leads to them; among equals by
    `prefer`, then the most recent first.

    Args:
        max_ngram, min_ngram: the longest and the shortest match that is looked for.
        prefer: `recent`, the continuation seen last, or `frequent`, the one seen most often.
        occurrences: places that are followed for each length of match, the most recent ones: they
            bound the time of a round.
    """

    def __init__(
        self,
        target: Target,
        *,
        max_ngram: int = 3,
        min_ngram: int = 1,
        prefer: str = "frequent",
        occurrences: int = 32,
    ) -> None:
        super().__init__(target)
        integer("max_ngram", max_ngram, 1, LONGEST)
        integer("min_ngram", min_ngram, 1)
        integer("occurrences", occurrences, 1)
        if min_ngram > max_ngram:
            raise InputError(
                f"min_ngram={min_ngram} is above max_ngram={max_ngram}: the shortest match cannot "
                f"be the longer one"
            )
        if prefer not in PREFER:
            raise InputError(f"prefer={prefer}: give one of {', '.join(PREFER)}")
        self.max_ngram, self.min_ngram, self.prefer, self.occurrences = (
            max_ngram,
            min_ngram,
            prefer,
            occurrences,
        )

    def settings(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name in ("max_ngram", "min_ngram", "prefer", "occurrences")
        }

    def memory(self) -> NGramText:
        return NGramText(self)


Places = list[tuple[int, int]]
"""(index of a token in the text, length of the match that leads to it), the longest match first,
then the most recent place."""


class NGramText(RowText):
    """A row's text, and for every n-gram in it the places behind it. Appending a token costs a
    look-up for each length."""

    def __init__(self, settings: NGram) -> None:
        self.ids: list[int] = []
        self.lengths = range(settings.min_ngram, settings.max_ngram + 1)
        self.frequent, self.occurrences = settings.prefer == "frequent", settings.occurrences
        self._behind: dict[tuple[int, ...], list[int]] = {}

    def append(self, token: int) -> None:
        ids, here = self.ids, len(self.ids)
        for n in self.lengths:
            if n > here:
                break
            # What ends just before this token is followed from now on.
            self._behind.setdefault(tuple(ids[here - n :]), []).append(here)
        ids.append(token)

    def root(self) -> Places | None:
        found: dict[int, int] = {}
        for n in reversed(self.lengths):
            behind = self._behind.get(tuple(self.ids[-n:])) if n <= len(self.ids) else None
            for place in reversed(behind[-self.occurrences :] if behind else ()):
                found.setdefault(place, n)
        return list(found.items()) or None

    def children(self, node: Places, most: int) -> list[tuple[int, float, Places]]:
        ids, groups = self.ids, dict[int, Places]()
        for place, n in node:
            if place < len(ids):
                groups.setdefault(ids[place], []).append((place, n))
        ranked = list(groups.items())
        if self.frequent:
            # The first place of a group has its longest match; sorting keeps the more recent of
            # equals first.
            ranked.sort(
                key=lambda group: (-group[1][0][1], -sum(n == group[1][0][1] for _, n in group[1]))
            )
        whole = sum(map(len, groups.values()))
        return [
            (token, len(places) / whole, [(place + 1, n) for place, n in places])
            for token, places in ranked[:most]
        ]
