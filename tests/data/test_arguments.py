"""F79, neighbours of a `tools` column: its JSON, a list of JSON, one object, an object of lists
with gaps, a column of another name; `documents` and `chat_template_kwargs`; empty ones. Broken are
a JSON that ends early, text, numbers, names that are decided here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drafttrain.data.prompts import PromptFile, by_reason, unread_columns
from drafttrain.data.shapes import Unusable, parse
from drafttrain.data.template import ChatPieces
from drafttrain.target.prompts import open_prompts
from tests.helpers import CHATML, tiny_chat_target, tiny_tokenizer

TAKES = CHATML + "{% if tools %}{% for t in tools %}[{{ t.name }}]{% endfor %}{% endif %}"
TOOL = {"name": "add", "parameters": {"type": "object"}}


@pytest.mark.field("F79")
@pytest.mark.parametrize(
    "tools",
    [
        [TOOL],
        TOOL,
        json.dumps([TOOL]),
        json.dumps(TOOL),
        [json.dumps(TOOL)],
        [{**TOOL, "gap": None}],
        {"name": ["add"], "parameters": [{"type": "object"}]},
    ],
)
def test_tools_in_any_form_are_given_to_the_template(tools: Any) -> None:
    prompt = parse({"prompt": "a", "tools": tools})
    assert prompt.arguments == {"tools": [TOOL]}
    renamed = parse({"prompt": "a", "functions": tools}, {"tools": "functions"})
    assert renamed == prompt
    pieces = ChatPieces(tiny_tokenizer(TAKES), (2,))
    text = pieces.given(prompt.arguments).render([{"role": "user", "content": "a"}], prompt=True)
    assert text.endswith("[add]")


@pytest.mark.field("F79")
@pytest.mark.parametrize("empty", [None, "", "  ", [], "[]", "null", {}])
def test_empty_columns_change_nothing(empty: Any) -> None:
    assert parse({"prompt": "a", "tools": empty, "chat_template_kwargs": None}).arguments == {}


@pytest.mark.field("F79")
def test_other_columns_of_the_template() -> None:
    row = {"prompt": "a", "documents": '[{"title": "t"}]', "chat_template_kwargs": {"x": 1}}
    assert parse(row).arguments == {"documents": [{"title": "t"}], "x": 1}


@pytest.mark.field("F79")
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"tools": '[{"name": "add"'}, "a tools column whose JSON cannot be read"),
        ({"tools": "none of them"}, "a tools column whose JSON cannot be read"),
        ({"tools": 3}, "a tools column that is not a list of objects"),
        ({"tools": ["3"]}, "a tools column that is not a list of objects"),
        ({"documents": "[1]"}, "a documents column that is not a list of objects"),
        ({"tools": '[{"a":' + '{"a":' * 600 + "1" + "}" * 600 + "}]"}, "nested too deep"),
        ({"tools": {"name": ["f", "g"], "d": ["x"]}}, "lists are of unequal lengths"),
        ({"chat_template_kwargs": "[]"}, "a chat_template_kwargs column that is not an object"),
        ({"chat_template_kwargs": {"tokenize": 1}}, "tokenize, which is decided here"),
    ],
)
def test_broken_columns_leave_the_row_out_in_words(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        parse({"prompt": "a", **row})


@pytest.mark.field("F79")
def test_broken_and_unread_ones_are_counted_with_their_rows(tmp_path: Path) -> None:
    lines = [{"prompt": "a"}, {"prompt": "a", "tools": "[{"}, {"prompt": "a", "tools": [TOOL]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = PromptFile(path=str(tmp_path / "p.jsonl")).read(None)
    assert by_reason(found.skipped) == {"a tools column whose JSON cannot be read": [2]}
    assert unread_columns(found, ChatPieces(tiny_tokenizer(), ())) == {"tools": [3]}
    assert unread_columns(found, ChatPieces(tiny_tokenizer(TAKES), ())) == {}
    said: list[str] = []
    source = open_prompts(str(tmp_path / "p.jsonl"), {})
    plain = source.ids(tiny_chat_target(), None, said.append)
    assert len(plain) == 2 and plain[0] == plain[1]
    assert any("column tools of rows 3, which the chat template does not read" in s for s in said)
    taken = open_prompts(str(tmp_path / "p.jsonl"), {}).ids(
        tiny_chat_target(TAKES), None, said.append
    )
    assert len(taken[1]) > len(taken[0])
