"""Suffix decoding: what followed the longest suffix of the text where it occurred before, most
frequent first.

Oliaro et al. 2024, "SuffixDecoding" (arXiv:2411.04975). Learns nothing, has no weights, and reads
nothing of the target. Departs from the paper: suffix automata instead of suffix trees; only the
longest match is followed, where the paper scores every length; a request's own text, the texts
decoded earlier and the corpus are one count here, where the paper takes the better of two trees;
and earlier texts, prompt and answer, are looked up only if `remember` asks for it.

The counts rank drafts; they are no probability that a token was drawn with, and no rule sees them.
So what is remembered changes how many drafts are kept, never the distribution of a text: a greedy
one is the target's own, a drawn one has the target's distribution. Which one is drawn may differ
with what is remembered, for the same seed.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.checks import integer
from drafttrain.data.conversations import TRAIN, read_set
from drafttrain.data.datamodule import set_folder
from drafttrain.drafter.automaton import SuffixAutomaton
from drafttrain.drafter.remembered import LOCK, Remembered, Remembers
from drafttrain.drafter.retrieval import Retrieval, RowText
from drafttrain.errors import InputError
from drafttrain.target import fingerprint
from drafttrain.target.model import Target
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import MOST_NODES, Tree

APART = -1
"""Between two texts of a corpus; no token has this id."""
MOST_REMEMBERED = 10_000_000
"""Tokens: some 12 GB of memory."""


@dataclass(frozen=True, kw_only=True)
class SuffixConfig:
    """Settings of `Suffix`."""

    max_match: int
    """Tokens of the longest match that is looked for."""
    min_match: int
    """Tokens of the shortest. A shorter one occurred in more places."""
    deepest: int
    """The deepest tree that can be filled; strings of max_match + deepest tokens are counted."""
    corpus: str | None
    """A conversation set of this target, `builtin:<name>` or a folder, whose training rows count as
    if they came before every text; None is only the text."""
    corpus_tokens: int
    """Rows of the corpus are taken while they have at most that many tokens in all. They travel in
    packages."""
    remember: int
    """Tokens of texts, prompt and answer, that this drafter has decoded, whose places count too:
    the latest ones, as complete texts. 0 looks up none. They are only in memory, at most some
    1.2 kB a token, and are not packaged; other texts see them once the call that decoded them is
    done."""
    corpus_ids: Sequence[int] | None
    """(t) the corpus as a package holds it, its texts apart by -1; None reads `corpus`."""

    def __post_init__(self) -> None:
        integer("max_match", self.max_match, 1, MOST_NODES)
        integer("min_match", self.min_match, 1)
        integer("deepest", self.deepest, 1, MOST_NODES)
        integer("corpus_tokens", self.corpus_tokens, 1)
        integer("remember", self.remember, 0, MOST_REMEMBERED)
        if self.min_match > self.max_match:
            raise InputError(
                f"min_match={self.min_match} is above max_match={self.max_match}: the shortest "
                "match cannot be the longer one"
            )
        if not (self.corpus is None or isinstance(self.corpus, str)):
            raise InputError(
                f"corpus={self.corpus}: needs builtin:<name> or the folder of a conversation set, "
                "or null for none"
            )
        if self.corpus is None and self.corpus_ids is not None:
            raise InputError("corpus_ids are given without the name of their corpus")


class Suffix(Remembers, Retrieval):
    """Drafts the continuations of the longest suffix, of `max_match` to `min_match` tokens, that
    occurred in the text before.

    Continuations of a node are ranked by how often they followed the match and the drafts on the
    path to the node; of equals the one seen last in the text comes first, then the one seen last in
    earlier texts, then in the corpus. Their shares decide which nodes a dynamic tree has.
    """

    Config = SuffixConfig
    config: SuffixConfig
    growths = (Tree, Dynamic, Confident)
    corpus_ids: Tensor | None

    def __init__(self, target: Target, **settings: Any) -> None:
        super().__init__(target, **settings)
        self.register_buffer("corpus_ids", self._corpus())
        self.known = SuffixAutomaton(self.longest)
        """The corpus, the same for all rows."""
        for token in self.config.corpus_ids or ():
            if token == APART:
                self.known.start_text()
            else:
                self.known.append(token)
        self.earlier = self._nothing_remembered()
        """Texts decoded earlier."""

    def _corpus(self) -> Tensor | None:
        """(t) int64 ids of the corpus, which are settings from then on."""
        corpus, given = self.config.corpus, self.config.corpus_ids
        if corpus is None:
            return None
        if given is None:
            ids = _read_corpus(corpus, self.target, self.config.corpus_tokens)
        else:
            ids = torch.as_tensor(given)
        _check_ids(ids, self.target)
        self.config = replace(self.config, corpus_ids=ids.tolist())
        return ids

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "corpus_ids": self.known.size}

    @classmethod
    def deepest(cls, config: SuffixConfig) -> int:
        return config.deepest

    @property
    def longest(self) -> int:
        """Tokens of the longest string that is counted."""
        return self.config.max_match + self.config.deepest

    def memory(self) -> SuffixText:
        most, least = self.config.max_match, self.config.min_match
        others = [Elsewhere(self.known, most)] if self.known.size else []
        if self.earlier is not None:
            others.insert(0, Earlier(self.earlier, most))
        return SuffixText(SuffixAutomaton(self.longest), others, most, least)

    def reading(self) -> contextlib.AbstractContextManager[Any]:
        return super().reading() if self.earlier is None else LOCK

    # What was decoded earlier ---------------------------------------------------------------------
    @property
    def remembers(self) -> int:
        return self.config.remember

    def remember_texts(self, texts: Sequence[Sequence[int]]) -> None:
        if self.earlier is not None:
            with LOCK:
                for text in texts:
                    self.earlier.add(text)

    def without_memory(self) -> Suffix:
        if self.earlier is None:
            return self
        other = copy.copy(self)
        other.earlier = self._nothing_remembered()
        return other

    def _nothing_remembered(self) -> Remembered | None:
        return Remembered(self.remembers, self.longest) if self.remembers else None


class Elsewhere:
    """How much of the end of a row's text occurs in other texts, which are there before it."""

    def __init__(self, automaton: SuffixAutomaton, max_match: int) -> None:
        self.automaton, self.max_match = automaton, max_match
        self._state = self._size = 0

    def append(self, token: int) -> None:
        """Go on by a token of the row."""
        there, state, size = self.automaton, self._state, self._size
        # What was forgotten has a count of 0, as state 0 has, to which no token leads.
        while state and not there.count[there.next[state].get(token, 0)]:
            state = there.link[state]
            size = there.length[state]
        state = there.next[state].get(token, 0)
        size = min(size + 1, self.max_match) if there.count[state] else 0
        self._state, self._size = there.up_to(state, size) if size else 0, size

    def end(self) -> tuple[int, int]:
        """State and length of the longest match that something followed."""
        there, state, size = self.automaton, self._state, self._size
        while state and not any(there.count[after] for after in there.next[state].values()):
            state = there.link[state]
            size = there.length[state]
        return state, size


class Earlier(Elsewhere):
    """The same in texts that come and go with time."""

    def __init__(self, texts: Remembered, max_match: int) -> None:
        super().__init__(texts.automaton, max_match)
        self.texts = texts
        self._version = -1
        self._recent: deque[int] = deque(maxlen=max_match)

    def append(self, token: int) -> None:
        """Go on by a token of the row, from the start of its end where texts came or went since."""
        self._recent.append(token)
        if self._version == self.texts.version:
            super().append(token)
        else:
            self._find_again()

    def end(self) -> tuple[int, int]:
        if self._version != self.texts.version:
            self._find_again()
        return super().end()

    def _find_again(self) -> None:
        self.automaton, self._version = self.texts.automaton, self.texts.version
        self._state = self._size = 0
        for token in self._recent:
            super().append(token)


Place = tuple[int | None, ...]
"""A string: its state in the row's own text, then in each of the others; None where it did not
occur."""


@dataclass(slots=True)
class _Found:
    """A continuation."""

    latest: list[int]
    """Index of its latest occurrence in each of the texts, -1 for none."""
    place: list[int | None]
    count: int = 0


class SuffixText(RowText):
    """A row's text as an automaton, and what of its end occurs in other texts."""

    def __init__(
        self, own: SuffixAutomaton, others: Sequence[Elsewhere], max_match: int, min_match: int
    ) -> None:
        self.own, self.others, self.max_match, self.min_match = own, others, max_match, min_match

    def append(self, token: int) -> None:
        self.own.append(token)
        for other in self.others:
            other.append(token)

    def root(self) -> Place | None:
        own = self.own
        here = own.up_to(own.end, self.max_match)
        # Once is the end of the text itself, which nothing follows yet.
        while here > 0 and own.count[here] < 2:
            here = own.link[here]
        ends = [
            (here, min(own.length[here], self.max_match)),
            *(other.end() for other in self.others),
        ]
        longest = max(size for _, size in ends)
        if longest < self.min_match:
            return None
        return tuple(state if size == longest else None for state, size in ends)

    def children(self, node: Place, most: int) -> list[tuple[int, float, Place]]:
        found: dict[int, _Found] = {}
        for number, state in enumerate(node):
            if state is None:
                continue
            there = self.own if number == 0 else self.others[number - 1].automaton
            for token, after in there.next[state].items():
                if there.count[after]:
                    one = found.get(token)
                    if one is None:
                        one = found[token] = _Found([-1] * len(node), [None] * len(node))
                    one.count += there.count[after]
                    one.latest[number], one.place[number] = there.latest[after], after
        total = sum(one.count for one in found.values())
        best = sorted(
            found.items(), key=lambda item: (item[1].count, item[1].latest), reverse=True
        )[:most]
        return [(token, one.count / total, tuple(one.place)) for token, one in best]


def _read_corpus(corpus: str, target: Target, tokens: int) -> Tensor:
    """(t) int64 the first training rows of a set, a separator after each."""
    read = read_set(set_folder(corpus, "drafter.corpus"))
    fingerprint.refuse_other(
        read.manifest["target"]["fingerprint"],
        target.fingerprint,
        f"corpus={corpus}",
        own=target.tokenizer,
    )
    taken: list[Tensor] = []
    total = 0
    for index in read.indices(TRAIN):
        ids, _ = read.row(index)
        total += len(ids)
        if total > tokens:
            break
        taken += [ids, torch.tensor([APART])]
    if not taken:
        raise InputError(
            f"corpus={corpus}: none of its training rows has at most {tokens} tokens: raise "
            "corpus_tokens"
        )
    return torch.cat(taken)


def _check_ids(ids: Tensor, target: Target) -> None:
    if ids.dtype != torch.int64 or ids.ndim != 1 or not len(ids):
        raise InputError(
            f"corpus_ids are {ids.dtype} of shape {list(ids.shape)}, need int64 of one dimension"
        )
    if int(ids.min()) < APART or int(ids.max()) >= target.vocab_size:
        raise InputError(
            f"corpus_ids reach from {int(ids.min())} to {int(ids.max())}, the target's vocabulary "
            f"from 0 to {target.vocab_size - 1}"
        )
