"""Which of the target's states a head reads, in both numberings, and how many."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from drafttrain.layouts.directory import Directory
from drafttrain.layouts.eagle3.facts import GUESSED, KEY, Reads, captures, guessed, inner
from drafttrain.layouts.inspection import Inspection

MOST_STATES = 64


def spelt(taps: list[int]) -> dict[str, Any]:
    """The keys of a config that name taps.

    Args:
        taps: 0-based layers whose output is read, ascending; none: what the target's own head
            reads.
    """
    if not taps:
        return {"eagle_config": {"use_aux_hidden_state": False}}
    return {
        KEY: [tap + 1 for tap in taps],
        "num_aux_hidden_states": len(taps),
        "eagle_config": {"use_aux_hidden_state": True, KEY: taps},
    }


def count_of(head: Directory, config: Mapping[str, Any], width: int) -> int | None:
    """How many states fc reads, by its file; None where that cannot be.

    Args:
        width: of one state.
    """
    entry = head.tensors.get("fc.weight")
    if entry is None or len(entry.shape) != 2 or entry.shape[1] % width:
        return None
    found = entry.shape[1] // width
    return found if 0 < found < MOST_STATES else None


def check(inspection: Inspection[Reads], width: int) -> int:
    """Adds what is wrong with the states.

    Args:
        width: of one state.
    Returns: how many the head reads.
    """
    config = inspection.config
    if not captures(config):
        return 0
    states = _states(inspection, width)
    check_layers(inspection, config.get(KEY), inner(config).get(KEY), states)
    if inspection.reads.skips_square_fc and states * width == config.get("hidden_size"):
        inspection.add(
            "fc-not-run",
            f"fc reads one state of the head's width: {inspection.engine.title} passes over fc "
            "where what it is given has that width already; serve with vLLM",
        )
    return states


def check_layers(inspection: Inspection[Reads], top: Any, nested: Any, states: int) -> None:
    """Which states are captured, in both numberings.

    Args:
        top: numbers as vLLM reads them, x[i] as i; nested: as SGLang does, x[i] as i - 1; None
            where not given.
        states: how many the head's file was made for.
    """
    reads = inspection.reads
    for name, found in {"top": top, "nested": nested}.items():
        if found is not None and not (
            isinstance(found, list) and found and all(type(i) is int for i in found)
        ):
            inspection.add(
                "layers-value", f"{KEY} ({name}) is {str(found)[:60]}, needs a list of integers"
            )
            return
    if top is None and nested is None:
        inspection.add(
            "layers-missing",
            f"{KEY} is not given: engines capture x[2], x[N/2], x[N-3], whatever the head was "
            "trained on; write it at the top level and, one lower, in eagle_config",
            # Three are those that its authors' code captures.
            fatal=states != GUESSED,
        )
        return
    if top is None or nested is None:
        _in_one_place(inspection, top, nested)
    elif nested != [i - 1 for i in top]:
        inspection.add(
            "layers-conventions-disagree",
            f"{KEY} is {top} at the top level, {nested} in eagle_config: needs one lower",
        )
    given = top if top is not None else [i + 1 for i in nested]
    if any(b <= a for a, b in pairwise(given)):
        inspection.add(
            "layers-not-ascending",
            f"{given}: engines concatenate states in ascending order whatever is given here",
        )
    count = _layers_of(inspection)
    if min(given) < 0 or (count is not None and max(given) > count):
        inspection.add(
            "layers-out-of-range",
            f"{given}: the target has x[0] to x[{'N' if count is None else count}]",
        )
    elif count is not None and max(given) == count and not reads.last_state:
        inspection.add(
            "layers-not-read",
            f"{given}: {inspection.engine.title} does not capture x[{count}], the output of the "
            "last layer; serve with vLLM",
        )
    elif reads.guessed_layers and count is not None and given != guessed(count):
        inspection.add(
            "layers-not-read",
            f"{given}: {inspection.engine.title} captures {guessed(count)} whatever is given; "
            "serve with vLLM or SGLang",
        )
    if len(given) != states:
        inspection.add("layers-count", f"{len(given)} states are named, fc reads {states}")


def _in_one_place(inspection: Inspection[Reads], top: Any, nested: Any) -> None:
    read = nested if inspection.reads.nested_layers else top
    other = "at the top level, one higher" if top is None else "in eagle_config, one lower"
    inspection.add(
        "layers-one-convention",
        f"{KEY} is given in one place only: write it {other} as well, which is where "
        f"{'vLLM' if top is None else 'SGLang'} reads it",
        fatal=read is None and not inspection.reads.guessed_layers,
    )


def _layers_of(inspection: Inspection[Reads]) -> int | None:
    """N of the target, where it is known."""
    theirs = inspection.target_config
    count = theirs.get("num_hidden_layers") if theirs is not None else None
    return count if type(count) is int else None


def _states(inspection: Inspection[Reads], width: int) -> int:
    """How many states fc reads, by its file; and whether engines size it so."""
    config = inspection.config
    nested = inner(config).get(KEY)
    said = (
        config.get("num_aux_hidden_states")
        or (len(nested) if isinstance(nested, list) else None)
        or GUESSED
    )
    if inspection.reads.guessed_layers:
        said = GUESSED
    found = count_of(inspection.head, config, width)
    if found is None:
        return said if type(said) is int and 0 < said < MOST_STATES else GUESSED
    if found != said:
        need = (
            "which it cannot change; serve with vLLM or SGLang"
            if inspection.reads.guessed_layers
            else f"write num_aux_hidden_states: {found}, next to hidden_size"
        )
        inspection.add(
            "states-count",
            f"fc reads {found} states, {inspection.engine.title} makes it for {said}: {need}",
            fatal=inspection.reads.sizes_by_config,
        )
    return found
