"""What a drafter remembers of texts that were decoded earlier: asked, given and taken away here."""

from __future__ import annotations

from collections.abc import Sequence

from drafttrain.drafter.base import Drafter


def tokens_remembered(drafter: Drafter) -> int:
    """Tokens of texts decoded earlier that may be drafted from; 0 where none are kept."""
    return drafter.remembers


def remember_texts(drafter: Drafter, texts: Sequence[Sequence[int]]) -> None:
    """Hand over complete texts, each a prompt and its answer, in the order of the rows."""
    drafter.remember_texts(texts)


def without_memory(drafter: Drafter) -> Drafter:
    """The drafter with a new, empty memory of its own; itself where it never keeps any.

    A measurement decodes with one of these: it must not see what another one wrote.
    """
    return drafter.without_memory()
