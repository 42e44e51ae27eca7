"""One fit: a drafter is trained, and its best checkpoint taken."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping

from drafttrain import companions
from drafttrain.checks import pasted
from drafttrain.data.datamodule import ConversationData
from drafttrain.errors import InputError, first_line
from drafttrain.fitting.given import make_adapter
from drafttrain.fitting.parts import Parts
from drafttrain.fitting.saying import say
from drafttrain.fitting.shared import Shared
from drafttrain.processes import rank
from drafttrain.reporting.console import clock
from drafttrain.reporting.figures import head_accuracies
from drafttrain.reporting.loggers import close, log_config, log_picture
from drafttrain.reporting.progress import ConsoleProgress
from drafttrain.training.boosted import Borrowed
from drafttrain.training.checkpoint import BEST, LAST, check_complete, read_checkpoint
from drafttrain.training.course import Course
from drafttrain.training.job import Job, Settings
from drafttrain.training.judged import PRUNED, Judged
from drafttrain.training.optim import CLOCK
from drafttrain.training.pairing import lay_out
from drafttrain.training.prepare import Ready, Training, prepare, prepare_untrained
from drafttrain.training.resume import read_best
from drafttrain.training.run import Run
from drafttrain.training.trainer import quiet_lightning, trainer_of
from drafttrain.wiring.doors import STOPPED_BY_SIGNAL


@contextlib.contextmanager
def logged(parts: Parts, run: Run) -> Iterator[None]:
    """The run's loggers while it lasts; its configuration is kept once they could be made. A run
    that is only tried has neither."""
    if parts.dry_run:
        yield
        return
    run.loggers = parts.loggers(run_dir=run.folder)
    try:
        run.keep_config(parts.config.yaml)
        yield
    finally:
        close(run.loggers)


def learn(parts: Parts, job: Job, shared: Shared, *, source: Borrowed | None = None) -> Training:
    """Train, and take the best checkpoint's weights, unless the run was judged not worth its time.
    Ends the program if a signal ended the training.

    Args:
        shared: what this run shares with others.
        source: features that several fits of one run read; None makes this fit's own.
    """
    judged = Judged(shared.judge)

    def show(metrics: Mapping[str, float | None], updates: int) -> None:
        draw_heads(job.run, metrics, updates)
        judged.hear(metrics, updates)

    training = prepare(
        job,
        adapter=make_adapter(job),
        make_source=shared.features(parts) if source is None else lambda **_given: source,
        make_sim=shared.held_out_features(parts),
        show=show,
        say=say,
    )
    say(outline(training.module.course, job.settings, job.data))
    shortfall = training.module.rate.shortfall(training.module.course.updates)
    if shortfall:
        say(
            f"WARNING: {shortfall}: see optim.schedule, optim.warmup and optim.end_factor, or "
            "train longer"
        )
    train(training, judged)
    if training.module.stop_requested or training.module.stopped == "signal":
        say(
            f"stopped by a signal after update {training.updates}: continue with resume=last "
            f"{pasted('run_dir', shared.home or job.run.folder)}"
        )
        raise SystemExit(STOPPED_BY_SIGNAL)  # It is not done, and can be resumed.
    if rank() == 0 and training.module.stopped != PRUNED:
        use_best(training, pack=parts.target.get("pack"))
    return training


def untrained(job: Job) -> Ready:
    """A drafter that learns nothing, as it is."""
    ready = prepare_untrained(job, say)
    log_config(job.run.loggers, job.kept)
    return ready


def outline(course: Course, settings: Settings, data: ConversationData) -> str:
    """How long the run is, in words."""
    updates = course.updates
    words = [f"{course.updates_per_epoch} updates an epoch of {data.supervised} supervised tokens"]
    words.append("until the clock ends the run" if updates is None else f"{updates} updates in all")
    if course.seconds is not None:
        words.append(f"at most {clock(course.seconds)}")
    if settings.optim.horizon == CLOCK:
        words.append("the rate's schedule ends by the clock")
    elif (
        settings.optim.schedule != "constant"
        and updates is not None
        and settings.optim.horizon not in (None, updates)
    ):
        words.append(f"the rate's schedule ends at update {settings.optim.horizon}")
    return "course: " + ", ".join(words)


def train(training: Training, judged: Judged) -> None:
    """Train until the run's end, unless it is there already; an evaluation that is due at the end
    and was cut off is made."""
    module, settings = training.module, training.settings
    done = done_already(training)
    if done:
        say(done)
        training.stream.ended = True
        if not module.updates or training.decode.measured_at == module.updates:
            return
        say("its last evaluation was cut off, and is made now")
    quiet_lightning()
    log_config(training.run.loggers, training.keeper.settings)
    trainer = trainer_of(
        settings.trainer,
        module,
        training.target,
        loggers=training.run.loggers,
        callbacks=[ConsoleProgress(), training.decode, training.keeper, judged],
        folder=training.run.folder,
        trains=not done,
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
        PRUNED: ", pruned: it is below the median of other runs",
    }
    empty = (
        f"; {module.empty_windows} windows had no supervised token and made no update"
        if module.empty_windows
        else ""
    )
    if module.spoilt_windows:
        empty += (
            f"; {module.spoilt_windows} windows had a gradient that is not finite, or too large to "
            "be squared, and made no update"
        )
    say(
        f"trained {module.updates} updates in "
        f"{clock(time.monotonic() - began)}{why.get(module.stopped or '', '')}, "
        f"{clock(training.decode.seconds)} of all parts for evaluation{empty}"
    )


def done_already(training: Training) -> str:
    """Why a run that goes on has nothing to train, in words; empty where it has."""
    module, patience = training.module, training.settings.eval.patience
    at = f"the run is at update {module.updates}"
    course = module.course
    if course.length is not None and module.position > course.length:
        return (
            f"{at} already, beyond the {course.updates} that trainer.max_steps and "
            "trainer.max_epochs ask for: nothing is trained, and no update is taken back"
        )
    if module.finished:
        return f"training is already done: {at}, its last"
    if course.seconds is not None and module.seconds >= course.seconds:
        return f"{at}, and trainer.max_minutes are used up: nothing is trained"
    if patience is not None and training.keeper.without_progress >= patience:
        return f"{at}, and eval.patience ended it: nothing is trained"
    return ""


def use_best(training: Training, *, pack: str | bool | None) -> None:
    """Take the best checkpoint's weights; the last's where nothing could be measured.

    A target that was trained too is put together as its package will be.

    Args:
        pack: how the target's weights are laid out; None where its kind has no such setting.
    """
    keeper = training.keeper
    path = training.run.checkpoints / (LAST if keeper.best is None else BEST)
    if keeper.best is None:
        state = read_checkpoint(path)
        check_complete(state, path)
    else:  # It may have been changed while the run trained.
        state = read_best(path, {"keeper": keeper.state_dict(), "facts": keeper.facts})
    try:
        training.module.take_weights(state["weights"])
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"the weights in {path} do not fit ({first_line(error)}): train again in another "
            "run_dir"
        ) from error
    training.drafter.to(training.target.device)
    tau = "" if keeper.best is None else f", val/tau {keeper.best:.3f}"
    say(f"uses {path.name} of update {state['progress']['updates']}{tau}")
    training.settle(functools.partial(lay_out, pack=pack))
    training.speculator.refresh(training.drafter)


def draw_heads(run: Run, metrics: Mapping[str, float | None], updates: int) -> None:
    """The picture of head accuracies, for a drafter that has heads."""
    path = run.folder / "heads.png"
    if head_accuracies(metrics, path):
        log_picture(run.loggers, "heads", path, updates)
