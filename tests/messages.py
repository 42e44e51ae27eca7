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

LAYOUTS: dict[str, str] = {
    "engine-failed": "(?s)exit code 1.*no such head",
    "engine-silent": "within 1 s",
    "no-environment": r"environment for vllm in .*setup\.sh",
    "place-taken": "exists: give a new",
    "no-folder": "does not exist",
    "no-engine": "is not exported",
    "another-target": "belongs to another target",
    "block-not-run": "runs.*custom_generate",
    "not-finite": "NaN or infinite values",
    "not-taken-over": "are taken over",
    "no-head": "is no head that is known here",
    "heads-missing": "2 of 3 heads",
    "ids-twice": "each of its ids once",
    "two-vocabularies": "384 .* 320: engines know one vocabulary size",
    "ids-ascend": "ascend within",
}

PACKAGING: dict[str, str] = {}

REPORTING: dict[str, str] = {}

DOORS: dict[str, str] = {
    "adopt-another-class": "the directory holds Eagle1|is not a drafter of drafttrain",
    "export-tuned-target": "trained jointly with its target",
    "damage-unreadable": "cannot be read",
    "damage-key-twice": "twice",
    "damage-no-number": "is not a number",
    "damage-no-mapping": "needs a mapping",
    "damage-too-large": "bytes: not an engine's config",
    "damage-draft-ids": "draft_ids needs a list",
}
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
