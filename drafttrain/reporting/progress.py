"""The progress line of a training run. Apart from `console.py`, because Lightning takes seconds to
import."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from drafttrain.processes import rank, world_size
from drafttrain.reporting.console import Rate, amount, clock, console

_BOUNDS = ("_low", "_high")
"""How the metrics end that bound another one's interval; shown after it."""


class ConsoleProgress(ProgressBar):
    """Progress of training: steps and supervised tokens a second, time left, loss, and the last
    decoded measurements.

    Shown by rank 0 only: a live line in a terminal, else a line every `interval` seconds. Tokens
    are counted from the batches' `loss_mask`; with several processes the rate is this process's
    times their number.

    Args:
        interval: seconds between lines where there is no terminal.
        watch: logged metrics to keep in sight.
    """

    def __init__(
        self,
        interval: float = 10.0,
        watch: Sequence[str] = ("train/loss", "val/tau"),
        out: Console | None = None,
    ) -> None:
        super().__init__()
        self._interval = interval
        self._watch = tuple(watch)
        self._out = out or console()
        self._enabled = rank() == 0
        self._live: Progress | None = None
        self._seen: dict[str, float] = {}

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = rank() == 0

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._enabled:
            self._out.print(*(str(arg) for arg in args), markup=False, highlight=False)

    def note_all(self, metrics: Mapping[str, float | None]) -> None:
        """Keep further numbers in sight; None takes one away. A metric's interval, under its name
        with _low and _high, is shown after it."""
        for name, value in metrics.items():
            if value is None:
                self._seen.pop(name, None)
            else:
                self._seen[name] = float(value)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        total = trainer.estimated_stepping_batches
        self._total = int(total) if 0 < total < float("inf") else None
        self._steps, self._tokens = Rate(), Rate()
        self._step = trainer.global_step
        self._pending: torch.Tensor | int = 0
        self._said = time.monotonic()
        if self._enabled and self._out.is_terminal:
            self._live = Progress(
                TextColumn("training"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[line]}"),
                console=self._out,
            )
            self._task = self._live.add_task(
                "training", total=self._total, completed=self._step, line=""
            )
            self._live.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._enabled:
            return
        mask = getattr(batch, "loss_mask", None)
        if isinstance(mask, torch.Tensor):
            self._pending = self._pending + mask.sum()
        if trainer.global_step > self._step:
            self._steps.add(trainer.global_step - self._step)
            self._step = trainer.global_step
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        due = time.monotonic() - self._said >= (0.5 if self._live else self._interval)
        if due:
            if isinstance(loss, torch.Tensor) and "train/loss" not in trainer.callback_metrics:
                self._seen["loss"] = float(loss.detach())
            self._show(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._enabled:
            self._show(trainer)
        self._stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    def _look(self, trainer: Trainer) -> None:
        for name in self._watch:
            if name in trainer.callback_metrics:
                self._seen[name] = float(trainer.callback_metrics[name])

    def _show(self, trainer: Trainer) -> None:
        self._look(trainer)
        if not isinstance(self._pending, int):
            self._tokens.add(int(self._pending) * world_size())
            self._pending = 0
        self._said = time.monotonic()
        line = self._line()
        if self._live:
            self._live.update(self._task, completed=self._step, line=line)
        else:
            self.print(line)

    def _line(self) -> str:
        words = [
            f"step {self._step}"
            + (f"/{self._total} {100 * self._step // self._total}%" if self._total else "")
        ]
        words.append(f"{amount(self._steps.recent)} steps/s")
        if self._tokens.count:
            words.append(f"{amount(self._tokens.recent)} tokens/s")
        words += [
            f"{name} {value:.4g}{self._interval_of(name)}"
            for name, value in self._seen.items()
            if not name.endswith(_BOUNDS)
        ]
        if self._total:
            words.append(f"left {clock(self._steps.left(self._total - self._step))}")
        return "  ".join(words)

    def _interval_of(self, name: str) -> str:
        low, high = (self._seen.get(name + bound) for bound in _BOUNDS)
        return "" if low is None or high is None else f" ({low:.4g}..{high:.4g})"

    def _stop(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None
