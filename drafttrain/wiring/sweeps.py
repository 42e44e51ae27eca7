"""Words that name several values, as Hydra's grammar reads them: the runs of a sweep.

`optim.lr=1e-3,2e-3`, `choice(..)`, `range(..)`, `glob(..)`, `sort(..)` and `shuffle(..)` are lists,
and every combination of theirs is a run, the last word changing first, as in Hydra's own sweeper.
`interval(..)` is a range to draw from, with `tag(log, ..)` by its logarithm, of integers with
`int(..)`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, RangeSweep
from hydra.core.override_parser.types import Sweep as Several
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf

from drafttrain import runs
from drafttrain.errors import InputError, first_line
from drafttrain.wiring.composing import group_options, invocation_of, search_path
from drafttrain.wiring.conf import conf_dir
from drafttrain.wiring.names import join

MOST = 1000
"""Values of a word, and runs of a sweep that tries all combinations."""
SECTION = "sweep"
ABOUT_THE_SWEEP = ("run_dir", "resume", "dry_run", SECTION)
"""Settings that are about a sweep as a whole: no run has its own."""


@dataclass(frozen=True)
class Interval:
    """Numbers to draw from, both ends included."""

    low: float
    high: float
    log: bool
    """Drawn by the logarithm."""
    whole: bool
    """Integers only."""


@dataclass(frozen=True)
class Axis:
    """A setting with several values."""

    key: str
    """As it is written on the command line, with Hydra's + where it was given."""
    given: str
    """The complete word."""
    words: tuple[str, ...]
    """One for each value, `key=value`; of an interval its two ends."""
    interval: Interval | None = None
    ordered: bool = False
    """Are the values a range, by their order?"""

    def word(self, value: float) -> str:
        """The word for a number of the interval."""
        return f"{self.key}={value!r}"


@dataclass(frozen=True)
class Sweep:
    """Several runs, as the words of a command name them."""

    words: tuple[str, ...]
    """Of the command, -m left out."""
    axes: tuple[Axis, ...]
    invocation: runs.Invocation
    """Of the command, its configuration that of a run with the first value of each word."""
    text: tuple[str, ...] = ()
    config_dir: str | os.PathLike[str] | None = None

    @property
    def first(self) -> tuple[str, ...]:
        """The words with the first value in the place of several."""
        return _filled(self.words, self.axes, [axis.words[0] for axis in self.axes])

    @property
    def count(self) -> int:
        """Combinations of all values."""
        return math.prod(len(axis.words) for axis in self.axes)

    def combinations(self) -> Iterator[tuple[str, ...]]:
        """A word of each axis, all combinations, as Hydra's basic sweeper orders them."""
        return itertools.product(*(axis.words for axis in self.axes))

    def samples(self) -> Iterator[tuple[str, ...]]:
        """Every combination; where they are too many, each word once, the others at their first."""
        if self.count <= MOST:
            yield from self.combinations()
            return
        for place, axis in enumerate(self.axes):
            for word in axis.words:
                chosen = [other.words[0] for other in self.axes]
                chosen[place] = word
                yield tuple(chosen)

    def run(self, chosen: Sequence[str], *more: str) -> runs.Invocation:
        """One run, composed.

        Args:
            chosen: a word of each axis.
            more: words of the run's own, such as its folder.
        Raises: InputError naming the combination, where it cannot be composed.
        """
        words = [word for word in self.words if _key_of(word) not in ABOUT_THE_SWEEP]
        words = [*_filled(words, self.axes, chosen), *more]
        found = invocation_of(
            self.invocation.door, words, text=self.text, config_dir=self.config_dir
        )
        if found.config.get(SECTION) is None:
            return found
        config = found.config.copy()  # An experiment has chosen it.
        OmegaConf.update(config, SECTION, None, merge=False)
        return dataclasses.replace(found, config=config, choices={**found.choices, SECTION: None})


def sweep_of(
    door_name: str,
    words: Sequence[str],
    *,
    text: Sequence[str] = (),
    config_dir: str | os.PathLike[str] | None = None,
    check_missing: bool = True,
) -> Sweep:
    """The sweep that the words of a command name.

    Raises: InputError for words that name nothing to sweep over, or what cannot be swept over.
    """
    axes = _axes_of(door_name, words, search_path(config_dir))
    first = list(_filled(words, axes, [axis.words[0] for axis in axes]))

    def composed(words: Sequence[str]) -> runs.Invocation:
        return invocation_of(
            door_name, words, text=text, config_dir=config_dir, check_missing=check_missing
        )

    own = list(words)
    plain = composed([word for word in first if not word.startswith(f"{SECTION}.")])
    if plain.config.get(SECTION) is None:
        first.append(f"{SECTION}=basic")
        own.append(f"{SECTION}=basic")
    found = composed(first)
    if not axes and check_missing:
        raise InputError(
            "-m makes a run for each combination of values, and no word names several: give some "
            "with commas, such as optim.lr=4e-4,8e-4, or leave -m out"
        )
    choices = found.choices
    if any(axis.key == "experiment" for axis in axes):
        choices = {**choices, "experiment": None}
    invocation = runs.Invocation(door_name, ("-m", *words), choices, found.config)
    return Sweep(tuple(own), tuple(axes), invocation, tuple(text), config_dir)


def _axes_of(door_name: str, words: Sequence[str], search: Sequence[str]) -> list[Axis]:
    keys = [_key_of(word, whole=True) for word in words]
    axes = []
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3", job_name=door_name):
        for word, key in zip(words, keys, strict=True):
            override = _several_in(word)
            if override is None:
                continue
            if _key_of(word) in ABOUT_THE_SWEEP or override.is_delete():
                raise InputError(
                    f"{word}: a sweep has one {key}: give one value; a comma that "
                    "belongs to a name needs quotes that reach this program"
                )
            if keys.count(key) > 1:
                raise InputError(f"{word}: {key} is given twice, once with several values")
            axes.append(_axis_of(override, search))
    return axes


def _several_in(word: str) -> Override | None:
    """The word, parsed, where it names several values. What cannot be parsed is left to whoever
    composes it: a path may hold any character."""
    try:
        override = OverridesParser.create().parse_override(word)
    except (OverrideParseException, HydraException, ValueError) as error:
        if "empty choice" in str(error):
            raise InputError(f"{word} names no value: give at least one") from error
        return None
    return override if override.is_sweep_override() else None


def _axis_of(override: Override, search: Sequence[str]) -> Axis:
    given, key = str(override.input_line), override.get_key_element()
    value = override._value
    tags = value.tags if isinstance(value, Several) else set()
    if tags - {"log"} or (tags and not isinstance(value, IntervalSweep)):
        raise InputError(f"{given}: the only tag is log, of an interval: leave tag(...) out")
    if isinstance(value, IntervalSweep):
        interval = _interval_of(value, given)
        made = Axis(key, given, (), interval)
        kind = int if interval.whole else float
        ends = (made.word(kind(interval.low)), made.word(kind(interval.high)))
        return dataclasses.replace(made, words=ends)
    words = tuple(_words_of(override, given, key, search))
    if not words:
        raise InputError(f"{given} names no value: {_why_empty(value)}")
    twice = [word for place, word in enumerate(words) if word in words[:place]]
    if twice:
        raise InputError(f"{given} names {twice[0]} twice: the two runs would be the same")
    return Axis(key, given, words, ordered=isinstance(value, RangeSweep))


def _words_of(override: Override, given: str, key: str, search: Sequence[str]) -> list[str]:
    """A word for each value of a list, in the same order each time, also where it is shuffled."""
    value = override._value
    if isinstance(value, Glob):
        return [f"{key}={name}" for name in value.filter(group_options(key.lstrip("+"), search))]
    if isinstance(value, RangeSweep):
        _check_range(value, given)
    state = random.getstate()
    random.seed(0)
    try:
        return [f"{key}={one}" for one in override.sweep_string_iterator()]
    except (HydraException, ValueError) as error:
        raise InputError(f"{given}: {first_line(error)}") from error
    finally:
        random.setstate(state)


def _check_range(value: RangeSweep, given: str) -> None:
    """Raise InputError for a range without an end, or of more values than anybody runs."""
    assert value.start is not None and value.stop is not None
    count = math.inf
    with contextlib.suppress(ZeroDivisionError, OverflowError):
        count = (value.stop - value.start) / value.step
    if not count <= MOST:
        raise InputError(
            f"{given}: needs a range of at most {MOST} values, with a step that is not 0"
        )


def _interval_of(value: IntervalSweep, given: str) -> Interval:
    low, high = value.start, value.end
    assert low is not None and high is not None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InputError(f"{given}: needs two finite numbers, the smaller one first")
    log = "log" in value.tags
    if log and low <= 0:
        raise InputError(f"{given}: a range by its logarithm needs numbers above 0")
    return Interval(low, high, log, isinstance(low, int) and isinstance(high, int))


def _why_empty(value: object) -> str:
    if isinstance(value, Glob):
        return f"no choice is called {join(value.include)}"
    return "a range goes from its first number to less than its second one"


def _key_of(word: str, *, whole: bool = False) -> str:
    """The setting that a word is about; its section, unless the whole of it is asked for."""
    key = word.lstrip("+~").partition("=")[0]
    return key if whole else key.partition(".")[0]


def _filled(words: Sequence[str], axes: Sequence[Axis], chosen: Sequence[str]) -> tuple[str, ...]:
    """Words with those of a run in the place of those that name several values."""
    place = {axis.given: word for axis, word in zip(axes, chosen, strict=True)}
    return tuple(place.get(word, word) for word in words)
