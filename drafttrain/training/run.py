"""A run's folder, and what is resumed from it."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from drafttrain.files import write_atomic
from drafttrain.packaging.manifest import PACKAGE
from drafttrain.packaging.writing import clear_left
from drafttrain.processes import rank

CONFIG, CHECKPOINTS = "config.yaml", "checkpoints"
_HALF_WRITTEN = re.compile(r"\.(last|best|update-\d+)\.ckpt-\w+")


@dataclass
class Run:
    """The run's folder and what is resumed from it."""

    folder: Path
    resumed: dict[str, Any] | None = None
    """The state of the checkpoint that this part of the run goes on from."""
    resumed_from: Path | None = None
    """That checkpoint."""
    loggers: list[Logger] = field(default_factory=list)

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @property
    def scratch(self) -> Path:
        return self.folder / "scratch"

    def clear_scratch(self) -> None:
        """Remove kept features, the folders they leave empty, and half-written checkpoints and
        packages of a killed run.

        Nothing else is removed, whatever folder was given as the run's.
        """
        for path in self.checkpoints.glob(".*"):
            if _HALF_WRITTEN.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        clear_left(self.folder / PACKAGE)
        if self.scratch.is_dir():
            # A number is a process's own folder.
            ours = [path for path in self.scratch.iterdir() if path.name.isdecimal()]
            for folder in (*ours, self.scratch):
                with contextlib.suppress(OSError):
                    (folder / "features.bin").unlink(missing_ok=True)
                    folder.rmdir()

    def keep_config(self, text: str) -> None:
        """Write config.yaml; that of a run's first part stays."""
        config = self.folder / CONFIG
        if rank() == 0 and not config.exists():
            write_atomic(config, lambda scratch: scratch.write_text(text, encoding="utf-8"))
