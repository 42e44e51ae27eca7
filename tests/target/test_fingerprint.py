"""What is the same target, and what is not.

F93, neighbours of the older rotary schema: numbers written as 10000 and 10000.0, or as float32 has
them; keys that decide no logits (ends, padding, dropout, limits, keys that nobody reads); another
dtype, float16 too; another folder; sets, stores and packages with the fingerprint of an earlier
version. test_configs.py and test_rounding.py have more.
F75, neighbours of one merge taken away: one added, two exchanged, a normaliser, a pre-tokeniser, a
post-processor, an added token, and parts that are only written otherwise: pairs, types of tokens,
when an added token is looked for.
F81, neighbours of an argument: an edited template, a named one, one that the day changes, one that
refuses, arguments misspelt or taken by others.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers, processors

from drafttrain.data.template import ChatPieces, give_arguments
from drafttrain.errors import InputError
from drafttrain.target import fingerprint, load, modes, reading, tokenising
from drafttrain.target.model import Target
from drafttrain.training.resume import refuse_other_run
from tests.helpers import CHATML, tiny_chat_target, tiny_tokenizer
from tests.messages import said

THINKING = CHATML + (
    "{% if add_generation_prompt and not enable_thinking %}<think></think>{% endif %}"
    "{% if tools %}{{ tools }}{% endif %}"
)


@pytest.fixture(autouse=True)
def fresh() -> None:
    fingerprint._warn_once.cache_clear()


def warned(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(record.getMessage() for record in caplog.records)


def saved(target: Target, folder: Path, **keys: Any) -> Target:
    """The target read from a folder whose config.json has other keys; None takes one away."""
    target.model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | keys
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return load.hf(str(folder), dtype="float32", device="cpu", attention="sdpa")


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0}


@pytest.mark.field("F93")
def test_the_same_model_in_another_schema_and_folder_is_the_same(tmp_path: Path) -> None:
    target = load.tiny(rope_parameters=LINEAR)
    older = saved(
        target,
        tmp_path / "older",
        rope_parameters=None,
        rope_theta=20000,
        rope_scaling={"type": "linear", "factor": 2},
        rms_norm_eps=9.999999974752427e-07,
        eos_token_id=[1, 2],
        attention_dropout=0.1,
        unsloth_fixed=True,
    )
    newer = saved(target, tmp_path / "newer")
    ids = torch.arange(3, 40)[None]
    assert torch.equal(older.hidden(ids), newer.hidden(ids))
    assert older.fingerprint["config"] == newer.fingerprint["config"]
    for one, other in ((older, newer), (newer, older)):
        fingerprint.refuse_other(one.fingerprint, other.fingerprint, "the set", dtype=True)


@pytest.mark.field("F93")
def test_another_rotary_base_is_another_target_and_is_named() -> None:
    one, other = load.tiny(), load.tiny(rope_parameters={"rope_theta": 5e4, "rope_type": "default"})
    words = r"\(config: rope_parameters\.rope_theta 10000 there, 50000 here\)"
    with pytest.raises(InputError, match=said("packaging.another_target") + " " + words):
        fingerprint.refuse_other(one.fingerprint, other.fingerprint, "the set")


def recorded_before(target: Target) -> dict[str, str]:
    """The fingerprint of a target as earlier versions recorded it."""
    now = target.fingerprint
    earlier = json.loads(now["earlier"])
    kept = {part: now[part] for part in ("weights", "quantisation", "dtype")}
    return {**kept, **{part: digests[-1] for part, digests in earlier.items()}}


@pytest.mark.field("F93")
def test_what_an_earlier_version_recorded_is_still_recognised(tmp_path: Path) -> None:
    target = tiny_chat_target(rope_parameters=LINEAR)
    before = recorded_before(target)
    fingerprint.refuse_other(before, target.fingerprint, "the set", dtype=True, mode=True)
    fingerprint.refuse_other(target.fingerprint, before, "the package")
    resumed = {"facts": {"target": before}, "settings": {}}
    refuse_other_run(resumed, {"target": target.fingerprint}, {}, lambda _: None, Path())
    shifted = Target(target.model, other_tokenizer("added tokens"), "other")
    with pytest.raises(InputError, match=r"\(tokenizer .* there, another here\)"):
        fingerprint.refuse_other(before, shifted.fingerprint, "the set")


@pytest.mark.field("F93")
def test_what_ships_with_the_package_names_its_target_completely() -> None:
    """tests/test_embedded.py compares it with the target itself."""
    from drafttrain.data.conversations import read_set
    from drafttrain.data.datamodule import set_folder

    marks = read_set(set_folder("builtin:smollm2")).manifest["target"]["fingerprint"]
    assert set(marks) >= {*fingerprint.RECORDED, "dtype"} and marks["config"].startswith("{")


@pytest.mark.field("F93")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype_is_the_same_target_and_is_reported(
    dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = load.tiny().fingerprint, load.tiny(dtype=dtype).fingerprint
    with caplog.at_level(logging.WARNING):
        fingerprint.refuse_other(one, other, "the set")
        fingerprint.refuse_other(other, one, "the package")
        fingerprint.refuse_other(other, one, "the package")
    assert len(caplog.records) == 2
    assert f"the set was made with the target in float32, here it is in {dtype}" in warned(caplog)
    with pytest.raises(InputError, match=r"set target\.dtype=float32") as caught:
        fingerprint.refuse_other(one, other, "the store", dtype=True)
    assert "another target" not in str(caught.value)
    changed = {name: value for name, value in one.items() if name != fingerprint.HALF}
    if dtype == "float16":
        with pytest.raises(InputError, match=r"compare with target\.dtype=float32"):
            fingerprint.refuse_other(changed, other, "the set")


@pytest.mark.field("F93")
@pytest.mark.parametrize("part", ["config", "tokenizer", "chat_template", "earlier"])
@pytest.mark.parametrize("text", ['{"merges": 3, "arguments": 3, "texts": 3}', "{", "{}"])
def test_an_edited_fingerprint_is_another_in_words(part: str, text: str) -> None:
    own = tiny_chat_target()
    for given in (own.fingerprint, recorded_before(own)):
        edited = {**given, part: text}
        with contextlib.suppress(InputError):
            fingerprint.refuse_other(edited, own.fingerprint, "a", mode=True, own=own.tokenizer)
        fingerprint.mode_settings(edited)


# --- tokenizers -----------------------------------------------------------------------------------


def other_tokenizer(kind: str) -> Any:
    """A tokenizer with the vocabulary of `tiny_tokenizer` that differs in one part."""
    tokenizer = tiny_tokenizer()
    backend = tokenizer.backend_tokenizer
    if kind == "normaliser":
        backend.normalizer = normalizers.Replace("?", "!")
    elif kind == "pre-tokeniser":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == "post-processor":
        backend.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    elif kind == "added tokens":
        tokenizer.add_tokens(["zx"])
    elif kind == "special tokens":
        tokenizer.split_special_tokens = True
    elif kind == "same":
        backend.normalizer = normalizers.Sequence([])
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
    else:
        data = json.loads(backend.to_str())
        merges = data["model"]["merges"]
        if kind == "merge":
            merges.remove(["i", "n"])
        elif kind == "order":
            merges[2], merges[3] = merges[3], merges[2]
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(data))
    return tokenizer


DIFFERENCES = {
    "merge": r"merges: 5 there, 4 here, only there 'i n'.*the text \"in\" has other ids",
    "order": r"merges: 5 there, 5 here, in another order",
    "normaliser": r"normaliser is none there, .*Replace.* here.*the text \"\?\" has other ids",
    "pre-tokeniser": r"pre-tokeniser is .*false.* there, .*true.* here.*the text .* has other ids",
    "post-processor": r"post-processor is none there, .*ids around.*\[0\], .*A.* here",
    "special tokens": r"special tokens is none there, split here",
    "added tokens": r"added tokens: 3 there, 4 here, only here .*zx",
}


@pytest.mark.field("F75")
@pytest.mark.parametrize("kind", DIFFERENCES)
def test_another_tokenizer_is_refused_by_the_part_that_differs(kind: str) -> None:
    model = load.tiny().model
    one, other = (
        Target(model, tokenizer, "t") for tokenizer in (tiny_tokenizer(), other_tokenizer(kind))
    )
    with pytest.raises(InputError, match=said("packaging.another_target")) as caught:
        fingerprint.refuse_other(one.fingerprint, other.fingerprint, "a", own=other.tokenizer)
    words = str(caught.value)
    assert "(tokenizer: its " in words
    assert re.search(DIFFERENCES[kind], words), words


@pytest.mark.field("F75")
def test_a_merge_that_is_only_here_is_named_too() -> None:
    theirs, own = (tokenising.parts_of(one) for one in (other_tokenizer("merge"), tiny_tokenizer()))
    words = tokenising.difference(theirs, own, tiny_tokenizer())
    assert "4 there, 5 here, only here 'i n'" in words and 'the text "in" has other ids' in words


@pytest.mark.field("F75")
def test_a_tokenizer_that_is_only_written_otherwise_is_the_same() -> None:
    assert tokenising.parts_of(other_tokenizer("same")) == tokenising.parts_of(tiny_tokenizer())


@pytest.mark.field("F75")
def test_merges_that_are_dropped_by_chance_are_kept(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    data["model"]["dropout"] = 0.5
    file.write_text(json.dumps(data), encoding="utf-8")
    parts = tokenising.parts_of(reading.read_tokenizer(str(tmp_path)))
    assert parts == tokenising.parts_of(tiny_tokenizer())


def template(single: str, pair: str | None = None, number: int = 0) -> Any:
    ends = [("<|endoftext|>", number)]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)


def processed(by: Any) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = by
    return tokenizer


FIRST = "<|endoftext|> $A"
PROCESSORS: list[tuple[Any, Any, bool]] = [
    (template(FIRST), template(FIRST, f"{FIRST} <|endoftext|> $B"), True),
    (template(FIRST), template("<|endoftext|>:1 $A:1"), True),
    (template(FIRST), processors.Sequence([processors.ByteLevel(), template(FIRST)]), True),
    (template("$A", "$A <|endoftext|> $B"), processors.ByteLevel(), True),
    (
        processors.BertProcessing(("b", 2), ("a", 1)),
        processors.RobertaProcessing(("b", 2), ("a", 1)),
        True,
    ),
    (template(FIRST), template("$A <|endoftext|>"), False),
    (template(FIRST), template(FIRST, number=1), False),
    (template(FIRST), template(f"<|endoftext|> {FIRST}"), False),
    (
        processors.BertProcessing(("b", 2), ("a", 1)),
        processors.BertProcessing(("a", 1), ("b", 2)),
        False,
    ),
]


@pytest.mark.field("F75")
@pytest.mark.parametrize(("one", "other", "same"), PROCESSORS)
def test_a_post_processor_counts_by_the_ids_that_it_adds(one: Any, other: Any, same: bool) -> None:
    tokenizers = processed(one), processed(other)
    ids = [made("hello ?")["input_ids"] for made in tokenizers]
    assert (ids[0] == ids[1]) == same
    parts = [tokenising.parts_of(made) for made in tokenizers]
    assert (tokenising.difference(*parts, tokenizers[1]) == "") == same
    assert (parts[0] == parts[1]) == same


@pytest.mark.field("F75")
def test_a_post_processor_that_was_recorded_whole_is_recognised() -> None:
    tokenizer = processed(template(FIRST, f"{FIRST} $B"))
    whole = json.loads(tokenizer.backend_tokenizer.to_str())["post_processor"]
    parts = tokenising.parts_of(tokenizer)
    assert not tokenising.difference({**parts, "post-processor": json.dumps(whole)}, parts, None)


def with_added(*words: tuple[str, bool], normaliser: Any = None, **settings: Any) -> Any:
    """(a word, whether it is looked for in the normalised text)."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normaliser
    tokenizer.backend_tokenizer.add_tokens(
        [AddedToken(word, normalized=late, **settings) for word, late in words]
    )
    return tokenizer


@pytest.mark.field("F75")
def test_when_an_added_token_is_looked_for_counts_where_it_changes_ids() -> None:
    def differ(one: Any, other: Any) -> bool:
        return tokenising.parts_of(one) != tokenising.parts_of(other)

    apart = [with_added(("<zx>", late), ("[q]", False)) for late in (False, True)]
    assert not differ(*apart)
    lower = normalizers.Lowercase()
    assert differ(*(with_added(("<ZX>", late), normaliser=lower) for late in (False, True)))
    for words in (("zxq", "qab"), ("zx", "azxb"), ("qab", "zxq")):
        first = with_added((words[0], True), (words[1], False))
        assert differ(first, with_added((words[0], False), (words[1], True)))
    overlap = [with_added(("zxq", one), ("qab", not one)) for one in (True, False)]
    ids = [made("zxqab")["input_ids"] for made in overlap]
    assert ids[0] != ids[1]  # So it must.
    stripped = [with_added(("<zx>", late), ("[q]", False), lstrip=True) for late in (False, True)]
    assert differ(*stripped)


# --- modes ----------------------------------------------------------------------------------------


def thinking(**arguments: Any) -> Target:
    tokenizer = tiny_tokenizer(THINKING)
    give_arguments(tokenizer, arguments)
    return Target(load.tiny().model, tokenizer, "thinker")


@pytest.mark.field("F81")
def test_arguments_reach_every_rendering_and_the_fingerprint() -> None:
    on, off = thinking(enable_thinking=True), thinking(enable_thinking=False)
    texts = [
        ChatPieces(one.tokenizer, ()).render([{"role": "user", "content": "a"}], prompt=True)
        for one in (on, off)
    ]
    assert "<think>" not in texts[0] and texts[1].endswith("<think></think>")
    assert (
        ChatPieces(off.tokenizer, ()).user_to_answer()
        != ChatPieces(on.tokenizer, ()).user_to_answer()
    )
    marks = json.loads(off.fingerprint["chat_template"])
    assert marks["arguments"] == {"enable_thinking": False}


@pytest.mark.field("F81")
def test_another_mode_is_warned_about_and_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    on, off = (thinking(enable_thinking=one).fingerprint for one in (True, False))
    with caplog.at_level(logging.WARNING):
        fingerprint.refuse_other(off, on, "the package")
    words = warned(caplog)
    assert (
        "the package was made in another mode (chat_template: enable_thinking false there, true"
        in words
    )
    assert "target.template.enable_thinking=false" in words
    with pytest.raises(InputError, match="enable_thinking false there, true here"):
        fingerprint.refuse_other(off, on, "out=set", mode=True)  # Rows are not mixed.


@pytest.mark.field("F81")
def test_an_edited_template_is_a_difference_in_words(caplog: pytest.LogCaptureFixture) -> None:
    edited = CHATML.replace("assistant\n", "helper\n")
    one, other = (tiny_chat_target(text).fingerprint for text in (CHATML, edited))
    with caplog.at_level(logging.WARNING):
        fingerprint.refuse_other(one, other, "the package")
    assert "the chat template is another, it makes" in warned(caplog)
    assert "assistant" in warned(caplog) and "helper" in warned(caplog)


@pytest.mark.field("F81")
def test_a_set_names_the_mode_of_a_package() -> None:
    on, off = (thinking(enable_thinking=one).fingerprint for one in (True, False))
    kept = fingerprint.in_mode_of(on, off)
    assert fingerprint.mode_settings(kept) == "target.template.enable_thinking=false"
    assert {**kept, "chat_template": "", "earlier": ""} == {
        **on,
        "chat_template": "",
        "earlier": "",
    }
    assert fingerprint.in_mode_of(on, on) is on


@pytest.mark.field("F81")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"enable_thinkin": False}, "enable_thinkin: the chat template reads no enable_thinkin"),
        ({"chat_template": "tool_use"}, "no template of that name; its named templates are: none"),
        ({"tokenize": True}, "tokenize is decided here"),
        ({"tools": "x"}, "needs a list of objects"),
        (3, "target.template=3"),
        ({"enable_thinking": "off"}, "a text, which a template takes for true: give target.temp"),
        ({"enable_thinking": "False"}, "give target.template.enable_thinking=false, without quot"),
    ],
)
def test_arguments_that_the_template_does_not_take(given: object, words: str) -> None:
    tokenizer = tiny_tokenizer(THINKING)
    with pytest.raises(InputError, match=words):
        give_arguments(tokenizer, given)
    with pytest.raises(InputError, match="no chat template that could take it"):
        give_arguments(None, {"enable_thinking": True})


@pytest.mark.field("F81")
def test_a_word_that_the_template_compares_with_is_taken() -> None:
    tokenizer = tiny_tokenizer(CHATML + "{% if thinking == 'off' %}<think></think>{% endif %}")
    give_arguments(tokenizer, {"thinking": "off"})
    text = ChatPieces(tokenizer, ()).render([{"role": "user", "content": "a"}], prompt=True)
    assert text.endswith("<think></think>")


@pytest.mark.field("F81")
def test_a_named_template_is_chosen(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": CHATML, "short": "{{ messages[0].content }}"}
    load.tiny().model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    common: dict[str, Any] = {"dtype": "float32", "device": "cpu", "attention": "sdpa"}
    target = load.hf(str(tmp_path), template={"chat_template": "short"}, **common)
    pieces: Callable[..., str] = ChatPieces(target.tokenizer, ()).render
    assert pieces([{"role": "user", "content": "a"}], prompt=True) == "a"
    settings = {"_target_": "drafttrain.target.load.hf", "path": str(tmp_path)}
    found = load.tokenizer_only({**settings, "template": {"chat_template": "short"}})
    assert fingerprint.of_template(found) == target.fingerprint["chat_template"]


@pytest.mark.field("F81")
def test_modes_are_compared_by_few_texts_and_shown_where_they_part() -> None:
    """Of a long text the place where another goes on; of a template that refuses, its words once;
    of one that the day changes no text."""
    short, long = {"texts": ["a" * 80]}, {"texts": ["a" * 80 + "end"]}
    assert modes.difference(short, long).endswith("aaaaaaaaaaend' here")
    assert len(modes.mode_of(tiny_tokenizer("{{ raise_exception('no') }}"))["texts"]) == 1
    assert modes.mode_of(tiny_tokenizer("{{ strftime_now('%Y') }}" + CHATML))["texts"] == []
