"""A run that is only tried: dry_run=true."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drafttrain import fit
from drafttrain.errors import InputError
from drafttrain.export import export_package
from drafttrain.fitting import trying
from drafttrain.layouts import pairs
from drafttrain.target.model import Target
from drafttrain.training.boost import Boost
from drafttrain.training.course import Course
from tests.fitting.parts import QUICK, UNMEASURED, refusal, words

# F99. What shares the cause, that a run could only be seen by paying for it: every kind of run. One
# that trains, with and without joint training, joined rows, boosting; one that trains nothing; and
# what a real run refuses at once or late, which a trial must refuse too.
KINDS = {
    "eagle1": [],
    "no_schedule": ["trainer.max_steps=null", "trainer.max_epochs=3"],
    "clock": [
        "optim.schedule=constant",
        "optim.warmup=0",
        "trainer.max_steps=null",
        "trainer.max_minutes=1",
    ],
    "joined": ["trainer.pack=64", "trainer.batch_rows=null"],
    "medusa2": [
        "experiment=medusa2",
        "target=tiny",
        "data=set",
        "data.set_aside=4",
        "data.temperatures=null",
        "draft_vocab=64",
    ],
    "specinfer": [
        "experiment=specinfer",
        "target=tiny",
        "data=set",
        "drafter.layers=[0]",
        "data.set_aside=4",
        "draft_vocab=64",
        "data.temperatures=null",
    ],
    "ngram": ["drafter=ngram", "draft_vocab=0"],
}


MEDUSA = ["drafter=medusa", "drafter.own_head=true", "trainer.max_steps=2"]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the table of a trial has, by name."""
    found: dict[str, str] = {}
    monkeypatch.setattr(
        trying, "table", lambda title, columns, rows: found.update({"title": title, **dict(rows)})
    )
    return found


def size(text: str) -> float:
    """Bytes that a text names first."""
    number, unit = re.findall(r"([\d.]+) (bytes|kB|MB|GB)", text)[0]
    return float(number) * {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


@pytest.mark.field("F99")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_can_be_tried(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if kind == "medusa2":
        pytest.importorskip("peft")
    fit.main([*words(folder, tmp_path / "run", *QUICK), *KINDS[kind], "dry_run=true"])
    assert not list(tmp_path.iterdir()), "nothing is left, not even an empty folder"
    named = ["rows", "decoding", "in all", "memory", "package", "export to=vllm"]
    named += ["course", "an update", "training", "checkpoints"] if kind != "ngram" else []
    assert all(shown[name] for name in named), shown
    assert "not available" not in shown["in all"] and ("fits" in shown.get("training", "")) == (
        kind == "specinfer"
    )


@pytest.mark.field("F99")
def test_what_a_trial_says_is_what_the_run_leaves(
    folder: Path, tmp_path: Path, target: Target, shown: dict[str, str]
) -> None:
    given = words(folder, tmp_path / "run", *UNMEASURED, *MEDUSA)
    fit.main([*given, "dry_run=true"])
    assert not (tmp_path / "run").exists()
    fit.main(given)
    run, package = tmp_path / "run", tmp_path / "run" / "package"
    weights = sum(path.stat().st_size for path in package.glob("*.safetensors"))
    assert size(shown["package"]) == pytest.approx(weights, rel=0.05)
    last = (run / "checkpoints" / "last.ckpt").stat().st_size
    assert size(shown["checkpoints"]) == pytest.approx(last, rel=0.1)
    for engine in pairs.targets():
        said = shown[f"export to={engine}"]
        try:
            export_package(package, target, engine, tmp_path / engine)
        except InputError as error:
            assert said == f"no: {error}"
        else:
            assert said == "yes", (engine, said)


@pytest.mark.field("F99")
def test_what_a_run_refuses_is_refused_when_it_is_tried(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "config.yaml").touch()
    for more, wanted in (
        ([f"run_dir={used}"], "already holds config.yaml"),
        (["resume=last"], "leave resume out"),
        (["drafter=medusa", "drafter.heads=2", "tree.k=4"], "this drafter fills 2"),
        (["drafter=ngram", "draft_vocab=0", "tree.k=2000"], "2000 nodes"),
        (["dry_run=perhaps"], "dry_run=perhaps: needs true or false"),
    ):
        asked = [*words(folder, tmp_path / "run"), "dry_run=true", *more]
        assert wanted in refusal(capsys, asked)
    assert [one.name for one in tmp_path.iterdir()] == ["used"]


@pytest.mark.field("F99")
def test_the_time_of_a_run() -> None:
    timed = trying.Timed(loss=1.0, seconds=2.0, target=1.5, checkpoint=0)
    course = Course(batches=10, epochs=3)
    assert trying.training_seconds(course, timed, kept=True) == 10 * 2.0 + 20 * 0.5
    assert trying.training_seconds(course, timed, kept=False) == 60.0
    by_clock = Course(batches=10, epochs=3, seconds=50.0)
    assert trying.training_seconds(by_clock, timed, kept=False) == 50.0
    assert trying.training_seconds(Course(batches=10), timed, kept=True) is None
    boost = Boost(
        members=3, reference=8, match=None, marking="cross_fitted", folds=2, removal="hard",
        eta=1.0, begin="fresh", least_left=0.0, least_gain=0.0, nodes=None, share_new_tokens=16,
    )  # fmt: skip
    assert trying.fits_of(boost) == 3 + 2 * 2


@pytest.mark.field("F99")
def test_evaluations_are_counted_with_the_one_at_the_end() -> None:
    def evaluations(every: int | None, **course: Any) -> int:
        settings = SimpleNamespace(eval=SimpleNamespace(every=every))
        training: Any = SimpleNamespace(settings=settings)
        return trying.evaluations_of(training, Course(batches=10, **course))

    assert evaluations(4, epochs=1) == 3 and evaluations(5, epochs=1) == 2
    assert evaluations(None, epochs=1) == 1 == evaluations(4)
