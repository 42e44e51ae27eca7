"""The one table of sentences that tests look for in messages: fault by fault, room by room.

A test names the fault, `match=said("data.damaged")`, and a message can be rewritten in one place.
Where a message begins with the setting at fault, tests match the setting's name and need no entry.
"""

from __future__ import annotations

DATA: dict[str, str] = {}

TARGET: dict[str, str] = {}

NN: dict[str, str] = {}

TREE: dict[str, str] = {}

DRAFTER: dict[str, str] = {}

DECODING: dict[str, str] = {}

TRAINING: dict[str, str] = {}

FITTING: dict[str, str] = {}

WIRING: dict[str, str] = {}

LAYOUTS: dict[str, str] = {}

PACKAGING: dict[str, str] = {
    "another_target": r".*belongs to another target",
}

REPORTING: dict[str, str] = {
    "foreign": r"is no metrics file of a run",
    "not_overwritten": r"would be overwritten\. Move it elsewhere",
    "full_disk": r"File too large",
    "cells": r"3 cells",
}

DOORS: dict[str, str] = {}
"""Of synthesize, capture, evaluate, generate, tune, report, export, adopt themselves."""

ROOMS = {
    "data": DATA,
    "target": TARGET,
    "nn": NN,
    "tree": TREE,
    "drafter": DRAFTER,
    "decoding": DECODING,
    "training": TRAINING,
    "fitting": FITTING,
    "wiring": WIRING,
    "layouts": LAYOUTS,
    "packaging": PACKAGING,
    "reporting": REPORTING,
    "doors": DOORS,
}


def said(fault: str) -> str:
    """The regular expression that a fault's message matches, as `room.fault`."""
    room, _, name = fault.partition(".")
    return ROOMS[room][name]
