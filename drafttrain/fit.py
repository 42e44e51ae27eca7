"""Train a drafter for a target, measure it by decoding held-out prompts, and package the best
checkpoint.

The run's folder gets config.yaml, metrics.csv, checkpoints/, acceptance.png, package/, run.json
(sample answers, seconds by stage) and report.html, a page about all of it for any browser. A run
that was stopped or killed goes on with resume=last and ends with the same weights as if nothing had
happened. Several processes: accelerate launch.

With boost=collective several drafters are trained one after the other, each in its own folder in
members/, and packaged as one. A drafter that learns nothing, since it copies its drafts from text,
is made of packages or is the target with layers left out, is measured and packaged as it is.

Several processes, of accelerate launch or torchrun, end together where one is lost, and say which:
`drafttrain.companions`.
"""

from __future__ import annotations

import time

from omegaconf import DictConfig

from drafttrain.data.conversations import write_json
from drafttrain.data.datamodule import ConversationData
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.selfspec import SelfSpec
from drafttrain.fitting.boosting import boost
from drafttrain.fitting.given import (
    check_batches,
    check_store,
    load_target,
    make_drafter,
    read_calibration,
    read_data,
)
from drafttrain.fitting.learning import learn, logged
from drafttrain.fitting.result import evaluate, pack, publish
from drafttrain.fitting.saying import say
from drafttrain.fitting.settings import check_agreement, read_settings
from drafttrain.packaging.manifest import PACKAGE
from drafttrain.packaging.writing import check_export, check_place
from drafttrain.processes import peak_memory, rank
from drafttrain.reporting.console import clock, track
from drafttrain.reporting.loggers import log_config
from drafttrain.reporting.records import Laps
from drafttrain.runs import plain
from drafttrain.training.prepare import Ready, Settings, prepare_untrained, usable_prompts
from drafttrain.training.run import Run, open_run
from drafttrain.training.skips import Found
from drafttrain.wiring.doors import door

SEARCHED = "search.json"
"""Every choice that a search tried, in a run's folder."""


@door("fit", together=True)
def main(cfg: DictConfig) -> None:
    began, laps = time.monotonic(), Laps()
    settings = read_settings(cfg)
    check_agreement(cfg)
    data, held_out = read_data(cfg)
    check_batches(cfg, settings, data)
    calibration = read_calibration(cfg, settings)
    check_store(cfg, data)
    with open_run(cfg, say) as run, logged(cfg, run):
        check_place(run.folder / PACKAGE)
        target = load_target(cfg, data, held_out)
        drafter = make_drafter(cfg, target, data, held_out)
        check_export(drafter, cfg.export_assistant)
        laps.mark("loading")
        searched = search(cfg, settings, run, drafter, data)
        drafter = drafter if searched is None else searched.drafter
        laps.mark("loading" if searched is None else "searching")
        if settings.boost is not None:
            ready: Ready = boost(cfg, settings, run, target, drafter, data, held_out, calibration)
        elif drafter.learns:
            ready = learn(
                cfg, settings, run, target, drafter, data, held_out, calibration=calibration
            )
        else:
            ready = prepare_untrained(
                plain(cfg), settings, run, target, drafter, data, calibration=calibration, say=say
            )
            log_config(run.loggers, ready.config)
        laps.mark("training" if drafter.learns else "loading")
        if rank() == 0:
            worth = evaluate(ready, held_out)
            laps.mark("measuring")
            if searched is not None and settings.search is not None:
                worth.settings["search"] = searched.row(settings.search)
            package = pack(cfg, ready, worth)
            laps.mark("packaging")
            say(f"the package is in {package}")
            publish(run, worth, laps)
            say(f"took {clock(time.monotonic() - began)} in all, {peak_memory()} of memory at most")


def search(
    cfg: DictConfig, settings: Settings, run: Run, drafter: Drafter, data: ConversationData
) -> Found | None:
    """The drafter that leaves out what was found best, where a search was asked for; every trial
    goes into a file of the run.

    On the first process alone, which measures and packages.
    """
    if settings.search is None or rank() != 0:
        return None
    assert isinstance(drafter, SelfSpec)
    began = time.monotonic()
    settings.final.check(drafter)
    usable_prompts(
        drafter.target, data, settings, lambda _: None
    )  # What it refuses, it refuses before the search.
    found = settings.search.run(
        drafter,
        settings.tree,
        data,
        seed=cfg.seed,
        watch=lambda items, what: track(items, description=what),
    )
    write_json(
        run.folder / SEARCHED,
        {"objective": settings.search.objective, "trials": [trial.row() for trial in found.trials]},
    )
    best, tau = found.best, "none" if found.best.tau is None else f"{found.best.tau:.2f}"
    say(
        f"searched {len(found.trials)} choices in {clock(time.monotonic() - began)}; best by "
        f"{settings.search.objective}: "
        f"skip_attention={list(best.choice[0])} skip_mlp={list(best.choice[1])}, {best.value:.3f} "
        f"(tau {tau})"
    )
    return found


if __name__ == "__main__":
    main()
