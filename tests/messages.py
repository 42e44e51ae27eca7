"""The one table of sentences that tests look for in messages: fault by fault, room by room.

A test names the fault, `match=said("data.damaged")`, and a message can be rewritten in one place.
Where a message begins with the setting at fault, tests match the setting's name and need no entry.
"""

from __future__ import annotations

DATA: dict[str, str] = {
    "beyond_vocabulary": "vocabulary ends at 99999",
    "cut_archive": "cannot be read",
    "cut_array": "JSON array but cannot be read",
    "cut_parquet": "cannot be read as parquet",
    "first_process_stopped": "rank 0 has stopped",
    "long_array": "JSON array of more than 5000 bytes: write one object a line",
    "no_conversation": "no conversation to write",
    "no_data_set": "cannot be loaded",
    "no_row_left": "no row is left to learn from",
    "no_rows_to_batch": "no rows to make batches of",
    "no_such_split": "has no split train; it has test",
    "no_template": "no chat template",
    "no_tokenizer": "without a tokenizer",
    "no_usable_row": "none of its 5 rows can be used",
    "out_is_a_file": "out=.* is a file",
    "process_stopped": "process 1 has stopped, 10 of its rows are missing",
    "row_number_twice": "row number appears twice",
    "set_checksum": "the set is damaged, .*its checksum is not the one in",
    "set_damaged": "the set is damaged, make it again",
    "set_damaged_or_contradicts": "the set is damaged|make the set again",
    "settings_lack_parts": r"does not say how its rows were made \(target, prompts, writing\)",
    "template_changes_turns": "the chat template changes or repeats the turns",
    "template_recurses": "the chat template refuses: maximum recursion depth",
    "template_refuses": "the chat template refuses: roles must alternate",
    "template_refuses_text": "the chat template refuses: not this text",
    "template_takes_long": r"the chat template refuses: it takes longer than 0\.2 s",
    "template_takes_memory": r"the chat template refuses: it asks for more than 0\.3 GB of memory",
    "template_without_lead": "the chat template puts nothing before a user turn",
    "template_writes_much": "makes 9000 characters of a conversation, at most 4096",
    "tokenizer_refuses": "the tokenizer refuses: index out of bounds",
    "unknown_shape": "conversations.*messages.*first row's keys: question, answer",
    "weights_of_another_shape": "row 0 has 80 tokens and weights of shape",
    "written_by_another": "is being written by another process",
}

TARGET: dict[str, str] = {
    "headless": r"without a causal head",
    "layers_beyond_files": r"describes 1000000000 layers, its files hold \d+ tensors",
    "no_folder": r"target\.path=.* does not exist",
    "no_such_layer": r"layer 2 asked for; .* layers 0\.\.1",
    "not_loaded": r"target .* cannot be loaded",
    "tokenizer": r"its tokenizer cannot be read",
    "tuned_already": r"is tuned already",
    "manifest_checksum": "its checksum is another",
    "manifest_contents": "contents are not width",
    "manifest_counts": r"its shards have \d+ rows of \d+ tokens, set says otherwise",
    "manifest_encoding": "encoding .*; known are float32, bf16, int8, fp8",
    "manifest_fingerprint": r"no target\.fingerprint",
    "manifest_format": "format (2|True) of stores, this version reads 1",
    "manifest_lacks_contents": "is no store's, it lacks contents",
    "manifest_no_shards": "no shards",
    "manifest_row_twice": "a row is named twice",
    "manifest_rows": "rows and lengths of shard 0",
    "manifest_shard": "shard 0 is not file, sha256",
    "manifest_too_large": "104857600 bytes: not a manifest",
    "not_finite": "are not finite",
    "shard_another_shard": "a shard of another store, or another shard of this one",
    "shard_checksum": "its checksum is another",
    "shard_half": "last_hidden is .*F16.*needs .*F32",
    "shard_header_unreadable": "its header cannot be read",
    "shard_long_header": "claims 1099511627776 bytes",
    "shard_lost": "cannot be read",
    "shard_name": r"its file's name is shard-0000\d\.safetensors",
    "shard_narrower": r"last_hidden is .*31\].*needs .*32\]",
    "shard_no_file": "is no file",
    "shard_size": r"damaged \(\d+ bytes instead of \d+\)",
    "store_cuts_rows": (r"holds 16 tokens of row \d+, \d+ are asked for: set data\.max_length=16"),
    "store_lacks_last": ("lacks the last hidden state, which this drafter reads; it has layer 1"),
    "store_lacks_layer": (
        r"lacks layer 1, .* it has the last hidden state: .* last_hidden=true layers=\[1\]"
    ),
    "store_lacks_rows": "lacks 8 of the 12 rows",
    "store_not_finished": r"not a finished store of features.*drafttrain\.capture",
    "store_of_another_dtype": r"another target \(dtype float32 there, bfloat16 here\)",
    "store_of_another_kind": "is no store's, it lacks set, contents, batches",
    "store_of_another_set": "of another conversation set",
    "store_of_another_width": "the target's width is 32",
    "store_of_other_weights": r"belongs to another target \(weights",
    "store_without_such_layer": r"layer \d asked for; target .* has layers 0\.\.1",
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
