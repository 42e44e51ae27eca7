"""What makes two tokenizers one: every part that decides which ids a text has.

A part is kept as its text where that is short, and as a sum of marks where it is a long list. Two
lists that differ in a few entries have sums from which an entry is found that only one of them has.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from drafttrain.checks import shown
from drafttrain.errors import panicked

PROBE = "The quick brown fox, 12345 \n\tnaïve ünïcödé 🙂."
PROBES = (
    PROBE,
    *"?!.,;:'\"-_/\\|@#$%^&*+=~`<>(){}[]",
    *("a", "A", "é", "ﬁ", "½", "e\u0301", "\u00a0", " ", "  ", "\n", "\n\n", "\t", "\r\n"),
    *("don't", " Hello", "HELLO", "hello", "1234567890", "3.14", "x=1", "résumé", "naïve café"),
    *("for i in range(10):\n    print(i)", "{'key': [1, 2]}", "https://example.org/a?b=c"),
    "The thing is that an answer often begins with the words of its question.",
    "In other parts of the world, there are more of them than anyone has counted.",
    *("Größe", "Привет", "你好", "こんにちは", "안녕"),
    *("مرحبا", "हिन्दी", "🙂"),
)
"""Texts that are tokenised to compare two tokenizers, the first of them since ever."""

TEXTS = ("normaliser", "pre-tokeniser", "post-processor")
LISTS = ("vocabulary", "merges", "added tokens")
_OF_JSON = {"normaliser": "normalizer", "pre-tokeniser": "pre_tokenizer"} | {
    "post-processor": "post_processor"
}
_BUCKETS = 16
_LONGEST = 400
"""Characters of a part that is kept as its text."""
_IRRELEVANT = {"trim_offsets", "dropout"}
"""What changes no id: places of tokens in a text, and what is only drawn while training."""


# --- the parts of one -----------------------------------------------------------------------------


def parts_of(tokenizer: Any) -> dict[str, str]:
    """{part: text or marks}, the same for tokenizers that give every text the same ids."""
    data = _data(tokenizer)
    parts = {name: _sum(items) for name, items in _lists(tokenizer, data).items()}
    if data is not None:
        merges = _merges(data)
        parts["merges"] += f":{_digest(merges)[:8]}"  # Their order counts.
        # An empty prefix is none: which of the two is written depends on who wrote it.
        model = {k: v for k, v in data["model"].items() if k not in ("vocab", "merges") and v != ""}
        parts["model"] = _text(model)
        parts |= {name: _text(_changing(data.get(_OF_JSON[name]), name)) for name in TEXTS}
    if getattr(tokenizer, "split_special_tokens", False):
        parts["special tokens"] = "split"
    parts["probes"] = "".join(_ids_mark(tokenizer, text) for text in PROBES)
    return parts


def _data(tokenizer: Any) -> dict[str, Any] | None:
    """A fast tokenizer as its file would say it; None for one that is written in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        return None
    found: dict[str, Any] = json.loads(backend.to_str())
    return found


def _lists(tokenizer: Any, data: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """The parts that are long lists, entry by entry."""
    if data is None:
        words = tokenizer.get_vocab()
        return {"vocabulary": [f"{number} {word}" for word, number in words.items()]}
    vocabulary = data["model"].get("vocab", {})
    if isinstance(vocabulary, dict):
        entries = [f"{number} {word}" for word, number in vocabulary.items()]
    else:  # With the score that each word has.
        entries = [f"{number} {word} {score}" for number, (word, score) in enumerate(vocabulary)]
    added = [
        json.dumps({k: v for k, v in token.items() if k != "special"}, sort_keys=True)
        for token in _added(data)
    ]
    return {"vocabulary": entries, "merges": _merges(data), "added tokens": added}


def _merges(data: Mapping[str, Any]) -> list[str]:
    merges = data["model"].get("merges") or ()
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def _added(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The added tokens. Without a normaliser it is the same whether they are looked for before or
    after it, unless one that is looked for first takes a part of another."""
    tokens = list(data.get("added_tokens") or ())
    if _text(data.get("normalizer")) != "none":
        return tokens
    early, late = (
        [one["content"] for one in tokens if bool(one.get("normalized")) == after]
        for after in (False, True)
    )
    wide = any(one.get(k) for one in tokens for k in ("lstrip", "rstrip", "single_word"))
    if early and late and (wide or _overlap(early, late)):
        return tokens
    return [{**one, "normalized": False} for one in tokens]


def _overlap(some: list[str], others: list[str]) -> bool:
    """Can a text hold one of each that share characters?"""
    for one, other in ((some, others), (others, some)):
        starts = {word[:n] for word in one for n in range(1, len(word) + 1)}
        ends = {word[n:] for word in other for n in range(len(word))}
        text = "\0".join(other)
        if starts & ends or any(word in text for word in one):
            return True
    return False


def _changing(part: Any, name: str) -> Any:
    """A part without what changes no id: of a post-processor, all but the ids that it puts around a
    text. As one ByteLevel only moves places; pairs of texts and types of tokens are not used."""
    if name != "post-processor" or not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind == "Sequence":
        kept = [_changing(one, name) for one in part.get("processors", ())]
        return {**part, "processors": [one for one in kept if one is not None]}
    if kind in ("BertProcessing", "RobertaProcessing"):
        around = [[part["cls"][1]], "A", [part["sep"][1]]]
    elif kind == "TemplateProcessing" and part.get("single"):
        known = part.get("special_tokens") or {}
        around = [
            known[one["SpecialToken"]["id"]]["ids"] if "SpecialToken" in one else "A"
            for one in part["single"]
        ]
    else:
        return None if kind in ("ByteLevel", "TemplateProcessing") else part
    return None if around == ["A"] else {"ids around": around}


def _text(part: Any) -> str:
    """A part in its plainest form."""
    part = _plainest(part)
    if part is None:
        return "none"
    text = json.dumps(part, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... {_digest([text])}"


def _plainest(part: Any) -> Any:
    if isinstance(part, list):
        return [_plainest(one) for one in part]
    if not isinstance(part, dict):
        return part
    for inside in ("normalizers", "pretokenizers", "processors"):
        if part.get("type") == "Sequence" and isinstance(part.get(inside), list):
            found = [one for one in map(_plainest, part[inside]) if one is not None]
            return None if not found else found[0] if len(found) == 1 else {inside: found}
    return {k: _plainest(v) for k, v in part.items() if k not in _IRRELEVANT and v is not None}


# --- marks ----------------------------------------------------------------------------------------


def _digest(parts: Iterable[str]) -> str:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return sha.hexdigest()[:16]


def _mark(item: str) -> tuple[int, int]:
    """(bucket, 32 bits) of an entry."""
    found = hashlib.blake2b(item.encode("utf-8", "surrogatepass"), digest_size=6).digest()
    return found[0] % _BUCKETS, int.from_bytes(found[2:], "little")


def _sum(items: Iterable[str]) -> str:
    """The number of entries, and the sum of their marks in each bucket."""
    sums, count = [0] * _BUCKETS, 0
    for item in items:
        bucket, mark = _mark(item)
        sums[bucket] = (sums[bucket] + mark) & 0xFFFFFFFF
        count += 1
    return f"{count}:" + "".join(f"{one:08x}" for one in sums)


def _lone(more: str, fewer: str, items: Iterable[str]) -> str | None:
    """An entry that only the list of the first sum has, where `items` hold it."""
    if ":" not in more or ":" not in fewer:
        return None
    sums = [
        [int(said.split(":")[1][8 * b : 8 * b + 8] or "0", 16) for b in range(_BUCKETS)]
        for said in (more, fewer)
    ]
    wanted = {b: (a - c) & 0xFFFFFFFF for b, (a, c) in enumerate(zip(*sums, strict=True)) if a != c}
    for item in items:
        bucket, mark = _mark(item)
        if wanted.get(bucket) == mark:
            return item
    return None


def _ids_mark(tokenizer: Any, text: str) -> str:
    try:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    except BaseException as error:
        if not isinstance(error, Exception) and not panicked(error):
            raise
        return "none"  # One that refuses a text does not tokenise it as another does.
    return _digest(map(str, ids))[:4]


# --- two of them ----------------------------------------------------------------------------------


def difference(there: Mapping[str, str], here: Mapping[str, str], tokenizer: Any) -> str:
    """How two tokenizers differ, in words: the parts, and one text that they tokenise otherwise.
    Empty where they are one.

    Args:
        tokenizer: the one that is here; None where it is not at hand.
    """
    there, here = _settled(there), _settled(here)
    odd = [
        name
        for name in (*LISTS, "model", *TEXTS, "special tokens", "probes")
        if there.get(name) != here.get(name)
    ]
    if not odd:
        return ""
    words = [_words(name, there, here, tokenizer) for name in odd if name != "probes"]
    text = None
    if "merges" in odd and tokenizer is not None:
        text = _text_of_merge(there.get("merges", ""), here.get("merges", ""), tokenizer)
    text = text or _probe(there.get("probes", ""), here.get("probes", ""))
    if text is not None:
        words.append(f"the text {json.dumps(text, ensure_ascii=False)} has other ids")
    return ", ".join(words)


def _settled(parts: Mapping[str, str]) -> dict[str, str]:
    """Parts with a post-processor as it is recorded now."""
    found, name = dict(parts), "post-processor"
    with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError):
        found[name] = _text(_changing(json.loads(found[name]), name))
    return found


def _words(name: str, there: Mapping[str, str], here: Mapping[str, str], tokenizer: Any) -> str:
    before, after = there.get(name, "none"), here.get(name, "none")
    if name not in LISTS:
        return f"its {name} is {_short(before)} there, {_short(after)} here"
    counts = f"{before.split(':')[0]} there, {after.split(':')[0]} here"
    if "none" in (before, after) or tokenizer is None:
        return f"its {name}: {counts}"
    lists = _lists(tokenizer, _data(tokenizer))
    only = _lone(after, before, lists[name])
    side = "here"
    if only is None and name == "merges":
        only, side = _lone(before, after, _possible_merges(tokenizer)), "there"
    if only is not None:
        return f"its {name}: {counts}, only {side} {shown(only)!r}"
    alike = before.split(":")[:2] == after.split(":")[:2]
    return f"its {name}: {counts}" + (", in another order" if alike else "")


def _short(part: str) -> str:
    return part if len(part) <= 160 else f"{part[:140]}... ({_digest([part])[:8]})"


def _probe(there: str, here: str) -> str | None:
    """The first text that was tokenised otherwise."""
    for place, text in enumerate(PROBES):
        if there[4 * place : 4 * place + 4] != here[4 * place : 4 * place + 4]:
            return text
    return None


def _possible_merges(tokenizer: Any) -> Iterator[str]:
    """Every pair of words that make a word."""
    data = _data(tokenizer)
    words = data["model"].get("vocab", {}) if data is not None else {}
    for word in words if isinstance(words, dict) else ():
        for cut in range(1, len(word)):
            if word[:cut] in words and word[cut:] in words:
                yield f"{word[:cut]} {word[cut:]}"


def _text_of_merge(there: str, here: str, tokenizer: Any) -> str | None:
    """A text that is tokenised otherwise without a merge that only one of the tokenizers has."""
    from tokenizers import Tokenizer

    data = _data(tokenizer)
    if data is None:
        return None
    merges = _merges(data)
    only = _lone(here, there, merges)
    missing = None if only is not None else _lone(there, here, _possible_merges(tokenizer))
    if (pair := only or missing) is None:
        return None
    # Where the merge was among the others is not known of one that is not here: it comes last.
    data["model"]["merges"] = [m.split(" ", 1) for m in merges if m != only] + (
        [missing.split(" ", 1)] if missing else []
    )
    other = Tokenizer.from_str(json.dumps(data))
    number = data["model"]["vocab"].get(pair.replace(" ", "", 1))
    text: str = "" if number is None else tokenizer.decode([number])
    own = tokenizer(text, add_special_tokens=False)["input_ids"]
    return text if own != other.encode(text, add_special_tokens=False).ids else None
