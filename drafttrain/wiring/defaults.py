"""A drafter's default settings: they are in `conf/drafter/` only."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from omegaconf import OmegaConf

from drafttrain.errors import InputError
from drafttrain.wiring.conf import conf_dir

Made = TypeVar("Made")


def default_settings(kind: Any) -> dict[str, Any]:
    """Every setting of a class of drafters, as `conf/drafter/` has it; None for those that are made
    during a run, such as `draft_ids`.

    Raises: InputError for a class that no file in `conf/drafter/` names.
    """
    name = f"{kind.__module__}.{kind.__qualname__}"
    for path in sorted((conf_dir() / "drafter").glob("*.yaml")):
        found: Any = OmegaConf.to_container(OmegaConf.load(path))
        if found.pop("_target_", None) == name:
            fields = [field.name for field in dataclasses.fields(kind.Config)]
            return {field: found.get(field) for field in fields}
    raise InputError(f"no file in conf/drafter/ names {name}: give all of its settings")


def with_defaults(kind: type[Made], target: Any, **settings: Any) -> Made:
    """A new drafter with the settings given and the defaults for the others."""
    made: Any = kind
    return made(target, **{**default_settings(kind), **settings})
