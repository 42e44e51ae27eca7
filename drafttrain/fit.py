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
"""

from __future__ import annotations

import time

from omegaconf import DictConfig

from drafttrain.fitting.first import check_first
from drafttrain.wiring.doors import door

DOOR = door("fit", together=True, check=check_first)
if __name__ == "__main__":
    DOOR.greet(__doc__)

from drafttrain.fitting.agreement import check_agreement
from drafttrain.fitting.boosting import boost
from drafttrain.fitting.given import (
    check_batches,
    check_store,
    fit_trees,
    load_target,
    make_drafter,
    read_calibration,
    read_data,
)
from drafttrain.fitting.learning import learn, logged, untrained
from drafttrain.fitting.opening import open_run
from drafttrain.fitting.result import evaluate, pack, publish
from drafttrain.fitting.saying import say
from drafttrain.fitting.searching import search
from drafttrain.fitting.settings import read_settings
from drafttrain.fitting.trying import open_trial, try_out
from drafttrain.packaging.manifest import PACKAGE
from drafttrain.packaging.writing import check_export, check_place
from drafttrain.processes import peak_memory, rank
from drafttrain.reporting.console import clock
from drafttrain.reporting.records import Laps
from drafttrain.training.job import Job
from drafttrain.training.prepare import Ready


@DOOR
def main(cfg: DictConfig) -> None:
    began, laps = time.monotonic(), Laps()
    parts = read_settings(cfg)
    check_agreement(parts.config.values)
    data, held_out = read_data(parts)
    check_batches(parts, data)
    calibration = read_calibration(parts)
    parts = check_store(parts, data)
    opened = open_trial(parts) if parts.dry_run else open_run(parts)
    with opened as (run, parts), logged(parts, run):
        check_place(run.folder / PACKAGE)
        target = load_target(parts, data, held_out)
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
            return
        job, searched = search(job)
        laps.mark("loading" if searched is None else "searching")
        if job.settings.boost is not None:
            ready: Ready = boost(parts, job)
        elif drafter.learns:
            ready = learn(parts, job)
        else:
            ready = untrained(job)
        laps.mark("training" if drafter.learns else "loading")
        if rank() == 0:
            worth = evaluate(ready, held_out)
            laps.mark("measuring")
            if searched is not None:
                worth.settings["search"] = searched.row()
            cost = ready.facts() if searched is None else searched.facts()
            package = pack(parts, ready, worth, cost, data)
            laps.mark("packaging")
            say(f"the package is in {package}")
            publish(run, worth, laps)
            say(f"took {clock(time.monotonic() - began)} in all, {peak_memory()} of memory at most")


if __name__ == "__main__":
    main()
