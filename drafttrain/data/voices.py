"""Ways in which people type one and the same request.

A voice changes the instruction only. What is quoted, code, and passages that are given with it are
kept as they are: a request is a list of parts, each marked as one or the other.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

Part = tuple[str, bool]
"""A stretch of a request, and whether it is kept as it is."""
_OPENERS = re.compile(
    r"^(?:(?:hi|hello|hey)(?: there)?[,!.] *)?"
    r"(?:please |(?:can|could|would|will) you (?:please )?|i(?:'d| would) like you to |"
    r"i (?:want|need) you to |help me (?:to )?)",
    re.IGNORECASE,
)
_PLEASE = re.compile(r",? ?\bplease\b,?", re.IGNORECASE)
_THANKS = re.compile(r" *\b(?:thanks|thank you)(?: in advance)?[.!]?", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
_SHORT = {
    "you": "u", "your": "ur", "please": "pls", "because": "bc", "the": "teh", "about": "abt",
    "with": "wiht", "and": "adn", "their": "thier", "receive": "recieve", "should": "shoud",
    "would": "woud", "definitely": "definately", "separate": "seperate", "which": "wich",
    "different": "diffrent", "explain": "explian", "write": "wirte", "really": "realy",
    "necessary": "neccessary", "tomorrow": "tommorow", "beginning": "begining", "until": "untill",
    "something": "somthing", "business": "buisness", "friend": "freind", "believe": "beleive",
}  # fmt: skip
"""Slips that are common; most of the time a word is left as it is."""
_NEAR = {
    "a": "s", "b": "v", "c": "x", "d": "f", "e": "r", "f": "g", "g": "h", "h": "j", "i": "o",
    "j": "k", "k": "l", "l": "k", "m": "n", "n": "m", "o": "p", "p": "o", "q": "w", "r": "t",
    "s": "d", "t": "r", "u": "i", "v": "b", "w": "e", "x": "c", "y": "u", "z": "x",
}  # fmt: skip
_HELLO = ("Hello! ", "Hi there! ", "Good morning. ", "Hi! ", "Hello, I hope you can help me. ")
_BYE = (
    " Thank you!",
    " Thanks in advance.",
    " Many thanks!",
    " Thank you very much for your help.",
    " I'd really appreciate it.",
)


def _on_words(parts: list[Part], change: Callable[[str], str]) -> list[Part]:
    return [(text if kept else change(text), kept) for text, kept in parts]


def _at_ends(
    parts: list[Part],
    first: Callable[[str], str] = lambda text: text,
    last: Callable[[str], str] = lambda text: text,
) -> list[Part]:
    """Change the first and the last part, where they are instruction."""
    parts = list(parts)
    if not parts[0][1]:
        parts[0] = (first(parts[0][0]), False)
    if not parts[-1][1]:
        parts[-1] = (last(parts[-1][0]), False)
    return parts


def plain(parts: list[Part], chance: random.Random) -> list[Part]:
    """As it is written."""
    return parts


def terse(parts: list[Part], chance: random.Random) -> list[Part]:
    """Without please and thanks, and without the words that lead up to a request."""

    def shorter(text: str) -> str:
        left = _OPENERS.sub("", text)
        return left[:1].upper() + left[1:]

    parts = _at_ends(parts, first=shorter)
    parts = _on_words(parts, lambda text: _THANKS.sub("", _PLEASE.sub("", text)))
    return _at_ends(parts, last=lambda text: text.rstrip().rstrip("."))


def polite(parts: list[Part], chance: random.Random) -> list[Part]:
    """With a greeting, thanks, or both."""
    hello, bye = chance.choice(_HELLO), chance.choice(_BYE)
    which = chance.choice(("hello", "bye", "both"))
    if parts[-1][1] or re.search(r"\bthank", parts[-1][0], re.IGNORECASE):
        which = "hello"
    if parts[0][1] or re.match(r"(?:hi|hello|hey|good)\b", parts[0][0], re.IGNORECASE):
        which = "bye" if which != "hello" else "none"

    def led(text: str) -> str:
        return hello + text if which in ("hello", "both") else text

    def ended(text: str) -> str:
        closed = text if text.rstrip().endswith((".", "?", "!", ":")) else text + "."
        return closed + bye if which in ("bye", "both") else text

    return _at_ends(parts, led, ended)


def lower(parts: list[Part], chance: random.Random) -> list[Part]:
    """Lower case throughout, the last full stop left out."""
    parts = _on_words(parts, str.lower)
    return _at_ends(parts, last=lambda text: text.rstrip().rstrip("."))


def bare(parts: list[Part], chance: random.Random) -> list[Part]:
    """Without question marks, and without the last full stop."""
    parts = _on_words(parts, lambda text: re.sub(r"\?(?=\s|$)", "", text))
    return _at_ends(parts, last=lambda text: text.rstrip().rstrip("."))


def sloppy(parts: list[Part], chance: random.Random) -> list[Part]:
    """Typed in haste: letters swapped, dropped, doubled or hit next to the right one, apostrophes
    left out, the start in lower case."""
    rate = chance.choice((0.06, 0.1, 0.16))
    quiet = chance.random() < 0.6

    def typed(match: re.Match[str]) -> str:
        return _slip(match.group(), rate, chance)

    parts = _on_words(parts, lambda text: _WORD.sub(typed, text))
    if quiet:
        parts = _on_words(parts, lambda text: re.sub(r"[?.,](?=\s|$)", "", text))
    return _at_ends(parts, first=lambda text: text[:1].lower() + text[1:])


def _slip(word: str, rate: float, chance: random.Random) -> str:
    """A word as a hasty person types it: most are right."""
    if "'" in word:
        return word.replace("'", "") if chance.random() < 0.7 else word
    if word.lower() in _SHORT:
        return _SHORT[word.lower()] if chance.random() < 2 * rate else word
    if len(word) < 4 or not word[1:].islower() or chance.random() >= rate:
        return word
    at = chance.randrange(1, len(word) - 1)
    how = chance.choice(("swap", "swap", "drop", "double", "near"))
    if how == "swap":
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if how == "drop":
        return word[:at] + word[at + 1 :]
    if how == "double":
        return word[:at] + word[at] + word[at:]
    return word[:at] + _NEAR[word[at].lower()] + word[at + 1 :]


VOICES: dict[str, Callable[[list[Part], random.Random], list[Part]]] = {
    "plain": plain,
    "terse": terse,
    "polite": polite,
    "sloppy": sloppy,
    "lower": lower,
    "bare": bare,
}


def spoken(parts: list[Part], voice: str, chance: random.Random, *, later: bool = False) -> str:
    """A request in a voice.

    Args:
        parts: at least one.
        later: whether it is a later turn, which nobody greets in.
    """
    if later and voice == "polite":
        parts = _at_ends(parts, last=lambda text: text + chance.choice(("", *_BYE)))
        voice = "plain"
    return "".join(text for text, _ in VOICES[voice](parts, chance)).strip()
