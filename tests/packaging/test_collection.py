"""Packages side by side: found in any form, the bad one of several named, and nothing compared
that is not equal."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafttrain.errors import InputError
from drafttrain.packaging.collection import (
    Entry,
    fastest_row,
    find_packages,
    measured_alike,
    names_of,
    read_entries,
    with_rows,
)
from drafttrain.packaging.manifest import (
    CONFIG,
    METRICS,
    TENSORS,
    parameter_count,
    read_config,
    read_metrics,
    training_of,
)
from drafttrain.packaging.writing import size_of
from drafttrain.target import load
from tests.messages import said
from tests.packaging.measured import FAST, SETTINGS, SLOW, TRAINING, row, write_runs


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_runs(load.tiny(), tmp_path_factory.mktemp("collection") / "runs")


@pytest.fixture
def place(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "runs"))


def found(*runs: Any) -> list[Path]:
    return find_packages(map(str, runs), lambda text: None)


# --- found ----------------------------------------------------------------------------------------


def test_packages_are_found_in_any_form(original: Path) -> None:
    lines: list[str] = []
    packages = [original / name / "package" for name in ("fast", "old", "slow")]
    assert find_packages([str(original)], lines.append) == packages
    assert lines == [f"{original}: without a package, left out: stopped"]
    assert found(f"{original}/*") == packages
    assert found(*packages) == found(*(package.parent for package in packages)) == packages
    assert found(original / "slow" / "package", original, original / "slow") == [
        packages[2],
        *packages[:2],
    ]
    assert found(f"{original}/[fs]*") == [packages[0], packages[2]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere", "/nowhere " + said("packaging.not_exist")),
        ("notes.txt", r"notes\.txt " + said("packaging.is_file")),
        ("x*", said("packaging.no_such_name")),
        ("stopped", r"stopped " + said("packaging.no_package_inside") + r".*<run>/package"),
        ("st*", said("packaging.no_package_inside")),
    ],
)
def test_folders_without_a_package(given: str, message: str, original: Path) -> None:
    with pytest.raises(InputError, match=message):
        found(original / "fast", original / given)


def test_an_impossible_path() -> None:
    with pytest.raises(InputError, match="runs=~nobody-of-that-name/x"):
        found("~nobody-of-that-name/x")


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    paths = [
        tmp_path / "a" / "one" / "package",
        tmp_path / "b" / "one",
        tmp_path / "b" / "two" / "package",
    ]
    assert names_of(paths) == ["a/one", "b/one", "b/two"]
    assert names_of(paths[1:]) == ["one", "two"] and names_of([]) == []
    (odd,) = names_of([tmp_path / os.fsdecode(b"caf\xe9")])
    assert odd == "caf?", "no report could be written with a name that is no UTF-8"


# --- read -----------------------------------------------------------------------------------------


def test_entries_say_what_a_drafter_costs(original: Path) -> None:
    fast, old, slow = read_entries(found(original), measured=True)
    config = read_config(original / "slow" / "package")
    assert slow.facts() == {
        "run": "slow",
        "drafter": "Eagle1",
        "parameters": config["shape"]["parameters"],
        "bytes": size_of(original / "slow" / "package"),
        "training_seconds": 60.0,
        "supervised_tokens": 5000,
        "begun_from": "first",
    }
    costs = old.facts()
    assert (costs["training_seconds"], costs["supervised_tokens"], costs["begun_from"]) == (
        None,
        None,
        None,
    )
    costs = fast.facts()
    assert (
        costs["drafter"],
        costs["parameters"],
        costs["training_seconds"],
        costs["supervised_tokens"],
    ) == ("NGram", 0, 0.0, 0)
    assert fastest_row(slow, 0.0) == SLOW[2] and fastest_row(fast, 0) == FAST[0]
    assert [entry.rows for entry in read_entries(found(original), measured=False)] == [[], [], []]


def test_costs_that_were_not_recorded_are_not_made_up(original: Path) -> None:
    config = read_config(original / "slow" / "package")
    for given, wanted in (
        (TRAINING, (60.0, 5000)),
        ({"seconds": 100, "supervised_tokens_seen": 5000}, (100.0, 5000)),
        ({"seconds": "long", "supervised_tokens_seen": -1}, (None, None)),
        ({"seconds": 10**400}, (None, None)),
        ({}, (None, None)),
        (None, (None, None)),
        (
            {
                "members": [TRAINING, {"seconds": 3, "supervised_tokens_seen": 7}],
                "marking": [TRAINING],
            },
            (123.0, 10007),
        ),
        ({"members": [TRAINING, {"seconds": 3}]}, (63.0, None)),
        ({"members": [TRAINING, "fast"]}, (None, None)),
        ({"members": []}, (None, None)),
    ):
        assert training_of({**config, "training": {"training": given}}) == wanted
    assert training_of({**config, "training": {}}) == (None, None)
    copied = {
        "drafter": {"_target_": "drafttrain.drafter.ngram.NGram"},
        "shape": {"parameters": 0},
        "training": {},
    }
    together = {
        "drafter": {"_target_": "drafttrain.drafter.ensemble.Ensemble"},
        "shape": {"parameters": 5},
        "training": {},
    }
    searched = {**copied, "training": {"training": {"search_seconds": 7.5, "trials": 3}}}
    assert training_of(searched) == (7.5, 0)
    assert training_of(copied) == (0.0, 0) and training_of(together) == (None, None), (
        "its members were trained, elsewhere"
    )
    assert parameter_count({"shape": {"parameters": 7}, "adapter": {"parameters": 3}}) == 10
    assert parameter_count({"shape": {"parameters": 7}, "adapter": {"parameters": "many"}}) is None


def edit_config(package: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((package / CONFIG).read_text())
    edit(config)
    (package / CONFIG).write_text(json.dumps(config))


def edit_rows(package: Path, **changes: Any) -> None:
    metrics = json.loads((package / METRICS).read_text())
    for one in metrics["rows"]:
        one |= changes
    (package / METRICS).write_text(json.dumps(metrics))


NODE = {"parent": -1, "kept": 1, "offered": 2}
KIND = {"category": "maths", "prompts": 1, "rounds": 2, "tau": None, "tau_interval": None}
DAMAGE: dict[str, tuple[Callable[[Path], Any], str, bool]] = {
    "config cut short": (
        lambda p: (p / CONFIG).write_text('{"format": 1'),
        r"config\.json " + said("packaging.unreadable"),
        True,
    ),
    "no weights": (
        lambda p: (p / TENSORS).unlink(),
        said("packaging.lacks") + r" drafter\.safetensors",
        True,
    ),
    "nothing in it": (
        lambda p: [path.unlink() for path in p.iterdir() if path.is_file()],
        said("packaging.lacks") + " config.json",
        True,
    ),
    "a pickle": (
        lambda p: (p / "x.bin").write_bytes(b""),
        r"x\.bin.*" + said("packaging.only_safetensors"),
        True,
    ),
    "a foreign class": (
        lambda p: edit_config(p, lambda c: c["drafter"].update(_target_="os.system")),
        "'os.system'",
        True,
    ),
    "another target": (
        lambda p: edit_config(p, lambda c: c["target"]["fingerprint"].update(weights="0")),
        said("packaging.another_target") + r" \(weights 0 there, .*\S*fast",
        True,
    ),
    "half a fingerprint": (
        lambda p: edit_config(p, lambda c: c["target"]["fingerprint"].pop("config")),
        said("packaging.no_fingerprint") + " config",
        True,
    ),
    "metrics cut short": (
        lambda p: (p / METRICS).write_text('{"rows": ['),
        r"metrics\.json " + said("packaging.unreadable"),
        False,
    ),
    "no metrics": (
        lambda p: (p / METRICS).unlink(),
        r"metrics\.json " + said("packaging.missing_file"),
        False,
    ),
    "metrics of another form": (
        lambda p: (p / METRICS).write_text("[1]"),
        said("packaging.of_another_form"),
        False,
    ),
    "not a number": (
        lambda p: (p / METRICS).write_text('{"rows": [{"tau": NaN}]}'),
        "NaN " + said("packaging.not_a_number"),
        False,
    ),
    "a wordy tau": (lambda p: edit_rows(p, tau="high"), "tau of a row is 'high'", False),
    "half a tau": (lambda p: edit_rows(p, tau=10**400), "tau of a row is '1000", False),
    "rounds without end": (lambda p: edit_rows(p, rounds=10**400), "rounds of a row is", False),
    "hits without end": (
        lambda p: edit_rows(p, node_counts=[{**NODE, "kept": 10**400}]),
        "node_counts of a row is",
        False,
    ),
    "half of those timed": (
        lambda p: edit_rows(p, speed_prompts="x"),
        "speed_prompts of a row is 'x'",
        False,
    ),
    "a gap in words": (
        lambda p: edit_rows(p, tau_behind_best_interval="xy"),
        "tau_behind_best_interval of a row is",
        False,
    ),
    "half a character": (
        lambda p: edit_rows(p, label="\ud800"),
        r"metrics\.json holds " + said("packaging.half_character") + r" \('.ud800'\)",
        False,
    ),
    "half a character in a name": (
        lambda p: edit_config(p, lambda c: c["target"].update(name="\udcff")),
        said("packaging.half_character"),
        True,
    ),
    "half an interval": (
        lambda p: edit_rows(p, tau_interval=[1.0]),
        "tau_interval of a row is",
        False,
    ),
    "half a kind": (
        lambda p: edit_rows(p, by_category=[{"category": "maths", "prompts": 1}]),
        "by_category of a row is",
        False,
    ),
    "a kind twice": (
        lambda p: edit_rows(p, by_category=[KIND, KIND]),
        "by_category of a row is",
        False,
    ),
    "a kind with half a prompt": (
        lambda p: edit_rows(p, by_category=[{**KIND, "prompts": 0.5}]),
        "by_category of a row is",
        False,
    ),
    "a kind with a wordy tau": (
        lambda p: edit_rows(p, by_category=[{**KIND, "tau": "x"}]),
        "by_category of a row is",
        False,
    ),
    "half a mean": (
        lambda p: edit_rows(p, tau_prompt_mean_interval=[1.0]),
        "tau_prompt_mean_interval of a row is",
        False,
    ),
    "half the counts": (
        lambda p: edit_rows(p, accept_counts=[[1, 2]]),
        "accept_counts of a row is",
        False,
    ),
    "half the intervals": (
        lambda p: edit_rows(p, accept_at_interval=[None]),
        "accept_at_interval of a row has 1",
        False,
    ),
    "wordy reach": (lambda p: edit_rows(p, reach=["x"]), "reach of a row is", False),
    "lost time": (lambda p: edit_rows(p, seconds={"draft": -1}), " seconds of a row is", False),
    "lost plain time": (
        lambda p: edit_rows(p, plain_seconds=[1]),
        "plain_seconds of a row is",
        False,
    ),
    "half a token": (lambda p: edit_rows(p, tokens=0.5), " tokens of a row is", False),
    "ranks without rates": (
        lambda p: edit_rows(p, rank_rates=[["x"]]),
        "rank_rates of a row is",
        False,
    ),
    "a node below itself": (
        lambda p: edit_rows(p, node_counts=[{**NODE, "parent": 0}]),
        "node_counts of a row is",
        False,
    ),
    "half a node": (
        lambda p: edit_rows(p, node_counts=[{"parent": -1, "kept": 1}]),
        "node_counts of a row is",
        False,
    ),
    "too many nodes": (
        lambda p: edit_rows(p, node_counts=[NODE] * 1025),
        "node_counts of a row is",
        False,
    ),
    "wordy rates": (lambda p: edit_rows(p, accept_at=["x"]), "accept_at of a row is", False),
}
"""Each with whether it matters where nothing measured is read."""
UNREADABLE = ("metrics cut short", "no metrics", "metrics of another form", "not a number")


@pytest.mark.parametrize("name", DAMAGE)
def test_one_bad_package_of_several_is_named(name: str, place: Path) -> None:
    damage, message, always = DAMAGE[name]
    damage(place / "slow" / "package")
    for measured in (True, False):
        if measured or always:
            with pytest.raises(InputError, match=message) as caught:
                read_entries(found(place), measured=measured)
            text = str(caught.value)
            assert "1 of 3 packages" in text
            assert str(place / "slow") in text and str(place / "old") not in text
        else:
            assert len(read_entries(found(place), measured=measured)) == 3
    if name in UNREADABLE:
        assert read_metrics(place / "slow" / "package") == {"settings": {}, "rows": []}


def test_a_first_package_without_a_complete_fingerprint(place: Path) -> None:
    edit_config(
        place / "fast" / "package", lambda config: config["target"]["fingerprint"].pop("weights")
    )
    with pytest.raises(
        InputError,
        match=r"1 of 3 packages .*fast/package.* " + said("packaging.no_fingerprint") + r" weights",
    ):
        read_entries(found(place), measured=True)


def test_a_package_says_which_run_it_belongs_to(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original / "old" / "package", tmp_path / "lone")
    run, lone = read_entries([original / "fast" / "package", tmp_path / "lone"], measured=False)
    assert run.run_folder == (original / "fast").resolve() and lone.run_folder is None
    assert with_rows(run).rows == FAST and with_rows(run).settings == {
        **SETTINGS,
        "drafter_dtype": None,
    }
    more = {
        "node_counts": [NODE],
        "seconds": {"draft": 0.5},
        "tokens": 3,
        "rank_rates": [[0.5, None], None],
    }
    more |= {"reach": [0.5, 0.25, None], "accept_at_interval": [[0.25, 0.75], None, None]}
    edit_rows(tmp_path / "lone", **more)
    assert with_rows(lone).rows[0].items() >= more.items()


def test_rows_of_earlier_forms_have_gaps(place: Path) -> None:
    path = place / "slow" / "package" / METRICS
    given = {"temperature": 0, "nodes": 2, "growth": "chain", "tau": 1.5, "accept_at": [0.5]}
    path.write_text(json.dumps({"rows": [given]}))
    (slow,) = read_entries(found(place / "slow"), measured=True)
    one = fastest_row(slow, 0.0)
    assert (
        one["accept_counts"] == [None]
        and one["speedup"] is None
        and one["tree"] is None
        and one["prompts"] is None
    )


# --- compared -------------------------------------------------------------------------------------


def entry(name: str, settings: dict[str, Any], training: Any = None) -> Entry:
    config = {
        "target": {"name": "t", "fingerprint": {"dtype": "float32"}},
        "training": training or {},
    }
    return Entry(name, Path(name), config, settings, [row(1.0, 1.5)])


def set_of(path: str) -> dict[str, Any]:
    return {"config": {"data": {"path": path}}}


WITHOUT_DIGEST = {name: value for name, value in SETTINGS.items() if name != "prompts_digest"}
UNLIKE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "seed": ({**SETTINGS, "seed": 3}, {}, r"seed \(3, there 0\)"),
    "limit": ({**SETTINGS, "max_new_tokens": 64}, {}, r"max_new_tokens \(64, there 16\)"),
    "split": ({**SETTINGS, "split": "train"}, {}, r"split \(train, there held_out\)"),
    "prompts": (
        {**SETTINGS, "prompts_digest": "x"},
        {},
        r"prompts_digest \(x, there 0123456789abcdef\)",
    ),
    "unknown prompts": (
        WITHOUT_DIGEST,
        {},
        r"prompts_digest \(not recorded, of talk, there 0123456789abcdef\)",
    ),
    "dtype": (
        {**SETTINGS, "target_dtype": "bfloat16"},
        {},
        r"target_dtype \(bfloat16, there float32\)",
    ),
    "two": (
        {**SETTINGS, "threads": 2, "seed": 1},
        {},
        r"seed \(1, there 0\), threads \(2, there 1\)",
    ),
    "a setting more": ({**SETTINGS, "patience": 1}, {}, r"patience \(1, there not recorded\)"),
    "count": (SETTINGS, {"prompts": 7}, r"prompts_of_row \(7, there 2\)"),
    "kind": (SETTINGS, {"measured": "acceptance"}, r"measured_for \(acceptance, there speed\)"),
    "policy": (SETTINGS, {"top_p": 0.9}, r"top_p \(0\.9, there 1\.0\)"),
    "temperature": (SETTINGS, {"temperature": 1.0}, r"temperature \(1\.0, there 0\.0\)"),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_unlike_measurements_are_not_put_into_one_table(name: str) -> None:
    settings, changes, difference = UNLIKE[name]
    entries = [
        entry("a", SETTINGS),
        entry("same", SETTINGS),
        entry("b", settings, set_of("sets/talk")),
    ]
    rows = [row(1.0, 1.5), row(2.0, 2.5), row(1.0, 1.5, **changes)]
    with pytest.raises(InputError) as caught:
        measured_alike(entries, rows)
    text = str(caught.value)
    assert re.search(f"b differs from a in {difference}", text), text
    assert "measure=true" in text and "same differs" not in text


def test_like_measurements_are_compared() -> None:
    """A drafter's dtype and lists may differ; without a digest, prompts are distinguished by the
    set's name."""
    rows = [row(1.0, 1.5), row(2.0, 2.5)]
    own = {"drafter_dtype": "bfloat16", "package": "b", "head_accuracy": [[0.5]]}
    alike = measured_alike([entry("a", SETTINGS), entry("b", {**SETTINGS, **own})], rows)
    assert (
        alike.items()
        >= {"seed": 0, "split": "held_out", "temperature": 0.0, "prompts_of_row": 2}.items()
    )
    old = [
        entry("a", WITHOUT_DIGEST, set_of("here/talk")),
        entry("b", WITHOUT_DIGEST, set_of("there/talk")),
    ]
    assert measured_alike(old, rows)["prompts_digest"] == "not recorded, of talk"
    old[1] = entry("b", WITHOUT_DIGEST, set_of("other"))
    with pytest.raises(InputError, match=r"prompts_digest \(.*of other, .*of talk\)"):
        measured_alike(old, rows)


def test_a_temperature_that_was_not_measured() -> None:
    with pytest.raises(InputError, match=r"temperature 1, only at 0.*measure=true"):
        fastest_row(entry("a", SETTINGS), 1.0)
    with pytest.raises(InputError, match=r"temperature 0: measure=true"):
        fastest_row(Entry("a", Path("a"), {}, {}, []), 0.0)
