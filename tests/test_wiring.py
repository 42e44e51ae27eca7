"""Settings that do not exist are refused with the nearest name; a run has one folder; errors leave
as one line."""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from drafttrain import processes, runs
from drafttrain.errors import InputError
from drafttrain.wiring import composing
from drafttrain.wiring.building import build
from drafttrain.wiring.composing import compose
from drafttrain.wiring.conf import CONF_DIR_VARIABLE
from drafttrain.wiring.doors import TRACEBACK_VARIABLE, door
from tests.messages import said

ROOT = Path(__file__).resolve().parent.parent
DOORS = sorted(
    path.stem for path in (ROOT / "drafttrain").glob("*.py") if "DOOR = door(" in path.read_text()
)


@dataclass(frozen=True)
class Marker:
    """An object that is passed as it is."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    rate: float
    names: list[str]

    def __post_init__(self) -> None:
        if self.rate <= 0:
            raise InputError(f"rate={self.rate}: needs a number above 0")


class Thing:
    def __init__(self, settings: Settings, marker: Marker | None = None, size: int = 1) -> None:
        self.settings, self.marker, self.size = settings, marker, size


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small tree of configurations, and a working directory next to it."""
    files = {
        "fit.yaml": """
            defaults:
              - target: small
              - logger: csv
              - _self_
              - experiment: null
            seed: 0
            prompt: null
            run_dir: null
            resume: null
            optim:
              # The peak of the schedule,
              # after warm-up.
              lr: 1.0e-3
              betas: [0.9, 0.95]   # Adam's
            trainer:
              max_epochs: 1
              kwargs: {}
        """,
        "generate.yaml": """
            defaults:
              - target: small
              - tree: chain
              - _self_
            package: ???   # a folder that fit made
            prompt: null
        """,
        "tree/chain.yaml": "k: 5\n",
        "tree/dynamic.yaml": "depth: 6\n",
        "target/small.yaml": "# Small.\n_target_: drafttrain.errors.InputError\npath: a  # where\n",
        "target/large.yaml": "_target_: drafttrain.errors.InputError\npath: b\nshards: 2\n",
        "logger/csv.yaml": "every: 10\n",
        "logger/none.yaml": "{}\n",
        "experiment/eagle1.yaml": """
            # @package _global_
            defaults:
              - override /target: large
            optim:
              lr: 2.0e-3
            target:
              shards: 4
            trainer:
              kwargs: {anything: 1}
        """,
        "experiment/quickstart.yaml": "# @package _global_\nseed: 1\n",
        "experiment/misspelt.yaml": "# @package _global_\noptim:\n  lrr: 2\n",
        "experiment/wrong_section.yaml": "# @package _global_\ntrainer:\n  lr: 1\n",
    }
    for name, content in files.items():
        path = tmp_path / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(content))
    monkeypatch.setenv(CONF_DIR_VARIABLE, str(tmp_path / "conf"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "conf"


def refusal(*overrides: str, name: str = "fit") -> str:
    with pytest.raises(InputError) as caught:
        compose(name, overrides)
    return str(caught.value)


def test_overrides_and_experiments(conf: Path) -> None:
    config = compose("fit", ["experiment=eagle1", "seed=7", "optim.betas=[0.8,0.9]"])
    assert (config.seed, config.optim.lr, config.target.path, config.target.shards) == (
        7,
        2e-3,
        "b",
        4,
    )
    assert list(config.optim.betas) == [0.8, 0.9]
    assert config.trainer.kwargs.anything == 1
    assert "hydra" not in config
    assert compose("fit", ["experiment=eagle1", "target=small", "~experiment"]).target.path == "a"


@pytest.mark.parametrize(
    "overrides",
    [
        ["seed=7", "optim.betas=[0.8,0.9]", "optim.lr=3", "trainer.kwargs={a: {b: [1, null]}}"],
        [
            "experiment=eagle1",
            "target.shards=3",
            "optim={lr: 5}",
            "optim.betas=null",
            "prompt='${seed}'",
        ],
        ["target=large", 'target.path="a b"', "seed=${optim.lr}", "optim.betas[0]=7", "seed=1e3"],
        ["+trainer.kwargs.deep=1", "++optim.lr=4", "~trainer.kwargs.none", "seed=2"],
        ["+extra={a: 1}", "seed=2", "++extra.b=2"],
        ["optim.lr.deep=1"],
        ["seed=${"],
    ],
)
def test_values_are_set_as_hydra_sets_them(
    conf: Path, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed() -> tuple[Any, str]:
        try:
            return compose("fit", overrides, text=()), ""
        except InputError as error:
            return None, str(error)

    ours = printed()
    monkeypatch.setattr(composing, "_with_values", lambda *_: None)
    assert printed() == ours


def test_a_changed_file_is_read_again_and_nobody_shares_a_configuration(conf: Path) -> None:
    words = ["experiment=eagle1", "seed=7"]
    first = compose("fit", words)
    assert (first.optim.lr, first.trainer.kwargs.anything) == (2e-3, 1)
    first.optim.lr, first.trainer.kwargs = 1, {"mine": True}
    first.optim.betas.append(1)
    second = compose("fit", words)
    assert (second.optim.lr, second.trainer.kwargs, second.optim.betas) == (
        2e-3,
        {"anything": 1},
        [0.9, 0.95],
    )
    for name, old, new in (
        ("experiment/eagle1.yaml", "2.0e-3", "4.0e-3"),
        ("fit.yaml", "max_epochs: 1", "max_epochs: 2"),
    ):
        path = conf / name
        path.write_text(path.read_text().replace(old, new))
    third = compose("fit", words)
    assert (third.optim.lr, third.trainer.max_epochs) == (4e-3, 2)
    (conf / "experiment" / "eagle1.yaml").unlink()
    assert "there is no experiment eagle1" in refusal(*words)


@pytest.mark.field("F61")
@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("sed=1", "Did you mean seed?"),
        ("+sed=1", "Did you mean seed?"),
        ("++optm.lr=1", "Did you mean optim.lr?"),
        ("optim.lrr=1", "Did you mean optim.lr?"),
        ("optm.lr=1", "Did you mean optim.lr?"),
        ("lr=1", "Did you mean optim.lr?"),
        ("trainer.lr=1", "Did you mean optim.lr?"),
        ("optim.max_epochs=1", "Did you mean trainer.max_epochs?"),
        ("experimnt=eagle1", "Did you mean experiment?"),
        ("optim.lr.deep=1", "did you mean optim.lr=...?"),
    ],
)
def test_unknown_setting_names_the_nearest(conf: Path, override: str, wanted: str) -> None:
    message = refusal(override)
    assert wanted in message
    assert override in message


def test_unknown_setting_lists_its_section(conf: Path) -> None:
    assert "optim has: lr, betas" in refusal("optim.zzz=1")
    assert "experiment" in refusal("zzz=1") and "seed" in refusal("zzz=1")


def test_unknown_choice_lists_the_choices(conf: Path) -> None:
    message = refusal("experiment=quikstart")
    assert "there is no experiment quikstart" in message and "Did you mean quickstart?" in message
    assert "eagle1, misspelt, quickstart" in message
    assert "Choices: large, small" in refusal("target=tiny")


def test_group_of_another_door(conf: Path) -> None:
    assert "generate has no choice of experiment" in refusal(
        "experiment=eagle1", "package=x", name="generate"
    )


@pytest.mark.field("F61")
@pytest.mark.parametrize(
    ("name", "key"), [("misspelt", "optim.lrr"), ("wrong_section", "trainer.lr")]
)
def test_experiment_file_cannot_invent_settings(conf: Path, name: str, key: str) -> None:
    assert (
        f"experiment={name} sets {key}: there is no setting {key}. Did you mean optim.lr?"
        in refusal(f"experiment={name}")
    )


def test_own_configurations(conf: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine" / "experiment"
    mine.mkdir(parents=True)
    (mine / "own.yaml").write_text("# @package _global_\nseed: 5\n")
    assert compose("fit", ["experiment=own"], config_dir=tmp_path / "mine").seed == 5
    with pytest.raises(InputError, match="eagle1, misspelt, own, quickstart"):
        compose("fit", ["experiment=ow"], config_dir=tmp_path / "mine")
    with pytest.raises(InputError, match=said("wiring.no_folder")):
        compose("fit", [], config_dir=tmp_path / "absent")


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("optim=5", "optim=5: optim holds several settings, give optim.<setting>=... of lr, betas"),
        ("optim=null", "optim holds several settings"),
        ("target=5", "target=5: there is no target 5. Choices: large, small"),
        ("~seed", "~seed: seed cannot be left out"),
        ("~optim", "cannot be left out"),
        ("target=null", "target=null: fit needs one target, of large, small"),
        ("~target", "~target: fit needs one target"),
        ("logger=null", "fit needs one logger, of csv, none"),
        ("seed=" + "9" * 5000, "cannot read"),
    ],
)
def test_what_a_door_needs_stays(conf: Path, override: str, wanted: str) -> None:
    assert wanted in refusal(override)
    assert compose("fit", ["optim={}"]).optim.lr == 1e-3


@pytest.mark.field("F62")
def test_missing_setting_is_named_with_its_meaning(conf: Path) -> None:
    message = refusal(name="generate")
    assert "needs package=... (a folder that fit made)" in message
    # What is shown to be typed repeats what was given.
    shown = refusal("target=large", "prompt=two words", name="generate")
    assert "python -m drafttrain.generate target=large 'prompt=two words' package=..." in shown


@pytest.mark.parametrize(
    "said",
    [
        "What's 2+2? (please, [now])",
        "a=b: {c}",
        "${oc.env:HOME} and \\${x} \\\\${y}",
        "",
        " two  spaces ",
        "null",
        "'\"",
        "é\n",
    ],
)
def test_prompt_is_taken_literally(conf: Path, said: str) -> None:
    assert compose("fit", [f"prompt={said}"]).prompt == said


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("quickstart", "settings are written key=value"),
        ("seed=1,2", "one command makes one run"),
        ("optim.betas=[1", "needs quotes"),
        ("target.path='\udcff'", "it is not UTF-8"),
        ("hydra.run.dir=x", "run_dir=<folder>"),
    ],
)
def test_unreadable_words(conf: Path, override: str, wanted: str) -> None:
    assert wanted in refusal(override)


# The kind: words whose values are taken as they were written, set after all others, so that their
# order did not count; a section, a text and a choice may each name the same setting, with every
# sign that Hydra has.
@pytest.mark.parametrize(
    ("words", "key", "wanted"),
    [
        (["run_dir=a", "run_dir=b"], "run_dir", "b"),
        (["run_dir=a", "++run_dir=b"], "run_dir", "b"),
        (["++run_dir=b", "run_dir=a"], "run_dir", "a"),
        (["run_dir=a", "run_dir=null"], "run_dir", None),
        (["run_dir=null", "run_dir=a b,[c"], "run_dir", "a b,[c"),
        (["run_dir=a", "++run_dir=null", "~logger.every"], "run_dir", None),
        (["target.path=x", "target={path: y}"], "target.path", "y"),
        (["target={path: y}", "target.path=x"], "target.path", "x"),
        (["target.path=x", "+target={path: y}"], "target.path", "y"),
        (["target.path=x", "target=large"], "target.path", "x"),
        (["target.path=${run_dir}", "run_dir=r"], "target.path", "r"),
        (["+logger.path=x: [y"], "logger.path", "x: [y"),
        (["+logger.path=x", "++logger.path=y"], "logger.path", "y"),
        (["~target.path", "+target.path=x"], "target.path", "x"),
        (["++prompt='${x}\\\"\\", "~logger.every"], "prompt", "'${x}\\\"\\"),
        (["prompt=a, b", "++prompt=null"], "prompt", "null"),
    ],
)
def test_of_two_words_for_one_setting_the_last_counts(
    conf: Path, words: list[str], key: str, wanted: object
) -> None:
    assert OmegaConf.select(compose("fit", words), key) == wanted


def test_of_a_text_and_a_choice_the_last_counts(conf: Path) -> None:
    def tree(*words: str) -> Any:
        return compose("generate", ["package=x", *words], text=("prompt", "tree")).tree

    assert tree("tree=dynamic", "tree=2,2") == "2,2" == tree("tree=4", "+tree=2,2")
    assert tree("tree=2,2", "tree=dynamic", "tree.depth=3") == {"depth": 3}
    assert tree("tree=dynamic", "tree=chain") == {"k": 5}
    for words in (("tree.k=3", "tree=2"), ("tree=2", "tree.k=3"), ("tree=2", "++tree.k=3")):
        with pytest.raises(InputError, match=r"k=3: tree=2 has no settings"):
            tree(*words)


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("+run_dirs.path=x", "Did you mean"),
        ("~prompt", "~prompt: prompt cannot be left out"),
        ("data.path=x y", "data.path=x y: there is no setting data.path"),
    ],
)
def test_paths_with_signs_are_refused_as_other_settings_are(
    conf: Path, word: str, wanted: str
) -> None:
    assert wanted in refusal(word)


# --- building


def test_build_hands_objects_over_and_converts() -> None:
    settings = {"_target_": f"{Settings.__module__}.Settings", "rate": 0.5, "names": ["a", "b"]}
    marker = Marker("m")
    thing = build(
        {"_target_": f"{Thing.__module__}.Thing", "settings": settings}, marker=marker, size=3
    )
    assert thing.marker is marker and thing.size == 3
    assert type(thing.settings.names) is list
    later = build(
        {"_target_": f"{Thing.__module__}.Thing", "settings": settings, "_partial_": True}
    )
    assert later(marker=marker).marker is marker
    assert build(None) is None


def test_build_refuses_unknown_and_missing_keys() -> None:
    name = f"{Settings.__module__}.Settings"
    with pytest.raises(InputError, match=r"node\.rat: .*node\.rate\?.*: rate, names"):
        build({"_target_": name, "rat": 1, "names": []})
    with pytest.raises(InputError, match=said("wiring.lacking") + " names"):
        build({"_target_": name, "rate": 1})
    with pytest.raises(InputError, match=said("wiring.no_import")):
        build({"_target_": "drafttrain.nowhere.Nothing"})


def test_build_lets_errors_out() -> None:
    settings = {"_target_": f"{Settings.__module__}.Settings", "rate": -1, "names": []}
    for node in (settings, {"_target_": f"{Thing.__module__}.Thing", "settings": settings}):
        with pytest.raises(InputError, match=r"^rate=-1"):
            build(node)


# --- doors


def open_door(main: Callable[[DictConfig], Any], *words: str) -> Any:
    return door("fit")(main)(list(words))


def test_door_runs_and_reports(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert open_door(lambda cfg: cfg.seed, "seed=3") == 3

    def out_of_space(cfg: DictConfig) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/x/weights")

    def after_another(cfg: DictConfig) -> None:
        try:
            out_of_space(cfg)
        except OSError as error:
            raise RuntimeError("could not save") from error

    def interrupted(cfg: DictConfig) -> None:
        raise KeyboardInterrupt

    def refused(cfg: DictConfig) -> None:
        raise InputError("the store is empty")

    for main, code, fault in (
        (out_of_space, 2, "disk is full while writing runs/x/weights"),
        (after_another, 2, "disk is full while writing runs/x/weights"),
        (interrupted, 130, "interrupted"),
        (refused, 2, "drafttrain.fit: the store is empty"),
    ):
        with pytest.raises(SystemExit) as left:
            open_door(main)
        printed = capsys.readouterr().err
        assert left.value.code == code and fault in printed and "Traceback" not in printed

    with pytest.raises(ZeroDivisionError):
        open_door(lambda cfg: 1 / 0)


def test_what_the_system_refuses_is_one_line(
    conf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(main: Callable[[DictConfig], Any]) -> str:
        with pytest.raises(SystemExit) as left:
            open_door(main)
        said = capsys.readouterr().err
        assert left.value.code == 2 and said.count("\n") == 1 and "Traceback" not in said
        return said

    def failing(error: BaseException) -> Callable[[DictConfig], None]:
        def main(cfg: DictConfig) -> None:
            raise error

        return main

    assert "x/y cannot be used: Permission denied" in printed(
        failing(PermissionError(errno.EACCES, "Permission denied", "x/y"))
    )
    assert "File name too long" in printed(lambda cfg: (tmp_path / ("a" * 300)).is_file())
    assert f"{tmp_path}/gone is gone" in printed(lambda cfg: (tmp_path / "gone" / "x").read_text())
    assert "larger than this system allows" in printed(
        failing(OSError(errno.EFBIG, "File too large"))
    )
    assert "memory is full" in printed(failing(MemoryError()))
    full = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
    assert "memory is full" in printed(failing(RuntimeError(full)))
    assert "drafttrain.fit: a  b [2Jc" in printed(failing(InputError("a\n\n b\x1b[2Jc\n")))
    with pytest.raises(FileNotFoundError):
        open_door(failing(FileNotFoundError(errno.ENOENT, "No such file", "x")))


def test_a_term_signal_lets_a_door_tidy_up(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, tidied = signal.getsignal(signal.SIGTERM), []

    def main(cfg: DictConfig) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # a second one does not disturb it
            tidied.append(True)

    with pytest.raises(SystemExit) as left:
        open_door(main)
    assert left.value.code == 143 and tidied and "stopped by a signal" in capsys.readouterr().err
    assert before is signal.SIG_DFL and signal.getsignal(signal.SIGTERM) is before


def test_any_character_can_be_written(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    open_door(lambda cfg: print("naïve 🙂"))
    out.flush()
    assert raw.getvalue().decode("latin-1") == "naïve \\U0001f642\n" and out.errors == "strict"


def test_door_shows_the_traceback_on_request(
    conf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACEBACK_VARIABLE, "1")
    with pytest.raises(SystemExit):
        open_door(lambda cfg: None, "sed=1")
    assert "Traceback" in capsys.readouterr().err


def test_help_and_configuration(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def main(cfg: DictConfig) -> None:
        raise AssertionError("not to be run")

    open_door(main, "--help", "target=large")
    said = capsys.readouterr().out
    assert "experiment: eagle1, misspelt, quickstart, wrong_section" in said
    assert (
        "target: *large, small" in said
        and "betas:" in said
        and "Usage: python -m drafttrain.fit" in said
    )
    assert (
        "    # The peak of the schedule, after warm-up.\n    lr: 0.001" in said
        and "    # Adam's\n    betas:" in said
    )
    open_door(main, "--help")
    assert "    # where\n    path: a" in capsys.readouterr().out
    open_door(main, "--cfg", "job", "seed=9")
    assert "seed: 9" in capsys.readouterr().out
    door("generate")(main)(["--help"])
    assert "package: ???" in capsys.readouterr().out
    for words in (["--nothing"], ["-m"], ["--cfg", "all"]):
        with pytest.raises(SystemExit) as left:
            open_door(main, *words)
        assert left.value.code == 2


def test_nothing_is_made_and_the_directory_stays(conf: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    open_door(lambda cfg: None)
    assert sorted(tmp_path.rglob("*")) == before and Path.cwd() == tmp_path


WRONG = {
    "adopt": "head=x out=y chain=0",
    "capture": "out=x encoding=foo",
    "evaluate": "package=x rule=foo",
    "export": "package=x to=foo out=y",
    "fit": "experiment=smoke data.path=x eval.every=0",
    "generate": "package=x tree=dynamic tree.depth=0",
    "report": "runs=x seed=4",
    "synthesize": "out=x writing.max_answer=0",
    "tune": "package=x sizes=[0]",
}
"""A value of each door that is wrong by itself."""
FIT = ("optim.lr=0", "trainer.accumulate=0", "tree.k=x", "final.prompts=-1", "checkpoint.keep=x")
ASKED = """
import contextlib, io, runpy, sys

def ask(door, *words):
    sys.argv = [door, *words]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            runpy.run_module(f"drafttrain.{door}", run_name="__main__", alter_sys=True)
        except SystemExit as left:
            assert left.code == (0 if words[0].startswith("-") else 2), (door, words)
    heavy = {"torch", "transformers", "lightning", "datasets", "matplotlib"} & sys.modules.keys()
    assert not heavy, (door, words, heavy)
    assert said.getvalue().count("\\n") == (not words[0].startswith("-")), said.getvalue()

doors = dict(line.split(":") for line in sys.argv[1].split(";"))
more = sys.argv[2:]
for door, wrong in doors.items():
    ask(door, "--help")
    ask(door, "--cfg", "job")
    ask(door, "nothing=1")
    ask(door, *wrong.split())
for wrong in more:
    ask("fit", "experiment=smoke", "data.path=x", wrong)
"""

# F94. The cause: a door imported all that does its work before it looked at its words. So it is
# every answer that needs none of that: help, the configuration, names and values that are wrong.


@pytest.mark.field("F94")
@pytest.mark.processes
def test_doors_answer_without_torch() -> None:
    """As `python -m` runs each, one after the other in one process."""
    doors = ";".join(f"{door}:{WRONG[door]}" for door in DOORS)
    command = [sys.executable, "-c", ASKED, doors, *FIT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^Usage: python -m drafttrain\.(\w+) ", done.stdout, re.MULTILINE) == DOORS


LACKING: dict[str, tuple[list[str], str]] = {
    "adopt": ([], "head=..."),
    "capture": ([], "out=..."),
    "evaluate": ([], "package=..."),
    "export": ([], "package=<"),
    "fit": (["target=hf"], "target.path=..."),
    "generate": ([], "package=..."),
    "report": ([], "runs=..."),
    "synthesize": ([], "out=<"),
    "tune": ([], "package=..."),
}


@pytest.mark.field("F62")
@pytest.mark.parametrize("name", DOORS)
def test_a_door_that_lacks_something_says_what(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for builder in ("smollm2", "hf", "tiny"):
        monkeypatch.setattr(
            f"drafttrain.target.load.{builder}", lambda **_: pytest.fail("the target was loaded")
        )
    words, said = LACKING[name]
    with pytest.raises(SystemExit) as left:
        importlib.import_module(f"drafttrain.{name}").main(words)
    printed = capsys.readouterr().err
    assert (
        left.value.code == 2
        and printed.startswith(f"drafttrain.{name}: needs ")
        and printed.count("\n") == 1
        and said in printed
    ), printed
    assert not list(tmp_path.iterdir())


# --- provenance and the run's folder


def test_provenance_is_json_and_complete(conf: Path) -> None:
    printed = open_door(lambda cfg: runs.provenance(), "seed=3", "prompt=a b")
    assert json.loads(json.dumps(printed)) == printed
    assert printed["config"]["seed"] == 3 and printed["versions"]["torch"]
    assert printed["command"] == "python -m drafttrain.fit seed=3 'prompt=a b'"
    assert runs.differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2}) == {"a.b": (1, 3)}
    endless = open_door(lambda cfg: runs.provenance(), "optim.lr=inf", "optim.betas=[0.9,nan]")[
        "config"
    ]["optim"]
    assert (
        json.dumps(endless, allow_nan=False)
        and endless["lr"] == "inf"
        and endless["betas"] == [0.9, "nan"]
    )


def test_seed_sets_every_source() -> None:
    import random

    import numpy as np
    import torch

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    runs.seed_everything(3)
    first = draw()
    runs.seed_everything(3)
    assert draw() == first
    with pytest.raises(InputError, match="seed=-1"):
        runs.seed_everything(-1)


def folder_of(cfg: DictConfig) -> Path:
    """The run's folder, as a door that can resume chooses it."""
    return runs.run_dir(cfg.run_dir, resume=bool(cfg.resume))


@pytest.mark.field("F21")
def test_run_dir_is_named_and_used_folders_are_refused(conf: Path, tmp_path: Path) -> None:
    folder = open_door(folder_of, "experiment=quickstart")
    assert (
        folder.parent == tmp_path / "runs"
        and folder.name.startswith("fit-quickstart-")
        and folder.is_dir()
    )
    assert open_door(folder_of, "experiment=quickstart") != folder

    used = tmp_path / "used"
    used.mkdir()
    assert open_door(folder_of, "run_dir=used") == used
    (used / "config.yaml").touch()
    (used / "checkpoints").mkdir()

    def refused(*words: str) -> str:
        with pytest.raises(InputError) as caught:
            folder_of(compose("fit", words))
        return str(caught.value)

    assert "already holds checkpoints/, config.yaml" in refused("run_dir=used")
    assert "resume=last" not in refused("run_dir=used"), "no door but fit can go on"
    assert folder_of(compose("fit", ["run_dir=used", "resume=last"])) == used
    assert "nothing to resume" in refused("run_dir=new", "resume=last")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    assert "is a file" in refused("run_dir=file")
    assert "run_dir=2024: needs a path; one that looks like a number needs quotes" in refused(
        "run_dir=2024"
    )
    assert "needs a path" in refused("run_dir=[a]") and "needs a path" in refused("run_dir=true")
    assert "File name too long" in refused(f"run_dir={'a' * 300}")
    assert "is not UTF-8" in refused("run_dir='\udcff'")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    assert "cannot be made" in refused("run_dir=dangling")
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    assert folder_of(compose("fit", ["run_dir=link"])) == tmp_path / "link"
    assert folder_of(compose("fit", ["run_dir='my runs/ü'"])).is_dir()


def test_a_folder_in_which_nothing_came_about_goes(conf: Path, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), runs.new_folder("mine") as folder:
        assert folder.is_dir()
        _ = 1 / 0
    assert not (tmp_path / "mine").exists()
    with runs.new_folder("mine") as folder:
        (folder / "result").touch()
    assert (tmp_path / "mine" / "result").exists()


def test_a_word_of_somebody_else_is_not_heard(
    conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(processes, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(processes, "_calls", 0)
    pid = os.getpid()
    word = {"word": "/evil", "refused": False, "pid": pid, "started": processes._started(pid)}
    processes._meeting_file(1).write_text(json.dumps(word))
    assert processes.await_word("a folder") == "/evil"
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    processes._meeting_file(2).write_text(json.dumps(word))
    with pytest.raises(InputError, match=said("wiring.silent_rank")):
        processes.await_word("a folder")


def test_resume_without_a_folder_takes_the_newest(conf: Path, tmp_path: Path) -> None:
    words = ["experiment=quickstart", "resume=last"]
    with pytest.raises(SystemExit):
        open_door(folder_of, *words)
    for name in (
        "fit-quickstart-20250101-000000",
        "fit-quickstart-20250102-000000-2",
        "fit-quickstart-20250102-000000-10",
    ):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    (tmp_path / "runs" / "fit-quickstart-20260101-000000").mkdir()  # empty
    (tmp_path / "runs" / "fit-quickstart-large-20260101-000000").mkdir()
    (tmp_path / "runs" / "fit-quickstart-large-20260101-000000" / "config.yaml").touch()
    assert open_door(folder_of, *words).name == "fit-quickstart-20250102-000000-10"


RANKS = """
import sys, time
from drafttrain import processes, runs
from drafttrain.wiring.doors import door

@door("fit")
def main(cfg):
    print(runs.run_dir(cfg.run_dir, resume=False), flush=True)
    time.sleep(float(cfg.seed))

main()
"""


def start(rank: int, port: int, *words: str) -> subprocess.Popen[str]:
    env = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", RANKS, *words],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.field("F24", "F26")
@pytest.mark.processes
@pytest.mark.parametrize("first", [0, 1])
def test_processes_started_across_a_second_agree(conf: Path, first: int) -> None:
    port = 40000 + os.getpid() % 20000
    one = start(first, port, "seed=3")
    time.sleep(1.2)
    two = start(1 - first, port, "seed=3")
    folders = []
    for process in (one, two):
        said, printed = process.communicate(timeout=60)
        assert process.returncode == 0, printed
        folders.append(said.strip())
    assert folders[0] == folders[1] and len(list(Path("runs").iterdir())) == 1


@pytest.mark.field("F26")
@pytest.mark.processes
def test_word_of_a_killed_run_is_ignored_and_a_refusal_reaches_all(
    conf: Path, tmp_path: Path
) -> None:
    port = 40001 + os.getpid() % 20000
    killed = start(0, port, "seed=60", "run_dir=killed")
    assert killed.stdout is not None and "killed" in killed.stdout.readline()
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "config.yaml").touch()
    waiting = start(1, port, "run_dir=used")
    time.sleep(1.5)
    assert waiting.poll() is None
    refusing = start(0, port, "run_dir=used")
    for process in (refusing, waiting):
        _, printed = process.communicate(timeout=60)
        assert (
            process.returncode == 2
            and "already holds config.yaml" in printed
            and "Traceback" not in printed
        )


@pytest.mark.processes
def test_processes_that_rank_0_starts_itself_agree(conf: Path) -> None:
    """As Lightning's own launcher does it: rank 0 runs first and starts the same command with
    LOCAL_RANK set."""
    parent = """
import os, subprocess, sys
from drafttrain import processes, runs
from drafttrain.wiring.doors import door

@door("fit")
def main(cfg):
    print(runs.run_dir(cfg.run_dir, resume=False), flush=True)
    if "LOCAL_RANK" not in os.environ:
        env = {**os.environ, "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        subprocess.run([sys.executable, *sys.argv], env=env, check=True, timeout=60)

main()
"""
    Path("parent.py").write_text(parent)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "parent.py"], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split()
    assert first == second and len(list(Path("runs").iterdir())) == 1


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ("optim.lr=${nothere}", "optim.lr: .*'nothere' not found"),
        ("optim.lr=${oc.env:NO_SUCH_NAME}", "optim.lr: .*'NO_SUCH_NAME' not found"),
        ("optim.lr=${optim.lr}", "optim.lr: .*[Rr]ecurs"),
        ("optim.lr=${no_resolver:1}", "optim.lr: .*no_resolver"),
        ("data.path=${nothere}", "data.path: .*'nothere' not found"),
    ],
)
def test_a_reference_to_nothing_is_one_line(
    given: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the only settings, next to others that have no value yet, and in one run of a sweep."""
    monkeypatch.delenv("NO_SUCH_NAME", raising=False)
    for words in (["data=set", given], ["data=set", "data.path=x", given]):
        with pytest.raises(InputError, match=fault) as caught:
            compose("fit", words)
        assert "\n" not in str(caught.value)
    assert compose("fit", ["optim.lr=${oc.env:NO_SUCH_NAME,3}"]).optim.lr == "3"


# The kind: what a template is given is in every prompt and in the fingerprint, so also in what a
# secret may not be in: read from the environment there, through another setting, inside of a list;
# or a secret by its name. Tokens of text are none.
@pytest.mark.field("F92")
@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["+target.template.x=${oc.env:OWN_KEY}"], r"x=\$\{oc.env:OWN_KEY\}: reads the environ"),
        (["+target.template.x=${oc.env:OWN_KEY,by-default}"], "x=.*: reads the environment"),
        (["+target.template.tools=[{name: '${oc.env:OWN_KEY}'}]"], "tools.name=.*: reads the env"),
        (["run_dir=${oc.env:OWN_KEY}", "+target.template.x=${run_dir}"], "x=.*: reads the env"),
        (["+target.template.api_key=abc"], "target.template.api_key is a secret by its name"),
        (["+target.template.bos_token=abc", "+target.template.x=${target.device}"], ""),
    ],
)
@pytest.mark.parametrize("door", ["fit", "synthesize"])
def test_a_template_is_given_no_secret(
    words: list[str], fault: str, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_KEY", "sk-123456")
    if door == "synthesize":
        words = ["out=x", *(word.replace("run_dir", "out") for word in words)]
    else:
        words = ["data=set", "data.path=x", *words]
    if not fault:
        assert compose(door, words).target.template.bos_token == "abc"
        return
    with pytest.raises(InputError, match=fault) as caught:
        compose(door, words)
    assert "sk-123456" not in str(caught.value)
