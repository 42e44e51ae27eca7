"""Suffix decoding: what followed the longest suffix of the text where it stood before, most frequent first.

Oliaro et al. 2024, "SuffixDecoding" (arXiv:2411.04975). Learns nothing, has no weights, and reads nothing of the target.
Departs from the paper: suffix automata instead of suffix trees; the longest match alone is followed, where the paper scores
every length; a request's own text and the corpus are one count here, where the paper takes the better of two trees; and the
corpus stays as it is while decoding, so that a text does not depend on what was asked before.

The counts rank drafts; they are no probability that a token was drawn with, and no rule sees them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drafttrain.checks import whole
from drafttrain.data.conversations import TRAIN, read_set
from drafttrain.data.datamodule import set_folder
from drafttrain.drafter.automaton import SuffixAutomaton
from drafttrain.drafter.base import Retrieval, RowText
from drafttrain.errors import InputError
from drafttrain.target import fingerprint
from drafttrain.target.model import Target
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import MOST_NODES, Tree

APART = -1
"""Stands between two texts of a corpus; no token has this id."""


class Suffix(Retrieval):
    """Drafts the continuations of the longest suffix, of `max_match` to `min_match` tokens, that stood in the text before.

    Continuations of a node are ranked by how often they followed the match and the drafts on the way to the node; among
    equals the one seen last in the text comes first, then the one seen last in the corpus. Their shares decide which nodes a
    dynamic tree has.

    Args:
        max_match, min_match: the longest and the shortest match that is looked for. A shorter one stood in more places.
        deepest: the deepest tree that can be filled; strings of max_match + deepest tokens are counted.
        corpus: a conversation set of this target, `builtin:<name>` or a folder, whose training rows count as if they stood
            before every text; None is the text alone.
        corpus_tokens: rows of the corpus are taken while they have at most so many tokens in all. They travel in packages.
        corpus_ids: (t) the corpus as a package holds it, its texts apart by -1; None reads `corpus`.
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
        corpus_ids: Tensor | list[int] | None = None,
    ) -> None:
        super().__init__(target)
        whole("max_match", max_match, 1, MOST_NODES)
        whole("min_match", min_match, 1)
        whole("deepest", deepest, 1, MOST_NODES)
        whole("corpus_tokens", corpus_tokens, 1)
        if min_match > max_match:
            raise InputError(f"min_match={min_match} is above max_match={max_match}: the shortest match cannot be the longer one")
        if not (corpus is None or isinstance(corpus, str)):
            raise InputError(f"corpus={corpus}: needs builtin:<name> or the folder of a conversation set, or null for none")
        if corpus is None and corpus_ids is not None:
            raise InputError("corpus_ids are given without the name of their corpus")
        self.max_match, self.min_match, self.deepest = max_match, min_match, deepest
        self.corpus, self.corpus_tokens = corpus, corpus_tokens
        ids = None
        if corpus is not None:
            ids = _read_corpus(corpus, target, corpus_tokens) if corpus_ids is None else torch.as_tensor(corpus_ids)
            _check_ids(ids, target)
        self.register_buffer("corpus_ids", ids)
        self.known = self._automaton()
        """The corpus, the same for all rows."""
        for token in [] if ids is None else ids.tolist():
            if token == APART:
                self.known.begin()
            else:
                self.known.append(token)

    def settings(self) -> dict[str, Any]:
        names = ("max_match", "min_match", "deepest", "corpus", "corpus_tokens")
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

    def memory(self) -> SuffixText:
        return SuffixText(self._automaton(), self.known, self.max_match, self.min_match)

    def _automaton(self) -> SuffixAutomaton:
        return SuffixAutomaton(self.max_match + self.deepest)


Place = tuple[int | None, int | None]
"""State of the text's automaton and of the corpus's, None where the string was not there."""


class SuffixText(RowText):
    """A row's text as an automaton, and how much of its end stands in the corpus."""

    def __init__(self, own: SuffixAutomaton, corpus: SuffixAutomaton, max_match: int, min_match: int) -> None:
        self.own, self.corpus, self.max_match, self.min_match = own, corpus, max_match, min_match
        self._there, self._there_length = 0, 0

    def append(self, token: int) -> None:
        self.own.append(token)
        if self.corpus.size:
            corpus, state, size = self.corpus, self._there, self._there_length
            while state and token not in corpus.next[state]:
                state = corpus.link[state]
                size = corpus.length[state]
            state = corpus.next[state].get(token, 0)
            size = min(size + 1, self.max_match) if state else 0
            self._there, self._there_length = corpus.up_to(state, size) if state else 0, size

    def root(self) -> Place | None:
        own, corpus = self.own, self.corpus
        here = own.up_to(own.end, self.max_match)
        while here > 0 and own.count[here] < 2:  # Once is the end of the text itself, which nothing follows yet.
            here = own.link[here]
        size = min(own.length[here], self.max_match)
        there, there_size = self._there, self._there_length
        while there and not corpus.next[there]:
            there = corpus.link[there]
            there_size = corpus.length[there]
        longest = max(size, there_size)
        if longest < self.min_match:
            return None
        return here if size == longest else None, there if there_size == longest else None

    def children(self, node: Place, most: int) -> list[tuple[int, float, Place]]:
        found: dict[int, tuple[int, int, int, int, Place]] = {}
        own, corpus = self.own, self.corpus
        if node[0] is not None:
            for token, state in own.next[node[0]].items():
                found[token] = own.count[state], own.latest[state], -1, token, (state, None)
        if node[1] is not None:
            for token, state in corpus.next[node[1]].items():
                count, latest, _, _, (here, _) = found.get(token, (0, -1, -1, token, (None, None)))
                found[token] = count + corpus.count[state], latest, corpus.latest[state], token, (here, state)
        whole = sum(ranked[0] for ranked in found.values())
        best = sorted(found.values(), key=_rank, reverse=True)[:most]
        return [(token, count / whole, place) for count, _, _, token, place in best]


def _rank(found: tuple[int, int, int, int, Place]) -> tuple[int, int, int]:
    return found[:3]


def _read_corpus(corpus: str, target: Target, tokens: int) -> Tensor:
    """(t) int64 the first training rows of a set, a separator behind each."""
    read = read_set(set_folder(corpus, "drafter.corpus"))
    fingerprint.refuse_other(read.manifest["target"]["fingerprint"], target.fingerprint, f"corpus={corpus}")
    taken: list[Tensor] = []
    total = 0
    for index in read.indices(TRAIN):
        ids, _ = read.row(index)
        total += len(ids)
        if total > tokens:
            break
        taken += [ids, torch.tensor([APART])]
    if not taken:
        raise InputError(f"corpus={corpus}: none of its training rows has at most {tokens} tokens: raise corpus_tokens")
    return torch.cat(taken)


def _check_ids(ids: Tensor, target: Target) -> None:
    if ids.dtype != torch.int64 or ids.ndim != 1 or not len(ids):
        raise InputError(f"corpus_ids are {ids.dtype} of shape {list(ids.shape)}, need int64 of one dimension")
    if int(ids.min()) < APART or int(ids.max()) >= target.vocab_size:
        raise InputError(
            f"corpus_ids reach from {int(ids.min())} to {int(ids.max())}, the target's vocabulary from 0 to {target.vocab_size - 1}"
        )
