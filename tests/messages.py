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
    "another_target": r"belongs to another target",
    "ascending": r"must ascend",
    "ask_for_folder": r"package=<folder>",
    "borrowed": r"is the target's own",
    "fewer_tensors": r"layers are described",
    "foreign_code": r"without code of its own",
    "foreign_kernel": r"only what transformers itself",
    "half_character": r"half a character",
    "holds_tokens": r"holds tokens|cache|past_key_values",
    "in_use": r"runs in|other files",
    "is_file": r"is a file",
    "is_link": r"is a link",
    "joint": r"trained jointly with its target",
    "lacks": r"lacks",
    "larger": r"weights is described",
    "listed_drafters": r"needs a list of drafters",
    "looks_like_target": r"looks like a target.*target\.path",
    "missing_file": r"is missing",
    "missing_tensor": r"missing",
    "nearest": r"did you mean",
    "needs_differ": r"needs are",
    "newer": r"update drafttrain",
    "no_causal_lm": r"no causal LM|no LlamaForCausalLM",
    "no_directory": r"names no directory",
    "no_drafter": r"is not a drafter of drafttrain",
    "no_drafts_drawn": r"copies its drafts and draws none",
    "no_fingerprint": r"fingerprint lacks",
    "no_package": r"is not a package",
    "no_package_inside": r"holds no package",
    "no_parent": r"has no parent",
    "no_path": r"is not a path",
    "no_space": r"No space",
    "no_such_name": r"no folder has such a name",
    "not_a_number": r"is not a number",
    "not_exist": r"does not exist",
    "not_finite": r"NaN or infinite (?:values|weights) in",
    "nothing_said": r"of which config\.json says nothing",
    "of_another": r"not a drafttrain package",
    "of_another_form": r"is not of the form",
    "only_safetensors": r"only safetensors",
    "original": r"drafts for a tuned target, this is the original",
    "other_adapter": r"is not the adapter of this package",
    "other_shape": r"wrong shape or dtype",
    "quantised": r"quantised",
    "refers": r"refers to another place",
    "streamer": r"a streamer shows one text",
    "too_long_number": r"a number of too many digits",
    "twice": r"occurs there twice",
    "twice_path": r"given twice",
    "unexpected": r"unexpected",
    "unfit_rule": r"at temperature 0",
    "unfit_sampling": r"temperature above 0",
    "unknown_key": r"unknown key",
    "unreadable": r"cannot be read",
    "unsafe_yaml": r"could not determine a constructor",
    "version": r"this version reads",
    "written": r"cannot be written",
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
