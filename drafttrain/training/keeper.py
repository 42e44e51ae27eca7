"""When a run's checkpoints are written, which of them is the best, and what a signal does.

`last.ckpt` is the newest state and, once a run has ended, its true last step; `best.ckpt` is the
one with the highest val/tau, as far as that can be told from noise.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn

from drafttrain.decoding.measurement import gain
from drafttrain.errors import InputError, writing
from drafttrain.nn.spoilt import SPOILT, spoilt
from drafttrain.packaging.checking import some
from drafttrain.processes import rank
from drafttrain.training.checkpoint import (
    BEST,
    LAST,
    digest_of,
    numbered,
    tensors_of,
    write_checkpoint,
)
from drafttrain.training.decode_callback import DecodeCallback
from drafttrain.training.module import DraftModule
from drafttrain.training.settings import CheckpointConfig


def refuse_full_disk(folder: Path, module: nn.Module) -> None:
    """Raise InputError unless there is room for weights and two moments, in last, best and one
    being written, and the package."""
    trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    needed, free = trained * (3 * 3 + 1), shutil.disk_usage(folder).free
    if rank() == 0 and free < needed:
        raise InputError(
            f"{folder} has {free / 1e6:.0f} MB free, checkpoints and package need "
            f"{needed / 1e6:.0f} MB: free some space, or give run_dir=<folder on another disk>"
        )


class Keeper(Callback):
    """Writes checkpoints, remembers the best, ends a run without progress, and stops it cleanly on
    a signal.

    Best is by `decode.found`, where it could be measured, see `_judge`. SIGTERM and the first
    Ctrl-C write `last.ckpt` at once, as of the last update, since an update or an evaluation may
    take longer than the sender waits; then they let the update that is being made finish, write
    again and end the run. Where processes share the weights among them, nothing is written before
    that.

    Args:
        folder: of the checkpoints.
        decode: measures; None keeps only the last.
        facts: what a resumed run must agree with; plain values, kept in every checkpoint.
        settings: the run's complete configuration, likewise.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        decode: DecodeCallback | None,
        *,
        patience: int | None = None,
        facts: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.config, self.decode, self.patience = folder, config, decode, patience
        self.facts, self.settings = dict(facts or {}), dict(settings or {})
        self.best: float | None = None
        """val/tau of the checkpoint that is kept as the best."""
        self.best_update: int | None = None
        self.best_digest: str | None = None
        """Of its weights, known to the process that writes."""
        self.without_progress = 0
        """Evaluations since one that was better beyond its noise."""
        self._peak: list[tuple[int, int]] | None = None
        """Per prompt, (tokens, rounds) of the evaluation with the highest val/tau."""
        self._progress: list[tuple[int, int]] | None = None
        """The same of the last one that was better beyond its noise."""
        self._looked_at: int | None = None
        self._written: tuple[int, int | None] | None = None
        self._busy = False
        """Is something being compared or written, which a signal must not come between?"""
        self._handlers: dict[int, Any] = {}

    # When -----------------------------------------------------------------------------------------
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, DraftModule)
        if self.decode is not None and self.decode.caught_up:
            self._look(trainer, pl_module)
        if threading.current_thread() is not threading.main_thread():
            return

        def stop(number: int, _frame: Any) -> None:
            if pl_module.stop_requested and number == signal.SIGINT:
                raise KeyboardInterrupt
            pl_module.stop_requested = True
            self._save_now(trainer, pl_module)

        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers[number] = signal.signal(number, stop)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, DraftModule)
        module = pl_module
        if module.just_updated or module.stopped:
            with self._undivided():
                self._look(trainer, module)
                due = self.config.every is not None and module.updates % self.config.every == 0
                if due or module.stopped == "signal":
                    self._save(trainer, module)
        if module.stop_requested:
            self._save_now(trainer, module)  # It could not, when the signal came.

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, DraftModule)
        with self._undivided():
            self._look(trainer, pl_module)
            self._save(trainer, pl_module)
        self._restore_handlers()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._restore_handlers()

    def _look(self, trainer: Trainer, module: DraftModule) -> None:
        """Take a new measurement into account: the best is written first, so that a kill cannot
        leave its score without it."""
        decode = self.decode
        if (
            decode is None
            or decode.measured_at in (None, self._looked_at)
            or decode.measured_at != module.updates
        ):
            return
        self._looked_at, written = decode.measured_at, False
        if decode.found is not None and (tau := decode.tau) is not None:
            if self._judge(decode.found.counts):
                self.best, self.best_update = tau, module.updates
                self._write(trainer, module, BEST)
                self._link(BEST, LAST)
                self._number(module)
                written = True
            if (
                self.patience is not None
                and self.without_progress >= self.patience
                and module.stopped is None
            ):
                module.stopped = "patience"
                trainer.should_stop = True
        if self.config.every is None and not written:
            self._save(trainer, module)

    def _judge(self, counts: list[tuple[int, int]]) -> bool:
        """Note what an evaluation counted, prompt by prompt; whether its checkpoint is the best.

        A difference within its noise is none: of checkpoints that cannot be told apart from the one
        with the highest val/tau, the last one, which has learned most, is the best.
        """
        self.without_progress += 1
        if self._progress is None or _surely_above(counts, self._progress):
            self._progress, self.without_progress = counts, 0
        best = self._peak is None or not _surely_above(self._peak, counts)
        if self._peak is None or (gain(counts, self._peak)[0] or 0) > 0:
            self._peak = counts
        return best

    # How ------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _undivided(self) -> Iterator[None]:
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _save_now(self, trainer: Trainer, module: DraftModule) -> None:
        """Write where the last closed window led to, wherever in the program a signal came; nothing
        where that is not settled.

        Processes are not at the same place then, so only one that has all of the state by itself
        writes.
        """
        decode = self.decode
        pending = (
            decode is not None
            and decode.measured_at == module.updates
            and self._looked_at != module.updates
        )
        settled = module.closed and not (self._busy or module.updating or module.stopped or pending)
        complete = rank() == 0 and isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy)
        if settled and complete and self._written != self._state_of(module):
            # What cannot be written now is reported after the update, where the complete run can
            # end on it.
            with self._undivided(), contextlib.suppress(OSError, RuntimeError, InputError):
                self._write(trainer, module, LAST, together=False)

    def _save(self, trainer: Trainer, module: DraftModule) -> None:
        if self._written != self._state_of(module):
            self._write(trainer, module, LAST)
            self._number(module)

    def _state_of(self, module: DraftModule) -> tuple[int, int | None]:
        return module.closed, None if self.decode is None else self.decode.measured_at

    def _write(
        self, trainer: Trainer, module: DraftModule, name: str, *, together: bool = True
    ) -> None:
        """Collect on every process, write on the first.

        Args:
            together: does every process come here?
        """
        strategy = trainer.strategy
        weights = strategy.lightning_module_state_dict()
        optimiser = strategy.optimizer_state(trainer.optimizers[0])
        if rank() == 0:
            if name == BEST:
                self.best_digest = digest_of(weights)
            state = {
                "weights": weights,
                "optimiser": optimiser,
                "progress": module.progress(),
                "keeper": self.state_dict(),
                "decode": None if self.decode is None else self.decode.state_dict(),
                "facts": self.facts,
                "settings": self.settings,
            }
            odd = spoilt(tensors_of(state))
            if odd:
                raise module.spoilt(
                    f"{SPOILT} {some(odd)} after update {module.updates}: not written"
                )
            write_checkpoint(self.folder / name, state)
        module.kept = self.folder / name, module.updates
        self._written = self._state_of(module)
        if together:
            strategy.barrier("checkpoint")

    def _number(self, module: DraftModule) -> None:
        if rank() != 0 or not self.config.keep:
            return
        self._link(LAST, numbered(module.updates))
        # By age: a run that goes on from an earlier place writes lower numbers again.
        others = sorted(
            self.folder.glob("update-*.ckpt"), key=lambda path: (path.stat().st_mtime_ns, path.name)
        )
        for path in others[: -self.config.keep]:
            path.unlink()

    def _link(self, there: str, name: str) -> None:
        """A second name for a file, which later replacements of the first one do not change."""
        if rank() != 0:
            return
        scratch = self.folder / f".{name}-link"
        scratch.unlink(missing_ok=True)
        try:
            with writing(self.folder / name):
                try:
                    os.link(self.folder / there, scratch)
                except OSError:
                    shutil.copy2(self.folder / there, scratch)
            os.replace(scratch, self.folder / name)
        finally:
            scratch.unlink(missing_ok=True)

    def _restore_handlers(self) -> None:
        while self._handlers:
            number, handler = self._handlers.popitem()
            signal.signal(number, handler)

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "best_update": self.best_update,
            "best_digest": self.best_digest,
            "without_progress": self.without_progress,
            "measures": None if self.decode is None else self.decode.measures,
            "peak": self._peak,
            "progress": self._progress,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.best_update = state_dict["best"], state_dict["best_update"]
        self.best_digest = state_dict.get("best_digest")
        self.without_progress = state_dict["without_progress"]
        # What was measured otherwise cannot be compared prompt by prompt.
        if self.decode is not None and state_dict.get("measures") == self.decode.measures:
            self._peak, self._progress = (state_dict.get(name) for name in ("peak", "progress"))


def _surely_above(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> bool:
    """Is tau higher, beyond its noise? One prompt has no noise that could be known."""
    value, interval = gain(one, other)
    return value is not None and (value if interval is None else interval[0]) > 0
