"""Look at any directory of an engine's: which layout it is, and what that engine would make of
it."""

from __future__ import annotations

import os
from typing import Any

from drafttrain.errors import InputError
from drafttrain.layouts import engines, origin
from drafttrain.layouts.directory import Directory, open_directory
from drafttrain.layouts.engines import Engine
from drafttrain.layouts.finding import Finding
from drafttrain.layouts.inspection import Inspection, file_faults
from drafttrain.layouts.layout import Layout, known


def layout_of(head: Directory) -> Layout[Any]:
    """Raises: InputError for a directory that is no head's."""
    for layout in known():
        if layout.recognises(head):
            return layout
    raise InputError(
        f"{head.path} is no head that is known here: neither its config.json (architectures, "
        "model_type) nor the names of its tensors are those of EAGLE, Medusa, DFlash, DSpark, "
        "MTP, or a draft model"
    )


def engine_of(head: Directory, layout: Layout[Any], name: str | None) -> Engine:
    """The engine with whose eyes a directory is looked at: the one given, the one that it was
    exported for, or the most likely one.

    Raises: InputError for one that does not load such a layout.
    """
    loading = layout.engines()
    if name is None:
        made_for = origin.read_origin(head)
        found = layout.default_engine(head) if made_for is None else made_for.engine.reader
    else:
        found = engines.named(name)
    if found is not None and found in loading:
        return found
    if name is not None:
        eyes = [engine.name for engine in loading if engine.reader is engine]
        raise InputError(f"to={name}: {head.path} is loaded by {' and '.join(eyes)}, not by {name}")
    return next(iter(loading))


def check_directory(
    head: Directory, engine: str | None = None, target: Directory | None = None
) -> list[Finding]:
    """Everything found in a directory, the same fault once.

    Args:
        engine: with whose eyes; None asks `engine_of`.
        target: the target's directory, to compare with.
    Raises: InputError for a directory that is no head's, and for an engine that loads no such head.
    """
    if not head.tensors:  # Without names little can be checked.
        return file_faults(head)
    layout = layout_of(head)
    eyes = engine_of(head, layout, engine)
    inspection = Inspection(head, eyes, layout.engines()[eyes], target)
    layout.check(inspection)
    return list(dict.fromkeys(inspection.findings))


def check_path(
    path: str | os.PathLike[str], engine: str | None = None, target: str | None = None
) -> list[Finding]:
    """As `check_directory`, of a path; target: the path of the target's directory."""
    against = None if target is None else open_directory(target, "against")
    return check_directory(open_directory(path, "check"), engine, against)
