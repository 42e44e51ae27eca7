"""Prompt lookup: what followed the last tokens where they occurred before is drafted again.

Saxena 2023, "Prompt Lookup Decoding" (https://github.com/apoorvumang/prompt-lookup-decoding).
Learns nothing, has no weights, and reads nothing of the target: good where answers repeat their
prompts (summaries, code, questions about a text).

Departs from the source, which copies one stretch of text, the earliest that is long enough: all
places where the longest known n-gram occurred are followed at once, so that different
continuations become a tree; and where they leave room in a tree, those of shorter n-grams are
taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.checks import integer
from drafttrain.drafter.retrieval import Retrieval, RowText
from drafttrain.errors import InputError

PREFER = ("recent", "frequent")
LONGEST = 64
"""Match that is looked for: each length costs a look-up and a key of that length with every token.
`suffix` has no such cost."""


@dataclass(frozen=True, kw_only=True)
class NGramConfig:
    """Settings of `NGram`."""

    max_ngram: int
    """Tokens of the longest match that is looked for."""
    min_ngram: int
    """Tokens of the shortest."""
    prefer: str
    """`recent`, the continuation seen last, or `frequent`, the one seen most often."""
    occurrences: int
    """Places that are followed for each length of match, the most recent ones: they bound the time
    of a round."""

    def __post_init__(self) -> None:
        integer("max_ngram", self.max_ngram, 1, LONGEST)
        integer("min_ngram", self.min_ngram, 1)
        integer("occurrences", self.occurrences, 1)
        if self.min_ngram > self.max_ngram:
            raise InputError(
                f"min_ngram={self.min_ngram} is above max_ngram={self.max_ngram}: the shortest "
                "match cannot be the longer one"
            )
        if self.prefer not in PREFER:
            raise InputError(f"prefer={self.prefer}: give one of {', '.join(PREFER)}")


class NGram(Retrieval):
    """Follows the places where the last `max_ngram` tokens, or fewer, down to `min_ngram`, occurred
    before.

    Continuations of a node are ranked by the longest match that leads to them; equals by `prefer`,
    then the most recent first.
    """

    Config = NGramConfig
    config: NGramConfig

    def memory(self) -> NGramText:
        return NGramText(self.config)


Places = list[tuple[int, int]]
"""(index of a token in the text, length of the match that leads to it), the longest match first,
then the most recent place."""


class NGramText(RowText):
    """A row's text, and for every n-gram in it the places after it. Appending a token costs a
    look-up for each length."""

    def __init__(self, settings: NGramConfig) -> None:
        self.ids: list[int] = []
        self.lengths = range(settings.min_ngram, settings.max_ngram + 1)
        self.frequent, self.occurrences = settings.prefer == "frequent", settings.occurrences
        self._after: dict[tuple[int, ...], list[int]] = {}

    def append(self, token: int) -> None:
        ids, here = self.ids, len(self.ids)
        for n in self.lengths:
            if n > here:
                break
            # What ends just before this token is followed from now on.
            self._after.setdefault(tuple(ids[here - n :]), []).append(here)
        ids.append(token)

    def root(self) -> Places | None:
        found: dict[int, int] = {}
        for n in reversed(self.lengths):
            after = self._after.get(tuple(self.ids[-n:])) if n <= len(self.ids) else None
            for place in reversed(after[-self.occurrences :] if after else ()):
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
        total = sum(map(len, groups.values()))
        return [
            (token, len(places) / total, [(place + 1, n) for place, n in places])
            for token, places in ranked[:most]
        ]
