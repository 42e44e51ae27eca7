"""What a fit refuses at once: settings that are wrong by themselves.

Only a drafter and a source of features import torch for it, and no more than that.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from drafttrain.checks import check_ids, integer, path_of, switch
from drafttrain.errors import InputError
from drafttrain.wiring.config import Config, Recipe

LARGEST_SEED = (1 << 32) - 1
LIGHT = ("trainer", "optim", "eval", "checkpoint", "final", "tree", "boost")
"""Sections whose classes need no torch to check themselves."""
OWN = ("drafter", "features")
"""Sections that are built later, when there is a target; their own settings can be checked now."""


def check_first(cfg: DictConfig) -> None:
    """Raise InputError for settings that are wrong whatever they are used with."""
    config = Config.of(cfg)
    check_light(config)
    check_own(config)


def check_light(config: Config) -> None:
    """The part of `check_first` that never imports torch."""
    check_values(config.values)
    for name in LIGHT:
        Recipe[Any](config, name)()


def check_own(config: Config) -> None:
    """The other part."""
    for name in OWN:
        Recipe[Any](config, name).check()


def check_values(values: dict[str, Any]) -> None:
    """Raise InputError for single settings that cannot be used."""
    integer("seed", values["seed"], 0, LARGEST_SEED)
    integer("draft_vocab", values["draft_vocab"])
    if values["draft_vocab"] == 1:
        raise InputError("draft_vocab=1: needs 0 for all ids, or an integer of at least 2")
    _check_listed(values)
    if values["sweep"] is not None:
        raise InputError(
            "sweep says which of several runs are made: give -m too, and words that name several "
            "values"
        )
    for name in ("export_assistant", "dry_run"):
        switch(name, values[name])
    if values["run_dir"] not in (None, ""):
        path_of("run_dir", values["run_dir"])
    if values["resume"] is not None:
        path_of("resume", values["resume"])


def _check_listed(values: dict[str, Any]) -> None:
    """Raise InputError for a list of draft ids that is none, or next to another choice of them."""
    drafter = values["drafter"]
    listed = drafter.get("draft_ids") if isinstance(drafter, dict) else None
    for name, off in (("draft_vocab", 0), ("init_from", None)):
        if listed is not None and values[name] not in (0, None):
            raise InputError(
                f"drafter.draft_ids and {name}={values[name]} each choose the ids that are "
                f"proposed: leave out the list, or set {name}={'null' if off is None else off}"
            )
    check_ids(listed)
