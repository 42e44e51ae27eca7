"""The parts of a fit, typed: what its configuration becomes when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.loggers import Logger

from drafttrain.data.datamodule import ConversationData
from drafttrain.drafter.base import Drafter
from drafttrain.target.features import FeatureSource
from drafttrain.target.model import Target
from drafttrain.training.job import Settings
from drafttrain.wiring.config import Config, Recipe


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Checked settings, and recipes for what is built later."""

    config: Config
    """The configuration that config.yaml, checkpoints, packages and pages keep."""
    settings: Settings
    kind: type[Drafter]
    """The drafter's class. Once there is a drafter, ask the drafter."""
    learns: bool
    """Does a run train drafters of this class?"""
    target: Recipe[Target]
    data: Recipe[ConversationData]
    features: Recipe[FeatureSource]
    drafter: Recipe[Drafter]
    loggers: Recipe[list[Logger]]
    run_dir: str | None
    """The run's folder as it was given; None names one by door, experiment and time."""
    resume: str | None
    """`last`, `best`, or a checkpoint's path; None starts a new run."""
    seed: int
    draft_vocab: int
    """Ids that the drafter can propose; 0 is all."""
    init_from: str | None
    """A package whose weights training starts with."""
    export_assistant: bool
    dry_run: bool
    """Only try the run, see `fitting.trying`."""

    @classmethod
    def of(cls, config: Config, settings: Settings, kind: type[Drafter], learns: bool) -> Parts:
        """The parts of a configuration whose settings are checked."""
        values = config.values
        return cls(
            config=config,
            settings=settings,
            kind=kind,
            learns=learns,
            target=Recipe(config, "target"),
            data=Recipe(config, "data"),
            features=Recipe(config, "features"),
            drafter=Recipe(config, "drafter"),
            loggers=Recipe(config, "logger"),
            run_dir=values["run_dir"],
            resume=values["resume"],
            seed=values["seed"],
            draft_vocab=values["draft_vocab"],
            init_from=None if values["init_from"] is None else str(values["init_from"]),
            export_assistant=values["export_assistant"],
            dry_run=values["dry_run"],
        )

    def settled(self, changes: Mapping[str, Any]) -> Parts:
        """With what was settled at run time, such as the dtype that all processes agree on.

        Args:
            changes: values by dotted key.
        """
        return Parts.of(self.config.settled(changes), self.settings, self.kind, self.learns)
