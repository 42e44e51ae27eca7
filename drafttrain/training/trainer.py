"""Lightning's trainer as a run uses it: where it computes, over which processes, and that it stays
quiet."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger

from drafttrain.errors import InputError
from drafttrain.processes import world_size
from drafttrain.target.model import Target
from drafttrain.training.course import FSDP, TrainerConfig
from drafttrain.training.module import DraftModule

OTHER_SHARDING = {
    "ACCELERATE_USE_FSDP": "--use_fsdp",
    "ACCELERATE_USE_DEEPSPEED": "--use_deepspeed",
    "ACCELERATE_USE_MEGATRON_LM": "--use_megatron_lm",
}
"""What `accelerate launch` sets for sharding of its own, and by which of its options."""


def check_trainer(settings: TrainerConfig, *, joint: bool, boost: bool) -> None:
    """Raise InputError for settings that do not go together, before anything is read.

    Args:
        joint, boost: is the target trained too; are several drafters fitted?
    """
    for name, option in OTHER_SHARDING.items():
        if os.environ.get(name, "").lower() in ("true", "1") and not (
            name == "ACCELERATE_USE_FSDP" and settings.strategy == FSDP
        ):
            raise InputError(
                f"accelerate launch {option}: its sharding settings are not read here; leave that "
                "option out (accelerate launch --multi_gpu --num_processes N) and set "
                "trainer.strategy=fsdp to share the drafter out"
            )
    for wanted, what in ((joint, "joint=lora"), (boost, "boost=collective")):
        if wanted and settings.pack is not None:
            raise InputError(
                f"trainer.pack={settings.pack}: {what} reads its rows one by one, set "
                "trainer.pack=null"
            )
    if settings.strategy != FSDP:
        return
    if boost:
        raise InputError(
            "trainer.strategy=fsdp shares one drafter out over processes; with boost=collective "
            "one process fits several drafters: set trainer.strategy=ddp"
        )
    if joint:
        raise InputError(
            "trainer.strategy=fsdp shares out a module of its own; with joint=lora the adapter's "
            "weights are a part of the target's, which every process has: set trainer.strategy=ddp"
        )
    if world_size() == 1:
        raise InputError(
            "trainer.strategy=fsdp shares the drafter out over processes, and there is one: start "
            "several (accelerate launch --multi_gpu --num_processes N -m drafttrain.fit ...), or "
            "set trainer.strategy=ddp"
        )
    if settings.accelerator == "mps":
        raise InputError(
            "trainer.strategy=fsdp needs CPUs or GPUs, and trainer.accelerator=mps has one "
            "device: set trainer.strategy=ddp"
        )


def place(settings: TrainerConfig, target: Target) -> dict[str, Any]:
    """Accelerator, devices and strategy: one device, or those of the launcher's processes."""
    from lightning.pytorch.strategies import DDPStrategy

    kind = settings.accelerator
    if kind == "auto":
        kind = {"cpu": "cpu", "mps": "mps"}.get(target.device.type, "gpu")
    world = world_size()
    if world == 1:
        device: Any = (
            1 if kind in ("cpu", "mps") or target.device.index is None else [target.device.index]
        )
        return {"accelerator": kind, "devices": device}
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    backend = "gloo" if kind == "cpu" else None
    # Buffers are the same everywhere, and the borrowed head, one of them, is large.
    strategy: Any = DDPStrategy(process_group_backend=backend, broadcast_buffers=False)
    if settings.strategy == FSDP:
        from drafttrain.training.sharding import Sharded

        strategy = Sharded(world, backend=backend)
    return {
        "accelerator": kind,
        "devices": local,
        "num_nodes": max(1, world // local),
        "strategy": strategy,
    }


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
    trains: bool = True,
) -> Trainer:
    """The trainer of one pass over a run's stream; checkpoints, limits and samplers are the run's
    own.

    Args:
        trains: False: the stream has nothing left, and only what follows training is made.
    """
    return Trainer(
        **place(settings, target),
        precision=cast(Any, settings.precision),
        max_epochs=1,  # of the trainer's own: one pass over the run's stream
        max_steps=module.course.updates if trains and module.course.updates else -1,
        logger=loggers or False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
