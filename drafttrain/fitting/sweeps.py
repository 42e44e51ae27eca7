"""Which runs a sweep makes, and what it refuses at once. Nothing here needs torch.

`Basic` makes all combinations. `Optuna` chooses each run by those before it. Its choice of a run
depends on the recorded runs and the run's number only, so a sweep that was killed goes on with the
choices that it would have made.
"""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from drafttrain import runs
from drafttrain.checks import integer, shown, switch
from drafttrain.errors import InputError
from drafttrain.fitting.book import COMPLETE, FAILED, PRUNED, Row
from drafttrain.fitting.first import LARGEST_SEED, check_light, check_own
from drafttrain.processes import world_size
from drafttrain.wiring.config import Config, Recipe
from drafttrain.wiring.sweeps import Axis, Sweep

EXTRA = "pip install 'drafttrain[search]'"
PACKAGES = ("best", "all")
DIGITS = 4
"""Of a number that is drawn from a range: a folder's name says it."""
SAME = (
    *("target", "data._target_", "data.path", "eval.prompts", "eval.turns", "eval.max_new_tokens"),
    *("eval.replay", "eval.answers", "final.max_new_tokens", "final.speed_new_tokens"),
)
"""What decides which prompts are decoded, by what and how far: val/tau is compared between runs."""


class Strategy:
    """Which runs a sweep makes."""

    packages: str
    """`best` or `all`: which of them are measured at their end and packaged."""

    def check(self, sweep: Sweep) -> None:
        """Raise InputError for words that it cannot make runs of."""
        raise NotImplementedError

    def chosen(self, sweep: Sweep, rows: Sequence[Row]) -> tuple[str, ...] | None:
        """A word of each axis for the run after the recorded ones; None where there is none."""
        raise NotImplementedError

    def prunes(self, sweep: Sweep, rows: Sequence[Row], row: Row) -> bool:
        """Is a run that goes on not worth its time?

        Args:
            rows: of the runs before it.
        """
        return False


@dataclass(frozen=True, kw_only=True)
class Basic(Strategy):
    """All combinations."""

    packages: str
    """`best` or `all`: which runs are measured at their end and packaged."""
    most: int
    """Combinations, at most."""

    def __post_init__(self) -> None:
        check_packages(self.packages)
        integer("sweep.most", self.most, 1, 1000)

    def check(self, sweep: Sweep) -> None:
        for axis in sweep.axes:
            if axis.interval is not None:
                raise InputError(
                    f"{axis.given} is a range to draw from, which sweep=basic does not: give "
                    "sweep=optuna, or a list of values"
                )
        if sweep.count > self.most:
            raise InputError(
                f"the words make {sweep.count} runs, sweep.most is {self.most}: name fewer values, "
                "raise it, or give sweep=optuna"
            )

    def chosen(self, sweep: Sweep, rows: Sequence[Row]) -> tuple[str, ...] | None:
        every = list(sweep.combinations())
        return every[len(rows)] if len(rows) < len(every) else None


@dataclass(frozen=True, kw_only=True)
class Optuna(Strategy):
    """A tree-structured Parzen estimator chooses (Bergstra et al. 2011), and runs below the median
    of others at the same update are ended."""

    packages: str
    """`best` or `all`: which runs are measured at their end and packaged."""
    trials: int
    """Runs in all."""
    startup: int
    """Of these, drawn at random."""
    seed: int
    """Of the choices."""
    prune: bool
    """End runs that are not worth their time?"""
    prune_after_runs: int
    """Runs that are never pruned."""
    prune_after_updates: int
    """Updates before which no run is pruned."""

    def __post_init__(self) -> None:
        check_packages(self.packages)
        integer("sweep.trials", self.trials, 1, 1000)
        integer("sweep.startup", self.startup, 0)
        integer("sweep.seed", self.seed, 0, LARGEST_SEED - 1000)
        switch("sweep.prune", self.prune)
        integer("sweep.prune_after_runs", self.prune_after_runs, 0)
        integer("sweep.prune_after_updates", self.prune_after_updates, 0)
        if importlib.util.find_spec("optuna") is None:
            raise InputError(
                f"sweep=optuna needs optuna, which is not installed: {EXTRA}; or give sweep=basic "
                "with lists of values"
            )

    def check(self, sweep: Sweep) -> None:
        """Every word that Optuna can choose it can be given."""

    def chosen(self, sweep: Sweep, rows: Sequence[Row]) -> tuple[str, ...] | None:
        if len(rows) >= self.trials:
            return None
        space = {axis.key: _distribution(axis) for axis in sweep.axes}
        asked = self._study(sweep, rows).ask(fixed_distributions=space)
        return tuple(_word(axis, asked.params[axis.key]) for axis in sweep.axes)

    def prunes(self, sweep: Sweep, rows: Sequence[Row], row: Row) -> bool:
        if not self.prune or not row.taus:
            return False
        asked = self._study(sweep, rows).ask()
        for updates, tau in sorted(row.taus.items()):
            asked.report(tau, updates)
        return bool(asked.should_prune())

    def _study(self, sweep: Sweep, rows: Sequence[Row]) -> Any:
        """A study of the recorded runs, whose next choice depends on nothing else."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.TPESampler(
                seed=self.seed + len(rows), n_startup_trials=self.startup
            ),
            pruner=optuna.pruners.MedianPruner(
                n_startup_trials=self.prune_after_runs, n_warmup_steps=self.prune_after_updates
            ),
        )
        states = {COMPLETE: "COMPLETE", PRUNED: "PRUNED", FAILED: "FAIL"}
        space = {axis.key: _distribution(axis) for axis in sweep.axes}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for row in rows:
                chosen = zip(sweep.axes, row.words, strict=True)
                study.add_trial(
                    optuna.trial.create_trial(
                        state=optuna.trial.TrialState[states[row.status]],
                        params={axis.key: _value(axis, word) for axis, word in chosen},
                        distributions=space,
                        value=row.tau if row.status == COMPLETE else None,
                        intermediate_values=row.taus,
                    )
                )
        return study


def _distribution(axis: Axis) -> Any:
    """What Optuna draws for a setting: a number, or the place of a value in its list."""
    from optuna import distributions

    found, last = axis.interval, len(axis.words) - 1
    if found is None and axis.ordered:
        return distributions.IntDistribution(0, last)
    if found is None:
        return distributions.CategoricalDistribution(range(last + 1))
    if found.whole:
        return distributions.IntDistribution(int(found.low), int(found.high), log=found.log)
    return distributions.FloatDistribution(found.low, found.high, log=found.log)


def _word(axis: Axis, drawn: Any) -> str:
    """The word for what Optuna drew; a number with few digits, and within its range."""
    found = axis.interval
    if found is None:
        return axis.words[drawn]
    if found.whole:
        return axis.word(int(drawn))
    return axis.word(min(max(float(f"{drawn:.{DIGITS}g}"), found.low), found.high))


def _value(axis: Axis, word: str) -> Any:
    """What Optuna draws for a word."""
    if axis.interval is None:
        return axis.words.index(word)
    text = word.partition("=")[2]
    return int(text) if axis.interval.whole else float(text)


def check_packages(value: object) -> None:
    """Raise InputError for another choice of the runs that are packaged."""
    if value not in PACKAGES:
        raise InputError(f"sweep.packages={shown(value)}: give one of {', '.join(PACKAGES)}")


# --- before anything is run -----------------------------------------------------------------------


def check_sweep(sweep: Sweep) -> list[Tried]:
    """The runs that were tried; of a range its ends.

    Raises: InputError for what is wrong with a sweep, or with any of its runs, whatever is read
        later.
    """
    check_asked(sweep)
    tried: list[Tried] = []
    for chosen in sweep.samples():
        with of_run(chosen):
            invocation = sweep.run(chosen)
            one = Tried(chosen, invocation, Config.of(invocation.config))
            check_run(one.config)
            check_same(tried[0] if tried else one, one)
            tried.append(one)
    for one in tried:  # Only now may torch be imported.
        with of_run(one.chosen):
            check_own(one.config)
    return tried


@dataclass(frozen=True)
class Tried:
    """A run whose settings were looked at."""

    chosen: tuple[str, ...]
    """A word of each axis."""
    invocation: runs.Invocation
    config: Config


def check_asked(sweep: Sweep) -> None:
    """Raise InputError for what is wrong with a sweep as a whole."""
    if world_size() > 1:
        raise InputError(
            "-m makes one run after the other in one process: start it without accelerate launch "
            "or torchrun"
        )
    values = sweep.invocation.config
    if values.resume not in (None, "last"):
        raise InputError(
            f"resume={shown(values.resume)}: a sweep knows where each of its runs was, give "
            "resume=last"
        )
    if values.dry_run:
        raise InputError("dry_run=true tries one run: leave -m out, and give one value each")
    for axis in sweep.axes:
        if any(runs.hidden(word) != word for word in axis.words):
            raise InputError(f"{axis.key} is kept secret, and names of folders say it: give one")
    strategy_of(sweep).check(sweep)


def check_run(config: Config) -> None:
    """Raise InputError for a run that cannot be made, or be compared with others."""
    check_light(config)
    if config.values["eval"]["prompts"] == 0:
        raise InputError(
            "eval.prompts=0: runs are compared by val/tau, which is measured on held-out prompts"
        )
    if config.values["boost"] is not None:
        raise InputError(
            "boost fits several drafters in one run, and none of their val/tau is the run's: "
            "leave -m out"
        )


def check_same(first: Tried, other: Tried) -> None:
    """Raise InputError for two runs whose val/tau would not be of the same prompts and target."""
    found = runs.differences(first.config.values, other.config.values)
    for key, (before, after) in found.items():
        if any(f"{key}.".startswith(f"{name}.") for name in SAME):
            raise InputError(
                f"{key} is {shown(before)} in one run and {shown(after)} in another: a sweep "
                "compares val/tau, by one target on the same prompts; make a sweep for each"
            )


@contextlib.contextmanager
def of_run(chosen: Sequence[str]) -> Iterator[None]:
    """A refusal inside says which run it is about."""
    try:
        yield
    except InputError as error:
        said, run = str(error), " ".join(chosen)
        raise InputError(said if said.startswith(run) else f"{run}: {said}") from error


def strategy_of(sweep: Sweep) -> Strategy:
    """How the runs are chosen."""
    made: Strategy = Recipe[Any](Config.of(sweep.invocation.config), "sweep")()
    return made
