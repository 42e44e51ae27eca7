"""Put packaged drafters side by side: speed, acceptance, size and cost of training, in one table,
one picture and one page.

By default the numbers are those that every package was measured with; packages that were not
measured alike are refused. With measure=true all of them are measured again here: on the same
prompts, in turn with the same plain decoding, beside prompt lookup, which needs no training. The
table, the fastest first, goes to the console, to report.md and report.json, the picture to
report.png. report.html, for any browser and without a network, has the table too, and below it all
that every run recorded: learning curves, acceptance by position, trees with hit rates, seconds by
stage, sample answers. Of one run it is that run's own page.
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drafttrain import runs
from drafttrain.checks import shown
from drafttrain.data.conversations import write_json
from drafttrain.decoding.conditions import conditions, dtype_name
from drafttrain.decoding.measure import Entrant, behind, race
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.speculator import Speculator, check_dtype
from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError
from drafttrain.nn.sampling import Policy, check_seed
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
from drafttrain.reporting.console import table, track
from drafttrain.reporting.figures import comparison
from drafttrain.reporting.page.document import PAGE, page, title_of
from drafttrain.reporting.records import read_record
from drafttrain.reporting.rows import timed_prompts, verdicts
from drafttrain.reporting.side_by_side import COLUMNS, fastest_first, line, markdown, tree_title
from drafttrain.runs import check_run_dir, provenance, run_dir
from drafttrain.target.model import Target
from drafttrain.target.prompts import Source, open_prompts
from drafttrain.wiring.building import build, named_by
from drafttrain.wiring.doors import door

RESULT, TEXT, PICTURE = "report.json", "report.md", "report.png"
FILES = (PICTURE, TEXT, RESULT, PAGE)
BASELINE = "baseline"
READING = ("runs", "measure", "temperature", "run_dir")
"""Settings that have a meaning without measure=true."""


@door("report", text=("runs", "prompts"))
def main(cfg: DictConfig) -> None:
    policy = check_settings(cfg)
    entries = read_entries(find_packages(listed(cfg.runs), say), measured=not cfg.measure)
    if cfg.measure:
        contest = prepare(cfg, policy, entries)
        with opened(cfg) as folder:
            publish(cfg, folder, entries, measure(contest, cfg), settings_of(contest, policy, cfg))
    else:
        rows, settings = recorded(entries, cfg)
        with opened(cfg) as folder:
            publish(cfg, folder, entries, rows, settings)


# --- before long work starts ----------------------------------------------------------------------


def check_settings(cfg: DictConfig) -> Policy:
    if type(cfg.measure) is not bool:
        raise InputError(f"measure={cfg.measure}: give true or false")
    if not cfg.measure:
        refuse_idle()
    for key in ("limit", "max_new_tokens"):
        value = cfg[key]
        if not (key == "limit" and value is None) and (type(value) is not int or value < 1):
            raise InputError(f"{key}={value}: needs a whole number of at least 1")
    check_seed(cfg.seed)
    check_dtype(cfg.dtype)
    check_run_dir(cfg.run_dir, resume=False)
    if not OmegaConf.is_list(cfg.trees) or not cfg.trees:
        raise InputError(
            f"trees={cfg.trees}: needs a list of at least one tree, such as 'trees=[package]'"
        )
    for key, value in [
        *(("trees", value) for value in plain_trees(cfg)),
        ("baseline_tree", plain(cfg.baseline_tree)),
    ]:
        if value != "package" and not tree_of(value).size:
            raise InputError(
                f"{key}: {value} drafts nothing; plain decoding is measured anyway: leave it out"
            )
    if cfg.baseline is not None:
        if not OmegaConf.is_dict(cfg.baseline):
            raise InputError(
                f"baseline={cfg.baseline}: give baseline=null for none, or drafter@baseline=<name> "
                f"for one"
            )
        kind = named_by(cfg.baseline)
        if not (isinstance(kind, type) and issubclass(kind, Drafter)):
            raise InputError(
                f"baseline._target_={shown(cfg.baseline._target_)} is no drafter by itself: give "
                f"drafter@baseline=ngram, "
                "drafter@baseline=suffix or baseline=null"
            )
        if kind.learns:
            raise InputError(
                f"baseline: {kind.__name__} has to be trained, a baseline is what needs no "
                f"training: give "
                "drafter@baseline=ngram, drafter@baseline=suffix or baseline=null"
            )
        if cfg.baseline_tree == "package":
            raise InputError(
                "baseline_tree=package: the baseline has no package, name a tree such as "
                "baseline_tree=3"
            )
    return Policy(cfg.temperature, cfg.top_k, cfg.top_p).simplest()


def refuse_idle() -> None:
    """Raise InputError if a setting is given that only measuring reads."""
    for word in runs.current.overrides:
        if re.split("[.@=]", word.lstrip("~+"))[0] not in READING:
            raise InputError(
                f"{word}: without measure=true nothing is measured, the numbers are those that the "
                f"packages hold; leave it "
                "out, or give measure=true"
            )


def listed(value: Any) -> list[str]:
    """The folders that `runs` names: one text, or a list of them in brackets."""
    if OmegaConf.is_list(value):
        found = [str(one) for one in value]
    else:
        text = str(value).strip()
        found = text[1:-1].split(",") if text.startswith("[") and text.endswith("]") else [text]
    found = [one.strip().strip("'\"") for one in found]
    if not any(found):
        raise InputError(
            "runs is empty: give folders of runs or packages, as in runs=[runs/a,runs/b]"
        )
    return [one for one in found if one]


def plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def plain_trees(cfg: DictConfig) -> list[Any]:
    return list(plain(cfg.trees))


@contextlib.contextmanager
def opened(cfg: DictConfig) -> Iterator[Path]:
    """The run's folder. One that holds nothing in the end is removed: the corrected command must
    find its folder free."""
    folder = run_dir(cfg.run_dir, resume=False)
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


# --- what the packages were measured with ---------------------------------------------------------


def recorded(
    entries: Sequence[Entry], cfg: DictConfig
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each package, the fastest of its own, and the settings that all of them share."""
    found = for_all(entries, lambda entry: fastest_row(entry, cfg.temperature))
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
    """What was measured and what the drafter costs; the label tells it from every other row."""
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


def prepare(cfg: DictConfig, policy: Policy, entries: Sequence[Entry]) -> Contest:
    """Everything loaded, and everything refused that can be, before anything is measured."""
    source = open_prompts(cfg.prompts, plain(cfg.columns))
    target: Target = build(cfg.target, work="decode")

    def enter(entry: Entry) -> list[tuple[Entrant, dict[str, Any]]]:
        own = target_for(entry.folder, target)
        drafter = load_drafter(entry.folder, own)
        speculator = Speculator(
            own, drafter, read_plan(entry.folder / DECODING, drafter), dtype=cfg.dtype
        )
        plans = plans_of(cfg, policy, speculator)
        return [(Entrant(own, speculator.drafter, plan), entry.facts()) for plan in plans]

    entrants = [one for some in for_all(entries, enter) for one in some]
    if cfg.baseline is not None:
        entrants.append(baseline(cfg, policy, target))
    return Contest(source, target, source.ids(target, cfg.limit, say), entrants)


def plans_of(cfg: DictConfig, policy: Policy, speculator: Speculator) -> list[Plan]:
    """The trees asked for, as this drafter can fill them, each once."""
    drafter, plans = speculator.drafter, []
    for value in plain_trees(cfg):
        if value == "package":
            plan = replace(speculator.plan, policy=policy)
            # A rule or a way of drafting of another temperature.
            plans.append(plan if plan.misfit is None else Plan(plan.tree, policy).made_by(drafter))
        else:
            plans.append(fit(Plan(tree_of(value), policy), drafter, f"trees: {value}"))
    return list(dict.fromkeys(plans))


def baseline(cfg: DictConfig, policy: Policy, target: Target) -> tuple[Entrant, dict[str, Any]]:
    drafter: Drafter = build(cfg.baseline, target=target)
    plan = fit(
        Plan(tree_of(plain(cfg.baseline_tree)), policy),
        drafter,
        f"baseline_tree={cfg.baseline_tree}",
    )
    facts = {
        "run": BASELINE,
        "drafter": type(drafter).__name__,
        "parameters": 0,
        "bytes": None,
        "training_seconds": 0.0,
        "supervised_tokens": 0,
        "begun_from": None,
    }
    return Entrant(target, drafter.eval(), plan), facts


def measure(contest: Contest, cfg: DictConfig) -> list[dict[str, Any]]:
    """A row for each entrant: speed and acceptance from the same decoding of the same prompts."""
    say(
        f"times {len(contest.prompts)} prompts, each plainly and in {len(contest.entrants)} other "
        f"ways"
    )
    found = race(
        [entrant for entrant, _ in contest.entrants],
        contest.prompts,
        max_new_tokens=cfg.max_new_tokens,
        seed=cfg.seed,
        watch=lambda items, what: track(items, description=what, unit="prompts"),
    )
    drafting = [one for one in found if one.plan.tree.size]
    best = max(drafting, key=lambda one: one.tally.tau or 0.0, default=found[0])
    return [
        row_of(one.row(), facts)
        | behind(best, one if one.plan.tree.size else None)
        | {
            "measured": "report",
            "drafter_dtype": dtype_name(None if entrant.drafter is None else entrant.drafter.dtype),
        }
        for one, (entrant, facts) in zip(found, contest.entrants, strict=True)
    ]


def settings_of(contest: Contest, policy: Policy, cfg: DictConfig) -> dict[str, Any]:
    return {
        "target": Path(contest.target.name).name,
        "measured": "here, in turn",
        "prompts": contest.source.name,
        "prompt_count": len(contest.prompts),
        "max_new_tokens": cfg.max_new_tokens,
        "temperature": policy.temperature,
        "top_k": policy.top_k,
        "top_p": policy.top_p,
        "seed": cfg.seed,
        **conditions(contest.target, contest.prompts),
    }


# --- what is shown --------------------------------------------------------------------------------


def publish(
    cfg: DictConfig,
    folder: Path,
    entries: Sequence[Entry],
    rows: Sequence[dict[str, Any]],
    settings: dict[str, Any],
) -> None:
    """Show the table, and write it in all its forms; they are moved into the folder once all of
    them are whole."""
    ordered, title = fastest_first(rows), f"Drafters for {settings['target']}"
    table(f"{title}, the fastest first", COLUMNS, [line(row) for row in ordered])
    told = verdicts(ordered)
    with tempfile.TemporaryDirectory(prefix=".report-", dir=folder) as scratch:
        made = Path(scratch)
        write_json(
            made / RESULT, {"settings": settings, "rows": ordered, "provenance": provenance(cfg)}
        )
        text = markdown(ordered, title=title, settings=settings, notes=told, picture=PICTURE)
        (made / TEXT).write_text(text, encoding="utf-8")
        comparison(ordered, made / PICTURE, title=title)
        (made / PAGE).write_text(page_of(cfg, entries, ordered, settings, told), encoding="utf-8")
        for name in FILES:
            (made / name).replace(folder / name)
    for sentence in told:
        say(sentence)
    say(f"wrote {', '.join(FILES)} into {folder}")


def page_of(
    cfg: DictConfig,
    entries: Sequence[Entry],
    ordered: Sequence[dict[str, Any]],
    settings: dict[str, Any],
    notes: Sequence[str],
) -> str:
    """The page: what is compared, then every run in the same order. One run alone, as it was
    measured, is compared with nothing."""
    places = [row["run"] for row in ordered]
    records = [
        read_record(entry) for entry in sorted(entries, key=lambda entry: places.index(entry.name))
    ]
    title = title_of(records)
    if not cfg.measure and len(records) == 1:
        return page(title, records)
    return page(title, records, rows=ordered, settings=settings, notes=notes)


def say(text: str) -> None:
    print(f"report: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
