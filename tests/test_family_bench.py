"""The comparison of families: what it refuses, what it makes and goes on with."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drafttrain import fit
from drafttrain.decoding.measurement import gain
from drafttrain.target import load
from tests.test_bench import line, run
from tests.training.parts import write_tiny_set

Call = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows") / "set"
    return write_tiny_set(load.tiny(), folder, rows=24, held_out=6)


@pytest.fixture
def bench(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run it on the tiny target, in this process; what fits were made is in `bench.made`."""
    common = ["--prompts", "4", "--new", "6", "--timed", "1", "--minutes", "0.01", "target=tiny"]
    common += ["data=set", f"data.path={rows}", "data.temperatures=null", "draft_vocab=64"]
    common += ["trainer.batch_tokens=256", "checkpoint.every=1"]
    real = subprocess.run
    made: list[list[str]] = []

    def here(words: list[str], **more: Any) -> Any:
        if words[1:3] != ["-m", "drafttrain.fit"]:
            return real(words, **more)
        made.append(words[3:])
        try:
            fit.main(words[3:])
        except SystemExit as stopped:
            more["stderr"].write("drafttrain.fit: the reason\n")
            return SimpleNamespace(returncode=stopped.code)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", here)

    def call(*words: str, out: Path = tmp_path / "out") -> dict[str, Any]:
        return run("families.py", "--out", out, *common, *words, patch=monkeypatch)

    call.made = made  # type: ignore[attr-defined]
    return call


def test_families_are_trained_and_measured_once(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench("--families", "eagle1,ngram")
    captured = capsys.readouterr()
    assert "families: trains ngram, 2 of 2, about " in captured.err
    names = [words[0] for words in bench.made]
    assert names == ["experiment=eagle1", "experiment=ngram"]
    assert "optim.horizon=clock" in bench.made[0] and "draft_vocab=64" not in bench.made[1]
    folder = tmp_path / "out"
    found = json.loads((folder / "families.json").read_text())
    eagle, ngram = found["families"]["eagle1"], found["families"]["ngram"]
    assert eagle["parameters"] > 0 < eagle["updates"] and ngram["training_seconds"] == 0.0
    assert 0.5 <= eagle["training_seconds"] < 60 and list(found["over"]) == ["eagle1", "ngram"]
    assert list(eagle["trees"]) == ["chain of 4", "static 25", "dynamic 25"]
    for tree, row in ngram["trees"].items():
        assert row["replayed"] and row["prompts"] == 4 and row["draft_cost"] > 0
        assert row["speedup"] > 0 and row["same_as_plain"] == row["speed_prompts"] == 1
        counts = [list(map(tuple, one["trees"][tree]["counts"])) for one in (ngram, eagle)]
        value, interval = gain(*counts)
        assert found["over"]["ngram"][tree] == [value, list(interval or ())]
        assert row["tau"] - eagle["trees"][tree]["tau"] == pytest.approx(value)
    assert found["over"]["eagle1"] == {}
    text = (folder / "families.txt").read_text()
    assert text.strip() in captured.out
    assert line(text.replace("ngram  │ static 25", ""), "ngram")[1] == "chain of 4"

    bench("--families", "suffix,ngram,eagle1")  # Only what is missing is made.
    assert [words[0] for words in bench.made[2:]] == ["experiment=suffix"]
    again = json.loads((folder / "families.json").read_text())["families"]
    assert {"eagle1": eagle, "ngram": ngram} == {n: again[n] for n in ("eagle1", "ngram")}
    assert list(again) == ["eagle1", "ngram", "suffix"]


def test_a_family_that_fails_is_left_out_and_a_stopped_one_goes_on(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = tmp_path / "out" / "runs" / "eagle1"
    codes = iter([143])
    real = subprocess.run
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda *a, **k: (
            (stopped / "checkpoints").mkdir(parents=True),
            SimpleNamespace(returncode=next(codes)),
        )[1],
    )
    with pytest.raises(SystemExit):
        bench("--families", "eagle1,early_exit")
    assert "eagle1 was stopped: the same command goes on with it" in capsys.readouterr().err
    monkeypatch.setattr(subprocess, "run", real)
    # It had nothing to go on from; five layers are more than the tiny target has.
    with pytest.raises(SystemExit):
        bench("--families", "eagle1,early_exit")
    assert "resume=last" not in bench.made[0]
    said = capsys.readouterr().err.strip().split("\n")
    assert any("WARNING: early_exit failed and is left out: drafttrain.fit:" in s for s in said)
    assert said[-1].startswith("families.py: failed: early_exit; their output is in ")
    assert list(json.loads((tmp_path / "out" / "families.json").read_text())["families"]) == [
        "eagle1"
    ]


def test_what_has_a_checkpoint_goes_on(bench: Any, tmp_path: Path) -> None:
    module = run_globals(bench, tmp_path)
    place = tmp_path / "runs" / "one"
    (place / "checkpoints").mkdir(parents=True)
    (place / "checkpoints" / "last.ckpt").write_text("")
    assert module["train_one"](place, ["experiment=none"]) == "drafttrain.fit: the reason"
    assert bench.made[-1][-1] == "resume=last"


def run_globals(bench: Any, tmp_path: Path) -> dict[str, Any]:
    """The script's own names."""
    (tmp_path / "known").mkdir()
    found: dict[str, Any] = bench("--families", "ngram", out=tmp_path / "known")
    return found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--families", "eagle9"],
            "families.py: --families eagle9: give some of eagle1, hass, eagle3",
        ),
        (["--minutes", "0"], "argument --minutes: 0: needs a number of minutes above 0"),
        (["--minutes", "nan"], "argument --minutes: nan: needs a number of minutes above 0"),
        (["--timed", "-1"], "argument --timed: -1: needs an integer"),
        (["--families", "medusa", "optim.lr=0"], "families.py: medusa: optim.lr=0"),
        (["run_dir=x"], "families.py: run_dir=x: runs go into --out"),
        (["resume=last"], "families.py: resume=last: runs go into --out"),
    ],
)
def test_wrong_words_are_refused_at_once(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench(*words)
    assert stopped.value.code == 2 and said in capsys.readouterr().err.strip().split("\n")[-1]
    assert not bench.made and not (tmp_path / "out").exists()


def test_another_comparisons_folder_is_refused(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("")
    for more, said in (
        ([], f"--out {out} holds no comparison: give an empty or new folder"),
        (["--new", "7"], "holds another comparison (new was 6, is 7): set these back, or give"),
        (["optim.lr=1"], "holds another comparison (words.ngram was "),
    ):
        with pytest.raises(SystemExit):
            bench("--families", "ngram", *more)
        assert said in capsys.readouterr().err
        (out / "mine.txt").unlink(missing_ok=True)
        bench("--families", "ngram")
        capsys.readouterr()
    assert len(bench.made) == 1
