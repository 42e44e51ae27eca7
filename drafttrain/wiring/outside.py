"""Settings that are written out wherever they matter, so that none may come from the environment or
be a secret."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig

from drafttrain import masking, runs
from drafttrain.errors import InputError


def check_template(config: DictConfig) -> None:
    """Raise InputError for an argument of the chat template that names a variable of the
    environment, or is a secret by its name: every prompt would hold it, and the fingerprint of the
    target, which is part of sets, stores, checkpoints and packages."""
    target = runs.read_inside(runs.written_of(config)).get("target")
    given = target.get("template") if isinstance(target, Mapping) else None
    for name, value in _leaves(given, "target.template"):
        written = "it is a part of every prompt, and written into sets, checkpoints and packages"
        if masking.reads_environment(str(value)):
            raise InputError(
                f"{name}={value}: reads the environment, though {written}: give the value itself, "
                "if others may read it"
            )
        if any(map(masking.looks_secret, name.split(".")[2:])):
            raise InputError(
                f"{name} is a secret by its name, though {written}: give no secret to the template"
            )


def _leaves(values: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(values, Mapping):
        for key, held in values.items():
            yield from _leaves(held, f"{name}.{key}")
    elif isinstance(values, list):
        for held in values:
            yield from _leaves(held, name)
    elif values is not None:
        yield name, values
