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

TRAINING: dict[str, str] = {
    "no_language_model": "no language model that could match a text by itself",
    "reads_text_only": "this drafter's loss reads only the text",
    "cannot_be_marked": "1 rows cannot be marked by models fitted without them",
    "another_run": r"not be the same run \(accumulate x processes was 1, is 2\)",
    "damaged_archive": "cannot be read as a checkpoint: it is damaged",
    "unreadable": "cannot be read",
    "no_checkpoint": "there is no checkpoint",
    "other_format": "checkpoint format",
    "not_plain": "other things than tensors and plain values",
    "odd_progress": "says that its run was at",
    "odd_best": "says that its best was",
    "odd_measurement": "says that it had measured",
    "other_moments": r"moments of \(3,\) for weights of",
    "other_optimiser": "optimiser does not fit .*param_groups",
    "no_heads": "Eagle1 has none: give drafter=medusa",
    "needs_peft": r"drafttrain\[medusa2\]",
    "needs_optuna": r"pip install 'drafttrain\[search\]'; or set search=null",
    "endless": "nothing ends the run",
    "longest_row": "trainer.batch_tokens=.* is less than the longest row",
    "low_precision": "trainable weights are .*: train in float32",
    "not_finite": "the loss of update 2 is nan",
    "rows_not_finite": "of rows {rows} are not finite",
    "not_joined": "does not learn from joined rows",
    "other_target": "data.path=here belongs to another target",
    "too_long": "data.path=here has rows of up to .* tokens",
    "one_process": "trainer.strategy=fsdp shares the drafter out over processes, and there is one",
    "fsdp_with_boost": "with boost=collective one process fits several drafters",
    "fsdp_with_joint": "with joint=lora the adapter's weights are a part of the target's",
    "pack_with_joint": "joint=lora reads its rows one by one",
    "pack_with_boost": "boost=collective reads its rows one by one",
    "no_room": r"no training prompt leaves room.*search\.max_new_tokens",
    "nothing_left_out": "search chooses what drafter=selfspec leaves out, the drafter is Eagle1",
}

FITTING: dict[str, str] = {"several_processes": "start it without accelerate launch"}

WIRING: dict[str, str] = {
    "integer": "needs an integer",
    "number": "needs a finite number",
    "switch": "needs true or false",
    "path": "needs a path",
    "quotes": "needs a path; one that looks like a number needs quotes",
    "no_path": "can be no path",
    "not_utf8": "is not UTF-8",
    "no_setting": "there is no setting",
    "unknown_key": "has no setting",
    "lacking": "also needs",
    "no_import": "cannot be imported",
    "no_target": "names no _target_",
    "no_folder": "is not a directory",
    "silent_rank": "did rank 0 stop",
    "never_came": "rank 1 was waited for 0 s before the first update, and never came; this process",
    "uncompleted": "a file could not be written completely",
}

LAYOUTS: dict[str, str] = {}

PACKAGING: dict[str, str] = {}

REPORTING: dict[str, str] = {}

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
