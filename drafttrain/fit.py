"""Train a drafter for a target, measure it by decoding held-out prompts, and package the best checkpoint.

The run's folder gets config.yaml, metrics.csv, checkpoints/, acceptance.png, package/, run.json (sample answers, seconds by stage)
and report.html, a page about all of it for any browser. A run that was stopped or killed goes on with resume=last and ends with the
same weights as if nothing had happened. Several processes: accelerate launch.

With boost=collective several drafters are trained one after the other, each in its own folder in members/, and packaged as one.
A drafter that learns nothing, since it copies its drafts from text, is made of packages or is the target with layers left out, is
measured and packaged as it is.

Several processes, of accelerate launch or torchrun, end together where one is lost, and say which: `drafttrain.companions`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import time
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from drafttrain import companions
from drafttrain.checks import shown as text_of
from drafttrain.checks import switch, whole
from drafttrain.data.conversations import HELD_OUT, write_json
from drafttrain.data.datamodule import ConversationData
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.selfspec import SelfSpec
from drafttrain.errors import InputError, first_line
from drafttrain.packaging.beginning import check_beginning, read_beginning, take_weights
from drafttrain.packaging.collection import read_entries
from drafttrain.packaging.gathering import check_packages
from drafttrain.packaging.manifest import PACKAGE, class_of
from drafttrain.packaging.writing import check_export, check_place, save_package
from drafttrain.processes import peak_memory, rank, world_size
from drafttrain.reporting.console import clock, console, table, track
from drafttrain.reporting.figures import acceptance_curve, head_accuracies
from drafttrain.reporting.loggers import close, log_config, log_picture, log_rows
from drafttrain.reporting.page.whole import PAGE, page, title_of, write_page
from drafttrain.reporting.progress import ConsoleProgress
from drafttrain.reporting.records import Laps, read_record, write_noted
from drafttrain.reporting.rows import memories, pair
from drafttrain.runs import plain, provenance, seed_everything
from drafttrain.target import change
from drafttrain.target.adapter import Trained
from drafttrain.target.model import Target
from drafttrain.target.store import Store
from drafttrain.target.stored import StoredFeatures, share
from drafttrain.training.boost import Collective, Fit, Tuning, references
from drafttrain.training.boosted import Boosted, Borrowed, note_member, procedure_facts, together
from drafttrain.training.calibrate import calibrated, head_accuracy
from drafttrain.training.checkpoint import BEST, LAST, check_whole, read_checkpoint, write_checkpoint
from drafttrain.training.course import Course, TrainerConfig
from drafttrain.training.final import Worth, measure
from drafttrain.training.pairing import check_device, check_set, draft_vocabulary, lay_out
from drafttrain.training.prepare import Ready, Settings, Training, kept_in_memory, prepare, prepare_untrained
from drafttrain.training.resume import refuse_other_run
from drafttrain.training.run import Run, open_run
from drafttrain.training.skips import Found
from drafttrain.training.trainer import check_trainer, quiet_lightning, trainer_of
from drafttrain.wiring.building import build, named_by
from drafttrain.wiring.doors import STOPPED_BY_SIGNAL, door

WHOLE = {"limit_tokens": None, "limit_rows": None, "temperatures": None, "labels": "answers", "set_aside": 0}
"""Held-out rows are answers of all temperatures, whatever part of the set is trained on."""
ASIDE = {"take_set_aside": True, "limit_tokens": None, "limit_rows": None, "labels": "answers"}
ONLY_LEARNING = {
    "resume": ("null", "there is no run to continue"),
    "joint": ("null", "a target cannot be trained with it"),
    "boost": ("null", "there is nothing to fit on what is left"),
    "init_from": ("null", "no weights can be taken over"),
    "export_assistant": ("false", "there is no language model to write"),
}
"""Settings that must be off for a drafter that learns nothing, and why."""
SEARCHED = "search.json"
"""Every choice that a search tried, in a run's folder."""
LARGEST_SEED = (1 << 32) - 1


@door("fit", together=True)
def main(cfg: DictConfig) -> None:
    began, laps = time.monotonic(), Laps()
    settings = read_settings(cfg)
    data, held_out = read_data(cfg)
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
            ready = learn(cfg, settings, run, target, drafter, data, held_out, calibration=calibration)
        else:
            ready = prepare_untrained(plain(cfg), settings, run, target, drafter, data, calibration=calibration, say=say)
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


# --- before long work starts -----------------------------------------------------------------------------------------


def read_settings(cfg: DictConfig) -> Settings:
    """Everything that can be refused by looking at the configuration alone."""
    whole("seed", cfg.seed, 0, LARGEST_SEED)
    whole("draft_vocab", cfg.draft_vocab)
    switch("export_assistant", cfg.export_assistant)
    kind = kind_of(cfg)
    if cfg.draft_vocab and "draft_ids" not in inspect.signature(kind).parameters:
        raise InputError(f"draft_vocab={cfg.draft_vocab}: {kind.__name__} has no draft vocabulary, set it to 0")
    if not kind.learns:
        refuse_learning(cfg, kind.__name__)
    if "packages" in cfg.drafter:
        check_packages(plain(cfg)["drafter"]["packages"])
    train_target = trains_target(cfg)
    trainer: TrainerConfig = build(cfg.trainer)
    if trainer.batch_tokens is None and trainer.batch_rows is None:
        raise InputError("give trainer.batch_tokens or trainer.batch_rows")
    if trainer.accelerator not in ("auto", "cpu", "gpu", "mps"):
        raise InputError(f"trainer.accelerator={trainer.accelerator}: give auto, cpu, gpu or mps")
    if trainer.accelerator == "gpu" and not torch.accelerator.is_available():
        raise InputError("trainer.accelerator=gpu: no accelerator was found here, give cpu or auto")
    check_trainer(trainer, joint=cfg.joint is not None, boost=cfg.boost is not None)
    settings = Settings(
        trainer,
        build(cfg.optim),
        build(cfg.eval),
        build(cfg.checkpoint),
        build(cfg.final),
        build(cfg.tree),
        build(cfg.joint),
        build(cfg.boost),
        build(cfg.search),
    )
    if settings.boost is not None:
        settings.boost.check_kind(kind)
        refuse_with_boost(cfg)
    if settings.search is not None:
        settings.search.check(kind)
    if not settings.tree.size:
        raise InputError("the tree is empty: give tree=chain tree.k=4, or tree=static")
    if train_target and cfg.target.get("pack", False) not in ("auto", False):
        raise InputError(f"target.pack={cfg.target.pack}: packed weights cannot be trained jointly, set target.pack=auto or false")
    if cfg.joint is not None and reads_store(cfg):
        raise InputError(
            "features=store: a target that is trained too (joint) changes, and its features with it; set features=online"
        )
    if cfg.init_from is not None:
        check_beginning(str(cfg.init_from))
    return settings


def kind_of(cfg: DictConfig) -> type[Drafter]:
    """The drafter's class, named by itself or as what a function makes. Raises InputError for another thing, and for a class that a
    package could not name."""
    kind = named_by(cfg.drafter)
    if not isinstance(kind, type):
        kind = typing.get_type_hints(kind).get("return")
    if not (isinstance(kind, type) and issubclass(kind, Drafter)):
        raise InputError(f"drafter._target_={text_of(cfg.drafter._target_)} is no drafter: give drafter=<choice>, see --help")
    told = f"drafter._target_={text_of(cfg.drafter._target_)} could be trained and not packaged"
    class_of(f"{kind.__module__}.{kind.__qualname__}", f"{told}, put its file into drafttrain/drafter")
    return kind


def refuse_learning(cfg: DictConfig, name: str) -> None:
    """Raise InputError if settings of training are given to a drafter that learns nothing."""
    for key, (off, why) in ONLY_LEARNING.items():
        if cfg[key] not in (None, False):
            given = f"{key}={cfg[key]}" if isinstance(cfg[key], str) else key
            raise InputError(f"{given}: {name} learns nothing, so {why}; set {key}={off}")


def refuse_with_boost(cfg: DictConfig) -> None:
    """Raise InputError for settings that several fits one after the other cannot serve."""
    if cfg.joint is not None:
        raise InputError("boost fits several drafters to one frozen target, joint=lora would change it: set joint=null")
    if world_size() > 1:
        raise InputError("boost fits one model after the other in one process: start it without accelerate launch")
    if cfg.resume not in (None, "last"):
        raise InputError(f"resume={cfg.resume}: a run of boost has many checkpoints and knows where it was, give resume=last")
    if cfg.export_assistant:
        raise InputError("export_assistant: what boost makes is several models, none of which stands for all; set it to false")
    if cfg.boost.nodes is not None and not cfg.data.set_aside:
        raise InputError("boost.nodes needs rows that are not trained on: set data.set_aside, to 16 for instance")


def trains_target(cfg: DictConfig) -> bool:
    if cfg.joint is not None and not (OmegaConf.is_dict(cfg.joint) and "rank" in cfg.joint):
        raise InputError(f"joint={text_of(cfg.joint)}: give joint=lora, or null for a frozen target")
    return cfg.joint is not None and bool(cfg.joint.rank)


def reads_store(cfg: DictConfig) -> bool:
    return named_by(cfg.features) is StoredFeatures


def read_data(cfg: DictConfig) -> tuple[ConversationData, ConversationData | None]:
    """Training rows, and held-out ones if the set has any. Raises InputError if there is nothing to learn from."""
    companions.at("reads the data")
    data: ConversationData = build(cfg.data, split="train")
    held_out = None
    if data.set.indices(HELD_OUT):
        with contextlib.suppress(InputError):  # Rows without a supervised token within max_length.
            held_out = build(cfg.data, split="held_out", **WHOLE)
    say(data.summary())
    say("held_out: no rows, so nothing is measured by decoding" if held_out is None else held_out.summary())
    return data, held_out


def read_calibration(cfg: DictConfig, settings: Settings) -> ConversationData | None:
    """Rows set aside, greedy ones where there are some, since a greedy target is what trees are compared with."""
    shares = settings.boost is not None and settings.boost.nodes is not None
    if not (settings.final.calibrates or shares):
        return None
    if not cfg.data.set_aside:
        raise InputError("final.calibrated needs rows that are not trained on: set data.set_aside, to 64 for instance")
    try:
        rows: ConversationData = build(cfg.data, split="train", **ASIDE | {"temperatures": [0.0]})
    except InputError:
        rows = build(cfg.data, split="train", **ASIDE | {"temperatures": None})
    say(f"set aside to calibrate trees: {rows.summary()}")
    return rows


def check_store(cfg: DictConfig, data: ConversationData) -> None:
    """Look at a store of features before the target is loaded. With target.dtype=auto the target then has the store's dtype."""
    if not reads_store(cfg):
        return
    if not cfg.features.path:
        raise InputError("needs features.path=<folder of a store>")
    store = Store(str(cfg.features.path))
    store.check_data(data)
    if cfg.features.verify:
        for number in track(share(store.shards_of(data)), description="reads the store through", unit="shard"):
            store.verify(number)
    store.close()
    if cfg.target.get("dtype") == "auto":
        cfg.target.dtype = store.fingerprint.get("dtype", "auto")


@contextlib.contextmanager
def logged(cfg: DictConfig, run: Run) -> Iterator[None]:
    """The run's loggers while it lasts; its configuration is kept once they could be made."""
    run.loggers = build(cfg.logger, run_dir=run.folder)
    try:
        run.keep_config(cfg)
        yield
    finally:
        close(run.loggers)


def load_target(cfg: DictConfig, data: ConversationData, held_out: ConversationData | None) -> Target:
    """The target, checked against the set that it must have written."""
    companions.at("loads the target")
    began = time.monotonic()
    takes = inspect.signature(named_by(cfg.target)).parameters
    objects: dict[str, Any] = {"work": "throughput"} if "work" in takes else {}
    if trains_target(cfg) and "pack" in takes:
        objects["pack"] = False  # An adapter needs plain linears; the tuned target is packed at the end.
    target: Target = build(cfg.target, **objects)
    check_set(target, data, held_out, str(cfg.data.path))
    check_device(target, cfg.trainer.accelerator)
    where = f"{target.name}, {target.dtype}, {target.device}".replace("torch.", "")
    say(f"target: {where}, loaded in {clock(time.monotonic() - began)}")
    return target


def make_drafter(
    cfg: DictConfig, target: Target, data: ConversationData, held_out: ConversationData | None
) -> Drafter:
    """The drafter, with the same weights on every process and in every run of one seed."""
    objects: dict[str, Any] = {"target": target}
    given = None
    if cfg.init_from is not None:
        given = read_beginning(str(cfg.init_from), target, kind_of(cfg), cfg.draft_vocab)
        ids = getattr(given, "draft_ids", None)
        objects |= {} if ids is None else {"draft_ids": ids}
    elif cfg.draft_vocab:
        objects["draft_ids"], told = draft_vocabulary(target, data, held_out, cfg.draft_vocab)
        say(told)
    seed_everything(cfg.seed)
    drafter: Drafter = build(cfg.drafter, **objects)
    if given is not None:
        take_weights(drafter, given, str(cfg.init_from))
        say(f"begins with the weights of {cfg.init_from}")
    say("; ".join(f"{name}: {value}" for name, value in {"drafter": type(drafter).__name__, **drafter.describe()}.items()))
    return drafter


def make_adapter(cfg: DictConfig, settings: Settings, target: Target, drafter: Drafter) -> Trained | None:
    """What is trained of the target, where anything is; the same at first on every process."""
    if settings.joint is None:
        return None
    settings.joint.check(drafter)
    adapter = settings.joint.adapter(target, seed=cfg.seed)
    say("target: stays frozen (joint.rank=0)" if adapter is None else adapter.describe())
    return adapter


def search(cfg: DictConfig, settings: Settings, run: Run, drafter: Drafter, data: ConversationData) -> Found | None:
    """The drafter that leaves out what was found best, where a search was asked for; every trial goes into a file of the run.

    On the first process alone, which measures and packages.
    """
    if settings.search is None or rank() != 0:
        return None
    assert isinstance(drafter, SelfSpec)
    began = time.monotonic()
    settings.final.check(drafter)
    found = settings.search.run(
        drafter, settings.tree, data, seed=cfg.seed, watch=lambda items, what: track(items, description=what)
    )
    write_json(run.folder / SEARCHED, {"objective": settings.search.objective, "trials": [trial.row() for trial in found.trials]})
    best, tau = found.best, "none" if found.best.tau is None else f"{found.best.tau:.2f}"
    say(
        f"searched {len(found.trials)} choices in {clock(time.monotonic() - began)}; best by {settings.search.objective}: "
        f"skip_attention={list(best.choice[0])} skip_mlp={list(best.choice[1])}, {best.value:.3f} (tau {tau})"
    )
    return found


# --- the run -----------------------------------------------------------------------------------------------------------


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
    """Train, and take the best checkpoint's weights. Ends the program if a signal ended the training.

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
        make_source=functools.partial(build, cfg.features) if source is None else lambda **_given: source,
        show=functools.partial(draw_heads, run),
        say=say,
    )
    say(outline(training.module.course, settings, data))
    train(training)
    if training.module.stop_requested or training.module.stopped == "signal":
        say(f"stopped by a signal after update {training.updates}: continue with resume=last run_dir={home or run.folder}")
        raise SystemExit(STOPPED_BY_SIGNAL)  # It is not done, and can be resumed.
    if rank() == 0:
        use_best(cfg, training)
    return training


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
    """Fit several drafters one after the other, each on what the earlier ones do not match, and put them together.

    Args:
        drafter: what every fit begins with, unless told otherwise.
    """
    chosen, config = settings.boost, plain(cfg)
    assert chosen is not None
    chosen.check(drafter)
    drafter.check(settings.tree)
    settings.final.check(drafter)
    groups = settings.trainer.sampler(data, seed=cfg.seed, rank=0, world=1).batches(0)
    source = build(
        cfg.features, target=target, needs=drafter.needs, data=data, groups=groups, spill_dir=run.scratch, shared=False
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
            check_whole(part.resumed, part.checkpoints / LAST)
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
        if job.member:
            told[job.name] = training
        return training.drafter.eval()

    say(f"references: the target's greedy answers to {len(data)} prompts, at most {chosen.reference} tokens of each")
    wanted = references(target, data, chosen.reference)
    found = Tuning(
        config=chosen,
        data=data,
        wanted=wanted,
        reported=wanted if held_out is None else references(target, held_out, chosen.reference),
        fit=one_fit,
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
    names = ("member", "rows", "coverage", "union", "gain", "overlap", "matched", "best_single", "best_of_all", "left")
    columns = [{"overlap": "overlap with 1, ..."}.get(name, name.replace("_", " ")) for name in names]
    table("references matched, model by model", columns, [[row.get(name) for name in names] for row in found.rows])


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
    why = {"time": ", by the clock", "patience": ", since val/tau no longer rose", "signal": ", by a signal"}
    empty = f"; {module.empty_windows} windows had no supervised token and made no update" if module.empty_windows else ""
    say(
        f"trained {module.updates} updates in {clock(time.monotonic() - began)}{why.get(module.stopped or '', '')}, "
        f"{clock(training.decode.seconds)} of all parts for evaluation{empty}"
    )


# --- the result ----------------------------------------------------------------------------------------------------------


def use_best(cfg: DictConfig, training: Training) -> None:
    """Take the best checkpoint's weights; the last's where nothing could be measured. A target that was trained too is put
    together as its package will be."""
    best = training.run.checkpoints / BEST
    path = best if training.keeper.best is not None and best.exists() else training.run.checkpoints / LAST
    state = read_checkpoint(path)
    check_whole(state, path)
    try:
        training.module.load_state_dict(state["weights"])
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"the weights in {path} do not fit ({first_line(error)}): train again in another run_dir") from error
    training.drafter.to(training.target.device)
    tau = "" if training.keeper.best is None else f", val/tau {training.keeper.best:.3f}"
    say(f"uses {path.name} of update {state['progress']['updates']}{tau}")
    training.settle(functools.partial(lay_out, pack=cfg.target.get("pack")))
    training.speculator.refresh(training.drafter)


def evaluate(ready: Ready, held_out: ConversationData | None) -> Worth:
    """Measure by decoding, show the table and draw the picture."""
    began = time.monotonic()
    calibrate = None
    if ready.calibration is not None:
        source = kept_in_memory(ready.target, ready.drafter, ready.calibration, ready.config["features"])
        accuracies = head_accuracy(ready.drafter, ready.calibration, source)
        calibrate = functools.partial(calibrated, accuracies)
    worth = measure(
        ready.speculator,
        ready.prompts,
        ready.settings.final,
        calibrate=calibrate,
        seed=ready.seed,
        watch=lambda items, what: track(items, description=what),
    )
    if calibrate is not None:
        worth.settings["head_accuracy"] = accuracies
    if ready.target.original is not None and held_out is not None:
        rows = [held_out.batch([i]) for i in range(min(len(held_out), ready.settings.final.change_rows))]
        worth = dataclasses.replace(worth, change=change.change(ready.target.original, ready.target, rows))
        if worth.change is not None:
            say(change.words(worth.change))
    worth.settings.update(ready.report())
    if not worth.rows:
        say("no held-out prompt to decode: acceptance and speed are not available")
        return worth
    columns = ("tree", "nodes", "tau", "interval", "accept@1..", "speed-up", "interval", "same text", "guarantee")
    table("held-out prompts, greedy", columns, [shown(row) for row in worth.rows])
    for line in memories(worth.rows):
        say(line)
    say(f"measured in {clock(time.monotonic() - began)}")
    picture = acceptance_curve(worth.rows, ready.run.folder / "acceptance.png", title="held-out prompts, greedy")
    log_picture(ready.run.loggers, "acceptance", picture, ready.updates)
    log_rows(ready.run.loggers, worth.rows, "final", ready.updates)
    return worth


def draw_heads(run: Run, metrics: Mapping[str, float | None], updates: int) -> None:
    """The picture of head accuracies, for a drafter that has heads."""
    path = run.folder / "heads.png"
    if head_accuracies(metrics, path):
        log_picture(run.loggers, "heads", path, updates)


def shown(row: dict[str, Any]) -> list[Any]:
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


def pack(cfg: DictConfig, ready: Ready, worth: Worth) -> Path:
    return save_package(
        ready.run.folder / PACKAGE,
        drafter=ready.drafter,
        target=ready.target,
        plan=worth.plan,
        metrics=worth.metrics,
        provenance=provenance(cfg) | {"training": ready.facts()},
        trained_length=ready.trained_length,
        export_assistant=cfg.export_assistant,
    )


def publish(run: Run, worth: Worth, laps: Laps) -> None:
    """Note what no other file holds, and write the page about the run, from its folder alone."""
    write_noted(run.folder, samples=worth.samples, seconds=laps.seconds)
    records = [read_record(entry) for entry in read_entries([run.folder / PACKAGE], measured=True)]
    write_page(run.folder / PAGE, page(title_of(records), records))
    say(f"the page about the run is {run.folder / PAGE}")


def say(text: str) -> None:
    """A line on rank 0."""
    if rank() == 0:
        console().print(f"fit: {text}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
