"""The benchmark against transformers runs, prints every row, and compares equal text."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.decoding.plan import Plan
from drafttrain.decoding.rules import RULES
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.medusa import Medusa
from drafttrain.drafter.ngram import NGram
from drafttrain.drafter.ssm import Ssm
from drafttrain.drafter.suffix import Suffix
from drafttrain.target import load
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters
from tests.packaging.made import overfitted, packed

BENCH = Path(__file__).resolve().parent.parent / "scripts" / "bench"


def run(script: str, *words: Any, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a script. Returns its globals afterwards."""
    patch.syspath_prepend(str(BENCH))
    patch.setattr(sys, "argv", [script, *map(str, words)])
    return runpy.run_path(str(BENCH / script), run_name="__main__")


def line(output: str, name: str) -> list[str]:
    """The cells of a printed row."""
    rows = [[cell.strip() for cell in row.split("│")[1:-1]] for row in output.splitlines()]
    (found,) = [cells for cells in rows if cells[:1] == [name]]
    return found


def test_peers_of_plain_decoding_and_prompt_lookup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        "hf_peers.py",
        "--target",
        "tiny",
        "--prompts",
        2,
        "--new",
        16,
        "--drafts",
        2,
        patch=monkeypatch,
    )
    output = capsys.readouterr().out
    names = ("drafttrain, plain", "transformers, plain")
    for name in (*names, "drafttrain, ngram, 2 drafts", "transformers, prompt lookup, 2 drafts"):
        cells = line(output, name)
        assert cells[-1] == "2/2" and all(float(cell) > 0 for cell in cells[1:5]), cells
    assert [line(output, name)[2] for name in names] == ["1.000", "1.000"]
    assert line(output, names[0])[3:5] == ["1.000", "1.000"], "plain decoding against itself"
    for name in ("plain", "prompt lookup"):
        assert all(float(cell) > 0 for cell in line(output, name)[1:3])
    assert "small model" not in output and "all of them wrote the same text" in output


def test_peers_with_one_small_model_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load.tiny()
    # All of the target's layers: every draft is kept, so that the passes of both can be counted.
    drafter = drafters.make(Ssm, target, layers=[0, 1, 2], own=["embedding", "norm", "head"]).eval()
    package = packed(tmp_path / "package", drafter, target, plan=Plan(Tree.chain(2)))
    words = ("--target", "tiny", "--package", package, "--prompts", 2, "--new", 13, "--drafts", 3)
    run("hf_peers.py", *words, patch=monkeypatch)
    output = capsys.readouterr().out
    mine, theirs = (
        line(output, "drafttrain, ssm, 3 drafts"),
        line(output, "transformers, assistant, 3 drafts"),
    )
    packaged = line(output, "drafttrain, ssm, the package's chain 2")
    assert (
        mine[-1]
        == theirs[-1]
        == packaged[-1]
        == line(output, "transformers, assistant, its defaults")[-1]
        == "2/2"
    )
    # 13 tokens: one from reading the prompt, then drafts + 1 a pass; transformers drafts before it
    # reads the prompt, too.
    assert [cells[2] for cells in (mine, packaged, theirs)] == ["3.250", "2.600", "3.250"]
    assert line(output, "small model") and line(output, "small model, as each would have it")
    assert "all of them wrote the same text" in output


def test_a_package_without_a_model_of_its_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load.tiny()
    torch.manual_seed(0)
    package = packed(tmp_path / "package", drafters.make(Ssm, target, layers=[0]).eval(), target)
    with pytest.raises(SystemExit) as stopped:
        run("hf_peers.py", "--target", "tiny", "--package", package, patch=monkeypatch)
    assert stopped.value.code == 2 and "export_assistant=true" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--package", "/nowhere"), "package=/nowhere"),
        (("--package", "~nobody-of-that-name/x"), "package=~nobody-of-that-name/x"),
        (("--prompts", 0), "--prompts: 0: needs an integer of at least 1"),
        (("--k", -1), "--k: -1: needs an integer of at least 1"),
        (("--temperature", "nan"), "temperature is nan"),
        (("--new", 1), "--new"),
        (("--package", "{ngram}"), "rule ratio"),
        (("--package", "{medusa}", "--k", 3), "3 deep"),
    ],
)
def test_rules_are_not_compared_for_nothing(
    words: Sequence[Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = load.tiny()
    torch.manual_seed(0)
    packed(tmp_path / "eagle1", drafters.make(Eagle1, target), target)
    packed(tmp_path / "ngram", drafters.make(NGram, target), target)
    packed(tmp_path / "medusa", drafters.make(Medusa, target, heads=2).eval(), target)
    words = [str(word).replace("{", f"{tmp_path}/").replace("}", "") for word in words]
    with pytest.raises(SystemExit) as stopped:
        run(
            "rules.py",
            "--target",
            "tiny",
            "--package",
            tmp_path / "eagle1",
            "--prompts",
            1,
            "--new",
            4,
            *words,
            patch=monkeypatch,
        )
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_the_block_rule_and_the_ratio_rule_on_the_same_chains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load.tiny()
    package = packed(
        tmp_path / "package",
        overfitted(target, [[5 + i, 6, 7] for i in range(3)], steps=30),
        target,
    )
    run(
        "rules.py",
        "--target",
        "tiny",
        "--package",
        package,
        "--prompts",
        3,
        "--new",
        24,
        "--k",
        3,
        patch=monkeypatch,
    )
    output = capsys.readouterr().out

    def numbers(start: str) -> list[float]:
        (found,) = [row for row in output.splitlines() if row.startswith(start)]
        return [float(word) for word in re.findall(r"-?\d\.\d{4}", found)]

    ratio, low, high, really, *_ = numbers("kept a round, ratio")
    block, gain = numbers("kept a round, block")[0], numbers("block over ratio")[0]
    assert 0 < low < ratio < high < 3 and block == pytest.approx(ratio, abs=0.2)
    assert gain == pytest.approx(block - ratio, abs=2e-4)
    assert really == pytest.approx(ratio, abs=0.35)
    assert RULES["ratio"].__name__ == "ratio", "the rule is put back"


def test_rows_side_by_side_have_their_own_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load.tiny()
    for name, kind in {"eagle1": Eagle1, "suffix": Suffix}.items():
        packed(tmp_path / name, drafters.make(kind, target), target, plan=Plan(Tree.chain(2)))
        words = ["--package", tmp_path / name, "--target", "tiny", "--batch", 3]
        run("batch.py", *words, "--new", 6, "--repeats", 1, patch=monkeypatch)
        printed = capsys.readouterr().out
        assert printed.count("3 of 3 rows have the same text") == 2


def test_replay_counts_what_decoding_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load.tiny()
    packed(tmp_path / "head", drafters.make(Eagle1, target), target, plan=Plan(Tree.chain(2)))
    words = ["--package", tmp_path / "head", "--target", "tiny", "--prompts", 3]
    run("replay.py", *words, "--new", 8, "--batch", 2, patch=monkeypatch)
    printed = capsys.readouterr().out
    assert printed.count("other counts in 0 of 3 prompts") == 3 and "s replaying" in printed


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        ("batch.py", ["--package", "/nowhere", "--target", "tiny"], "package=/nowhere does not"),
        ("batch.py", ["--package", "x", "--batch", "0"], "--batch: 0: needs an integer of at"),
        ("copying.py", ["--lengths", "250", "-1"], "--lengths: -1: needs an integer"),
        ("copying.py", ["--rounds", "x"], "--rounds: x: needs an integer"),
        ("decode.py", ["--package", "/nowhere"], "package=/nowhere does not exist"),
        ("decode.py", ["--context", "99999999"], "the context of tiny-llama holds"),
        ("features.py", ["--length", "99999999"], "the context of tiny-llama holds"),
        ("features.py", ["--rows", "1.5"], "--rows: 1.5: needs an integer"),
        ("hf_peers.py", ["--package", "/nowhere"], "--package /nowhere holds no"),
        (
            "packing.py",
            ["--target", "tiny", "--data", "/nowhere"],
            "data.path=/nowhere|/nowhere is",
        ),
        ("packing.py", ["--target", "tiny", "--batch-tokens", "1"], "less than|needs"),
        ("replay.py", ["--package", "/nowhere"], "package=/nowhere does not exist"),
        ("replay.py", ["--package", "x", "--new", "0"], "--new: 0: needs an integer of at"),
        ("rules.py", ["--target", "tiny", "--package", "/nowhere"], "package=/nowhere does not"),
        ("store.py", ["data.path=/nowhere", "data=set"], "/nowhere is not a conversation set"),
        ("store.py", ["sed=1"], "there is no setting sed"),
        ("train_step.py", ["--prompt", "224"], "--prompt needs to be less than --length"),
        ("train_step.py", ["--length", "99999999"], "the context of tiny-llama holds"),
        ("verify.py", ["--dtypes", "float8"], "invalid choice: 'float8'"),
        ("verify.py", ["--context", "99999999"], "the context of tiny-llama holds"),
    ],
)
def test_wrong_input_is_one_line(
    script: str,
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As at doors, with exit code 2; no traceback."""
    tiny = load.tiny()
    monkeypatch.setattr(load, "smollm2", lambda **given: tiny)
    with pytest.raises(SystemExit) as left:
        run(script, *words, patch=monkeypatch)
    (*_, last) = capsys.readouterr().err.strip().splitlines()
    assert left.value.code == 2 and last.startswith(f"{script}: ") and re.search(said, last), last
