"""What the rotary settings of a config come to: the table that its family makes of them.

Two configs may spell one table in many ways: defaults given or left out, a factor of 1, a limit
that only another kind of scaling reads.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

NAME = "rotary_table"
"""Its name among the settings of a config."""
_USED = "rotary_settings_used"
"""Settings that the family's code reads besides, for instance to scale attention."""
_SPELT = (
    *("rope_theta", "rope_type", "partial_rotary_factor", "factor", "attention_factor"),
    *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("truncate", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
)
"""Settings that a table is made of."""
_READ = (
    "factor",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
)
_TOP = ("max_position_embeddings", "original_max_position_embeddings", "partial_rotary_factor")
_CLOSE = 1e-5
"""Relative difference of frequencies that another version or machine may compute."""


def settings_of(config: Any, model: Any, code: str) -> dict[str, Any]:
    """{name: value} to record next to the settings; empty where no table can be computed.

    Args:
        model: of that config.
        code: the source of its family.
    """
    made: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # A family's own code.
        made = dict(_tables(copy.deepcopy(config), _default(model)))
    if not made:
        return {}
    used = {
        f"{kind}.{name}": one[name]
        for kind, one in _kinds(config)
        for name in _READ
        if one.get(name) is not None and re.search(rf"[\"']{name}[\"']", code)
    }
    return {NAME: made} | ({_USED: used} if used else {})


def without(settings: Mapping[str, Any], *, table: bool) -> dict[str, Any]:
    """Settings without the table and what was recorded with it, or without what it is made of."""
    if not table:
        return {k: v for k, v in settings.items() if k not in (NAME, _USED)}
    found = {k: v for k, v in settings.items() if k not in (NAME, *_TOP)}
    if isinstance(rotary := found.pop("rope_parameters", None), Mapping):
        kept = {k: _rest(v) if isinstance(v, Mapping) else v for k, v in _rest(rotary).items()}
        found["rope_parameters"] = {k: v for k, v in kept.items() if v != {}}
    return found


def same(there: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Are the tables of two configs one?"""
    before, after = there.get(NAME), here.get(NAME)
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return False
    if len({*map(str, before.values())}) == 1 == len({*map(str, after.values())}):
        # One for all kinds of layers, said once or by kind.
        before, after = ({"": next(iter(one.values()))} for one in (before, after))
    return before.keys() == after.keys() and all(_near(before[k], after[k]) for k in before)


def _rest(rotary: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in rotary.items() if k not in _SPELT}


def _near(there: Any, here: Any) -> bool:
    if not isinstance(there, list) or not isinstance(here, list) or len(there) != len(here):
        return False
    numbers = all(isinstance(one, (int, float)) for one in (*there, *here))
    return numbers and all(
        abs(a - b) <= _CLOSE * max(abs(a), abs(b)) for a, b in zip(there, here, strict=True)
    )


def _kinds(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(kind of layer, its settings); the kind is "" where all have the same."""
    rotary = config.rope_parameters
    kinds = config.nested_rope_parameter_keys(rotary)
    for kind in kinds or [""]:
        found = rotary[kind] if kind else rotary
        if found is not None:
            yield kind, found


def _default(model: Any) -> Callable[..., Any] | None:
    """How a family computes the table without scaling."""
    for module in model.modules():
        if (found := getattr(type(module), "compute_default_rope_parameters", None)) is not None:
            return found  # type: ignore[no-any-return]
    return None


def _tables(config: Any, default: Callable[..., Any] | None) -> Iterator[tuple[str, list[float]]]:
    """(kind of layer, its numbers): the factor of attention and the frequencies; for tables that
    depend on the text's length also those of longer texts, and from where on they are others."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for kind, settings in _kinds(config):
        words = {"layer_type": kind} if kind else {}
        name = settings["rope_type"]
        make = default if name == "default" else ROPE_INIT_FUNCTIONS[name]
        assert make is not None

        def numbers(length: int | None, make: Any = make, words: Any = words) -> list[float]:
            table, factor = make(config, device="cpu", seq_len=length, **words)
            return [float(f"{one:.8g}") for one in (float(factor), *table.tolist())]

        found = numbers(None)
        end = 0
        if name == "longrope":
            end = int(settings["original_max_position_embeddings"])
        elif name == "dynamic":
            end = int(config.max_position_embeddings)
        longer = [numbers(2 * end), numbers(4 * end)] if end else []
        if any(one != found for one in longer):
            found = [*found, end, *longer[0], *longer[1]]
        yield kind, found
