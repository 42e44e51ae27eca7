"""A run that is one of several, ended where another says that it is not worth its time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from drafttrain.training.module import DraftModule

PRUNED = "pruned"
"""Why such a run ended, in `DraftModule.stopped`."""
Judge = Callable[[int, Mapping[str, float | None], bool], bool]
"""Given the number of updates, what an evaluation measured, and whether the run ends there anyway:
shall it end?"""


class Judged(Callback):
    """Asks after every evaluation, once its checkpoint is written: it comes after the keeper."""

    def __init__(self, judge: Judge | None) -> None:
        self.judge = judge
        self._heard: tuple[Mapping[str, float | None], int] | None = None

    def hear(self, metrics: Mapping[str, float | None], updates: int) -> None:
        """Take what an evaluation measured."""
        self._heard = metrics, updates

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._ask(trainer, pl_module)  # A resumed run makes an evaluation that was cut off.

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._ask(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._ask(trainer, pl_module)

    def _ask(self, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, DraftModule)
        if self.judge is None or self._heard is None:
            return
        (metrics, updates), self._heard = self._heard, None
        ends = module.finished or module.stopped is not None
        if self.judge(updates, metrics, ends) and not ends:
            module.stopped = PRUNED
            trainer.should_stop = True
