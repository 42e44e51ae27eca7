"""Metrics reach the disk as they are, survive a kill and a resume, and need no network."""

from __future__ import annotations

import importlib.util
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

CONF = Path(__file__).resolve().parents[2] / "conf" / "logger"
ROWS = [{"temperature": 0, "growth": "chain", "nodes": 4, "rule": "greedy", "tau": 1.8, "accept_at": [0.5, 0.4, None]}]


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


def test_none_writes_nothing(tmp_path: Path) -> None:
    made = build(OmegaConf.load(CONF / "none.yaml"), run_dir=tmp_path)
    train(made, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_shows_metrics_config_and_picture(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = build(OmegaConf.load(CONF / "tensorboard.yaml"), run_dir=tmp_path)
    loggers.log_config(made, {"optim": {"lr": 0.1}, "names": ["a"]})
    train(made, tmp_path)
    loggers.log_picture(made, "val/acceptance", acceptance_curve(ROWS, tmp_path / "curve.png"), step=4)
    loggers.log_rows(made, ROWS, "final", step=4)
    loggers.close(made)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert "train/loss" in events.Tags()["scalars"] and events.Tags()["images"] == ["val/acceptance"]
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
    loggers.log_picture(made, "val/acceptance", acceptance_curve(ROWS, tmp_path / "curve.png"), step=4)
    run = made[1].experiment
    assert run.config["optim"]["lr"] == 0.1
    assert run.summary["val/acceptance"]["count"] == 1
    loggers.close(made)
    (record,) = (tmp_path / "wandb").glob("offline-run-*")
    assert record.name.endswith((tmp_path / "wandb_id.txt").read_text().strip())
    assert list(record.glob("files/media/images/val/*.png"))
    assert len(read_metrics(tmp_path / "metrics.csv")) == 4


def test_what_is_wrong_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"logger\.mode=of: needs one of online, offline, disabled"):
        loggers.wandb_loggers(tmp_path, project="p", mode="of")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'drafttrain\[wandb\]'"):
        loggers.wandb_loggers(tmp_path, project="p", mode="offline")
    with pytest.raises(InputError, match=r"pip install 'drafttrain\[tensorboard\]'"):
        loggers.tensorboard_loggers(tmp_path)
    assert list(tmp_path.iterdir()) == []
