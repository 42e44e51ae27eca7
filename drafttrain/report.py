"""Put packaged drafters side by side: speed, acceptance, size and cost of training, in one table,
one picture and one page.

By default the numbers are those that every package was measured with; packages that were not
measured alike are refused. With measure=true all of them are measured again here: on the same
prompts, in turn with the same plain decoding, and next to prompt lookup, which needs no training.
The table, the fastest first, goes to the console, to report.md and report.json, the picture to
report.png. report.html, for any browser and without a network, has the table too, and below it
everything that the runs recorded: learning curves, acceptance by position, trees with hit rates,
seconds by stage, sample answers. Of one run it is that run's own page.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drafttrain.asking.report import check_settings, listed
from drafttrain.wiring.doors import door

DOOR = door("report", text=("runs", "prompts"), check=check_settings)
if __name__ == "__main__":
    DOOR.greet(__doc__)

from drafttrain.checks import shown
from drafttrain.decoding.conditions import conditions, dtype_name
from drafttrain.decoding.measure import Entrant, Measurement, behind, measure_acceptance, race
from drafttrain.decoding.measurement import by_category, with_speed
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.replaying import Replays, obstacle
from drafttrain.decoding.speculator import Speculator
from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError, writing
from drafttrain.evaluating.answering import replays_for
from drafttrain.files import write_json
from drafttrain.nn.sampling import Policy
from drafttrain.packaging.collection import (
    Entry,
    fastest_row,
    find_packages,
    for_all,
    measured_alike,
    read_entries,
)
from drafttrain.packaging.decoding import fit, read_plan, tree_of
from drafttrain.packaging.manifest import DECODING
from drafttrain.packaging.reading import load_drafter, target_for
from drafttrain.reporting.console import reading, table, track
from drafttrain.reporting.figures import comparison
from drafttrain.reporting.kinds import KINDS, kinds_table
from drafttrain.reporting.page.document import PAGE, page, title_of
from drafttrain.reporting.records import read_record
from drafttrain.reporting.rows import timed_prompts, verdicts
from drafttrain.reporting.side_by_side import COLUMNS, fastest_first, line, markdown, tree_title
from drafttrain.runs import new_folder, plain_value, provenance
from drafttrain.target.model import Target
from drafttrain.target.prompts import Source, open_prompts
from drafttrain.target.turns import turn_words
from drafttrain.wiring.building import build, named_by

RESULT, TEXT, PICTURE = "report.json", "report.md", "report.png"
FILES = (PICTURE, TEXT, RESULT, PAGE)
BASELINE = "baseline"


@dataclass(frozen=True)
class Settings:
    """What is asked for, checked."""

    runs: list[str]
    measure: bool
    policy: Policy
    target: Callable[[], Target]
    """Loads it."""
    baseline: Callable[..., Drafter] | None
    """Builds the drafter that needs no training, given its target; None leaves it out."""
    baseline_tree: Any
    trees: list[Any]
    """As they were given, see `tree_of`; `package` is each package's own."""
    prompts: str
    columns: dict[str, Any]
    limit: int | None
    speed_prompts: int
    batch: int
    replay: bool
    answers: str | None
    turns: int | None
    """Of a conversation, at most; None takes all."""
    max_new_tokens: int
    seed: int
    dtype: str


@DOOR
def main(cfg: DictConfig) -> None:
    settings = read_settings(cfg)
    entries = read_entries(find_packages(settings.runs, say), measured=not settings.measure)
    if settings.measure:
        contest = prepare(settings, entries)
        with new_folder(cfg.run_dir) as folder:
            rows, conditions = measure(contest, settings), conditions_of(contest, settings)
            publish(folder, entries, rows, conditions, compared=True)
    else:
        rows, conditions = recorded(entries, settings.policy.temperature)
        with new_folder(cfg.run_dir) as folder:
            publish(folder, entries, rows, conditions, compared=len(entries) > 1)


# --- before long work starts ----------------------------------------------------------------------


def read_settings(cfg: DictConfig) -> Settings:
    """Raises: InputError for what can be refused before a package is read."""
    policy, trees, baseline_tree = check_settings(cfg)
    if cfg.baseline is not None:
        check_baseline(cfg.baseline, baseline_tree)
    return Settings(
        runs=listed(cfg.runs),
        measure=cfg.measure,
        policy=policy,
        target=functools.partial(build, cfg.target, work="decode"),
        baseline=None if cfg.baseline is None else functools.partial(build, cfg.baseline),
        baseline_tree=baseline_tree,
        trees=trees,
        prompts=cfg.prompts,
        columns=plain_value(cfg.columns),
        limit=cfg.limit,
        speed_prompts=cfg.speed_prompts,
        batch=cfg.batch,
        replay=cfg.replay,
        answers=cfg.answers,
        turns=cfg.turns,
        max_new_tokens=cfg.max_new_tokens,
        seed=cfg.seed,
        dtype=cfg.dtype,
    )


def check_baseline(baseline: Any, tree: Any) -> None:
    """Raise InputError unless a baseline is a drafter that needs no training, with a tree."""
    if not OmegaConf.is_dict(baseline):
        raise InputError(
            f"baseline={baseline}: give baseline=null for none, or drafter@baseline=<name> for one"
        )
    others = "give drafter@baseline=ngram, drafter@baseline=suffix or baseline=null"
    kind = named_by(baseline)
    if not (isinstance(kind, type) and issubclass(kind, Drafter)):
        raise InputError(
            f"baseline._target_={shown(baseline._target_)} is no drafter by itself: {others}"
        )
    if kind.learns:
        raise InputError(
            f"baseline: {kind.__name__} has to be trained, a baseline needs no training: {others}"
        )
    if tree == "package":
        raise InputError(
            "baseline_tree=package: the baseline has no package, name a tree such as "
            "baseline_tree=3"
        )


# --- what the packages were measured with ---------------------------------------------------------


def recorded(
    entries: Sequence[Entry], temperature: float
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The fastest row of each package, and the settings that all of them share."""
    found = for_all(entries, lambda entry: fastest_row(entry, temperature))
    alike = measured_alike(entries, found)
    settings = {
        "target": entries[0].config["target"]["name"],
        "measured": "in each package's own run",
        **alike,
    }
    rows = [
        row_of(row, entry.facts()) | {"drafter_dtype": entry.settings.get("drafter_dtype")}
        for row, entry in zip(found, entries, strict=True)
    ]
    return rows, settings


def row_of(measured: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """What was measured and what the drafter costs; no other row has the same label."""
    row = {
        name: value for name, value in measured.items() if name not in ("rank_rates", "node_counts")
    } | facts
    return row | {"label": f"{facts['run']} {tree_title(row)}", "speed_prompts": timed_prompts(row)}


# --- measuring again ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contest:
    """What is measured: ways of decoding, each with what its drafter costs, and the prompts."""

    source: Source
    target: Target
    prompts: list[list[int]]
    entrants: list[tuple[Entrant, dict[str, Any]]]
    replays: dict[int, Replays] = field(default_factory=dict)
    """By the target that they stand in for, of which training may have tuned some."""

    def replays_of(self, target: Target, settings: Settings) -> Replays | None:
        """The stand-ins for a target; None where acceptance is measured by decoding."""
        if not settings.replay or not settings.policy.greedy:
            return None
        if id(target) not in self.replays:
            answers = settings.answers if target is self.target else None
            limit = settings.max_new_tokens
            self.replays[id(target)] = replays_for(
                target, self.prompts, limit, answers, self.source, say
            )
        return self.replays[id(target)]


def prepare(settings: Settings, entries: Sequence[Entry]) -> Contest:
    """Load everything, and refuse whatever can be refused, before anything is measured."""
    source = open_prompts(settings.prompts, settings.columns, reading)
    target = settings.target()

    def enter(entry: Entry) -> list[tuple[Entrant, dict[str, Any]]]:
        own = target_for(entry.folder, target)
        drafter = load_drafter(entry.folder, own)
        speculator = Speculator(
            own, drafter, read_plan(entry.folder / DECODING, drafter), dtype=settings.dtype
        )
        plans = plans_of(settings, speculator)
        return [(Entrant(own, speculator.drafter, plan), entry.facts()) for plan in plans]

    entrants = [one for some in for_all(entries, enter) for one in some]
    if settings.baseline is not None:
        entrants.append(baseline(settings.baseline(target=target), settings))
    prompts = source.ids(
        target, settings.limit, say, turns=settings.turns, answer=settings.max_new_tokens
    )
    return Contest(source, target, prompts, entrants)


def plans_of(settings: Settings, speculator: Speculator) -> list[Plan]:
    """The trees asked for, as this drafter can fill them, each once."""
    drafter, policy, plans = speculator.drafter, settings.policy, []
    for value in settings.trees:
        if value == "package":
            plan = replace(speculator.plan, policy=policy)
            # Its rule or its way of drafting may be for another temperature.
            plans.append(plan if plan.misfit is None else Plan(plan.tree, policy).made_by(drafter))
        else:
            plans.append(fit(Plan(tree_of(value), policy), drafter, f"trees: {value}"))
    return list(dict.fromkeys(plans))


def baseline(drafter: Drafter, settings: Settings) -> tuple[Entrant, dict[str, Any]]:
    tree = settings.baseline_tree
    plan = fit(Plan(tree_of(tree), settings.policy), drafter, f"baseline_tree={tree}")
    facts = {
        "run": BASELINE,
        "drafter": type(drafter).__name__,
        "parameters": 0,
        "bytes": None,
        "training_seconds": 0.0,
        "supervised_tokens": 0,
        "begun_from": None,
    }
    return Entrant(drafter.target, drafter.eval(), plan), facts


def measure(contest: Contest, settings: Settings) -> list[dict[str, Any]]:
    """A row for each entrant, plain decoding first: speed on the first prompts, acceptance on
    all."""
    entrants = [entrant for entrant, _ in contest.entrants]
    timed = contest.prompts[: settings.speed_prompts]
    raced: list[Measurement | None] = [None] * len(entrants)
    if timed:
        say(f"times {len(timed)} prompts, each plainly and in {len(entrants)} other ways")
        raced = list(
            race(
                entrants,
                timed,
                max_new_tokens=settings.max_new_tokens,
                seed=settings.seed,
                watch=lambda items, what: track(items, description=what, unit="prompts"),
            )
        )
    found = [
        accepted(contest, settings, entrant, one)
        for entrant, one in zip(entrants, raced, strict=True)
    ]
    best = max(found, key=lambda one: one.tally.tau or 0.0)
    rows = []
    for one, speed, (entrant, facts) in zip(found, raced, contest.entrants, strict=True):
        row = one.row() if speed is None or speed is one else with_speed(one.row(), speed)
        dtype = dtype_name(None if entrant.drafter is None else entrant.drafter.dtype)
        rows.append(
            row_of(row, facts)
            | behind(best, one)
            | by_category(one, contest.source.categories)
            | {"measured": "report", "drafter_dtype": dtype}
        )
    return rows


def accepted(
    contest: Contest, settings: Settings, entrant: Entrant, timed: Measurement | None
) -> Measurement:
    """An entrant's acceptance on all prompts: what was counted while it was timed, where these are
    all of them."""
    if timed is not None and len(timed.tallies) == len(contest.prompts):
        return timed
    assert entrant.drafter is not None
    words: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "batch": settings.batch}
    replays = contest.replays_of(entrant.target, settings)
    if replays is not None and obstacle(entrant.drafter, entrant.plan) is None:
        return replays.measure(entrant.drafter, contest.prompts, entrant.plan, **words)
    return measure_acceptance(
        entrant.target,
        entrant.drafter,
        contest.prompts,
        entrant.plan,
        seed=settings.seed,
        watch=lambda items, what: track(items, description=what),
        **words,
    )


def conditions_of(contest: Contest, settings: Settings) -> dict[str, Any]:
    """What all rows were measured with."""
    policy = settings.policy
    return {
        "target": Path(contest.target.name).name,
        "measured": "here, in turn",
        "prompts": contest.source.name,
        "prompt_count": len(contest.prompts),
        **turns_of(contest.source.by_turn, contest.source.turns_left_out),
        "max_new_tokens": settings.max_new_tokens,
        "temperature": policy.temperature,
        "top_k": policy.top_k,
        "top_p": policy.top_p,
        "seed": settings.seed,
        **conditions(contest.target, contest.prompts),
    }


def turns_of(taken: Sequence[int], left_out: int) -> dict[str, Any]:
    """Where there are conversations of several turns: prompts by turn, and turns left out."""
    several = left_out or max(taken, default=1) > 1
    return {"prompts_by_turn": turn_words(taken), "turns_left_out": left_out} if several else {}


# --- what is shown --------------------------------------------------------------------------------


def publish(
    folder: Path,
    entries: Sequence[Entry],
    rows: Sequence[dict[str, Any]],
    conditions: dict[str, Any],
    *,
    compared: bool,
) -> None:
    """Show the table, and write it in all its forms; they are moved into the folder once all of
    them are complete.

    Args:
        compared: whether the page compares the rows. One run, as it was measured, has nothing to be
            compared with.
    """
    ordered, title = fastest_first(rows), f"Drafters for {conditions['target']}"
    table(f"{title}, the fastest first", COLUMNS, [line(row) for row in ordered])
    by_kind = kinds_table(ordered)
    if by_kind is not None:
        table(KINDS, *by_kind)
    notes = verdicts(ordered)
    places = [row["run"] for row in ordered]
    records = [
        read_record(entry) for entry in sorted(entries, key=lambda entry: places.index(entry.name))
    ]
    shared = ordered if compared else ()
    html = page(title_of(records), records, rows=shared, settings=conditions, notes=notes)
    with writing(folder), tempfile.TemporaryDirectory(prefix=".report-", dir=folder) as scratch:
        made = Path(scratch)
        write_json(
            made / RESULT, {"settings": conditions, "rows": ordered, "provenance": provenance()}
        )
        text = markdown(ordered, title=title, settings=conditions, notes=notes, picture=PICTURE)
        (made / TEXT).write_text(text, encoding="utf-8")
        comparison(ordered, made / PICTURE, title=title)
        (made / PAGE).write_text(html, encoding="utf-8")
        for name in FILES:
            (made / name).replace(folder / name)
    for sentence in notes:
        say(sentence)
    say(f"wrote {', '.join(FILES)} into {folder}")


def say(text: str) -> None:
    print(f"report: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
