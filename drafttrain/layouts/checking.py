"""Look at any directory of an engine's: which layout it is, and what that engine would make of
it."""

from __future__ import annotations

import os
from types import ModuleType

from drafttrain.errors import InputError
from drafttrain.layouts import (
    dflash,
    eagle1,
    eagle3,
    language_model,
    medusa,
    mtp,
    origin,
    speculators,
)
from drafttrain.layouts.directory import Directory, open_directory
from drafttrain.layouts.finding import Finding
from drafttrain.layouts.inspection import Inspection

KINDS: tuple[ModuleType, ...] = (speculators, medusa, dflash, eagle3, eagle1, mtp, language_model)
"""The first that recognises a directory has it."""


def layout_of(head: Directory) -> ModuleType:
    """Raises: InputError for a directory that is no head's."""
    for layout in KINDS:
        if layout.recognises(head):
            return layout
    raise InputError(
        f"{head.path} is no head that is known here: neither its config.json (architectures, "
        f"model_type) nor the names of its "
        "tensors are those of EAGLE, Medusa, DFlash, DSpark, MTP, or a draft model"
    )


def engine_of(head: Directory, layout: ModuleType, engine: str | None) -> str:
    """The engine with whose eyes a directory is looked at: the one given, the one that it was
    exported for, or the likeliest.

    Raises: InputError for one that does not load such a layout.
    """
    if engine is None:
        told = origin.read_origin(head)
        found: str = layout.default_engine(head) if told is None else told.engine
        return found if found in layout.ENGINES else layout.ENGINES[0]
    if engine not in layout.ENGINES:
        raise InputError(
            f"to={engine}: {head.path} is loaded by {' and '.join(layout.ENGINES)}, not by {engine}"
        )
    return engine


def check_directory(
    head: Directory, engine: str | None = None, target: Directory | None = None
) -> list[Finding]:
    """Everything found in a directory, the same fault once.

    Args:
        engine: with whose eyes; None asks `engine_of`.
        target: the target's directory, to compare with.
    Raises: InputError for a directory that is no head's, and for an engine that loads no such head.
    """
    if not head.tensors:  # Without names little can be told.
        nothing = Inspection(head, engine or "")
        nothing.files()
        return nothing.findings
    layout = layout_of(head)
    inspection = Inspection(head, engine_of(head, layout, engine), target)
    layout.check(inspection)
    return list(dict.fromkeys(inspection.findings))


def check_path(
    path: str | os.PathLike[str], engine: str | None = None, target: str | None = None
) -> list[Finding]:
    """As `check_directory`, of a path; target: the path of the target's directory."""
    against = None if target is None else open_directory(target, "against")
    return check_directory(open_directory(path, "check"), engine, against)
