"""Suffix decoding: what followed the longest suffix of the text where it stood before, most
frequent first.

Oliaro et al. 2024, "SuffixDecoding" (arXiv:2411.04975). Learns nothing, has no weights, and reads
nothing of the target. Departs from the paper: suffix automata instead of suffix trees; the longest
match alone is followed, where the paper scores every length; a request's own text, the texts
decoded earlier and the corpus are one count here, where the paper takes the better of two trees;
and earlier texts, prompt and answer, are looked up only if `remember` asks for it.

The counts rank drafts; they are no probability that a token was drawn with, and no rule sees them.
So what is remembered moves how many drafts are kept, never the law of a text: a greedy one is the
target's own, a drawn one has the target's distribution. Which one is drawn may differ with what is
remembered, for the same seed.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafttrain.checks import integer
from drafttrain.data.conversations import TRAIN, read_set
from drafttrain.data.datamodule import set_folder
from drafttrain.drafter.automaton import SuffixAutomaton
from drafttrain.drafter.base import Retrieval, RowText
from drafttrain.drafter.remembered import ALONE, Remembered
from drafttrain.errors import InputError
from drafttrain.target import fingerprint
from drafttrain.target.model import Target
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import MOST_NODES, Tree

APART = -1
"""Stands between two texts of a corpus; no token has this id."""
MOST_REMEMBERED = 10_000_000
"""Tokens: some 12 GB of memory."""


class Suffix(Retrieval):
    """Drafts the continuations of the longest suffix, of `max_match` to `min_match` tokens, that
    stood in the text before.

    Continuations of a node are ranked by how often they followed the match and the drafts on the
    way to the node; among equals the one seen last in the text comes first, then the one seen last
    in earlier texts, then in the corpus. Their shares decide which nodes a dynamic tree has.

    Args:
        max_match, min_match: the longest and the shortest match that is looked for. A shorter one
            stood in more places.
        deepest: the deepest tree that can be filled; strings of max_match + deepest tokens are
            counted.
        corpus: a conversation set of this target, `builtin:<name>` or a folder, whose training rows
            count as if they stood before every text; None is the text alone.
        corpus_tokens: rows of the corpus are taken while they have at most so many tokens in all.
            They travel in packages.
        remember: tokens of texts, prompt and answer, that this drafter has decoded, whose places
            count too: the latest ones, as whole texts. 0 looks up none. They are in memory alone,
            at most some 1.2 kB a token, and are not packaged; other texts see them once the call
            that decoded them is done.
        corpus_ids: (t) the corpus as a package holds it, its texts apart by -1; None reads
            `corpus`.
    """

    growths = (Tree, Dynamic, Confident)
    corpus_ids: Tensor | None

    def __init__(
        self,
        target: Target,
        *,
        max_match: int = 16,
        min_match: int = 1,
        deepest: int = 24,
        corpus: str | None = None,
        corpus_tokens: int = 50_000,
        remember: int = 0,
        corpus_ids: Tensor | list[int] | None = None,
    ) -> None:
        super().__init__(target)
        integer("max_match", max_match, 1, MOST_NODES)
        integer("min_match", min_match, 1)
        integer("deepest", deepest, 1, MOST_NODES)
        integer("corpus_tokens", corpus_tokens, 1)
        integer("remember", remember, 0, MOST_REMEMBERED)
        if min_match > max_match:
            raise InputError(
                f"min_match={min_match} is above max_match={max_match}: the shortest match cannot "
                f"be the longer one"
            )
        if not (corpus is None or isinstance(corpus, str)):
            raise InputError(
                f"corpus={corpus}: needs builtin:<name> or the folder of a conversation set, or "
                f"null for none"
            )
        if corpus is None and corpus_ids is not None:
            raise InputError("corpus_ids are given without the name of their corpus")
        self.max_match, self.min_match, self.deepest = max_match, min_match, deepest
        self.corpus, self.corpus_tokens, self.remember = corpus, corpus_tokens, remember
        ids = None
        if corpus is not None:
            ids = (
                _read_corpus(corpus, target, corpus_tokens)
                if corpus_ids is None
                else torch.as_tensor(corpus_ids)
            )
            _check_ids(ids, target)
        self.register_buffer("corpus_ids", ids)
        self.known = SuffixAutomaton(self.longest)
        """The corpus, the same for all rows."""
        for token in [] if ids is None else ids.tolist():
            if token == APART:
                self.known.begin()
            else:
                self.known.append(token)
        self.earlier = Remembered(remember, self.longest) if remember else None
        """Texts decoded earlier."""

    def settings(self) -> dict[str, Any]:
        names = ("max_match", "min_match", "deepest", "corpus", "corpus_tokens", "remember")
        return {name: getattr(self, name) for name in names} | {
            "corpus_ids": None if self.corpus_ids is None else self.corpus_ids.tolist()
        }

    def describe(self) -> dict[str, Any]:
        told = super().describe()
        told["corpus_ids"] = self.known.size
        return told

    @property
    def max_depth(self) -> int:
        return self.deepest

    @property
    def longest(self) -> int:
        """Tokens of the longest string that is counted."""
        return self.max_match + self.deepest

    def memory(self) -> SuffixText:
        others = [Elsewhere(self.known, self.max_match)] if self.known.size else []
        if self.earlier is not None:
            others.insert(0, Earlier(self.earlier, self.max_match))
        return SuffixText(SuffixAutomaton(self.longest), others, self.max_match, self.min_match)

    def reading(self) -> contextlib.AbstractContextManager[Any]:
        return super().reading() if self.earlier is None else ALONE

    # What was decoded earlier ---------------------------------------------------------------------
    @property
    def remembers(self) -> int:
        return self.remember

    def remember_texts(self, texts: Sequence[Sequence[int]]) -> None:
        if self.earlier is not None:
            with ALONE:
                for text in texts:
                    self.earlier.add(text)

    def without_memory(self) -> Suffix:
        if self.earlier is None:
            return self
        other = copy.copy(self)
        other.earlier = Remembered(self.remember, self.longest)
        return other


class Elsewhere:
    """How much of the end of a row's text stands in other texts, which are there before it."""

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
    """The same in texts of which there are more and others as time goes on."""

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
stand."""


@dataclass(slots=True)
class _Found:
    """A continuation."""

    latest: list[int]
    """Index of its latest occurrence in each of the texts, -1 for none."""
    place: list[int | None]
    count: int = 0


class SuffixText(RowText):
    """A row's text as an automaton, and what of its end stands in other texts."""

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
        while (
            here > 0 and own.count[here] < 2
        ):  # Once is the end of the text itself, which nothing follows yet.
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
        whole = sum(one.count for one in found.values())
        best = sorted(
            found.items(), key=lambda item: (item[1].count, item[1].latest), reverse=True
        )[:most]
        return [(token, one.count / whole, tuple(one.place)) for token, one in best]


def _read_corpus(corpus: str, target: Target, tokens: int) -> Tensor:
    """(t) int64 the first training rows of a set, a separator behind each."""
    read = read_set(set_folder(corpus, "drafter.corpus"))
    fingerprint.refuse_other(
        read.manifest["target"]["fingerprint"], target.fingerprint, f"corpus={corpus}"
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
            f"corpus_tokens"
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
