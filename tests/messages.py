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

DECODING: dict[str, str] = {
    "context": "context holds",
    "empty_prompt": "is empty",
    "fixed_shape": "trees of fixed shape",
    "no_drafter": "needs a drafter",
    "no_q": "needs q and q_rows",
    "not_a_chain": "needs a chain",
    "not_finite": "finite",
    "nothing_left": "leaves no token to choose",
    "order_of_parents": "an earlier node",
    "other_drafts": "rule {rule} is made for .* these are {given}: use ",
    "other_growth": "is a Dynamic, Shallow can fill: Tree",
    "rule_for_chains": "judges a chain",
    "several_rows": "drawn from one distribution",
    "shape_of_argmaxes": "got argmaxes of shape",
    "shape_of_p": "got p of shape",
    "shape_of_q": "got q of shape",
    "shape_of_q_rows": "got q_rows of shape",
    "shape_of_tokens": "got tokens",
    "shape_of_u": "got uniforms of shape",
    "threshold": "needs a finite number of at least 0",
    "too_deep": "4 deep, this drafter fills 3",
    "too_wide": "4 children",
    "undrawable": "token 0 was drafted",
    "unknown_id": "outside the target's vocabulary",
}

TRAINING: dict[str, str] = {}

FITTING: dict[str, str] = {}

WIRING: dict[str, str] = {}

LAYOUTS: dict[str, str] = {}

PACKAGING: dict[str, str] = {}

REPORTING: dict[str, str] = {}

DOORS: dict[str, str] = {
    "a_target": "looks like a target",
    "drafts_nothing": "drafts nothing",
    "no_parent": "has no parent",
    "no_rows": "holds no rows",
    "no_tokenizer": "without a tokenizer",
    "no_usable_row": "no row has a known shape|none of its 1 rows",
    "not_utf8": "not UTF-8",
    "nothing_left": "nothing to evaluate",
    "nothing_to_answer": "nothing to answer",
    "prompt_empty": "prompt is empty",
    "skipped_rank": "skips a rank",
    "system_without_chat": "system has no place",
    "too_long": "context holds 512",
    "unknown_tree": "'octopus' is not known",
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
