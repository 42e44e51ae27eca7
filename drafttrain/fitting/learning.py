"""One fit: a drafter is trained, and its best checkpoint taken."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from omegaconf import DictConfig

from drafttrain import companions
from drafttrain.data.datamodule import ConversationData
from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError, first_line
from drafttrain.fitting.given import make_adapter
from drafttrain.fitting.saying import say
from drafttrain.processes import rank
from drafttrain.reporting.console import clock
from drafttrain.reporting.figures import head_accuracies
from drafttrain.reporting.loggers import close, log_config, log_picture
from drafttrain.reporting.progress import ConsoleProgress
from drafttrain.runs import plain
from drafttrain.target.model import Target
from drafttrain.training.boosted import Borrowed
from drafttrain.training.checkpoint import BEST, LAST, check_complete, read_checkpoint
from drafttrain.training.course import Course
from drafttrain.training.pairing import lay_out
from drafttrain.training.prepare import Settings, Training, prepare
from drafttrain.training.run import Run
from drafttrain.training.trainer import quiet_lightning, trainer_of
from drafttrain.wiring.building import build
from drafttrain.wiring.doors import STOPPED_BY_SIGNAL


@contextlib.contextmanager
def logged(cfg: DictConfig, run: Run) -> Iterator[None]:
    """The run's loggers while it lasts; its configuration is kept once they could be made."""
    run.loggers = build(cfg.logger, run_dir=run.folder)
    try:
        run.keep_config(cfg)
        yield
    finally:
        close(run.loggers)


def learn(
    cfg: DictConfig,
    settings: Settings,
    run: Run,
    target: Target,
    drafter: Drafter,
    data: ConversationData,
    held_out: ConversationData | None,
    *,
    calibration: ConversationData | None = None,
    source: Borrowed | None = None,
    home: Path | None = None,
) -> Training:
    """Train, and take the best checkpoint's weights. Ends the program if a signal ended the
    training.

    Args:
        source: features that several fits read; None makes this fit's own.
        home: the folder of the whole run, where this fit is a part of one.
    """
    adapter = make_adapter(cfg, settings, target, drafter)
    training = prepare(
        plain(cfg),
        settings,
        run,
        target,
        drafter,
        data,
        held_out,
        calibration=calibration,
        adapter=adapter,
        make_source=functools.partial(build, cfg.features)
        if source is None
        else lambda **_given: source,
        show=functools.partial(draw_heads, run),
        say=say,
    )
    say(outline(training.module.course, settings, data))
    train(training)
    if training.module.stop_requested or training.module.stopped == "signal":
        say(
            f"stopped by a signal after update {training.updates}: continue with resume=last "
            f"run_dir={home or run.folder}"
        )
        raise SystemExit(STOPPED_BY_SIGNAL)  # It is not done, and can be resumed.
    if rank() == 0:
        use_best(cfg, training)
    return training


def outline(course: Course, settings: Settings, data: ConversationData) -> str:
    updates = course.updates
    words = [f"{course.updates_per_epoch} updates an epoch of {data.supervised} supervised tokens"]
    words.append("until the clock ends the run" if updates is None else f"{updates} updates in all")
    if course.seconds is not None:
        words.append(f"at most {clock(course.seconds)}")
    if (
        settings.optim.schedule != "constant"
        and updates is not None
        and settings.optim.horizon not in (None, updates)
    ):
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
    trainer = trainer_of(
        settings.trainer,
        module,
        training.target,
        loggers=training.run.loggers,
        callbacks=[ConsoleProgress(), training.decode, training.keeper],
        folder=training.run.folder,
    )
    companions.meet("the first update")
    companions.at("trains")
    began = time.monotonic()
    trainer.fit(module, train_dataloaders=training.stream)
    training.source.close()
    why = {
        "time": ", by the clock",
        "patience": ", since val/tau no longer rose",
        "signal": ", by a signal",
    }
    empty = (
        f"; {module.empty_windows} windows had no supervised token and made no update"
        if module.empty_windows
        else ""
    )
    say(
        f"trained {module.updates} updates in "
        f"{clock(time.monotonic() - began)}{why.get(module.stopped or '', '')}, "
        f"{clock(training.decode.seconds)} of all parts for evaluation{empty}"
    )


def use_best(cfg: DictConfig, training: Training) -> None:
    """Take the best checkpoint's weights; the last's where nothing could be measured. A target that
    was trained too is put together as its package will be."""
    best = training.run.checkpoints / BEST
    path = (
        best
        if training.keeper.best is not None and best.exists()
        else training.run.checkpoints / LAST
    )
    state = read_checkpoint(path)
    check_complete(state, path)
    try:
        training.module.load_state_dict(state["weights"])
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"the weights in {path} do not fit ({first_line(error)}): train again in another "
            f"run_dir"
        ) from error
    training.drafter.to(training.target.device)
    tau = "" if training.keeper.best is None else f", val/tau {training.keeper.best:.3f}"
    say(f"uses {path.name} of update {state['progress']['updates']}{tau}")
    training.settle(functools.partial(lay_out, pack=cfg.target.get("pack")))
    training.speculator.refresh(training.drafter)


def draw_heads(run: Run, metrics: Mapping[str, float | None], updates: int) -> None:
    """The picture of head accuracies, for a drafter that has heads."""
    path = run.folder / "heads.png"
    if head_accuracies(metrics, path):
        log_picture(run.loggers, "heads", path, updates)
