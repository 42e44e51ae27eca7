"""Is this the same run? What decides which update comes next, what may differ between the parts of
one run, and whether `best.ckpt` is the one that the run remembers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drafttrain.data.datamodule import ConversationData
from drafttrain.errors import InputError
from drafttrain.files import write_atomic
from drafttrain.processes import rank
from drafttrain.runs import differences, masked
from drafttrain.target import fingerprint
from drafttrain.target.model import Target
from drafttrain.training.checkpoint import (
    BEST,
    LAST,
    check_complete,
    digest_of,
    numbered,
    read_checkpoint,
)
from drafttrain.training.module import DraftModule
from drafttrain.training.run import Run

_BEGUN = "weights of init_from"


def facts_of(
    config: dict[str, Any],
    target: Target,
    data: ConversationData,
    module: DraftModule,
    world: int,
    features: dict[str, Any],
) -> dict[str, Any]:
    """What decides which update comes next, the facts of the source of features included.

    A run is only resumed where all of it is the same. Secrets are no part of it.
    """
    in_rate = ("warmup", "schedule", "end_factor", "horizon")
    facts: dict[str, Any] = {
        "target": target.fingerprint,
        "data": data.set.digest,
        "rows": {
            name: value
            for name, value in config["data"].items()
            if name not in ("_target_", "path")
        },
        "drafter": config["drafter"],
        "draft_vocab": config["draft_vocab"],
        "joint": config.get("joint"),
        "optim": {name: value for name, value in config["optim"].items() if name not in in_rate},
        "rate": module.rate.facts(),
        "batches": {
            name: config["trainer"][name]
            for name in ("batch_tokens", "batch_rows", "pack", "precision")
        },
        "accumulate x processes": config["trainer"]["accumulate"] * world,
        "features": features,
        "seed": config["seed"],
        _BEGUN: digest_of(module.drafter.state_dict())[:16] if config.get("init_from") else None,
        **({} if data.digest is None else {"part": data.digest}),
    }
    found: dict[str, Any] = masked(facts)
    return found


def refuse_other_run(
    resumed: dict[str, Any],
    facts: dict[str, Any],
    config: dict[str, Any],
    say: Callable[[str], None],
    path: Path,
) -> None:
    """List what differs from the earlier part of the run; refuse what would make it another run.

    Args:
        path: of the checkpoint that the earlier part left.
    """
    other = differences(masked(resumed["settings"]), config)
    for key in ("resume", "run_dir", "dry_run", "target.dtype", "target.device"):
        other.pop(key, None)
    if other:
        say(f"settings differ from the earlier part of this run: {_listed(other)}")
    changed = _changed(resumed["facts"], facts)
    if changed:
        raise InputError(
            f"this would not be the same run as that of {path} ({changed}): start a new one with "
            "another run_dir, set these back, or put the run's own checkpoint there"
        )


def go_on_from(run: Run, path: Path, say: Callable[[str], None]) -> None:
    """Read the checkpoint that a run goes on from, and look at the best one that it remembers.

    A best one that is lost, unless a numbered one holds the same weights, or that is of another
    place in this run, is forgotten, which is said: the best is then chosen among the evaluations
    that follow. Where a run was killed between its two files,
    `best.ckpt` is the newer one, and the run goes on from there; where an earlier checkpoint was
    put in the place of `last.ckpt`, from that.

    Raises: InputError if either cannot be used, or the best one is another run's.
    """
    state = read_checkpoint(path)
    check_complete(state, path)
    run.resumed, run.resumed_from = state, path
    best, keeper = run.checkpoints / BEST, state["keeper"]
    if not best.exists():
        if keeper["best"] is not None and not _restored(run, keeper, say):
            _forget_best(run, f"{best} is lost", say)
        return
    found = read_best(best, state)
    if path == best:
        _compare_with_last(run, found, say)
        return
    if _remembers(keeper, found):
        return
    updates, own = found["progress"]["updates"], state["progress"]["updates"]
    if path.name == LAST and updates > own:
        if not _put_there(path, best, updates):
            run.resumed, run.resumed_from = found, best
            say(
                f"{LAST} is of update {own}, older than {BEST} of update {updates}, which the run "
                "goes on from: it was killed between the two"
            )
            return
        say(f"{LAST} of update {own} was put there after {BEST} was written: goes on from it")
    _forget_best(run, f"{best} is of update {updates}", say)


def _restored(run: Run, keeper: Mapping[str, Any], say: Callable[[str], None]) -> bool:
    """Put the numbered checkpoint of the best update in the place of the lost best one, where it
    holds the weights that are remembered."""
    best, kept = run.checkpoints / BEST, run.checkpoints / numbered(keeper["best_update"])
    if keeper.get("best_digest") is None or not kept.is_file():
        return False
    try:
        found = read_checkpoint(kept)
        check_complete(found, kept)
    except InputError:
        return False
    if not _remembers(keeper, found):
        return False
    if rank() == 0:
        write_atomic(best, lambda scratch: shutil.copyfile(kept, scratch))
    say(f"{best} was lost: {kept.name} holds the same weights and was put there")
    return True


def _put_there(last: Path, best: Path, updates: int) -> bool:
    """Was an earlier checkpoint put in the place of `last.ckpt` after `best.ckpt`, of that many
    updates, was written? A run that is killed between the two leaves no younger file."""
    others = [path.stem.partition("-")[2] for path in last.parent.glob("update-*.ckpt")]
    return last.stat().st_mtime_ns > best.stat().st_mtime_ns or any(
        number.isdecimal() and int(number) >= updates for number in others
    )


def _compare_with_last(run: Run, state: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Look whether `best.ckpt`, which a run goes on from, is the one that `last.ckpt` speaks of.

    Raises: InputError if the two are of two runs.
    """
    last = run.checkpoints / LAST
    try:
        latest = read_checkpoint(last)
        check_complete(latest, last)
    except InputError as error:
        say(f"{BEST} cannot be compared with what the run remembers: {error}")
        return
    if changed := _changed(latest["facts"], state["facts"]):
        raise InputError(
            f"{run.checkpoints / BEST} and {LAST} are of two runs ({changed}): put the run's own "
            "files there"
        )
    if not _remembers(latest["keeper"], state):
        kept = latest["keeper"]
        remembered = "none" if kept["best"] is None else f"that of update {kept['best_update']}"
        say(
            f"goes on from {BEST} as it is, of update {state['progress']['updates']}; the best "
            f"that {LAST} remembers is {remembered}"
        )


def read_best(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """A best checkpoint of the run that another state is of.

    Raises: InputError if it is damaged, no best checkpoint, another run's, or of the update that
        the state remembers, with other weights.
    """
    try:
        found = read_checkpoint(path)
        check_complete(found, path)
        _check_best(found, path, state)
    except InputError as error:
        raise InputError(
            f"{error}. Put the run's own {path.name} there, or move it away and give resume=last: "
            "the best is then chosen again"
        ) from error
    return found


def _check_best(found: Mapping[str, Any], path: Path, state: Mapping[str, Any]) -> None:
    keeper, own, updates = state["keeper"], found["keeper"], found["progress"]["updates"]
    known = _remembers(keeper, found)
    if known and keeper.get("best_digest") is not None:
        return
    changed = _changed(state["facts"], found["facts"])
    if changed:
        raise InputError(
            f"{path} and the checkpoint to go on from, one of them replaced, are of two runs "
            f"({changed})"
        )
    if known:
        return
    digest = own.get("best_digest")
    if own["best_update"] != updates or (digest and digest != digest_of(found["weights"])):
        raise InputError(f"{path} is no best checkpoint: it holds other weights than it says")
    if updates == keeper["best_update"]:
        raise InputError(f"{path} holds other weights of update {updates} than the run remembers")


def _remembers(keeper: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Is it the best checkpoint that a run's state speaks of? By its weights and its place in the
    run; one that an earlier version wrote has only its place and figure."""
    if keeper["best"] is None or found["progress"]["updates"] != keeper["best_update"]:
        return False
    digest = keeper.get("best_digest")
    if digest is not None:
        return bool(digest == digest_of(found["weights"]))
    own, names = found["keeper"], ("best", "best_update")
    return all(own[name] == keeper[name] for name in names)


def _forget_best(run: Run, why: str, say: Callable[[str], None]) -> None:
    assert run.resumed is not None
    before = run.resumed["keeper"]
    nothing = {"best": None, "best_update": None, "best_digest": None, "without_progress": 0}
    run.resumed = {**run.resumed, "keeper": nothing}
    what = (
        "this place in the run remembers none"
        if before["best"] is None
        else f"the best was val/tau {before['best']:.3f} of update {before['best_update']}"
    )
    say(f"{why}, and {what}: the best is chosen among the evaluations from here on")


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What makes it another run, in words; empty where nothing does."""
    # Earlier versions kept secrets in checkpoints.
    one, other = ({**masked(dict(facts)), "target": None} for facts in (before, now))
    if _BEGUN not in one:  # Earlier versions did not note them.
        other.pop(_BEGUN, None)
    found = differences(one, other)
    said = [_listed(found)] if found else []
    target_now = now["target"] if isinstance(now["target"], dict) else {}
    if target := fingerprint.run_changes(before.get("target"), target_now):
        said.insert(0, f"target: {target}")
    return "; ".join(said)


def _listed(found: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{key} was {before}, is {now}" for key, (before, now) in found.items())
