"""Several small models in one command: fitted one after the other, packaged as one, and gone on with where a run was broken off."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drafttrain import fit
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.ensemble import Ensemble
from drafttrain.packaging.manifest import TENSORS
from drafttrain.packaging.reading import load as load_package
from drafttrain.reporting.loggers import read_metrics
from drafttrain.reporting.progress import ConsoleProgress
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.training.checkpoint import read_checkpoint
from drafttrain.tree.forest import Forest
from drafttrain.tree.topology import Tree
from tests.training.parts import write_tiny_set

UNMEASURED = ["eval.every=null", "eval.prompts=0", "eval.sim_rows=0", "final.prompts=0", "final.speed_prompts=0"]


@pytest.fixture(scope="module")
def target() -> Target:
    return load.tiny()


@pytest.fixture(scope="module")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_set(target, tmp_path_factory.mktemp("set"), rows=26, tokens=16)


def words(folder: Path, run: Path, *more: str) -> list[str]:
    small = ["target=tiny", "data=set", f"data.path={folder}", "data.temperatures=null", "data.set_aside=4"]
    small += ["drafter.layers=[0, 2]", "draft_vocab=64", "trainer.max_steps=3", "trainer.max_epochs=null", "trainer.log_every=1"]
    small += ["boost.reference=4", "boost.match=1", "boost.least_gain=0", "boost.share_new_tokens=16", "boost.nodes=5"]
    small += ["eval.prompts=2", "eval.max_new_tokens=6", "final.prompts=2", "final.max_new_tokens=6", "checkpoint.every=1"]
    return ["experiment=specinfer", *small, f"run_dir={run}", "final.speed_prompts=1", "final.speed_new_tokens=6", *more]


def refusal(capsys: pytest.CaptureFixture[str], words: Sequence[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        fit.main(words)
    assert stopped.value.code == 2
    return capsys.readouterr().err.strip()


def test_one_command_makes_an_ensemble(target: Target, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    fit.main(words(folder, run))
    said = capsys.readouterr().out
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "metrics.csv", "checkpoints", "members", "acceptance.png", "package",
    }  # fmt: skip
    assert {path.name for path in (run / "members").iterdir()} == {"member-1", "member-2"}
    assert {path.name for path in (run / "members" / "member-1").iterdir()} == {
        "config.yaml", "metrics.csv", "checkpoints", "marks.ckpt",
    }  # fmt: skip
    metrics = json.loads((run / "package" / "metrics.json").read_text())
    one, two = metrics["settings"]["members"]
    assert (one["member"], one["rows"], two["member"]) == (1, 18, 2) and len(two["overlap"]) == 2
    assert two["rows"] == 18 - one["marked_covered"] < 18 and one["marked"] == 18, "some rows were covered, and left out"
    assert two["union"] == pytest.approx(one["union"] + two["gain"])
    assert "references matched" in said and "all of boost.members=2 are fitted" in said
    rows = {int(row["step"]): row for row in read_metrics(run / "metrics.csv")}
    assert rows[1]["boost/coverage"] == one["coverage"] and rows[1]["boost/left"] == one["left"]
    assert rows[2]["boost/gain"] == two["gain"] and rows[2]["boost/overlap_1"] == two["overlap"][0]
    assert [row["step"] for row in read_metrics(run / "members" / "member-2" / "metrics.csv")] == [1, 2, 3]

    speculator = load_package(run / "package", target)
    assert isinstance(speculator.drafter, Ensemble) and isinstance(speculator.plan.tree, Forest)
    last = [read_checkpoint(run / "members" / f"member-{k}" / "checkpoints" / "best.ckpt")["weights"] for k in (1, 2)]
    for number, weights in enumerate(last):
        for name, value in speculator.drafter.drafters[number].named_parameters():
            assert value.float().equal(weights[f"drafter.{name}"].to(value.dtype).float()), name
    prompts = [[5, 6, 7], [9, 8, 7, 6]]
    drafted, tally = speculator.generate(prompts, max_new_tokens=10)
    plain, _ = speculator.generate(prompts, max_new_tokens=10, plan=Plan(Tree.chain(0)))
    assert [output.ids for output in drafted] == [output.ids for output in plain] and tally.drafted
    labels = {row["label"]: row for row in metrics["rows"]}
    assert {"together_5", "chain_4"} <= labels.keys() and labels["together_5"]["nodes"] <= 5
    assert labels["chain_4"]["nodes"] == 8, "each member grows a tree that is none for several"
    training = json.loads((run / "package" / "config.json").read_text())["training"]["training"]
    assert [one["updates"] for one in training["members"]] == [3, 3]


class Signal(ConsoleProgress):
    """Sends this process a signal behind the second update of the first fit that is trained."""

    fits = 0

    def on_train_start(self, *args: Any, **kwargs: Any) -> None:
        Signal.fits += 1
        super().on_train_start(*args, **kwargs)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if Signal.fits == 1 and args[1].updates == 2:
            signal.raise_signal(signal.SIGTERM)
        super().on_train_batch_end(*args, **kwargs)


def test_a_run_broken_off_between_and_within_fits_ends_with_the_same_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, calm = tmp_path / "run", tmp_path / "calm"
    more = [*UNMEASURED, "boost.nodes=null", "boost.removal=soft", "trainer.max_steps=4"]
    fits: list[str] = []
    train = fit.train

    def breaks(training: Any) -> None:
        if len(fits) == 2:
            raise ZeroDivisionError
        fits.append(training.run.folder.name)
        train(training)

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(fit, "train", breaks)
        fit.main(words(folder, run, *more))
    assert fits == ["member-1", "fold-1"] and not (run / "package").exists()

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(fit, "ConsoleProgress", Signal)
        fit.main([*words(folder, run, *more), "resume=last"])
    said = capsys.readouterr().out
    assert stopped.value.code == 143 and f"continue with resume=last run_dir={run}" in said.replace("\n", "")
    assert said.count("training is already done") == 2, "the member and the model of the first part are not fitted anew"

    fit.main([*words(folder, run, *more), "resume=last"])
    assert re.search("goes on behind update [23],", capsys.readouterr().out)
    fit.main(words(folder, calm, *more))
    assert (run / "package" / TENSORS).read_bytes() == (calm / "package" / TENSORS).read_bytes()
    lines = [read_metrics(one / "metrics.csv") for one in (run, calm)]
    assert lines[0] == lines[1] and lines[0][0]["boost/left"] < 1
    said = refusal(capsys, [*words(folder, run, *more), "resume=last", "boost.eta=2"])
    assert "boost.eta was 1.0, is 2" in said


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["drafter=eagle1"], "boost: Eagle1 is no language model"),
        (["joint=lora"], "set joint=null"),
        (["resume=x.ckpt"], "give resume=last"),
        (["export_assistant=true"], "none of which stands for all"),
        (["data.set_aside=0"], "boost.nodes needs rows that are not trained on"),
        (["boost.match=9"], "boost.match=9 is above boost.reference=4"),
        (["boost.fold=3"], "Did you mean boost.folds"),
        (["tree=forest"], "is a Forest, Ssm can fill"),
        (["boost.removal=token", "drafter.on_policy=0.5"], "others are learned"),
        (["final.calibrated=[4]"], "Ssm has no heads"),
        (["trainer.batch_tokens=8"], "longest row"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_fitted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    run = tmp_path / "run"
    given = [word for word in words(folder, run) if not ("eagle1" in more[0] and word.startswith("drafter.layers"))]
    assert message in refusal(capsys, [*given, *more])
    assert not run.exists()


def test_several_processes_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "world_size", lambda: 2)
    assert "start it without accelerate launch" in refusal(capsys, words(folder, tmp_path / "run"))
