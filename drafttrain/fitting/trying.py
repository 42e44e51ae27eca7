"""Try a run before it is paid for: everything but training, and what the run will take.

Some updates are made to time them, and some tokens decoded; the drafter that they changed is thrown
away, and nothing is written.
"""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch.loggers.logger import DummyLogger

from drafttrain.decoding.plan import Plan
from drafttrain.decoding.replaying import Replays
from drafttrain.errors import InputError, room
from drafttrain.fitting import boosting
from drafttrain.fitting.given import make_adapter
from drafttrain.fitting.learning import outline
from drafttrain.fitting.opening import settle_dtype
from drafttrain.fitting.parts import Parts
from drafttrain.fitting.saying import say
from drafttrain.layouts import pairs
from drafttrain.layouts.writing import Source
from drafttrain.packaging.contents import files_of, language_model_of, tensors_of
from drafttrain.packaging.manifest import PACKAGE
from drafttrain.packaging.writing import check_place
from drafttrain.processes import peak_memory, world_size
from drafttrain.reporting.console import clock, table
from drafttrain.reporting.progress import ConsoleProgress
from drafttrain.runs import check_run_dir
from drafttrain.target import answers
from drafttrain.target.answers import SLOTS
from drafttrain.training.boost import Boost
from drafttrain.training.course import Course
from drafttrain.training.decode_callback import measured
from drafttrain.training.final import accepted_prompts, trees_of
from drafttrain.training.job import Job
from drafttrain.training.prepare import Ready, Training, prepare, prepare_untrained
from drafttrain.training.run import Run
from drafttrain.training.trainer import quiet_lightning, trainer_of
from drafttrain.tree.topology import Tree

UPDATES, WARM = 6, 2
"""Updates that are made, and how many of them are not counted, since the first ones are slow."""
TOKENS = 8
"""Decoded of each prompt, to time one."""
Rows = list[tuple[str, str]]
"""What is shown: a name, and what there is to say of it."""
PLAIN = Plan(Tree.chain(0))


@contextmanager
def open_trial(parts: Parts) -> Iterator[tuple[Run, Parts]]:
    """As `opening.open_run`, in a folder that is empty and gone afterwards, next to the run's own.

    Raises: InputError for what a real run would refuse, and for what cannot be tried.
    """
    if parts.resume is not None:
        raise InputError("dry_run=true tries a new run: leave resume out")
    if world_size() > 1:
        raise InputError("dry_run=true tries a run in one process: start it without a launcher")
    folder = check_run_dir(parts.run_dir, resume=False) or Path("runs").absolute()
    if parts.run_dir:
        check_place(folder / PACKAGE)
    above = next(one for one in (*folder.parents, Path.cwd()) if one.is_dir())
    with TemporaryDirectory(prefix=".dry-run-", dir=above) as scratch:
        run = Run(Path(scratch))
        yield run, settle_dtype(parts, run)


def try_out(parts: Parts, job: Job) -> None:
    """Prepare, make and decode a little, and show what the run will take."""
    rows: Rows = [("rows", job.data.summary())]
    if job.held_out is not None:
        rows.append(("", job.held_out.summary()))
    if job.settings.search is not None:
        rows.append(("search", "was not tried, and its time is not in these"))
    if job.drafter.learns:
        rows += learned(parts, job)
    else:
        ready = prepare_untrained(job, say)
        rows += worth_of(parts, ready, evaluations=0, training=0.0)
    table("dry run: nothing was trained or written", ("", "what the run takes"), rows)


def learned(parts: Parts, job: Job) -> Rows:
    """Of a drafter that is trained."""
    boost = job.settings.boost
    if boost is not None:
        boosting.check(job)
    adapter = make_adapter(job)
    training = prepare(
        job,
        adapter=adapter,
        make_source=parts.features,
        show=lambda _metrics, _updates: None,
        say=say,
    )
    course, source = training.module.course, training.source
    words = outline(course, job.settings, job.data).removeprefix("course: ")
    timed = time_updates(training)
    kept = getattr(source, "mode", "recompute") != "recompute"
    seconds = training_seconds(course, timed, kept=kept)
    took = "until the clock ends it" if seconds is None else f"about {clock(seconds)}"
    if boost is not None and seconds is not None:
        took = f"{fits_of(boost)} fits at most, each about {clock(seconds)}"
        seconds *= fits_of(boost)
    source.close()
    written = 2 + job.settings.checkpoint.keep
    return [
        ("course", words),
        ("loss of the first update", f"{timed.loss:.4g}"),
        ("an update", f"{timed.seconds:.2g} s, {timed.target:.2g} s of it to read features"),
        ("training", took),
        ("checkpoints", f"at most {written} of {room(timed.checkpoint)} each"),
        *worth_of(parts, training, evaluations=evaluations_of(training, course), training=seconds),
    ]


# --- one update -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """What the first updates showed."""

    loss: float
    """Of the very first, per supervised token."""
    seconds: float
    """Of one."""
    target: float
    """Of them, those until its features were there."""
    checkpoint: int
    """Bytes of weights and moments."""


class _Heard(DummyLogger):
    """What a module reports after each update, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = [(time.perf_counter(), 0.0, 0.0)]

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        numbers = (metrics["train/loss"], metrics.get("train/feature_share", 0.0))
        self.heard.append((time.perf_counter(), *numbers))


def time_updates(training: Training) -> Timed:
    """Make the run's first updates as the run would, in as many as there are of `UPDATES`."""
    module, whole = training.module, training.module.course
    short = replace(whole, steps=min(UPDATES, whole.updates or UPDATES), seconds=None)
    module.course = training.stream.course = short
    module.log_every = 1
    logger = _Heard()
    quiet_lightning()
    trainer = trainer_of(
        training.settings.trainer,
        module,
        training.target,
        loggers=[logger],
        callbacks=[ConsoleProgress()],
        folder=training.run.folder,
    )
    trainer.fit(module, train_dataloaders=training.stream)
    if len(logger.heard) < 2:
        raise InputError("the first batches have no supervised token: nothing can be tried")
    each = list(zip(logger.heard, logger.heard[1:], strict=False))
    counted = each[min(WARM, len(each) - 1) :]
    moments = trainer.optimizers[0].state_dict()["state"].values()
    return Timed(
        loss=logger.heard[1][1],
        seconds=statistics.median(after[0] - before[0] for before, after in counted),
        target=statistics.median((b[0] - a[0]) * b[2] for a, b in counted),
        checkpoint=bytes_of(module.state_dict()) + sum(map(bytes_of, moments)),
    )


def bytes_of(tensors: Mapping[str, Any]) -> int:
    """Of those values that are tensors."""
    return sum(one.numel() * one.element_size() for one in tensors.values() if torch.is_tensor(one))


def training_seconds(course: Course, timed: Timed, *, kept: bool) -> float | None:
    """Of all updates; None for a run that only the clock ends.

    Args:
        kept: are features made in the first epoch only?
    """
    updates = course.updates
    if updates is None:
        return course.seconds
    again = max(0, updates - course.updates_per_epoch) if kept else 0
    seconds = updates * timed.seconds - again * timed.target
    return seconds if course.seconds is None else min(seconds, course.seconds)


def fits_of(boost: Boost) -> int:
    """How many fits boosting makes at most."""
    more = boost.folds if boost.marking == "cross_fitted" else 0
    return boost.members + more * (boost.members - 1)


def evaluations_of(training: Training, course: Course) -> int:
    """While the run trains, the one at its end included; 1 where their number is not known."""
    every, updates = training.settings.eval.every, course.updates
    return 1 if every is None or updates is None else -(-updates // every)


# --- decoding, memory, package, engines -----------------------------------------------------------


def worth_of(parts: Parts, ready: Ready, *, evaluations: int, training: float | None) -> Rows:
    """What is decoded while and after training, and what the run leaves."""
    decoding = decoding_seconds(ready, evaluations)
    memory, device = f"{peak_memory()} until now", ready.target.device
    if device.type == "cuda":
        memory += f", {room(torch.cuda.max_memory_allocated(device))} on the device"
    total = "?" if training is None else f"about {clock(training + decoding)}"
    free = shutil.disk_usage(ready.run.folder).free
    return [
        ("decoding", f"about {clock(decoding)}, less with drafts that are accepted"),
        ("in all", total),
        ("memory", memory),
        ("package", f"{room(package_bytes(parts, ready))}; {room(free)} are free there"),
        *((f"export to={name}", export_words(ready, name)) for name in pairs.targets()),
    ]


def decoding_seconds(ready: Ready, evaluations: int) -> float:
    """Of all evaluations and of what is measured at the end, by the time of a few tokens. Answers
    that end early are not known, nor those that are kept already."""
    live, final = ready.settings.eval, ready.settings.final
    own, there = ready.speculator.plan, len(ready.prompts)
    replays = ready.speculator.replays_plan()

    def one_by_one(prompts: int, tokens: int, trees: int) -> float:
        """Decoded plainly and with some trees."""
        known = min(prompts, there)
        return known * (seconds(1, tokens, PLAIN) + trees * seconds(1, tokens, own))

    def batched(prompts: int, batch: int, tokens: int, plan: Plan = own, by: str = "") -> float:
        known = min(prompts, there)
        return math.ceil(known / batch) * seconds(min(known, batch), tokens, plan, by)

    def accepted(prompts: int, batch: int, tokens: int) -> float:
        return batched(prompts, batch, tokens, by="replay" if replays else "")

    def seconds(batch: int, tokens: int, plan: Plan, by: str = "") -> float:
        if not batch:
            return 0.0
        if (batch, plan, by) not in times:
            time_it = time_replay if by else time_tokens
            times[batch, plan, by] = time_it(ready, batch, plan)
        first, each = times[batch, plan, by]
        return first + tokens * each

    times: dict[tuple[int, Plan, str], tuple[float, float]] = {}
    accepting, racing = (len(trees) for trees in trees_of(ready.speculator, final, None))
    accepting, racing = accepting + len(final.calibrated), racing + len(final.calibrated_speed)
    worth = len(accepted_prompts(ready.prompts, ready.speculator, final))
    total = accepting * accepted(worth, final.batch, final.max_new_tokens)
    if replays:
        total += batched(there, SLOTS, ready.settings.longest_answer, PLAIN)
    total += one_by_one(final.speed_prompts, final.speed_new_tokens, racing)
    if evaluations:
        prompts = len(measured(ready.prompts, ready.speculator, live))
        total += evaluations * accepted(prompts, live.batch, live.max_new_tokens)
        if replays:
            total += evaluations * batched(live.checked, live.batch, live.max_new_tokens)
        total += one_by_one(live.speed_prompts, live.max_new_tokens, 1)
    return total


def time_tokens(ready: Ready, batch: int, plan: Plan) -> tuple[float, float]:
    """Seconds that decoding a batch of prompts takes at first, and for each further token."""
    prompts, taken = ready.prompts[:batch], []
    for tokens in (1, 1, 1 + TOKENS):  # The first time is no measure.
        began = time.perf_counter()
        ready.speculator.generate(prompts, max_new_tokens=tokens, plan=plan, stop_ids=())
        taken.append(time.perf_counter() - began)
    return taken[1], max(0.0, taken[2] - taken[1]) / TOKENS


def time_replay(ready: Ready, batch: int, plan: Plan) -> tuple[float, float]:
    """The same of counting on the target's answers."""
    prompts, taken = ready.prompts[:batch], []
    known = {
        prompt: replace(answer, ended=True)
        for prompt, answer in answers.write(ready.target, prompts, 1 + TOKENS).items()
    }
    replays = Replays(ready.target, lambda: known)
    for tokens in (1, 1, 1 + TOKENS):
        began = time.perf_counter()
        replays.measure(ready.speculator.drafter, prompts, plan, max_new_tokens=tokens, batch=batch)
        taken.append(time.perf_counter() - began)
    return taken[1], max(0.0, taken[2] - taken[1]) / TOKENS


def package_bytes(parts: Parts, ready: Ready) -> int:
    """Of the package's tensors; its texts are small."""
    trained = ready.adapter if isinstance(ready, Training) else None
    adapter = ready.target.adapter if trained is None else trained.adapter()
    tensors = tensors_of(ready.drafter, ready.target, "float32")
    files = files_of(tensors, ready.drafter, adapter)
    model = language_model_of(ready.drafter, "float32", asked=parts.export_assistant)
    return sum(map(bytes_of, files.values())) + (0 if model is None else bytes_of(model[1]))


def export_words(ready: Ready, engine: str) -> str:
    """Can the package be written for an engine, and if not, why."""
    if ready.settings.joint is not None:
        return "no: engines do not have the target that is trained with it"
    drafter, tree = ready.drafter, ready.speculator.plan.tree
    try:
        pair = pairs.pair_of(type(drafter), engine, drafter.settings())
        readings = pair.readings
        pair.write(
            Source(
                drafter,
                ready.target,
                pair.engine,
                readings[pair.engine],
                readings,
                torch.float32,
                tokens=max(1, tree.max_depth),
            )
        )
    except InputError as error:
        return f"no: {error}"
    return "yes"
