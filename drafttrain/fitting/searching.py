"""Search what a drafter leaves out of the target, before it is measured."""

from __future__ import annotations

import time
from dataclasses import replace

from drafttrain.drafter.selfspec import SelfSpec
from drafttrain.files import write_json
from drafttrain.fitting.saying import say
from drafttrain.processes import rank
from drafttrain.reporting.console import clock, track
from drafttrain.training.job import Job
from drafttrain.training.prepare import usable_prompts
from drafttrain.training.skips import Found

SEARCHED = "search.json"
"""Every choice that a search tried, in a run's folder."""


def search(job: Job) -> tuple[Job, Found | None]:
    """The job with the drafter that leaves out what was found best, where a search was asked for;
    every trial goes into a file of the run.

    Only on the first process, which measures and packages.
    """
    settings = job.settings
    if settings.search is None or rank() != 0:
        return job, None
    assert isinstance(job.drafter, SelfSpec)
    began = time.monotonic()
    # What is refused afterwards is refused before the search.
    settings.final.check(job.drafter)
    usable_prompts(job.target, job.data, settings, lambda _: None)
    found = settings.search.run(
        job.drafter,
        settings.tree,
        job.data,
        seed=job.seed,
        watch=lambda items, what: track(items, description=what),
    )
    found = replace(found, seconds=time.monotonic() - began)
    objective = settings.search.objective
    write_json(
        job.run.folder / SEARCHED,
        {"objective": objective, "trials": [trial.row() for trial in found.trials]},
    )
    best, tau = found.best, "none" if found.best.tau is None else f"{found.best.tau:.2f}"
    say(
        f"searched {len(found.trials)} choices in {clock(found.seconds)}; best by "
        f"{objective}: skip_attention={list(best.choice[0])} skip_mlp={list(best.choice[1])}, "
        f"{best.value:.3f} (tau {tau})"
    )
    return replace(job, drafter=found.drafter), found
