"""Train a drafter for a target, measure it by decoding held-out prompts, and package the best
checkpoint.

The run's folder gets config.yaml, metrics.csv, checkpoints/, acceptance.png, package/, run.json
(sample answers, seconds by stage) and report.html, a page about all of it for any browser. A run
that was stopped or killed goes on with resume=last and ends with the same weights as if nothing had
happened. Several processes: accelerate launch.

With boost=collective several drafters are trained one after the other, each in its own folder in
members/, and packaged as one. A drafter that learns nothing, since it copies its drafts from text,
is made of packages or is the target with layers left out, is measured and packaged as it is.

With dry_run=true everything is done but training, nothing is written, and a table says what the run
would take.

Several processes, of accelerate launch or torchrun, end together where one is lost, and say which:
`drafttrain.companions`.

With -m one command makes a sweep, a run for each combination of values: optim.lr=4e-4,8e-4, or
choice(..), range(..), glob(..) as in Hydra. With sweep=optuna the runs are chosen by those before
them, from lists and ranges such as 'optim.lr=tag(log,interval(1e-4,1e-2))', and those not worth
their time are ended. The target is loaded once. Every run has a folder below the sweep's, run_dir=;
sweep.json, a table and report.html compare their val/tau, and best/package is the best one's. The
same words with -m and resume=last go on with a sweep that was stopped or killed.
"""

from __future__ import annotations

import time

from omegaconf import DictConfig

from drafttrain.fitting.first import check_first
from drafttrain.fitting.sweeps import check_sweep
from drafttrain.wiring.doors import door
from drafttrain.wiring.sweeps import Sweep

DOOR = door("fit", together=True, check=check_first, check_sweep=check_sweep)
if __name__ == "__main__":
    DOOR.greet(__doc__)

from drafttrain.data.datamodule import ConversationData
from drafttrain.fitting.agreement import check_agreement
from drafttrain.fitting.boosting import boost
from drafttrain.fitting.given import (
    check_batches,
    check_store,
    fit_trees,
    make_drafter,
    read_calibration,
)
from drafttrain.fitting.learning import learn, logged, untrained
from drafttrain.fitting.opening import open_run
from drafttrain.fitting.parts import Parts
from drafttrain.fitting.result import evaluate, pack, publish
from drafttrain.fitting.saying import say
from drafttrain.fitting.searching import search
from drafttrain.fitting.settings import read_settings
from drafttrain.fitting.shared import Shared
from drafttrain.fitting.sweeping import make_sweep
from drafttrain.fitting.trying import open_trial, try_out
from drafttrain.packaging.manifest import PACKAGE
from drafttrain.packaging.writing import check_export, check_place
from drafttrain.processes import peak_memory, rank
from drafttrain.reporting.console import clock
from drafttrain.reporting.records import Laps
from drafttrain.training.job import Job
from drafttrain.training.prepare import Ready
from drafttrain.training.skips import Found


@DOOR
def main(cfg: DictConfig) -> None:
    fit(cfg, Shared())


@DOOR.sweeps
def several(sweep: Sweep) -> None:
    make_sweep(sweep, fit)


def fit(cfg: DictConfig, shared: Shared, *, packed: bool = True) -> Ready | None:
    """One run.

    Args:
        shared: what it shares with other runs of the command.
        packed: measure it at its end and package it?
    Returns: what was made; None where the run was only tried.
    """
    began, laps = time.monotonic(), Laps()
    parts = read_settings(cfg)
    check_agreement(parts.config.values)
    data, held_out = shared.data(parts)
    check_batches(parts, data)
    calibration = read_calibration(parts)
    parts = shared.settled(check_store(parts, data))
    opened = open_trial(parts) if parts.dry_run else open_run(parts)
    with opened as (run, parts), logged(parts, run):
        check_place(run.folder / PACKAGE)
        target = shared.target(parts, data, held_out)
        drafter = make_drafter(parts, target, data, held_out)
        parts = fit_trees(parts, drafter)
        check_export(drafter, parts.export_assistant)
        laps.mark("loading")
        job = Job(
            config=parts.config.values,
            kept=parts.config.kept,
            settings=parts.settings,
            run=run,
            target=target,
            drafter=drafter,
            data=data,
            held_out=held_out,
            calibration=calibration,
        )
        if parts.dry_run:
            try_out(parts, job)
            return None
        job, searched = search(job)
        laps.mark("loading" if searched is None else "searching")
        if job.settings.boost is not None:
            ready: Ready = boost(parts, job)
        elif drafter.learns:
            ready = learn(parts, job, shared)
        else:
            ready = untrained(job)
        laps.mark("training" if drafter.learns else "loading")
        if packed and rank() == 0:
            finish(parts, ready, searched, laps, data, held_out)
            say(f"took {clock(time.monotonic() - began)} in all, {peak_memory()} of memory at most")
        return ready


def finish(
    parts: Parts,
    ready: Ready,
    searched: Found | None,
    laps: Laps,
    data: ConversationData,
    held_out: ConversationData | None,
) -> None:
    """Measure what was made, package it, and write the page about the run."""
    worth = evaluate(ready, held_out)
    laps.mark("measuring")
    if searched is not None:
        worth.settings["search"] = searched.row()
    cost = ready.facts() if searched is None else searched.facts()
    package = pack(parts, ready, worth, cost, data)
    laps.mark("packaging")
    say(f"the package is in {package}")
    publish(ready.run, worth, laps)


if __name__ == "__main__":
    main()
