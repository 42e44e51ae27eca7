"""What a fit ends with: measurement, package, and the page about the run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

from drafttrain import runs
from drafttrain.data.datamodule import ConversationData
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.heads import VocabularyHeads
from drafttrain.errors import InputError
from drafttrain.fitting.parts import Parts
from drafttrain.fitting.saying import say
from drafttrain.packaging.collection import read_entries
from drafttrain.packaging.decoding import read_plan, write_plan
from drafttrain.packaging.manifest import DECODING, PACKAGE, read_metrics
from drafttrain.packaging.writing import save_package
from drafttrain.reporting.console import clock, table, track
from drafttrain.reporting.figures import acceptance_curve
from drafttrain.reporting.kinds import KINDS, kinds_table
from drafttrain.reporting.loggers import log_picture, log_rows
from drafttrain.reporting.page.document import PAGE, page, title_of, write_page
from drafttrain.reporting.records import Laps, read_record, write_noted
from drafttrain.reporting.rows import MEAN, memories, pair, unrounded
from drafttrain.runs import provenance
from drafttrain.target import change
from drafttrain.training.calibrate import calibrated, head_accuracy
from drafttrain.training.final import Worth, measure
from drafttrain.training.prepare import Ready, kept_in_memory
from drafttrain.training.run import Run

COLUMNS = (
    "tree",
    "nodes",
    "tau",
    "interval",
    MEAN,
    "accept@1..",
    "speed-up",
    "interval",
    "same text",
    "guarantee",
)


def evaluate(ready: Ready, held_out: ConversationData | None) -> Worth:
    """Measure by decoding, show the table and draw the picture."""
    began = time.monotonic()
    calibrate = None
    if ready.calibration is not None:
        source = kept_in_memory(
            ready.target, ready.drafter, ready.calibration, ready.config["features"]
        )
        assert isinstance(ready.drafter, VocabularyHeads)  # As FinalConfig.check has seen.
        accuracies = head_accuracy(ready.drafter, ready.calibration, source)
        calibrate = functools.partial(calibrated, accuracies)
    worth = measure(
        ready.speculator,
        ready.prompts,
        ready.settings.final,
        categories=ready.categories,
        calibrate=calibrate,
        seed=ready.seed,
        watch=lambda items, what: track(items, description=what),
    )
    if calibrate is not None:
        worth.settings["head_accuracy"] = accuracies
    worth = dataclasses.replace(worth, change=changed(ready, held_out))
    worth.settings.update(ready.report())
    if not worth.rows:
        say("no held-out prompt to decode: acceptance and speed are not available")
        return worth
    table("held-out prompts, greedy", COLUMNS, [shown(row) for row in worth.rows])
    by_kind = kinds_table(worth.rows)
    if by_kind is not None:
        table(KINDS, *by_kind)
    for line in (*unrounded(worth.rows), *memories(worth.rows)):
        say(line)
    say(f"measured in {clock(time.monotonic() - began)}")
    picture = acceptance_curve(
        worth.rows, ready.run.folder / "acceptance.png", title="held-out prompts, greedy"
    )
    log_picture(ready.run.loggers, "acceptance", picture, ready.updates)
    log_rows(ready.run.loggers, worth.rows, "final", ready.updates)
    return worth


def changed(ready: Ready, held_out: ConversationData | None) -> dict[str, Any] | None:
    """What joint training did to the target on held-out rows; None where it stayed as it was."""
    if ready.target.original is None or held_out is None:
        return None
    count = min(len(held_out), ready.settings.final.change_rows)
    rows = [held_out.batch([place]) for place in range(count)]
    found = change.change(ready.target.original, ready.target, rows)
    if found is not None:
        say(change.words(found))
    return found


def shown(row: dict[str, Any]) -> list[Any]:
    """A measured row as the table's columns."""
    same = (
        None if row.get("same_as_plain") is None else f"{row['same_as_plain']} of {row['prompts']}"
    )
    accept = [value for value in row["accept_at"] if value is not None]
    return [
        row["label"],
        row["nodes"],
        row["tau"],
        pair(row["tau_interval"]),
        row["tau_prompt_mean"],
        " ".join(f"{value:.2f}" for value in accept),
        row["speedup"],
        pair(row["speedup_interval"]),
        same,
        row["guarantee"],
    ]


def pack(
    parts: Parts, ready: Ready, worth: Worth, cost: dict[str, Any] | None, data: ConversationData
) -> Path:
    """Write the package, with how it was made. Returns its folder.

    Args:
        cost: of training or of a search, plain JSON values; None where there was neither.
    """
    folder = ready.run.folder / PACKAGE
    plan = chosen_since(folder, ready.drafter) or worth.plan
    worth.settings["chosen"] = {DECODING: write_plan(worth.plan)}
    return save_package(
        folder,
        drafter=ready.drafter,
        target=ready.target,
        plan=plan,
        metrics=worth.metrics,
        provenance=provenance(parts.config.kept) | {"training": cost},
        trained_length=ready.trained_length,
        trained_on=data.fingerprint,
        export_assistant=parts.export_assistant,
    )


def chosen_since(package: Path, drafter: Drafter) -> Plan | None:
    """The plan of a run's earlier package, if it is not the one that the run had chosen: `tune` or
    a person put it there, and it stays."""
    noted, path = read_metrics(package)["settings"].get("chosen"), package / DECODING
    own = noted.get(DECODING) if isinstance(noted, dict) else None
    if own is None or not path.is_file():
        return None
    with contextlib.suppress(InputError, OSError, ValueError):
        if path.read_text(encoding="utf-8") != own:
            plan = read_plan(path, drafter)
            say(
                f"keeps the plan in {path}, {plan.tree.title}, which was chosen after the run had "
                "ended; without that file it takes the one measured now"
            )
            return plan
    return None


def publish(run: Run, worth: Worth, laps: Laps) -> None:
    """Note what no other file holds, and write the page about the run, only from its folder."""
    write_noted(
        run.folder, samples=worth.samples, seconds=laps.seconds, command=runs.current.command
    )
    records = [read_record(entry) for entry in read_entries([run.folder / PACKAGE], measured=True)]
    write_page(run.folder / PAGE, page(title_of(records), records))
    say(f"the page about the run is {run.folder / PAGE}")
