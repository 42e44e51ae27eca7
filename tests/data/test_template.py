"""The pieces between turns put together are what the tokenizer's own template renders."""

from __future__ import annotations

import resource
import signal
from typing import Any

import pytest

from drafttrain.data.conversations import Row
from drafttrain.data.template import ChatPieces, changed_by_reencoding, spelt_tokens, text_ids
from drafttrain.errors import InputError
from tests.helpers import ALTERNATING, CHATML, tiny_tokenizer
from tests.messages import said

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim "
    "}}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' <|im_end|>' }}{% endif %}{% endfor %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    + CHATML
)
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].lstrip() }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EMPTY_BLOCK = CHATML.replace(
    "assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}"
)
SYSTEM_LAST = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt "
    "%}<|im_start|>assistant\n{% endif %}"
)


def pieces(template: str) -> ChatPieces:
    return ChatPieces(tiny_tokenizer(template), (2,))


def grown(chat: ChatPieces, system: str | None, users: list[str], answers: list[str]) -> str:
    """A conversation put together as the writer does it, as text."""
    tokenizer = chat.tokenizer
    lead = [{"role": "system", "content": system}] if system else []
    ids = chat.first_prompt([*lead, {"role": "user", "content": users[0]}])
    for answer, following in zip(answers, [*users[1:], None], strict=True):
        ids += tokenizer(answer, add_special_tokens=False)["input_ids"] + [2]
        if following is not None:
            ids += chat.answer_to_answer(following)
    return tokenizer.decode(ids)


@pytest.mark.field("F03", "F06")
@pytest.mark.parametrize("template", [CHATML, LLAMA3, DEFAULT_SYSTEM, ALTERNATING])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_pieces_join_to_the_templates_own_text(template: str, system: str | None) -> None:
    users, answers = ["one the", "two\nthen", "three 🙂"], ["first", "second answer", "third"]
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for user, answer in zip(users, answers, strict=True):
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    chat = pieces(template)
    full = chat.tokenizer.apply_chat_template(messages, tokenize=False)
    text = grown(chat, system, users, answers)
    assert full.startswith(text) and full[len(text) :].strip() == ""
    if system:
        assert text.count(system) == 1
    assert chat.grows(with_system=bool(system))


def test_self_written_turns_start_like_given_ones() -> None:
    chat = pieces(DEFAULT_SYSTEM)
    user = chat.encode("hello")
    ids = chat.before_user() + user + [2] + chat.user_to_answer()
    assert ids == chat.first_prompt([{"role": "user", "content": "hello"}])
    assert chat.before_user("Other.") != chat.before_user()
    assert chat.turn_end() == 2


def test_a_blank_before_the_end_token_is_not_written_twice() -> None:
    text = grown(pieces(LLAMA2), None, ["one", "two"], [" first", " second"])
    assert text == "[INST] one [/INST] first<|im_end|>[INST] two [/INST] second<|im_end|>"


@pytest.mark.field("F04")
def test_templates_that_rewrite_earlier_turns_are_noticed() -> None:
    assert pieces(CHATML).keeps_reasoning and not pieces(REASONING).keeps_reasoning
    assert pieces(REASONING).grows(with_system=False)
    assert not pieces(EMPTY_BLOCK).grows(with_system=False)
    assert pieces(SYSTEM_LAST).grows(with_system=False) and not pieces(SYSTEM_LAST).grows(
        with_system=True
    )


def test_refusals_carry_the_templates_message() -> None:
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(InputError, match=said("data.template_refuses")):
        pieces(ALTERNATING).render(twice, prompt=True)
    with pytest.raises(InputError, match=said("data.template_refuses_text")):
        broken = (
            "{% if 'bad' in messages[-1].content %}{{ raise_exception('not this text') }}{% endif "
            "%}" + CHATML
        )
        pieces(broken).check(None, ("good", "bad"))
    with pytest.raises(InputError, match=said("data.template_changes_turns")):
        pieces("{{ messages[0].content | upper }}").before_user()
    with pytest.raises(InputError, match=said("data.template_without_lead")):
        pieces("{{ messages[0].content }}").before_user()


DOUBLING = (
    "{% set ns = namespace(x='0123456789') %}"
    "{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
)
LOOPING = (
    "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (LOOPING, "data.template_takes_long"),
        (DOUBLING, "data.template_takes_memory"),
        ("{{ 'x' * 99999999999 }}", "data.template_takes_memory"),
        ("{{ messages[0].content * 1000 }}", "data.template_writes_much"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "data.template_recurses"),
    ],
    ids=["loops", "doubles", "multiplies", "much", "itself"],
)
def test_a_template_is_a_program_and_kept_within_bounds(
    template: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "drafttrain.data.template.MOST_SECONDS", 0.2 if template == LOOPING else 5.0
    )
    monkeypatch.setattr("drafttrain.data.template.MOST_MEMORY", 300 << 20)
    monkeypatch.setattr("drafttrain.data.template.MOST_CHARACTERS", 4096)
    before = signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(InputError, match=said(fault)):
        pieces(template).before_user()
    assert (signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_AS)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_timer_that_runs_already_is_not_touched() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 60)
        assert pieces(CHATML).before_user()
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 50 and not rung
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_tokenizer_that_fails_on_a_text_says_so() -> None:
    class PanicException(BaseException):
        """As `tokenizers` raises it: no Exception."""

    chat = pieces(CHATML)
    tokenizer = chat.tokenizer

    def broken(error: BaseException) -> Any:
        def encode(*given: Any, **more: Any) -> Any:
            raise error

        return encode

    for error in (PanicException("index out of bounds"), ValueError("index out of bounds")):
        chat.tokenizer = broken(error)
        with pytest.raises(InputError, match=said("data.tokenizer_refuses")):
            chat.encode("a")
    chat.tokenizer = broken(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        chat.encode("a")
    chat.tokenizer = tokenizer
    assert chat.encode("a")


def test_a_target_without_a_template_says_so() -> None:
    with pytest.raises(InputError, match=said("data.no_tokenizer")):
        ChatPieces(None, (2,))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(InputError, match=said("data.no_template")):
        ChatPieces(tokenizer, (2,))


@pytest.mark.field("F80")
def test_ids_of_a_text_begin_as_the_tokenizer_begins_one() -> None:
    tokenizer = tiny_tokenizer("")
    plain = tokenizer("the inner")["input_ids"]
    assert text_ids(tokenizer, "the inner", 3) == plain[:3]

    def framed(text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        own = tokenizer(text)["input_ids"]
        return {"input_ids": [0, *own, tokenizer.eos_token_id] if add_special_tokens else own}

    framed.eos_token_id = tokenizer.eos_token_id  # type: ignore[attr-defined]
    assert text_ids(framed, "the inner", 99) == [0, *plain]  # The text goes on: no end.
    # One that the text spells is its own, and read as the control token that it is.
    for begin in (tokenizer, framed):
        spelt = text_ids(begin, "the <|im_end|> inner<|im_end|>", 99)
        assert spelt.count(2) == 2 and spelt[-1] == 2
    with pytest.raises(InputError, match="without tokens"):
        text_ids(tokenizer, "", 9)


@pytest.mark.field("F80")
def test_control_tokens_that_a_text_spells_are_named() -> None:
    tokenizer = tiny_tokenizer()
    text = "a <|im_end|> b <|im_start|> <|im_end|> <|im_en|> th"
    assert spelt_tokens(tokenizer, text) == ["<|im_end|>", "<|im_start|>"]
    assert spelt_tokens(tokenizer, "a <| im_end |>") == []
    tokenizer.split_special_tokens = True
    assert spelt_tokens(tokenizer, text) == []


@pytest.mark.field("F08")
def test_rows_that_another_encoding_would_change_are_counted() -> None:
    tokenizer = tiny_tokenizer()
    t, h, th = (tokenizer.convert_tokens_to_ids(word) for word in ("t", "h", "th"))
    half = tokenizer("🙂", add_special_tokens=False)["input_ids"][:2]
    rows = [
        Row(i, (5, *ids, 2), ((1, len(ids) + 2),), ("stop",))
        for i, ids in enumerate([(th,), (t, h), tuple(half)])
    ]
    rows.append(Row(3, (t, h, 5, 2), ((2, 4),), ("stop",)))  # What was only read does not count.
    assert changed_by_reencoding(tokenizer, rows, group=2) == 2


@pytest.mark.field("F04")
@pytest.mark.parametrize("part", ["{{ ['a', 'b'] | random }}", "{{ lipsum(1) }}"])
def test_a_template_that_draws_by_chance_is_refused(part: str) -> None:
    with pytest.raises(InputError, match="the chat template draws by chance"):
        ChatPieces(tiny_tokenizer(part + CHATML), ())
    ChatPieces(tiny_tokenizer("{{ 'random, lip sum' }}" + CHATML), ())
