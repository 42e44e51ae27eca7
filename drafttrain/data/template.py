"""A tokenizer's chat template, cut where texts are written by the target.

A conversation grows by pieces: the template's own text around the turns is encoded, what the target
writes is kept as the ids it chose. Nothing written is ever decoded and encoded again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jinja2 import meta
from transformers.utils.chat_template_utils import _compile_jinja_template

from drafttrain.checks import shown
from drafttrain.data.arguments import RESERVED, check_plain, is_list_of_objects
from drafttrain.data.bounded import within
from drafttrain.data.conversations import Row
from drafttrain.errors import InputError, first_line, panicked

Message = dict[str, str]

_MARKS = ("Qz0userQz", "Qz1answerQz", "Qz2userQz")
_EARLIER = ("Qz5userQz", "Qz6answerQz")
"""Of turns before those that are looked at."""
_THOUGHT = "Qz3thoughtQz"
REASONING_END = "</think>"
MOST_SECONDS, MOST_MEMORY = 10.0, 2 << 30
"""That a template may take for one text: it is a program of the tokenizer's, and may have loops."""
MOST_CHARACTERS = 16 << 20
"""Of what it makes of one conversation."""
_CHANCE = re.compile(r"\|\s*random\b|\blipsum\b")
_ARGUMENTS = "_drafttrain_template_arguments"


def arguments_of(tokenizer: Any) -> dict[str, Any]:
    """What every rendering of a tokenizer's template is given; see `give_arguments`."""
    return dict(getattr(tokenizer, _ARGUMENTS, None) or {})


def give_arguments(tokenizer: Any | None, given: object) -> None:
    """Settings `target.template.*`, to be given to every rendering of a tokenizer's chat template.

    Raises: InputError for what the template does not take.
    """
    if given is None or given == {}:
        return
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InputError(
            f"target.template={shown(given)}: needs arguments of the chat template by name, such "
            "as target.template.enable_thinking=false"
        )
    template = getattr(tokenizer, "chat_template", None)
    for name, value in given.items():
        where = f"target.template.{name}={shown(value)}"
        if not template:
            raise InputError(f"{where}: this target has no chat template that could take it")
        if name in RESERVED:
            raise InputError(f"{where}: {name} is decided here and cannot be given")
        if name == "chat_template":
            names = sorted(template) if isinstance(template, dict) else []
            if value not in names:
                raise InputError(
                    f"{where}: the tokenizer has no template of that name; its named templates "
                    f"are: {', '.join(names) or 'none'}"
                )
        elif name in ("tools", "documents") and not is_list_of_objects(value):
            raise InputError(f"{where}: needs a list of objects")
        try:
            check_plain(value)
        except ValueError as error:
            raise InputError(
                f"{where}: needs plain values, as JSON has them, of text and finite numbers"
            ) from error
        if _is_no(value) and not _quotes(template, value):
            raise InputError(
                f"{where}: this is a text, which a template takes for true: give "
                f"target.template.{name}=false, without quotes"
            )
    setattr(tokenizer, _ARGUMENTS, dict(given))
    if unread := ChatPieces(tokenizer, ()).unread(given):
        delattr(tokenizer, _ARGUMENTS)
        raise InputError(
            f"target.template.{unread[0]}: the chat template reads no {unread[0]}: leave it out, "
            "or give a name that the template has"
        )


def _is_no(value: object) -> bool:
    return isinstance(value, str) and value.lower() in ("false", "no", "off")


def _quotes(template: object, word: object) -> bool:
    """Does a template, or one of several by name, compare something with a word?"""
    texts = template.values() if isinstance(template, Mapping) else (template,)
    return any(f"{mark}{word}{mark}" in str(text) for text in texts for mark in "'\"")


@functools.lru_cache(maxsize=16)
def variables_of(template: str) -> frozenset[str]:
    """The names that a chat template looks up among what it is given: no text of its own, no word
    of its language, no attribute, and nothing that it always sets before it reads it.

    Raises: whatever the template's compilation raises, for one that cannot be read.
    """
    environment = _compile_jinja_template(template).environment  # With the tags transformers adds.
    return frozenset(meta.find_undeclared_variables(environment.parse(template)))


class ChatPieces:
    """Ids to feed between turns. `stop_ids` end a turn and are part of what the writer wrote.
    `arguments` are given to every rendering, next to those of the tokenizer."""

    def __init__(
        self, tokenizer: Any, stop_ids: tuple[int, ...], arguments: Mapping[str, Any] | None = None
    ) -> None:
        if tokenizer is None:
            raise InputError("this target came without a tokenizer: text cannot be read or written")
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                "the target's tokenizer has no chat template: give a chat model, or set "
                "tokenizer.chat_template; a base model goes on with plain texts: synthesize "
                "prompts=text prompts.path=<file>, fit data=tokens, generate chat=false"
            )
        if _CHANCE.search(json.dumps(tokenizer.chat_template)):
            raise InputError(
                "the chat template draws by chance (random, lipsum), so a conversation would be "
                "another text each time: give a tokenizer with one that does not"
            )
        self.tokenizer = tokenizer
        self.arguments = {**arguments_of(tokenizer), **(arguments or {})}
        self.stop_ids = stop_ids
        self.stop_texts = sorted((tokenizer.decode([i]) for i in stop_ids), key=len, reverse=True)

    def given(self, arguments: Mapping[str, Any]) -> ChatPieces:
        """The same for a row that brings arguments of its own."""
        return ChatPieces(self.tokenizer, self.stop_ids, arguments) if arguments else self

    def unread(self, names: Iterable[str]) -> list[str]:
        """Those of some arguments that the template does not read."""
        chosen, tools = self.arguments.get("chat_template"), self.arguments.get("tools")
        try:
            with within(MOST_SECONDS, MOST_MEMORY):
                read = variables_of(self.tokenizer.get_chat_template(chosen, tools))
        except Exception:  # It cannot be read, or none of several is chosen: rendering says so.
            return []
        return [name for name in names if not (name == "chat_template" or name in read)]

    def render(self, messages: list[Message], *, prompt: bool) -> str:
        """The template's text; `prompt` ends it with the header of the next answer.

        Raises: InputError with the template's own message when it refuses the messages, and when it
            takes more time or memory than any text needs.
        """
        try:
            with within(MOST_SECONDS, MOST_MEMORY):
                text = self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=prompt, **self.arguments
                )
        except MemoryError as error:
            raise InputError(
                f"the chat template refuses: it asks for more than {MOST_MEMORY / 1e9:.1f} GB of "
                "memory"
            ) from error
        except Exception as error:  # Templates raise what they like.
            raise InputError(f"the chat template refuses: {first_line(error)}") from error
        if not isinstance(text, str) or len(text) > MOST_CHARACTERS:
            what = f"{len(text)} characters" if isinstance(text, str) else type(text).__name__
            raise InputError(
                f"the chat template makes {what} of a conversation, at most {MOST_CHARACTERS} "
                "characters are read"
            )
        return text

    def encode(self, text: str) -> list[int]:
        """Raises: InputError if the tokenizer fails on the text."""
        try:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        except BaseException as error:
            if not isinstance(error, Exception) and not panicked(error):
                raise
            raise InputError(f"the tokenizer refuses: {first_line(error)}") from error

    def before_user(self, system: str | None = None) -> list[int]:
        """From the start of the text to the first user turn's first token."""
        text = self.render([*_system(system), {"role": "user", "content": _MARKS[0]}], prompt=False)
        ids = self.encode(self._split(text, _MARKS[0])[0])
        if not ids:
            raise InputError(
                "the chat template puts nothing before a user turn, so the target cannot write "
                "one: give prompts"
            )
        return ids

    def user_to_answer(self, turn: int = 1, system: str | None = None) -> list[int]:
        """From after the end token of a user turn, which count from 1, to the answer's first
        token."""
        messages = [*_before(turn - 1, system), {"role": "user", "content": _MARKS[0]}]
        text = self.render(messages, prompt=True)
        return self.encode(self._after_stop(self._split(text, _MARKS[0])[1]))

    def answer_to_user(self, turn: int = 2, system: str | None = None) -> list[int]:
        """From after an answer's end token to the first token of the user turn that follows."""
        text = self._between(_MARKS[2], turn, system, prompt=False)
        return self.encode(self._after_stop(text.partition(_MARKS[2])[0]))

    def first_prompt(self, messages: list[Message]) -> list[int]:
        """The full text of the given messages, up to the answer's first token."""
        return self.encode(self.render(messages, prompt=True))

    def answer_to_answer(self, user: str, turn: int = 2, system: str | None = None) -> list[int]:
        """From after an answer's end token, over the user turn that follows, to the next answer's
        first token. Some templates number their turns, or repeat the system text."""
        return self.encode(self._after_stop(self._between(user, turn, system, prompt=True)))

    def check(self, system: str | None, users: tuple[str, ...]) -> list[int]:
        """Render every turn without answers; ids up to the first answer. Raises: InputError if the
        template refuses."""
        ids = self.first_prompt([*_system(system), {"role": "user", "content": users[0]}])
        for turn, user in enumerate(users[1:], start=2):
            self._between(user, turn, system, prompt=True)
        return ids

    @functools.lru_cache(maxsize=2)  # noqa: B019 - two entries
    def grows(self, *, with_system: bool) -> bool:
        """Does a text with a further turn start with the text before it?

        Not so if, for instance, only the header of the last answer has an empty reasoning block, or
        the system text moves to the last turn. Blanks around an answer do not count.
        """
        lead: list[Message] = [
            *_system("Qz4systemQz" if with_system else None),
            {"role": "user", "content": _MARKS[0]},
        ]
        answer: list[Message] = [
            {"role": "assistant", "content": _MARKS[1]},
            {"role": "user", "content": _MARKS[2]},
        ]
        texts = [self.render([*lead, *answer * turns], prompt=True) for turns in (0, 1)]
        with contextlib.suppress(InputError):  # It takes no third turn, which is said there.
            texts.append(self.render([*lead, *answer * 2], prompt=True))
        before = [text.rstrip() for text in texts]
        return all(
            longer.startswith(start) and longer[len(start) :].lstrip().startswith(_MARKS[1])
            for start, longer in itertools.pairwise(before)
        )

    @functools.cached_property
    def keeps_reasoning(self) -> bool:
        """Does the template show an earlier answer's <think> block in later turns?"""
        answer = f"<think>\n{_THOUGHT}\n{REASONING_END}\n\n{_MARKS[1]}"
        messages = [
            {"role": "user", "content": _MARKS[0]},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": _MARKS[2]},
        ]
        return answer in self.render(messages, prompt=True)

    def turn_end(self) -> int | None:
        """The id that the template puts right after an answer; None if nothing is there."""
        ids = self.encode(
            self._between(_MARKS[2], prompt=False).partition(_MARKS[2])[0].lstrip(" ")
        )
        return ids[0] if ids else None

    def _between(self, user: str, turn: int = 2, system: str | None = None, *, prompt: bool) -> str:
        messages = [
            *_before(turn - 2, system),
            {"role": "user", "content": _MARKS[0]},
            {"role": "assistant", "content": _MARKS[1]},
            {"role": "user", "content": user},
        ]
        return self._split(self.render(messages, prompt=prompt), _MARKS[1])[1]

    def _split(self, text: str, mark: str) -> tuple[str, str]:
        if text.count(mark) != 1:
            raise InputError(
                "the chat template changes or repeats the turns it is given: answers cannot be "
                "kept as written"
            )
        before, _, after = text.partition(mark)
        return before, after

    def _after_stop(self, text: str) -> str:
        """Without the leading end token, which the writer wrote itself, and without a blank before
        it."""
        for stop in self.stop_texts:
            if stop and text.lstrip(" ").startswith(stop):
                return text.lstrip(" ")[len(stop) :]
        return text


def _system(text: str | None) -> list[Message]:
    return [{"role": "system", "content": text}] if text else []


def _before(turns: int, system: str | None) -> list[Message]:
    """That many turns with their answers."""
    user, answer = _EARLIER
    talk = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return [*_system(system), *talk * turns]


def text_ids(tokenizer: Any, text: str, most: int) -> list[int]:
    """The first ids of a text that a target goes on with, as its tokenizer begins a text.

    Raises: InputError if the tokenizer fails on it, or there are none.
    """
    try:
        ids = list(tokenizer(text)["input_ids"])
        ends = ids[-1:] == [tokenizer.eos_token_id] and len(ids) > 1
        own = list(tokenizer(text, add_special_tokens=False)["input_ids"]) if ends else []
    except BaseException as error:
        if not isinstance(error, Exception) and not panicked(error):
            raise
        raise InputError(f"the tokenizer refuses: {first_line(error)}") from error
    if ends and not (own and ids[-len(own) :] == own):
        ids.pop()  # A text that goes on has no end, but for one that it spells itself.
    if not ids:
        raise InputError("a text without tokens")
    return ids[:most]


def spelt_tokens(tokenizer: Any, text: str) -> list[str]:
    """The control tokens that a text spells, each once. A tokenizer reads them as such, in chats
    and in plain texts alike, unless it splits them."""
    if getattr(tokenizer, "split_special_tokens", False):
        return []
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return sorted({str(token) for token in added if token.special and str(token) in text})


def changed_by_reencoding(tokenizer: Any, rows: Iterable[Row], group: int = 512) -> int:
    """Rows whose answers would have other ids had they been decoded and encoded again, as data sets
    often are."""
    changed: set[int] = set()
    answers = [(row.row, row.ids[start:end]) for row in rows for start, end in row.spans]
    for first in range(0, len(answers), group):
        part = answers[first : first + group]
        texts = [tokenizer.decode(list(ids), clean_up_tokenization_spaces=False) for _, ids in part]
        again = tokenizer(texts, add_special_tokens=False)["input_ids"]
        changed |= {
            row for (row, ids), other in zip(part, again, strict=True) if list(ids) != list(other)
        }
    return len(changed)
