"""Open a run: choose its folder, read what is resumed, and settle what its processes share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from drafttrain.checks import path_of
from drafttrain.data.journal import locked
from drafttrain.errors import InputError
from drafttrain.fitting.parts import Parts
from drafttrain.fitting.saying import say
from drafttrain.processes import await_word, give_word, on_another_machine, rank
from drafttrain.runs import run_dir
from drafttrain.target.load import resolve_device, resolve_dtype
from drafttrain.training.checkpoint import BEST, LAST, NAMED, check_facts, read_checkpoint
from drafttrain.training.resume import go_on_from
from drafttrain.training.run import CHECKPOINTS, CONFIG, Run


@contextlib.contextmanager
def open_run(parts: Parts) -> Iterator[tuple[Run, Parts]]:
    """The run, and its parts as they were settled for all processes.

    A folder that holds nothing in the end, because the run was refused, is removed again.
    """
    parts = in_its_folder(parts)
    folder = run_dir(parts.run_dir, resume=parts.resume is not None)
    run = Run(folder)
    if not parts.run_dir:
        say(f"the run's folder is {folder}")
    with locked(folder) if rank() == 0 else contextlib.nullcontext():
        try:
            if parts.resume is not None:
                read_resumed(parts, run)
            yield run, settle_dtype(parts, run)
        except BaseException:
            # The corrected command must find its folder free.
            if rank() == 0 and not run.checkpoints.exists() and parts.resume is None:
                (folder / CONFIG).unlink(missing_ok=True)
            raise
        finally:
            if rank() == 0:
                run.clear_scratch()
                with contextlib.suppress(OSError):
                    folder.rmdir()


def in_its_folder(parts: Parts) -> Parts:
    """With the run's folder, where a checkpoint to go on from names it."""
    if parts.resume is None or parts.resume in NAMED:
        return parts
    given = path_of("resume", parts.resume).absolute()
    if given.is_dir():
        raise InputError(
            f"resume={parts.resume} is a folder: give the checkpoint itself, or a run's folder as "
            f"run_dir={parts.resume} resume=last"
        )
    if not given.exists():
        raise InputError(
            f"resume={parts.resume}: there is no such file; give last, best, or the path of a "
            "checkpoint"
        )
    if not parts.run_dir and given.parent.name != CHECKPOINTS:
        raise InputError(
            f"resume={parts.resume} is in no run's folder: give run_dir=<folder of the run> too"
        )
    return parts.settled({"run_dir": parts.run_dir or str(given.parent.parent)})


def read_resumed(parts: Parts, run: Run) -> None:
    """Read the checkpoint that the run goes on from, where it has written one yet."""
    named = NAMED.get(str(parts.resume))
    path = run.checkpoints / named if named else path_of("resume", parts.resume).absolute()
    mark = path if named else run.checkpoints
    if not mark.exists() and not (run.folder / CONFIG).is_file():
        raise InputError(
            f"run_dir={run.folder} is no run's folder, it has neither "
            f"{mark.relative_to(run.folder)} nor {CONFIG}: give the folder of an earlier run, or "
            "leave resume out and give a new one"
        )
    if named == BEST and not path.exists():
        raise InputError(
            f"resume=best: {run.checkpoints} holds no {BEST}, which a first measured evaluation "
            "writes; give resume=last"
        )
    if named and not path.exists():
        refuse_lost(run, path)
        say(f"{run.folder} holds no checkpoint yet: starts from the beginning")
    elif parts.settings.boost is None:
        go_on_from(run, path, say)
    else:  # The run's own checkpoint only says which run it is; each fit has one of its own.
        run.resumed = read_checkpoint(path)
        check_facts(run.resumed, path)


def refuse_lost(run: Run, path: Path) -> None:
    """Raise InputError if a run has checkpoints, and the last one is not there."""
    held = sorted(entry.name for entry in run.checkpoints.glob("*.ckpt"))
    if not held:
        return
    what = (
        f"{path} is a link that leads nowhere"
        if path.is_symlink()
        else f"{run.checkpoints} has lost {LAST}"
    )
    rest = [name for name in held if name != LAST]
    others = (
        f"go on from another one ({', '.join(rest)}) by resume=<its path>, or start"
        if rest
        else "start"
    )
    raise InputError(f"{what}: {others} again in another run_dir")


def settle_dtype(parts: Parts, run: Run) -> Parts:
    """With one dtype of the target for all processes and all parts of a run.

    Which dtype is faster here is measured, so two processes, or two days, could disagree. Files
    that a killed run left are removed first.
    """
    parts = settle_device(parts)
    asked = parts.target.get("dtype") == "auto"
    dtype = ""
    if rank() == 0:
        run.clear_scratch()
        if asked:
            dtype = dtype_of(parts, run)
        give_word(dtype)
    elif not on_another_machine():
        dtype = await_word("the target's dtype")
    elif asked:
        raise InputError(
            "processes on several machines cannot agree on the target's dtype by themselves: give "
            "target.dtype=bfloat16"
        )
    return parts.settled({"target.dtype": dtype}) if asked and dtype else parts


def settle_device(parts: Parts) -> Parts:
    """With the target where training was asked for."""
    if parts.settings.trainer.accelerator == "cpu" and parts.target.get("device") == "auto":
        return parts.settled({"target.device": "cpu"})
    return parts


def dtype_of(parts: Parts, run: Run) -> str:
    """The dtype of the run's earlier part, or else the one that is faster here."""
    if run.resumed is not None:
        marks = run.resumed["facts"]["target"]
        return str(marks.get("dtype", "")) if isinstance(marks, dict) else ""
    found = resolve_dtype(
        "auto", resolve_device(parts.target.get("device") or "auto"), "throughput"
    )
    return str(found).removeprefix("torch.")
