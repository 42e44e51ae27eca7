"""Loggers for a run, as Lightning takes them: `Trainer(logger=build(cfg.logger, run_dir=folder))`.

Every choice but `none` keeps `metrics.csv` in the run's folder, which reports read; wandb and
tensorboard are in addition to it. A missing package or account is found when the loggers are built,
before long work.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import math
import os
import re
import secrets
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from drafttrain.checks import shown
from drafttrain.errors import InputError, writing
from drafttrain.files import write_atomic
from drafttrain.processes import rank
from drafttrain.runs import hidden

PathLike = str | os.PathLike[str]


class CsvLogger(Logger):
    """`metrics.csv`: one row per step, a column per metric, written at once so that a killed run
    keeps its rows.

    A folder that already has the file is continued: rows after the first step logged now are
    dropped (a resumed run computes them again), earlier ones stay, and the row of that step is
    added to.

    Raises: InputError for a file that no run wrote: it would be overwritten.
    """

    def __init__(self, run_dir: PathLike) -> None:
        super().__init__()
        self.path = Path(run_dir) / "metrics.csv"
        self._columns: list[str] | None = None
        self._row: dict[str, Any] = {}
        self._place = 0
        try:
            _rows(self.path)
        except InputError as error:
            raise InputError(
                f"{error}: it would be overwritten. Move it elsewhere and a new one is made, or go "
                "on without one (logger=none)"
            ) from error

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing: the run's folder holds its configuration already."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        row: dict[str, Any] = {"step": 0 if step is None else step}
        row.update({name: float(value) for name, value in metrics.items() if name != "step"})
        if self._columns is None:
            self._columns = self._take_over(row["step"])
        elif not self.path.exists():  # Somebody removed it, or its folder, while the run goes on.
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write([])
            self._row = {}
        if self._row.get("step") == row["step"]:
            row = {**self._row, **row}
        new = sorted(name for name in row if name not in self._columns)
        if new:
            self._columns += new
            self._write([old for old in _rows(self.path) if int(old["step"]) != row["step"]])
        if new or row["step"] != self._row.get("step"):
            self._place = self.path.stat().st_size  # where this step's row starts
        with writing(self.path), self.path.open("r+", newline="", encoding="utf-8") as file:
            file.seek(self._place)
            file.truncate()
            csv.DictWriter(file, self._columns).writerow(row)
        self._row = row

    def _take_over(self, step: int) -> list[str]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = _rows(self.path)
        self._columns = list(rows[0]) if rows else ["step"]
        self._write([row for row in rows if int(row["step"] or 0) < step])
        self._place = self.path.stat().st_size
        for row in rows:
            if int(row["step"] or 0) == step:
                self._row = {
                    **{name: value for name, value in row.items() if value != ""},
                    "step": step,
                }
        return self._columns

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = self._columns
        assert columns is not None

        def write(scratch: Path) -> None:
            with scratch.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, columns)
                writer.writeheader()
                writer.writerows(rows)

        write_atomic(self.path, write)


def _rows(path: Path) -> list[dict[str, str]]:
    """Complete rows of a metrics file; a last row cut short by a kill or a full disk is left out.

    Raises: InputError for a file that no run wrote.
    """
    if not path.exists():
        return []
    try:
        *lines, rest = path.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise _foreign(path, f"byte {error.start + 1} is no text") from error
    if not lines and not rest:
        return []
    reader = csv.reader(lines)
    try:
        header = next(reader, [])
        if "step" not in header or len(set(header)) < len(header):
            raise _foreign(path, "its first line does not name columns, including step")
        rows = []
        for values in reader:
            row = dict(zip(header, values, strict=False))
            if values and not (len(values) == len(header) and _is_row(row)):
                raise _foreign(
                    path,
                    f"line {reader.line_num} has not one number, or nothing, for each of "
                    f"{len(header)} columns",
                )
            rows += [row] if values else []
    except csv.Error as error:
        raise _foreign(path, f"line {reader.line_num}: {error}") from error
    if not _CUT.fullmatch(rest) or rest.count(",") >= len(header):
        raise _foreign(path, "its last line is no row cut short")
    return rows


_CUT = re.compile(r"[-+.,0-9einfa]*\r?")
"""A row whose end is missing."""
_STEP = re.compile(r"[0-9]{1,18}")


def _is_row(row: Mapping[str, str]) -> bool:
    try:
        _ = [float(value) for value in row.values() if value]
    except ValueError:
        return False
    return _STEP.fullmatch(row["step"]) is not None


def _foreign(path: Path, why: str) -> InputError:
    return InputError(f"{path} is no metrics file of a run ({why})")


def read_metrics(path: PathLike) -> list[dict[str, float]]:
    """The rows of a `metrics.csv`, each with the metrics it has. Raises InputError for a file that
    no run wrote."""
    return [
        {name: float(value) for name, value in row.items() if value != ""}
        for row in _rows(Path(path))
    ]


def csv_loggers(run_dir: PathLike) -> list[Logger]:
    return [CsvLogger(run_dir)]


def no_loggers(run_dir: PathLike) -> list[Logger]:
    return []


def tensorboard_loggers(run_dir: PathLike) -> list[Logger]:
    if importlib.util.find_spec("tensorboard") is None:
        raise InputError(
            "logger=tensorboard needs the package tensorboard: pip install "
            "'drafttrain[tensorboard]', or logger=csv"
        )
    board = TensorBoardLogger(
        save_dir=str(run_dir), name="tensorboard", version="", default_hp_metric=False
    )
    return [CsvLogger(run_dir), board]


def wandb_loggers(
    run_dir: PathLike,
    *,
    project: str,
    mode: str,
    name: str | None = None,
    entity: str | None = None,
    group: str | None = None,
    tags: Sequence[str] = (),
) -> list[Logger]:
    """A run of Weights & Biases in addition to the CSV. It is opened here (rank 0), so that a
    missing account is found at once.

    Its id is kept in `<run_dir>/wandb_id.txt`: a resumed run goes on in the same place.

    Args:
        mode: `online`, `offline` (no account or network; `wandb sync` sends it later) or
            `disabled`.
    Raises: InputError: package missing, unknown mode, no account, or no connection.
    """
    modes = ("online", "offline", "disabled")
    if mode not in modes:
        raise InputError(f"logger.mode={mode}: needs one of {', '.join(modes)}")
    texts = {"project": project, "name": name, "entity": entity, "group": group}
    for key, value in texts.items():
        if not (isinstance(value, str) and value) and (value is not None or key == "project"):
            raise InputError(f"logger.{key}={shown(value)}: needs text")
    if not isinstance(tags, list | tuple) or not all(isinstance(tag, str) for tag in tags):
        raise InputError(f"logger.tags={shown(tags)}: needs a list of words, [] for none")
    if importlib.util.find_spec("wandb") is None:
        raise InputError(
            "logger=wandb needs the package wandb: pip install 'drafttrain[wandb]', or logger=csv"
        )
    folder = Path(run_dir)
    return [
        CsvLogger(folder),
        _open_wandb(folder, project, mode, name or folder.name, entity, group, list(tags)),
    ]


def _open_wandb(
    folder: Path,
    project: str,
    mode: str,
    name: str,
    entity: str | None,
    group: str | None,
    tags: list[str],
) -> WandbLogger:
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    id_file = folder / "wandb_id.txt"
    if rank() == 0 and not id_file.exists():
        with writing(id_file):
            id_file.write_text(secrets.token_hex(4) + "\n")
    logger = WandbLogger(
        name=name,
        save_dir=str(folder),
        version=id_file.read_text().strip() if id_file.exists() else None,
        project=project,
        entity=entity,
        group=group,
        tags=tags,
        mode=mode,
        settings=wandb.Settings(console="off", silent=True),
    )
    try:
        with _words_without_secrets():
            _ = logger.experiment
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"wandb could not open a run ({first}): log in with `wandb login`, or use "
            "logger.mode=offline, or logger=csv"
        ) from error
    return logger


@contextlib.contextmanager
def _words_without_secrets() -> Iterator[None]:
    """While it lasts, what was started names no secrets: wandb sends the words of the command."""
    words = sys.argv
    sys.argv = [hidden(word) for word in words]
    try:
        yield
    finally:
        sys.argv = words


@rank_zero_only
def log_config(loggers: Sequence[Logger], config: Mapping[str, Any]) -> None:
    """Pass the run's configuration (plain dicts without secrets) to the loggers that show one."""
    for logger in loggers:
        logger.log_hyperparams(dict(config))


@rank_zero_only
def log_picture(
    loggers: Sequence[Logger], key: str, path: PathLike, step: int | None = None
) -> None:
    """Show a PNG (the acceptance curve) in the loggers that can."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.log_image(key, [str(path)], step=step)
        elif isinstance(logger, TensorBoardLogger):
            from matplotlib.image import imread

            logger.experiment.add_image(
                key, imread(str(path))[..., :3], global_step=step or 0, dataformats="HWC"
            )


@rank_zero_only
def log_rows(
    loggers: Sequence[Logger],
    rows: Sequence[Mapping[str, Any]],
    prefix: str,
    step: int | None = None,
) -> None:
    """Log the numbers of measured rows as `<prefix>/<label>/<name>`; None, which was not measured,
    is left out."""
    from drafttrain.reporting.figures import row_label

    numbers: dict[str, float] = {}
    for row in rows:
        label = row_label(row).replace(" ", "_")
        for name, value in row.items():
            if (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and math.isfinite(value)
            ):
                numbers[f"{prefix}/{label}/{name}"] = float(value)
    for logger in loggers:
        logger.log_metrics(numbers, step)


@rank_zero_only
def close(loggers: Sequence[Logger]) -> None:
    """Finish open loggers, so that a later run in the same process starts its own."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()
        else:
            logger.finalize("success")
