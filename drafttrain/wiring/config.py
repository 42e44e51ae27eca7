"""A composed configuration that nothing writes to, and recipes for what its sections build."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from omegaconf import DictConfig, OmegaConf

from drafttrain.runs import kept, masked, plain, written_of
from drafttrain.wiring.building import build, check_calls, named_by
from drafttrain.wiring.parameters import parameters_of, settings_of

T = TypeVar("T")


@dataclass(frozen=True)
class Config:
    """A run's configuration."""

    written: Mapping[str, Any]
    """Plain values; references to other settings are as they were written."""

    @classmethod
    def of(cls, cfg: DictConfig) -> Config:
        """A composed configuration, copied."""
        return cls(written_of(cfg))

    @functools.cached_property
    def values(self) -> dict[str, Any]:
        """Plain values with every reference resolved, secrets included: what a run works with."""
        return plain(self.node)

    @functools.cached_property
    def kept(self) -> dict[str, Any]:
        """Plain values as checkpoints, packages and trackers keep them; see `runs.kept`."""
        return kept(self.written)

    @functools.cached_property
    def node(self) -> DictConfig:
        """For building; it cannot be written to."""
        node: DictConfig = OmegaConf.create(dict(self.written))
        OmegaConf.set_readonly(node, True)
        return node

    @property
    def yaml(self) -> str:
        """As `config.yaml` keeps it: references as they were written, without secrets."""
        return OmegaConf.to_yaml(OmegaConf.create(masked(self.written)))

    def settled(self, changes: Mapping[str, Any]) -> Config:
        """Another configuration, with what was settled at run time.

        Args:
            changes: values by dotted key; every key exists.
        """
        written = copy.deepcopy(dict(self.written))
        for key, value in changes.items():
            *path, last = key.split(".")
            section = written
            for name in path:
                section = section[name]
            section[last] = value
        return Config(written)


@dataclass(frozen=True)
class Recipe(Generic[T]):
    """What a section of the configuration builds, once there is what it needs."""

    config: Config
    key: str
    """Of the section."""

    def __call__(self, **objects: Any) -> T:
        """Build it. Objects win over settings of the same name; see `building.build`."""
        made: T = build(self.config.node[self.key], **objects)
        return made

    @property
    def kind(self) -> Any:
        """The class or function that builds it. Raises InputError where none is named."""
        return named_by(self.config.node[self.key])

    def takes(self, name: str) -> bool:
        """Has what builds it a parameter of this name?"""
        return name in parameters_of(self.kind)

    def check(self) -> None:
        """Raise InputError for what is wrong whatever else it is built with: names that it does not
        take, and values that its `Config` refuses."""
        node = OmegaConf.create({self.key: {**self.config.written[self.key], "_partial_": True}})
        check_calls(node[self.key])
        kind = self.kind
        if fields := settings_of(kind):
            kind.Config(**{field.name: self.get(field.name) for field in fields})

    def get(self, name: str) -> Any:
        """A setting of the section; None where it has none of this name."""
        section = self.config.values[self.key]
        return section.get(name) if isinstance(section, dict) else None
