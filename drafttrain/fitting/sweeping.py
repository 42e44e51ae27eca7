"""A sweep: one run after the other, each in a folder of its own, compared by val/tau."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from drafttrain import runs
from drafttrain.checks import pasted, word_of
from drafttrain.data.datamodule import ConversationData
from drafttrain.data.journal import locked
from drafttrain.errors import InputError, disk_full, one_line, refused_by_system
from drafttrain.fitting.book import COMPLETE, FAILED, PRUNED, RUNNING, Book, Row, read_book
from drafttrain.fitting.given import check_batches, check_beginning, check_store
from drafttrain.fitting.parts import Parts
from drafttrain.fitting.saying import say
from drafttrain.fitting.settings import read_settings
from drafttrain.fitting.shared import OfAll
from drafttrain.fitting.sweeps import Strategy, Tried, check_sweep, of_run, strategy_of
from drafttrain.packaging.collection import read_entries
from drafttrain.packaging.manifest import PACKAGE
from drafttrain.reporting.console import clock, table
from drafttrain.reporting.page.document import PAGE, page, title_of, write_page
from drafttrain.reporting.page.sweep import runs_of_sweep
from drafttrain.reporting.records import read_record
from drafttrain.training.prepare import Ready, Training
from drafttrain.training.run import CHECKPOINTS, CONFIG
from drafttrain.wiring.sweeps import Sweep

BEST = "best"
"""A link to the best run's folder."""
SHOWN = 12
"""Runs with a package that have a part of their own on the page."""
_LONGEST = 120
Fit = Callable[..., Ready | None]
"""One run: `drafttrain.fit.fit`."""


def make_sweep(sweep: Sweep, fit: Fit) -> None:
    """Make the runs that a command names, and package the best one.

    Raises: InputError for what any of the runs would refuse, before the first one; and where none
        came to its end.
    """
    began = time.monotonic()
    tried, strategy = check_runs(sweep), strategy_of(sweep)
    with open_sweep(sweep) as book:
        shared = OfAll(book.folder, book.dtype)
        try:
            load(tried, shared)
            book.dtype = shared.dtype
            making = Making(sweep, fit, strategy, shared, book)
            making.all()
            making.best()
        finally:
            shared.close()
        show(sweep, book)
        say(f"the sweep took {clock(time.monotonic() - began)}")


def check_runs(sweep: Sweep) -> list[tuple[Tried, Parts]]:
    """The runs that were tried, each with its parts; of a range its ends.

    Raises: InputError for what the settings of any show to be wrong.
    """
    found = []
    for one in check_sweep(sweep):
        with of_run(one.chosen), as_current(one.invocation) as invocation:
            parts = read_settings(invocation.config)
            if not parts.learns:
                raise InputError(
                    f"{parts.kind.__name__} learns nothing, so there is no val/tau to compare: "
                    "leave -m out, and see evaluate and tune"
                )
            found.append((one, parts))
    trees = sorted({parts.settings.tree.title for _, parts in found})
    if len(trees) > 1:
        say(
            "WARNING: runs decode with different trees, so their val/tau compares these too: "
            + ", ".join(trees)
        )
    return found


def load(tried: Sequence[tuple[Tried, Parts]], shared: OfAll) -> None:
    """Read the rows and load the target, so that what any run needs of them is refused before the
    first has started."""
    first, parts = tried[0]
    with as_current(first.invocation):
        data, held_out = shared.data(parts)
        if held_out is None:
            raise InputError(
                f"{pasted('data.path', parts.data.get('path'))} has no held-out rows, so there is "
                "no val/tau to compare runs by: give a set with some"
            )
        for one, own in tried:
            with of_run(one.chosen):
                check_batches(own, rows_of(own, parts, data))
        target = shared.target(shared.settled(check_store(parts, data)), data, held_out)
        for one, own in tried:
            with of_run(one.chosen):
                check_beginning(own, target, rows_of(own, parts, data))


def rows_of(own: Parts, first: Parts, data: ConversationData) -> ConversationData:
    """The rows that a run trains on; those of the first one where it asks for the same."""
    same = own.config.values["data"] == first.config.values["data"]
    return data if same else own.data(split="train")


@contextlib.contextmanager
def open_sweep(sweep: Sweep) -> Iterator[Book]:
    """The sweep's folder and book; a folder that holds nothing in the end is removed again."""
    config = sweep.invocation.config
    goes_on = config.resume is not None
    folder = runs.run_dir(config.run_dir, resume=goes_on, kind="sweep")
    if not config.run_dir:
        say(f"the sweep's folder is {folder}")
    words = sorted(runs.hidden(word) for word in sweep.words if not _is_about_this_part(word))
    with locked(folder):
        try:
            book = read_book(folder, words) if goes_on else Book(folder, words)
            check_rows(book, sweep)
            yield book
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _is_about_this_part(word: str) -> bool:
    return word.partition("=")[0] in ("run_dir", "resume")


def check_rows(book: Book, sweep: Sweep) -> None:
    """Raise InputError for a recorded run that these words do not name."""
    for row in book.rows:
        fits = len(row.words) == len(sweep.axes) and all(
            word in axis.words or (axis.interval and word.startswith(f"{axis.key}="))
            for word, axis in zip(row.words, sweep.axes, strict=True)
        )
        if not fits:
            raise InputError(
                f"{book.path} has a run with {one_line(' '.join(row.words))[:80]}, which these "
                "words do not name: start the sweep again in another run_dir"
            )


@contextlib.contextmanager
def as_current(invocation: runs.Invocation) -> Iterator[runs.Invocation]:
    """While it lasts, the command is that of one run, as its package and its page name it."""
    before, runs.current = runs.current, invocation
    try:
        yield invocation
    finally:
        runs.current = before


class Making:
    """Makes the runs of a sweep."""

    def __init__(
        self, sweep: Sweep, fit: Fit, strategy: Strategy, shared: OfAll, book: Book
    ) -> None:
        self.sweep, self.fit, self.strategy = sweep, fit, strategy
        self.shared, self.book = shared, book

    def all(self) -> None:
        """Every run that is not complete yet. One that fails is noted, and tried again when the
        sweep goes on."""
        number = 0
        while (row := self._row(number)) is not None:
            if row.status in (RUNNING, FAILED) and row.same_as is None:
                self._make(number, row)
            number += 1
        if not self.book.complete:
            failed = [row for row in self.book.rows if row.why]
            said = f": {failed[0].name}: {failed[0].why}" if failed else ""
            raise InputError(f"none of {len(self.book.rows)} runs came to its end{said}")

    def best(self) -> None:
        """Measure and package the best run, where that was not done at its end."""
        row = self.book.complete[0]
        if not (self.book.folder / row.name / PAGE).is_file():
            say(f"the best run is {row.name}: it is measured and packaged")
            self._run(row, packed=True)
        link = self.book.folder / BEST
        with contextlib.suppress(OSError):  # Not every disk has links; the place is said anyway.
            link.unlink(missing_ok=True)
            link.symlink_to(row.name, target_is_directory=True)

    def _row(self, number: int) -> Row | None:
        """A recorded run, or the next one; None where there is none."""
        book = self.book
        if number < len(book.rows):
            return book.rows[number]
        chosen = self.strategy.chosen(self.sweep, book.rows)
        if chosen is None:
            return None
        row = Row(name=name_of(number + 1, chosen), words=list(chosen))
        for earlier in book.rows:
            if earlier.words == row.words:
                row.status, row.same_as = earlier.status, earlier.same_as or earlier.name
                row.taus, row.tau = dict(earlier.taus), earlier.tau
        book.rows.append(row)
        book.write()
        return row

    def _make(self, number: int, row: Row) -> None:
        say(f"run {number + 1}: {' '.join(row.words)}")
        before = self.book.rows[:number]
        row.status, row.why = RUNNING, None

        def judge(updates: int, metrics: Mapping[str, float | None], ends: bool) -> bool:
            row.hear(updates, metrics)
            pruned = not ends and self.strategy.prunes(self.sweep, before, row)
            row.status = PRUNED if pruned else RUNNING
            self.book.write()
            return pruned

        self.shared.judge = judge
        try:
            self._run(row, packed=self.strategy.packages == "all")
        except Exception as error:
            row.why = failure(error)
            if row.why is None:
                raise
            row.status = FAILED
            say(f"WARNING: run {number + 1} failed and is left out: {row.why}")
        finally:
            self.shared.judge = None
            self.book.write()
        # What trains the target too puts it back at its end only.
        changed = self.sweep.run(row.words).config.joint is not None and row.status != COMPLETE
        self.shared.free(target=changed)

    def _run(self, row: Row, *, packed: bool) -> None:
        """Make a run, or what is left of it."""
        folder = self.book.folder / row.name
        begun = (folder / CHECKPOINTS).is_dir() or (folder / CONFIG).is_file()
        if not begun and folder.is_dir():
            shutil.rmtree(folder)  # It was killed before it had anything to go on with.
        more = [f"run_dir={word_of(folder)}", *(["resume=last"] if begun else [])]
        with as_current(self.sweep.run(row.words, *more)) as invocation:
            ready = self.fit(invocation.config, self.shared, packed=packed)
            assert isinstance(ready, Training)
            note(row, ready)


def note(row: Row, training: Training) -> None:
    """Write down what a run came to."""
    keeper = training.keeper
    row.updates = training.updates
    row.seconds = round(training.module.seconds, 1)
    row.best_update = keeper.best_update
    row.prompts = len(training.decode.prompts)
    if row.status == PRUNED:
        return
    if keeper.best is None:
        raise InputError("its val/tau could not be measured")
    row.status, row.tau = COMPLETE, keeper.best


def failure(error: Exception) -> str | None:
    """Why a run failed, in words, where others may not; None for what ends the sweep, such as a
    full disk."""
    if isinstance(error, OSError) or disk_full(error):
        return None
    said = str(error) if isinstance(error, InputError) else refused_by_system(error)
    return one_line(runs.hidden(said)).strip() or None


def name_of(number: int, words: Sequence[str]) -> str:
    """Of a run's folder: its number and its words, as far as a name can hold them."""
    said = re.sub(r"[^\w.=+-]+", "_", "-".join(words))
    return f"{number:02}-{said}"[:_LONGEST]


# --- what is shown --------------------------------------------------------------------------------


def show(sweep: Sweep, book: Book) -> None:
    """The table of all runs, on the console and on the sweep's page."""
    ordered = [row for row in (*book.complete, *book.rows) if row.same_as is None]
    ordered = [row for place, row in enumerate(ordered) if row not in ordered[:place]]
    columns = ["run", *(axis.key for axis in sweep.axes)]
    columns += ["val/tau", "95 %", "prompts", "at update", "updates", "time", "how it ended"]
    rows = [cells(row) for row in ordered]
    table("runs of the sweep, the best first", columns, rows)
    best, notes = book.complete[0], notes_on(book)
    packaged = [row for row in ordered if (book.folder / row.name / PACKAGE).is_dir()][:SHOWN]
    folders = [book.folder / row.name / PACKAGE for row in packaged]
    records = [read_record(entry) for entry in read_entries(folders, measured=True)]
    taus = {row.name: row.taus for row in ordered}
    above = runs_of_sweep(columns, rows, taus, notes)
    write_page(book.folder / PAGE, page(f"Sweep: {title_of(records)}", records, above=above))
    for sentence in notes:
        say(sentence)
    say(f"the best package is in {book.folder / best.name / PACKAGE}")
    say(f"the page about the sweep is {book.folder / PAGE}")


def notes_on(book: Book) -> list[str]:
    """Which run is the best, and what to think of that."""
    best, *others = book.complete
    notes = [
        f"the best run is {best.name}, val/tau {best.tau:.3f} at update {best.best_update}; "
        f"{BEST}/{PACKAGE} is its package"
    ]
    near = [
        row.name
        for row in others
        if row.interval and best.interval and row.interval[1] >= best.interval[0]
    ]
    if near:
        notes.append(f"within the noise of val/tau as good: {', '.join(near)}")
    if len({row.prompts for row in (best, *others)}) > 1:
        notes.append(
            "WARNING: runs measured val/tau on different numbers of prompts, which is no fair "
            "comparison: give eval.prompts a number that all reach"
        )
    return notes


def cells(row: Row) -> list[Any]:
    """A run as the table's columns."""
    how = {COMPLETE: "complete", PRUNED: "pruned", RUNNING: "not complete"}
    return [
        row.name,
        *(word.partition("=")[2] for word in row.words),
        row.best,
        row.interval,
        row.prompts,
        row.best_update,
        row.updates,
        None if row.seconds is None else clock(row.seconds),
        how.get(row.status) or f"failed: {row.why}",
    ]
