"""Several fits, one after the other, each on what the earlier ones do not match."""

from __future__ import annotations

import contextlib
import copy
import functools

from omegaconf import DictConfig

from drafttrain.data.datamodule import ConversationData
from drafttrain.drafter.base import Drafter
from drafttrain.fitting.given import make_drafter
from drafttrain.fitting.learning import learn, logged
from drafttrain.fitting.saying import say
from drafttrain.reporting.console import table, track
from drafttrain.reporting.loggers import log_config
from drafttrain.runs import plain
from drafttrain.target.model import Target
from drafttrain.training.boost import Collective, Fit, Tuning, references
from drafttrain.training.boosted import (
    Boosted,
    Borrowed,
    note_member,
    procedure_facts,
    prompts_to_share_on,
    together,
)
from drafttrain.training.checkpoint import LAST, check_complete, read_checkpoint, write_checkpoint
from drafttrain.training.prepare import Settings, Training
from drafttrain.training.resume import refuse_other_run
from drafttrain.training.run import Run
from drafttrain.wiring.building import build


def boost(
    cfg: DictConfig,
    settings: Settings,
    run: Run,
    target: Target,
    drafter: Drafter,
    data: ConversationData,
    held_out: ConversationData | None,
    calibration: ConversationData | None,
) -> Boosted:
    """Fit several drafters one after the other, each on what the earlier ones do not match, and put
    them together.

    Args:
        drafter: what every fit begins with, unless told otherwise.
    """
    chosen, config = settings.boost, plain(cfg)
    assert chosen is not None
    chosen.check(drafter)
    drafter.check(settings.tree)
    settings.final.check(drafter)
    if chosen.nodes is not None and calibration is not None:
        prompts_to_share_on(target, calibration, chosen)
    groups = settings.trainer.sampler(data, seed=cfg.seed, rank=0, world=1).batches(0)
    source = build(
        cfg.features,
        target=target,
        needs=drafter.needs,
        data=data,
        groups=groups,
        spill_dir=run.scratch,
        shared=False,
    )
    say(source.describe())
    facts = procedure_facts(config, target, data)
    if run.resumed is not None:
        refuse_other_run(run.resumed, facts, config, say)
    write_checkpoint(run.checkpoints / LAST, {"facts": facts, "settings": config})
    log_config(run.loggers, config)
    told: dict[str, Training] = {}

    def one_fit(job: Fit) -> Drafter:
        own = copy.deepcopy(cfg)
        own.seed = job.seed
        part = Run(run.folder / "members" / job.name)
        part.folder.mkdir(parents=True, exist_ok=True)
        if run.resumed is not None and (part.checkpoints / LAST).exists():
            part.resumed = read_checkpoint(part.checkpoints / LAST)
            check_complete(part.resumed, part.checkpoints / LAST)
        fresh = make_drafter(own, target, data, held_out)
        if job.begin is not None:
            fresh.load_state_dict(job.begin.state_dict())
        with logged(own, part) if job.member else contextlib.nullcontext():
            training = learn(
                own,
                settings if job.member else settings.unmeasured,
                part,
                target,
                fresh,
                job.data,
                held_out if job.member else None,
                source=Borrowed(source),
                home=run.folder,
            )
        told[job.name] = training
        return training.drafter.eval()

    say(
        f"references: the target's greedy answers to {len(data)} prompts, at most "
        f"{chosen.reference} tokens of each"
    )
    wanted = references(target, data, chosen.reference)
    found = Tuning(
        config=chosen,
        data=data,
        wanted=wanted,
        reported=wanted if held_out is None else references(target, held_out, chosen.reference),
        fit=one_fit,
        facts=lambda job: told.pop(job.name).facts(),
        source=source,
        seed=cfg.seed,
        folder=run.folder / "members",
        note=functools.partial(note_member, run),
        say=say,
    ).run()
    source.close()
    show_members(found)
    return together(
        settings,
        config,
        run,
        target,
        data,
        found,
        list(told.values()),
        calibration=calibration,
        watch=lambda items, what: track(items, description=what),
        say=say,
    )


def show_members(found: Collective) -> None:
    names = (
        "member",
        "rows",
        "coverage",
        "union",
        "gain",
        "overlap",
        "matched",
        "best_single",
        "best_of_all",
        "left",
    )
    columns = [
        {"overlap": "overlap with 1, ..."}.get(name, name.replace("_", " ")) for name in names
    ]
    table(
        "references matched, model by model",
        columns,
        [[row.get(name) for name in names] for row in found.rows],
    )
