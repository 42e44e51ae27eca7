"""The page: well formed, loads and runs nothing, shows hostile text as text, has the recorded
numbers, and makes none up."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from drafttrain.packaging.collection import read_entries
from drafttrain.packaging.manifest import METRICS
from drafttrain.reporting.page import learning
from drafttrain.reporting.page.document import COMPARED, page, title_of
from drafttrain.reporting.records import NOTED, Laps, read_record, write_noted
from drafttrain.target import load
from tests.packaging.measured import OLD, write_runs
from tests.reporting.parsed import Node, check_form, parsed
from tests.reporting.recorded import EVIL, NAME, ROWS, SECONDS, TREE, record_of, recorded


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("page"), load.tiny())


@pytest.fixture(scope="module")
def text(run: Path) -> str:
    record = record_of(run)
    return page(title_of([record]), [record])


@pytest.fixture(scope="module")
def root(text: str) -> Node:
    return parsed(text)


def test_it_is_well_formed_and_loads_nothing(text: str, root: Node) -> None:
    check_form(text)
    assert len(root.all("svg")) > 8 and len(root.all("h1")) == 1
    assert {node.attributes["name"] for node in root.all("meta") if "name" in node.attributes} == {
        "viewport",
        "color-scheme",
    }


def test_hostile_text_is_text(root: Node) -> None:
    assert [node.text for node in root.all("h2")] == [NAME]
    (prompt,) = root.classed("prompt")
    assert prompt.text == f"user\n{EVIL}" and prompt.attributes["dir"] == "auto"
    (answer,) = root.classed("answer")
    assert answer.text == f"Sure, <b>␛[31m␀{EVIL} a b \ufffd c"
    assert f"python -m drafttrain.fit {EVIL}" in [node.text for node in root.all("code")]
    assert any(f"static {EVIL}" == node.text for node in root.all("h4"))
    assert any(EVIL in node.text for node in root.all("pre"))
    assert f"odd {EVIL}" in root.one("run-1").all("dl")[0].text


def test_accepted_runs_are_marked_by_their_length(root: Node) -> None:
    (answer,) = root.classed("answer")
    assert [
        (mark.attributes["class"], mark.attributes["title"]) for mark in answer.all("mark")
    ] == [("r2", "2 accepted"), ("r4", "5 accepted")]
    assert [[token.text for token in mark.all("span")] for mark in answer.all("mark")] == [
        [", <b>", "␛[31m␀"],
        [" a", " b", " \ufffd", " c"],
    ]
    (note,) = root.one("run-1-answers").classed("note")
    assert (
        note.text
        == "10 tokens in 3 passes of the target, 7 of them accepted drafts; tau 4.50; ended by "
        "stop."
    )


def test_every_number_of_the_table_is_the_recorded_one(run: Path, root: Node) -> None:
    rows = json.loads((run / "package" / METRICS).read_text())["rows"]
    assert rows == ROWS
    (table,) = root.one("run-1-measured").all("table")
    assert len(table.cells()) == len(rows)
    for row, cells in zip(rows, table.cells(), strict=True):
        assert cells[0].text == row["label"]
        shown = [cell.values() for cell in cells]
        assert shown[1:3] == [[row["nodes"]], [row["temperature"]]]
        assert shown[4:6] == [[row["tau"]], row["tau_interval"]]
        mean = row.get("tau_prompt_mean")
        assert shown[6:8] == ([[mean], row["tau_prompt_mean_interval"]] if mean else [[], []])
        assert shown[8] == [row["accepted_per_round"]]
        if row["speedup"] is not None:
            assert shown[9:11] == [[row["speedup"]], row["speedup_interval"]]
        else:
            assert [cell.text for cell in cells[9:11]] == ["-", "-"]
        assert shown[11:13] == [[row["tokens_per_second"]], [row["plain_tokens_per_second"]]]
        assert shown[14:16] == [[row["prompts"]], [row["rounds"]]]
        assert [cell.text for cell in (*cells[4:6], cells[8])] == [
            f"{row['tau']:.3f}",
            "..".join(f"{end:.3f}" for end in row["tau_interval"]),
            f"{row['accepted_per_round']:.3f}",
        ]
    (table,) = root.one("run-1-positions").all("table")
    found = {(cells[0].text, int(cells[1].text)): cells for cells in table.cells()}
    for row in rows:
        for k, (rate, counts) in enumerate(
            zip(row["accept_at"], row["accept_counts"], strict=True), start=1
        ):
            cells = found[row["label"], k]
            assert cells[2].values() == ([] if rate is None else [rate]) and [
                cells[4].values(),
                cells[5].values(),
            ] == [[count] for count in counts]
    assert (
        found[f"static {EVIL}", 1][3].values() == [0.5, 0.75]
        and found[f"static {EVIL}", 2][3].text == "-"
    )
    assert found["chain_4", 1][3].text == "0.299..0.701", "Wilson's interval of 10 in 20"


def test_runs_of_an_earlier_version_have_another_name_for_forced_tau() -> None:
    rows = [{"step": 1.0, "val/tau": 1.2, "sim/tau": 1.5}]
    shown = str(learning._of_one(rows))
    assert "sim/forced_tau" in shown and "sim/tau" not in shown and "1.500" in shown


def test_learning_curves_hold_what_was_logged(root: Node) -> None:
    part = root.one("run-1-learning")
    assert [node.text for node in part.all("h4")] == ["tau", "accept@k", "loss"]
    keys = [[item.text.strip() for item in key.all("li")] for key in part.classed("legend")]
    assert keys == [
        ["val/tau", "sim/forced_tau"],
        ["accept@1", "accept@2", "accept@3"],
        ["train/loss", "sim/loss"],
    ]
    (table,) = part.all("table")
    assert [[cell.text for cell in cells] for cells in table.cells()] == [
        ["10", "1.250", "-", "-", "400", "1.500", "0.500 (100)", "0.250 (200)", "0.167 (300)"],
        ["20", "1.500", "-", "-", "400", "1.500", "0.500 (100)", "0.250 (200)", "0.167 (300)"],
    ]


def test_trees_show_the_hits_of_every_node(root: Node) -> None:
    part = root.one("run-1-trees")
    (svg,) = part.all("svg")
    assert [node.text for node in svg.classed("rate")] == [
        "40%",
        "20%",
        "0%",
        "25%",
        "10%",
        "25%",
        "–",
    ]
    titles = [node.all("title")[0].text for node in svg.all("circle")]
    assert (
        titles[3]
        == f"child 1 at position 2: accepted in {TREE[3]['kept']} of {TREE[3]['offered']} rounds, "
        f"25.0%"
    )
    assert titles[6] == "child 1 at position 2: its parent was never accepted"
    assert (
        "Another tree in every round, so that no node can be followed: dynamic_24 timed."
        in part.text
    )


def test_time_is_shown_by_stage(root: Node) -> None:
    part = root.one("run-1-time")
    run, token = (
        part.all("svg")[0],
        [node for node in part.all("svg") if "viewbox" in node.attributes and node.all("text")][1],
    )
    titles = [node.all("title")[0].text for node in run.all("rect")]
    assert titles == [
        "the run, loading: 2 (2%)",
        "the run, training: 100 (75%)",
        "the run, measuring: 30.5 (23%)",
        "the run, packaging: 0.5 (0%)",
    ]
    titles = [node.all("title")[0].text for node in token.all("rect")]
    assert (
        "plain decoding, verify: 25 (87%)" in titles
        and "chain_3 timed, verify: 11.2 (56%)" in titles
    )
    (table,) = part.all("table")
    assert {cells[0].text: cells[1].values() for cells in table.cells()} == {
        **{stage: [seconds] for stage, seconds in SECONDS.items()},
        "training, all parts": [100.0],
        "of it decoding held-out prompts": [40.0],
    }


# --- what was not recorded ------------------------------------------------------------------------


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def text_of(run: Path) -> str:
    record = record_of(run)
    return page(title_of([record]), [record])


def test_a_run_of_an_earlier_version_says_what_it_lacks(copy: Path) -> None:
    (copy / NOTED).unlink()
    (copy / "metrics.csv").unlink()
    path = copy / "package" / METRICS
    metrics = json.loads(path.read_text())
    for row in metrics["rows"]:
        for name in (
            "node_counts",
            "tokens",
            "plain_seconds",
            "plain_tokens",
            "accept_at_interval",
            "reach",
        ):
            row.pop(name, None)
    path.write_text(json.dumps(metrics))
    root = check_form(text_of(copy))
    again = f"python -m drafttrain.fit {EVIL} resume=last"
    for part, what in (
        ("learning", "Not recorded: metrics.csv. Every logger but logger=none keeps it"),
        (
            "trees",
            f"Not recorded: the hits of each node of static {EVIL}. Continued after its end, the "
            "run trains nothing",
        ),
        ("time", "Not recorded: the seconds of the run by stage."),
        (
            "answers",
            "Not recorded: sample answers. Fit keeps final.samples of those that it measures",
        ),
    ):
        (said,) = root.one(f"run-1-{part}").classed("missing")[:1]
        assert said.text.startswith(what), said.text
        assert part == "learning" or again in said.text
    assert not root.classed("answer") and not root.one("run-1-learning").all("svg")
    (grid,) = root.one("run-1-trees").all("svg")
    assert [node.text for node in grid.classed("value")] == ["40%", "20%", "0%", "25%", "10%"]
    titles = [node.text for node in root.one("run-1-time").all("title")]
    assert "plain decoding, stages not recorded: 50 (100%)" in titles, "one over 20 tokens a second"
    # tau 1.75 in 20 rounds, and the first token of 2 prompts: 37 tokens
    assert f"chain_3 timed, verify: {1000 * 2.25 / 37:.3g} (56%)" in titles
    assert "too narrow if the rounds of a prompt are alike" in root.one("run-1-positions").text


def test_a_run_is_continued_in_its_own_folder(copy: Path) -> None:
    """By the complete command that it noted; without a folder in it, another run of the experiment
    could be meant."""
    assert record_of(copy).command == f"python -m drafttrain.fit {EVIL}"
    noted = json.loads((copy / NOTED).read_text())
    for command, folder in (
        ("python -m drafttrain.fit experiment=smoke", " run_dir=runs/copy"),
        ("python -m drafttrain.fit experiment=smoke run_dir=a", ""),
    ):
        (copy / NOTED).write_text(json.dumps({**noted, "command": command}))
        assert (
            record_of(copy).command == command
            and record_of(copy).again[1] == f"{command} resume=last{folder}"
        )
    (copy / NOTED).write_text(json.dumps({**noted, "command": 5}))
    assert record_of(copy).unread and record_of(copy).command == f"python -m drafttrain.fit {EVIL}"


def test_damaged_files_are_named_and_hide_nothing_else(copy: Path) -> None:
    (copy / NOTED).write_text('{"seconds": {"training": "long"}, "samples": null}')
    (copy / "metrics.csv").write_bytes(b"\xff\xfe\x00")
    (copy / "config.yaml").write_bytes(b"\xff")
    root = check_form(text_of(copy))
    said = " ".join(node.text for node in root.classed("missing"))
    for name in (NOTED, "metrics.csv", "config.yaml"):
        assert re.search(
            rf"{re.escape(str(copy / name))} (cannot be read|is not of the form|is no metrics "
            rf"file)",
            said,
        ), said
    assert (
        root.one("run-1-positions").all("svg")
        and [node.text for node in root.all("summary")][-1] == "decoding.yaml"
    )


@pytest.mark.parametrize(
    "samples",
    [
        {"answers": []},
        {"tree": 5},
        [],
        {
            "tree": "a",
            "temperature": "x",
            "rule": "r",
            "guarantee": "g",
            "written_in": "text",
            "answers": [],
        },
        {
            "tree": "a",
            "temperature": 0,
            "rule": "r",
            "guarantee": "g",
            "written_in": "text",
            "answers": [{"prompt": "p"}],
        },
    ],
)
def test_samples_of_another_form_are_not_shown(copy: Path, samples: object) -> None:
    (copy / NOTED).write_text(json.dumps({"seconds": {}, "samples": samples}))
    record = record_of(copy)
    assert (
        record.samples is None
        and record.unread
        and "is not of the form that fit writes" in record.unread[0]
    )
    assert "Error" not in record.unread[0]


def test_numbers_that_are_none_are_left_out(copy: Path) -> None:
    (copy / "metrics.csv").write_text("step,val/tau,train/loss\n1,nan,1e999\n2,1.5,2\n3,1e300,x\n")
    record = record_of(copy)
    assert "" not in record.curves and "is no metrics file of a run (line 4" in record.unread[0]
    (copy / "metrics.csv").write_text(
        "step,val/tau,train/loss\n1,nan,1e999\n2,1.5,2\n3,1e300,-1e-320\n"
    )
    record = record_of(copy)
    assert record.curves[""] == [
        {"step": 1},
        {"step": 2, "val/tau": 1.5, "train/loss": 2},
        {"step": 3, "train/loss": -1e-320},
    ]
    check_form(page("x", [record]))
    (copy / "metrics.csv").write_text(
        f"step,val/tau,val/accept@1,val/accept@{'9' * 5000}\n1,1.5,0.5,0.5\n"
    )
    check_form(page("x", [record_of(copy)]))


def test_packages_of_all_kinds_have_a_page(tmp_path: Path) -> None:
    """Of runs of which little is known; one drafter learns nothing, and one package is outside of
    its run."""
    runs = write_runs(load.tiny(), tmp_path / "runs")
    shutil.copytree(runs / "old" / "package", tmp_path / "lone")
    folders = [runs / "fast" / "package", runs / "slow" / "package", tmp_path / "lone"]
    records = [read_record(entry) for entry in read_entries(folders, measured=True)]
    root = check_form(page(title_of(records), records))
    assert root.all("h1")[0].text == "Drafters for tiny-llama" and len(root.all("nav")) == 1
    assert [node.text for node in root.all("h2")] == ["fast", "slow", "lone"]
    assert "it learns nothing" in root.one("run-1").all("dl")[0].text
    assert (
        root.one("run-1-learning").classed("missing")[0].text
        == "It learns nothing, so there is no curve."
    )
    assert "from the weights of first" in root.one("run-2").all("dl")[0].text
    assert "Fit notes it at the end of a run" in root.one("run-3-time").text
    assert not [node for node in root.walk() if node.attributes.get("id") == COMPARED]
    (table,) = root.one("run-3-measured").all("table")
    assert [cells[4].values() for cells in table.cells()] == [[OLD[0]["tau"]]]


def test_several_models_have_their_own_curves(copy: Path) -> None:
    for number in (1, 2):
        folder = copy / "members" / f"member-{number}"
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text(f"step,val/tau\n1,1.{number}\n")
    (copy / "metrics.csv").write_text("step,boost/coverage\n1,0.5\n2,0.6\n")
    root = check_form(text_of(copy))
    part = root.one("run-1-learning")
    assert [node.text for node in part.all("h4")] == ["member-1", "tau", "member-2", "tau"]


def test_laps_add_up_and_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([10.0, 12.0, 15.0, 15.5])
    with monkeypatch.context() as patch:
        patch.setattr("drafttrain.reporting.records.time.monotonic", lambda: next(moments))
        laps = Laps()
        for stage in ("loading", "training", "loading"):
            laps.mark(stage)
    assert laps.seconds == {"loading": 2.5, "training": 3.0}
    write_noted(tmp_path, samples=None, seconds=laps.seconds, command="x y")
    noted = {"format": 1, "command": "x y", "seconds": laps.seconds, "samples": None}
    assert json.loads((tmp_path / NOTED).read_text()) == noted
