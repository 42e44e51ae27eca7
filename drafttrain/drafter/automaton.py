"""A suffix automaton (Blumer et al. 1985) that grows token by token and counts how often short
strings occur.

A state is a set of strings that end at the same places of the text; its link leads to the longest
of their suffixes that ends elsewhere too. Counting every place of every string would take a walk
over all suffixes for each token; here only strings of at most `longest` tokens are counted, so that
the walk, and thus appending a token, is bounded by that, whatever the text is.

A text can be forgotten again: its strings are counted off by the same walks. Their states stay,
with a count of 0; only another automaton, of what is left, is without them.
"""

from __future__ import annotations

from collections.abc import Iterable


class SuffixAutomaton:
    """Strings of at most `longest` tokens with the number of their occurrences.

    States are numbers; 0 is the empty string.

    Args:
        longest: tokens of the longest string whose count is right; longer ones are known, their
            counts are not.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.size = 0
        """Tokens of the text."""
        self.next: list[dict[int, int]] = [{}]
        """By state: {token: state of the strings that are one token longer}."""
        self.link: list[int] = [-1]
        self.length: list[int] = [0]
        """Of a state's longest string; its shortest is one longer than its link's longest."""
        self.count: list[int] = [0]
        """Occurrences of a state's strings."""
        self.latest: list[int] = [-1]
        """Index of the last token of the latest occurrence."""
        self._last = 0
        self._end = 0
        self._end_length = 0

    @property
    def end(self) -> int:
        """State of the text's longest counted suffix."""
        return self._end

    def start_text(self) -> None:
        """What is appended next is another text: no string reaches across."""
        self._last = self._end = self._end_length = 0

    def append(self, token: int) -> None:
        follow, link, length = self.next, self.link, self.length
        self._last = self._longer(self._last, token)
        # A state may have been split; its shorter strings are its link's now.
        end, size = self._end, self._end_length
        if size and length[link[end]] >= size:
            end = link[end]
        end, size = follow[end][token], size + 1
        if size > self.longest:
            size = self.longest
            if length[link[end]] >= size:
                end = link[end]
        self._end, self._end_length = end, size
        count, latest, here = self.count, self.latest, self.size
        state = end
        while state > 0:
            count[state] += 1
            latest[state] = here
            state = link[state]
        self.size = here + 1

    def forget(self, text: Iterable[int]) -> None:
        """Count a text off that was appended, the oldest of those there are: `latest` is then right
        where `count` is not 0."""
        follow, link, length, count = self.next, self.link, self.length, self.count
        end = size = 0
        for token in text:
            end, size = follow[end][token], size + 1
            if size > self.longest:
                size = self.longest
                if length[link[end]] >= size:
                    end = link[end]
            state = end
            while state > 0:
                count[state] -= 1
                state = link[state]

    def up_to(self, state: int, longest: int) -> int:
        """State of the longest suffix of a state's strings that has at most that many tokens."""
        link, length = self.link, self.length
        while state > 0 and length[link[state]] >= longest:
            state = link[state]
        return state

    def _longer(self, last: int, token: int) -> int:
        """The state of the full text with one more token."""
        follow, link, length = self.next, self.link, self.length
        known = follow[last].get(token)
        if known is not None:  # An earlier text starts like this one.
            return known if length[known] == length[last] + 1 else self._split(last, token, known)
        state = self._state(length[last] + 1, 0, {}, 0, -1)
        while last >= 0 and token not in follow[last]:
            follow[last][token] = state
            last = link[last]
        if last >= 0:
            other = follow[last][token]
            link[state] = (
                other if length[other] == length[last] + 1 else self._split(last, token, other)
            )
        return state

    def _split(self, last: int, token: int, state: int) -> int:
        """Take a state's strings of at most length[last] + 1 tokens out into a new one."""
        follow, link = self.next, self.link
        shorter = self._state(
            self.length[last] + 1,
            link[state],
            dict(follow[state]),
            self.count[state],
            self.latest[state],
        )
        while last >= 0 and follow[last].get(token) == state:
            follow[last][token] = shorter
            last = link[last]
        link[state] = shorter
        return shorter

    def _state(
        self, length: int, link: int, follow: dict[int, int], count: int, latest: int
    ) -> int:
        self.next.append(follow)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        self.latest.append(latest)
        return len(self.link) - 1
