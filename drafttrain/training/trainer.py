"""Lightning's trainer as a run uses it: where it computes, over which processes, and that it stays quiet."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger

from drafttrain.processes import world_size
from drafttrain.target.model import Target
from drafttrain.training.course import TrainerConfig
from drafttrain.training.module import DraftModule


def place(settings: TrainerConfig, target: Target) -> dict[str, Any]:
    """Accelerator, devices and strategy: one device, or those of the launcher's processes."""
    from lightning.pytorch.strategies import DDPStrategy

    kind = settings.accelerator
    if kind == "auto":
        kind = {"cpu": "cpu", "mps": "mps"}.get(target.device.type, "gpu")
    world = world_size()
    if world == 1:
        device: Any = 1 if kind in ("cpu", "mps") or target.device.index is None else [target.device.index]
        return {"accelerator": kind, "devices": device}
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    backend = "gloo" if kind == "cpu" else None
    # Buffers are the same everywhere, and the borrowed head among them is large.
    strategy = DDPStrategy(process_group_backend=backend, broadcast_buffers=False)
    return {"accelerator": kind, "devices": local, "num_nodes": max(1, world // local), "strategy": strategy}


def quiet_lightning() -> None:
    """Its remarks on devices, loaders and limits concern nothing that a person set here."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\..*")


def trainer_of(
    settings: TrainerConfig,
    module: DraftModule,
    target: Target,
    *,
    loggers: list[Logger],
    callbacks: list[Callback],
    folder: Path,
) -> Trainer:
    """The trainer of one pass over a run's stream; checkpoints, limits and samplers are the run's own."""
    return Trainer(
        **place(settings, target),
        precision=cast(Any, settings.precision),
        max_epochs=1,  # of the trainer's own: one pass over the run's stream
        max_steps=-1 if module.course.updates is None else module.course.updates,
        logger=loggers or False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
