"""What tests of training share: a tiny set written by a tiny target, and short runs of the
trainer."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor

from drafttrain.data.conversations import Row, write_set
from drafttrain.data.datamodule import ConversationData
from drafttrain.decoding.loop import decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.flow import Batch, Tally
from drafttrain.nn.sampling import Policy
from drafttrain.target import load
from drafttrain.target.features import OnlineFeatures
from drafttrain.target.model import Target
from drafttrain.training.course import Course, Stream, TrainerConfig
from drafttrain.training.decode_callback import DecodeCallback, EvalConfig, Evaluated
from drafttrain.training.keeper import Keeper
from drafttrain.training.module import DraftModule
from drafttrain.training.optim import AdamW, Muon
from drafttrain.training.settings import CheckpointConfig
from drafttrain.tree.topology import Tree
from tests.drafter import make as drafters

TRAINER: dict[str, Any] = {
    "accelerator": "cpu",
    "precision": "32-true",
    "batch_tokens": 256,
    "batch_rows": None,
    "pack": None,
    "accumulate": 1,
    "max_epochs": None,
    "max_steps": 8,
    "max_minutes": None,
    "log_every": 2,
    "strategy": "ddp",
}
OPTIM: dict[str, Any] = {
    "lr": 1e-2,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "weight_decay": 0.0,
    "warmup": 2,
    "schedule": "cosine",
    "end_factor": 0.1,
    "horizon": None,
    "clip_norm": 1.0,
    "clip_value": None,
}
MUON: dict[str, Any] = {
    "rest_factor": 1.0,
    "matrix_decay": 0.1,
    "momentum": 0.95,
    "ns_steps": 5,
    "adjust_lr_fn": "match_rms_adamw",
}
"""What Muon has in addition."""
EVAL: dict[str, Any] = {
    "every": 2,
    "prompts": 3,
    "replay": True,
    "answers": None,
    "checked": 0,
    "max_new_tokens": 8,
    "batch": 2,
    "sim_rows": 3,
    "speed_prompts": 1,
    "speed_every": None,
    "patience": None,
}


def write_tiny_set(
    target: Target,
    folder: Path,
    *,
    rows: int = 24,
    held_out: int = 4,
    tokens: int = 24,
    seed: int = 0,
    categories: dict[int, str] | None = None,
) -> Path:
    """Answers of a target to random prompts of 4 to 9 tokens, at a temperature that makes them
    differ."""
    chance = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 10, (rows,), generator=chance).tolist()
    prompts = [torch.randint(3, 250, (n,), generator=chance).tolist() for n in lengths]
    plan = Plan(Tree.chain(0), Policy(temperature=0.7))
    answers, _ = decode(target, None, prompts, plan, max_new_tokens=tokens, seed=seed)
    written = [
        Row(
            i,
            (*prompt, *answer.ids),
            ((len(prompt), len(prompt) + len(answer.ids)),),
            ("length",),
            0.7,
        )
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    manifest = {"target": {"name": target.name, "fingerprint": target.fingerprint}}
    write_set(folder, written, manifest=manifest, held_out=held_out, categories=categories)
    return folder


def tiny() -> Target:
    return load.tiny(layers=2, width=32, vocab_size=256)


def drafter_of(target: Target, **settings: Any) -> Eagle1:
    torch.manual_seed(0)
    return drafters.make(Eagle1, target, **settings)


def optim_of(settings: Mapping[str, Any] | None) -> AdamW:
    """The optimiser of some settings, Muon where they have Muon's."""
    given = {**OPTIM, **(settings or {})}
    return Muon(**given) if "momentum" in given else AdamW(**given)


class Memory(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    name = version = "memory"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append((step or 0, dict(metrics)))

    def values(self, name: str) -> dict[int, float]:
        return {step: row[name] for step, row in self.rows if name in row}


class Watch(Callback):
    """Notes the rows of every micro-batch and the rate of every update."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.rows: list[list[int]] = []
        self.rates: list[float] = []
        self.stop_at = stop_at

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.rows.append(batch.row_ids.tolist())
        if pl_module.just_updated:
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        if pl_module.updates == self.stop_at:
            pl_module.stop_requested = True


class Fixed(Stream):
    """Given batches instead of a set's."""

    def __init__(self, batches: Sequence[Batch], course: Course) -> None:
        self.batches, self.course, self.position = list(batches), course, 0

    def __iter__(self) -> Any:
        length = self.course.length
        assert length is not None
        return (self.batches[k % len(self.batches)] for k in range(self.position, length))


class Direct:
    """Features without a store."""

    def __init__(self, target: Target, drafter: Eagle1) -> None:
        self.target, self.needs = target, drafter.needs

    def features(self, batch: Batch) -> Any:
        return self.target.features(batch.input_ids, batch.lengths, self.needs)


def module_for(
    data: ConversationData,
    target: Target,
    *,
    optim: Mapping[str, Any] | None = None,
    noise: float = 0.1,
    drafter: Drafter | None = None,
    **trainer: Any,
) -> tuple[DraftModule, Stream]:
    settings = TrainerConfig(**{**TRAINER, **trainer})
    sampler = settings.sampler(data, seed=0, rank=0, world=1)
    course = settings.course(sampler)
    drafter = drafter or drafter_of(target, noise=noise)
    source = OnlineFeatures(target, drafter.needs, data=data, groups=sampler.batches(0))
    module = DraftModule(
        drafter, source, optim_of(optim), course, seed=0, log_every=settings.log_every
    )
    return module, Stream(data, sampler, course)


def fit(
    module: DraftModule, stream: Stream, *callbacks: Callback, logger: Logger | None = None
) -> Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    updates = module.course.updates
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            max_steps=-1 if updates is None else updates,
            logger=logger or False,
            callbacks=list(callbacks),
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            num_sanity_val_steps=0,
            log_every_n_steps=0,
        )
        trainer.fit(module, train_dataloaders=stream)
    return trainer


def weights_of(module: DraftModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.drafter.state_dict().items()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def keeper(folder: Path, decode: DecodeCallback | None = None, **settings: Any) -> Keeper:
    patience = settings.pop("patience", None)
    return Keeper(
        folder, CheckpointConfig(**{"every": None, "keep": 0} | settings), decode, patience=patience
    )


class Scripted(DecodeCallback):
    """Measures nothing: says given taus."""

    def __init__(self, taus: list[float | None], every: int = 1) -> None:
        speculator: Any = None
        super().__init__(
            speculator, [], {"tree": Plan(Tree.chain(1))}, EvalConfig(**EVAL | {"every": every})
        )
        self.taus = taus

    def measure(self, module: DraftModule, *, last: bool = False) -> dict[str, float | None]:
        tau, self.measured_at = self.taus[self.evaluations], module.updates
        rounds = 0 if tau is None else 100
        one = Tally(rounds=rounds, emitted=round((tau or 0) * rounds))
        self.found = Evaluated([one, one], {}, None)
        self.evaluations += 1
        return {}
