"""Train a drafter for a target, measure it by decoding held-out prompts, and package the best checkpoint.

The run's folder gets config.yaml, metrics.csv, checkpoints/, acceptance.png and package/. A run that was stopped or killed goes
on with resume=last and ends with the same weights as if nothing had happened. Several processes: accelerate launch.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import os
import shutil
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import hydra.utils
import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from drafttrain.data.conversations import HELD_OUT
from drafttrain.data.datamodule import ConversationData
from drafttrain.decoding.loop import Plan
from drafttrain.decoding.speculator import Speculator
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.vocabulary import coverage, most_frequent
from drafttrain.errors import InputError
from drafttrain.packaging.package import save_package
from drafttrain.processes import await_word, give_word, on_another_machine, rank, world_size
from drafttrain.reporting.console import clock, console, table, track
from drafttrain.reporting.figures import acceptance_curve
from drafttrain.reporting.loggers import close, log_config, log_picture, log_rows
from drafttrain.reporting.progress import ConsoleProgress
from drafttrain.runs import differences, plain, provenance, run_dir, seed_everything
from drafttrain.target import fingerprint
from drafttrain.target.features import OnlineFeatures
from drafttrain.target.load import resolve_device, resolve_dtype
from drafttrain.target.model import Target
from drafttrain.training.checkpoint import BEST, LAST, CheckpointConfig, Keeper, read_checkpoint
from drafttrain.training.course import Course, Stream, TrainerConfig
from drafttrain.training.decode_callback import DecodeCallback, EvalConfig
from drafttrain.training.final import FinalConfig, Worth, measure
from drafttrain.training.module import DraftModule
from drafttrain.training.optim import AdamW
from drafttrain.tree.topology import Growth
from drafttrain.wiring import build, door

STOPPED_BY_SIGNAL = 143
"""Exit code of a run that a signal stopped: it is not done, and can be resumed."""


@door("fit")
def main(cfg: DictConfig) -> None:
    settings = read_settings(cfg)
    data, held_out = read_data(cfg)
    with open_run(cfg) as run:
        target = load_target(cfg, data, held_out)
        drafter = make_drafter(cfg, target, data, held_out)
        training = prepare(cfg, settings, run, target, drafter, data, held_out)
        train(training)
        if training.module.stopped == "signal":
            say(f"stopped by a signal after update {training.module.updates}: continue with resume=last run_dir={run.folder}")
            raise SystemExit(STOPPED_BY_SIGNAL)
        if rank() == 0:
            use_best(training)
            worth = evaluate(training)
            package = pack(cfg, training, worth)
            say(f"the package is in {package}")


# --- before long work starts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The parts of the configuration that check themselves."""

    trainer: TrainerConfig
    optim: AdamW
    eval: EvalConfig
    checkpoint: CheckpointConfig
    final: FinalConfig
    tree: Growth


def read_settings(cfg: DictConfig) -> Settings:
    """Everything that can be refused by looking at the configuration alone."""
    if type(cfg.seed) is not int or cfg.seed < 0:
        raise InputError(f"seed={cfg.seed}: needs a whole number of at least 0")
    if type(cfg.draft_vocab) is not int or cfg.draft_vocab < 0:
        raise InputError(f"draft_vocab={cfg.draft_vocab}: needs a number of ids, or 0 for all")
    takes = inspect.signature(hydra.utils.get_object(cfg.drafter._target_)).parameters
    if cfg.draft_vocab and "draft_ids" not in takes:
        name = cfg.drafter._target_.rpartition(".")[2]
        raise InputError(f"draft_vocab={cfg.draft_vocab}: {name} has no draft vocabulary, set it to 0")
    trainer: TrainerConfig = build(cfg.trainer)
    if trainer.batch_tokens is None and trainer.batch_rows is None:
        raise InputError("give trainer.batch_tokens or trainer.batch_rows")
    if trainer.accelerator not in ("auto", "cpu", "gpu", "mps"):
        raise InputError(f"trainer.accelerator={trainer.accelerator}: give auto, cpu, gpu or mps")
    if trainer.accelerator == "gpu" and not torch.accelerator.is_available():
        raise InputError("trainer.accelerator=gpu: no accelerator was found here, give cpu or auto")
    settings = Settings(
        trainer, build(cfg.optim), build(cfg.eval), build(cfg.checkpoint), build(cfg.final), build(cfg.tree)
    )
    if not settings.tree.size:
        raise InputError("the tree is empty: give tree=chain tree.k=4, or tree=static")
    return settings


def read_data(cfg: DictConfig) -> tuple[ConversationData, ConversationData | None]:
    """Training rows, and held-out ones if the set has any. Raises InputError if there is nothing to learn from."""
    data: ConversationData = build(cfg.data, split="train")
    held_out = None
    if data.set.indices(HELD_OUT):
        with contextlib.suppress(InputError):  # Rows without a supervised token within max_length.
            held_out = build(cfg.data, split="held_out", limit_tokens=None, limit_rows=None, temperatures=None)
    say(data.summary())
    say("held_out: no rows, so nothing is measured by decoding" if held_out is None else held_out.summary())
    return data, held_out


@dataclass
class Run:
    """The run's folder and what is resumed from it."""

    folder: Path
    resumed: dict[str, Any] | None
    loggers: list[Logger]

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def scratch(self) -> Path:
        return self.folder / "scratch"


@contextlib.contextmanager
def open_run(cfg: DictConfig) -> Any:
    """Choose the folder, read what is resumed, and settle what all processes must have in common.

    A folder that holds nothing in the end, because the run was refused, is removed again.
    """
    if cfg.resume is not None and cfg.resume != "last":
        given = Path(str(cfg.resume)).expanduser().absolute()
        if not given.is_file():
            raise InputError(f"resume={cfg.resume}: give last, or the path of a checkpoint")
        cfg.run_dir = cfg.run_dir or str(given.parent.parent)
    folder = run_dir(cfg, resume=cfg.resume is not None)
    run = Run(folder, None, [])
    try:
        if cfg.resume is not None:
            run.resumed = read_resumed(cfg, run)
        settle_dtype(cfg, run)
        run.loggers = build(cfg.logger, run_dir=folder)
        if rank() == 0:
            config = folder / "config.yaml"
            if not config.exists():
                config.write_text(OmegaConf.to_yaml(cfg), encoding="utf-8")
        yield run
    except InputError:
        if rank() == 0 and not run.checkpoints.exists() and cfg.resume is None:
            (folder / "config.yaml").unlink(missing_ok=True)
        raise
    finally:
        if rank() == 0:
            shutil.rmtree(run.scratch, ignore_errors=True)
            with contextlib.suppress(OSError):
                folder.rmdir()
        close(run.loggers)


def read_resumed(cfg: DictConfig, run: Run) -> dict[str, Any] | None:
    path = run.checkpoints / LAST if cfg.resume == "last" else Path(str(cfg.resume)).expanduser().absolute()
    if cfg.resume == "last" and not path.exists():
        say(f"{run.folder} holds no checkpoint yet: starts from the beginning")
        return None
    return read_checkpoint(path)


def settle_dtype(cfg: DictConfig, run: Run) -> None:
    """One dtype of the target for all processes and all parts of a run; what a killed run left behind is removed first.

    Which dtype is faster here is measured, so two processes, or two days, could disagree.
    """
    if cfg.trainer.accelerator == "cpu" and cfg.target.get("device") == "auto":
        cfg.target.device = "cpu"
    asked = cfg.target.get("dtype") == "auto"
    dtype = ""
    if rank() == 0:
        shutil.rmtree(run.scratch, ignore_errors=True)
        if asked:
            if run.resumed is not None:
                dtype = run.resumed["facts"]["target"]["dtype"]
            else:
                found = resolve_dtype("auto", resolve_device(cfg.target.get("device", "auto")), "throughput")
                dtype = str(found).removeprefix("torch.")
        give_word(dtype)
    elif not on_another_machine():
        dtype = await_word("the target's dtype")
    elif asked:
        raise InputError("processes on several machines cannot agree on the target's dtype alone: give target.dtype=bfloat16")
    if asked and dtype:
        cfg.target.dtype = dtype


def load_target(cfg: DictConfig, data: ConversationData, held_out: ConversationData | None) -> Target:
    """The target, checked against the set that it must have written."""
    began = time.monotonic()
    takes = inspect.signature(hydra.utils.get_object(cfg.target._target_)).parameters
    target: Target = build(cfg.target, **({"work": "throughput"} if "work" in takes else {}))
    fingerprint.refuse_other(data.fingerprint, target.fingerprint, f"data.path={cfg.data.path}")
    data.check_vocabulary(target.vocab_size)
    longest = max(*data.lengths, *([] if held_out is None else held_out.lengths), 0)
    if longest > target.context:
        raise InputError(
            f"data.path={cfg.data.path} has rows of up to {longest} tokens, the target's context holds "
            f"{target.context}: set data.max_length={target.context}"
        )
    wanted = {"auto": target.device.type, "gpu": "cuda"}.get(cfg.trainer.accelerator, cfg.trainer.accelerator)
    if wanted != target.device.type and not (wanted == "cuda" and target.device.type not in ("cpu", "mps")):
        raise InputError(
            f"trainer.accelerator={cfg.trainer.accelerator}, and the target is on {target.device}: the drafter trains where the "
            "target is, so give target.device or trainer.accelerator alone"
        )
    where = f"{target.name}, {target.dtype}, {target.device}".replace("torch.", "")
    say(f"target: {where}, loaded in {clock(time.monotonic() - began)}")
    return target


def make_drafter(
    cfg: DictConfig, target: Target, data: ConversationData, held_out: ConversationData | None
) -> Drafter:
    """The drafter, with the same weights on every process and in every run of one seed."""
    objects: dict[str, Any] = {"target": target}
    if cfg.draft_vocab:
        # All labels of the split, also where only a part of it is trained on.
        counts = data.label_counts(target.vocab_size)
        ids = most_frequent(counts, cfg.draft_vocab, always_proposable(target, data))
        objects["draft_ids"] = ids
        said = f"draft vocabulary: {len(ids)} of {target.vocab_size} ids, {coverage(counts, ids):.1%} of training labels"
        if held_out is not None:
            unseen = held_out.label_counts(target.vocab_size)
            said += f", {coverage(unseen, ids):.1%} of held-out labels"
        say(said + "; the rest count as misses")
    seed_everything(cfg.seed)
    drafter: Drafter = build(cfg.drafter, **objects)
    say("; ".join(f"{name}: {value}" for name, value in {"drafter": type(drafter).__name__, **drafter.describe()}.items()))
    return drafter


def always_proposable(target: Target, data: ConversationData) -> set[int]:
    """Stop tokens, and special tokens of the tokenizer that occur in the set."""
    specials = set(getattr(target.tokenizer, "all_special_ids", ()) or ())
    specials |= set(getattr(target.tokenizer, "added_tokens_decoder", {}) or {})
    return set(target.stop_ids) | (specials & set(np.unique(data.set.ids).tolist()))


# --- the run -----------------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """What a run is made of."""

    settings: Settings
    run: Run
    target: Target
    drafter: Drafter
    module: DraftModule
    stream: Stream
    source: OnlineFeatures
    speculator: Speculator
    decode: DecodeCallback
    keeper: Keeper
    prompts: list[list[int]]
    seed: int


def prepare(
    cfg: DictConfig,
    settings: Settings,
    run: Run,
    target: Target,
    drafter: Drafter,
    data: ConversationData,
    held_out: ConversationData | None,
) -> Training:
    """Put the parts together, and take over what is resumed."""
    drafter.check(settings.tree)
    settings.final.check(drafter)
    world = world_size()
    sampler = settings.trainer.sampler(data, seed=cfg.seed, rank=rank(), world=world)
    course = settings.trainer.course(sampler)
    first = [settings.trainer.sampler(data, seed=cfg.seed, rank=r, world=world).batches(0) for r in range(world)]
    groups = [group for batches in first for group in batches if group[0] >= 0]
    shared = world > 1 and int(os.environ.get("LOCAL_WORLD_SIZE", world)) == world
    source: OnlineFeatures = build(
        cfg.features,
        target=target,
        needs=drafter.needs,
        data=data,
        groups=groups,
        spill_dir=run.scratch if shared or world == 1 else run.scratch / str(rank()),
        shared=shared,
    )
    say(source.describe())
    module = DraftModule(drafter, source, settings.optim, course, seed=cfg.seed, log_every=settings.trainer.log_every)
    plan = Plan(settings.tree)
    speculator = Speculator(target, drafter, plan)
    prompts = usable_prompts(target, data, settings)
    decode = DecodeCallback(
        speculator,
        prompts,
        {"tree": plan},
        settings.eval,
        held_out=held_out,
        source=None if held_out is None else kept_in_memory(target, drafter, held_out, cfg),
        seed=cfg.seed,
    )
    facts = facts_of(cfg, target, data, module, world)
    keeper = Keeper(
        run.checkpoints, settings.checkpoint, decode, patience=settings.eval.patience, facts=facts, settings=plain(cfg)
    )
    stream = Stream(data, sampler, course)
    refuse_full_disk(run.folder, drafter)
    if run.resumed is not None:
        refuse_other_run(run.resumed, facts, plain(cfg))
        module.continue_from(run.resumed)
        keeper.load_state_dict(run.resumed["keeper"])
        if run.resumed["decode"] is not None:
            decode.load_state_dict(run.resumed["decode"])
        stream.position = module.position
        say(f"goes on behind update {module.updates}, {course.epoch(module.position):.2f} epochs")
    say(outline(course, settings, data))
    return Training(settings, run, target, drafter, module, stream, source, speculator, decode, keeper, prompts, cfg.seed)


def kept_in_memory(target: Target, drafter: Drafter, data: ConversationData, cfg: DictConfig) -> OnlineFeatures:
    """Held-out rows' features; few, so that evaluations after the first read them from memory."""
    dtype = cfg.features.get("keep_dtype", "bfloat16")
    return OnlineFeatures(target, drafter.needs, data=data, keep_dtype=dtype, spill_dir=None)


def usable_prompts(target: Target, data: ConversationData, settings: Settings) -> list[list[int]]:
    """Held-out prompts that leave room in the target's context."""
    room = max(settings.eval.max_new_tokens, settings.final.max_new_tokens, settings.final.speed_new_tokens)
    prompts = [prompt for prompt in data.set.prompts() if prompt]
    usable = [prompt for prompt in prompts if len(prompt) + room <= target.context]
    if len(usable) < len(prompts):
        say(f"{len(prompts) - len(usable)} held-out prompts leave less than {room} tokens of the context and are not decoded")
    return usable


def facts_of(cfg: DictConfig, target: Target, data: ConversationData, module: DraftModule, world: int) -> dict[str, Any]:
    """What decides which update comes next. A run is only resumed where all of it is the same."""
    content = hashlib.sha256()
    for array in (data.set.ids, data.set.offsets, data.set.mask, data.set.split):
        content.update(np.ascontiguousarray(array).tobytes())
    config = plain(cfg)
    in_rate = ("warmup", "schedule", "end_factor", "horizon")
    return {
        "target": target.fingerprint,
        "data": content.hexdigest()[:16],
        "rows": {name: value for name, value in config["data"].items() if name not in ("_target_", "path")},
        "drafter": config["drafter"],
        "draft_vocab": config["draft_vocab"],
        "optim": {name: value for name, value in config["optim"].items() if name not in in_rate},
        "rate": module.rate.facts(),
        "batches": {name: config["trainer"][name] for name in ("batch_tokens", "batch_rows", "accumulate", "precision")},
        "features": {"keep_dtype": config["features"]["keep_dtype"]},
        "processes": world,
        "seed": config["seed"],
    }


def refuse_other_run(resumed: dict[str, Any], facts: dict[str, Any], config: dict[str, Any]) -> None:
    """List what differs from the earlier part of the run; refuse what would make it another run."""
    important = differences(resumed["facts"], facts)
    other = differences(resumed["settings"], config)
    for key in ("resume", "run_dir", "target.dtype", "target.device"):
        other.pop(key, None)
    if other:
        listed = "; ".join(f"{key} was {before}, is {now}" for key, (before, now) in other.items())
        say(f"settings differ from the earlier part of this run: {listed}")
    if important:
        listed = "; ".join(f"{key} was {before}, is {now}" for key, (before, now) in important.items())
        raise InputError(f"this would not be the same run ({listed}): start a new one with another run_dir, or set these back")


def refuse_full_disk(folder: Path, drafter: Drafter) -> None:
    """Weights and two moments, in last, best and one being written, and the package."""
    trained = sum(p.numel() * p.element_size() for p in drafter.parameters() if p.requires_grad)
    needed, free = trained * (3 * 3 + 1), shutil.disk_usage(folder).free
    if rank() == 0 and free < needed:
        raise InputError(
            f"{folder} has {free / 1e6:.0f} MB free, checkpoints and package need {needed / 1e6:.0f} MB: "
            "free some space, or give run_dir=<folder on another disk>"
        )


def outline(course: Course, settings: Settings, data: ConversationData) -> str:
    updates = course.updates
    words = [f"{course.updates_per_epoch} updates an epoch of {data.supervised} supervised tokens"]
    words.append("until the clock ends the run" if updates is None else f"{updates} updates in all")
    if course.seconds is not None:
        words.append(f"at most {clock(course.seconds)}")
    if settings.optim.schedule != "constant" and updates is not None and settings.optim.horizon not in (None, updates):
        words.append(f"the rate's schedule ends at update {settings.optim.horizon}")
    return "course: " + ", ".join(words)


def train(training: Training) -> None:
    module, settings = training.module, training.settings
    budget, patience = module.course.seconds, settings.eval.patience
    over = (budget is not None and module.seconds >= budget) or (
        patience is not None and training.keeper.without_progress >= patience
    )
    if module.finished or over:
        say("training is already done")
        return
    quiet_lightning()
    log_config(training.run.loggers, training.keeper.settings)
    trainer = Trainer(
        **place(settings.trainer, training.target),
        precision=cast(Any, settings.trainer.precision),
        max_epochs=1,  # of the trainer's own: one pass over the run's stream
        max_steps=-1 if module.course.updates is None else module.course.updates,
        logger=training.run.loggers or False,
        callbacks=[ConsoleProgress(), training.decode, training.keeper],
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        default_root_dir=training.run.folder,
    )
    began = time.monotonic()
    trainer.fit(module, train_dataloaders=training.stream)
    training.source.close()
    why = {"time": ", by the clock", "patience": ", since val/tau no longer rose", "signal": ", by a signal"}
    empty = f"; {module.empty_windows} windows had no supervised token and made no update" if module.empty_windows else ""
    say(
        f"trained {module.updates} updates in {clock(time.monotonic() - began)}{why.get(module.stopped or '', '')}, "
        f"{clock(training.decode.seconds)} of all parts for evaluation{empty}"
    )


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


# --- the result ----------------------------------------------------------------------------------------------------------


def use_best(training: Training) -> None:
    """Take the best checkpoint's weights; the last's where nothing could be measured."""
    best = training.run.checkpoints / BEST
    path = best if training.keeper.best is not None and best.exists() else training.run.checkpoints / LAST
    state = read_checkpoint(path)
    training.module.load_state_dict(state["weights"])
    training.drafter.to(training.target.device)
    tau = "" if training.keeper.best is None else f", val/tau {training.keeper.best:.3f}"
    say(f"uses {path.name} of update {state['progress']['updates']}{tau}")
    training.speculator.refresh(training.drafter)


def evaluate(training: Training) -> Worth:
    """Measure by decoding, show the table and draw the picture."""
    began = time.monotonic()
    worth = measure(
        training.speculator,
        training.prompts,
        training.settings.final,
        seed=training.seed,
        watch=lambda items, what: track(items, description=what),
    )
    if not worth.rows:
        say("no held-out prompt to decode: acceptance and speed are not available")
        return worth
    columns = ("tree", "nodes", "tau", "interval", "accept@1..", "speed-up", "interval", "same text", "guarantee")
    table("held-out prompts, greedy", columns, [shown(row) for row in worth.rows])
    say(f"measured in {clock(time.monotonic() - began)}")
    picture = acceptance_curve(worth.rows, training.run.folder / "acceptance.png", title="held-out prompts, greedy")
    log_picture(training.run.loggers, "acceptance", picture, training.module.updates)
    log_rows(training.run.loggers, worth.rows, "final", training.module.updates)
    return worth


def shown(row: dict[str, Any]) -> list[Any]:
    def pair(value: Any) -> Any:
        return None if value is None else tuple(value)

    same = None if row.get("same_as_plain") is None else f"{row['same_as_plain']} of {row['prompts']}"
    accept = [value for value in row["accept_at"] if value is not None]
    return [
        row["label"],
        row["nodes"],
        row["tau"],
        pair(row["tau_interval"]),
        " ".join(f"{value:.2f}" for value in accept),
        row["speedup"],
        pair(row["speedup_interval"]),
        same,
        row["guarantee"],
    ]


def pack(cfg: DictConfig, training: Training, worth: Worth) -> Path:
    module = training.module
    best = training.keeper.best_update
    origin = provenance(cfg) | {
        "training": {
            "updates": module.updates,
            "best_update": best,
            "epochs": module.course.epoch(module.position),
            "supervised_tokens_seen": int(module.supervised),
            "seconds": round(training.module.seconds_before if module._began is None else module.seconds),
            "data": training.keeper.facts["data"],
        }
    }
    return save_package(
        training.run.folder / "package",
        drafter=training.drafter,
        target=training.target,
        plan=worth.plan,
        metrics=worth.metrics,
        provenance=origin,
        trained_length=max(training.stream.data.lengths),
    )


def say(text: str) -> None:
    """A line on rank 0."""
    if rank() == 0:
        console().print(f"fit: {text}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
