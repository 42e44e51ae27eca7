"""Several small models in one command: fitted one after the other, packaged as one, and gone on
with where a run was broken off."""

from __future__ import annotations

import copy
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from drafttrain import fit
from drafttrain.data.datamodule import ConversationData
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.ensemble import Ensemble
from drafttrain.errors import InputError
from drafttrain.fitting import boosting, learning, settings
from drafttrain.packaging.manifest import TENSORS, read_config, training_of
from drafttrain.packaging.reading import load as load_package
from drafttrain.reporting.loggers import read_metrics
from drafttrain.reporting.progress import ConsoleProgress
from drafttrain.runs import plain
from drafttrain.target.model import Target
from drafttrain.training.boosted import procedure_facts
from drafttrain.training.checkpoint import read_checkpoint
from drafttrain.tree.forest import Forest
from drafttrain.tree.topology import Tree
from drafttrain.wiring.composing import compose
from drafttrain.wiring.conf import conf_dir
from tests.messages import said
from tests.training.parts import write_tiny_set


@pytest.fixture(scope="module")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_set(target, tmp_path_factory.mktemp("set"), rows=26, tokens=16)


def words(folder: Path, run: Path, *more: str) -> list[str]:
    small = [
        "target=tiny",
        "data=set",
        f"data.path={folder}",
        "data.temperatures=null",
        "data.set_aside=4",
    ]
    small += [
        "drafter.layers=[0, 2]",
        "draft_vocab=64",
        "trainer.max_steps=3",
        "trainer.max_epochs=null",
        "trainer.log_every=1",
    ]
    small += [
        "boost.reference=4",
        "boost.match=1",
        "boost.least_gain=0",
        "boost.share_new_tokens=16",
        "boost.nodes=5",
    ]
    small += [
        "eval.prompts=2",
        "eval.max_new_tokens=6",
        "final.prompts=2",
        "final.max_new_tokens=6",
        "checkpoint.every=1",
    ]
    small += ["final.speed.chain_2=null", "final.speed.chain_3=null"]
    return [
        "experiment=specinfer",
        *small,
        f"run_dir={run}",
        "final.speed_prompts=1",
        "final.speed_new_tokens=6",
        *more,
    ]


@pytest.fixture(scope="module")
def calm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    run = tmp_path_factory.mktemp("calm") / "run"
    fit.main(words(folder, run))
    return run


def test_one_command_makes_an_ensemble(target: Target, calm: Path) -> None:
    run = calm
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "metrics.csv", "checkpoints", "members", "acceptance.png", "package",
        "run.json", "report.html",
    }  # fmt: skip
    assert {path.name for path in (run / "members").iterdir()} == {"member-1", "member-2"}
    assert {path.name for path in (run / "members" / "member-1").iterdir()} == {
        "config.yaml", "metrics.csv", "checkpoints", "marks.ckpt",
    }  # fmt: skip
    metrics = json.loads((run / "package" / "metrics.json").read_text())
    one, two = metrics["settings"]["members"]
    assert (one["member"], one["rows"], two["member"]) == (1, 18, 2) and len(two["overlap"]) == 2
    assert two["rows"] == 18 - one["marked_covered"] < 18 and one["marked"] == 18, (
        "some rows were covered, and left out"
    )
    assert two["union"] == pytest.approx(one["union"] + two["gain"])
    assert metrics["settings"]["ended"] == "all of boost.members=2 are fitted"
    rows = {int(row["step"]): row for row in read_metrics(run / "metrics.csv")}
    assert rows[1]["boost/coverage"] == one["coverage"] and rows[1]["boost/left"] == one["left"]
    assert rows[2]["boost/gain"] == two["gain"] and rows[2]["boost/overlap_1"] == two["overlap"][0]
    assert [row["step"] for row in read_metrics(run / "members" / "member-2" / "metrics.csv")] == [
        1,
        2,
        3,
    ]

    # Each member's configuration is the run's, with a seed of its own.
    written = [
        run / "config.yaml",
        *(run / "members" / f"member-{k}" / "config.yaml" for k in (1, 2)),
    ]
    kept = [path.read_text() for path in written]
    assert kept[0] == kept[1] and kept[0].count("\nseed: 0\n") == 1
    assert kept[2] == kept[0].replace("\nseed: 0\n", "\nseed: 1\n")
    for number in (1, 2):
        state = read_checkpoint(written[number].parent / "checkpoints" / "last.ckpt")
        assert state["settings"] == OmegaConf.to_container(OmegaConf.create(kept[number]))
        assert state["facts"]["seed"] == number - 1

    speculator = load_package(run / "package", target)
    assert isinstance(speculator.drafter, Ensemble) and isinstance(speculator.plan.tree, Forest)
    last = [
        read_checkpoint(run / "members" / f"member-{k}" / "checkpoints" / "best.ckpt")["weights"]
        for k in (1, 2)
    ]
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
    fits = [*training["members"], *training["marking"]]
    assert training["marking"], "those that only marked rows took time too"
    tokens = sum(one["supervised_tokens_seen"] for one in fits)
    assert (
        training_of(read_config(run / "package"))[1]
        == tokens
        > sum(one["supervised_tokens_seen"] for one in training["members"])
    )


class Signal(ConsoleProgress):
    """Sends this process a signal after the second update of the third fit."""

    fits = 0

    def on_train_start(self, *args: Any, **kwargs: Any) -> None:
        Signal.fits += 1
        super().on_train_start(*args, **kwargs)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if Signal.fits == 3 and args[1].updates == 1:
            signal.raise_signal(signal.SIGTERM)
        super().on_train_batch_end(*args, **kwargs)


def test_a_run_broken_off_goes_on_between_and_within_fits_to_the_same_weights(
    folder: Path,
    calm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(learning, "ConsoleProgress", Signal)
        fit.main(words(folder, run))
    said = capsys.readouterr().out
    assert stopped.value.code == 143 and f"continue with resume=last run_dir={run}" in said.replace(
        "\n", ""
    )
    assert {path.name for path in (run / "members" / "member-1").glob("fold-*")} == {
        "fold-1",
        "fold-2",
    }
    assert (
        not (run / "package").exists()
        and not (run / "members" / "member-1" / "marks.ckpt").exists()
    )

    fit.main([*words(folder, run), "resume=last"])
    said = capsys.readouterr().out
    assert said.count("training is already done") == 2, (
        "the member and the model of the first fold are not fitted again"
    )
    assert re.search("goes on after update [12],", said) and "references matched" in said
    assert (run / "package" / TENSORS).read_bytes() == (calm / "package" / TENSORS).read_bytes()
    assert (
        training_of(read_config(run / "package"))[1]
        == training_of(read_config(calm / "package"))[1]
    )
    lines = [
        [row for row in read_metrics(one / "metrics.csv") if "boost/gain" in row]
        for one in (run, calm)
    ]
    assert lines[0] == lines[1] and len(lines[0]) == 2


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("drafter", OmegaConf.load(conf_dir() / "drafter" / "eagle1.yaml"), "boost: Eagle1"),
        ("resume", "x.ckpt", "resume=x.ckpt"),
        ("export_assistant", True, "export_assistant"),
        ("data.set_aside", 0, "boost.nodes"),
        ("boost.match", 90, "boost.match=90"),
        ("boost.members", 300, "boost.members=300"),
        (
            "joint",
            {**OmegaConf.load(conf_dir() / "joint" / "lora.yaml"), "rank": 0},
            "set joint=null",
        ),
    ],
)
def test_what_cannot_work_is_refused_early(config: Any, key: str, value: Any, message: str) -> None:
    other = copy.deepcopy(config)
    OmegaConf.update(other, key, value, force_add=True, merge=False)
    with pytest.raises(InputError, match=re.escape(message)):
        settings.read_settings(other)


@pytest.fixture(scope="module")
def config() -> Any:
    return compose("fit", ["experiment=specinfer"])


def test_several_processes_are_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "world_size", lambda: 2)
    with pytest.raises(InputError, match=said("fitting.several_processes")):
        settings.read_settings(config)


def test_a_refusal_leaves_the_folder_free(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(boosting, "learn", lambda *_, **__: pytest.fail("something was fitted"))
    for more, fault in (
        (["boost.removal=token", "drafter.on_policy=0.5"], "others are learned"),
        (
            ["boost.share_new_tokens=600"],
            "no row set aside leaves 600 tokens of the target's context",
        ),
    ):
        with pytest.raises(SystemExit) as stopped:
            fit.main(words(folder, tmp_path / "run", *more))
        assert stopped.value.code == 2 and fault in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


def test_another_procedure_is_another_run(target: Target, folder: Path, config: Any) -> None:
    data, now = ConversationData(folder), plain(config)
    facts = procedure_facts(now, target, data)
    for key, value, same in (
        ("eta", 2.0, False),
        ("match", 1, False),
        ("nodes", 4, True),
        ("share_new_tokens", 99, True),
    ):
        other = {**now, "boost": {**now["boost"], key: value}}
        assert (procedure_facts(other, target, data) == facts) == same, key
