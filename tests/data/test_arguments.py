"""F79, neighbours of a `tools` column: its JSON, a list of JSON, one object, an object of lists
with gaps, a column of another name; `documents` and `chat_template_kwargs`; empty ones. Broken are
a JSON that ends early, text, numbers, names that are decided here.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from drafttrain.data.arguments import OF_TEMPLATE, RESERVED
from drafttrain.data.numbered import by_reason, unread_columns
from drafttrain.data.prompts import PromptDataset, PromptFile
from drafttrain.data.shapes import TableRow, Unusable, parse
from drafttrain.data.template import ChatPieces, give_arguments
from drafttrain.errors import InputError
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


# A key without a value: in JSON it is one, such as a default; a table fills in every key that any
# of its rows has, so there it is none, but for JSON within a table. Tried: JSON Lines, parquet and
# data sets; as objects, as JSON, as a list of JSON, as an object of lists; deep within, in
# documents and in chat_template_kwargs.


@pytest.mark.field("F79")
def test_null_is_a_value_in_json_and_a_gap_in_tables(tmp_path: Path) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    tool = {"name": "f", "parameters": {"a": {"default": None, "enum": [1, 2]}}}
    plain = {"name": "f", "parameters": {"a": {"enum": [1, 2]}}}
    forms: list[Any] = [[tool], json.dumps([tool]), [json.dumps(tool)]]
    rows = [{"prompt": "a", "tools": form, "documents": form} for form in forms]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def given(source: PromptFile | PromptDataset) -> list[Any]:
        arguments = [prompt.arguments for _, prompt in source.read(None).rows if prompt]
        assert all(one["documents"] == one["tools"] for one in arguments)
        return [one["tools"] for one in arguments]

    assert given(PromptFile(path=str(path))) == [[tool]] * 3
    other = {"name": "g", "parameters": {"a": {"default": 3, "enum": [1]}}}
    for place, form in enumerate(forms):
        like = {0: [other], 1: json.dumps([other]), 2: [json.dumps(other)]}[place]
        table = [{"prompt": "a", "tools": one, "documents": one} for one in (form, like)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "p.parquet")
        datasets.Dataset.from_list(table).save_to_disk(str(tmp_path / f"{place}"))
        expected = [[tool if place else plain], [other]]
        assert given(PromptFile(path=str(tmp_path / "p.parquet"))) == expected
        assert given(PromptDataset(path=str(tmp_path / f"{place}"))) == expected
    row = {"prompt": "a", "chat_template_kwargs": {"x": None, "tools": [tool]}}
    assert parse(row).arguments == {"x": None, "tools": [tool]}
    assert parse(TableRow(row)).arguments == {"tools": [plain]}
    lists = {"name": ["f", "g"], "strict": [None, True]}
    assert parse({"prompt": "a", "tools": lists}).arguments == {
        "tools": [{"name": "f"}, {"name": "g", "strict": True}]
    }


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
        ({"tools": '[{"a": NaN}]'}, "values that JSON lacks"),
        ({"tools": [{"a": {"b": [float("nan")]}}]}, "values that JSON lacks"),
        ({"documents": '[{"a": 1e999}]'}, "values that JSON lacks"),
        ({"chat_template_kwargs": {"x": float("-inf")}}, "values that JSON lacks"),
        ({"tools": '[{"a": "\\ud800"}]'}, "text that is not Unicode"),
        ({"tools": [{"\udfff": 1}]}, "text that is not Unicode"),
        ({"chat_template_kwargs": {"x": ["\ud800"]}}, "text that is not Unicode"),
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


@pytest.mark.field("F80")
def test_control_tokens_in_prompts_to_decode_from_are_named(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "a", "tools": [{"name": "<|im_start|>"}]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said: list[str] = []
    open_prompts(str(tmp_path / "p.jsonl"), {}).ids(tiny_chat_target(TAKES), None, said.append)
    assert said == ["rows 2 spell <|im_start|>, which is read as the control token"]


# Whether a template reads an argument: not a part of a longer name, a word of its language or of
# its own text, an attribute, a comment, raw text, or a name that it always sets itself; but one
# that it sets only where it is not given, that only a macro reads, a block, or a named template.

READS = (
    "{# later #}{% set mode = 'x' %}{% raw %}{{ unread }}{% endraw %}"
    "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
    "{% macro f(content) %}{{ content ~ inner }}{% endmacro %}{% set deep = kwargs.deeper %}"
    "{% set budget = budget if budget is defined else 3 %}{{ f(1) ~ mode ~ enable_thinking }}"
    "{% for m in messages %}{% generation %}{{ m.content }}{{ kept }}{% endgeneration %}"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}say thinking"
)


@pytest.mark.field("F79", "F81")
def test_only_names_that_a_template_looks_up_count_as_read() -> None:
    pieces = ChatPieces(tiny_tokenizer(READS), ())
    read = ["enable_thinking", "inner", "budget", "kept", "messages"]
    plain = ["think", "thinking", "content", "if", "later", "mode", "unread", "deeper", "m", "say"]
    assert pieces.unread([*read, *plain, "chat_template"]) == plain
    for name in plain:
        with pytest.raises(InputError, match=f"the chat template reads no {name}"):
            give_arguments(tiny_tokenizer(READS), {name: 1})
    give_arguments(tiny_tokenizer(READS), dict.fromkeys(read[:-1], 1))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": CHATML, "tool_use": TAKES}
    assert ChatPieces(tokenizer, ()).unread(["tools"]) == ["tools"]
    assert ChatPieces(tokenizer, (), {"tools": [TOOL]}).unread(["tools"]) == []


@pytest.mark.parametrize("template", ["{% if %}", "{{ x | nofilter }}"])
def test_of_a_template_that_cannot_be_read_rendering_says_so(template: str) -> None:
    pieces = ChatPieces(tiny_tokenizer(template), ())
    assert pieces.unread(["x"]) == []
    with pytest.raises(InputError, match="the chat template refuses"):
        pieces.render([{"role": "user", "content": "a"}], prompt=True)


@pytest.mark.field("F81")
@pytest.mark.parametrize("value", [float("nan"), [float("inf")], "\ud800", {"a": {"\ud800": 1}}])
def test_settings_are_checked_as_columns_are(value: Any) -> None:
    with pytest.raises(InputError, match="needs plain values"):
        give_arguments(tiny_tokenizer(READS), {"enable_thinking": value})


def test_what_transformers_takes_for_itself_is_reserved() -> None:
    taken = {
        *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
        *inspect.signature(render_jinja_template).parameters,
    }
    assert taken - {"kwargs", "chat_template", *OF_TEMPLATE} <= RESERVED
