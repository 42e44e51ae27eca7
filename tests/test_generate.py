"""Text as it comes, accepted drafts marked; conversations that are never encoded again."""

from __future__ import annotations

import copy
import io
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import drafttrain
from drafttrain import generate
from drafttrain.decoding.loop import Output
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.ngram import NGram
from drafttrain.drafter.suffix import Suffix
from drafttrain.errors import InputError
from drafttrain.generate import Conversation, Screen, Unfolding
from drafttrain.nn.sampling import Policy
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters
from tests.helpers import BARE, packed_place, place_words, tiny_chat_target, tiny_tokenizer
from tests.messages import said
from tests.packaging.made import overfitted, packed

PROMPT = "hello ${you}: [a, b]"
END = 2


@pytest.fixture(scope="module")
def ids(target: Target) -> list[int]:
    return Conversation(target, chat=True).prompt(PROMPT, 24)


@pytest.fixture(scope="module")
def place(target: Target, ids: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    drafter = overfitted(target, [ids], steps=40, tokens=20)
    return packed_place(
        tmp_path_factory.mktemp("generate"), target, drafter, plan=Plan(Tree.chain(3))
    )


def shown(text: str) -> str:
    return text.translate(generate._CONTROLS)


# --- the door -------------------------------------------------------------------------------------


@pytest.mark.field("F13")
def test_the_text_is_plain_decodings_with_accepted_drafts_marked(
    place: Path, target: Target, ids: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    generate.main(place_words(place, f"prompt={PROMPT}", "compare=true"))
    out = capsys.readouterr().out
    text, _, closing = out.rpartition("\n\ntau ")
    outputs, tally = drafttrain.load(place / "package", target, dtype="float32").generate(
        [ids], max_new_tokens=16
    )
    plain, _ = drafttrain.load(place / "package", target).generate(
        [ids], max_new_tokens=16, plan=Plan(Tree.chain(0))
    )
    assert outputs[0].ids == plain[0].ids
    tokenizer: Any = target.tokenizer
    expected = shown(tokenizer.decode(plain[0].ids, skip_special_tokens=True))
    assert re.sub(r"\[\[|\]\]", "", text) == expected
    assert "[[" in text and text.count("[[") == text.count("]]")
    assert closing.startswith(
        f"{tally.tau:.2f} tokens per target pass, {tally.accepted_per_round:.2f} drafts accepted"
    )
    assert re.search(r"[\d.]+ tokens/s, \d+ tokens in", closing) and "guarantee: greedy" in closing
    assert re.search(r", in (float32|bfloat16)[,;]", closing), "auto may choose another dtype"
    assert re.search(r"plain decoding: [\d.]+ tokens/s, the same text; speed [\d.]+x", closing)


@pytest.mark.field("F96")
def test_a_text_without_the_template_is_said_to_be_none_it_was_trained_on(
    place: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neighbours: a drafter that has learned nothing, a target without a template: no word."""
    generate.main(place_words(place, f"prompt={PROMPT}", "chat=false", max_new_tokens=2))
    assert "chat=false" in capsys.readouterr().err
    generate.warn_of_texts(target, drafters.make(NGram, target))
    bare = copy.copy(target)
    bare.tokenizer = tiny_tokenizer("")
    generate.warn_of_texts(bare, drafters.make(Eagle1, target))
    assert not capsys.readouterr().err


def test_drafts_that_are_copied(
    place: Path, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = packed(
        tmp_path / "package", drafters.make(NGram, target), target, plan=Plan(Tree.chain(3))
    )
    for temperature, guarantee in (("0.0", "greedy"), ("1.0", "distribution")):
        generate.main(
            place_words(
                place,
                f"prompt={PROMPT} {PROMPT}",
                f"temperature={temperature}",
                "tree=2",
                package=package,
            )
        )
        assert f"guarantee: {guarantee}" in capsys.readouterr().out


def test_other_settings(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    sampled = (
        "temperature=1.0",
        "top_k=9",
        "top_p=0.9",
        "seed=3",
        "tree=[[0],[1],[0,0]]",
        "mark=none",
        "chat=false",
    )
    texts = []
    for more in (sampled, sampled, (*sampled, "seed=4")):
        monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
        generate.main(place_words(place, *more))
        texts.append(capsys.readouterr().out.rpartition("\n\ntau ")[0])
    assert texts[0] == texts[1] != texts[2]


def test_without_a_seed_another_text_each_time(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def written(*more: str) -> tuple[str, str]:
        generate.main(place_words(place, "prompt=a", "temperature=1.0", "mark=none", *more))
        text, _, closing = capsys.readouterr().out.rpartition("\n\ntau ")
        return text, closing.partition("seed ")[2].partition(";")[0]

    first, second = written(), written()
    assert first != second and first == written(f"seed={first[1]}")
    assert not written("temperature=0.0")[1], "greedy text has none"


def test_policies_that_read_the_text(
    place: Path, target: Target, ids: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    def written(*more: str) -> str:
        generate.main(place_words(place, f"prompt={PROMPT}", "mark=none", *more))
        return capsys.readouterr().out.rpartition("\n\ntau ")[0]

    speculator = drafttrain.load(place / "package", target)
    first = speculator.generate([ids], max_new_tokens=1)[0][0].ids[0]
    policy = Policy(repetition_penalty=1.4, min_new_tokens=9, logit_bias={first: -math.inf, 7: 2.0})
    (plain,), _ = speculator.generate([ids], max_new_tokens=16, plan=Plan(Tree.chain(0), policy))
    settings = ("repetition_penalty=1.4", "min_new_tokens=9", f"logit_bias={{{first}:-inf,7:2}}")
    tokenizer: Any = target.tokenizer
    expected = shown(tokenizer.decode(plain.ids, skip_special_tokens=True))
    assert written(*settings) == expected != written()
    assert written(*settings, "temperature=1.0", "min_p=1.0") == expected


@pytest.mark.parametrize(
    ("more", "guarantee"),
    [
        (["rule=block"], "distribution"),
        (["rule=one_hot", "tree=static"], "distribution"),
        (["rule=k_seq", "tree=expand:2x2"], "distribution"),
        (["rule=sample_and_match", "tree=static"], "distribution"),
        (["rule=typical:0.05:0.2"], "approximate"),
        (["rule=auto", "tree=static"], "distribution"),
    ],
)
def test_rules_are_chosen_by_name(
    more: list[str], guarantee: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate.main(place_words(place, "prompt=a", "temperature=1.0", "max_new_tokens=8", *more))
    assert f"guarantee: {guarantee}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "tree",
    [
        ("tree=dynamic", "tree.depth=3", "tree.top_k=2", "tree.total=5"),
        ("tree=dynamic:3x2x5",),
        ("tree=chain", "tree.k=4", "tree.stop_below=0.1"),
        ("tree=medusa",),
        ("tree=expansion", "tree.widths=[2,2]"),
        ("tree=sequoia", "tree.rates=[0.6,0.2]", "tree.nodes=6"),
    ],
    ids=" ".join,
)
def test_any_tree_writes_the_same_text(
    place: Path, tree: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    generate.main(place_words(place, f"prompt={PROMPT}", "compare=true", "mark=none", *tree))
    out = capsys.readouterr().out
    assert "the same text" in out and "guarantee: greedy" in out


def test_plain_decoding_has_no_tau_above_one(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate.main(place_words(place, f"prompt={PROMPT}", "tree=plain", "max_new_tokens=1"))
    assert "tau not available" in capsys.readouterr().out


def test_turns_are_asked_for_in_a_terminal(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    lines = iter(["hello", "x" * 600, "and more"])
    decoded: list[list[int]] = []

    def typed(_: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    real = generate.Wanted.decode

    def watched(self: Any, *given: Any) -> Any:
        decoded.append(self.ids)
        return real(self, *given)

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(generate.Wanted, "decode", watched)
    generate.main(place_words(place, "max_new_tokens=8"))
    first, second = decoded
    assert second[: len(first)] == first and len(second) > len(first) + 8
    found = capsys.readouterr()
    assert found.out.count("tau ") == 2 and "context holds 512" in found.err


def test_turns_are_remembered(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one text, that of the conversation, however many turns it has. What plain decoding wrote
    for comparison is not in it."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    lines, loaded, wanted = (
        iter(["hello", "hello", ""]),
        list[Suffix](),
        list[tuple[list[int], list[int]]](),
    )
    load, close = generate.load_drafter, generate.close

    def loading(*given: Any) -> Any:
        loaded.append(load(*given))
        return loaded[-1]

    def closing(speculator: Any, asked: Any, screen: Any, done: Any, **more: Any) -> None:
        wanted.append((asked.ids, done[0].ids))
        close(speculator, asked, screen, done, **more)

    packed_place(
        tmp_path, target, drafters.make(Suffix, target, remember=2000), plan=Plan(Tree.chain(3))
    )
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    monkeypatch.setattr(generate, "load_drafter", loading)
    monkeypatch.setattr(generate, "close", closing)
    generate.main(place_words(tmp_path, "max_new_tokens=8", "compare=true"))
    first, second = (prompt + answer for prompt, answer in wanted)
    (drafter,) = loaded
    assert drafter.earlier is not None
    assert second[: len(first)] == first and list(drafter.earlier.texts) == [second]


BAD: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "package missing": (lambda p: ["package=nowhere"], "package=nowhere"),
    "empty prompt": (lambda p: ["prompt= "], said("doors.prompt_empty")),
    "nothing on standard input": (lambda p: [], said("doors.nothing_to_answer")),
    "unknown mark": (lambda p: ["prompt=a", "mark=bold"], "mark=bold"),
    "no tokens": (lambda p: ["prompt=a", "max_new_tokens=0"], "max_new_tokens=0"),
    "chat is a word": (lambda p: ["prompt=a", "chat=perhaps"], "chat=perhaps"),
    "a cold temperature": (lambda p: ["prompt=a", "temperature=-1"], r"temperature\b.*-1"),
    "no temperature": (lambda p: ["prompt=a", "temperature=warm"], r"temperature\b.*warm"),
    "unknown tree": (lambda p: ["prompt=a", "tree=octopus"], said("doors.unknown_tree")),
    "malformed tree": (lambda p: ["prompt=a", "tree=[[1]]"], said("doors.skipped_rank")),
    "unknown rule": (lambda p: ["prompt=a", "rule=magic"], "rule magic"),
    "a rule for sampled text": (lambda p: ["prompt=a", "rule=block"], "rule block"),
    "a rule for greedy text": (
        lambda p: ["prompt=a", "rule=greedy", "temperature=1"],
        "rule greedy",
    ),
    "a rule for chains": (
        lambda p: ["prompt=a", "rule=block", "temperature=1", "tree=static"],
        said("decoding.rule_for_chains"),
    ),
    "a tree too small for its depth": (
        lambda p: ["prompt=a", "tree=dynamic", "tree.total=2"],
        r"tree\.depth",
    ),
    "a tree's setting misspelt": (
        lambda p: ["prompt=a", "tree=dynamic", "tree.nodes=2"],
        r"tree\.nodes",
    ),
    "a system without a chat": (
        lambda p: ["prompt=a", "system=b", "chat=false"],
        said("doors.system_without_chat"),
    ),
    "no tokenizer": (
        lambda p: ["prompt=a", "target=tiny", "~target.path"],
        f"{said('doors.no_tokenizer')}|there is no setting",
    ),
    "prompt too long": (lambda p: [f"prompt={'x' * 600}"], said("doors.too_long")),
    "misspelt": (lambda p: ["promt=a"], "prompt"),
    "a seed of words": (lambda p: ["prompt=a", "seed=abc"], "seed=abc"),
    "a seed below 0": (lambda p: ["prompt=a", "seed=-1"], "seed=-1"),
    "half a seed": (lambda p: ["prompt=a", "seed=1.5"], r"seed=1\.5"),
    "a dtype of integers": (lambda p: ["prompt=a", "dtype=int8"], "dtype=int8"),
    "half a character": (lambda p: ["prompt=\udcff"], said("doors.not_utf8")),
    "half a character in the system's text": (lambda p: ["prompt=a", "system=\udcff"], "system"),
    "a package whose name is a text": (
        lambda p: ["prompt=a", f"package={'long ' * 80}"],
        r"package=.*File name too long",
    ),
    "nobody's package": (
        lambda p: ["prompt=a", "package=~nobody-of-that-name/x"],
        "package=~nobody-of-that-name/x",
    ),
    "code that was not allowed": (
        lambda p: ["prompt=a", "target.trust_remote_code=no"],
        r"target\.trust_remote_code=no",
    ),
    "tokens without end": (
        lambda p: ["prompt=a", f"max_new_tokens={10**30}"],
        "max_new_tokens=1000",
    ),
    "a temperature beyond floats": (
        lambda p: ["prompt=a", f"temperature={10**400}"],
        r"temperature\b.*1000",
    ),
    "top_k of a greedy policy": (lambda p: ["prompt=a", "top_k=-3"], r"top_k\b.*-3"),
    "min_p above 1": (lambda p: ["prompt=a", "min_p=2"], r"min_p\b.*2"),
    "a penalty of words": (
        lambda p: ["prompt=a", "repetition_penalty=much"],
        r"repetition_penalty\b.*much",
    ),
    "no penalty": (lambda p: ["prompt=a", "repetition_penalty=0"], r"repetition_penalty\b.*0"),
    "half a token": (lambda p: ["prompt=a", "min_new_tokens=1.5"], r"min_new_tokens\b.*1\.5"),
    "a bias of words": (lambda p: ["prompt=a", "logit_bias={a:1}"], r"logit_bias\b.*'a'"),
    "a bias without a token": (lambda p: ["prompt=a", "logit_bias=4"], r"logit_bias\b.*4"),
    "a bias beyond the vocabulary": (
        lambda p: ["prompt=a", "logit_bias={99999:1.0}"],
        r"logit_bias\b.*99999",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(
    name: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    change, message = BAD[name]
    with pytest.raises(SystemExit) as caught:
        generate.main(place_words(place, *change(place)))
    assert caught.value.code == 2
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert last.startswith("drafttrain.generate: ") and re.search(message, last), last


def test_bytes_that_are_no_text_on_standard_input(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(b"good \xff bad"), encoding="utf-8")
    )
    with pytest.raises(SystemExit) as caught:
        generate.main(place_words(place))
    assert (
        caught.value.code == 2 and "standard input is not UTF-8 (byte 6)" in capsys.readouterr().err
    )


def test_what_cannot_be_read_does_not_end_a_conversation(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    lines: Iterator[str | Exception] = iter(
        [UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "\udcff", "hello", ""]
    )

    def typed(_: str) -> str:
        line = next(lines)
        if isinstance(line, Exception):
            raise line
        return line

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", typed)
    generate.main(place_words(place, "max_new_tokens=4"))
    found = capsys.readouterr()
    assert (
        "that was not UTF-8" in found.err
        and "the prompt is not UTF-8" in found.err
        and found.out.count("tau ") == 1
    )


@pytest.mark.field("F13")
def test_a_tokenizer_larger_than_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny_chat_target(BARE, vocab_size=260)
    place = packed_place(tmp_path, target, drafters.make(Eagle1, target), plan=Plan(Tree.chain(2)))
    generate.main(place_words(place, "prompt=a", "max_new_tokens=2"))
    with pytest.raises(SystemExit) as caught:
        generate.main(place_words(place, "prompt=the", "max_new_tokens=2"))
    assert (
        caught.value.code == 2
        and "gives id 260, the model's vocabulary ends at 259" in capsys.readouterr().err
    )


def test_a_target_without_a_tokenizer_is_refused_before_it_is_read(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        generate.main([f"package={place / 'package'}", "target=tiny", "prompt=a"])
    assert "without a tokenizer" in capsys.readouterr().err


# --- conversations --------------------------------------------------------------------------------


def test_a_conversation_grows_by_ids(target: Target) -> None:
    """What was written stays as its ids, also where encoding the text again would give others."""
    talk = Conversation(target, chat=True, system="be brief")
    encode = target.tokenizer.encode  # type: ignore[union-attr]
    first = talk.prompt("hi", 8)
    assert first == encode(
        "<|im_start|>system\nbe "
        "brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    t, h = encode("t"), encode("h")
    assert encode("th") != [*t, *h]
    talk.keep(first, Output(ids=[*t, *h, END], finish="stop"))
    second = talk.prompt("more", 8)
    between = encode("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    assert second == [*first, *t, *h, END, *between]
    talk.keep(second, Output(ids=[*t, *h], finish="length"))
    assert talk.ids == [*second, *t, *h, END], (
        "a turn that was cut is closed as the template closes one"
    )


def test_without_a_template_texts_follow_one_another(target: Target) -> None:
    talk = Conversation(target, chat=False)
    first = talk.prompt("once", 8)
    assert first == target.tokenizer.encode("once")  # type: ignore[union-attr]
    talk.keep(first, Output(ids=[50, 51], finish="length"))
    tokenizer: Any = target.tokenizer
    assert talk.prompt(" upon", 8) == [*first, 50, 51, *tokenizer.encode(" upon")]


def test_room_in_the_context(target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Conversation(target, chat=False)
    with pytest.raises(InputError, match=said("doors.too_long")):
        talk.prompt("x" * 512, 8)
    assert len(talk.prompt("x" * 510, 8)) == 510
    assert "only 2 tokens fit" in capsys.readouterr().err
    with pytest.raises(InputError, match=f"no chat template|{said('doors.no_tokenizer')}"):
        Conversation(load.tiny(), chat=True)


# --- text as it comes -----------------------------------------------------------------------------


def pieces(text_ids: list[int], drafted: list[bool] | None = None) -> Iterator[tuple[str, bool]]:
    unfolding = Unfolding(tiny_tokenizer())
    for place, token in enumerate(text_ids):
        found = unfolding.add(token, drafted[place] if drafted else False)
        if found:
            yield found
    rest = unfolding.rest()
    if rest:
        yield rest


@pytest.mark.parametrize(
    "text",
    ["plain words", "naïve ünïcödé", "你好,世界", "a🙂b👩‍👩‍👧c", "  spaces \n\t and lines\n", "�"],
)
def test_pieces_add_up_and_never_hold_half_a_character(text: str) -> None:
    ids = tiny_tokenizer().encode(text)
    found = list(pieces(ids))
    assert "".join(piece for piece, _ in found) == text
    if "�" not in text:
        assert len(ids) >= len(found) and not any("�" in piece for piece, _ in found)


def test_bytes_that_are_no_text_are_shown_after_a_while_or_at_the_end() -> None:
    half = tiny_tokenizer().encode("你")[:2]
    assert list(pieces(half)) == [("�", False)]
    assert "".join(p for p, _ in pieces([half[0]] * 20)) == "�" * 20


def test_control_tokens_are_not_shown() -> None:
    assert "".join(p for p, _ in pieces([1, *tiny_tokenizer().encode("user"), END])) == "user"


def test_a_character_is_marked_by_the_token_that_makes_it_whole() -> None:
    ids = tiny_tokenizer().encode("a你b")
    assert list(pieces(ids, [True, False, False, True, False])) == [
        ("a", True),
        ("你", True),
        ("b", False),
    ]


def screen(mark: str, *, terminal: bool = False) -> tuple[Screen, io.StringIO]:
    file = io.StringIO()
    return Screen(
        mark=mark,
        out=Console(file=file, force_terminal=terminal, color_system="standard", width=20),
    ), file


def test_marks() -> None:
    def write(one: Screen) -> None:
        for piece in (("a", False), ("b", True), ("c", True), ("d", False), ("e", True)):
            one.piece(piece)
        one.boundary()
        one.piece(("f" * 30, True))
        one.piece(None)
        one.boundary()

    for mark, expected in (
        ("brackets", "a[[bc]]d[[e]][[" + "f" * 30 + "]]"),
        ("none", "abcde" + "f" * 30),
    ):
        one, file = screen(mark)
        write(one)
        assert file.getvalue() == expected
    one, file = screen("colour", terminal=True)
    write(one)
    assert re.sub(r"\x1b\[[\d;]*m", "", file.getvalue()) == "abcde" + "f" * 30, (
        "nothing may be wrapped or lost"
    )
    assert "\x1b[4;32mb" in file.getvalue() and "\x1b[4;32md" not in file.getvalue()


def test_marks_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert (
        screen("auto")[0].mark == "brackets" and screen("auto", terminal=True)[0].mark == "colour"
    )
    monkeypatch.setenv("NO_COLOR", "1")
    assert screen("auto", terminal=True)[0].mark == "brackets"


def test_a_text_cannot_steer_the_terminal() -> None:
    one, file = screen("colour", terminal=True)
    one.piece(("a\x1b[2Jb\rc\x07[bold]d[/bold]\n", False))
    assert file.getvalue() == "a␛[2Jb␍c␇[bold]d[/bold]\n"
