"""The door as a person uses it: every experiment ends in a package; what is wrong is refused early;
a killed run goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain import fit, report
from drafttrain.data.conversations import Row, read_set, write_set
from drafttrain.data.named import NO_CATEGORY
from drafttrain.decoding.conditions import digest_of
from drafttrain.decoding.plan import Plan
from drafttrain.fitting import learning, shared
from drafttrain.packaging.manifest import read_config, training_of
from drafttrain.packaging.reading import load as load_package
from drafttrain.reporting.loggers import read_metrics
from drafttrain.target.model import Target
from drafttrain.training.checkpoint import FORMAT, read_checkpoint
from drafttrain.training.run import Run
from drafttrain.training.skips import SkipSearch
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Tree
from drafttrain.wiring.conf import conf_dir
from tests.fitting.parts import QUICK, UNMEASURED, Signal, refusal, weights, words
from tests.forked import Forked
from tests.helpers import file_limit
from tests.reporting.parsed import parsed
from tests.training.parts import same, write_tiny_set

UNTRAINED = ["ngram", "selfspec", "suffix"]
"""Experiments whose drafters learn nothing."""
SEVERAL = ["specinfer"]
"""Experiments that fit more than one drafter: see test_boosting.py."""
EXPERIMENTS = sorted(
    {path.stem for path in (conf_dir() / "experiment").glob("*.yaml")} - {*UNTRAINED, *SEVERAL}
)
WITH_HEADS = ("medusa1", "medusa2", "hydra_heads")


# --- it works -------------------------------------------------------------------------------------


@pytest.mark.field("F52")
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_fits_and_packages(
    target: Target, folder: Path, tmp_path: Path, experiment: str
) -> None:
    run = tmp_path / "run"
    small = [
        "target=tiny",
        "data=set",
        f"data.path={folder}",
        "data.temperatures=null",
        "data.set_aside=4",
    ]
    small += ["trainer.max_steps=3", "trainer.max_epochs=null"]
    small += [
        "trainer.log_every=1",
        "eval.every=2",
        "eval.prompts=2",
        "eval.max_new_tokens=6",
        "eval.speed_prompts=0",
    ]
    vocabulary = [] if "paper" in experiment else ["draft_vocab=64"]
    # What names layers that only the experiment's own target has.
    small += {"ssm": ["drafter.layers=[0, 2]"], "early_exit": ["drafter.exit_layer=1"]}.get(
        experiment, []
    )
    fit.main([f"experiment={experiment}", f"run_dir={run}", *small, *vocabulary, *QUICK])
    names = {path.name for path in run.iterdir()}
    pictures = {"acceptance.png"} | ({"heads.png"} if experiment in WITH_HEADS else set())
    assert (
        names
        == {"config.yaml", "metrics.csv", "checkpoints", "package", "run.json", "report.html"}
        | pictures
    )
    rows = read_metrics(run / "metrics.csv")
    assert [row["step"] for row in rows] == [1, 2, 3] and all("train/loss" in row for row in rows)
    assert all("val/tau" in row and "sim/forced_tau" in row for row in rows[1:])
    metrics = json.loads((run / "package" / "metrics.json").read_text())
    assert len(metrics["rows"]) > 1 and all(row["tau"] >= 1 for row in metrics["rows"])
    assert {row["measured"] for row in metrics["rows"]} == {"acceptance", "speed"}
    held_out = read_set(folder).prompts()
    assert (
        metrics["settings"]["prompts_digest"] == digest_of(held_out[:2])
        and metrics["settings"]["device"] == "cpu"
    )
    seconds, tokens = training_of(read_config(run / "package"))
    assert seconds is not None and seconds >= 0 and tokens

    speculator = load_package(run / "package", target)
    prompts = [[5, 6, 7], [9, 8, 7, 6]]
    drafted, tally = speculator.generate(prompts, max_new_tokens=10)
    plain, _ = speculator.generate(prompts, max_new_tokens=10, plan=Plan(Tree.chain(0)))
    assert [output.ids for output in drafted] == [output.ids for output in plain] and tally.drafted
    best = weights(run, "best")
    assert same(
        {name: value.float() for name, value in speculator.drafter.named_parameters()},
        {
            name.removeprefix("drafter."): value.to(speculator.drafter.dtype).float()
            for name, value in best.items()
            if name.startswith("drafter.") and not name.endswith("draft_ids")
        },
    )


@pytest.mark.parametrize("own_head", ["false", "true"])
def test_heads_are_measured_calibrated_and_packaged(
    target: Target, folder: Path, tmp_path: Path, own_head: str
) -> None:
    run = tmp_path / "run"
    more = [
        "drafter=medusa",
        "drafter.heads=3",
        f"drafter.own_head={own_head}",
        "tree.k=3",
        "data.set_aside=4",
    ]
    more += ["final.calibrated=[6]", "final.calibrated_speed=[3]"]
    more += [
        f"final.speed.{name}=null" for name in ("chain_4", "chain_5", "tree_2x2x1", "tree_3x1x1")
    ]
    more += ["final.acceptance.chain_4=null", "final.acceptance.static_25=null"]
    fit.main(words(folder, run, *more))
    rows = read_metrics(run / "metrics.csv")
    assert all(
        f"train/head_{k}_top{n}" in row
        for row in rows
        for k in (1, 2, 3)
        for n in (1, 5, 10)
        if "train/loss" in row
    )
    last = rows[-1]
    for k in (1, 2, 3):
        assert (
            0
            <= last[f"sim/head_{k}_top1"]
            <= last[f"sim/head_{k}_top5"]
            <= last[f"sim/head_{k}_top10"]
            <= 1
        )
    metrics = json.loads((run / "package" / "metrics.json").read_text())
    found = {row["label"]: row for row in metrics["rows"]}
    assert found["calibrated_6"]["nodes"] == 6 and found["calibrated_3 alone"]["nodes"] == 3
    table = metrics["settings"]["head_accuracy"]
    assert len(table) == 3 and all(len(row) == 10 and sum(row) <= 1 for row in table)
    speculator = load_package(run / "package", target)
    drafted, tally = speculator.generate([[5, 6, 7], [9, 8, 7, 6]], max_new_tokens=10)
    plain, _ = speculator.generate(
        [[5, 6, 7], [9, 8, 7, 6]], max_new_tokens=10, plan=Plan(Tree.chain(0))
    )
    assert [output.ids for output in drafted] == [output.ids for output in plain] and tally.drafted


@pytest.mark.parametrize("experiment", UNTRAINED)
def test_what_learns_nothing_is_measured_and_packaged(
    target: Target,
    folder: Path,
    tmp_path: Path,
    experiment: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def never(*_given: Any, **_more: Any) -> None:
        raise AssertionError("something was trained")

    monkeypatch.setattr(learning, "train", never)
    monkeypatch.setattr(learning, "prepare", never)
    run = tmp_path / "run"
    small = ["target=tiny", "data=set", f"data.path={folder}", *QUICK]
    if experiment == "suffix":
        small += [f"drafter.corpus={folder}", "drafter.corpus_tokens=300", "drafter.remember=500"]
    if experiment == "selfspec":
        pytest.importorskip("optuna")
        small += [
            "drafter.skip_attention=[1]",
            "drafter.skip_mlp=[2]",
            "search.trials=3",
            "search.prompts=2",
        ]
        small += ["search.max_new_tokens=5", "search.first_tokens=16"]
    fit.main([f"experiment={experiment}", f"run_dir={run}", *small])
    searched = {"search.json"} if experiment == "selfspec" else set()
    written = {"config.yaml", "metrics.csv", "acceptance.png", "package", "run.json", "report.html"}
    assert {path.name for path in run.iterdir()} == written | searched
    seconds = json.loads((run / "run.json").read_text())["seconds"]
    assert list(seconds) == [
        "loading",
        *(["searching"] if searched else []),
        "measuring",
        "packaging",
    ]
    captured = capsys.readouterr()
    assert "2 of 4 prompts name no kind of task" in captured.err + captured.out
    out = " ".join(captured.out.split())
    assert "course" not in out and ("decoded before in the same measurement" in out) == (
        experiment == "suffix"
    )
    assert "tau by kind of task" in out and "all, over rounds" in out
    (row,) = read_metrics(run / "metrics.csv")
    assert not any(name.startswith(("train/", "val/", "sim/")) for name in row)
    metrics = json.loads((run / "package" / "metrics.json").read_text())
    assert {row["measured"] for row in metrics["rows"]} == {"acceptance", "speed"} and len(
        metrics["rows"]
    ) > 3
    assert all(row["tau"] >= 1 and row["guarantee"] == "greedy" for row in metrics["rows"])
    assert all(
        row["same_as_plain"] == row["prompts"]
        for row in metrics["rows"]
        if row["measured"] == "speed"
    )
    assert {row["remember"] for row in metrics["rows"]} == {500 if experiment == "suffix" else 0}
    by_kind = [row for row in metrics["rows"] if "by_category" in row]
    assert [row["measured"] for row in by_kind] == ["acceptance"] * len(by_kind) and by_kind
    for row in by_kind:
        found = [(one["category"], one["prompts"]) for one in row["by_category"]]
        assert found == [("maths", 1), (NO_CATEGORY, 1)]
        assert sum(one["rounds"] for one in row["by_category"]) == row["rounds"]
    assert "By kind of task" in (run / "package" / "README.md").read_text()
    assert "By kind of task" in (run / "report.html").read_text()
    config = json.loads((run / "package" / "config.json").read_text())
    cost = config["training"]["training"]
    assert (cost is None) == (not searched) and config["trained_length"] is None
    assert (training_of(config)[0] or 0) == (cost["search_seconds"] if searched else 0)

    speculator = load_package(run / "package", target)
    prompts = [[5, 6, 7, 5, 6], [9, 8, 7, 6]]
    drafted, tally = speculator.generate(prompts, max_new_tokens=10)
    plain, _ = speculator.generate(prompts, max_new_tokens=10, plan=Plan(Tree.chain(0)))
    assert [output.ids for output in drafted] == [output.ids for output in plain] and tally.drafted


def test_a_dynamic_tree_is_measured_while_training_and_packaged(
    target: Target, folder: Path, tmp_path: Path
) -> None:
    """`drafter=eagle1 tree=dynamic` is EAGLE-2. A tree that the final measurement does not name is
    measured all the same."""
    tree = Dynamic(depth=3, top_k=2, total=5)
    chosen = [
        "tree=dynamic",
        *(f"tree.{name}={getattr(tree, name)}" for name in ("depth", "top_k", "total")),
    ]
    others = [
        f"final.speed.{name}=null"
        for name in ("chain_5", "tree_2x2x1", "tree_3x1x1", *(f"chain_{k}" for k in range(1, 5)))
    ]
    others += ["final.acceptance.chain_4=null", "final.acceptance.static_25=null"]
    fit.main(
        words(
            folder,
            tmp_path / "run",
            *chosen,
            "trainer.max_steps=2",
            "eval.every=1",
            *others,
            *QUICK,
        )
    )
    rows = json.loads((tmp_path / "run" / "package" / "metrics.json").read_text())["rows"]
    assert [(row["label"], row["growth"], row["nodes"], row["depth"]) for row in rows] == [
        ("dynamic_3x2x5", "dynamic", 5, 3),
        ("dynamic_3x2x5 alone", "dynamic", 5, 3),
    ]
    assert all(
        "val/accept@3_count" in row or row["val/tau"] >= 1
        for row in read_metrics(tmp_path / "run" / "metrics.csv")
    )
    speculator = load_package(tmp_path / "run" / "package", target)
    assert speculator.plan == Plan(tree)
    drafted, tally = speculator.generate([[5, 6, 7], [9, 8, 7, 6]], max_new_tokens=10)
    plain, _ = speculator.generate(
        [[5, 6, 7], [9, 8, 7, 6]], max_new_tokens=10, plan=Plan(Tree.chain(0))
    )
    assert [output.ids for output in drafted] == [output.ids for output in plain] and tally.drafted


def test_the_page_of_a_run_is_only_made_from_its_folder(
    target: Target, folder: Path, tmp_path: Path
) -> None:
    """Samples are what the packaged plan decodes, a measured tree has the hits of its nodes, and
    `report` makes the same page."""
    run = tmp_path / "run"
    trees = [
        f"final.speed.{name}=null"
        for name in ("chain_2", "chain_3", "chain_4", "chain_5", "tree_3x1x1")
    ]
    few = [
        "trainer.max_steps=4",
        "eval.every=2",
        "eval.prompts=2",
        "eval.max_new_tokens=6",
        "final.prompts=2",
    ]
    few += [
        "final.max_new_tokens=12",
        "final.speed_prompts=2",
        "final.speed_new_tokens=12",
        "final.samples=2",
    ]
    fit.main(words(folder, run, *few, *trees))
    noted = json.loads((run / "run.json").read_text())
    assert (
        list(noted["seconds"]) == ["loading", "training", "measuring", "packaging"]
        and min(noted["seconds"].values()) >= 0
    )
    speculator = load_package(run / "package", target)
    assert (
        noted["samples"]["tree"] == speculator.plan.tree.title
        and noted["samples"]["written_in"] == "ids"
    )
    passes: list[dict[str, Any]] = []
    for prompt, answer in zip(
        read_set(folder).prompts(2), noted["samples"]["answers"], strict=True
    ):
        (output,), _ = speculator.generate([prompt], max_new_tokens=12, plan=Plan(Tree.chain(0)))
        assert answer["prompt"] == " ".join(map(str, prompt)) and answer["finish"] == output.finish
        text = "".join("".join(one["drafts"]) + one["own"] for one in answer["passes"])
        assert [int(word) for word in text.split()] == output.ids and answer["passes"][0][
            "drafts"
        ] == []
        passes += answer["passes"]
    rows = {
        row["label"]: row
        for row in json.loads((run / "package" / "metrics.json").read_text())["rows"]
    }
    best = max(
        (row for row in rows.values() if row["speedup"] is not None), key=lambda row: row["speedup"]
    )
    assert best["tree"] == noted["samples"]["tree"] and best["tokens"] == sum(
        one["tokens"] for one in passes
    )
    assert best["rounds"] == len(passes) - 2
    assert best["accepted_per_round"] * best["rounds"] == pytest.approx(
        sum(len(one["drafts"]) for one in passes)
    )
    assert len(rows["static_25"]["node_counts"]) == 25 and rows["tree_2x2x1 alone"][
        "plain_seconds"
    ].keys() == {*("prefill", "draft", "verify", "host")}
    text = (run / "report.html").read_text()
    root = parsed(text)
    assert [node.text for node in root.all("h2")] == ["run"] and not root.one("run-1").classed(
        "missing"
    )
    table, *_ = root.one("run-1-measured").all("table")
    assert [(cells[0].text, cells[4].values()) for cells in table.cells()] == [
        (label, [row["tau"]]) for label, row in rows.items()
    ]
    assert len(root.one("run-1-trees").all("svg")) == 2 and len(root.classed("answer")) == 2
    report.main([f"runs=[{run}]", f"run_dir={tmp_path / 'again'}"])
    assert (tmp_path / "again" / "report.html").read_text() == text


@pytest.mark.field("F49")
def test_without_held_out_rows_the_last_weights_are_packaged(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_set(target, tmp_path / "set", rows=8, held_out=0)
    fit.main(words(folder, tmp_path / "run", "trainer.max_steps=2"))
    assert "not available" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "run.json").read_text())["samples"] is None
    assert (
        "there was no held-out prompt to decode" in (tmp_path / "run" / "report.html").read_text()
    )
    assert json.loads((tmp_path / "run" / "package" / "metrics.json").read_text())["rows"] == []
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "last.ckpt"
    ]


# --- what is wrong is refused ---------------------------------------------------------------------


@pytest.mark.field("F14", "F61", "F62")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["draft_vocab=1"], "draft_vocab=1"),
        (["draft_vocab=100000"], "draft_vocab is 100000"),
        (["optim.lr=0"], "optim.lr=0"),
        (["optim.schedule=step"], "optim.schedule=step"),
        (["trainer.batch_tokens=16"], "longest row"),
        (["trainer.batch_tokens=null"], "trainer.batch_tokens or trainer.batch_rows"),
        (["trainer.max_steps=null"], "nothing ends the run"),
        (["trainer.precision=16-mixed"], "trainer.precision=16-mixed"),
        (["trainer.precison=32-true"], "Did you mean trainer.precision"),
        (["experiment=smok"], "Did you mean smoke"),
        (["tree=chain", "tree.k=0"], "the tree is empty"),
        (["tree=dynamic", "tree.depth=5", "tree.total=4"], "tree.total is 4, below tree.depth 5"),
        (
            ["tree=dynamic", "tree.top_k=65", "tree.total=70"],
            "65 children, this drafter proposes from 64 tokens",
        ),
        (["tree=chain", "tree.stop_below=1.5"], "tree.stop_below is 1.5"),
        (["tree=medusa", "tree.name=octopus"], "no Medusa tree 'octopus'"),
        (["tree=file"], "needs tree.path=..."),
        (["tree=file", "tree.path=/nowhere.json"], "/nowhere.json does not exist"),
        (["tree=sequoia", "tree.rates=[0.8,0.7]"], "add up to 1.5"),
        (["tree=dynamic", "tree.topk=3"], "Did you mean tree.top_k"),
        (
            ["+final.speed.wide={_target_:drafttrain.tree.topology.Tree.expansion,widths:[80]}"],
            "wide: a node has 80",
        ),
        (["data.max_length=3"], "no supervised token"),
        (["target.seed=1"], "another target"),
        (
            ["target=hf", "target.path=/nowhere/at/all"],
            "target.path=/nowhere/at/all does not exist",
        ),
        (["target.max_position_embeddings=16"], "no setting target.max_position_embeddings"),
        (["resume=last"], "does not exist, so there is nothing to resume"),
        (["resume=no.ckpt"], "resume=no.ckpt: there is no such file; give last, best"),
        (["drafter.divergence=l2"], "l2"),
        (["drafter=ngram"], "draft_vocab=64"),
        (["drafter=ngram", "draft_vocab=0", "resume=last"], "resume=last"),
        (["drafter=ngram", "draft_vocab=0", "joint=lora"], "joint: NGram"),
        (["drafter=ngram", "draft_vocab=0", "boost=collective"], "boost: NGram"),
        (["drafter=suffix", "draft_vocab=0", "init_from=/nowhere"], "init_from=/nowhere"),
        (["drafter=suffix", "draft_vocab=0", "export_assistant=true"], "export_assistant: Suffix"),
        (["drafter=ngram", "draft_vocab=0", "drafter.max_ngram=0"], "max_ngram=0"),
        (["drafter=ngram", "draft_vocab=0", "tree=dynamic"], "is a Dynamic, NGram can fill: Tree"),
        (
            ["drafter=ngram", "draft_vocab=0", "final.calibrated=[8]", "data.set_aside=2"],
            "NGram has no heads",
        ),
        (
            ["drafter=ngram", "draft_vocab=0", "drafter.min_gram=2"],
            "Did you mean drafter.min_ngram",
        ),
        (["drafter=suffix", "draft_vocab=0", "tree.k=30"], "30 deep, this drafter fills 24"),
        (
            ["drafter=suffix", "draft_vocab=0", "drafter.corpus=builtin:smollm2"],
            "belongs to another target",
        ),
        (["drafter=selfspec"], "skip_attention=[10, 12, 14, 16, 18, 20, 22, 24]"),
        (["drafter=selfspec", "init_from=/nowhere"], "init_from=/nowhere"),
        (["drafter=selfspec", "search=skips", "search.trials=0"], "search.trials=0"),
        (["search=skips"], "search=null"),
        (["drafter=early_exit"], "exit_layer=5"),
        (["drafter=early_exit", "drafter.exit_layr=1"], "Did you mean drafter.exit_layer"),
        (["features.keep_dtype=int4"], "features.keep_dtype=int4"),
        (["draft_vocab=2"], "final.acceptance.static_25"),
        (["tree=chain", "tree.k=2000"], "the tree: 2000 nodes are asked for"),
        (["tree=chain", "tree.k=1.5"], "chain length is 1.5"),
        (["final.acceptance=null"], "final.acceptance=None"),
        (["final.speed.chain_4=5"], "final.speed.chain_4=5"),
        (["optim.warmup=nan"], "optim.warmup=nan"),
        (["optim.betas=0.9"], "optim.betas=0.9"),
        (["final.calibrated=[8]"], "final.calibrated"),
        (
            ["final.calibrated=[8]", "data.set_aside=4"],
            "Eagle1 has no heads whose accuracy could make a tree",
        ),
        (["final.calibrated=[0]"], "needs a list of numbers of nodes"),
        (["drafter=medusa", "drafter.heads=0"], "heads=0"),
        (
            ["drafter=medusa", "drafter.head=3"],
            "there is no setting drafter.head. Did you mean drafter.heads",
        ),
        (["drafter=medusa", "drafter.heads=2", "tree.k=4"], "4 deep, this drafter fills 2"),
        (["data.limit_rows=x"], "limit_rows=x"),
        (["data.temperatures=[a]"], "temperatures=['a']"),
        (["data.labels=questions"], "labels=questions"),
        (["drafter.noise=nan"], "noise=nan"),
        (["eval.max_new_tokens=10000"], "none of the 4 held-out prompts"),
        (["tree=chain", "tree.k=1000000000"], "1000000000 nodes are asked for, at most 1024"),
        (["tree=expansion", "tree.widths=[9000,9000]"], "9000 nodes are asked for"),
        (["joint=5"], "joint=5: there is no joint 5. Choices: lora"),
        (["joint={}"], "joint={}"),
        (["drafter=null"], "drafter=null: fit needs one drafter, of eagle1"),
        (
            ["drafter._target_=drafttrain.nowhere"],
            "drafter._target_=drafttrain.nowhere cannot be imported",
        ),
        (["drafter._target_=builtins.dict"], "drafter._target_=builtins.dict is no drafter"),
        (["final=null"], "final holds several settings"),
        (["init_from=/nowhere"], "init_from=/nowhere"),
        (
            ["drafter=medusa", "drafter.heads=4", "final.calibrated=[2000]", "data.set_aside=4"],
            "2000 nodes are asked for",
        ),
        (["target.vocab_size=x"], "target.vocab_size=x"),
        (["target.width=30"], "needs a multiple of 8"),
        (["resume=5"], "resume=5"),
    ],
)
def test_wrong_settings(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    run = tmp_path / "run"
    assert said in refusal(capsys, words(folder, run, *more))
    assert not run.exists()


def test_a_place_that_cannot_take_the_package_is_found_before_training(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    (run / "package").mkdir(parents=True)
    (run / "package" / "thesis.tex").write_text("mine")
    (run / "config.yaml").touch()
    monkeypatch.setattr(shared, "load_target", lambda *_: pytest.fail("the target was loaded"))
    assert "holds other files (thesis.tex)" in refusal(capsys, words(folder, run, "resume=last"))
    assert (run / "package" / "thesis.tex").read_text() == "mine"


def test_what_rows_and_prompts_refuse_comes_before_long_work(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("optuna")
    monkeypatch.setattr(SkipSearch, "run", lambda *_, **__: pytest.fail("something was searched"))
    selfspec = [
        "drafter=selfspec",
        "drafter.skip_attention=[1]",
        "drafter.skip_mlp=[]",
        "search=skips",
    ]
    said = refusal(capsys, words(folder, tmp_path / "run", *selfspec, "final.max_new_tokens=600"))
    assert "none of the 4 held-out prompts leaves 600 of the target's context of 512 tokens" in said
    monkeypatch.setattr(shared, "load_target", lambda *_: pytest.fail("the target was loaded"))
    for more, what in (
        (["trainer.batch_tokens=16"], "trainer.batch_tokens=16 is less than the longest row"),
        (["trainer.pack=16"], "trainer.pack=16 is less than the longest row"),
        (["trainer.batch_rows=3", "trainer.accumulate=2"], "trainer.batch_rows=3 does not divide"),
    ):
        assert what in refusal(capsys, words(folder, tmp_path / "run", *more))
    assert not (tmp_path / "run").exists()


def test_a_folder_of_somebody_is_not_taken_for_a_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "home"
    (mine / "scratch" / "deep").mkdir(parents=True)
    (mine / "scratch" / "thesis.tex").write_text("mine")
    (mine / "metrics.csv").write_text("mine")
    before = {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()}
    assert "is no run's folder" in refusal(capsys, words(folder, mine, "resume=last"))
    loose = mine / "last.ckpt"
    torch.save({"format": 1}, loose)
    said = refusal(capsys, ["experiment=smoke", f"data.path={folder}", f"resume={loose}"])
    assert "is in no run's folder: give run_dir=<folder of the run> too" in said
    said = refusal(capsys, words(folder, mine, f"resume={loose}"))
    assert "is no run's folder, it has neither checkpoints nor config.yaml" in said
    loose.unlink()
    (mine / "config.yaml").touch()
    Run(mine).clear_scratch()
    assert {
        path: path.read_bytes()
        for path in mine.rglob("*")
        if path.is_file() and path.name != "config.yaml"
    } == before
    (mine / "scratch" / "1").mkdir()
    (mine / "scratch" / "1" / "features.bin").touch()
    (mine / "checkpoints").mkdir()
    for name in (
        ".last.ckpt-a_b1",
        ".update-00000012.ckpt-link",
        ".last.ckpt",
        "last.ckpt-mine",
        ".notes-1",
    ):
        (mine / "checkpoints" / name).touch()
    Run(mine).clear_scratch()
    assert not (mine / "scratch" / "1").exists() and (mine / "scratch" / "thesis.tex").exists()
    assert {path.name for path in (mine / "checkpoints").iterdir()} == {
        ".last.ckpt",
        "last.ckpt-mine",
        ".notes-1",
    }


def test_checkpoints_that_are_none_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    last.parent.mkdir(parents=True)
    torch.save({"format": FORMAT, "weights": {}}, last)
    assert "last.ckpt lacks optimiser" in refusal(
        capsys, words(folder, tmp_path / "run", "resume=last")
    )
    other = tmp_path / "other.ckpt"
    other.write_bytes(b"\x80\x02.")
    assert "cannot be read as a checkpoint" in refusal(
        capsys, words(folder, tmp_path / "run", f"resume={other}")
    )
    assert last.exists()


@pytest.mark.field("F05", "F07", "F63")
def test_data_that_cannot_be_learned_from(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is not a conversation set" in refusal(
        capsys, words(tmp_path / "none", tmp_path / "run")
    )
    manifest = {"target": {"name": target.name, "fingerprint": target.fingerprint}}
    masked = tmp_path / "masked"
    write_set(
        masked, [Row(i, (3, 4, 5), (), ("stop",)) for i in range(3)], manifest=manifest, held_out=0
    )
    assert "3 no supervised token" in refusal(capsys, words(masked, tmp_path / "run"))
    long = tmp_path / "long"
    write_set(
        long,
        [Row(0, tuple(range(3, 250)) * 3, ((5, 700),), ("stop",))],
        manifest=manifest,
        held_out=0,
    )
    said = refusal(capsys, words(long, tmp_path / "run", "trainer.batch_tokens=4096"))
    assert "the target's context holds 512: set data.max_length=512" in said
    damaged = write_tiny_set(target, tmp_path / "damaged", rows=6, held_out=1)
    path = damaged / "conversations.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    assert "the set is damaged" in refusal(capsys, words(damaged, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_crash_before_the_first_checkpoint_leaves_the_folder_free(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_given: Any, **_more: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(learning, "train", broken)
    with pytest.raises(ZeroDivisionError):
        fit.main(words(folder, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.field("F28")
def test_a_full_disk(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = type("Usage", (), {"free": 1000})
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        assert "MB free, checkpoints and package need" in refusal(
            capsys, words(folder, tmp_path / "run", *UNMEASURED)
        )
    assert not (tmp_path / "run").exists()

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device", str(args[1]))

    monkeypatch.setattr(torch, "save", full)
    assert "the disk is full" in refusal(capsys, words(folder, tmp_path / "run", *UNMEASURED))
    assert not (tmp_path / "run" / "package").exists()


def test_a_limit_of_file_sizes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, more = tmp_path / "run", [*UNMEASURED, "trainer.max_steps=2"]
    with file_limit(30_000):
        said = refusal(capsys, words(folder, run, *more))
    assert (
        "a file grew larger than this system allows while writing" in said
        and "last.ckpt (30 kB are allowed): raise the limit (ulimit -f)" in said
    )
    assert not list((run / "checkpoints").iterdir()) and not (run / "package").exists()
    fit.main([*words(folder, run, *more), "resume=last"])
    assert "starts from the beginning" in capsys.readouterr().out and (run / "package").exists()


@pytest.mark.field("F21")
def test_a_used_folder_and_a_run_that_is_not_the_same(
    target: Target,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    once = words(folder, run, *UNMEASURED, "trainer.max_steps=3")
    fit.main(once)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    assert "already holds" in refusal(capsys, once)
    for changed, said in (
        ("optim.lr=1e-4", "optim.lr was 0.002, is 0.0001"),
        ("drafter.noise=0.2", "drafter.noise was 0.1, is 0.2"),
        ("seed=1", "seed was 0, is 1"),
        ("trainer.max_steps=6", "rate.end was 3, is 6"),
        ("trainer.accumulate=2", "accumulate x processes was 1, is 2"),
    ):
        assert said in refusal(capsys, [*once, changed, "resume=last"])
    other = write_tiny_set(target, tmp_path / "other", seed=5)
    assert "data was" in refusal(capsys, [*once, f"data.path={other}", "resume=last"])
    assert {path: path.stat().st_mtime_ns for path in before} == before
    metrics = run / "metrics.csv"
    held = metrics.read_bytes()
    metrics.write_bytes(b"notes of mine")
    with monkeypatch.context() as patch:
        patch.setattr(shared, "load_target", lambda *_: pytest.fail("the target was loaded"))
        assert "metrics.csv is no metrics file of a run" in refusal(capsys, [*once, "resume=last"])
    assert metrics.read_bytes() == b"notes of mine"
    metrics.write_bytes(held)
    fit.main([*once, "trainer.log_every=3", "resume=last"])
    said = capsys.readouterr().out
    assert "trainer.log_every was 2, is 3" in said and "training is already done" in said


@pytest.mark.field("F83")
def test_a_head_that_did_not_move_is_warned_about_and_packaged(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["drafter=medusa", "drafter.own_head=true", "drafter.heads=2", "draft_vocab=0"]
    more = ["trainer.max_steps=1", "tree.k=2", *UNMEASURED]
    fit.main(words(folder, tmp_path / "run", *own, *more))
    said = " ".join(capsys.readouterr().out.split())
    assert "WARNING: the only update has rate 0, and nothing is learned: see optim.sch" in said
    assert (tmp_path / "run" / "package" / "drafter.safetensors").is_file()


# --- stopped and killed ---------------------------------------------------------------------------


@pytest.mark.field("F18", "F19")
def test_killed_and_stopped_runs_go_on_to_the_same_weights(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """SIGTERM, then SIGKILL to the resumed run, then the rest: bit for bit the weights of a run
    that nothing disturbed."""
    run, calm = tmp_path / "run", tmp_path / "calm"
    more = ["trainer.batch_tokens=256", "trainer.max_steps=80", "checkpoint.every=5", *UNMEASURED]
    last = run / "checkpoints" / "last.ckpt"
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(learning, "ConsoleProgress", Signal)
        fit.main(words(folder, run, *more))
    stopped_at = read_checkpoint(last)["progress"]["updates"]
    assert stopped.value.code == 143 and 7 <= stopped_at <= 8
    assert "continue with resume=last" in capsys.readouterr().out and not (run / "package").exists()
    assert signal.getsignal(signal.SIGTERM) is before

    os.utime(last, (0, 0))
    process = Forked(fit.main, [*words(folder, run, *more), "resume=last"], said=tmp_path / "said")
    while last.stat().st_mtime == 0 and process.runs:
        time.sleep(0.005)
    process.kill()
    killed_at = read_checkpoint(last)["progress"]["updates"]
    assert stopped_at < killed_at < 80, process.said
    assert not (run / "package").exists()

    fit.main([*words(folder, run, *more), "resume=last"])
    assert f"goes on after update {killed_at}," in capsys.readouterr().out
    fit.main(words(folder, calm, *more))
    assert same(weights(run), weights(calm))
    ours, theirs = read_metrics(run / "metrics.csv"), read_metrics(calm / "metrics.csv")
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == list(range(2, 81, 2))
    assert [row["train/lr"] for row in ours] == [row["train/lr"] for row in theirs]
    # A window that a stop cut in two is logged as its second part.
    assert sum(a["train/loss"] != b["train/loss"] for a, b in zip(ours, theirs, strict=True)) <= 2
    assert (run / "package" / "drafter.safetensors").read_bytes() == (
        calm / "package" / "drafter.safetensors"
    ).read_bytes()


@pytest.mark.field("F23", "F33", "F45")
@pytest.mark.processes
def test_two_processes_give_the_weights_of_one(folder: Path, tmp_path: Path) -> None:
    """An epoch is one update here: three batches on one, and four over two processes, one of which
    has no label."""
    one, two = tmp_path / "one", tmp_path / "two"
    more = [
        "features.keep_dtype=float32",
        "drafter.noise=0",
        "trainer.batch_tokens=1024",
        "trainer.max_steps=4",
        "eval.every=2",
    ]
    more += ["trainer.accelerator=cpu", *QUICK]
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
    ]
    command += [
        "--main_process_port",
        "0",
        "-m",
        "drafttrain.fit",
        *words(folder, two, *more, "trainer.accumulate=2"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]
    fit.main(words(folder, one, *more, "trainer.accumulate=4"))
    a, b = weights(one), weights(two)
    for name in a:
        torch.testing.assert_close(
            b[name], a[name], rtol=1e-5, atol=1e-5 * float(a[name].float().abs().max())
        )
    states = [read_checkpoint(run / "checkpoints" / "last.ckpt") for run in (one, two)]
    assert states[0]["progress"]["supervised"] == states[1]["progress"]["supervised"]
    # Sums over processes round otherwise, so the digest of the best weights is another.
    mine, theirs = ({**state["keeper"], "best_digest": None} for state in states)
    assert mine == theirs
    rows = [read_metrics(run / "metrics.csv") for run in (one, two)]
    assert any(row["train/batches_without_labels"] for row in rows[1])
    for ours, theirs in zip(*rows, strict=True):
        assert theirs["train/loss"] == pytest.approx(ours["train/loss"], rel=1e-4)
        assert theirs.get("val/rounds") == ours.get("val/rounds")
