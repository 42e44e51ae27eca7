"""Drafters that draft from texts decoded earlier, and the latest of these texts as one suffix
automaton."""

from __future__ import annotations

import abc
import threading
from collections import deque
from collections.abc import Sequence

from drafttrain.drafter.automaton import SuffixAutomaton
from drafttrain.drafter.base import Drafter


class Remembers(abc.ABC):
    """A drafter that may keep texts that were decoded, to draft from them later."""

    @property
    @abc.abstractmethod
    def remembers(self) -> int:
        """Tokens of texts that it keeps at most; 0 where it keeps none."""

    @abc.abstractmethod
    def remember_texts(self, texts: Sequence[Sequence[int]]) -> None:
        """Called after every call that decodes.

        Args:
            texts: complete ones, each a prompt and its answer, in the order of the rows.
        """

    @abc.abstractmethod
    def without_memory(self) -> Drafter:
        """This drafter as one that has kept nothing, and keeps for itself what it decodes; itself
        where none is ever kept. A measurement decodes with one of these: it must not see what
        another one wrote."""


def tokens_remembered(drafter: Drafter) -> int:
    """Tokens of texts that a drafter keeps at most."""
    return drafter.remembers if isinstance(drafter, Remembers) else 0


def remember_texts(drafter: Drafter, texts: Sequence[Sequence[int]]) -> None:
    """See `Remembers.remember_texts`; nothing for other drafters."""
    if isinstance(drafter, Remembers):
        drafter.remember_texts(texts)


def without_memory(drafter: Drafter) -> Drafter:
    """See `Remembers.without_memory`; other drafters as they are."""
    return drafter.without_memory() if isinstance(drafter, Remembers) else drafter


LOCK = threading.Lock()
"""To be held while a text is added or an automaton of texts is read: several texts may be decoded
at once, by threads."""


class Remembered:
    """The latest texts of at most `room` tokens in all; the oldest leave first, each at once.

    A text that starts with all of the latest one takes its place: the next turn of a conversation
    holds the earlier ones. Of a text that is longer than the room its end is kept.

    An automaton cannot shrink. Once a text has left it, a second one is started, of what comes from
    then on, and takes its place when it holds all that is left. So adding a text costs two or three
    walks over as many tokens as it has and none over all texts, and the automata hold about three
    times the room.

    Args:
        room: tokens, at least 1.
        longest: tokens of the longest string that is counted, see `SuffixAutomaton`.
    """

    def __init__(self, room: int, longest: int) -> None:
        self.room, self.longest = room, longest
        self.texts: deque[list[int]] = deque()
        self.tokens = 0
        """Of all texts."""
        self.version = 0
        """Changes with every text: states of the automaton that were known before are invalid
        then."""
        self.automaton = SuffixAutomaton(longest)
        """Of the texts; what has left it has a count of 0."""
        self._next: SuffixAutomaton | None = None
        self._in_next = 0
        """Texts in it, the latest ones."""

    def add(self, text: Sequence[int]) -> None:
        """Keep a text, the latest one from now on; the oldest leave where there is no room."""
        new = list(text[-self.room :])
        if not new:
            return
        last = self.texts[-1] if self.texts else []
        goes_on = bool(last) and new[: len(last)] == last
        more = new[len(last) :] if goes_on else new
        _append(self.automaton, more, goes_on)
        if self._next is not None and (self._in_next or not goes_on):
            _append(self._next, more, goes_on)
        if goes_on:
            self.texts[-1] = new
        else:
            self.texts.append(new)
            self._in_next += self._next is not None
        self.tokens += len(more)
        while self.tokens > self.room:
            oldest = self.texts.popleft()
            self.automaton.forget(oldest)
            self.tokens -= len(oldest)
            if self._next is None:
                self._next, self._in_next = SuffixAutomaton(self.longest), 0
            elif self._in_next > len(self.texts):
                self._next.forget(oldest)
                self._in_next -= 1
        if self._next is not None and self._in_next == len(self.texts):
            self.automaton, self._next = self._next, None
        self.version += 1


def _append(automaton: SuffixAutomaton, tokens: Sequence[int], goes_on: bool) -> None:
    if not goes_on:
        automaton.start_text()
    for token in tokens:
        automaton.append(token)
