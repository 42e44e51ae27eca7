"""What synthesize is asked for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from omegaconf import DictConfig

from drafttrain.checks import integer, path_of, switch
from drafttrain.errors import InputError
from drafttrain.wiring.building import build


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the door is given, apart from target, prompts and writing."""

    out: str
    """Empty only where prompts are previewed."""
    rows: int | None
    held_out: int
    slots: int
    preview: int
    strict: bool
    resume: bool
    adopt: bool
    keep_journal: bool

    def __post_init__(self) -> None:
        for key, least in (("rows", 1), ("held_out", 0), ("slots", 1), ("preview", 0)):
            null = "every row there is" if key == "rows" else ""
            integer(key, getattr(self, key), least, null=null)
        for key in ("strict", "resume", "adopt", "keep_journal"):
            switch(key, getattr(self, key))
        if self.out is None and self.preview:
            object.__setattr__(self, "out", "")
        elif not str(self.out or "").strip():
            raise InputError("needs out=<folder of the set>")
        else:
            path_of("out", self.out)


def check_first(cfg: DictConfig) -> None:
    """Raise InputError for settings that are wrong by themselves, those of the writing too."""
    check_settings(cfg)
    build(cfg.writing)


def check_settings(cfg: DictConfig) -> Settings:
    return Settings(**{field.name: cfg[field.name] for field in dataclasses.fields(Settings)})
