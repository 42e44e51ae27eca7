"""Words that name several values become runs, as Hydra reads them; what any run would refuse is
refused before the first."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from drafttrain import fit, report
from drafttrain.errors import InputError
from drafttrain.fitting import sweeps
from drafttrain.target import load
from drafttrain.wiring.composing import compose
from tests.fitting.parts import refusal, words
from tests.fitting.swept import RATES, WEIGHTS, chosen, sweep, swept
from tests.training.parts import write_tiny_set

ROOT = Path(__file__).resolve().parents[2]


# --- words ----------------------------------------------------------------------------------------


def test_words_are_read_as_hydras_basic_sweeper_reads_them() -> None:
    assert chosen(RATES, WEIGHTS) == [
        ("optim.lr=0.001", "drafter.regression=1"),
        ("optim.lr=0.001", "drafter.regression=10"),
        ("optim.lr=0.02", "drafter.regression=1"),
        ("optim.lr=0.02", "drafter.regression=10"),
    ]
    assert chosen("seed=range(1,4)") == [("seed=1",), ("seed=2",), ("seed=3",)]
    assert chosen("seed=range(3,0,-2)") == [("seed=3",), ("seed=1",)]
    assert chosen("seed=choice(5)") == [("seed=5",)]
    assert chosen("seed=sort(3,1,2,reverse=true)") == [("seed=3",), ("seed=2",), ("seed=1",)]
    assert chosen("optim.betas=[0.9,0.95],[0.8,0.9]") == [
        ("optim.betas=[0.9,0.95]",),
        ("optim.betas=[0.8,0.9]",),
    ]
    assert chosen("draft_vocab=0,64", "eval.patience=null,2")[0] == (
        "draft_vocab=0",
        "eval.patience=null",
    )
    assert chosen("optim=glob(*)") == [("optim=adamw",), ("optim=muon",)]
    assert chosen("drafter=glob([m*,e*],exclude=ensemble)") == [
        ("drafter=eagle1",),
        ("drafter=eagle3",),
        ("drafter=early_exit",),
        ("drafter=medusa",),
        ("drafter=mtp",),
    ]
    assert chosen("init_from=a,'b,c'") == [("init_from=a",), ("init_from='b,c'",)]


def test_shuffled_words_have_the_same_order_each_time() -> None:
    first = chosen("seed=shuffle(range(0,40))")
    assert first == chosen("seed=shuffle(range(0,40))") and first != sorted(first)
    assert len(set(first)) == 40


def test_a_run_is_composed_as_its_words_would_be() -> None:
    asked = sweep(RATES, "seed=3", "run_dir=r", "sweep.most=9", "sweep=basic")
    run = asked.run(("optim.lr=0.02",), "run_dir=there")
    plain = fit_config("optim.lr=0.02", "seed=3", "run_dir=there")
    assert run.config == plain and run.config.sweep is None and run.config.optim.lr == 0.02
    assert (
        run.command.endswith("optim.lr=0.02 seed=3 run_dir=there") and "fit -m" not in run.command
    )
    assert asked.invocation.command.startswith("python -m drafttrain.fit -m experiment=smoke")
    assert OmegaConf.to_container(asked.invocation.config.sweep)["most"] == 9


def fit_config(*words: str) -> Any:
    return compose("fit", ["experiment=smoke", "data.path=x", *words])


WRONG = {
    "optim.lrr=1,2": "there is no setting optim.lrr. Did you mean optim.lr",
    "drafter=ngramm,eagle1": "there is no drafter ngramm. Did you mean ngram",
    "optim.lr=1e-3,-1": "^drafttrain.fit: optim.lr=-1: needs a finite number above 0",
    "optim.lr=1e-3,2e-3 eval.every=1,0": "^drafttrain.fit: optim.lr=0.001 eval.every=0: eval.every",
    "optim.lr=range(1,1)": "names no value: a range goes from",
    "optim.lr=range(0,1,0)": "at most 1000 values, with a step that is not 0",
    "optim.lr=range(0,1,1e-9)": "at most 1000 values",
    "optim.lr=range(0,inf)": "at most 1000 values",
    "optim.lr=choice()": "names no value: give at least one",
    "drafter=glob(x*)": "names no value: no choice is called x*",
    "optim.lr=1,": "cannot read 'optim.lr=1,'",
    "optim.lr=1": "no word names several",
    "optim.lr=1e-3,0.001": "names optim.lr=0.001 twice",
    "optim.lr=1,2 optim.lr=3": "optim.lr is given twice, once with several values",
    "optim.lr=tag(x,choice(1,2))": "the only tag is log",
    "optim.lr=tag(log,choice(1,2))": "the only tag is log",
    "optim.lr=interval(1e-4,1e-2)": "a range to draw from, which sweep=basic does not",
    "seed=range(0,65)": "the words make 65 runs, sweep.most is 64",
    "seed=1,2 sweep.most=0": "sweep.most=0: needs an integer from 1",
    "seed=1,2 sweep.packages=none": "sweep.packages=none: give one of best, all",
    "sweep=basic,optuna seed=1,2": "a sweep has one sweep",
    "run_dir=a,b": "a sweep has one run_dir: give one value; a comma that belongs",
    "resume=last,best": "a sweep has one resume",
    "dry_run=true,false": "a sweep has one dry_run",
    "seed=1,2 resume=best": "a sweep knows where each of its runs was, give resume=last",
    "seed=1,2 dry_run=true": "dry_run=true tries one run: leave -m out",
    "target=tiny,smollm2": "target._target_ is .* in one run and .* in another",
    "target.width=32,64": "target.width is 32 in one run and 64 in another",
    "eval.prompts=2,4": "eval.prompts is 2 in one run and 4 in another",
    "final.max_new_tokens=4,5": "final.max_new_tokens is 4 in one run and 5",
    "seed=1,2 eval.prompts=0": "eval.prompts=0: runs are compared by val/tau",
    "seed=1,2 boost=collective": "none of their val/tau is the run's",
    "hydra.verbose=true,false": "Hydra's own settings are not used here",
    "seed=1,2 drafter=ngram draft_vocab=0": "NGram learns nothing, so there is no val/tau",
}


@pytest.mark.parametrize("given", WRONG)
def test_what_is_wrong_is_one_line_before_anything_is_made(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    run = tmp_path / "run"
    own = [] if "run_dir" in given else [f"run_dir={run}"]
    said = refusal(
        capsys, ["-m", "experiment=smoke", f"data.path={folder}", *own, *given.split(" ")]
    )
    assert re.search(WRONG[given], said), said
    assert list(tmp_path.iterdir()) == []


def test_data_and_target_that_cannot_be_read_end_the_sweep_at_once(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    said = refusal(capsys, ["-m", *words(tmp_path / "none", run, "seed=1,2")])
    assert "is not a conversation set" in said and not run.exists()
    said = refusal(capsys, swept(folder, run, "trainer.batch_tokens=1024,2"))
    assert "batch_tokens=2 is less than the longest row" in said and not run.exists()


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ("data.limit_rows=4,0", "data.limit_rows=0: limit_rows=0"),
        ("data.temperatures=null,[0.3]", r"data.temperatures=\[0.3\]: .*none of its 20 rows"),
        ("draft_vocab=64,9999", "draft_vocab=9999: .* vocabulary"),
        ("init_from=null,nowhere", "init_from=nowhere"),
        ("seed=1,2 eval.answers={other}", "seed=1: .*another target"),
        ("seed=1,2 eval.answers={folder}", r"seed=1: .*lacks the target's answers .* to \d of"),
    ],
)
def test_what_one_run_of_several_cannot_have_is_refused_before_the_first(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, fault: str
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    if "{other}" in given:
        write_tiny_set(load.tiny(seed=3), other)
    said = refusal(capsys, swept(folder, run, *given.format(other=other, folder=folder).split()))
    assert re.search(f"^drafttrain.fit: {fault}", said), said
    assert not run.exists()


def test_a_sweep_without_m_and_m_at_other_doors(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, words(folder, tmp_path / "run", "sweep=basic"))
    assert "give -m too" in said
    said = refusal(capsys, words(folder, tmp_path / "run", RATES))
    assert "names several values" in said and "for a sweep, give fit -m too" in said
    said = refusal(capsys, [*swept(folder, tmp_path / "run", RATES), "--cfg", "job"])
    assert "a sweep has several configurations" in said
    with pytest.raises(SystemExit):
        report.main(["--multirun", "runs=x"])
    said = capsys.readouterr().err
    assert "--multirun: one command of report makes one run, only fit sweeps" in said


def test_several_processes_make_no_sweep(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="start it without accelerate launch"):
        sweeps.check_sweep(sweep(RATES))


def test_help_says_what_a_sweep_is(capsys: pytest.CaptureFixture[str]) -> None:
    fit.main(["-m", "sweep=optuna", "--help"])
    said = capsys.readouterr().out
    assert "python -m drafttrain.fit -m [key=value,value,... ...]" in said
    assert "sweep: basic, *optuna" in said and "prune_after_runs: 4" in said
    report.main(["--help"])
    assert " -m [" not in capsys.readouterr().out


def test_wrong_words_are_refused_before_torch_is_imported() -> None:
    code = (
        "import sys, runpy\n"
        "sys.argv = ['fit', '-m', 'experiment=smoke', 'data.path=x', 'optim.lr=1,-1']\n"
        "try: runpy.run_module('drafttrain.fit', run_name='__main__')\n"
        "except SystemExit as left: print(left.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "2 False\n", done.stdout + done.stderr
