"""Checkpoints: the weights that are trained, the optimiser's state and the place in the run.
Tensors and plain values only.

`last.ckpt` is the newest state and, once a run has ended, its true last step; `best.ckpt` is the
one with the highest decoded val/tau. Files are replaced at once, so a kill or a full disk leaves
the old ones. They are read with `weights_only`, which runs no code of the file's.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import signal
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn

from drafttrain.checks import is_count
from drafttrain.errors import InputError, writing
from drafttrain.files import write_atomic
from drafttrain.nn.spoilt import SPOILT, spoilt
from drafttrain.packaging.checking import some
from drafttrain.processes import rank
from drafttrain.training.decode_callback import DecodeCallback
from drafttrain.training.module import DraftModule
from drafttrain.training.optim import MOMENTS
from drafttrain.training.settings import CheckpointConfig

_PARTS: dict[str, tuple[str, ...]] = {
    "weights": (),
    "optimiser": (),
    "progress": ("position", "updates", "empty_windows", "supervised", "seconds"),
    "keeper": ("best", "best_update", "without_progress"),
    "decode": ("measured_at", "evaluations", "tau", "seconds"),
    "facts": ("target",),
    "settings": (),
}
"""What a checkpoint holds in addition to its format."""
FORMAT = 2
_MOST_VALUES, _DEEPEST = 1 << 17, 64
"""Of what a checkpoint holds in addition to its tensors' numbers."""
_MOST_BATCHES = 1 << 40
"""Of a run, which no number in a checkpoint exceeds."""
LAST, BEST = "last.ckpt", "best.ckpt"
NAMED = {"last": LAST, "best": BEST}
"""What `resume` may name, and the file in the run's folder."""


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Raises: OSError if it cannot be written; the earlier file is then still complete."""

    def write(scratch: Path) -> None:
        with scratch.open("wb") as file:
            noted = _Noted(file)
            torch.save({"format": FORMAT, **state}, noted)  # type: ignore[arg-type]
            if noted.failed is not None:
                raise noted.failed

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, write)


class _Noted:
    """A file for `torch.save`. What the system refuses is noted, and nothing further is written:
    through torch's own writer it would come out as another error, which does not say why."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.failed: OSError | None = None

    def write(self, data: memoryview | bytes) -> int:
        self._try(lambda: self.file.write(data))
        return len(data)

    def flush(self) -> None:
        self._try(self.file.flush)

    def _try(self, work: Callable[[], Any]) -> None:
        try:
            if self.failed is None:
                work()
        except OSError as error:
            self.failed = error


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint on the CPU. Raises InputError for a file that is missing, damaged or of
    another format."""
    try:
        _check_archive(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise InputError(f"there is no checkpoint {path}") from error
    except PermissionError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # The file may be anything, and is read by a library's own rules.
        raise InputError(
            f"{path} cannot be read as a checkpoint: it is damaged or not one of this program's"
        ) from error
    if not _is_plain(state, tensors=True):
        raise InputError(
            f"{path} cannot be read as a checkpoint: it holds other things than tensors and plain "
            "values"
        )
    form = state.get("format") if isinstance(state, dict) else None
    if type(form) is not int or form != FORMAT:
        raise InputError(f"{path}: checkpoint format {str(form)[:40]}, this version reads {FORMAT}")
    return state


def _check_archive(path: Path) -> None:
    """Raise ValueError unless what a file unfolds to is no larger than the file, since torch.save
    packs nothing, and its bytes are those that were written."""
    if path.exists() and not path.is_file():
        raise ValueError("not a file")
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
        packed = any(
            part.compress_type != zipfile.ZIP_STORED or part.file_size != part.compress_size
            for part in parts
        )
        if packed or sum(part.file_size for part in parts) > path.stat().st_size:
            raise ValueError("packed")
        if archive.testzip() is not None:
            raise ValueError("a checksum is another")


def _is_plain(value: Any, *, tensors: bool) -> bool:
    """Is it made of plain values, of moderate number and depth? A few bytes can refer to one
    another so often that looking at all of it would take for ever.

    Args:
        tensors: may there be tensors too?
    """
    waiting, left = [(value, 0)], _MOST_VALUES
    while waiting:
        one, depth = waiting.pop()
        inner: list[Any] = []
        if isinstance(one, dict):
            inner = [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            inner = list(one)
        elif isinstance(one, int):
            if one.bit_length() > 64:
                return False
        elif not (
            one is None
            or isinstance(one, str | float | bytes)
            or (tensors and isinstance(one, torch.Tensor))
        ):
            return False
        left -= len(inner)
        if left < 0 or depth > _DEEPEST:
            return False
        waiting += [(part, depth + 1) for part in inner]
    return True


def digest_of(weights: Mapping[str, torch.Tensor]) -> str:
    """What identifies weights: of their names, shapes, dtypes and bytes."""
    found = hashlib.sha256()
    for name in sorted(weights):
        weight = weights[name].detach().cpu().contiguous()
        found.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        held: Any = weight.reshape(-1).view(torch.uint8).numpy()
        found.update(held)
    return found.hexdigest()


def check_facts(state: Mapping[str, Any], path: Path) -> None:
    """Raise InputError unless a checkpoint says which run it is of."""
    _check_parts(state, path, ("facts", "settings"))


def check_complete(state: Mapping[str, Any], path: Path) -> None:
    """Raise InputError unless a checkpoint holds all that a run goes on from."""
    _check_parts(state, path, _PARTS)
    _check_counts(state, path)
    held = state["weights"]
    odd = [name for name in held if not (isinstance(name, str) and _is_numbers(held[name]))]
    if odd:
        raise InputError(
            f"{path} holds weights that are no tensors ({some(odd)}): it is damaged, give another "
            "one"
        )
    _check_optimiser(state, path)
    odd = spoilt(tensors_of(state))
    if odd:
        raise InputError(f"{path}: {SPOILT} {some(odd)}: give another one")


def _check_counts(state: Mapping[str, Any], path: Path) -> None:
    progress, keeper, decode = state["progress"], state["keeper"], state["decode"]
    at = [is_count(progress[name]) for name in ("position", "updates", "empty_windows")]
    at.append(is_count(progress.get("spoilt_windows", 0)))  # Earlier versions counted none.
    took = [_is_amount(progress[name]) for name in ("supervised", "seconds")]
    if not all((*at, *took)) or not progress["updates"] <= progress["position"] < _MOST_BATCHES:
        raise InputError(
            f"{path} says that its run was at {str(progress)[:120]}: it is damaged, give another "
            "one"
        )
    best, at_update = keeper["best"], keeper["best_update"]
    found = (best is None and at_update is None) or (
        _is_amount(best) and is_count(at_update) and at_update <= progress["updates"]
    )
    digest = keeper.get("best_digest")  # Earlier versions noted none.
    named = digest is None or isinstance(digest, str)
    if not (found and named and is_count(keeper["without_progress"])):
        raise InputError(
            f"{path} says that its best was {str(keeper)[:120]}: it is damaged, give another one"
        )
    if decode is None:
        return
    never = decode["measured_at"] is None
    counted = is_count(decode["evaluations"]) and (never or is_count(decode["measured_at"]))
    if not (
        counted
        and _is_amount(decode["seconds"])
        and (decode["tau"] is None or _is_amount(decode["tau"]))
    ):
        raise InputError(
            f"{path} says that it had measured {str(decode)[:120]}: it is damaged, give another one"
        )


def _check_optimiser(state: Mapping[str, Any], path: Path) -> None:
    """Raise InputError unless there are moments of every weight, as one update makes them."""
    optimiser, updates = state["optimiser"], state["progress"]["updates"]
    held, groups = optimiser.get("state"), optimiser.get("param_groups")
    counted = isinstance(groups, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(map(is_count, group["params"]))
        for group in groups
    )
    if not (isinstance(held, dict) and counted):
        raise InputError(
            f"{path} lacks optimiser: state, param_groups: it is damaged, give another one"
        )
    numbers = [number for group in groups for number in group["params"]] if updates else []
    lacking = [
        f"{name} of weight {number}"
        for number in numbers
        for name in MOMENTS
        if not _is_numbers(_entry(held, number, name))
    ]
    if lacking:
        raise InputError(
            f"{path} lacks moments of the optimiser ({some(lacking)}): it is damaged, give "
            "another one"
        )
    for number in numbers:
        step = held[number]["step"]
        if step.numel() != 1 or not 1 <= step.item() <= updates:
            raise InputError(
                f"{path} says that weight {number} was changed {str(step.tolist())[:40]} times in "
                f"{updates} updates: it is damaged, give another one"
            )


def _entry(held: Mapping[Any, Any], number: object, name: str) -> object:
    moments = held.get(number)
    return moments.get(name) if isinstance(moments, dict) else None


def tensors_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Weights and moments of a checkpoint, by names that people can read."""
    found = {str(name): value for name, value in state["weights"].items()}
    for number, moments in state["optimiser"]["state"].items():
        own = moments.items() if isinstance(moments, dict) else ()
        found |= {f"{name} of weight {number}": value for name, value in own}
    return {name: value for name, value in found.items() if _is_numbers(value)}


def _is_numbers(value: object) -> bool:
    """Is it a tensor whose numbers can be read and compared?"""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not (value.is_quantized or value.is_complex() or value.is_meta)
        and not (value.is_floating_point() and value.dtype.itemsize == 1)
    )


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _check_parts(state: Mapping[str, Any], path: Path, parts: Iterable[str]) -> None:
    for part in parts:
        names, found = _PARTS[part], state.get(part)
        if part == "decode" and part in state and found is None:
            continue
        lacking = [name for name in names if not isinstance(found, dict) or name not in found]
        if (
            isinstance(found, dict)
            and part not in ("weights", "optimiser")
            and not _is_plain(found, tensors=False)
        ):
            raise InputError(
                f"{path} holds {part} that are no plain values: it is damaged, give another one"
            )
        if lacking or not isinstance(found, dict):
            raise InputError(
                f"{path} lacks {part}{': ' if lacking else ''}{', '.join(lacking)}: it is damaged, "
                "give another one"
            )


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

    Best is by `decode.tau`, if it could be measured; ties keep the earlier. SIGTERM and the first
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
        self.best_update: int | None = None
        self.best_digest: str | None = None
        """Of its weights, known to the process that writes."""
        self.without_progress = 0
        """Evaluations since the best one."""
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
        self._looked_at = decode.measured_at
        if decode.tau is not None:
            if self.best is None or decode.tau > self.best:
                self.best, self.best_update, self.without_progress = decode.tau, module.updates, 0
                self._write(trainer, module, BEST)
                self._link(BEST, LAST)
                self._number(module)
                return
            self.without_progress += 1
            if (
                self.patience is not None
                and self.without_progress >= self.patience
                and module.stopped is None
            ):
                module.stopped = "patience"
                trainer.should_stop = True
        if self.config.every is None:
            self._save(trainer, module)

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
        self._link(LAST, f"update-{module.updates:08d}.ckpt")
        # By age: a run that goes on from an earlier place writes lower numbers again.
        numbered = sorted(
            self.folder.glob("update-*.ckpt"), key=lambda path: (path.stat().st_mtime_ns, path.name)
        )
        for path in numbered[: -self.config.keep]:
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
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.best_update = state_dict["best"], state_dict["best_update"]
        self.best_digest = state_dict.get("best_digest")
        self.without_progress = state_dict["without_progress"]
