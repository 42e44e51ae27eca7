"""Have the target write conversations: answers to given prompts, or both sides of the talk.

The set in `out` holds token ids as the target chose them and a mask of what it wrote. A run that
was killed is continued by the same command: finished rows are kept, only what is missing is
written. Several processes (accelerate launch, torchrun) share the rows; the first one writes the
set when all are done. Rows that cannot be used are left out and listed by reason. With preview=N
nothing is written: tokens and mask of N rows are shown side by side.

In float32 a set is the same after a kill, with other slots and in several processes. In bfloat16
or float16 what the target writes in a row depends on the row's neighbours in the batch, so it can
be another one; the set's manifest says so. That is why target.dtype=auto is float32 on a CPU here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from drafttrain.asking.synthesize import Settings, check_first, check_settings
from drafttrain.wiring.doors import door

DOOR = door("synthesize", check=check_first)
if __name__ == "__main__":
    DOOR.greet(__doc__)

from drafttrain.data.conversations import Row
from drafttrain.data.datamodule import set_folder
from drafttrain.data.folder import SetFolder
from drafttrain.data.named import MOST_CATEGORIES
from drafttrain.data.numbered import Prompts, Skipped, account, by_reason, not_given, nothing_left
from drafttrain.data.people import PeoplePrompts
from drafttrain.data.prompts import Source
from drafttrain.data.row_journal import Journal
from drafttrain.data.shapes import Prompt
from drafttrain.data.template import ChatPieces, changed_by_reencoding, text_ids
from drafttrain.errors import InputError
from drafttrain.processes import rank, world_size
from drafttrain.reporting.console import Rate, amount, clock, reading
from drafttrain.reporting.preview import show_prompts, show_rows
from drafttrain.reporting.written_set import show_set
from drafttrain.runs import masked, plain, provenance
from drafttrain.target import fingerprint
from drafttrain.target.load import resolve_device, tokenizer_only
from drafttrain.target.model import Target
from drafttrain.target.synthesis import (
    SynthesisConfig,
    check,
    is_reproducible,
    reproducibility,
    synthesize,
)
from drafttrain.target.together import admit, auto_dtype, enter
from drafttrain.wiring.building import build

IN_FILES = "not_written_in_files"
"""In the manifest, where there are several files: rows that were not written, by their numbers in
each file; under `not_written` they have their numbers in the set."""
HELD_OUT_SHARE = 5
"""At most one row in five is held out."""


@dataclass(frozen=True)
class Job:
    """A set to be written."""

    settings: Settings
    writing: SynthesisConfig
    folder: SetFolder
    prompts: Prompts

    @property
    def parts(self) -> dict[str, Any]:
        """Of settings.json and the manifest, without the target: plain JSON values."""
        writing = json.loads(json.dumps(dataclasses.asdict(self.writing)))
        return {"prompts": masked(self.prompts.source), "writing": writing}


@DOOR
def main(cfg: DictConfig) -> None:
    settings = check_settings(cfg)
    writing: SynthesisConfig = build(cfg.writing)
    folder = open_folder(settings)
    tokenizer = tokenizer_only(plain(cfg.target))
    if settings.preview and settings.out and preview_rows(folder, tokenizer, settings.preview):
        return
    prompts = read_prompts(build(cfg.prompts), settings, writing, tokenizer)
    if settings.preview:
        preview_prompts(prompts, writing, tokenizer, settings.preview)
        return
    job = Job(settings, writing, folder, prompts)
    folder.compare(job.parts)
    find = None
    if cfg.target.get("dtype") == "auto":
        find = functools.partial(default_dtype, cfg.target.get("device", "auto"))
    journal, dtype = enter(folder, find, say)
    load = functools.partial(build, cfg.target, work="throughput", **dtype)
    try:
        write(job, journal, load, tokenizer)
    finally:
        journal.close()
        if rank() == 0:
            with contextlib.suppress(OSError):
                folder.path.rmdir()  # if nothing was written


# --- before long work starts ----------------------------------------------------------------------


def open_folder(settings: Settings) -> SetFolder:
    """The folder of the set, once it is known that it can be written to."""
    if settings.preview:
        return SetFolder(set_folder(settings.out, "out") if settings.out else settings.out)
    folder = SetFolder(settings.out)
    # What another process finds may already be work of this very run.
    other = rank() != 0
    admit(lambda: folder.check(resume=settings.resume or other, adopt=settings.adopt or other))
    return folder


def default_dtype(device: str) -> str:
    """What target.dtype=auto means here. On a CPU it is float32, whatever is faster there or named
    by the environment: its rows do not depend on their neighbours in the batch. An accelerator is
    too slow in float32 for a default."""
    return "float32" if resolve_device(device).type == "cpu" else auto_dtype(device)


def read_prompts(
    source: Source, settings: Settings, writing: SynthesisConfig, tokenizer: Any | None
) -> Prompts:
    """Rows that can be written. Raises InputError if there are none, or at the first that cannot be
    when `strict`."""
    if isinstance(source, PeoplePrompts):
        source = source.holding_out(settings.held_out)
    found = source.read(settings.rows, reading)
    for what in found.passed_over:
        say(f"not read: {what}", first_only=True)
    for note in found.notes:
        say(note, first_only=True)
    if tokenizer is not None:
        ask_tokenizer(found, tokenizer, writing)
    found.skipped.sort(key=lambda item: (item.file, item.row))
    if found.skipped and settings.strict:
        first = found.skipped[0]
        where = f"{first.file}, " * bool(first.file)
        raise InputError(
            f"{where}row {first.row}: {first.reason} (strict=true stops at the first row that "
            "cannot be used)"
        )
    if found.more:
        more = "the source has more rows, rows=null takes them all"
        say(f"rows={settings.rows}: {more}", first_only=True)
    if not found.rows:
        raise nothing_left(str(getattr(source, "path", None) or "prompts"), found)
    return found


def ask_tokenizer(prompts: Prompts, tokenizer: Any, writing: SynthesisConfig) -> None:
    """Move rows that the tokenizer or its chat template refuses, or that leave no room for an
    answer, to the skipped ones."""
    kept = []
    pieces = None if prompts.texts else ChatPieces(tokenizer, ())
    if pieces is not None and any(prompt is None for _, prompt in prompts.rows):
        pieces.before_user(writing.system)  # Refused for all rows alike, or for none.
    for name in [] if pieces is None else not_given(prompts, pieces):
        say(
            f"WARNING: column {name} is not given to the chat template, though that looks up a "
            f"{name}: put it into a column chat_template_kwargs, as {{{name}: ...}}, or give one "
            f"value for all rows, +target.template.{name}=...",
            first_only=True,
        )
    for row, prompt in reading(prompts.rows):
        try:
            ids = [] if prompt is None else ids_of(prompt, tokenizer, pieces)
            if len(ids) + 2 > writing.max_length:
                raise InputError(f"prompt longer than max_length {writing.max_length}")
        except InputError as error:
            prompts.leave_out(row, str(error))
        else:
            kept.append((row, prompt))
    prompts.rows = kept
    for place, item in enumerate(prompts.skipped):
        if item.messages and pieces is not None:
            messages = [{"role": role, "content": content} for role, content in item.messages]
            try:
                pieces.render(messages, prompt=False)
            except InputError as error:
                prompts.skipped[place] = dataclasses.replace(
                    item, reason=f"{item.reason}; {error}", messages=()
                )


def ids_of(prompt: Prompt, tokenizer: Any, pieces: ChatPieces | None) -> list[int]:
    """What the target reads before its first answer. Raises InputError if that cannot be had."""
    if prompt.read is not None:
        return text_ids(tokenizer, prompt.users[0], prompt.read)
    assert pieces is not None
    return pieces.given(prompt.arguments).check(prompt.system, prompt.users)


# --- the work -------------------------------------------------------------------------------------


def write(job: Job, journal: Journal, load: Callable[[], Target], tokenizer: Any | None) -> None:
    """Write what is missing, then the set.

    Args:
        load: makes the target.
        tokenizer: the target's, where it can be had without loading the target.
    """
    tokenizer, speed = write_missing(job, journal, load, tokenizer)
    if rank() == 0:
        finish(job, tokenizer, speed)


def write_missing(
    job: Job, journal: Journal, load: Callable[[], Target], tokenizer: Any | None
) -> tuple[Any, float | None]:
    """Write this process's share of what is not there yet; the target is only loaded if something
    is missing.

    Returns: the tokenizer, and tokens written a second (None if there was nothing to do).
    """
    folder, writing, every = job.folder, job.writing, job.prompts.rows
    rows, skipped = folder.finished()
    missing = [(row, prompt) for row, prompt in every if row not in rows and row not in skipped]
    mine = [(row, prompt) for row, prompt in missing if row % world_size() == rank()]
    if not missing:
        every_row = f"out={folder.path} holds every row asked for already ({len(every)})"
        say(f"{every_row}: the target writes none, what is there is shown", first_only=True)
    if missing and rank() == 0:
        folder.reopen(rows.values(), skipped)
    there = folder.recorded()
    if not mine and there is not None and tokenizer is not None:
        refuse_other_tokenizer(there, tokenizer, folder, mode=True)
        return tokenizer, None
    target = load()
    check(target, writing, [prompt for _, prompt in every])
    if there is None and rank() == 0:
        folder.record(
            {"target": {"name": target.name, "fingerprint": target.fingerprint}, **job.parts}
        )
    there = folder.await_settings(say)
    fingerprint.refuse_other(
        there["target"]["fingerprint"],
        target.fingerprint,
        f"out={folder.path}",
        dtype=True,
        mode=True,
        own=target.tokenizer,
    )
    warn_of_dtype(target)
    warn_of_ends(target)
    where = f"{target.name}, {target.dtype}, {target.device}".replace("torch.", "")
    say(f"writes {len(mine)} of {len(every)} rows with {where}", first_only=True)
    progress = Progress(len(mine))
    slots = min(job.settings.slots, len(mine))
    # Acceptance is measured on the held-out rows, greedily: their own answers serve for that.
    apart = job.prompts.apart
    synthesize(target, iter(mine), writing, journal, slots=slots, greedy=apart, report=progress)
    return target.tokenizer, progress.speed


def refuse_other_tokenizer(
    there: dict[str, Any], tokenizer: Any, folder: SetFolder, *, mode: bool
) -> None:
    """Raise InputError for another tokenizer than the folder's, or, as `mode` asks, for another
    chat template or arguments of it."""
    known: dict[str, str] = there["target"]["fingerprint"]
    here: dict[str, str] = {
        "tokenizer": fingerprint.of_tokenizer(tokenizer),
        "chat_template": fingerprint.of_template(tokenizer),
    }
    here[fingerprint.EARLIER] = fingerprint.earlier_of(tokenizer)
    what = f"out={folder.path}"
    fingerprint.refuse_other(known, {**known, **here}, what, mode=mode, own=tokenizer)


def warn_of_dtype(target: Target) -> None:
    """A set in low precision is not the same in every run."""
    dtype = str(target.dtype).removeprefix("torch.")
    if not is_reproducible(dtype):
        advice = "target.dtype=float32 writes rows that do not"
        say(f"target.dtype={dtype}: {reproducibility(dtype)}; {advice}", first_only=True)


def warn_of_ends(target: Target) -> None:
    """An answer ends on one of the target's end ids; a template that ends turns otherwise is worth
    a word."""
    try:
        end = ChatPieces(target.tokenizer, target.stop_ids).turn_end()
    except InputError:
        return
    if end is not None and end not in target.stop_ids:
        say(
            f"the chat template ends an answer with id {end}, which is not among the target's end "
            f"ids {target.stop_ids}: answers may run on; name it as eos_token_id in its "
            "generation_config.json",
            first_only=True,
        )


class Progress:
    """A line about every ten seconds, on rank 0."""

    def __init__(self, rows: int, interval: float = 10.0) -> None:
        self.rows, self.interval = rows, interval
        self.began = self.reported = time.monotonic()
        self.rate = Rate()
        self.written = self.done = 0

    def __call__(self, done: int, written: int) -> None:
        self.rate.add(written - self.written)
        self.done, self.written = done, written
        now = time.monotonic()
        if now - self.reported < self.interval:
            return
        self.reported = now
        left = (self.rows - done) * (now - self.began) / done if done else None
        share = " in this process" if world_size() > 1 else ""
        speed = f"{amount(self.rate.recent)} tokens/s"
        say(f"{done}/{self.rows} rows{share}  {speed}  left {clock(left)}", first_only=True)

    @property
    def speed(self) -> float | None:
        passed = time.monotonic() - self.began
        return self.written / passed if self.written and passed > 0 else None


def say(text: str, *, first_only: bool = False) -> None:
    if rank() == 0 or not first_only:
        who = f"rank {rank()} " if world_size() > 1 and not first_only else ""
        print(f"synthesize: {who}{text}", file=sys.stderr, flush=True)


# --- the set --------------------------------------------------------------------------------------


def finish(job: Job, tokenizer: Any, speed: float | None) -> None:
    """Wait for every row, write the set, and print what is in it."""
    folder, prompts = job.folder, job.prompts
    found, not_written = folder.await_rows({row for row, _ in prompts.rows}, world_size(), say)
    rows = [found[row] for row in sorted(found)]
    if not rows:
        for row, reason in sorted(not_written.items()):
            prompts.leave_out(row, reason)
        raise nothing_left(f"out={folder.path}", prompts)
    refused = by_reason(Skipped(row, reason) for row, reason in sorted(not_written.items()))
    apart = kept_apart(job, rows)
    there = folder.recorded()
    assert there is not None
    made = provenance()
    manifest = folder.write(
        rows,
        {
            **there,
            **precision(there),
            **account(prompts, tokenizer),
            "not_written": refused,
            **({IN_FILES: prompts.by_file(refused)} if prompts.files or prompts.origin else {}),
            "supervised_by_temperature": by_temperature(rows),
            "reencoding_would_change_rows": changed_by_reencoding(tokenizer, rows),
            **{key: made[key] for key in ("date", "versions")},
        },
        held_out=apart,
        sources={row.row: prompts.origin[row.row][0] for row in rows if prompts.origin},
        categories=categories(prompts),
    )
    if not job.settings.keep_journal:
        folder.clear()
    show_set(folder, manifest, rows, prompts, job.writing, speed)
    wanted = job.settings.held_out
    if len(apart) < wanted:
        why = f"is more than a fifth of {len(rows)} rows"
        if job.prompts.apart is not None:
            why = "asks for every fifth row, less those left out"
        say(f"held_out={wanted} {why}: {len(apart)} are held out")


def categories(prompts: Prompts) -> dict[int, str]:
    """Kinds of task by row; none where there are too many to be kinds."""
    count = len(set(prompts.category.values()))
    if count > MOST_CATEGORIES:
        say(f"{count} categories, more than {MOST_CATEGORIES}: they are not kept with the rows")
        return {}
    return prompts.category


def kept_apart(job: Job, rows: list[Row]) -> set[int]:
    """Numbers of the held-out rows: those that the source says, else the first ones."""
    numbers = sorted(row.row for row in rows)
    if job.prompts.apart is not None:
        return set(filter(job.prompts.apart, numbers))
    return set(numbers[: min(job.settings.held_out, len(rows) // HELD_OUT_SHARE)])


def precision(there: dict[str, Any]) -> dict[str, str]:
    """What the manifest says of the rows' dtype. Sets of earlier versions lack it."""
    dtype = there["target"]["fingerprint"].get("dtype")
    return {} if dtype is None else {"dtype": dtype, "reproducible": reproducibility(dtype)}


def by_temperature(rows: list[Row]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in sorted(rows, key=lambda row: row.temperature):
        found[str(row.temperature)] = found.get(str(row.temperature), 0) + row.supervised
    return found


# --- preview --------------------------------------------------------------------------------------


def preview_rows(folder: SetFolder, tokenizer: Any | None, count: int) -> bool:
    """Show rows that are in the folder; False if there are none."""
    rows, _ = folder.finished() if folder.path.is_dir() else ({}, {})
    if not rows:
        return False
    there = folder.recorded()
    if tokenizer is None:
        raise InputError(
            "preview needs a target whose tokenizer can be read by itself: target=smollm2, or "
            "target=hf target.path=..."
        )
    if there is not None:
        refuse_other_tokenizer(there, tokenizer, folder, mode=False)
    show_rows([rows[number] for number in sorted(rows)[:count]], tokenizer)
    return True


def preview_prompts(
    prompts: Prompts, writing: SynthesisConfig, tokenizer: Any | None, count: int
) -> None:
    """Show what the target would read."""
    pieces = None if prompts.texts else ChatPieces(tokenizer, ())
    before = [] if pieces is None else pieces.before_user(writing.system)

    def read(prompt: Prompt) -> list[int]:
        return ids_of(prompt, tokenizer, pieces)

    show_prompts(prompts, count, tokenizer, before, read)


if __name__ == "__main__":
    main()
