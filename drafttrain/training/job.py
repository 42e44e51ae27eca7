"""What one fit is made from: checked settings, and the parts that are there before training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from drafttrain.data.datamodule import ConversationData
from drafttrain.drafter.base import Drafter
from drafttrain.target.model import Target
from drafttrain.training.boost import Boost
from drafttrain.training.course import TrainerConfig
from drafttrain.training.joint import Joint
from drafttrain.training.optim import AdamW
from drafttrain.training.run import Run
from drafttrain.training.settings import CheckpointConfig, EvalConfig, FinalConfig
from drafttrain.training.skips import SkipSearch
from drafttrain.tree.topology import Growth


@dataclass(frozen=True)
class Settings:
    """The parts of the configuration that check themselves."""

    trainer: TrainerConfig
    optim: AdamW
    eval: EvalConfig
    checkpoint: CheckpointConfig
    final: FinalConfig
    tree: Growth
    joint: Joint | None = None
    """How the target is trained too; None leaves it frozen."""
    boost: Boost | None = None
    """How several drafters are fitted one after the other; None fits one."""
    search: SkipSearch | None = None
    """How what a drafter leaves out of the target is searched; None takes it as given."""

    @property
    def unmeasured(self) -> Settings:
        """The same fit, of which nothing is decoded before it is done."""
        quiet = replace(
            self.eval, every=None, prompts=0, sim_rows=0, speed_prompts=0, patience=None
        )
        return replace(self, eval=quiet)

    @property
    def trains_target(self) -> bool:
        """Does the target learn too?"""
        return self.joint is not None and bool(self.joint.rank)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One fit, before it is prepared."""

    config: dict[str, Any]
    """The run's configuration as plain values."""
    kept: dict[str, Any]
    """The same as checkpoints and trackers keep it, without secrets."""
    settings: Settings
    run: Run
    target: Target
    drafter: Drafter
    data: ConversationData
    held_out: ConversationData | None
    calibration: ConversationData | None = None
    """Rows set aside, where trees are to be calibrated or shared on them."""

    @property
    def seed(self) -> int:
        seed: int = self.config["seed"]
        return seed
