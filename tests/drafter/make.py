"""Drafters for tests: the settings given, the defaults of `conf/drafter/` for the others."""

from __future__ import annotations

from typing import Any, TypeVar

from drafttrain.drafter.base import Drafter
from drafttrain.target.model import Target
from drafttrain.wiring.defaults import with_defaults

Kind = TypeVar("Kind", bound=Drafter)

TINY: dict[str, dict[str, Any]] = {
    "EarlyExit": {"exit_layer": 0, "loss": {"forward_kl": 1.0}},
    "SelfSpec": {"skip_attention": [], "skip_mlp": []},
    "Ssm": {"layers": None, "loss": {"forward_kl": 1.0}},
}
"""Defaults that are for the embedded target's 30 layers, and their likes for tiny ones."""


def make(kind: type[Kind], target: Target, **settings: Any) -> Kind:
    """A drafter; settings that are not given are the defaults."""
    return with_defaults(kind, target, **{**TINY.get(kind.__name__, {}), **settings})
