"""A run's folder, what is resumed from it, and what all its processes must have in common before
anything is built."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from drafttrain.checks import path_of
from drafttrain.data.conversations import write_atomic
from drafttrain.data.journal import locked
from drafttrain.errors import InputError
from drafttrain.processes import await_word, give_word, on_another_machine, rank
from drafttrain.runs import run_dir
from drafttrain.target.load import resolve_device, resolve_dtype
from drafttrain.training.checkpoint import LAST, check_complete, check_facts, read_checkpoint

CONFIG, CHECKPOINTS = "config.yaml", "checkpoints"
_HALF_WRITTEN = re.compile(r"\.(last|best|update-\d+)\.ckpt-\w+")


@dataclass
class Run:
    """The run's folder and what is resumed from it."""

    folder: Path
    resumed: dict[str, Any] | None = None
    loggers: list[Logger] = field(default_factory=list)

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @property
    def scratch(self) -> Path:
        return self.folder / "scratch"

    def clear_scratch(self) -> None:
        """Remove kept features, the folders they leave empty, and checkpoints that a kill left half
        written; nothing else, whatever folder was given as the run's."""
        for path in self.checkpoints.glob(".*"):
            if _HALF_WRITTEN.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        if self.scratch.is_dir():
            ours = [
                path for path in self.scratch.iterdir() if path.name.isdecimal()
            ]  # a process's own
            for folder in (*ours, self.scratch):
                with contextlib.suppress(OSError):
                    (folder / "features.bin").unlink(missing_ok=True)
                    folder.rmdir()

    def keep_config(self, cfg: DictConfig) -> None:
        """Write config.yaml; that of a run's first part stays."""
        config = self.folder / CONFIG
        if rank() == 0 and not config.exists():
            write_atomic(
                config, lambda scratch: scratch.write_text(OmegaConf.to_yaml(cfg), encoding="utf-8")
            )


@contextlib.contextmanager
def open_run(cfg: DictConfig, say: Callable[[str], None]) -> Iterator[Run]:
    """Choose the folder, read what is resumed, and settle what all processes must have in common.

    A folder that holds nothing in the end, because the run was refused, is removed again.
    """
    if cfg.resume is not None and cfg.resume != "last":
        given = path_of("resume", cfg.resume).absolute()
        if not given.is_file():
            raise InputError(f"resume={cfg.resume}: give last, or the path of a checkpoint")
        if not cfg.run_dir and given.parent.name != CHECKPOINTS:
            raise InputError(
                f"resume={cfg.resume} lies in no run's folder: give run_dir=<folder of the run> too"
            )
        cfg.run_dir = cfg.run_dir or str(given.parent.parent)
    folder = run_dir(cfg, resume=cfg.resume is not None)
    run = Run(folder)
    with locked(folder) if rank() == 0 else contextlib.nullcontext():
        try:
            if cfg.resume is not None:
                run.resumed = read_resumed(cfg, run, say)
            settle_dtype(cfg, run)
            yield run
        except BaseException:
            # The corrected command must find its folder free.
            if rank() == 0 and not run.checkpoints.exists() and cfg.resume is None:
                (folder / CONFIG).unlink(missing_ok=True)
            raise
        finally:
            if rank() == 0:
                run.clear_scratch()
                with contextlib.suppress(OSError):
                    folder.rmdir()


def read_resumed(cfg: DictConfig, run: Run, say: Callable[[str], None]) -> dict[str, Any] | None:
    path = (
        run.checkpoints / LAST
        if cfg.resume == "last"
        else Path(str(cfg.resume)).expanduser().absolute()
    )
    mark = path if cfg.resume == "last" else run.checkpoints
    if not mark.exists() and not (run.folder / CONFIG).is_file():
        raise InputError(
            f"run_dir={run.folder} is no run's folder, it has neither "
            f"{mark.relative_to(run.folder)} nor {CONFIG}: give the folder "
            "of an earlier run, or leave resume out and give a new one"
        )
    if cfg.resume == "last" and not path.exists():
        if held := sorted(entry.name for entry in run.checkpoints.glob("*.ckpt")):
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
            raise InputError(f"{what}: {others} anew in another run_dir")
        say(f"{run.folder} holds no checkpoint yet: starts from the beginning")
        return None
    state = read_checkpoint(path)
    # Of several fits the run's own checkpoint says only which run it is; each fit has one of its
    # own.
    (check_complete if cfg.boost is None else check_facts)(state, path)
    return state


def settle_dtype(cfg: DictConfig, run: Run) -> None:
    """One dtype of the target for all processes and all parts of a run; what a killed run left
    behind is removed first.

    Which dtype is faster here is measured, so two processes, or two days, could disagree.
    """
    if cfg.trainer.accelerator == "cpu" and cfg.target.get("device") == "auto":
        cfg.target.device = "cpu"
    asked = cfg.target.get("dtype") == "auto"
    dtype = ""
    if rank() == 0:
        run.clear_scratch()
        if asked:
            if run.resumed is not None:
                marks = run.resumed["facts"]["target"]
                dtype = str(marks.get("dtype", "")) if isinstance(marks, dict) else ""
            else:
                found = resolve_dtype(
                    "auto", resolve_device(cfg.target.get("device", "auto")), "throughput"
                )
                dtype = str(found).removeprefix("torch.")
        give_word(dtype)
    elif not on_another_machine():
        dtype = await_word("the target's dtype")
    elif asked:
        raise InputError(
            "processes on several machines cannot agree on the target's dtype alone: give "
            "target.dtype=bfloat16"
        )
    if asked and dtype:
        cfg.target.dtype = dtype
