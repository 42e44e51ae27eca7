"""Several packages side by side: where they are, what each says of itself, and whether their
measurements may be compared."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from drafttrain.checks import is_count, pasted, path_of
from drafttrain.errors import InputError
from drafttrain.packaging.checking import some
from drafttrain.packaging.manifest import (
    CONFIG,
    DECODING,
    METRICS,
    PACKAGE,
    TENSORS,
    checked_metrics,
    class_of,
    parameter_count,
    read_config,
    training_of,
)
from drafttrain.packaging.writing import size_of
from drafttrain.runs import differences
from drafttrain.target import fingerprint
from drafttrain.tree.topology import Tree, check_size

T = TypeVar("T")
R = TypeVar("R")

_OWN = ("package", "drafter_dtype")
"""Settings in which packages may differ: prompts and texts are the same with any value."""
_MOST = 1e15
"""More than any number that was measured."""


@dataclass(frozen=True)
class Entry:
    """A package and what it says of itself."""

    name: str
    """Short, and no other package's in this comparison."""
    folder: Path
    config: dict[str, Any]
    settings: dict[str, Any]
    """Under which it was measured."""
    rows: list[dict[str, Any]]
    """What was measured, checked; every key is there, None where a row lacks it."""

    @property
    def drafter(self) -> str:
        """Name of its class."""
        return str(self.config["drafter"]["_target_"]).rpartition(".")[2]

    @property
    def run_folder(self) -> Path | None:
        """The folder of the run that made it; None for a package that is elsewhere."""
        place = self.folder.resolve()
        return place.parent if place.name == PACKAGE else None

    def facts(self) -> dict[str, Any]:
        """What it costs, plain JSON values; None where that is not known."""
        seconds, tokens = training_of(self.config)
        return {
            "run": self.name,
            "drafter": self.drafter,
            "parameters": parameter_count(self.config),
            "bytes": size_of(self.folder),
            "training_seconds": seconds,
            "supervised_tokens": tokens,
            "begun_from": self._init_from(),
        }

    def _init_from(self) -> str | None:
        """The package whose weights its training started from: its cost is not in these numbers."""
        config = self.config["training"].get("config")
        given = config.get("init_from") if isinstance(config, dict) else None
        return _place(Path(given)).name if isinstance(given, str) else None


# --- finding and reading --------------------------------------------------------------------------


def find_packages(runs: Iterable[str], say: Callable[[str], None]) -> list[Path]:
    """The packages in folders of runs.

    Args:
        runs: folders of runs or packages, folders that hold several of them, or patterns such as
            `runs/fit-*`.
        say: is given the names of folders without a package, unless they were given one by one.
    Raises: InputError for what does not exist, and where there is no package at all.
    """
    found: dict[Path, Path] = {}
    for given in runs:
        for folder in _packages_of(given, say):
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def _packages_of(given: str, say: Callable[[str], None]) -> list[Path]:
    path = path_of("runs", given)
    own = _package_in(path)
    if own is not None:
        return [own]
    if path.is_dir():
        folders = sorted(
            one for one in path.iterdir() if one.is_dir() and not one.name.startswith(".")
        )
    elif glob.has_magic(given) and not path.exists():
        folders = sorted(one for one in map(Path, glob.glob(str(path))) if one.is_dir())
        if not folders:
            raise InputError(f"runs={given}: no folder has such a name")
    else:
        what = "is a file" if path.exists() else "does not exist"
        several = f", several as {pasted('runs', given.split(','))}" if "," in given else ""
        raise InputError(f"runs={given} {what}: give folders of runs or packages{several}")
    inside = {folder: _package_in(folder) for folder in folders}
    held = [package for package in inside.values() if package is not None]
    if not held:
        raise InputError(
            f"runs={given} holds no package: python -m drafttrain.fit writes one at the end of a "
            f"run, into <run>/{PACKAGE}"
        )
    without = [folder.name for folder, package in inside.items() if package is None]
    if without:
        say(f"{given}: without a package, left out: {some(without)}")
    return held


def _package_in(folder: Path) -> Path | None:
    """A run's package, or a package itself, complete or not."""
    if (folder / PACKAGE).is_dir():
        return folder / PACKAGE
    return (
        folder if any((folder / name).is_file() for name in (TENSORS, DECODING, METRICS)) else None
    )


def names_of(folders: Sequence[Path]) -> list[str]:
    """A short name for each: the last parts of its path, as many as distinguish it from others."""
    places = [_place(folder.resolve()) for folder in folders]
    names: list[str] = []
    for parts in range(1, max((len(place.parts) for place in places), default=0) + 1):
        # A name that is not UTF-8 could not be written into a report.
        names = [
            "/".join(place.parts[-parts:]).encode(errors="replace").decode() for place in places
        ]
        if len(set(names)) == len(names):
            break
    return names


def _place(folder: Path) -> Path:
    """The folder that names a package: its run's, where it is in one."""
    return folder.parent if folder.name == PACKAGE else folder


def read_entries(folders: Sequence[Path], *, measured: bool) -> list[Entry]:
    """What the packages say of themselves.

    Args:
        measured: read the measured rows, too.
    Raises: InputError naming every package that is damaged, and every one with another target than
    the first.
    """

    def read(item: tuple[str, Path]) -> Entry:
        name, folder = item
        config = read_config(folder)
        class_of(config["drafter"]["_target_"], str(folder / CONFIG))
        marks = config["target"]["fingerprint"]
        fingerprint.refuse_other(marks, marks, str(folder))  # whether it lacks a part
        entry = Entry(name, folder, config, {}, [])
        return with_rows(entry) if measured else entry

    entries = for_all(list(zip(names_of(folders), folders, strict=True)), read)
    for_all(entries, lambda entry: _refuse_other_target(entry, entries[0]))
    return entries


def with_rows(entry: Entry) -> Entry:
    """The entry with what its own run measured. Raises InputError if that cannot be read."""
    metrics = checked_metrics(entry.folder)
    rows = [_checked(row, str(entry.folder / METRICS)) for row in metrics["rows"]]
    return replace(entry, settings=metrics["settings"], rows=rows)


def for_all(items: Sequence[T], work: Callable[[T], R]) -> list[R]:
    """The work done for each item. Raises one InputError for all that cannot be worked on, once all
    have been tried."""
    done, complaints = [], []
    for item in items:
        try:
            done.append(work(item))
        except InputError as error:
            complaints.append(str(error))
    if complaints:
        raise InputError(
            f"{len(complaints)} of {len(items)} packages cannot be used: " + "; ".join(complaints)
        )
    return done


def _refuse_other_target(entry: Entry, first: Entry) -> None:
    marks, others = (one.config["target"]["fingerprint"] for one in (entry, first))
    try:
        fingerprint.refuse_other(marks, others, str(entry.folder))
    except InputError as error:
        name = str(first.config["target"]["name"])[:80]
        raise InputError(f"{error}. The first of them, {first.folder}, is for {name}") from error


# --- measured rows --------------------------------------------------------------------------------


def _checked(row: dict[str, Any], where: str) -> dict[str, Any]:
    """A row of metrics with every key that a table reads, None where it is not there. Raises
    InputError for odd values."""
    found = dict(row)
    for names, fits, wanted in _KINDS:
        for name in names:
            value = found.setdefault(name, None)
            if value is not None and not fits(value):
                raise InputError(f"{where}: {name} of a row is {str(value)[:80]!r}, needs {wanted}")
    rates = found.get("accept_at") or []
    if not isinstance(rates, list) or not all(rate is None or _is_number(rate) for rate in rates):
        raise InputError(
            f"{where}: accept_at of a row is {str(rates)[:80]!r}, needs a list of rates"
        )
    counts = found.get("accept_counts") or [None] * len(rates)
    known = isinstance(counts, list) and len(counts) == len(rates)
    if not known or not all(pair is None or _is_pair(pair) for pair in counts):
        raise InputError(
            f"{where}: accept_counts of a row is {str(counts)[:80]!r}, needs two counts for every "
            "rate"
        )
    for name, fits, wanted in _MORE:
        value = found.get(name)
        if value is not None and not fits(value):
            raise InputError(f"{where}: {name} of a row is {str(value)[:80]!r}, needs {wanted}")
    for name in ("accept_at_interval", "reach"):
        if found.get(name) is not None and len(found[name]) != len(rates):
            raise InputError(
                f"{where}: {name} of a row has {len(found[name])} entries, accept_at {len(rates)}"
            )
    return found | {"accept_at": rates, "accept_counts": counts}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MOST < value < _MOST


def _is_count(value: Any) -> bool:
    return is_count(value, _MOST)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Each entry fits, or is None, where it was not measured."""
    return lambda value: isinstance(value, list) and all(one is None or fits(one) for one in value)


def _is_stages(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_number(seconds) and seconds >= 0 for seconds in value.values()
    )


def _is_nodes(value: Any) -> bool:
    keys = {"parent", "kept", "offered"}
    if not isinstance(value, list) or not all(
        isinstance(node, dict) and node.keys() >= keys for node in value
    ):
        return False
    if not all(
        type(node["parent"]) is int and all(_is_count(node[name]) for name in ("kept", "offered"))
        for node in value
    ):
        return False
    try:
        check_size(Tree(tuple(node["parent"] for node in value)).size)
    except InputError:
        return False
    return True


def _is_kinds(value: Any) -> bool:
    """What was counted of each kind of task, each once."""
    keys = {"category", "prompts", "rounds", "tau", "tau_interval"}
    if not isinstance(value, list) or not all(
        isinstance(one, dict) and one.keys() >= keys for one in value
    ):
        return False
    names = [one["category"] for one in value]
    return (
        all(map(_is_text, names))
        and len({*names}) == len(names)
        and all(_is_count(one[name]) for one in value for name in ("prompts", "rounds"))
        and all(one["tau"] is None or _is_number(one["tau"]) for one in value)
        and all(one["tau_interval"] is None or _is_pair(one["tau_interval"]) for one in value)
    )


_KINDS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        (
            *("temperature", "top_k", "top_p", "tau", "accepted_per_round"),
            *("speedup", "tokens_per_second", "plain_tokens_per_second"),
        ),
        _is_number,
        "a number",
    ),
    (
        ("nodes", "depth", "prompts", "rounds", "same_as_plain", "remember", "repeated_prompts"),
        _is_count,
        "an integer of at least 0",
    ),
    (("tau_interval", "speedup_interval"), _is_pair, "two numbers"),
    (("growth", "tree", "rule", "guarantee", "measured", "label"), _is_text, "text"),
)
"""Entries of a row that a table reads, and what they must be if present."""
_MORE: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("accept_at_interval", _is_list_of(_is_pair), "a list of two numbers each"),
    ("reach", _is_list_of(_is_number), "a list of rates"),
    ("seconds", _is_stages, "seconds by stage"),
    ("plain_seconds", _is_stages, "seconds by stage"),
    ("tokens", _is_count, "a count"),
    ("plain_tokens", _is_count, "a count"),
    ("speed_prompts", _is_count, "a count"),
    ("tau_prompt_mean", _is_number, "a number"),
    ("tau_prompt_mean_interval", _is_pair, "two numbers"),
    ("prompts_without_rounds", _is_count, "a count"),
    ("by_category", _is_kinds, "category, prompts, rounds, tau and tau_interval of each kind"),
    ("tau_behind_best", _is_number, "a number"),
    ("tau_behind_best_interval", _is_pair, "two numbers"),
    ("rank_rates", _is_list_of(_is_list_of(_is_number)), "a list of rates for each depth"),
    ("node_counts", _is_nodes, "parent, kept and offered of each node of a tree, breadth first"),
)
"""Entries that a row of an earlier version may lack."""


def fastest_row(entry: Entry, temperature: float) -> dict[str, Any]:
    """The fastest of the ways to draft that were measured at a temperature; without measured
    speeds the one with the highest tau.

    Raises: InputError if none was measured.
    """
    rows = [row for row in entry.rows if row["nodes"] and row["temperature"] == temperature]
    if not rows:
        others = sorted(
            {
                row["temperature"]
                for row in entry.rows
                if row["nodes"] and row["temperature"] is not None
            }
        )
        there = f", only at {', '.join(f'{value:g}' for value in others)}" if others else ""
        raise InputError(
            f"{entry.folder / METRICS} has nothing measured at temperature {temperature:g}{there}: "
            "measure=true measures it"
        )
    return max(
        rows, key=lambda row: (row["speedup"] is not None, row["speedup"] or 0.0, row["tau"] or 0.0)
    )


def measured_alike(entries: Sequence[Entry], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The settings that all of them were measured with.

    Args:
        rows: of each entry the one that is shown.
    Raises: InputError saying which packages differ from the first in what.
    """
    first, *others = [_conditions(entry, row) for entry, row in zip(entries, rows, strict=True)]
    complaints = []
    for entry, found in zip(entries[1:], others, strict=True):
        odd = [
            f"{name} ({_said(theirs)}, there {_said(ours)})"
            for name, (ours, theirs) in differences(first, found).items()
        ]
        if odd:
            complaints.append(f"{entry.name} differs from {entries[0].name} in {', '.join(odd)}")
    if complaints:
        raise InputError(
            f"not measured alike: {'; '.join(complaints)}. In one table they would look equal: "
            "give measure=true, which measures all of them again on the same prompts, or leave "
            "some out of runs="
        )
    return first


def _conditions(entry: Entry, row: dict[str, Any]) -> dict[str, Any]:
    settings = entry.settings
    found = {
        name: value
        for name, value in settings.items()
        if name not in _OWN and isinstance(value, str | int | float | bool)
    }
    config = entry.config["training"].get("config")
    data = config.get("data") if isinstance(config, dict) else None
    path = data.get("path") if isinstance(data, dict) else None
    # Where the prompts themselves are not known, the set that they came from is the best there is.
    source = f"not recorded, of {Path(path).name}" if isinstance(path, str) else None
    return found | {
        "prompts_digest": settings.get("prompts_digest", source),
        "target_dtype": settings.get(
            "target_dtype", entry.config["target"]["fingerprint"].get("dtype")
        ),
        "temperature": row["temperature"],
        "top_k": row["top_k"],
        "top_p": row["top_p"],
        "measured_for": row["measured"],
        "prompts_of_row": row["prompts"],
    }


def _said(value: Any) -> str:
    return "not recorded" if value is None else str(value)[:80]
