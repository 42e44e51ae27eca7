"""One LightningModule for every drafter: ask the source for features, call `drafter.loss`, sum,
divide last, update.

Losses come as sums. Gradients of sums are added up over a window of accumulated micro-batches and
over all processes; then they are divided once, by the supervised tokens of the complete window. So
neither accumulation nor processes nor padding nor the distribution of supervised tokens over them
changes an update, and a window without supervised tokens makes none.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError, first_line
from drafttrain.flow import Batch, Features, Loss
from drafttrain.nn.spoilt import SPOILT
from drafttrain.processes import rank, world_size
from drafttrain.target.features import fault_in
from drafttrain.training.course import Course
from drafttrain.training.optim import AdamW

MOST_SPOILT = 3
"""Windows in a row whose gradient is not finite, after which a run ends."""


class Source(Protocol):
    """Where features come from."""

    def features(self, batch: Batch) -> Features: ...


class Sharing(Protocol):
    """A drafter of which every process has a share, see `drafttrain.training.sharding`."""

    def loss(self, batch: Batch, features: Features, generator: torch.Generator | None) -> Loss: ...

    def gathered(self) -> Drafter: ...


class DraftModule(LightningModule):
    """Trains a drafter. The target is not a child: it is neither saved, nor moved, nor wrapped.

    Args:
        drafter: float32, in training mode.
        source: supplies the features that the drafter needs.
        optim: the optimiser's settings.
        course: how micro-batches become updates, and when the run ends.
        seed: of the training noise. Noise depends only on seed, number of the micro-batch and
            process.
        log_every: updates of a logged window.
    """

    def __init__(
        self,
        drafter: Drafter,
        source: Source,
        optim: AdamW,
        course: Course,
        *,
        seed: int = 0,
        log_every: int = 10,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        refuse_low_precision(drafter)
        self.drafter = drafter
        self.source, self.optim, self.course = source, optim, course
        self.seed, self.log_every = seed, log_every
        self.rate = optim.resolve(course.updates, course.seconds)
        # The place in the run; all of it is in checkpoints.
        self.position = 0
        """Micro-batches that this process has read."""
        self.closed = 0
        """Those of them in closed windows: weights and optimiser are what they led to."""
        self.updating = False
        """Is a window just being closed, so that weights and counts do not belong together?"""
        self.updates = 0
        """Optimiser updates made."""
        self.empty_windows = 0
        """Windows without a supervised token, which made no update."""
        self.spoilt_windows = 0
        """Windows whose gradient was not finite on some process, or too large to be squared, which
        made no update."""
        self.supervised = 0.0
        """Supervised tokens seen by all processes together."""
        self.seconds_before = 0.0
        """Seconds of training in earlier parts of the run."""
        self.stop_requested = False
        """Set by a signal; every process then stops after the same update."""
        self.stopped: str | None = None
        """Why the run ended early: "signal", "time" or "patience"."""
        self.just_updated = False
        """Did the last micro-batch close a window with an update?"""
        self.kept: tuple[Path, int] | None = None
        """The newest checkpoint of this run, and its updates."""
        self.sharding: Sharing | None = None
        """How processes share the drafter while they train it; None: each has all of it."""
        self._optimiser_state: dict[str, Any] | None = None
        self._spoilt_in_a_row = 0
        self._lr: float | None = None  # of the newest update
        self._began: float | None = None
        self._window = Sums()
        self._read: list[Batch] = []
        """Those of the open window."""
        self._logged = Sums()

    # One micro-batch ------------------------------------------------------------------------------
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        began = time.perf_counter()
        closes = self.course.closes(self.position)
        loss, ready = self.judge(batch)
        with contextlib.nullcontext() if closes else self._apart():
            self.manual_backward(loss.total)
        sums = {"loss": (loss.total.detach(), loss.count.detach()), **loss.parts}
        self._read.append(batch)
        for window in (self._window, self._logged):
            window.add(sums, batch)
        self.position += 1
        self.just_updated = False
        if closes:
            self.updating = True
            self._close_window()
            self.closed, self.updating = self.position, False
        self._logged.seconds += time.perf_counter() - began
        self._logged.feature_seconds += ready - began
        if closes and self.updates % self.log_every == 0 and self.just_updated:
            self._log_window()

    def judge(self, batch: Batch) -> tuple[Loss, float]:
        """The loss of a micro-batch, and the time at which the target's part in it was done."""
        with torch.no_grad():
            features = self.source.features(batch)
        ready = time.perf_counter()
        if self.sharding is not None:
            return self.sharding.loss(batch, features, self._generator()), ready
        return loss_of(self.drafter, batch, features, self._generator()), ready

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """While it lasts, `drafter` has all its weights on this process; every process must come
        here."""
        shared = self.drafter
        if self.sharding is not None:
            self.drafter = self.sharding.gathered()
        try:
            yield
        finally:
            self.drafter = shared

    def _noise_seed(self) -> int:
        name = f"{self.seed}/{self.position * world_size() + rank()}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1

    def _generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self._noise_seed())

    def _apart(self) -> contextlib.AbstractContextManager[None]:
        """Gradients stay on this process until the window closes."""
        block = getattr(self.trainer.strategy, "block_backward_sync", None)
        return block() if block is not None else contextlib.nullcontext()

    def _close_window(self) -> None:
        """Every process comes here after the same micro-batch, whatever it had to learn from."""
        total, count = self._window.values["loss"]
        seconds = self.seconds
        late = self.course.seconds is not None and seconds >= self.course.seconds
        words = torch.stack(
            [
                count.double(),
                total.double(),
                total.new_tensor(self.stop_requested),
                total.new_tensor(late),
                total.new_tensor(seconds / world_size()),
            ]
        )
        words = over_processes(words)
        tokens, loss, signals, clocks, seconds = words.tolist()
        optimiser = cast(torch.optim.Optimizer, self.optimizers())
        parameters = [p for p in self.parameters() if p.grad is not None]
        if not math.isfinite(loss):
            raise self._traced(f"the loss of update {self.updates} is {loss}")
        if tokens > 0:
            # Gradients are a mean over processes of sums over tokens.
            scale = torch.distributed.get_world_size() / tokens if _several() else 1.0 / tokens
            torch._foreach_mul_([cast(Tensor, p.grad) for p in parameters], scale)
            if (fault := self._clip(parameters)) is None:
                self._lr = self.optim.lr * self.rate(self.updates, seconds)
                for group in optimiser.param_groups:
                    group["lr"] = self._lr * group.get("factor", 1.0)
                optimiser.step()
                self.updates += 1
                self.supervised += tokens
                self.just_updated, self._spoilt_in_a_row = True, 0
            else:
                self._leave_out(fault)
        else:
            self.empty_windows += 1
        optimiser.zero_grad()
        self._window, self._read = Sums(), []
        # What has reached its end is measured there, and has nothing to go on with.
        stop = signals and not self.finished
        if stop or clocks:
            self.stopped = "signal" if stop else "time"
            self.trainer.should_stop = True

    def _clip(self, parameters: list[torch.nn.Parameter]) -> str | None:
        """Clip the gradient. Returns: why no update can be made of it, the same on every process;
        None where one can."""
        norm = self.optim.norm(parameters)
        if finite_everywhere(norm):
            self.optim.clip(parameters, norm)
            return None
        norm = self.optim.wide_norm(parameters)
        if not finite_everywhere(norm):
            return f"{SPOILT} the gradient of update {self.updates}"
        self.optim.clip(parameters, norm)
        if finite_everywhere(self.optim.norm(parameters)):
            return None
        return (
            f"the gradient of update {self.updates} is finite, but its squares, which moments are "
            "made of, exceed float32"
        )

    def _leave_out(self, fault: str) -> None:
        """No update from such a gradient; the end of the run after some in a row."""
        self.spoilt_windows += 1
        self._spoilt_in_a_row += 1
        self.report({"train/spoilt_gradients": self.spoilt_windows})
        if self._spoilt_in_a_row == MOST_SPOILT:
            raise self._traced(f"{fault}, {MOST_SPOILT} times in a row")

    def _traced(self, what: str) -> InputError:
        """The same as `spoilt`, unless the target is at fault: it reads the window's rows again."""
        rows = [row for batch in self._read for row in batch.row_ids.tolist()]
        with torch.autocast(self.device.type, enabled=False), self.original():
            cause = fault_in(self.drafter.target, self._read)
        if cause is None:
            return self.spoilt(f"{what} (rows of this process: {rows})")
        return InputError(f"{what}. {cause}; {self._kept()}")

    def original(self) -> contextlib.AbstractContextManager[None]:
        """While it lasts, the target is as it was before any training."""
        return contextlib.nullcontext()

    def spoilt(self, what: str) -> InputError:
        """The error that ends a run whose numbers are no longer finite."""
        return InputError(
            f"{what}: lower optim.lr or optim.clip_norm in a new run, or look at the rows; "
            f"{self._kept()}"
        )

    def _kept(self) -> str:
        if self.kept is None:
            return "no checkpoint was written before"
        path, updates = self.kept
        return f"the last good checkpoint is {path} of update {updates}"

    # The log --------------------------------------------------------------------------------------
    def _log_window(self) -> None:
        """Log the means over the window's supervised tokens, over all processes; evaluation never
        touches these sums."""
        logged, self._logged = self._logged, Sums()
        names = sorted(logged.values)
        words = [value.double() for name in names for value in logged.values[name]]
        words += [words[0].new_tensor(logged.tokens), words[0].new_tensor(float(logged.empty))]
        sums = over_processes(torch.stack(words)).tolist()
        metrics: dict[str, float | None] = {}
        for place, name in enumerate(names):
            total, count = sums[2 * place], sums[2 * place + 1]
            metrics[f"train/{name}"] = total / count if count else None
        metrics["train/lr"] = self._lr
        metrics["train/epoch"] = self.course.epoch(self.position)
        metrics["train/tokens_per_second"] = sums[-2] / logged.seconds if logged.seconds else None
        metrics["train/feature_share"] = (
            logged.feature_seconds / logged.seconds if logged.seconds else None
        )
        metrics["train/batches_without_labels"] = sums[-1]
        self.report(metrics)

    def report(self, metrics: Mapping[str, float | None]) -> None:
        """Give numbers to the loggers, under the number of updates, and to the progress line; None
        is left out."""
        found = {name: float(value) for name, value in metrics.items() if value is not None}
        if rank() == 0 and found:
            for logger in self.trainer.loggers:
                logger.log_metrics(found, step=self.updates)
            note = getattr(self.trainer.progress_bar_callback, "note_all", None)
            if note is not None:
                shown = ("train/loss", "val/tau", "val/tau_low", "val/tau_high")
                note({name: value for name, value in found.items() if name in shown})

    # Lightning ------------------------------------------------------------------------------------
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optim.optimiser(self.groups(), self.drafter)

    def groups(self) -> list[dict[str, Any]]:
        """What is trained, as groups of the optimiser; a group's `factor` multiplies its rate."""
        return [{"params": [p for p in self.drafter.parameters() if p.requires_grad]}]

    def on_fit_start(self) -> None:
        if self._optimiser_state is not None:
            self._take_optimiser_state(self._optimiser_state)
            self._optimiser_state = None
        # Lightning counts updates too, for its limit and for the progress line.
        self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.completed = (
            self.updates
        )

    def _take_optimiser_state(self, state: dict[str, Any]) -> None:
        """Take over moments and counts; how they are used, the decay for instance, is this run's
        own setting.

        Raises: InputError if it is not of these weights.
        """
        groups = self.trainer.optimizers[0].param_groups
        own = [
            {name: value for name, value in group.items() if name != "params"} for group in groups
        ]
        weights = [weight for group in groups for weight in group["params"]]
        for number, weight in enumerate(weights):
            for name, held in state.get("state", {}).get(number, {}).items():
                if isinstance(held, Tensor) and held.dim():
                    _refuse_rounded(f"{name} of weight {number}", held, weight)
        try:
            self.trainer.strategy.load_optimizer_state_dict({"optimizer_states": [state]})
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise InputError(
                f"the checkpoint's optimiser does not fit ({first_line(error)}): give another "
                "checkpoint"
            ) from error
        for group, mine in zip(self.trainer.optimizers[0].param_groups, own, strict=True):
            group.update(mine)
        for weight, moments in self.trainer.optimizers[0].state.items():
            odd = [
                m
                for m in moments.values()
                if isinstance(m, Tensor) and m.dim() and m.shape != weight.shape
            ]
            if odd:
                raise InputError(
                    f"the checkpoint's optimiser does not fit (moments of {tuple(odd[0].shape)} "
                    f"for weights of {tuple(weight.shape)}): give another checkpoint"
                )

    def on_train_start(self) -> None:
        self._began = time.monotonic()
        self.drafter.train()

    def on_train_end(self) -> None:
        # What follows, such as measuring the result, is no training.
        self.seconds_before, self._began = self.seconds, None

    @property
    def finished(self) -> bool:
        """Has the run reached its planned end?"""
        length = self.course.length
        return length is not None and self.position >= length

    @property
    def seconds(self) -> float:
        """Wall seconds of training so far, earlier parts of a resumed run included."""
        return self.seconds_before + (
            0.0 if self._began is None else time.monotonic() - self._began
        )

    # Checkpoints ----------------------------------------------------------------------------------
    def progress(self) -> dict[str, Any]:
        """The place in the run after its last closed window.

        An open window is started again, since nothing of it is in the weights. The position is that
        of all processes together, so that a run may go on in another number of them.
        """
        return {
            "position": self.closed * world_size(),
            "updates": self.updates,
            "empty_windows": self.empty_windows,
            "spoilt_windows": self.spoilt_windows,
            "supervised": self.supervised,
            "seconds": self.seconds,
        }

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take over weights of a checkpoint.

        Raises: InputError for those of another dtype, which were rounded, or are of another run;
            RuntimeError for others than this run's.
        """
        for name, own in self.state_dict().items():
            if name in weights:
                _refuse_rounded(name, weights[name], own)
        self.load_state_dict(weights)

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Take over a checkpoint's weights and place; the optimiser's state follows when there is
        an optimiser."""
        self.take_weights(state["weights"])
        progress = state["progress"]
        self.position = self.closed = progress["position"] // world_size()
        self.updates = progress["updates"]
        self.empty_windows, self.supervised = progress["empty_windows"], progress["supervised"]
        # Earlier versions counted none.
        self.spoilt_windows = progress.get("spoilt_windows", 0)
        self.seconds_before = progress["seconds"]
        self._optimiser_state = state["optimiser"]


def _refuse_rounded(name: str, given: Tensor, own: Tensor) -> None:
    """Raise InputError for a tensor of a checkpoint in another dtype than a run keeps it in: its
    numbers are not those that were written."""
    if given.dtype != own.dtype:
        kinds = [str(one.dtype).removeprefix("torch.") for one in (given, own)]
        raise InputError(
            f"the checkpoint has {name} in {kinds[0]}, a run keeps it in {kinds[1]}: give the "
            "checkpoint as it was written"
        )


def refuse_low_precision(drafter: Drafter) -> None:
    """Raise InputError unless what is trained is float32."""
    trained = [p.dtype for p in drafter.parameters() if p.requires_grad]
    odd = sorted({str(dtype) for dtype in trained if dtype != torch.float32})
    if odd:
        raise InputError(
            f"trainable weights are {', '.join(odd)}: train in float32, where small updates are "
            "not rounded away"
        )


def loss_of(
    drafter: Drafter, batch: Batch, features: Features, generator: torch.Generator | None
) -> Loss:
    """A drafter's loss in which every trained parameter takes part.

    Where a batch teaches a parameter nothing, its gradient is 0 and not missing, so that no process
    waits for a gradient that another one has. Loss and other gradients stay the same, bit for bit.
    """
    loss = drafter.loss(batch, features, generator=generator)
    trained = [p.sum() for p in drafter.parameters() if p.requires_grad]
    if not trained:
        return loss
    nothing = torch.stack(trained).sum().to(loss.total) * 0.0
    return Loss(loss.total + nothing, loss.count, loss.parts)


class Sums:
    """Sums over micro-batches: of losses and counts, and of what their making took."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[Tensor, Tensor]] = {}
        self.tokens = 0.0
        self.empty = 0
        """Micro-batches without a supervised token."""
        self.seconds = 0.0
        self.feature_seconds = 0.0

    def add(self, sums: Mapping[str, tuple[Tensor, Tensor]], batch: Batch) -> None:
        for name, (total, count) in sums.items():
            before = self.values.get(name)
            total, count = total.double(), count.double()
            self.values[name] = (
                (total, count) if before is None else (before[0] + total, before[1] + count)
            )
        labels = float(batch.loss_mask.sum())
        self.tokens += labels
        self.empty += labels == 0


def _several() -> bool:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return there and torch.distributed.get_world_size() > 1


def finite_everywhere(norm: Tensor) -> bool:
    """Is a gradient's norm finite on every process? All come here, and all hear the same."""
    shared: Any = norm  # With sharding, each process knows a part of it.
    complete: Tensor = shared.full_tensor() if hasattr(shared, "full_tensor") else norm
    return not over_processes((~complete.isfinite()).double()).item()


def over_processes(values: Tensor) -> Tensor:
    """The sum of a tensor over all processes; every process must come here."""
    if _several():
        values = values.clone()
        torch.distributed.all_reduce(values)
    return values
