"""Optuna chooses the runs of a sweep, and ends those that are not worth their time."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drafttrain import fit
from drafttrain.fitting.book import COMPLETE, FAILED, PRUNED, Row
from drafttrain.fitting.sweeps import Optuna
from drafttrain.training.judged import Judged
from drafttrain.wiring.sweeps import Sweep
from tests.fitting.parts import refusal
from tests.fitting.swept import DRAWN, RATES, rows, sweep, swept

# --- Optuna ---------------------------------------------------------------------------------------

OPTUNA = Optuna(
    packages="best",
    trials=5,
    startup=2,
    seed=0,
    prune=True,
    prune_after_runs=2,
    prune_after_updates=0,
)


def made_rows(asked: Sweep, taus: Sequence[float], strategy: Optuna = OPTUNA) -> list[Row]:
    """Rows of runs that each came to one of these."""
    found: list[Row] = []
    for tau in taus:
        chosen = strategy.chosen(asked, found)
        assert chosen is not None
        row = Row(name=str(len(found)), words=list(chosen), status=COMPLETE, tau=tau)
        row.taus = {4: tau - 0.1, 8: tau}
        found.append(row)
    return found


def test_optuna_draws_from_ranges_and_lists() -> None:
    asked = sweep(
        *("sweep=optuna", DRAWN, "optim.warmup=int(interval(0,9))"),
        *("optim.clip_norm=interval(0.5,2)", "seed=range(2,8,2)", "drafter.regression=1,10"),
    )
    assert [axis.interval is not None for axis in asked.axes] == [True, True, True, False, False]
    rows = made_rows(asked, [1.5, 1.2, 1.4, 1.3, 1.6])
    assert OPTUNA.chosen(asked, rows) is None and len({tuple(row.words) for row in rows}) == 5
    for row in rows:
        rate, warmup, norm, seed, weight = (word.partition("=")[2] for word in row.words)
        assert 1e-4 <= float(rate) <= 1e-1 and float(f"{float(rate):.4g}") == float(rate)
        assert 0 <= int(warmup) <= 9 and 0.5 <= float(norm) <= 2
        assert seed in "246" and weight in ("1", "10")
        asked.run(row.words)


def test_optunas_choice_depends_on_the_recorded_runs_only() -> None:
    asked = sweep("sweep=optuna", DRAWN, "drafter.regression=1,10")
    rows = made_rows(asked, [1.5, 1.2, 1.4, 1.3])
    assert made_rows(asked, [1.5, 1.2, 1.4, 1.3]) == rows
    other = OPTUNA.chosen(asked, made_rows(asked, [1.2, 1.5, 1.1, 1.9]))
    assert OPTUNA.chosen(asked, rows) == OPTUNA.chosen(asked, rows) != other


@pytest.mark.parametrize(
    ("tau", "runs", "after", "prune", "pruned"),
    [
        (1.2, 3, 0, True, True),
        (1.6, 3, 0, True, False),
        (1.2, 1, 0, True, False),  # fewer than sweep.prune_after_runs
        (1.2, 3, 5, True, False),  # before sweep.prune_after_updates
        (1.2, 3, 0, False, False),
    ],
)
def test_a_run_below_the_median_is_pruned(
    tau: float, runs: int, after: int, prune: bool, pruned: bool
) -> None:
    asked = sweep("sweep=optuna", DRAWN)
    strategy = replace(OPTUNA, prune=prune, prune_after_updates=after)
    rows = made_rows(asked, [1.5, 1.7, 1.6][:runs], strategy)
    row = Row(name="x", words=["optim.lr=0.01"], taus={4: tau - 0.1})
    assert strategy.prunes(asked, rows, row) is pruned


@pytest.mark.parametrize("status", [PRUNED, FAILED])
def test_runs_without_a_result_are_known_to_optuna(status: str) -> None:
    asked = sweep("sweep=optuna", DRAWN)
    rows = made_rows(asked, [1.5, 1.7, 1.6])
    rows[1].status, rows[1].tau = status, None
    rows[1].taus = {} if status == FAILED else {4: 1.1}
    assert OPTUNA.chosen(asked, rows) is not None


def test_a_pruned_run_ends_and_is_not_made_again(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its val/tau falls from run to run, as it is heard here."""
    run, heard, real = tmp_path / "run", list[Any](), Judged.hear

    def falling(self: Judged, metrics: Any, updates: int) -> None:
        heard.append(updates)
        real(self, {**metrics, "val/tau": 3.0 - 0.01 * len(heard)}, updates)

    monkeypatch.setattr(Judged, "hear", falling)
    ask = swept(*(folder, run, "sweep=optuna", "sweep.trials=3", DRAWN, "sweep.prune_after_runs=2"))
    fit.main(ask)
    made = rows(run)
    assert [row["status"] for row in made] == [COMPLETE, COMPLETE, PRUNED]
    assert [row["updates"] for row in made] == [8, 8, 4] and heard == [4, 8, 4, 8, 4]
    assert "by the clock" not in (said := capsys.readouterr().out) and "pruned" in said
    assert not (run / made[2]["name"] / "package").exists()
    assert "pruned" in (run / "report.html").read_text()
    fit.main([*ask, "resume=last"])
    assert heard == [4, 8, 4, 8, 4] and rows(run) == made


def test_what_optuna_chooses_again_is_not_run_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    fit.main(swept(folder, run, "sweep=optuna", "sweep.trials=4", RATES))
    made = rows(run)
    again = [row for row in made if row["same_as"]]
    assert len(made) == 4 and len(again) >= 2
    assert capsys.readouterr().out.count("fit: run ") == 4 - len(again)
    assert not any((run / row["name"]).exists() for row in again)


def test_optuna_is_needed_where_it_is_asked_for(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "optuna" else real(name)
    )
    said = refusal(capsys, swept(folder, tmp_path / "run", "sweep=optuna", DRAWN))
    assert "pip install 'drafttrain[search]'; or give sweep=basic" in said


OPTUNA_WRONG = {
    "optim.lr=interval(2,1)": "two finite numbers, the smaller one first",
    "optim.lr=interval(nan,1)": "two finite numbers",
    "optim.lr=tag(log,interval(0,1))": "needs numbers above 0",
    "optim.lr=interval(-1,1)": "optim.lr=-1.0: needs a finite number above 0",
    "optim.lr=interval(1e-3,1e-2) sweep.trials=0": "sweep.trials=0: needs an integer",
    "optim.lr=interval(1e-3,1e-2) sweep.prune=1": "sweep.prune=1: needs true or false",
}


@pytest.mark.parametrize("asked", OPTUNA_WRONG)
def test_wrong_ranges_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: str
) -> None:
    said = refusal(capsys, swept(folder, tmp_path / "run", "sweep=optuna", *asked.split(" ")))
    assert OPTUNA_WRONG[asked] in said and list(tmp_path.iterdir()) == []
