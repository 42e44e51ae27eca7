"""Run the target over a conversation set once and keep what drafters read of it; fit features=store
trains from that.

The store in `out` holds the last hidden state, chosen layers' outputs, or both, of every token of
the set's training rows. A run that was killed is continued by the same command: batches that are
there are not read again. On a finished store the same command looks for shards that were lost or
damaged since, and makes them again. Several processes (accelerate launch, torchrun) share the
shards; the first one writes the manifest when all are done.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import sys
import time
from collections.abc import Callable

from omegaconf import DictConfig

from drafttrain.asking.capture import Settings, read_settings
from drafttrain.wiring.doors import door

DOOR = door("capture", check=read_settings)
if __name__ == "__main__":
    DOOR.greet(__doc__)

import torch

from drafttrain.checks import pasted
from drafttrain.data.datamodule import ConversationData
from drafttrain.data.journal import Lines
from drafttrain.errors import room
from drafttrain.processes import rank, world_size
from drafttrain.reporting.console import amount, table, track
from drafttrain.runs import provenance
from drafttrain.target.features import check_layers, computed
from drafttrain.target.filling import Plan, StoreFolder, planned, settings_of
from drafttrain.target.fingerprint import refuse_other
from drafttrain.target.model import Target
from drafttrain.target.shards import Contents, Shard, stamp_of
from drafttrain.target.stored import gives_last
from drafttrain.target.together import admit, auto_dtype, enter
from drafttrain.training.pairing import check_set
from drafttrain.wiring.building import build


@DOOR
def main(cfg: DictConfig) -> None:
    settings = read_settings(cfg)
    folder = StoreFolder(settings.out)
    # What another process finds may already be work of this very run.
    admit(lambda: folder.check(resume=settings.resume or rank() != 0))
    data: ConversationData = build(cfg.data, split="train")
    say(data.summary())
    is_new = not folder.path.exists()
    find = None
    if cfg.target.get("dtype") == "auto":
        find = functools.partial(auto_dtype, cfg.target.get("device", "auto"))
    journal, dtype = enter(folder, find, say_of_all)
    load = functools.partial(build, cfg.target, work="throughput", **dtype)
    try:
        capture(settings, folder, journal, data, load)
    finally:
        journal.close()
        if is_new:
            with contextlib.suppress(OSError):  # Something is in it, unless the run was refused.
                folder.path.rmdir()


# --- before long work starts ----------------------------------------------------------------------


def contents_of(settings: Settings, target: Target) -> Contents:
    """What is kept of this target."""
    layers, last = settings.layers, settings.last_hidden
    check_layers(layers, target)
    deepest = len(target.decoder_layers) - 1
    if last and deepest in layers and settings.recompute_last and gives_last(target):
        say(f"the last hidden state is not kept apart: the final norm makes it of layer {deepest}")
        last = False
    return Contents(width=target.width, last_hidden=last, layers=layers, encoding=settings.encoding)


def announce(
    folder: StoreFolder, plan: Plan, target: Target, data: ConversationData, needed: int
) -> None:
    """What the store will take, before anything is written: tokens x vectors kept of each x their
    bytes."""
    kept, code = plan.contents, plan.contents.code
    scale = "" if code.largest is None else " + a scale of 4"
    free = shutil.disk_usage(folder.path).free
    say(
        f"{data.tokens} tokens x {len(kept.names)} x ({kept.width} values x {code.dtype.itemsize} "
        f"bytes{scale}) = {room(plan.bytes)} in {len(plan.shards)} shards; {room(needed)} still to "
        f"be taken, {room(free)} free"
    )
    if kept.encoding == "float32" and target.dtype == torch.bfloat16:
        say("this target computes in bfloat16: encoding=bf16 is as exact, in half the room")


# --- the work -------------------------------------------------------------------------------------


def capture(
    settings: Settings,
    folder: StoreFolder,
    journal: Lines,
    data: ConversationData,
    load: Callable[[], Target],
) -> None:
    """Fill what is missing of the store, then write its manifest. `load` makes the target."""
    target = load()
    check_set(target, data, None, data.name)
    there = folder.recorded() if rank() == 0 else folder.await_settings(say_of_all)
    if there is not None:
        refuse_other(
            there["target"]["fingerprint"], target.fingerprint, f"out={folder.path}", dtype=True
        )
    contents = contents_of(settings, target)
    # The same target keeps the words that its folder was started with, whatever it is called here.
    name = {"name": target.name, "fingerprint": target.fingerprint}
    name = name if there is None else there["target"]
    record = settings_of(name, data, contents, settings.batches)
    folder.compare(record)
    plan = planned(data, contents, settings.batches, stamp_of(record))
    finished = folder.finished
    if finished and rank() != 0:
        return
    if finished:
        say(f"{folder.path} is finished: its shards are looked at")
        for shard in folder.discard_damaged(plan):
            say(f"{shard.name} was damaged and is made again")
    missing = folder.missing(plan)
    needed = folder.needed(plan, missing)
    announce(folder, plan, target, data, needed)
    folder.check_room(needed)
    if there is None:
        folder.record(record)
    mine = [shard for shard in missing if finished or shard.number % world_size() == rank()]
    speed = fill(folder, plan, mine, data, journal, target)
    if rank() != 0:
        return
    folder.await_work(
        lambda: {shard.number for shard in folder.missing(plan)},
        world_size(),
        say_of_all,
        what="shards",
    )
    if missing or not finished:
        made = provenance()
        folder.finish(plan, record, {name: made[name] for name in ("date", "versions")})
    folder.clear()
    report(folder, plan, data, speed)


def fill(
    folder: StoreFolder,
    plan: Plan,
    shards: list[Shard],
    data: ConversationData,
    journal: Lines,
    target: Target,
) -> float | None:
    """Fill shards. Returns tokens read a second, None if nothing was to be read."""
    unread = folder.unread(plan, shards)
    needs = plan.contents.needs
    began = time.monotonic()
    read = 0
    batches = folder.fill(plan, shards, data, journal, lambda batch: computed(target, batch, needs))
    what = "capture, this process" if world_size() > 1 else "capture"
    for tokens in track(batches, description=what, unit="tokens", size=float, total=unread):
        read += tokens
    passed = time.monotonic() - began
    return read / passed if read and passed > 0 else None


# --- what is said ---------------------------------------------------------------------------------


def report(folder: StoreFolder, plan: Plan, data: ConversationData, speed: float | None) -> None:
    kept = plan.contents
    names = [name if isinstance(name, str) else f"layer {name}" for name in kept.names]
    lines = [
        ("rows", f"{len(data)}"),
        ("tokens", f"{data.tokens}"),
        ("kept of each", ", ".join(names)),
        ("encoding", kept.encoding),
        ("bytes a token", f"{kept.token_bytes}"),
        ("size", f"{room(plan.bytes)} in {len(plan.shards)} shards"),
    ]
    if speed is not None:
        share = " by this process" if world_size() > 1 else ""
        lines.append((f"tokens read a second{share}", amount(speed)))
    table(str(folder.path), ("", "value"), lines)
    say(
        "train from it with python -m drafttrain.fit features=store "
        f"{pasted('features.path', folder.path)} and the same target and data"
    )


def say(text: str) -> None:
    """A line of rank 0."""
    if rank() == 0:
        say_of_all(text)


def say_of_all(text: str) -> None:
    who = f"rank {rank()} " if world_size() > 1 else ""
    print(f"capture: {who}{text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
