"""Several fits, one after the other, each on what the earlier ones do not match."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from drafttrain.drafter.base import Drafter
from drafttrain.fitting.given import make_drafter
from drafttrain.fitting.learning import learn, logged
from drafttrain.fitting.parts import Parts
from drafttrain.fitting.saying import say
from drafttrain.fitting.shared import Shared
from drafttrain.reporting.console import table, track
from drafttrain.reporting.loggers import log_config
from drafttrain.target.features import FeatureSource
from drafttrain.training.boosted import (
    Boosted,
    Borrowed,
    note_member,
    procedure_facts,
    prompts_to_share_on,
    together,
)
from drafttrain.training.checkpoint import LAST, write_checkpoint
from drafttrain.training.job import Job
from drafttrain.training.prepare import Training
from drafttrain.training.references import references
from drafttrain.training.resume import go_on_from, refuse_other_run
from drafttrain.training.run import Run
from drafttrain.training.tuning import Fit, Tuning

COLUMNS = {
    "member": "member",
    "rows": "rows",
    "coverage": "coverage",
    "union": "union",
    "gain": "gain",
    "overlap": "overlap with 1, ...",
    "matched": "matched",
    "best_single": "best single",
    "best_of_all": "best of all",
    "left": "left",
}
"""What is shown of each member, and as what."""


def boost(parts: Parts, job: Job) -> Boosted:
    """Fit several drafters one after the other, each on what the earlier ones do not match, and put
    them together.

    Every fit starts with the job's drafter, unless `boost.begin` says otherwise.
    """
    chosen = job.settings.boost
    assert chosen is not None
    check(job)
    source = source_of(parts, job)
    say(source.describe())
    register(job)
    fits = Fits(parts, job, Borrowed(source, job.target, job.drafter.needs))
    say(
        f"references: the target's greedy answers to {len(job.data)} prompts, at most "
        f"{chosen.reference} tokens of each"
    )
    wanted = references(job.target, job.data, chosen.reference)
    found = Tuning(
        config=chosen,
        data=job.data,
        wanted=wanted,
        reported=wanted
        if job.held_out is None
        else references(job.target, job.held_out, chosen.reference),
        fit=fits.make,
        facts=fits.dropped,
        source=source,
        seed=job.seed,
        folder=job.run.folder / "members",
        note=functools.partial(note_member, job.run),
        say=say,
    ).run()
    source.close()
    show_members(found.rows)
    return together(
        job,
        found,
        list(fits.trainings.values()),
        watch=lambda items, what: track(items, description=what),
        say=say,
    )


def check(job: Job) -> None:
    """Raise InputError for what cannot be fitted or measured so, before anything is fitted."""
    settings = job.settings
    assert settings.boost is not None
    settings.boost.check(job.drafter)
    job.drafter.check(settings.tree)
    settings.final.check(job.drafter)
    if settings.boost.nodes is not None and job.calibration is not None:
        prompts_to_share_on(job.target, job.calibration, settings.boost)


def source_of(parts: Parts, job: Job) -> FeatureSource:
    """The target's features of all rows, which every fit reads."""
    groups = job.settings.trainer.sampler(job.data, seed=job.seed, rank=0, world=1).batches(0)
    return parts.features(
        target=job.target,
        needs=job.drafter.needs,
        data=job.data,
        groups=groups,
        spill_dir=job.run.scratch,
        shared=False,
    )


def register(job: Job) -> None:
    """Write which run this is; refuse to go on with another one."""
    facts = procedure_facts(job.config, job.target, job.data)
    if job.run.resumed is not None:
        refuse_other_run(job.run.resumed, facts, job.kept, say, job.run.checkpoints / LAST)
    write_checkpoint(job.run.checkpoints / LAST, {"facts": facts, "settings": job.kept})
    log_config(job.run.loggers, job.kept)


@dataclass
class Fits:
    """Makes the fits that the procedure asks for, each in a folder of its own."""

    parts: Parts
    job: Job
    """Of the complete run."""
    source: Borrowed
    trainings: dict[str, Training] = field(default_factory=dict)
    """By the fit's name; one that only marked rows is dropped once its facts were read."""

    def make(self, fit: Fit) -> Drafter:
        """Train a drafter, or take the one that an earlier part of the run trained."""
        own, run = self.parts.settled({"seed": fit.seed}), self.run_of(fit)
        job = replace(
            self.job,
            config=own.config.values,
            kept=own.config.kept,
            settings=self.job.settings if fit.member else self.job.settings.unmeasured,
            run=run,
            drafter=make_drafter(own, self.job.target, self.job.data, self.job.held_out),
            data=fit.data,
            held_out=self.job.held_out if fit.member else None,
            calibration=None,
        )
        if fit.begin is not None:
            job.drafter.load_state_dict(fit.begin.state_dict())
        with logged(own, run) if fit.member else contextlib.nullcontext():
            shared = Shared(home=self.job.run.folder)
            training = learn(own, job, shared, source=self.source)
        self.trainings[fit.name] = training
        return training.drafter.eval()

    def run_of(self, fit: Fit) -> Run:
        """The fit's folder, and its checkpoint where the complete run is resumed."""
        run = Run(self.job.run.folder / "members" / fit.name)
        run.folder.mkdir(parents=True, exist_ok=True)
        last = run.checkpoints / LAST
        if self.job.run.resumed is not None and last.exists():
            go_on_from(run, last, say)
        return run

    def dropped(self, fit: Fit) -> dict[str, Any]:
        """Facts of a fit that only marked rows."""
        return self.trainings.pop(fit.name).facts()


def show_members(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table of what each model matches."""
    table(
        "references matched, model by model",
        list(COLUMNS.values()),
        [[row.get(name) for name in COLUMNS] for row in rows],
    )
