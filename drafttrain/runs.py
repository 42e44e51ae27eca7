"""Where a run came from and where it writes: chance, provenance, one folder for all processes."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import math
import os
import platform
import random
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drafttrain import masking
from drafttrain.checks import literal_text, path_of
from drafttrain.errors import InputError, disk_full
from drafttrain.processes import await_word, give_word, on_another_machine, rank


@dataclass(frozen=True)
class Invocation:
    """What the person asked for: kept for provenance and for the name of the run's folder."""

    door: str
    overrides: tuple[str, ...] = ()
    choices: dict[str, Any] = field(default_factory=dict)
    """{config group: chosen option}"""
    config: DictConfig = field(default_factory=lambda: OmegaConf.create({}))

    @functools.cached_property
    def secrets(self) -> frozenset[str]:
        """Values of settings that are kept to oneself, as far as texts can be searched for them."""
        written = resolved = OmegaConf.to_container(self.config)
        with contextlib.suppress(OmegaConfBaseException):
            resolved = OmegaConf.to_container(self.config, resolve=True)
        found = masking.secrets_in(written, resolved), masking.secrets_among(self.overrides)
        return frozenset(itertools.chain(*found))

    @property
    def command(self) -> str:
        """Without secrets."""
        words = [masking.hidden(word, self.secrets) for word in self.overrides]
        return shlex.join(["python", "-m", f"drafttrain.{self.door}", *words])


current = Invocation(door="python")
"""Of the door that is open; set by `wiring.doors.door`."""


def hidden(text: str) -> str:
    """A text that may be shown or kept: without the secrets of the open door."""
    return masking.hidden(text, current.secrets)


def masked(values: Any) -> Any:
    """Plain values that may be kept or sent: without secrets."""
    return masking.masked(values, current.secrets)


def kept(written: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as files, trackers and pages may hold it: without secrets, every reference
    resolved but those to the environment.

    Args:
        written: plain values, with references as they were written.
    """
    found: dict[str, Any] = masked(read_inside(written))
    return found


def read_inside(written: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, secrets included, with every reference resolved but those to the
    environment."""
    literal: DictConfig = OmegaConf.create(_unread(written))
    try:
        values: Any = plain(literal)
    except OmegaConfBaseException:  # A reference that only what the environment says resolves.
        values = written
    return dict(values)


def _unread(written: Any) -> Any:
    """With what names a variable of the environment as literal text."""
    if isinstance(written, Mapping):
        return {key: _unread(held) for key, held in written.items()}
    if isinstance(written, list):
        return [_unread(held) for held in written]
    is_read = isinstance(written, str) and masking.reads_environment(written)
    return literal_text(written) if is_read else written


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and PyTorch (every device). The same on every process, so that all start
    from the same weights."""
    import numpy as np
    import torch

    if not 0 <= seed < 2**32:
        raise InputError(f"seed={seed}: needs an integer from 0 to {2**32 - 1}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def provenance(config: DictConfig | Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Where a result comes from: versions, commit, command line, configuration, date.

    Args:
        config: plain values that may be kept, or as it was composed; None is that of the open
            door.
    Returns: plain JSON types.
    """
    if config is None:
        config = current.config
    if isinstance(config, DictConfig):
        config = kept(written_of(config))
    versions = {}
    for package in ("drafttrain", "torch", "transformers", "lightning"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed as a package"
    return {
        "command": current.command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **versions},
        "commit": _commit(),
        "config": _as_json(config),
    }


def _as_json(value: Any) -> Any:
    """Plain values with what JSON has no number for, such as features.budget_gb=inf, as text."""
    if isinstance(value, Mapping):
        return {key: _as_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_as_json(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def written_of(config: DictConfig) -> dict[str, Any]:
    """A configuration as plain values; references are as they were written."""
    found = OmegaConf.to_container(config, enum_to_str=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def plain(config: DictConfig) -> dict[str, Any]:
    """A configuration as dicts, lists and scalars with every reference resolved."""
    container = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def plain_value(value: Any) -> Any:
    """One setting as plain lists, dicts and scalars."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{dotted key: (before, after)} of two plain configurations; a key that one lacks counts as
    None."""

    def flat(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in node.items():
            if isinstance(value, dict) and value:
                found.update(flat(value, f"{prefix}{key}."))
            else:
                found[f"{prefix}{key}"] = value
        return found

    old, new = flat(before), flat(after)
    return {
        k: (old.get(k), new.get(k))
        for k in sorted(old.keys() | new.keys())
        if old.get(k) != new.get(k)
    }


def _commit() -> str | None:
    """The checkout's commit, `+` when files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        head = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
        )
        dirty = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def run_dir(given: object, *, resume: bool, kind: str = "") -> Path:
    """One folder for the run, the same on every process; made by rank 0.

    A folder that is given is taken as it is, otherwise it is `runs/<door>-<experiment>-<time>`.
    A folder that holds something is refused unless a resume is asked; then the newest folder of the
    same door and experiment replaces one that is not given.

    Args:
        given: the setting `run_dir`.
        resume: continue the run in the folder.
        kind: of run, a further part of the name, such as `sweep`.
    Raises: InputError: folder in use, or nothing to resume; on the other processes also when rank 0
    refused or stays silent.
    """
    if rank() != 0:
        if on_another_machine():
            if not given:
                raise InputError(
                    "processes on several machines cannot agree on a folder by themselves: give "
                    "run_dir=<shared folder>"
                )
            return path_of("run_dir", given).absolute()
        return Path(await_word("the run's folder"))
    try:
        folder = _choose_run_dir(given, resume, Path("runs"), kind)
    except InputError as error:
        give_word(str(error), refuse=True)
        raise
    give_word(str(folder))
    return folder


def check_run_dir(given: object, *, resume: bool) -> Path | None:
    """The folder that `run_dir` names, looked at and not made; None where none is named.

    Raises: InputError if it cannot be used.
    """
    if given is None or given == "":
        return None
    folder = path_of("run_dir", given).absolute()
    if folder.exists() and not folder.is_dir():
        raise InputError(f"run_dir={given} is a file: give a folder")
    try:
        held = (
            sorted(p.name + "/" * p.is_dir() for p in folder.iterdir()) if folder.exists() else []
        )
    except OSError as error:
        raise InputError(f"run_dir={given} cannot be read: {error.strerror}") from error
    if held and not resume:
        listed = ", ".join(held[:6]) + (f" and {len(held) - 6} more" if len(held) > 6 else "")
        raise InputError(
            f"run_dir={given} already holds {listed}: give another run_dir"
            + (", or continue it with resume=last" if current.door == "fit" else "")
        )
    if resume and not held:
        what = "is empty" if folder.exists() else "does not exist"
        raise InputError(
            f"run_dir={given} {what}, so there is nothing to resume: give the folder of an earlier "
            "run, or leave resume out"
        )
    if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"run_dir={given} cannot be written to: give another folder")
    return folder


@contextlib.contextmanager
def new_folder(given: object) -> Iterator[Path]:
    """As `run_dir` for a run that is not resumed; an empty folder is removed at the end."""
    folder = run_dir(given, resume=False)
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _choose_run_dir(given: object, resume: bool, root: Path, kind: str = "") -> Path:
    experiment = _file_part(current.choices.get("experiment"))
    name = "-".join(filter(None, [current.door, kind, experiment]))
    folder = check_run_dir(given, resume=resume)
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if disk_full(error):
                raise
            raise InputError(f"run_dir={given} cannot be made: {error.strerror}") from error
        return folder
    root = root.absolute()
    if resume:
        pattern = re.compile(re.escape(name) + r"-\d{8}-\d{6}(-\d+)?")
        earlier = [
            p
            for p in root.glob(f"{name}-*")
            if p.is_dir() and pattern.fullmatch(p.name) and any(p.iterdir())
        ]
        if not earlier:
            raise InputError(
                f"nothing to resume: no folder {root / name}-*; give run_dir=<folder of the "
                "earlier run>"
            )
        return max(earlier, key=_age)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for attempt in range(1, 1000):
        folder = root / (f"{name}-{stamp}" + (f"-{attempt}" if attempt > 1 else ""))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            if disk_full(error):
                raise
            raise InputError(
                f"{folder} cannot be made: {error.strerror}; give run_dir=<folder>"
            ) from error
        return folder
    raise InputError(f"{root} holds a thousand runs of this second: give run_dir=<folder>")


def _age(folder: Path) -> tuple[str, int]:
    match = re.search(r"-(\d{8}-\d{6})(?:-(\d+))?$", folder.name)
    assert match is not None
    return match.group(1), int(match.group(2) or 1)


def _file_part(name: Any) -> str:
    return re.sub(r"[^\w.-]+", "_", str(name)) if name else ""
