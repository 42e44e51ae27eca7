"""Medusa-2 through the doors: fit, package, evaluate, generate; two stages; stopped runs; several
processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafttrain import evaluate, fit, generate, tune
from drafttrain.decoding.plan import Plan
from drafttrain.fitting import learning
from drafttrain.packaging.manifest import ADAPTER, TENSORS, read_config, read_metrics
from drafttrain.packaging.reading import load as load_package
from drafttrain.reporting.loggers import read_metrics as read_log
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.training.checkpoint import read_checkpoint
from drafttrain.tree.topology import Tree
from tests.fitting.parts import QUICK, Signal, refusal, weights, words
from tests.forked import pair
from tests.helpers import save_target, tiny_chat_target
from tests.training.parts import same, write_tiny_set

HEADS = [
    "drafter=medusa",
    "drafter.heads=3",
    "tree.k=3",
    "final.acceptance.chain_4=null",
    "final.acceptance.static_25=null",
]
HEADS += [
    f"final.speed.{name}=null"
    for name in ("tree_2x2x1", "tree_3x1x1", *(f"chain_{k}" for k in range(1, 6)))
]
JOINT = [*HEADS, *QUICK, "joint=lora", "joint.rank=4"]
TUNED = "greedy, relative to the tuned target"
PROMPTS = [[5, 6, 7], [9, 8, 7, 6]]


def text(speculator: Any, plan: Plan | None = None) -> list[list[int]]:
    outputs, _ = speculator.generate(PROMPTS, max_new_tokens=12, plan=plan, seed=0)
    return [output.ids for output in outputs]


def test_fit_packages_what_it_measured(
    target: Target, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    more = ["joint.ramp=constant", "joint.lambda_0=0.2", "final.change_rows=3"]
    fit.main(words(folder, run, *JOINT, *more))
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "trained jointly by an adapter of rank 4 on 21 linears" in said
        and "computed for every batch" in said
    )
    assert "what joint training did to the target, on 3 held-out rows" in said
    log = read_log(run / "metrics.csv")
    assert all(row["train/lambda_0"] == pytest.approx(0.2) for row in log if "train/loss" in row)
    assert any("train/kl" in row and "train/heads" in row for row in log) and any(
        "val/tau" in row for row in log
    )
    best = weights(run, "best")
    assert {name.partition(".")[0] for name in best} == {"drafter", "adapter"}
    package = run / "package"
    stored = load_file(package / ADAPTER)
    kept = {
        name.removeprefix("adapter.weights.").replace("/", "."): w
        for name, w in best.items()
        if name.startswith("adapter.")
    }
    assert same(stored, kept)
    assert any(float(w.abs().max()) > 0 for name, w in stored.items() if name.endswith(".B"))
    assert same(
        load_file(package / TENSORS),
        {n.removeprefix("drafter."): w for n, w in best.items() if n.startswith("drafter.")},
    )
    metrics = read_metrics(package)
    assert {row["guarantee"] for row in metrics["rows"]} == {TUNED}
    moved = metrics["target_change"]
    assert moved["rows"] == 3 and moved["kl"] > 0 and 0 <= moved["agreement"] <= 1
    assert "changes the target" in (package / "README.md").read_text()
    # What was measured is what is read again: the same rounds.
    speculator = load_package(package, target)
    assert text(speculator) == text(speculator, Plan(Tree.chain(0)))
    row = next(row for row in metrics["rows"] if row["measured"] == "acceptance")
    prompts = prompts_of(folder)
    found = []
    for dtype in ("float32", "bfloat16"):  # whichever was faster
        speculator = load_package(package, target, dtype=dtype)
        again = speculator.measure_acceptance(
            prompts[:2], Plan(Tree.chain(3)), max_new_tokens=6, batch=16
        )
        found.append((again.tally.tau, again.tally.rounds))
    assert (row["tau"], row["rounds"]) in found


def prompts_of(folder: Path) -> list[list[int]]:
    from drafttrain.data.datamodule import ConversationData

    return ConversationData(folder).set.prompts()


def test_rank_0_and_no_weight_reproduce_the_frozen_target(
    target: Target, folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    fit.main(
        words(
            folder,
            run,
            *HEADS,
            *QUICK,
            "joint=lora",
            "joint.rank=0",
            "joint.lambda_0=0",
            "trainer.max_steps=3",
        )
    )
    package = run / "package"
    assert "adapter" not in read_config(package) and not (package / ADAPTER).exists()
    assert {row["guarantee"] for row in read_metrics(package)["rows"]} == {"greedy"}
    speculator = load_package(package, target)
    assert speculator.target is target
    plain = load_package(package, load.tiny())
    assert text(speculator) == text(plain, Plan(Tree.chain(0)))
    start = {
        name: value for name, value in load_file(package / TENSORS).items() if name != "draft_ids"
    }
    assert not any(value.any() for value in start.values()), (
        "heads start as the identity, and nothing moved them"
    )


def test_two_stages(
    target: Target, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    fit.main(words(folder, one, *HEADS, *QUICK, "trainer.max_steps=4"))
    started = [*JOINT, f"init_from={one / 'package'}"]
    fit.main(
        words(folder, two, *started, "trainer.max_steps=1", "optim.lr=1e-30", "optim.warmup=0")
    )
    assert "starts with the weights of" in capsys.readouterr().out
    assert same(load_file(one / "package" / TENSORS), load_file(two / "package" / TENSORS))
    for more, fault in (
        (["draft_vocab=32"], "proposes from 64 tokens, draft_vocab=32: set draft_vocab=64"),
        (["drafter.heads=4"], "has other weights than this drafter"),
        (["drafter=hydra_heads"], "holds a Medusa, the drafter is a HydraHeads"),
        ([f"init_from={tmp_path / 'none'}"], "does not exist"),
        ([f"init_from={two / 'package'}"], "was trained jointly with its target"),
    ):
        kept = [word for word in started if word.partition("=")[0] != more[0].partition("=")[0]]
        assert fault in refusal(capsys, words(folder, tmp_path / "run", *kept, *more))
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["drafter=eagle1"], "Eagle1 has none: give drafter=medusa"),
        (["joint.rank=x"], "joint.rank=x"),
        (["joint.linears=[nope]"], "linears: nope is none of target"),
        (["joint.lamda_0=1"], "Did you mean joint.lambda_0"),
        (
            ["target=hf", "target.path=/nowhere", "target.pack=true"],
            "packed weights cannot be trained jointly",
        ),
        (
            [
                "trainer.max_steps=null",
                "trainer.max_minutes=1",
                "optim.schedule=constant",
                "optim.warmup=2",
            ],
            "ramp=sine counts",
        ),
    ],
)
def test_wrong_settings(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    kept = [
        word for word in JOINT if not (more == ["drafter=eagle1"] and word.startswith("drafter"))
    ]
    assert said in refusal(capsys, words(folder, tmp_path / "run", *kept, *more))
    assert not (tmp_path / "run").exists()


def test_a_stopped_run_goes_on_to_the_same_package(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, calm = tmp_path / "run", tmp_path / "calm"
    more = [*JOINT, "joint.dropout=0.2", "checkpoint.every=5", "eval.every=6"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(learning, "ConsoleProgress", Signal)
        fit.main(words(folder, run, *more))
    assert stopped.value.code == 143 and signal.getsignal(signal.SIGTERM) is not None
    assert "joint.rank was 4, is 5" in refusal(
        capsys, [*words(folder, run, *more, "joint.rank=5"), "resume=last"]
    )
    fit.main([*words(folder, run, *more), "resume=last"])
    fit.main(words(folder, calm, *more))
    assert same(weights(run), weights(calm)) and same(weights(run, "best"), weights(calm, "best"))
    for name in (ADAPTER, TENSORS):
        assert (run / "package" / name).read_bytes() == (calm / "package" / name).read_bytes()


@pytest.mark.processes
def test_two_processes_give_the_weights_of_one(folder: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    more = [
        *JOINT,
        "joint.dropout=0",
        "joint.lambda_0=0.2",
        "joint.ramp=constant",
        "trainer.batch_tokens=1024",
    ]
    more += ["trainer.max_steps=3", "eval.every=null", "trainer.accelerator=cpu"]
    pair(fit.main, words(folder, two, *more, "trainer.accumulate=2"), said=tmp_path / "said")
    fit.main(words(folder, one, *more, "trainer.accumulate=4"))
    a, b = weights(one), weights(two)
    assert a.keys() == b.keys() and any(name.startswith("adapter.") for name in a)
    for name in a:
        torch.testing.assert_close(
            b[name], a[name], rtol=1e-3, atol=1e-4 * float(a[name].float().abs().max()) + 1e-6
        )
    states = [read_checkpoint(run / "checkpoints" / "last.ckpt") for run in (one, two)]
    assert states[0]["progress"]["supervised"] == states[1]["progress"]["supervised"]


def test_evaluate_tune_and_generate_speak_of_the_tuned_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = tiny_chat_target(stop_bias=1.0)
    save_target(chat, tmp_path / "target")
    own = [
        "target=hf",
        f"target.path={tmp_path / 'target'}",
        "target.dtype=float32",
        "target.device=cpu",
    ]
    here = load.hf(
        str(tmp_path / "target"), dtype="float32", device="cpu", attention="sdpa", pack=False
    )
    folder = write_tiny_set(here, tmp_path / "set")
    run = tmp_path / "run"
    fit.main(words(folder, run, *JOINT, "joint.lambda_0=1", *own, "trainer.max_steps=6"))
    package = f"package={run / 'package'}"
    capsys.readouterr()

    common = [*own, package, "dtype=float32", "max_new_tokens=8"]
    sizes = [
        "chains=[2]",
        "trees=[package]",
        "temperatures=[0.0]",
        "limit=3",
        "speed_prompts=1",
        "change_rows=4",
    ]
    out = tmp_path / "evaluation"
    evaluate.main(
        [
            *common,
            *sizes,
            "exactness=true",
            "exactness_draws=160",
            f"prompts={folder}",
            f"run_dir={out}",
        ]
    )
    result = json.loads((out / evaluate.RESULT).read_text())
    assert {row["guarantee"] for row in result["rows"]} == {TUNED}
    assert result["target_change"]["rows"] == 4 and result["target_change"]["kl"] > 0
    assert result["settings"]["target"].endswith("(tuned)") and result["parity"]["agree"]
    assert all(row["verdict"] == "identical" for row in result["exactness"]["greedy"])
    said = " ".join(" ".join(capsys.readouterr()).split())
    assert "what joint training did to the target, on 4 held-out rows" in said

    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "hello"}) + "\n")
    evaluate.main(
        [*common, *sizes, f"prompts={tmp_path / 'prompts.jsonl'}", f"run_dir={tmp_path / 'file'}"]
    )
    assert json.loads((tmp_path / "file" / evaluate.RESULT).read_text())["target_change"] is None
    assert "a file of prompts holds no answers" in " ".join(capsys.readouterr().err.split())

    generate.main([*common, "prompt=hello", "compare=true", "mark=none"])
    said = " ".join(capsys.readouterr().out.split())
    assert f"guarantee: {TUNED}" in said and "the same text" in said

    few = ["calibration_prompts=1", "race=1", "race_prompts=1", "sizes=[2]"]
    tune.main([*common, *few, f"prompts={folder}", f"run_dir={tmp_path / 'tuning'}"])
    raced = json.loads((tmp_path / "tuning" / tune.RESULT).read_text())["raced"]
    assert raced and all(row["guarantee"] == TUNED for row in raced)
