"""Sample answers, with what was drafted and accepted in them marked."""

from __future__ import annotations

from drafttrain.reporting.page.markup import Content, Markup, element
from drafttrain.reporting.page.parts import missing
from drafttrain.reporting.records import Answer, Record

SHADES = 4
"""Of marks; the last is for that many drafts and more."""
_LONG_PROMPT = 600
_MARKS = """\
Accepted drafts are marked: each mark is one pass of the target, fine lines divide its tokens. The
plain token after it is the one that the target chose itself."""
_IDS = " The target came without a tokenizer, so ids are shown instead of text."


def answers(record: Record) -> Content:
    found = record.samples
    if found is None or not found.answers:
        words, command = record.again
        return missing(
            "sample answers", f"fit keeps final.samples of those that it measures; {words}", command
        )
    how = (
        f"Held-out prompts, decoded with {found.tree}, temperature {found.temperature:g}, rule "
        f"{found.rule} ({found.guarantee}). "
    )
    shades = [
        (count, f"{count} or more" if count == SHADES else str(count))
        for count in range(1, SHADES + 1)
    ]
    key = [element("li", element("mark", word, class_=f"r{count}")) for count, word in shades]
    return [
        element("p", how + _MARKS + _IDS * (found.written_in == "ids")),
        element("ul", element("li", "accepted in one pass:"), key, class_="legend"),
        [_answer(one) for one in found.answers],
    ]


def _answer(answer: Answer) -> Markup:
    text: list[Content] = []
    for one in answer.passes:
        tokens = [element("span", token) for token in one.drafts if token]
        if tokens:
            count = len(one.drafts)
            text.append(
                element("mark", tokens, class_=f"r{min(count, SHADES)}", title=f"{count} accepted")
            )
        text.append(one.own)
    long = len(answer.prompt) > _LONG_PROMPT
    return element(
        "article",
        element(
            "p",
            answer.prompt,
            class_="prompt long" if long else "prompt",
            dir="auto",
            tabindex=0 if long else None,
        ),
        element("p", text, class_="answer", dir="auto"),
        element("p", _counts(answer), class_="note"),
    )


def _counts(answer: Answer) -> str:
    rounds = answer.passes[1:]
    written = sum(one.tokens for one in answer.passes)
    kept = sum(len(one.drafts) for one in answer.passes)
    words = (
        f"{written} tokens in {len(answer.passes)} passes of the target, {kept} of them accepted "
        "drafts"
    )
    if rounds:
        words += f"; tau {sum(one.tokens for one in rounds) / len(rounds):.2f}"
    return f"{words}; ended by {answer.finish}."
