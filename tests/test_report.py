"""Drafters side by side: every number is a package's own or measured here, and nothing unequal is
shown as equal."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.image import imread
from omegaconf import DictConfig, OmegaConf

import drafttrain
from drafttrain import report, runs
from drafttrain.data.conversations import read_set
from drafttrain.decoding.conditions import digest_of
from drafttrain.decoding.plan import TUNED, Plan
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.medusa import Medusa
from drafttrain.errors import InputError
from drafttrain.nn.sampling import Policy
from drafttrain.packaging.collection import find_packages, read_entries
from drafttrain.packaging.manifest import METRICS, TENSORS
from drafttrain.packaging.writing import size_of
from drafttrain.reporting.kinds import OVER_ROUNDS
from drafttrain.reporting.page.document import COMPARED
from drafttrain.reporting.rows import MEAN, accepted_cells
from drafttrain.reporting.side_by_side import COLUMNS, fastest_first, tree_title
from drafttrain.target import load
from drafttrain.target.adapter import tuned
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree
from drafttrain.wiring.composing import compose
from tests.drafter import make as drafters
from tests.messages import said
from tests.packaging.made import adapter_of, overfitted, packed
from tests.packaging.measured import FAST, OLD, SETTINGS, SLOW, row, write_runs
from tests.reporting.parsed import check_form
from tests.training.parts import write_tiny_set


@pytest.fixture(scope="module")
def target() -> Target:
    return load.tiny()


@pytest.fixture(scope="module")
def original(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_runs(target, tmp_path_factory.mktemp("report") / "runs")


def words(runs: Any, out: Path, *more: str) -> list[str]:
    return [f"runs={runs}", f"run_dir={out}", *more]


def result_of(out: Path) -> dict[str, Any]:
    found = json.loads((out / report.RESULT).read_text())
    assert sorted(path.name for path in out.iterdir()) == sorted(report.FILES)
    check_page(out, found["rows"])
    return found


def check_page(out: Path, rows: list[dict[str, Any]]) -> None:
    """Every number of the page's shared table is the JSON's, and every run has its part below, in
    the same order."""
    root = check_form((out / report.PAGE).read_text())
    lines = root.one(COMPARED).cells()
    assert len(lines) == len(rows)
    for cells, one in zip(lines, rows, strict=True):
        assert [cells[place].text for place in (0, 1, 2, 16)] == [
            *(one["run"], one["drafter"], tree_title(one), one["guarantee"])
        ]
        assert [cells[place].values() for place in (3, 4, 5, 6, 8)] == [
            [] if one["speedup"] is None else [one["speedup"]],
            one["speedup_interval"] or [],
            *([one["tau"]], one["tau_interval"] or [], [one["accepted_per_round"]]),
        ]
        mean = one.get("tau_prompt_mean")
        assert cells[7].values() == ([] if mean is None else [mean])
        assert cells[9].text == (" ".join(accepted_cells(one)) or "-")
        assert cells[10].values() == [one["prompts"]]
        assert cells[13].values() == ([] if one["bytes"] is None else [one["bytes"] / 1e6])
    assert [node.text for node in root.all("h2")] == [
        "Side by side",
        *dict.fromkeys(one["run"] for one in rows if one["run"] != report.BASELINE),
    ]


def markdown_rows(out: Path) -> list[dict[int, str]]:
    """Cells of the table by column."""
    text, _, _ = (out / report.TEXT).read_text().partition("\n## ")
    lines = [line for line in text.splitlines() if line.startswith("| ")]
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


# --- what the packages say ------------------------------------------------------------------------


def test_all_forms_say_what_the_packages_say(
    original: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: dict[str, list[float]] = {}
    original_barh = Axes.barh

    def record(self: Axes, y: Any, width: Any, *args: Any, **kwargs: Any) -> Any:
        drawn[self.get_xlabel().partition(":")[0]] = list(width)
        return original_barh(self, y, width, *args, **kwargs)

    monkeypatch.setattr(Axes, "barh", record)
    report.main(words(original, tmp_path / "out"))
    found, shown = result_of(tmp_path / "out"), markdown_rows(tmp_path / "out")
    rows = found["rows"]
    assert [(one["run"], one["drafter"], one["tree"]) for one in rows] == [
        ("fast", "NGram", "chain 3"),
        ("old", "Eagle1", "chain 3"),
        ("slow", "Eagle1", "chain 3"),
    ]
    for one, given in zip(rows, (FAST[0], OLD[0], SLOW[2]), strict=True):
        assert {name: one[name] for name in given if name != "label"} == {
            n: v for n, v in given.items() if n != "label"
        }
    assert [one["drafter_dtype"] for one in rows] == [None, None, "float32"]
    assert [one["training_seconds"] for one in rows] == [0.0, None, 60.0]
    assert found["settings"]["seed"] == 0 and found["settings"]["target"] == "tiny-llama"

    assert drawn == {"speed": [one["speedup"] for one in rows], "tau": [one["tau"] for one in rows]}
    assert len(shown) == 3
    for one, cells in zip(rows, shown, strict=True):
        assert [cells[place] for place in (0, 1, 2, 3, 5)] == [
            *(one["run"], one["drafter"], one["tree"]),
            *(f"{one['speedup']:.3f}", f"{one['tau']:.3f}"),
        ]
        assert cells[4] == "..".join(f"{end:.3f}" for end in one["speedup_interval"])
        assert cells[12] == f"{one['parameters']:,}" and cells[13] == f"{one['bytes'] / 1e6:.3f}"
    assert shown[1][14] == shown[1][15] == "-", "what was not recorded is not made up"
    assert imread(tmp_path / "out" / report.PICTURE).shape[1] > 500
    assert f"]({report.PICTURE})" in (tmp_path / "out" / report.TEXT).read_text()
    output = capsys.readouterr()
    assert "1:00, from first" in output.out and "0.500 (10/20) 0.250 (2/8) -" in output.out
    assert "without a package, left out: stopped" in output.err
    assert "fastest is fast chain 3, 1.60x plain decoding" in output.err


def test_what_a_package_says_anew_is_shown_anew(original: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(original, tmp_path / "runs"))
    path = place / "slow" / "package" / METRICS
    changed = json.loads(path.read_text())
    changed["rows"] = [row(2.2, 2.5, "static 9", guarantee="approximate")]
    path.write_text(json.dumps(changed))
    report.main(words(f"[{place}/fast, {place / 'slow' / 'package'}]", tmp_path / "out"))
    first, second = result_of(tmp_path / "out")["rows"]
    assert (first["run"], first["tree"], first["speedup"], first["tau"]) == (
        "slow",
        "static 9",
        2.2,
        2.5,
    )
    assert first["guarantee"] == "approximate" and second["run"] == "fast"


def test_measured_again_by_evaluate_is_shown_as_evaluate_shows_it(
    original: Path, tmp_path: Path
) -> None:
    """evaluation.json has the form of metrics.json: acceptance over all prompts, speed over some,
    gaps; of others less is known."""
    place = Path(shutil.copytree(original, tmp_path / "runs"))
    path = place / "slow" / "package" / METRICS
    evaluated = row(
        1.1,
        1.25,
        prompts=100,
        speed_prompts=8,
        same_as_plain=8,
        tau_behind_best_interval=[0.1, 0.2],
    )
    path.write_text(json.dumps({"settings": SETTINGS, "rows": [evaluated]}))
    report.main(words(place / "slow", tmp_path / "some"))
    (found,) = json.loads((tmp_path / "some" / report.RESULT).read_text())["rows"]
    assert (found["prompts"], found["speed_prompts"]) == (100, 8) and markdown_rows(
        tmp_path / "some"
    )[0][11] == "8/8"
    assert "near-ties" not in (tmp_path / "some" / report.TEXT).read_text()
    path.write_text(
        json.dumps(
            {"settings": SETTINGS, "rows": [{**evaluated, "prompts": None, "speed_prompts": None}]}
        )
    )
    report.main(words(place / "slow", tmp_path / "none"))
    assert markdown_rows(tmp_path / "none")[0][11] == "8/?"


def test_a_refused_report_leaves_nothing(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Path(shutil.copytree(original, tmp_path / "runs"))
    path = place / "slow" / "package" / METRICS
    text = path.read_text()
    path.write_text(text.replace('"seed": 0', '"seed": 3'))
    output = refusal(capsys, words(place, tmp_path / "out"))
    assert "slow differs from fast in seed (3, there 0)" in output and "measure=true" in output
    path.write_text(text[:50])
    output = refusal(capsys, words(place, tmp_path / "out"))
    assert "1 of 3 packages cannot be used" in output and str(path) in output
    assert not (tmp_path / "out").exists()


# --- settings -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base() -> DictConfig:
    return compose("report", ["runs=a", "measure=true"])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "half a measure": ({"measure": "maybe"}, "measure=maybe"),
    "no tokens": ({"max_new_tokens": 0}, "max_new_tokens=0"),
    "half a limit": ({"limit": 1.5}, r"limit=1\.5"),
    "no trees": ({"trees": []}, r"trees=\[\]"),
    "one tree": ({"trees": 4}, "trees=4"),
    "a tree of nothing": ({"trees": [0]}, "trees: 0"),
    "an unknown tree": ({"trees": ["octopus"]}, "tree 'octopus'"),
    "a baseline by its name": ({"baseline": "ngram"}, "baseline=ngram: .*drafter@"),
    "a baseline of a package": ({"baseline_tree": "package"}, "baseline_tree=package"),
    "a baseline of nothing": ({"baseline_tree": 0}, "baseline_tree: 0"),
    "a baseline that is run": ({"baseline": {"_target_": "os.system"}}, "_target_=os.system"),
    "a baseline from nowhere": (
        {"baseline": {"_target_": "drafttrain.nowhere.X"}},
        "_target_=drafttrain.nowhere.X",
    ),
    "an unknown dtype": ({"dtype": "foo"}, "dtype=foo"),
    "a folder in use": ({"run_dir": str(Path(__file__).parent)}, "run_dir="),
    "a seed of words": ({"seed": "x"}, "seed=x"),
    "answers that nothing reads": (
        {"answers": str(Path(__file__).parent), "temperature": 1.0},
        "answers=.* would not be read: .*temperature 0",
    ),
    "a cold temperature": ({"temperature": -1}, "temperature is -1"),
}


def changed(cfg: DictConfig, **changes: Any) -> DictConfig:
    found = cfg.copy()
    for name, value in changes.items():
        found[name] = value
    return found


@pytest.mark.parametrize("name", BAD)
def test_settings_that_mean_nothing_are_refused(name: str, base: DictConfig) -> None:
    assert report.read_settings(base).policy == Policy()
    changes, message = BAD[name]
    with pytest.raises(InputError, match=message):
        report.read_settings(changed(base, **changes))


def test_a_baseline_is_chosen_as_a_drafter_and_needs_no_training(base: DictConfig) -> None:
    assert report.read_settings(changed(base, baseline=None)).baseline is None
    cfg = compose("report", ["runs=a", "measure=true", "drafter@baseline=suffix"])
    assert report.read_settings(cfg).baseline is not None
    with pytest.raises(InputError, match=r"baseline\._target_=.*drafter@baseline=ngram"):
        report.read_settings(
            compose(
                "report",
                ["runs=a", "measure=true", "drafter@baseline=ensemble", "baseline.packages=[a]"],
            )
        )
    with pytest.raises(InputError, match=r"baseline: Eagle1 .*drafter@baseline=ngram"):
        report.read_settings(
            changed(base, baseline={"_target_": "drafttrain.drafter.eagle1.Eagle1"})
        )


def test_a_setting_without_effect_is_refused(
    base: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = (
        "max_new_tokens=8",
        "target=tiny",
        "columns.prompt=x",
        "drafter@baseline=suffix",
        "baseline=null",
    )
    for word in idle:
        monkeypatch.setattr(
            runs,
            "current",
            runs.Invocation("report", ("runs=a", "temperature=1", word, "run_dir=b")),
        )
        with pytest.raises(InputError, match=f"^{re.escape(word)}: .*measure=true"):
            report.read_settings(changed(base, measure=False))
        assert report.read_settings(base).policy == Policy()


def test_runs_are_listed_in_brackets_or_one_is_named() -> None:
    assert report.listed("[a/b, c d ,'e']") == ["a/b", "c d", "e"]
    assert report.listed(" a[0-9]* ") == ["a[0-9]*"] and report.listed(
        OmegaConf.create(["a", "b"])
    ) == ["a", "b"]
    for nothing in ("", "[]", "[ , ]"):
        with pytest.raises(InputError, match=r"^runs is"):
            report.listed(nothing)


def test_nothing_is_half_written(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_given: Any, **_settings: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "comparison", fails)
    with pytest.raises(SystemExit) as stopped:
        report.main(words(original, tmp_path / "out"))
    assert stopped.value.code == 130 and not (tmp_path / "out").exists()


# --- measured here --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def field(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, and packages of a drafter that knows them, of one that does not, and of one
    with a tuned target."""
    folder = tmp_path_factory.mktemp("field")
    write_tiny_set(target, folder / "set", rows=8, categories={0: "maths", 1: "code"})
    prompts = read_set(folder / "set").prompts()
    packed(
        folder / "runs" / "knows" / "package",
        overfitted(target, prompts[:2], steps=40, tokens=16),
        target,
    )
    torch.manual_seed(0)
    # Measured otherwise, and with a plan for sampling: neither matters here.
    plan = Plan(Tree.chain(2), Policy(1.0), sampled=True, rule="block")
    metrics = {"settings": {"seed": 5}, "rows": [row(3.0, 3.0)]}
    packed(
        folder / "runs" / "guesses" / "package",
        drafters.make(Eagle1, target),
        target,
        plan=plan,
        metrics=metrics,
    )
    second = tuned(target, adapter_of(target))
    packed(
        folder / "runs" / "tuned" / "package",
        drafters.make(Medusa, second, heads=2).eval(),
        second,
        plan=Plan(Tree.expansion([2, 1])),
    )
    return folder


def again(field: Path, out: Path, *more: str) -> list[str]:
    few = (
        "measure=true",
        "target=tiny",
        f"prompts={field / 'set'}",
        "limit=2",
        "max_new_tokens=12",
        "dtype=float32",
    )
    return words(field / "runs", out, *few, *more)


def test_measuring_again_puts_all_on_the_same_prompts(
    field: Path, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report.main(again(field, tmp_path / "out", "trees=[package,1]"))
    found = result_of(tmp_path / "out")
    rows = found["rows"]
    assert sorted((one["run"], one["tree"], one["rule"]) for one in rows) == [
        ("baseline", "chain 3", "greedy"),
        *(("guesses", "chain 1", "greedy"), ("guesses", "chain 2", "greedy")),
        *(("knows", "chain 1", "greedy"), ("knows", "chain 4", "greedy")),
        *(("tuned", "chain 1", "greedy"), ("tuned", "static 4", "greedy")),
    ]
    assert [one["speedup"] for one in rows] == sorted(
        (one["speedup"] for one in rows), reverse=True
    )
    prompts = read_set(field / "set").prompts(2)
    assert (
        found["settings"]["prompts_digest"] == digest_of(prompts)
        and found["settings"]["prompt_count"] == 2
    )
    assert all(one["prompts"] == one["speed_prompts"] == one["same_as_plain"] == 2 for one in rows)
    assert {one["run"]: one["guarantee"] for one in rows} == {
        **dict.fromkeys(("baseline", "guesses", "knows"), "greedy"),
        "tuned": f"greedy{TUNED}",
    }
    # One plain decoding for all that share a target, another one for the tuned one.
    assert len({one["plain_tokens_per_second"] for one in rows if one["run"] != "tuned"}) == 1
    assert len({one["plain_tokens_per_second"] for one in rows}) == 2
    best = max(one["tau"] for one in rows)
    assert sorted(one["tau_behind_best"] is None for one in rows) == [False] * 6 + [True]
    assert all(one["tau_behind_best"] in (None, pytest.approx(best - one["tau"])) for one in rows)
    mine = next(one for one in rows if one["run"] == "knows" and one["tree"] == "chain 4")
    speculator = drafttrain.load(field / "runs" / "knows" / "package", target, dtype="float32")
    own = speculator.measure_acceptance(prompts, Plan(Tree.chain(4)), max_new_tokens=12)
    assert mine["tau"] == own.tally.tau and mine["tau"] > 1.2
    assert (
        mine["accept_counts"] == own.row()["accept_counts"] and mine["rounds"] == own.tally.rounds
    )
    assert (mine["training_seconds"], mine["bytes"]) == (
        None,
        size_of(field / "runs" / "knows" / "package"),
    )
    kinds = [(one["category"], one["prompts"], one["tau"]) for one in mine["by_category"]]
    each = dict(zip(("maths", "code"), own.tallies, strict=True))
    assert kinds == [("code", 1, each["code"].tau), ("maths", 1, each["maths"].tau)]
    part = (tmp_path / "out" / report.TEXT).read_text().partition("\n## ")[2]
    lines = [line.split(" | ") for line in part.splitlines() if line.startswith("| ")]
    assert lines[0][2::2] == [one["label"] for one in fastest_first(rows)]
    assert [line[0] for line in lines[2:]] == [
        "| code",
        "| maths",
        f"| {OVER_ROUNDS}",
        "| all, " + MEAN,
    ]
    place = lines[0].index(mine["label"])
    assert lines[3][place] == f"{each['maths'].tau:.3f}" and lines[4][place] == f"{mine['tau']:.3f}"
    page = (tmp_path / "out" / report.PAGE).read_text()
    assert page.count("By kind of task") == 1 and "code (1)" in page
    ground = next(one for one in rows if one["run"] == "baseline")
    assert (ground["drafter"], ground["parameters"], ground["bytes"]) == ("NGram", 0, None)
    assert [cells[0] for cells in markdown_rows(tmp_path / "out")] == [one["run"] for one in rows]
    output = capsys.readouterr()
    assert "tau is highest with knows chain 4; lower, on the same prompts: " in output.err
    assert (
        "prompts timed  2 prompts" in output.err
        and "times 2 prompts, each plainly and in 7 other ways" in output.err
    )


def test_measuring_again_with_sampling_and_without_a_baseline(field: Path, tmp_path: Path) -> None:
    packages = f"[{field / 'runs' / 'knows'},{field / 'runs' / 'guesses'}]"
    more = ("temperature=1", "baseline=null", "limit=1")
    report.main([f"runs={packages}", *again(field, tmp_path / "out")[1:], *more])
    rows = result_of(tmp_path / "out")["rows"]
    found = {one["run"]: (one["rule"], one["guarantee"], one["same_as_plain"]) for one in rows}
    assert found == {
        "knows": ("block", "distribution", None),
        "guesses": ("block", "distribution", None),
    }


def test_what_cannot_be_loaded_is_refused_before_anything_is_measured(
    field: Path, tmp_path: Path
) -> None:
    """`prepare` refuses them, before a folder is made."""
    tiny = compose("report", ["runs=a", "measure=true", "target=tiny"])
    cfg = changed(tiny, prompts=str(field / "set"), dtype="float32", limit=1)

    def prepare(place: Path, cfg: DictConfig) -> report.Contest:
        entries = read_entries(find_packages([str(place)], print), measured=False)
        return report.prepare(report.read_settings(cfg), entries)

    assert len(prepare(field / "runs", cfg).entrants) == 4
    cfg.target.seed = 1
    with pytest.raises(
        InputError, match=r"3 of 3 packages " + ("(?s:.*)" + said("packaging.another_target")) * 3
    ):
        prepare(field / "runs", cfg)
    cfg.target.seed = 0
    copy = Path(shutil.copytree(field / "runs", tmp_path / "runs"))
    (copy / "guesses" / "package" / TENSORS).write_bytes(b"\x80\x04")
    with pytest.raises(
        InputError, match=f"1 of 3 packages .*{copy}/guesses/package/drafter.safetensors"
    ):
        prepare(copy, cfg)
    with pytest.raises(InputError, match="baseline_tree=dynamic:3x2x4 is"):
        prepare(field / "runs", changed(cfg, baseline_tree="dynamic:3x2x4"))
    with pytest.raises(InputError, match=r"prompts=nowhere\.jsonl"):
        prepare(field / "runs", changed(cfg, prompts="nowhere.jsonl"))
