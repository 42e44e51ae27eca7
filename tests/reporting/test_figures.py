"""The acceptance picture shows what was measured, and nothing where nothing was."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from drafttrain.reporting import figures
from drafttrain.reporting.figures import acceptance_curve, comparison, row_label

ROWS: list[dict[str, Any]] = [
    {
        "temperature": 0,
        "growth": "static",
        "nodes": 25,
        "rule": "greedy",
        "tau": 2.1,
        "tau_interval": [2.0, 2.2],
        "accept_at": [0.6, None, 0.4],
        "accept_at_interval": [[0.55, 0.65], None, [0.3, 0.5]],
    },
    {
        "temperature": 1.0,
        "growth": "chain",
        "nodes": 4,
        "rule": "ratio",
        "tau": None,
        "accept_at": [],
    },
    {"label": "mine", "tau": 1.4, "accept_at": [0.3]},
]


def test_picture_is_complete_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = acceptance_curve(ROWS, tmp_path / "deep" / "curve.png", title="eagle1")
    assert path == tmp_path / "deep" / "curve.png" and imread(path).shape[1] > 500
    assert [p.name for p in path.parent.iterdir()] == ["curve.png"]
    assert (
        acceptance_curve(ROWS, tmp_path / "again.png", title="eagle1").read_bytes()
        == path.read_bytes()
    )


def test_what_was_not_measured_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[list[int], list[float], Any, str]] = []
    original = Axes.errorbar

    def record(self: Axes, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        if "marker" in kwargs:  # the bars of tau draw their intervals with the same method
            drawn.append(([round(k) for k in x], list(y), kwargs["yerr"], kwargs["label"]))
        return original(self, x, y, *args, **kwargs)

    monkeypatch.setattr(Axes, "errorbar", record)
    acceptance_curve(ROWS, tmp_path / "curve.png")
    assert [(x, y, label) for x, y, _, label in drawn] == [
        ([1, 3], [0.6, 0.4], "T=0 static 25 greedy"),
        ([1], [0.3], "mine"),
    ]
    assert (
        drawn[0][2] == [pytest.approx([0.05, 0.1]), pytest.approx([0.05, 0.1])]
        and drawn[1][2] is None
    )


@pytest.mark.parametrize("rows", [[], [{"tau": None, "accept_at": [None, None]}]])
def test_nothing_measured_still_gives_a_picture(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    assert acceptance_curve(rows, tmp_path / "curve.png").stat().st_size > 0
    assert comparison(rows, tmp_path / "side.png").stat().st_size > 0


def test_drafters_stand_side_by_side_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[list[float], list[str], Any]] = []
    bars, ticks = Axes.barh, Axes.set_yticks

    def record(self: Axes, y: Any, width: Any, *args: Any, **kwargs: Any) -> Any:
        drawn.append((list(width), [], kwargs["xerr"]))
        return bars(self, y, width, *args, **kwargs)

    def name(self: Axes, places: Any, labels: Any = None, **kwargs: Any) -> Any:
        drawn[-1][1].extend(labels or [])
        return ticks(self, places, labels, **kwargs)

    monkeypatch.setattr(Axes, "barh", record)
    monkeypatch.setattr(Axes, "set_yticks", name)
    rows: list[dict[str, Any]] = [
        {
            "label": "b",
            "speedup": 1.5,
            "speedup_interval": [1.25, 2.0],
            "tau": 1.2,
            "accept_at": [0.2],
        },
        {"label": "a", "speedup": 1.25, "speedup_interval": None, "tau": None, "accept_at": []},
        {"label": "c", "speedup": None, "tau": 2.0, "accept_at": [0.5]},
    ]
    path = comparison(rows, tmp_path / "deep" / "side.png", title="side by side")
    assert imread(path).shape[1] > 500 and [p.name for p in path.parent.iterdir()] == ["side.png"]
    speed, tau = drawn
    assert speed[:2] == ([1.5, 1.25], ["b", "a"]) and tau[:2] == ([1.2, 2.0], ["b", "c"])
    assert speed[2] == [pytest.approx([0.25, 0.0]), pytest.approx([0.5, 0.0])] and tau[2] is None


def test_names_are_shown_letter_by_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of runs have any names; to matplotlib some of them are formulas, or what no legend
    shows."""
    shown: list[Figure] = []
    write = figures._write
    monkeypatch.setattr(
        figures, "_write", lambda figure, path: (shown.append(figure), write(figure, path))
    )
    names = ["_mine chain 4", "cost$1_$2", r"a\$b$", "日本"]
    rows = [{"label": name, "speedup": 1.5, "tau": 1.2, "accept_at": [0.2]} for name in names]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comparison(rows, tmp_path / "side.png", title="$_$")
        acceptance_curve(rows, tmp_path / "curve.png", title="$_$")
    for figure in shown:
        texts = [
            text
            for axes in figure.axes
            for text in (axes.get_legend().get_texts() if axes.get_legend() else ())
        ]
        ticks = [
            text for axes in figure.axes if not axes.get_legend() for text in axes.get_yticklabels()
        ]
        assert [text._preprocess_math(text.get_text()) for text in texts] == [
            (name, False) for name in names
        ]
        assert [text._preprocess_math(text.get_text())[0] for text in ticks][: len(names)] == names


def test_labels() -> None:
    assert [row_label(row) for row in ROWS] == ["T=0 static 25 greedy", "T=1 chain 4 ratio", "mine"]
    assert row_label({}) == "measured"


def test_no_display_is_touched() -> None:
    assert not hasattr(figures, "pyplot")
