"""Metrics reach the disk as they are, survive a kill and a resume, and need no network."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from drafttrain.errors import InputError
from drafttrain.reporting import loggers
from drafttrain.reporting.figures import acceptance_curve
from drafttrain.reporting.loggers import CsvLogger, read_metrics
from drafttrain.wiring.building import build
from tests.helpers import file_limit
from tests.messages import said

CONF = Path(__file__).resolve().parents[2] / "conf" / "logger"
ROWS = [
    {
        "temperature": 0,
        "growth": "chain",
        "nodes": 4,
        "rule": "greedy",
        "tau": 1.8,
        "accept_at": [0.5, 0.4, None],
    }
]


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        self.log("train/loss", loss)
        if batch_idx == 2:
            for logger in self.loggers:
                logger.log_metrics({"val/tau": 1.5}, self.global_step)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def train(made: list[Any], folder: Path, steps: int = 4) -> None:
    trainer = Trainer(
        logger=made,
        max_steps=steps,
        accelerator="cpu",
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    trainer.fit(Line(), DataLoader(torch.ones(steps, 1)))


def test_csv_holds_every_step(tmp_path: Path) -> None:
    made = build(OmegaConf.load(CONF / "csv.yaml"), run_dir=tmp_path)
    train(made, tmp_path)
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all("train/loss" in row for row in rows)
    assert [row.get("val/tau") for row in rows] == [None, None, 1.5, None]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.csv"]


def test_csv_outlives_its_folder(tmp_path: Path) -> None:
    """Hours of training do not end since somebody tidied up."""
    logger = CsvLogger(tmp_path / "run")
    for step in (1, 2):
        logger.log_metrics({"loss": 1.0, "tau": 2.0}, step)
    shutil.rmtree(tmp_path / "run")
    logger.log_metrics({"loss": 3.0}, 2)
    logger.log_metrics({"loss": 4.0, "new": 1.0}, 3)
    assert read_metrics(tmp_path / "run" / "metrics.csv") == [
        {"step": 2, "loss": 3.0},
        {"step": 3, "loss": 4.0, "new": 1.0},
    ]


def test_csv_is_written_at_once_and_continued(tmp_path: Path) -> None:
    first = CsvLogger(tmp_path)
    for step in range(5):
        first.log_metrics({"loss": 0.1 * step}, step)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("5")  # a row cut short by a kill
    resumed = CsvLogger(tmp_path)
    resumed.log_metrics({"loss": 9.0, "new": 1.0}, 3)
    resumed.log_metrics({"loss": 8.0}, 4)
    assert read_metrics(tmp_path / "metrics.csv") == [
        {"step": 0, "loss": 0.0},
        {"step": 1, "loss": 0.1},
        {"step": 2, "loss": 0.2},
        {"step": 3, "loss": 9.0, "new": 1.0},
        {"step": 4, "loss": 8.0},
    ]


def test_a_limit_of_file_sizes_leaves_complete_rows(tmp_path: Path) -> None:
    path, log = tmp_path / "metrics.csv", CsvLogger(tmp_path)
    for step in range(3):
        log.log_metrics({"loss": 0.5}, step)
    with (
        file_limit(path.stat().st_size + 9),
        pytest.raises(OSError, match=said("reporting.full_disk") + r".*metrics\.csv"),
    ):
        log.log_metrics({"loss": 0.1234567}, 3)
    assert path.read_text().endswith("3,0.12345")  # A number, though another one than was logged.
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2]
    with (
        file_limit(20),
        pytest.raises(OSError, match=said("reporting.full_disk") + r".*metrics\.csv"),
    ):
        CsvLogger(tmp_path).log_metrics({"loss": 0.1, "more": 1.0}, 3)
    CsvLogger(tmp_path).log_metrics({"loss": 0.25}, 3)
    assert read_metrics(path)[2:] == [{"step": 2, "loss": 0.5}, {"step": 3, "loss": 0.25}]
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.csv"]


FOREIGN = {
    "bytes": (b"garbage\x00,\nx,y\n\xff", "byte 15"),
    "another table": (b"name,grade\r\nann,1\r\n", "its first line"),
    "one word": (b"mine", "its first line"),
    "a column twice": (b"step,loss,loss\n1,2,3\n", "its first line"),
    "a row too short": (b"step,loss\n1,0.5\n2\n3,0.2\n", "line 3"),
    "a row too long": (b"step,loss\n1,0.5,7\n", "line 2"),
    "words": (b"step,loss\n1,low\n", "line 2"),
    "no step": (b"step,loss\n,0.5\n", "line 2"),
    "half a step": (b"step,loss\n1.5,0.5\n", "line 2"),
    "a zero byte": (b"step,loss\n1,\x00\n", "line 2"),
    "notes at the end": (b"step,loss\n1,0.5\nmy notes", "its last line"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_that_no_run_wrote_is_not_overwritten(tmp_path: Path, name: str) -> None:
    path, (held, where) = tmp_path / "metrics.csv", FOREIGN[name]
    path.write_bytes(held)
    foreign = rf"metrics\.csv {said('reporting.foreign')}.*{where}"
    with pytest.raises(InputError, match=f"{foreign}.*{said('reporting.not_overwritten')}"):
        build(OmegaConf.load(CONF / "csv.yaml"), run_dir=tmp_path)
    with pytest.raises(InputError, match=foreign):
        read_metrics(path)
    assert path.read_bytes() == held


@pytest.mark.parametrize(
    ("held", "steps"),
    [
        (b"", []),
        (b"step,loss\r\n", []),
        (b"step,loss\n1,0.5\n\n2,\n", [1, 2]),
        (b"step,loss\n1,0.5\n2,-1.5e-0", [1]),
    ],
)
def test_what_can_be_read_is_continued(tmp_path: Path, held: bytes, steps: list[int]) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(held)
    assert [row["step"] for row in read_metrics(path)] == steps
    CsvLogger(tmp_path).log_metrics({"loss": 1.0}, 7)
    assert [row["step"] for row in read_metrics(path)] == [*steps, 7]


def test_none_writes_nothing(tmp_path: Path) -> None:
    made = build(OmegaConf.load(CONF / "none.yaml"), run_dir=tmp_path)
    train(made, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_shows_metrics_config_and_picture(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = build(OmegaConf.load(CONF / "tensorboard.yaml"), run_dir=tmp_path)
    loggers.log_config(made, {"optim": {"lr": 0.1}, "names": ["a"]})
    train(made, tmp_path)
    loggers.log_picture(
        made, "val/acceptance", acceptance_curve(ROWS, tmp_path / "curve.png"), step=4
    )
    loggers.log_rows(made, ROWS, "final", step=4)
    loggers.close(made)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert "train/loss" in events.Tags()["scalars"] and events.Tags()["images"] == [
        "val/acceptance"
    ]
    assert read_metrics(tmp_path / "metrics.csv")[-1]["final/T=0_chain_4_greedy/tau"] == 1.8


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = OmegaConf.load(CONF / "wandb.yaml")
    assert node.mode == "offline"  # from the environment that the tests set
    monkeypatch.delenv("WANDB_MODE")
    assert node.mode == "online"
    node.mode = "offline"
    made = build(node, run_dir=tmp_path)
    loggers.log_config(made, {"optim": {"lr": 0.1}})
    train(made, tmp_path)
    loggers.log_picture(
        made, "val/acceptance", acceptance_curve(ROWS, tmp_path / "curve.png"), step=4
    )
    run = made[1].experiment
    assert run.config["optim"]["lr"] == 0.1
    assert run.summary["val/acceptance"]["count"] == 1
    loggers.close(made)
    (record,) = (tmp_path / "wandb").glob("offline-run-*")
    assert record.name.endswith((tmp_path / "wandb_id.txt").read_text().strip())
    assert list(record.glob("files/media/images/val/*.png"))
    assert len(read_metrics(tmp_path / "metrics.csv")) == 4


def test_what_is_wrong_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"logger\.mode=of"):
        loggers.wandb_loggers(tmp_path, project="p", mode="of")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"logger=wandb .*drafttrain\[wandb\]"):
        loggers.wandb_loggers(tmp_path, project="p", mode="offline")
    with pytest.raises(InputError, match=r"logger=tensorboard .*drafttrain\[tensorboard\]"):
        loggers.tensorboard_loggers(tmp_path)
    assert list(tmp_path.iterdir()) == []
