"""Progress shows rate, time left and the last numbers, in plain lines where there is no
terminal."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console
from torch.utils.data import DataLoader

from drafttrain.errors import room
from drafttrain.reporting.console import Rate, amount, cell, clock, reading, table, track
from drafttrain.reporting.progress import ConsoleProgress
from tests import messages


def plain() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(out: Console) -> str:
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_words() -> None:
    assert [clock(s) for s in (None, 4.2, 61, 3723)] == ["?", "4s", "1:01", "1:02:03"]
    assert [amount(v) for v in (None, 0.1234, 12.34, 2400.4)] == ["?", "0.123", "12.3", "2,400"]
    assert [room(v) for v in (0, 999, 1234, 5.6e9, 7e15)] == [
        "0 bytes",
        "999 bytes",
        "1.23 kB",
        "5.6 GB",
        "7e+03 TB",
    ]
    assert [cell(v) for v in (None, 1.23456, 3, "x")] == ["-", "1.235", "3", "x"]
    assert [cell(v) for v in ((1.0, 2.0), [0.5, None])] == ["1.000..2.000", "0.500 -"]


def test_rate_forgets_old_times_but_time_left_does_not() -> None:
    moment = 0.0
    rate = Rate(lambda: moment)
    for _ in range(100):
        moment += 1.0
        rate.add(1)
    for _ in range(100):
        moment += 1.0
        rate.add(3)
    assert rate.recent == pytest.approx(3.0, abs=0.1)
    assert rate.left(400) == pytest.approx(200.0)


def test_track_yields_everything_and_ends_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    out = plain()
    assert list(track(range(3), description="prompts", unit="prompt", interval=0, out=out)) == [
        0,
        1,
        2,
    ]
    lines = said(out).splitlines()
    assert (
        lines[0].startswith("prompts  1/3")
        and "left" in lines[0]
        and lines[-1].startswith("prompts  3 prompt  in")
    )
    monkeypatch.setenv("RANK", "1")
    silent = plain()
    assert list(track(range(3), out=silent)) == [0, 1, 2] and said(silent) == ""


@pytest.mark.field("F101")
def test_reading_is_shown_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, out = [0.0], io.StringIO()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(
        "drafttrain.reporting.console.console", lambda **_: Console(file=out, width=100)
    )
    for number in reading(range(150)):
        assert bool(out.getvalue()) == (now[0] > 1.05), number
        now[0] += 0.1
    # Then every ten seconds, and at the end.
    assert [line.split("  ")[:2] for line in out.getvalue().splitlines()] == [
        ["reads prompts", "11/150"],
        ["reads prompts", "112/150"],
        ["reads prompts", "150 rows"],
    ]
    quick = io.StringIO()
    monkeypatch.setattr(
        "drafttrain.reporting.console.console", lambda **_: Console(file=quick, width=100)
    )
    assert len(list(reading(range(5)))) == 5 and not quick.getvalue()


def test_track_counts_what_items_hold() -> None:
    out = plain()
    assert list(track([5, 15], unit="tokens", size=float, total=20, interval=0, out=out)) == [5, 15]
    assert [line.split("  ")[0] for line in said(out).splitlines()] == [
        "5/20",
        "20/20",
        "20 tokens",
    ]


def test_table_shows_brackets_and_gaps() -> None:
    out = plain()
    table("measured", ["rule", "tau"], [["[greedy]", 1.5], ["ratio", None]], out=out)
    assert "[greedy]" in said(out) and "1.500" in said(out) and "-" in said(out)
    with pytest.raises(ValueError, match=messages.said("reporting.cells")):
        table("t", ["a", "b"], [[1, 2, 3]], out=out)


def test_table_takes_control_characters_out() -> None:
    out = plain()
    table("\x1b]0;owned\x07", ["name"], [["fc\x1b[2J\x9b31m\r\nweight"]], out=out)
    text = said(out)
    assert not set(text) & {chr(code) for code in (*range(10), *range(11, 32), *range(127, 160))}, (
        text
    )
    assert "fc [2J 31m weight" in text
    out = plain()
    table("", ["name"], [["all"], ["  of them"]], out=out)
    assert "   of them" in said(out), "what is set in stays so"


@dataclass
class Rows:
    loss_mask: torch.Tensor


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Rows, batch_idx: int) -> torch.Tensor:
        self.log("val/tau", 1.75)
        return self.layer(torch.ones(1, 1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


@pytest.mark.field("F65")
@pytest.mark.parametrize("terminal", [False, True])
def test_training_is_shown(tmp_path: Path, terminal: bool) -> None:
    out = Console(file=io.StringIO(), width=200, force_terminal=terminal)
    progress = ConsoleProgress(interval=0, out=out)
    progress.note_all({"extra": 2.0})
    loader = DataLoader([Rows(torch.tensor([True, True, False]))] * 4, batch_size=None)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        callbacks=[progress],
        accumulate_grad_batches=2,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Line(), loader)
    assert progress._tokens.count == 8
    last = next(line for line in reversed(said(out).splitlines()) if "step 2/2" in line)
    for words in ("step 2/2 100%", "steps/s", "tokens/s", "val/tau 1.75", "extra 2", "left 0s"):
        assert words in last


def test_a_metric_is_shown_with_its_interval() -> None:
    bar = ConsoleProgress(out=plain())
    bar.note_all({"val/tau": 1.8312, "val/tau_low": 1.79, "val/tau_high": 1.871})
    bar._steps, bar._tokens, bar._step, bar._total = Rate(), Rate(), 3, None
    assert "val/tau 1.831 (1.79..1.871)" in bar._line() and "_low" not in bar._line()
    bar.note_all({"val/tau_low": None})
    assert "val/tau 1.831" in bar._line() and "(" not in bar._line()
