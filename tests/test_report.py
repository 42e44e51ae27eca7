"""Drafters side by side: every number is a package's own or measured here, and what is not equal is not shown as if it were."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.image import imread

import drafttrain
from drafttrain import report
from drafttrain.data.conversations import read_set
from drafttrain.decoding.conditions import digest_of
from drafttrain.decoding.plan import TUNED, Plan
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.medusa import Medusa
from drafttrain.drafter.ngram import NGram
from drafttrain.nn.sampling import Policy
from drafttrain.packaging.manifest import CONFIG, METRICS, TENSORS, read_config
from drafttrain.packaging.writing import size_of
from drafttrain.reporting.side_by_side import COLUMNS
from drafttrain.target import load
from drafttrain.target.adapter import tuned
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree
from tests.packaging.made import overfitted, packed
from tests.target.test_adapter import made
from tests.training.parts import write_tiny_set

SETTINGS: dict[str, Any] = {
    "prompts": 4,
    "max_new_tokens": 16,
    "batch": 4,
    "speed_prompts": 2,
    "speed_new_tokens": 12,
    "split": "held_out",
    "seed": 0,
    "prompts_digest": "0123456789abcdef",
    "target_dtype": "float32",
    "device": "cpu",
    "threads": 1,
}
TRAINING = {"seconds": 100.0, "evaluation_seconds": 40.0, "supervised_tokens_seen": 5000}


def row(speedup: float | None, tau: float, tree: str = "chain 3", **more: Any) -> dict[str, Any]:
    return {
        "label": f"{tree} alone",
        "measured": "speed",
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "growth": "chain",
        "tree": tree,
        "nodes": 3,
        "depth": 3,
        "rule": "greedy",
        "tau": tau,
        "tau_interval": [tau - 0.1, tau + 0.1],
        "accepted_per_round": tau - 1,
        "accept_at": [0.5, 0.25, None],
        "accept_counts": [[10, 20], [2, 8], [0, 0]],
        "speedup": speedup,
        "speedup_interval": None if speedup is None else [speedup - 0.2, speedup + 0.2],
        "tokens_per_second": 30.0,
        "plain_tokens_per_second": 20.0,
        "prompts": 2,
        "rounds": 20,
        "same_as_plain": 2,
        "guarantee": "greedy",
        **more,
    }


SLOW = [row(None, 9.0, "static 25", measured="acceptance", prompts=4), row(0.8, 1.5, "chain 4"), row(1.1, 1.25)]
FAST = [row(1.6, 1.75), row(1.4, 1.9, "static 9")]


@pytest.fixture(scope="module")
def target() -> Target:
    return load.tiny()


@pytest.fixture(scope="module")
def original(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs with packages, a run without, and a file."""
    folder = tmp_path_factory.mktemp("report") / "runs"
    (folder / "stopped" / "checkpoints").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    torch.manual_seed(0)
    eagle = Eagle1(target)
    metrics = {"settings": {**SETTINGS, "drafter_dtype": "float32"}, "rows": SLOW}
    begun = {"init_from": "elsewhere/first/package"}
    told: dict[str, Any] = {"training": TRAINING, "config": begun}
    packed(folder / "slow" / "package", eagle, target, metrics=metrics, provenance=told)
    metrics = {"settings": {**SETTINGS, "drafter_dtype": None}, "rows": FAST}
    packed(folder / "fast" / "package", NGram(target), target, metrics=metrics, provenance={"training": None})
    metrics = {"settings": SETTINGS, "rows": [row(1.3, 1.5)]}
    packed(folder / "old" / "package", eagle, target, metrics=metrics)
    return folder


@pytest.fixture
def place(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "runs"))


def words(runs: Any, out: Path, *more: str) -> list[str]:
    return [f"runs={runs}", f"run_dir={out}", *more]


def told(out: Path) -> dict[str, Any]:
    found = json.loads((out / report.RESULT).read_text())
    assert sorted(path.name for path in out.iterdir()) == sorted((report.RESULT, report.TEXT, report.PICTURE))
    return found


def markdown_rows(out: Path) -> list[dict[int, str]]:
    """Cells of the table by column."""
    lines = [line for line in (out / report.TEXT).read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert cells[0] == [*COLUMNS] and set(cells[1]) == {"---"}
    return [dict(enumerate(line)) for line in cells[2:]]


def refusal(capsys: pytest.CaptureFixture[str], given: list[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        report.main(given)
    assert stopped.value.code == 2
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert last.startswith("drafttrain.report: ")
    return last


# --- what the packages say ---------------------------------------------------------------------------------------------


def test_the_table_is_what_the_packages_say(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.main(words(place, tmp_path / "out"))
    found = told(tmp_path / "out")
    rows = found["rows"]
    assert [(one["run"], one["drafter"], one["tree"]) for one in rows] == [
        ("fast", "NGram", "chain 3"),
        ("old", "Eagle1", "chain 3"),
        ("slow", "Eagle1", "chain 3"),
    ]
    for one, given in zip(rows, (FAST[0], row(1.3, 1.5), SLOW[2]), strict=True):
        assert {name: one[name] for name in given if name != "label"} == {n: v for n, v in given.items() if n != "label"}
    config = read_config(place / "slow" / "package")
    assert [one["parameters"] for one in rows] == [0, *[config["shape"]["parameters"]] * 2]
    assert [one["bytes"] for one in rows] == [size_of(place / name / "package") for name in ("fast", "old", "slow")]
    assert [one["training_seconds"] for one in rows] == [0.0, None, 60.0]
    assert [one["supervised_tokens"] for one in rows] == [0, None, 5000]
    assert [one["begun_from"] for one in rows] == [None, None, "first"]
    assert [one["drafter_dtype"] for one in rows] == [None, None, "float32"]
    assert found["settings"]["seed"] == 0 and found["settings"]["target"] == "tiny-llama"
    said = capsys.readouterr()
    assert "1:00, begun from first" in said.out and "0.500 (10/20) 0.250 (2/8) -" in said.out
    assert "without a package, left out: stopped" in said.err
    assert "fastest is fast chain 3, 1.60x plain decoding" in said.err


def test_what_a_package_says_anew_is_shown_anew(place: Path, tmp_path: Path) -> None:
    path = place / "slow" / "package" / METRICS
    changed = json.loads(path.read_text())
    changed["rows"] = [row(2.2, 2.5, "static 9", guarantee="approximate")]
    path.write_text(json.dumps(changed))
    report.main(words(place, tmp_path / "out"))
    first, *others = told(tmp_path / "out")["rows"]
    assert (first["run"], first["tree"], first["speedup"], first["tau"]) == ("slow", "static 9", 2.2, 2.5)
    assert first["guarantee"] == "approximate" and [one["run"] for one in others] == ["fast", "old"]


def test_all_forms_agree(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, list[float]] = {}
    whole = Axes.barh

    def record(self: Axes, y: Any, width: Any, *args: Any, **kwargs: Any) -> Any:
        drawn[self.get_xlabel().partition(":")[0]] = list(width)
        return whole(self, y, width, *args, **kwargs)

    monkeypatch.setattr(Axes, "barh", record)
    report.main(words(place, tmp_path / "out"))
    rows, shown = told(tmp_path / "out")["rows"], markdown_rows(tmp_path / "out")
    assert drawn == {"speed": [one["speedup"] for one in rows], "tau": [one["tau"] for one in rows]}
    assert len(rows) == len(shown) == 3
    for one, cells in zip(rows, shown, strict=True):
        assert [cells[place] for place in (0, 1, 2, 3, 5)] == [
            *(one["run"], one["drafter"], one["tree"]),
            *(f"{one['speedup']:.3f}", f"{one['tau']:.3f}"),
        ]
        assert cells[4] == "..".join(f"{end:.3f}" for end in one["speedup_interval"])
        assert cells[11] == f"{one['parameters']:,}" and cells[12] == f"{one['bytes'] / 1e6:.3f}"
    assert shown[1][13] == shown[1][14] == "-", "what was not recorded is not made up"
    assert imread(tmp_path / "out" / report.PICTURE).shape[1] > 500
    assert f"]({report.PICTURE})" in (tmp_path / "out" / report.TEXT).read_text()


def test_runs_are_named_in_any_form(place: Path, tmp_path: Path) -> None:
    forms = [
        place,
        f"{place}/*",
        f"[{place / 'slow'}, {place / 'fast' / 'package'},{place / 'old'}]",
        f"[{place}/slow/package,{place},{place / 'slow'}]",
    ]
    found = []
    for number, form in enumerate(forms):
        report.main(words(form, tmp_path / str(number)))
        found.append(told(tmp_path / str(number))["rows"])
    assert all(rows == found[0] for rows in found) and len(found[0]) == 3
    report.main(words(place / "slow", tmp_path / "one"))
    assert [one["run"] for one in told(tmp_path / "one")["rows"]] == ["slow"]


def test_names_tell_runs_apart(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "fast", place / "more" / "slow")
    report.main(words(f"[{place / 'slow'},{place / 'more' / 'slow'}]", tmp_path / "out"))
    assert [one["run"] for one in told(tmp_path / "out")["rows"]] == ["more/slow", "runs/slow"]


def settings(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda metrics: metrics["settings"].update(changes)


def in_rows(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda metrics: [one.update(changes) for one in metrics["rows"]]


UNLIKE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "seed": (settings(seed=3), r"seed \(3, there 0\)"),
    "limit": (settings(max_new_tokens=64), r"max_new_tokens \(64, there 16\)"),
    "split": (settings(split="train"), r"split \(train, there held_out\)"),
    "prompts": (settings(prompts_digest="other"), r"prompts_digest \(other, there 0123456789abcdef\)"),
    "unknown prompts": (lambda m: m["settings"].pop("prompts_digest"), r"prompts_digest \(not recorded, there 0123"),
    "dtype": (settings(target_dtype="bfloat16"), r"target_dtype \(bfloat16, there float32\)"),
    "threads": (settings(threads=2, seed=1), r"seed \(1, there 0\), threads \(2, there 1\)"),
    "another set": (
        lambda m: m["settings"].pop("prompts_digest"),
        r"prompts_digest \(not recorded, of talk, there 0123456789abcdef\)",
    ),
    "a setting more": (settings(patience=1), r"patience \(1, there not recorded\)"),
    "count": (in_rows(prompts=7), r"prompts_of_row \(7, there 2\)"),
    "kind": (in_rows(measured="acceptance"), r"measured_for \(acceptance, there speed\)"),
    "policy": (in_rows(top_p=0.9), r"top_p \(0\.9, there 1\.0\)"),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_unlike_measurements_are_not_put_into_one_table(
    name: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, difference = UNLIKE[name]
    path = place / "slow" / "package" / METRICS
    metrics = json.loads(path.read_text())
    change(metrics)
    if name == "another set":
        edit_config(path.parent, lambda config: config["training"]["config"].update(data={"path": "sets/talk"}))
    path.write_text(json.dumps(metrics))
    said = refusal(capsys, words(place, tmp_path / "out"))
    assert re.search(f"not measured alike: slow differs from fast in {difference}", said), said
    assert "measure=true" in said and "old differs" not in said
    assert not (tmp_path / "out").exists()


def test_a_temperature_that_was_not_measured(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, words(place, tmp_path / "out", "temperature=1"))
    assert "3 of 3 packages" in said and "nothing measured at temperature 1, only at 0: measure=true" in said


def test_a_setting_without_effect_is_refused(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for idle in ("max_new_tokens=8", "target=tiny", "columns.prompt=x", "drafter@baseline=suffix", "baseline=null"):
        said = refusal(capsys, words(place, tmp_path / "out", idle))
        assert said.startswith(f"drafttrain.report: {idle}: without measure=true nothing is measured")


# --- what cannot be used -------------------------------------------------------------------------------------------------


def edit_config(package: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((package / CONFIG).read_text())
    edit(config)
    (package / CONFIG).write_text(json.dumps(config))


def edit_rows(package: Path, **changes: Any) -> None:
    metrics = json.loads((package / METRICS).read_text())
    in_rows(**changes)(metrics)
    (package / METRICS).write_text(json.dumps(metrics))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str, bool]] = {
    "config cut short": (lambda p: (p / CONFIG).write_text('{"format": 1'), r"config\.json cannot be read", True),
    "no weights": (lambda p: (p / TENSORS).unlink(), r"lacks drafter\.safetensors", True),
    "nothing in it": (lambda p: [path.unlink() for path in p.iterdir() if path.is_file()], "lacks config.json", True),
    "a pickle": (lambda p: (p / "x.bin").write_bytes(b""), "x.bin: such files can run code", True),
    "a foreign class": (lambda p: edit_config(p, lambda c: c["drafter"].update(_target_="os.system")), "'os.system'", True),
    "another target": (
        lambda p: edit_config(p, lambda c: c["target"]["fingerprint"].update(weights="0")),
        r"belongs to another target \(weights 0 there, .*The first of them",
        True,
    ),
    "half a fingerprint": (
        lambda p: edit_config(p, lambda c: c["target"]["fingerprint"].pop("config")),
        "fingerprint lacks config",
        True,
    ),
    "metrics cut short": (lambda p: (p / METRICS).write_text('{"rows": ['), r"metrics\.json cannot be read", False),
    "no metrics": (lambda p: (p / METRICS).unlink(), r"metrics\.json is missing", False),
    "metrics of another form": (lambda p: (p / METRICS).write_text("[1]"), "is not of the form", False),
    "nothing measured": (lambda p: (p / METRICS).write_text('{"rows": []}'), "nothing measured at temperature 0:", False),
    "not a number": (lambda p: (p / METRICS).write_text('{"rows": [{"tau": NaN}]}'), "NaN is not a number", False),
    "a wordy tau": (lambda p: edit_rows(p, tau="high"), "tau of a row is 'high', needs a number", False),
    "half an interval": (lambda p: edit_rows(p, tau_interval=[1.0]), "tau_interval of a row .* needs two numbers", False),
    "half the counts": (lambda p: edit_rows(p, accept_counts=[[1, 2]]), "needs two counts for every rate", False),
}
"""Each with whether it matters where everything is measured again."""


@pytest.mark.parametrize("name", DAMAGE)
def test_one_bad_package_among_good_ones_is_named(
    name: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_given: Any, **_settings: Any) -> Any:
        raise AssertionError("a target was loaded")

    monkeypatch.setattr(report, "build", never)
    damage, message, always = DAMAGE[name]
    damage(place / "slow" / "package")
    for measure in ("measure=false", "measure=true") if always else ("measure=false",):
        said = refusal(capsys, words(place, tmp_path / "out", measure))
        assert re.search(message, said) and str(place / "slow") in said, said
        assert "1 of 3 packages cannot be used" in said and str(place / "old") not in said
    assert not (tmp_path / "out").exists()


BAD: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "nothing there": (lambda p: [f"runs={p / 'nowhere'}"], "nowhere does not exist"),
    "one of a list": (lambda p: [f"runs=[{p / 'fast'},{p / 'nowhere'}]"], "nowhere does not exist"),
    "a file": (lambda p: [f"runs={p / 'notes.txt'}"], r"notes\.txt is a file"),
    "no match": (lambda p: [f"runs={p}/x*"], "no folder has such a name"),
    "a run without a package": (lambda p: [f"runs={p / 'stopped'}"], "holds no package"),
    "an empty list": (lambda p: ["runs=[]"], "runs is empty"),
    "a folder in use": (lambda p: [f"run_dir={p}"], "already holds"),
    "misspelt": (lambda p: ["max_new_token=3"], "max_new_tokens"),
    "half a measure": (lambda p: ["measure=maybe"], "measure=maybe: give true or false"),
    "no tokens": (lambda p: ["measure=true", "max_new_tokens=0"], "at least 1"),
    "half a limit": (lambda p: ["measure=true", "limit=1.5"], "limit=1.5"),
    "no trees": (lambda p: ["measure=true", "trees=[]"], "at least one tree"),
    "one tree": (lambda p: ["measure=true", "trees=4"], "needs a list"),
    "a tree of nothing": (lambda p: ["measure=true", "trees=[0]"], "0 drafts nothing"),
    "an unknown tree": (lambda p: ["measure=true", "trees=[octopus]"], "'octopus' is not known"),
    "an unknown baseline": (lambda p: ["measure=true", "drafter@baseline=octopus"], "octopus"),
    "a baseline to be trained": (lambda p: ["measure=true", "drafter@baseline=eagle1"], "Eagle1 has to be trained"),
    "a baseline by its name": (lambda p: ["measure=true", "baseline=ngram"], "give baseline=null for none, or drafter@"),
    "a baseline of a package": (lambda p: ["measure=true", "baseline_tree=package"], "the baseline has no package"),
    "an unknown dtype": (lambda p: ["measure=true", "dtype=foo"], "dtype=foo"),
    "a seed of words": (lambda p: ["measure=true", "seed=x"], "seed=x"),
    "a cold temperature": (lambda p: ["measure=true", "temperature=-1"], "temperature is -1"),
    "prompts missing": (lambda p: ["measure=true", "prompts=nowhere.jsonl"], "does not exist"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name: str, original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, message = BAD[name]
    given = change(original)
    if not any(word.startswith("runs=") for word in given):
        given = [f"runs={original}", *given]
    if not any(word.startswith("run_dir=") for word in given):
        given.append(f"run_dir={tmp_path / 'out'}")
    said = refusal(capsys, given)
    assert re.search(message, said), said
    assert not (tmp_path / "out").exists()


def test_a_first_package_without_a_whole_fingerprint(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_config(place / "fast" / "package", lambda config: config["target"]["fingerprint"].pop("weights"))
    said = refusal(capsys, words(place, tmp_path / "out"))
    assert "1 of 3 packages" in said and "fast/package: its target fingerprint lacks weights" in said


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_nothing_is_half_written(
    error: type[BaseException], original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_given: Any, **_settings: Any) -> Any:
        raise error

    monkeypatch.setattr(report, "comparison", fails)
    with pytest.raises((SystemExit, ZeroDivisionError)):
        report.main(words(original, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# --- measured here -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def field(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, and packages of a drafter that knows them, of one that does not, and of one with a tuned target."""
    folder = tmp_path_factory.mktemp("field")
    write_tiny_set(target, folder / "set", rows=8)
    prompts = read_set(folder / "set").prompts()
    packed(folder / "runs" / "knows" / "package", overfitted(target, prompts[:2], steps=40, tokens=16), target)
    torch.manual_seed(0)
    # Measured otherwise, and with a plan for sampling: neither matters here.
    plan = Plan(Tree.chain(2), Policy(1.0), sampled=True, rule="block")
    metrics = {"settings": {"seed": 5}, "rows": [row(3.0, 3.0)]}
    packed(folder / "runs" / "guesses" / "package", Eagle1(target), target, plan=plan, metrics=metrics)
    second = tuned(target, made(target))
    packed(folder / "runs" / "tuned" / "package", Medusa(second, heads=2).eval(), second, plan=Plan(Tree.expansion([2, 1])))
    return folder


def again(field: Path, out: Path, *more: str) -> list[str]:
    few = ("measure=true", "target=tiny", f"prompts={field / 'set'}", "limit=2", "max_new_tokens=12", "dtype=float32")
    return words(field / "runs", out, *few, *more)


def test_measuring_again_puts_all_on_the_same_prompts(
    field: Path, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report.main(again(field, tmp_path / "out", "trees=[package,1]"))
    found = told(tmp_path / "out")
    rows = found["rows"]
    assert sorted((one["run"], one["tree"], one["rule"]) for one in rows) == [
        ("baseline", "chain 3", "greedy"),
        *(("guesses", "chain 1", "greedy"), ("guesses", "chain 2", "greedy")),
        *(("knows", "chain 1", "greedy"), ("knows", "chain 4", "greedy")),
        *(("tuned", "chain 1", "greedy"), ("tuned", "static 4", "greedy")),
    ]
    assert [one["speedup"] for one in rows] == sorted((one["speedup"] for one in rows), reverse=True)
    prompts = read_set(field / "set").prompts(2)
    assert found["settings"]["prompts_digest"] == digest_of(prompts) and found["settings"]["prompt_count"] == 2
    assert all(one["prompts"] == one["speed_prompts"] == one["same_as_plain"] == 2 for one in rows)
    assert {one["run"]: one["guarantee"] for one in rows} == {
        **dict.fromkeys(("baseline", "guesses", "knows"), "greedy"),
        "tuned": f"greedy{TUNED}",
    }
    # One plain decoding for all that share a target, another one for the tuned one.
    assert len({one["plain_tokens_per_second"] for one in rows if one["run"] != "tuned"}) == 1
    assert len({one["plain_tokens_per_second"] for one in rows}) == 2
    mine = next(one for one in rows if one["run"] == "knows" and one["tree"] == "chain 4")
    speculator = drafttrain.load(field / "runs" / "knows" / "package", target, dtype="float32")
    alone = speculator.measure_acceptance(prompts, Plan(Tree.chain(4)), max_new_tokens=12)
    assert mine["tau"] == alone.tally.tau and mine["tau"] > 1.2
    assert mine["accept_counts"] == alone.row()["accept_counts"] and mine["rounds"] == alone.tally.rounds
    assert (mine["training_seconds"], mine["bytes"]) == (None, size_of(field / "runs" / "knows" / "package"))
    ground = next(one for one in rows if one["run"] == "baseline")
    assert (ground["drafter"], ground["parameters"], ground["bytes"]) == ("NGram", 0, None)
    assert [cells[0] for cells in markdown_rows(tmp_path / "out")] == [one["run"] for one in rows]
    said = capsys.readouterr()
    assert "prompts timed  2 prompts" in said.err and "times 2 prompts, each plainly and in 7 other ways" in said.err


def test_measuring_again_with_sampling_and_without_a_baseline(field: Path, tmp_path: Path) -> None:
    packages = f"[{field / 'runs' / 'knows'},{field / 'runs' / 'guesses'}]"
    more = ("temperature=1", "baseline=null", "limit=1", f"runs={packages}")
    report.main([*again(field, tmp_path / "out")[1:], *more])
    rows = told(tmp_path / "out")["rows"]
    found = {one["run"]: (one["rule"], one["guarantee"], one["same_as_plain"]) for one in rows}
    assert found == {"knows": ("ratio", "distribution", None), "guesses": ("block", "distribution", None)}


def test_what_cannot_be_loaded_is_refused_before_anything_is_measured(
    field: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_given: Any, **_settings: Any) -> Any:
        raise AssertionError("measured")

    monkeypatch.setattr(report, "race", never)
    said = refusal(capsys, again(field, tmp_path / "out", "target.seed=1"))
    assert "3 of 3 packages cannot be used" in said and said.count("belongs to another target") == 3
    copy = Path(shutil.copytree(field / "runs", tmp_path / "runs"))
    (copy / "guesses" / "package" / TENSORS).write_bytes(b"\x80\x04")
    said = refusal(capsys, [f"runs={copy}", *again(field, tmp_path / "out")[1:]])
    assert "1 of 3 packages cannot be used" in said and str(copy / "guesses" / "package" / TENSORS) in said
    said = refusal(capsys, again(field, tmp_path / "out", "baseline_tree=dynamic:3x2x4"))
    assert "baseline_tree=dynamic:3x2x4 is a Dynamic, NGram can fill: Tree" in said
    assert not (tmp_path / "out").exists()
