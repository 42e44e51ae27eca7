"""The one table of sentences that tests look for in messages: fault by fault, room by room.

A test names the fault, `match=said("data.damaged")`, and a message can be rewritten in one place.
Where a message begins with the setting at fault, tests match the setting's name and need no entry.
"""

from __future__ import annotations

DATA: dict[str, str] = {}

TARGET: dict[str, str] = {
    "headless": r"without a causal head",
    "layers_beyond_files": r"describes 1000000000 layers, its files hold \d+ tensors",
    "no_folder": r"target\.path=.* does not exist",
    "no_such_layer": r"layer 2 asked for; .* layers 0\.\.1",
    "not_loaded": r"target .* cannot be loaded",
    "tokenizer": r"its tokenizer cannot be read",
    "tuned_already": r"is tuned already",
}

NN: dict[str, str] = {
    "cache_full": r"cache holds 2 entries",
    "generators": r"2 generators given for 3 rows",
    "layer_below": r"layer 0 asked for",
    "no_distribution": r"not all 0",
    "no_input_norm": r"target old \(gpt2\): .* no norm before attention",
    "no_inputs": r"target old \(gpt2\): .* looked for as q_proj",
    "no_teacher": r"needs the target's hidden states and head",
    "no_rotary": r"target old \(gpt2\): .* no rotary positions",
    "no_weight": r"all weights of the loss are 0",
    "not_left_out": r"parts of its layers cannot be left out",
    "not_one_by_one": r"target old \(gpt2\): .* cannot be run one by one .*; give a Llama",
    "rows_mixed": r"trainer\.pack: target tiny-llama \(llama\) .*\(features differ by",
    "too_many_children": r"at most 4 children",
    "uninitialised": r"no initial value for mlp\.",
}

TREE = {"draws_none": r"takes the most likely tokens and draws none"}

DRAFTER = {
    "adapter_held": r"holds an adapter",
    "config_of_no_model": r"config describes no causal LM",
    "deeper_than_counted": r"5 deep, this drafter fills 4",
    "draws_none": r"copies its drafts and draws none",
    "ensemble_not_trained": r"not trained as one",
    "foreign_kernel": r"only what transformers itself brings is run",
    "forest_for_one": r"is a Forest, Ssm can fill",
    "member_inside": r"member 2 is SelfSpec, a part of the target",
    "member_of_another_target": r"member 1 drafts for another target",
    "member_other_tree": r"member 2 is a Dynamic, NGram",
    "member_too_deep": r"member 3 is 3 deep, this drafter fills 2",
    "nested_ensemble": r"member 2 is Ensemble",
    "no_causal_lm": r"is no decoder-only causal LM",
    "no_loss": r"all weights of the loss are 0",
    "no_members": r"an ensemble has no members",
    "no_origin": r"the drafter's origin is not given",
    "no_rotary_layer": r"needs a target with rotary positions",
    "no_weights": r"holds no weights",
    "not_attached": r"attach\(state, cache\)",
    "nothing_to_train": r"has no weights: there is nothing to train",
    "other_tokenizer": r"has another tokenizer than target",
    "other_tree": r"is a Dynamic, NGram can fill: Tree",
    "other_vocabulary": r"300 embeddings and 300 logits, target tiny-llama has 320",
    "own_code": r"brings its own Python code, which is never run",
    "own_head": r"this drafter has a head of its own: set draft_vocab=0",
    "quantised": r"is quantised and cannot be trained",
    "tensors_lacking": r"its files lack \d+ tensors|cannot be read",
    "tensors_missing": r"missing",
    "too_deep": r"4 deep, this drafter fills 3",
    "too_many_nodes": r"1200 nodes are asked for",
    "trees_for_members": r"has 2 trees, this ensemble 4 members",
    "two_origins": r"the drafter's origin is layers and path",
    "unreadable_config": r"its config cannot be read",
}

DECODING: dict[str, str] = {}

TRAINING: dict[str, str] = {}

FITTING: dict[str, str] = {}

WIRING: dict[str, str] = {}

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
