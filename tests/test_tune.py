"""Tuning: what is chosen is the fastest that was raced, and the package says so afterwards."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafttrain import tune
from drafttrain.data.template import ChatPieces
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.ensemble import Ensemble
from drafttrain.drafter.ngram import NGram
from drafttrain.drafter.ssm import Ssm
from drafttrain.drafter.suffix import Suffix
from drafttrain.packaging.decoding import read_plan
from drafttrain.packaging.manifest import CONFIG
from drafttrain.target.model import Target
from drafttrain.tree.forest import Forest
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters
from tests.helpers import packed_place, place_words, tiny_chat_target
from tests.messages import said
from tests.packaging.made import overfitted, packed

TEXTS = ["hello", "the thin man", "why?", "one", "two", "three"]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_chat_target()


@pytest.fixture(scope="module")
def place(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pieces = ChatPieces(target.tokenizer, target.stop_ids)
    prompts = [pieces.first_prompt([{"role": "user", "content": text}]) for text in TEXTS]
    drafter = overfitted(target, prompts, steps=40, tokens=16)
    folder = packed_place(
        tmp_path_factory.mktemp("tune"), target, drafter, plan=Plan(Tree.chain(2))
    )
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS)
    )
    return folder


def words(place: Path, out: Path, *more: str, **settings: Any) -> list[str]:
    few = ("sizes=[2,4]", "race=2", "race_prompts=2", "calibration_prompts=4")
    return place_words(
        place, *few, *more, **{"prompts": place / "prompts.jsonl", "run_dir": out, **settings}
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_fastest_of_the_race_is_kept(
    place: Path,
    target: Target,
    tmp_path: Path,
    temperature: float,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = {
        path.name: path.read_bytes() for path in (place / "package").iterdir() if path.is_file()
    }
    tune.main(words(place, tmp_path / "run", f"temperature={temperature}", "trees=[static,2]"))
    result = json.loads((tmp_path / "run" / tune.RESULT).read_text())
    raced = result["raced"]
    assert {row["nodes"] for row in raced} >= {2, 25} and len(result["predicted"]) >= len(raced) - 2
    assert result["predicted"] == sorted(result["predicted"], key=lambda row: -row["speedup"])
    assert all(row["guarantee"] == ("distribution" if temperature else "greedy") for row in raced)
    if temperature:
        assert {"ratio", "block"} <= {row["rule"] for row in raced}
    else:
        assert all(row["same_as_plain"] == row["prompts"] for row in raced)
    best = max(raced, key=lambda row: row["speedup"])
    plan = read_plan(place / "package" / "decoding.yaml")
    assert plan.policy.temperature == temperature
    if best["speedup"] < 1:
        assert not plan.tree.size and "plain decoding is fastest" in capsys.readouterr().err
    else:
        assert (plan.tree.size, plan.rule_name) == (best["nodes"], best["rule"])
    after = {
        path.name: path.read_bytes() for path in (place / "package").iterdir() if path.is_file()
    }
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} <= {"decoding.yaml", "README.md"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_that_are_copied(
    place: Path, target: Target, tmp_path: Path, temperature: float
) -> None:
    """From the answers that the target gives to these prompts, so that drafts are really kept."""
    pieces = ChatPieces(target.tokenizer, target.stop_ids)
    prompts = [pieces.first_prompt([{"role": "user", "content": text}]) for text in TEXTS]
    answers, _ = decode(target, None, prompts, Plan(Tree.chain(0)), max_new_tokens=16)
    known = [
        token
        for prompt, answer in zip(prompts, answers, strict=True)
        for token in (*prompt, *answer.ids, -1)
    ]
    package = packed(
        tmp_path / "package",
        drafters.make(Suffix, target, corpus="answers", corpus_ids=known),
        target,
        plan=Plan(Tree.chain(2)),
    )
    tune.main(
        words(
            place, tmp_path / "run", f"temperature={temperature}", "trees=[static]", package=package
        )
    )
    result = json.loads((tmp_path / "run" / tune.RESULT).read_text())
    assert {row["rule"] for row in result["raced"]} == {"one_hot" if temperature else "greedy"}
    if not temperature:
        assert any(rate for row in result["rates"] for rate in row), (
            "nothing that was copied was kept"
        )
    plan = read_plan(package / "decoding.yaml", drafters.make(Suffix, target))
    assert plan.policy.temperature == temperature and (not plan.tree.size or plan.sampled is False)


def test_the_package_stays_as_it_is_on_demand(place: Path, tmp_path: Path) -> None:
    before = (place / "package" / "decoding.yaml").read_bytes()
    tune.main(words(place, tmp_path / "run", "write=false", "temperature=0.5"))
    assert (place / "package" / "decoding.yaml").read_bytes() == before
    assert (
        json.loads((tmp_path / "run" / tune.RESULT).read_text())["settings"]["temperature"] == 0.5
    )


BAD: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "package missing": (lambda p: ["package=nowhere"], "package=nowhere"),
    "prompts missing": (lambda p: ["prompts=nowhere.jsonl"], r"prompts=nowhere\.jsonl"),
    "no sizes": (lambda p: ["sizes=4"], "sizes=4"),
    "a size beyond one pass": (lambda p: ["sizes=[100000]"], "sizes: 100000"),
    "a number as folder": (lambda p: ["run_dir=2024"], "run_dir=2024"),
    "a size of nothing": (lambda p: ["sizes=[0]"], "sizes: 0"),
    "a tree of nothing": (lambda p: ["trees=[plain]"], "trees: plain"),
    "unknown tree": (lambda p: ["trees=[octopus]"], said("doors.unknown_tree")),
    "unknown rule": (lambda p: ["rules=[magic]"], "rule magic"),
    "no race": (lambda p: ["race=0"], "race=0"),
    "write is a word": (lambda p: ["write=perhaps"], "write=perhaps"),
    "a seed of words": (lambda p: ["seed=x"], "seed=x"),
    "answers that nothing reads": (
        lambda p: [f"answers={p}", "temperature=1"],
        "answers=.* would not be read: .*temperature 0",
    ),
    "a cold temperature": (lambda p: ["temperature=-1"], r"temperature\b.*-1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(
    name: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = BAD[name]
    with pytest.raises(SystemExit) as caught:
        tune.main(words(place, tmp_path / "run", *change(place)))
    assert caught.value.code == 2
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert last.startswith("drafttrain.tune: ") and re.search(message, last), last
    assert not (tmp_path / "run").exists()


def test_a_package_of_nonsense_is_one_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = Path(shutil.copytree(place / "package", tmp_path / "package"))
    config = json.loads((package / CONFIG).read_text())
    config["drafter"]["members"] = 5
    (package / CONFIG).write_text(json.dumps(config))
    with pytest.raises(SystemExit) as caught:
        tune.main(words(place, tmp_path / "run", package=package))
    assert (
        caught.value.code == 2 and "drafter has an unknown key 'members'" in capsys.readouterr().err
    )


def test_an_ensemble_shares_its_drafts(place: Path, target: Target, tmp_path: Path) -> None:
    members = [drafters.make(Ssm, target, layers=[0, 1]), drafters.make(NGram, target)]
    package = packed(
        tmp_path / "package",
        Ensemble(target, members=members).eval(),
        target,
        plan=Plan(Tree.chain(2)),
    )
    tune.main(words(place, tmp_path / "run", package=package, max_new_tokens=20))
    result = json.loads((tmp_path / "run" / tune.RESULT).read_text())
    assert result["rates"] is None and result["predicted"] and len(result["raced"]) >= 2
    assert all(
        guess["paths"]["growth"] == "forest" and guess["nodes"] <= 4
        for guess in result["predicted"]
    )
    assert all(guess["tokens"] > 1 for guess in result["predicted"])
    assert all(
        row["same_as_plain"] == row["prompts"] and row["growth"] == "forest"
        for row in result["raced"]
    )
    plan = read_plan(package / "decoding.yaml")
    assert isinstance(plan.tree, Forest) or not plan.tree.size
