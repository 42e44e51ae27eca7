"""The table of a package: every number a count or a time really taken, every gap said in words."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import drafttrain
from drafttrain import evaluate
from drafttrain.data.conversations import Row, write_set
from drafttrain.data.named import NO_CATEGORY
from drafttrain.data.template import ChatPieces
from drafttrain.decoding.measure import measure_acceptance
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.ngram import NGram
from drafttrain.evaluating.comparing import packaged_tree, warn_of_length
from drafttrain.evaluating.measuring import row_of
from drafttrain.evaluating.parity import parity, parity_words
from drafttrain.reporting.kinds import KINDS, OVER_ROUNDS
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters
from tests.helpers import BARE, packed_place, place_words, tiny_chat_target
from tests.messages import said
from tests.packaging.made import overfitted, packed

TEXTS = ["hello", "the thin man", "why?"]
KEYS = {
    "temperature",
    "growth",
    "nodes",
    "rule",
    "tau",
    "tau_interval",
    "accepted_per_round",
    "accept_at",
    "speedup",
    "speedup_interval",
    "rounds",
    "guarantee",
    "accept_counts",
    "seconds",
    "tokens_per_second",
    "plain_tokens_per_second",
}


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    pieces = ChatPieces(target.tokenizer, target.stop_ids)
    return [pieces.first_prompt([{"role": "user", "content": text}]) for text in TEXTS]


@pytest.fixture(scope="module")
def drafter(target: Target, prompts: list[list[int]]) -> Eagle1:
    return overfitted(target, prompts[:2], steps=40, tokens=24)


@pytest.fixture(scope="module")
def place(target: Target, drafter: Eagle1, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the target, its package and a file of prompts."""
    folder = packed_place(
        tmp_path_factory.mktemp("evaluate"), target, drafter, plan=Plan(Tree.chain(3))
    )
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS)
    )
    return folder


def words(place: Path, out: Path, *more: str, **settings: Any) -> list[str]:
    return place_words(
        place, *more, **{"prompts": place / "prompts.jsonl", "run_dir": out, **settings}
    )


@pytest.fixture(scope="module")
def run(place: Path) -> tuple[dict[str, Any], Path]:
    out = place / "run"
    evaluate.main(words(place, out, "chains=[3]", "trees=[package,static]", "speed_prompts=2"))
    return json.loads((out / evaluate.RESULT).read_text()), out


def test_rows_and_their_keys(run: tuple[dict[str, Any], Path]) -> None:
    result, out = run
    rows = result["rows"]
    assert [(row["temperature"], row["growth"], row["nodes"]) for row in rows] == [
        (t, *growth) for t in (0.0, 1.0) for growth in (("plain", 0), ("chain", 3), ("static", 25))
    ]
    for row in rows:
        assert row.keys() >= KEYS
        assert row["guarantee"] == ("greedy" if row["temperature"] == 0 else "distribution")
        assert (
            row["speedup"] > 0
            and row["tokens_per_second"] > 0
            and row["plain_tokens_per_second"] > 0
        )
        assert (
            set(row["seconds"]) == {"prefill", "draft", "verify", "host"}
            and row["speed_prompts"] == 2
        )
        low, high = row["tau_interval"]
        assert low <= row["tau"] <= high
    for temperature in (0.0, 1.0):
        drafting = [row for row in rows if row["temperature"] == temperature and row["nodes"]]
        best = max(row["tau"] for row in drafting)
        assert sum(row["tau_behind_best"] is None for row in drafting) == 1
        assert all(
            row["tau_behind_best"] in (None, pytest.approx(best - row["tau"])) for row in drafting
        )
    assert all(row["prompts"] == len(TEXTS) for row in rows if row["nodes"])
    assert all(row["same_as_plain"] == 2 for row in rows if row["temperature"] == 0)
    assert result["settings"]["max_new_tokens"] == 16 and result["settings"]["prompt_count"] == 3
    assert result["settings"]["prompts_digest"] and result["settings"]["target_dtype"] == "float32"
    assert result["exactness"] is None and result["sim"] is None
    assert (out / evaluate.PICTURE).read_bytes().startswith(b"\x89PNG")


@pytest.mark.field("F46")
def test_numbers_are_those_of_counting(
    run: tuple[dict[str, Any], Path], place: Path, target: Target, prompts: list[list[int]]
) -> None:
    row = next(row for row in run[0]["rows"] if row["growth"] == "chain" and row["nodes"] == 3)
    outputs, _ = drafttrain.load(place / "package", target, dtype="float32").generate(
        prompts, max_new_tokens=16
    )
    rounds = [run for output in outputs for run in output.runs[1:]]
    assert row["rounds"] == len(rounds)
    assert (
        row["tau"] == pytest.approx(sum(emitted for emitted, _ in rounds) / len(rounds))
        and row["tau"] > 1.2
    )
    assert row["accepted_per_round"] == pytest.approx(sum(kept for _, kept in rounds) / len(rounds))
    assert [kept for kept, _ in row["accept_counts"]] == [
        sum(kept > k for _, kept in rounds) for k in range(3)
    ]
    for value, (kept, offered) in zip(row["accept_at"], row["accept_counts"], strict=True):
        assert value == (pytest.approx(kept / offered) if offered else None)


def test_acceptance_computed_on_sampled_texts(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table and rows of their own, for temperatures above 0; what is not computed is named."""
    more = ("chains=[3]", "trees=[static]", "rule=[auto,typical]", "sim=true", "speed_prompts=0")
    evaluate.main(words(place, tmp_path / "run", *more))
    result = json.loads((tmp_path / "run" / evaluate.RESULT).read_text())
    rows = result["sim"]["rows"]
    assert [(row["temperature"], row["rule"], row["nodes"]) for row in rows] == [
        (1.0, "block", 3),
        (1.0, "multi_step", 25),
    ]
    for row in rows:
        low, high = row["sim/tau_interval"]
        assert 1 <= low <= row["sim/tau"] <= high and row["texts"] == len(TEXTS)
        assert 0 < row["sim/accept@1"] < 1 and "tau" not in row and row["impossible"] == 0
    assert [one["label"] for one in result["sim"]["left_out"]] == [
        "T=1 chain 3 typical",
        "T=1 static 25 typical",
    ]
    said = capsys.readouterr()
    assert "has no sim/: rule typical" in said.err and "sim/: acceptance computed" in said.out
    assert not any("sim/tau" in row for row in result["rows"])


def test_drafts_that_are_copied(
    place: Path, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No dtype, no parity, and at every temperature the rule for drafts that are a function of the
    text."""
    packed(tmp_path / "package", drafters.make(NGram, target), target, plan=Plan(Tree.chain(3)))
    more = (
        "chains=[2]",
        "trees=[package]",
        "speed_prompts=1",
        "exactness=true",
        "exactness_prompts=1",
        "exactness_draws=40",
    )
    evaluate.main(words(place, tmp_path / "run", *more, package=tmp_path / "package"))
    result = json.loads((tmp_path / "run" / evaluate.RESULT).read_text())
    rules = {(row["temperature"], row["rule"]) for row in result["rows"] if row["nodes"]}
    assert rules == {(0.0, "greedy"), (1.0, "one_hot")}
    assert result["parity"] is None and result["settings"]["drafter_dtype"] is None
    assert all(row["verdict"] == "identical" for row in result["exactness"]["greedy"])
    assert len(result["exactness"]["law"]) == 3
    with pytest.raises(SystemExit):
        evaluate.main(
            words(place, tmp_path / "other", *more, "rule=ratio", package=tmp_path / "package")
        )
    assert "copies text makes no others" in capsys.readouterr().err


def test_speed_is_taken_from_what_acceptance_is_taken_from_when_prompts_are_few(
    place: Path, tmp_path: Path
) -> None:
    more = (
        "chains=[2]",
        "trees=[]",
        "temperatures=[0.0]",
        "speed_prompts=9",
        "parity_prompts=0",
        "limit=1",
    )
    evaluate.main(words(place, tmp_path / "run", *more))
    result = json.loads((tmp_path / "run" / evaluate.RESULT).read_text())
    assert [row["prompts"] for row in result["rows"]] == [1, 1] and result["parity"] is None


def test_rules_are_compared_where_they_fit(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = (
        "chains=[2]",
        "trees=[expand:2x1]",
        "speed_prompts=0",
        "parity_prompts=0",
        "limit=1",
        "max_new_tokens=6",
    )
    evaluate.main(words(place, tmp_path / "run", *more, "rule=[auto,ratio,typical:0.05:0.2]"))
    result = json.loads((tmp_path / "run" / evaluate.RESULT).read_text())
    assert [
        (row["temperature"], row["nodes"], row["rule"], row["guarantee"]) for row in result["rows"]
    ] == [
        (0.0, 2, "greedy", "greedy"),
        (0.0, 4, "greedy", "greedy"),
        (1.0, 2, "block", "distribution"),
        (1.0, 2, "ratio", "distribution"),
        (1.0, 2, "typical:0.05:0.2", "approximate"),
        (1.0, 4, "multi_step", "distribution"),
        (1.0, 4, "typical:0.05:0.2", "approximate"),
    ]
    assert result["settings"]["rule"] == ["auto", "ratio", "typical:0.05:0.2"]
    shown = capsys.readouterr()
    assert "T=1 chain 2 ratio" in shown.out
    assert "T=1 static 4 ratio is not measured: rule ratio judges a chain" in shown.err
    evaluate.main(words(place, tmp_path / "one", *more, "rule=block"))
    rows = json.loads((tmp_path / "one" / evaluate.RESULT).read_text())["rows"]
    assert [(row["temperature"], row["rule"]) for row in rows] == [(1.0, "block")]


def test_a_tree_chosen_with_its_settings(place: Path, tmp_path: Path) -> None:
    few = (
        "chains=[]",
        "trees=[medusa]",
        "speed_prompts=0",
        "parity_prompts=0",
        "batch=8",
        "limit=2",
        "max_new_tokens=6",
    )
    chosen = ("tree=dynamic", "tree.depth=3", "tree.top_k=2", "tree.total=5")
    evaluate.main(words(place, tmp_path / "run", *few, *chosen))
    rows = json.loads((tmp_path / "run" / evaluate.RESULT).read_text())["rows"]
    assert [(row["label"], row["nodes"], row["depth"], row["rule"]) for row in rows] == [
        ("T=0 static 63", 63, 4, "greedy"),
        ("T=0 dynamic 3x2x5", 5, 3, "greedy"),
        ("T=1 static 63", 63, 4, "multi_step"),
        ("T=1 dynamic 3x2x5", 5, 3, "one_hot"),
    ]


def test_no_speed_on_demand(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = (
        "chains=[2]",
        "trees=[]",
        "temperatures=[0.0]",
        "speed_prompts=0",
        "parity_prompts=0",
        "batch=8",
        "limit=1",
    )
    evaluate.main(words(place, tmp_path / "run", *more))
    (row,) = json.loads((tmp_path / "run" / evaluate.RESULT).read_text())["rows"]
    assert row["speedup"] is None and row["tau"] is not None
    shown = capsys.readouterr().out
    assert "accept@2" in shown and "tokens/s" not in shown


@pytest.mark.field("F52")
def test_exactness_on_demand(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = (
        "speed_prompts=0",
        "parity_prompts=0",
        "limit=2",
        "exactness=true",
        "exactness_draws=160",
        "exactness_prompts=2",
    )
    evaluate.main(
        words(
            place, tmp_path / "run", *few, "chains=[2]", "trees=[expand:2x1]", "rule=[auto,block]"
        )
    )
    found = json.loads((tmp_path / "run" / evaluate.RESULT).read_text())["exactness"]
    assert [(row["label"], row["verdict"]) for row in found["greedy"]] == [
        ("T=0 chain 2", "identical"),
        ("T=0 static 4", "identical"),
    ]
    assert [(row["label"], row["draws"]) for row in found["law"]] == [
        ("T=1 chain 2", 160),
        ("T=1 chain 2 block", 160),
        ("T=1 static 4", 160),
        ("T=1 control: every draft kept", 160),
    ]
    assert all(
        row["verdict"] == "no difference found" for row in found["law"] if not row["control"]
    )
    shown = capsys.readouterr()
    assert "exactness, greedy" in shown.out and "exactness, sampled" in shown.out
    assert "would have been noticed with 90% probability" in shown.err


def test_a_failure_leaves_no_folder_and_prompts_beyond_the_model_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_chat_target(BARE, vocab_size=260)
    place = packed_place(tmp_path, target, drafters.make(Eagle1, target), plan=Plan(Tree.chain(2)))
    (place / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "the"}\n')
    few = (
        "chains=[1]",
        "trees=[]",
        "temperatures=[0.0]",
        "speed_prompts=0",
        "parity_prompts=0",
        "max_new_tokens=2",
    )
    evaluate.main(words(place, tmp_path / "run", *few))
    assert "left out rows 2: the tokenizer gives id 260" in capsys.readouterr().err
    (place / "prompts.jsonl").write_text('{"prompt": "the"}\n')
    with pytest.raises(SystemExit):
        evaluate.main(words(place, tmp_path / "none", *few))
    assert "none of its 1 rows can be used: 1 the tokenizer gives id 260" in capsys.readouterr().err
    (place / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.setattr(evaluate, "measure", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate.main(words(place, tmp_path / "broken", *few))
    assert not (tmp_path / "none").exists() and not (tmp_path / "broken").exists()


@pytest.mark.field("F35")
def test_training_and_decoding_agree(run: tuple[dict[str, Any], Path]) -> None:
    found = run[0]["parity"]
    assert (
        found["agree"]
        and 0.2 < found["accept_at_1"] == found["sim_accept_at_1"] < 1
        and found["rounds"] > 9
    )


@pytest.mark.field("F35")
def test_a_drafter_fed_otherwise_than_in_training_is_found_out(
    target: Target, drafter: Eagle1, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from drafttrain.decoding.speculator import Speculator

    class Shifted(Eagle1):
        def extend(self, state: Any, committed: Any, depth: int) -> Any:
            tokens = committed.tokens.roll(1, 1)
            shifted = type(committed)(committed.features, tokens, committed.counts)
            return super().extend(state, shifted, depth)

    speculator = Speculator(target, drafter, Plan(Tree.chain(2)), dtype="float32")
    assert parity(speculator, drafter, prompts, 16)["agree"]  # type: ignore[index]
    speculator.drafter.__class__ = Shifted
    found = parity(speculator, drafter, prompts, 16)
    assert found is not None and not found["agree"] and found["gap"] < -0.05
    assert "PARITY GAP" in parity_words(found)[0]


def test_prompts_of_a_conversation_set(
    place: Path,
    target: Target,
    prompts: list[list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [
        Row(i, (*prompt, 40, 41, 2), ((len(prompt), len(prompt) + 3),), ("stop",))
        for i, prompt in enumerate(prompts)
    ]
    manifest = {"target": {"name": target.name, "fingerprint": target.fingerprint}}
    write_set(tmp_path / "set", rows, manifest=manifest, held_out=2)
    few = (
        "chains=[2]",
        "trees=[]",
        "temperatures=[0.0]",
        "speed_prompts=1",
        f"prompts={tmp_path / 'set'}",
    )
    evaluate.main(words(place, tmp_path / "run", *few))
    result = json.loads((tmp_path / "run" / evaluate.RESULT).read_text())
    assert result["settings"]["prompt_count"] == 2 and result["rows"][1]["prompts"] == 2
    other = {"target": {"name": "x", "fingerprint": {**target.fingerprint, "weights": "0"}}}
    write_set(tmp_path / "foreign", rows, manifest=other, held_out=2)
    with pytest.raises(SystemExit):
        evaluate.main(
            words(place, tmp_path / "other", *few[:-1], f"prompts={tmp_path / 'foreign'}")
        )
    assert "another target" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.field("F76")
def test_every_turn_is_decoded_and_counted(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "talk.jsonl").write_text(
        "".join(json.dumps({"turns": [text, "more"]}) + "\n" for text in TEXTS)
    )
    few = ("chains=[2]", "trees=[]", "temperatures=[0.0]", "speed_prompts=0", "limit=5")
    given: dict[str, Any] = {"prompts": tmp_path / "talk.jsonl", "max_new_tokens": 6}
    evaluate.main(words(place, tmp_path / "run", *few, **given))
    captured = capsys.readouterr()
    assert "left out 1 later turns" in captured.err and "by turn" in captured.out
    result = json.loads((tmp_path / "run" / evaluate.RESULT).read_text())
    settings, row = result["settings"], result["rows"][-1]
    assert settings["prompts_by_turn"] == {"1": 3, "2": 2} and settings["turns_left_out"] == 1
    assert [(one["turn"], one["prompts"]) for one in row["by_turn"]] == [(1, 3), (2, 2)]
    assert row["prompts"] == 5 and sum(one["rounds"] for one in row["by_turn"]) == row["rounds"]


def test_acceptance_by_kind_of_task(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some rows name a kind, one in the other column; each turn is of its row's kind."""
    named: list[dict[str, Any]] = [{"category": "talk"}, {}, {"task": "maths"}]
    lines = [{"turns": [text, "more"], **one} for text, one in zip(TEXTS, named, strict=True)]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    few = ("chains=[2]", "trees=[static]", "temperatures=[0.0]", "speed_prompts=1")
    given: dict[str, Any] = {"prompts": tmp_path / "talk.jsonl", "max_new_tokens": 6}
    evaluate.main(words(place, tmp_path / "run", *few, "limit=5", **given))
    captured = capsys.readouterr()
    assert "2 of 5 prompts name no kind of task, by kind they are (none)" in captured.err
    result = json.loads((tmp_path / "run" / evaluate.RESULT).read_text())
    assert result["settings"]["prompts_by_category"] == {NO_CATEGORY: 2, "maths": 1, "talk": 2}
    plain, *rows = result["rows"]
    assert "by_category" not in plain  # Only one prompt was timed.
    for row in rows:
        found = row["by_category"]
        counts = [(one["category"], one["prompts"]) for one in found]
        assert counts == [("maths", 1), ("talk", 2), (NO_CATEGORY, 2)]
        assert sum(one["rounds"] for one in found) == row["rounds"]
    table = captured.out.partition(KINDS)[2].partition("speed:")[0]
    for one in rows[0]["by_category"]:
        (line,) = [line for line in table.splitlines() if f" {one['category']} " in line]
        assert f" {one['tau']:.3f} " in line
    assert OVER_ROUNDS in table and f"{rows[1]['tau_prompt_mean']:.3f}" in table
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines[:1] * 2))
    evaluate.main(words(place, tmp_path / "other", *few, **given))
    captured = capsys.readouterr()
    assert KINDS not in captured.out and "kind of task" not in captured.err


@pytest.mark.field("F49")
def test_prompts_that_end_at_once_have_no_tau(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny_chat_target(stop_bias=1e4)
    packed_place(tmp_path, target, drafters.make(Eagle1, target))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    evaluate.main(words(tmp_path, tmp_path / "run", "chains=[2]", "trees=[]", "temperatures=[0.0]"))
    text = (tmp_path / "run" / evaluate.RESULT).read_text()
    assert "NaN" not in text
    result = json.loads(text)
    assert (
        all(row["tau"] is None and row["rounds"] == 0 for row in result["rows"])
        and result["parity"] is None
    )
    assert "acceptance is not available" in capsys.readouterr().err


def test_a_calibrated_tree_is_that_of_the_packaged_accuracies(
    place: Path, target: Target, tmp_path: Path
) -> None:
    package = tmp_path / "package"
    shutil.copytree(place / "package", package)
    (package / "metrics.json").write_text(
        json.dumps({"settings": {"head_accuracy": [[0.3, 0.6], [0.4, 0.1]]}, "rows": []})
    )
    few = (
        "chains=[]",
        "trees=[calibrated:3]",
        "temperatures=[0.0]",
        "speed_prompts=0",
        "parity_prompts=0",
        "limit=1",
    )
    evaluate.main(words(place, tmp_path / "run", *few, f"package={package}"))
    (row,) = json.loads((tmp_path / "run" / evaluate.RESULT).read_text())["rows"]
    assert row["nodes"] == 3 and row["tau"] >= 1
    speculator = drafttrain.load(package, target)
    assert packaged_tree("calibrated:3", speculator, package) == Tree.from_paths([[0], [1], [0, 0]])


BAD: dict[str, tuple[Callable[[Path, Path], list[str]], str]] = {
    "package missing": (lambda p, t: [f"package={p / 'nowhere'}"], "package=.*nowhere"),
    "package is the target": (lambda p, t: [f"package={p / 'target'}"], said("doors.a_target")),
    "prompts missing": (lambda p, t: ["prompts=nowhere.jsonl"], r"prompts=nowhere\.jsonl"),
    "prompts empty": (lambda p, t: [f"prompts={made(t, '')}"], said("doors.no_rows")),
    "prompts unusable": (lambda p, t: [f"prompts={made(t, '{}')}"], said("doors.no_usable_row")),
    "prompts are a folder": (lambda p, t: [f"prompts={p / 'target'}"], r"manifest\.json"),
    "prompts are nothing": (lambda p, t: ["prompts= "], "prompts= ?: give "),
    "set unknown": (lambda p, t: ["prompts=builtin:octopus"], "builtin:octopus"),
    "column misspelt": (lambda p, t: ["columns.promt=question"], r"columns\.prompt"),
    "no growth": (lambda p, t: ["chains=[]", "trees=[]"], "chains and trees"),
    "a chain of none": (lambda p, t: ["chains=[0]"], said("doors.drafts_nothing")),
    "unknown tree": (lambda p, t: ["trees=[octopus]"], said("doors.unknown_tree")),
    "calibrated to nothing": (lambda p, t: ["trees=[calibrated:0]"], "tree 'calibrated:0'"),
    "nothing calibrated": (lambda p, t: ["trees=[calibrated:8]"], "tree calibrated:8"),
    "malformed tree": (lambda p, t: ["trees=[[[0],[1,0]]]"], said("doors.no_parent")),
    "unknown rule": (lambda p, t: ["rule=magic"], "rule magic"),
    "no rule": (lambda p, t: ["rule=[]"], r"rule\b.*empty"),
    "a rule that fits nothing": (lambda p, t: ["rule=block", "temperatures=[0.0]"], "rule block"),
    "a rule that fits no tree": (
        lambda p, t: ["rule=[auto,block]", "chains=[]", "trees=[static]"],
        said("decoding.rule_for_chains"),
    ),
    "a tree too small": (lambda p, t: ["tree=dynamic", "tree.total=3"], r"tree\.depth"),
    "a tree that is no choice": (lambda p, t: ["tree=octopus"], "tree octopus"),
    "no temperature": (lambda p, t: ["temperatures=[]"], "temperatures"),
    "a cold temperature": (lambda p, t: ["temperatures=[-1]"], r"temperature\b.*-1"),
    "a wordy temperature": (lambda p, t: ["temperatures=[hot]"], r"temperature\b.*hot"),
    "one temperature": (lambda p, t: ["temperatures=1"], "temperatures=1"),
    "no tokens": (lambda p, t: ["max_new_tokens=0"], "max_new_tokens=0"),
    "no batch": (lambda p, t: ["batch=0"], "batch=0"),
    "half a limit": (lambda p, t: ["limit=1.5"], r"limit=1\.5"),
    "misspelt": (lambda p, t: ["max_new_token=3"], "max_new_tokens"),
    "a seed of words": (lambda p, t: ["seed=x"], "seed=x"),
    "an unknown dtype": (lambda p, t: ["dtype=foo"], "dtype=foo"),
    "half an exactness": (lambda p, t: ["exactness=maybe"], "exactness=maybe"),
    "half a sim": (lambda p, t: ["sim=maybe"], "sim=maybe"),
    "nothing to compute": (
        lambda p, t: ["sim=true", "temperatures=[0]"],
        r"sim=true .*'temperatures=\[0,1\]'",
    ),
    "answers that nothing reads": (
        lambda p, t: [f"answers={p}", "temperatures=[0.7,1]"],
        "answers=.* would not be read: .*temperature 0",
    ),
    "answers from nowhere": (lambda p, t: [f"answers={p}/none"], "answers=.*none is no folder"),
    "too few draws": (lambda p, t: ["exactness_draws=100"], "exactness_draws=100: 4 .*160"),
    "no top_p": (lambda p, t: ["top_p=nan"], r"top_p\b.*nan"),
    "prompts that are a prompt": (lambda p, t: [f"prompts={'why ' * 99}"], "prompts=why"),
    "a number as folder": (lambda p, t: ["run_dir=2024"], "run_dir=2024"),
    "columns that are none": (lambda p, t: ["columns=5"], "columns"),
    "folder in use": (lambda p, t: [f"run_dir={p}"], "run_dir="),
    "prompt too long": (
        lambda p, t: [f"prompts={made(t, json.dumps({'prompt': 'x' * 600}))}"],
        said("doors.nothing_left"),
    ),
}


def made(folder: Path, text: str) -> Path:
    (folder / "made.jsonl").write_text(text)
    return folder / "made.jsonl"


@pytest.mark.field("F62")
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(
    name: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = BAD[name]
    with pytest.raises(SystemExit) as caught:
        evaluate.main(words(place, tmp_path / "run", *change(place, tmp_path)))
    assert caught.value.code == 2
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert last.startswith("drafttrain.evaluate: ") and re.search(message, last), last
    assert not (tmp_path / "run").exists()


@pytest.mark.field("F64")
def test_decoding_beyond_the_trained_length_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_length({"trained_length": 20}, [[1] * 8, [1] * 12], 10)
    assert "1 of 2 prompts go beyond the 20 tokens" in capsys.readouterr().err
    warn_of_length({"trained_length": None}, [[1] * 8], 10)
    assert capsys.readouterr().err == ""


def test_a_plain_row_is_one_token_a_pass(target: Target, prompts: list[list[int]]) -> None:
    found = measure_acceptance(target, None, prompts, Plan(Tree.chain(0)), max_new_tokens=5)
    row = row_of(Plan(Tree.chain(0)), found, None)
    assert row["tau"] == 1.0 and row["growth"] == "plain" and row["label"] == "T=0 plain"
    assert not math.isnan(row["tau"]) and torch.is_grad_enabled()
