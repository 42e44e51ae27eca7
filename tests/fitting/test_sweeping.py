"""A sweep makes each run as it would be by itself, compares them by val/tau, and goes on after a
kill."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drafttrain import fit, report
from drafttrain.errors import InputError
from drafttrain.fitting import given, learning, sweeping
from drafttrain.fitting.book import BOOK, COMPLETE, FAILED, RUNNING, Book, Row, read_book
from drafttrain.packaging.reading import load as load_package
from drafttrain.reporting.progress import ConsoleProgress
from drafttrain.target import features
from drafttrain.target.model import Target
from tests.fitting.parts import QUICK, Signal, refusal, weights, words
from tests.fitting.swept import BARE, DRAWN, RATES, SMALL, WEIGHTS, chosen, count, rows, swept
from tests.reporting.parsed import check_form
from tests.training.parts import same

# --- runs -----------------------------------------------------------------------------------------


def test_a_sweep_ends_with_a_table_a_page_and_the_best_package(
    target: Target,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The target is loaded once, and reads the rows once."""
    loads, reads = (
        count(monkeypatch, where, name)
        for where, name in ((given, "load_target"), (features, "computed"))
    )
    run = tmp_path / "run"
    auto = ["target.device=auto", "target.dtype=auto", "trainer.accelerator=cpu"]
    fit.main(swept(folder, run, *QUICK, RATES, WEIGHTS, *auto))
    said, made, once = capsys.readouterr().out, rows(run), len(reads)
    assert [row["status"] for row in made] == [COMPLETE] * 4
    assert [row["words"] for row in made] == [list(words) for words in chosen(RATES, WEIGHTS)]
    best = max(made, key=lambda row: row["tau"])
    assert "runs of the sweep, the best first" in said
    assert f"the best package is in {run / best['name'] / 'package'}" in said
    assert (run / "best").resolve() == run / best["name"]
    load_package(run / "best" / "package", target)
    assert [(run / row["name"] / "package").exists() for row in made].count(True) == 1
    page = (run / "report.html").read_text()
    check_form(page)
    assert all(row["name"] in page for row in made) and "Runs of the sweep" in page
    names = {row["name"] for row in made} | {"best", "report.html", BOOK}
    assert {path.name for path in run.iterdir()} == names
    fit.main(words(folder, tmp_path / "single", *SMALL))
    assert len(loads) == 2 and len(reads) == 2 * once
    capsys.readouterr()
    report.main([f"runs={run}", f"run_dir={tmp_path / 'report'}"])
    assert (tmp_path / "report" / "report.html").is_file()


@pytest.mark.parametrize(
    "several",
    [
        "optim.lr=1e-3,2e-2 drafter.regression=10",
        "seed=3,4",
        "optim=adamw,muon",
        "drafter=eagle1,medusa",
        "data.limit_rows=8,12",
        "trainer.batch_tokens=256,512 optim.warmup=0",
        "features.keep_dtype=bfloat16,float32",
        "trainer.pack=null,64 optim.warmup=0",
        "optim.lr=1e-3,2e-2 drafter=medusa joint=lora",
    ],
)
def test_a_run_of_a_sweep_has_the_weights_of_the_same_run_by_itself(
    folder: Path, tmp_path: Path, several: str
) -> None:
    run, given = tmp_path / "run", several.split(" ")
    fit.main(["-m", *words(folder, run, *BARE, *given)])
    for row in rows(run):
        own = tmp_path / row["name"]
        config = (run / row["name"] / "config.yaml").read_text()
        fixed = [word for word in given if "," not in word]
        fit.main(words(folder, own, *BARE, *row["words"], *fixed))
        assert same(weights(own), weights(run / row["name"]))
        assert (own / "config.yaml").read_text().replace(str(own), "") == config.replace(
            str(run / row["name"]), ""
        )


def test_all_runs_are_packaged_where_that_is_asked_for(
    target: Target, folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    fit.main(swept(folder, run, RATES, "sweep.packages=all"))
    for row in rows(run):
        load_package(run / row["name"] / "package", target)
    parts = re.findall(r'id="(run-[0-9]+)"', (run / "report.html").read_text())
    assert parts == ["run-1", "run-2"]


def test_a_run_that_fails_is_left_out_and_tried_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    ask = swept(folder, run, "optim.lr=1e30,1e-3", "optim.warmup=0")
    fit.main(ask)
    said = capsys.readouterr().out
    assert [row["status"] for row in rows(run)] == [FAILED, COMPLETE]
    assert re.search(r"WARNING: run 1 failed and is left out: .*lower optim.lr", said)
    assert "failed: " in said
    fit.main([*ask, "resume=last"])
    assert "run 1: optim.lr=1e+30" in (said := capsys.readouterr().out) and "run 2:" not in said
    said = refusal(capsys, swept(folder, tmp_path / "none", "optim.lr=1e30,1e31", "optim.warmup=0"))
    assert "none of 2 runs came to its end: 01-optim.lr=1e_30" in said.replace("+", "_")


# --- going on -------------------------------------------------------------------------------------


class Killed(BaseException):
    """Ends everything where it is raised, and tidies nothing up."""


class Kill(ConsoleProgress):
    """Kills the run that is the third to make an update 5."""

    seen: ClassVar[list[int]] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if args[1].updates == 5:
            Kill.seen.append(5)
            if len(Kill.seen) == 3:
                raise Killed


@pytest.mark.parametrize(
    "how", [["optim.lr=1e-3,5e-3,2e-2"], ["sweep=optuna", "sweep.trials=3", DRAWN, WEIGHTS]]
)
def test_a_killed_sweep_goes_on_with_the_run_that_was_made(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: list[str],
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    fit.main(swept(folder, other, *how))
    Kill.seen.clear()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(learning, "ConsoleProgress", Kill)
        fit.main(swept(folder, run, *how))
    assert [row["status"] for row in rows(run)] == [COMPLETE, COMPLETE, RUNNING]
    refused = refusal(capsys, [*swept(folder, run, *how, "optim.clip_norm=2"), "resume=last"])
    assert "not be the same sweep: it was started without optim.clip_norm=2" in refused
    assert "already holds" in refusal(capsys, swept(folder, run, *how))
    trained = count(monkeypatch, learning, "train")
    fit.main([*swept(folder, run, *how), "resume=last"])
    said = capsys.readouterr().out
    assert "goes on after update 4" in said and "run 2:" not in said
    assert len(trained) == 2, "the run that was made, and the best one, to be measured"
    assert timeless(run) == timeless(other)
    for row in rows(run):
        assert same(weights(run / row["name"]), weights(other / row["name"]))
    fit.main([*swept(folder, run, *how), "resume=last"])
    assert len(trained) == 2 and "run 1:" not in capsys.readouterr().out


def timeless(run: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows(run)]


def test_a_signal_ends_a_sweep_as_it_ends_a_run(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(learning, "ConsoleProgress", Signal)
    with pytest.raises(SystemExit) as left:
        fit.main(swept(folder, run, RATES))
    assert left.value.code == 143
    assert f"continue with resume=last run_dir={run}\n" in capsys.readouterr().out
    assert [row["status"] for row in rows(run)] == [RUNNING]


def test_what_a_kill_left_before_a_first_checkpoint_is_no_hindrance(
    folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    fit.main(swept(folder, run, RATES))
    found = json.loads((run / BOOK).read_text())
    found["runs"] = [{**found["runs"][0], "status": RUNNING, "tau": None, "taus": {}}]
    (run / BOOK).write_text(json.dumps(found))
    name = found["runs"][0]["name"]
    for path in (run / name).rglob("*"):
        if path.is_file() and path.name != "metrics.csv":
            path.unlink()
    (run / name / "checkpoints").rmdir()
    fit.main([*swept(folder, run, RATES), "resume=last"])
    assert [row["status"] for row in rows(run)] == [COMPLETE] * 2


DAMAGE = {
    "{": "cannot be read",
    '{"format": 2}': "format 2, this version reads 1",
    '{"format": 1, "dtype": null, "words": [], "runs": [{"name": "a/b"}]}': "is damaged",
    '{"format": 1, "dtype": null, "words": [], "runs": [{"x": 1}]}': "unknown x",
    '{"format": 1, "dtype": null, "words": ["seed=3"], "runs": []}': "with seed=3",
}


@pytest.mark.parametrize("text", DAMAGE)
def test_a_damaged_book_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / BOOK).write_text(text)
    with pytest.raises(InputError, match=DAMAGE[text]):
        read_book(tmp_path, [])


def test_what_is_no_sweep_is_not_resumed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    fit.main(words(folder, run, *BARE))
    said = refusal(capsys, [*swept(folder, run, RATES), "resume=last"])
    assert f"is no sweep's folder, it has no {BOOK}" in said
    row = {"name": "01-x", "words": ["optim.lr=5.0"], "status": RUNNING, "taus": {}}
    book = {"format": 1, "dtype": "float32", "runs": [row]}
    ask = swept(folder, run, RATES)
    about = ("-m", f"run_dir={run}")
    book["words"] = sorted({*ask, "sweep=basic"} - {*about})
    (run / BOOK).write_text(json.dumps(book))
    said = refusal(capsys, [*ask, "resume=last"])
    assert "has a run with optim.lr=5.0, which these words do not name" in said


def test_without_run_dir_the_newest_sweep_goes_on_and_no_run_takes_it(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    ask = [word for word in swept(folder, tmp_path, "seed=1,2") if "run_dir" not in word]
    fit.main(ask)
    (made,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"fit-sweep-smoke-\d{8}-\d{6}", made.name)
    fit.main([*ask, "resume=last"])
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [made.name]
    single = [word for word in ask if word not in ("-m", "seed=1,2")]
    assert "nothing to resume" in refusal(capsys, [*single, "resume=last"])


# --- what is said ---------------------------------------------------------------------------------


def test_intervals_are_shown_where_they_were_measured() -> None:
    book = Book(Path("x"), [])
    for name, tau, low, high in (
        ("a", 1.9, 1.8, 2.0),
        ("b", 1.85, 1.7, 1.95),
        ("c", 1.5, 1.4, 1.6),
    ):
        row = Row(name=name, words=[], status=COMPLETE, tau=tau, best_update=4, prompts=9)
        row.hear(4, {"val/tau": tau, "val/tau_low": low, "val/tau_high": high})
        book.rows.append(row)
    first, second = sweeping.notes_on(book)
    assert first.startswith("the best run is a, val/tau 1.900 at update 4")
    assert second == "within the noise of val/tau as good: b"
    assert sweeping.cells(book.rows[0])[2] == (1.8, 2.0)
    book.rows[2].prompts = 3
    assert "different numbers of prompts" in sweeping.notes_on(book)[2]
    book.rows[1].intervals.clear()
    assert sweeping.cells(book.rows[1])[2] is None and len(sweeping.notes_on(book)) == 2


def test_names_of_folders_say_the_words() -> None:
    assert sweeping.name_of(3, ["optim.lr=0.001", "tree=chain"]) == "03-optim.lr=0.001-tree=chain"
    odd = sweeping.name_of(12, ["optim.betas=[0.9,0.95]", "init_from=../a b/c"])
    assert odd == "12-optim.betas=_0.9_0.95_-init_from=.._a_b_c"
    assert len(sweeping.name_of(1, ["x" * 500])) <= 120


def test_different_trees_are_warned_about(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit.main(swept(folder, tmp_path / "run", "tree=chain,static"))
    assert "WARNING: runs decode with different trees" in capsys.readouterr().out
