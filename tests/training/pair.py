"""What two processes run for `test_sharding.py`: the same updates by each strategy, and what they
wrote."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from drafttrain import processes
from drafttrain.data.datamodule import ConversationData, collate
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.medusa import Medusa
from drafttrain.drafter.ssm import Ssm
from drafttrain.flow import Batch
from drafttrain.target.features import OnlineFeatures
from drafttrain.target.model import Target
from drafttrain.training.checkpoint import read_checkpoint
from drafttrain.training.course import Course, Stream, TrainerConfig
from drafttrain.training.keeper import Keeper
from drafttrain.training.module import DraftModule
from drafttrain.training.optim import AdamW
from drafttrain.training.settings import CheckpointConfig
from drafttrain.training.trainer import quiet_lightning, trainer_of
from tests.drafter import make as drafters
from tests.training import parts
from tests.training.parts import OPTIM, TRAINER, Direct, Fixed, Watch, optim_of, tiny

KINDS: dict[str, Callable[[Target], Drafter]] = {
    "eagle1": lambda target: drafters.make(Eagle1, target, noise=0.0),
    "medusa": lambda target: drafters.make(Medusa, target, heads=2, own_head=True),
    "ssm": lambda target: drafters.make(Ssm, target, layers=[0], own=["norm"]),
    "muon": lambda target: drafters.make(Eagle1, target, noise=0.0),
}
STEPS, ACCUMULATE, TOKENS = 6, 2, 512
WORLD = 2
OPTIMISER = AdamW(**{**OPTIM, "weight_decay": 0.01})
MUON = "muon"
"""EAGLE-1 too, trained by Muon."""


def made(kind: str, target: Target) -> Drafter:
    torch.manual_seed(0)
    return KINDS[kind](target)


def optimiser_of(kind: str) -> AdamW:
    return optim_of(parts.MUON) if kind == MUON else OPTIMISER


def settings_of(steps: int = STEPS, **more: Any) -> TrainerConfig:
    common = {**TRAINER, "batch_tokens": TOKENS, "accumulate": ACCUMULATE, "max_steps": steps}
    return TrainerConfig(**{**common, **more})


def share(data: ConversationData, rank: int) -> Any:
    return settings_of().sampler(data, seed=0, rank=rank, world=WORLD)


def rows_of(data: ConversationData, rank: int) -> list[Batch]:
    """Two windows: of the four micro-batches of the two processes in each, only one or two have
    labels, and widths differ."""
    rows = [(*data.row(i), data.indices[i]) for i in range(5)]
    masked = [(ids, torch.zeros_like(mask), row) for ids, mask, row in rows]
    return [[collate(rows[:2]), collate(masked[:1])], [collate(masked[2:3]), collate(masked)]][
        rank
    ] + [
        [collate(masked[3:4]), collate(masked[:2])],
        [collate([(ids[:14], mask[:14], row) for ids, mask, row in rows[3:4]]), collate(rows[4:])],
    ][rank]


def trained(
    kind: str,
    target: Target,
    data: ConversationData,
    folder: Path,
    *,
    rank: int,
    stop: int | None = None,
    resume: Path | None = None,
    **more: Any,
) -> DraftModule:
    settings = settings_of(**more)
    drafter = made(kind, target)
    sampler = share(data, rank)
    # A row is read in the same company whether a run starts or goes on.
    groups = [group for r in range(WORLD) for group in share(data, r).batches(0) if group[0] >= 0]
    source = OnlineFeatures(target, drafter.needs, data=data, groups=groups, keep_dtype="float32")
    module = DraftModule(drafter, source, optimiser_of(kind), settings.course(sampler))
    stream = Stream(data, sampler, module.course)
    keeper = Keeper(folder, CheckpointConfig(every=None, keep=0), None)
    if resume is not None:
        module.continue_from(read_checkpoint(resume))
        stream.position = module.position
    go(settings, module, target, stream, folder, Watch(stop), keeper)
    return module


def go(
    settings: TrainerConfig,
    module: DraftModule,
    target: Target,
    stream: Stream,
    folder: Path,
    *callbacks: Callback,
) -> None:
    quiet_lightning()
    trainer = trainer_of(
        settings, module, target, loggers=[], callbacks=list(callbacks), folder=folder
    )
    trainer.fit(module, train_dataloaders=stream)


FEW = (("eagle1", "ddp"), ("eagle1", "fsdp"), ("medusa", "fsdp"), (MUON, "fsdp"))
ALL = tuple((kind, strategy) for kind in KINDS for strategy in ("ddp", "fsdp"))


class OneSpoilt(AdamW):
    """The gradient of the second window is infinite on rank 1, and only there; that of the third is
    finite on both, and its norm is not."""

    def norm(self, parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
        parameters = list(parameters)
        WINDOWS.append(len(WINDOWS))
        grads = [p.grad for p in parameters if p.grad is not None]
        if len(WINDOWS) == 2 and processes.rank() == 1:
            torch._foreach_mul_(grads, math.inf)
        if len(WINDOWS) == 3:
            torch._foreach_mul_(grads, 1e30)
        return super().norm(parameters)


WINDOWS: list[int] = []


def spoilt_on_one(
    folder: Path, target: Target, data: ConversationData, rank: int, strategy: str
) -> None:
    """What each process makes of it, in a file of its own."""
    WINDOWS.clear()
    drafter = made("eagle1", target)
    settings = settings_of(3, strategy=strategy)
    course = settings.course(share(data, rank))
    optim = OneSpoilt(**{**OPTIM, "weight_decay": 0.01})
    module = DraftModule(drafter, OnlineFeatures(target, drafter.needs, data=data), optim, course)
    go(settings, module, target, Stream(data, share(data, rank), course), folder)
    torch.save(
        {"weights": module.drafter.state_dict(), "counts": [module.updates, module.spoilt_windows]},
        folder / f"spoilt-{strategy}-{rank}.pt",
    )


def main(folder: Path, much: str) -> None:
    rank = processes.rank()
    target, data = tiny(), ConversationData(folder / "set")
    for kind, strategy in ALL if much == "all" else FEW:
        module = trained(
            kind, target, data, folder / f"{kind}-{strategy}", rank=rank, strategy=strategy
        )
        torch.save(
            module.drafter.state_dict(), folder / f"{kind}-{strategy}-{rank}.pt"
        )  # what each process is left with
    for first, second in (("ddp", "fsdp"), ("fsdp", "ddp"))[: None if much == "all" else 1]:
        begun_run = folder / f"started-{first}"
        trained("eagle1", target, data, begun_run, rank=rank, strategy=first, stop=3)
        trained(
            "eagle1",
            target,
            data,
            folder / f"ended-{second}",
            rank=rank,
            strategy=second,
            resume=begun_run / "last.ckpt",
        )
    for number, stop in enumerate((3, None)):
        trained(
            MUON,
            target,
            data,
            folder / f"{MUON}-part-{number}",
            rank=rank,
            strategy="fsdp",
            stop=stop,
            resume=folder / f"{MUON}-part-0" / "last.ckpt" if number else None,
        )
    for strategy in ("ddp", "fsdp"):
        spoilt_on_one(folder, target, data, rank, strategy)
    for strategy in ("fsdp", "ddp")[: None if much == "all" else 1]:
        drafter = made("eagle1", target)
        course = Course(batches=4, accumulate=2, epochs=1)
        module = DraftModule(drafter, Direct(target, drafter), OPTIMISER, course)
        keeper = Keeper(folder / f"masked-{strategy}", CheckpointConfig(every=None, keep=0), None)
        go(
            settings_of(strategy=strategy),
            module,
            target,
            Fixed(rows_of(data, rank), course),
            folder,
            keeper,
        )
    if much == "all":
        mixed = trained(
            "eagle1",
            target,
            data,
            folder / "mixed",
            rank=rank,
            strategy="fsdp",
            precision="bf16-mixed",
        )
        assert all(p.dtype == torch.float32 for p in mixed.parameters())
