"""What a layout's file holds: how it is recognised, checked, written and read, and by whom.

A file of this folder (or a folder, where it is long) with a `Layout` named LAYOUT in it is found
by being here. It says what it was read from. An engine decides by names and numbers in these files,
and most of what is wrong there goes unnoticed until hardly a draft is accepted; so everything
written is read again and checked as if it came from elsewhere.

A layout in which nothing is written yet has `check` only. When a drafter comes that it holds, its
file gets `drafters`, `write` and `read`, and no other file changes.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from drafttrain import layouts
from drafttrain.drafter.base import Drafter
from drafttrain.layouts import engines
from drafttrain.layouts.directory import Directory
from drafttrain.layouts.engines import Engine, Reading
from drafttrain.layouts.inspection import Inspection
from drafttrain.layouts.writing import Exported, Source
from drafttrain.target.model import Target

R = TypeVar("R", bound=Reading)
Write = Callable[[Source[R]], Exported]
Read = Callable[[Directory, Target, dict[str, Any]], Drafter]


@dataclass(frozen=True, eq=False, kw_only=True)
class Layout(Generic[R]):
    name: str
    """Of its file."""
    what: str
    """Such directories in a sentence, in the plural."""
    turn: int
    """Layouts are asked in ascending order; the first that recognises a directory has it."""
    readings: Mapping[Engine, R]
    """Of the engines that load it; the first is the one that is meant where nothing says it."""
    recognises: Callable[[Directory], bool]
    check: Callable[[Inspection[R]], None]
    """Adds what is wrong to the inspection."""
    default_engine: Callable[[Directory], Engine | None] = lambda head: None
    """The engine that a directory was most likely made for, where it shows."""
    drafters: tuple[type[Drafter], ...] = ()
    """Those that it holds: what `write` takes and `read` gives."""
    write: Write[R] | None = None
    read: Read | None = None
    """(directory, target, settings of the drafter that an export of drafttrain's names)."""
    judge: Callable[[Directory], None] = lambda head: None
    """Raises InputError for what `read` would refuse anyway, before the target is there."""
    drafter_of: Callable[[Directory], type[Drafter]] | None = None
    """Which of several drafters a directory holds."""
    shape: Callable[[Drafter, Directory], Mapping[str, Any]] = lambda drafter, head: {}
    """Settings with which `fit` builds the drafter that was read of a directory."""
    speculators: tuple[str, ...] = ()
    """Types of directories of the library speculators that `read` takes as well."""

    def engines(self, kind: type[Drafter] | None = None) -> dict[Engine, R]:
        """Readings of all engines that load it.

        Args:
            kind: the drafter in it; None asks for any.
        """
        found = dict(self.readings)
        by_name = {engine.name: reads for engine, reads in found.items()}
        for engine in engines.KNOWN:
            if like := engine.loads.get(self.name):
                found[engine] = dataclasses.replace(by_name[like.engine], **like.changes)
        return {
            engine: reads
            for engine, reads in found.items()
            if kind is None or reads.drafters is None or kind in reads.drafters
        }

    def drafter(self, head: Directory) -> type[Drafter]:
        return self.drafters[0] if self.drafter_of is None else self.drafter_of(head)


def settings_of(*names: str) -> Callable[[Drafter, Directory], dict[str, Any]]:
    """Those settings of a drafter that have these names, for `Layout.shape`."""
    return lambda drafter, head: {
        name: value for name, value in drafter.settings().items() if name in names
    }


def known() -> tuple[Layout[Any], ...]:
    """All layouts of this folder, in the order in which they are asked."""
    modules = (
        importlib.import_module(f"{layouts.__name__}.{found.name}")
        for found in pkgutil.iter_modules(layouts.__path__)
    )
    found = [module.LAYOUT for module in modules if isinstance(vars(module).get("LAYOUT"), Layout)]
    return tuple(sorted(found, key=lambda layout: layout.turn))
