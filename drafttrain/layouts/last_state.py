"""A module of multi-token prediction for a target that has none, as vLLM serves it: an EAGLE-3 head
(see `eagle3`) that captures no states of inner layers (`use_aux_hidden_state: false`).

It has no `fc`. Its layer reads [input_layernorm(E(x)); hidden_norm(h)], h what the target's own
head reads, after the target's final norm; `norm_output: true` gives its normed output to the next
step. Read from: vLLM 0.32 model_executor/models/llama_eagle3.py and v1/spec_decode/eagle.py; tried
there with heads that only show what they are given.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from drafttrain.drafter.mtp import Mtp
from drafttrain.errors import InputError
from drafttrain.layouts import eagle3, engines, vocabulary
from drafttrain.layouts.directory import FLOATS, Directory
from drafttrain.layouts.eagle3.facts import FIRST, FLAGS, NAMED, Reads, captures, inner
from drafttrain.layouts.eagle3.writing import Head, exported
from drafttrain.layouts.inspection import Inspection, alike, refuse
from drafttrain.layouts.layout import Layout, settings_of
from drafttrain.layouts.rope import effective
from drafttrain.layouts.writing import Exported, Source
from drafttrain.nn.plain import plain_config
from drafttrain.packaging.checking import some
from drafttrain.target.model import Target
from drafttrain.wiring.defaults import with_defaults

READINGS = {engines.VLLM: eagle3.READINGS[engines.VLLM]}
_FLAGS = {name: name == "norm_output" for name in FLAGS}
_HEAD, _IDS, _EMBEDDING = "lm_head.weight", "draft_ids", "embed_tokens.weight"
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "hidden_act",
)


# --- writing --------------------------------------------------------------------------------------


def recognises(head: Directory) -> bool:
    return eagle3.LAYOUT.recognises(head) and not captures(head.config)


def write(source: Source[Reads]) -> Exported:
    """Raises: InputError for what the engine cannot run: a RoPE or an activation it does not know,
    a head with a bias or with scaled logits."""
    drafter, target = source.drafter, source.target
    assert isinstance(drafter, Mtp)
    if drafter.native is not None:
        raise InputError(
            f"to={source.engine}: this package's module has the layout that its target is shipped "
            "with, which engines look for in the target's own files: give to=target"
        )
    if float(target.finish_logits(torch.ones(()))) != 1.0:
        raise InputError(
            f"to={source.engine}: target {target.name} scales or caps its logits, which EAGLE-3 "
            "in engines does not; the package itself decodes in transformers, by custom_generate"
        )
    ids = source.kept_ids(holds=True, why="")
    if drafter.lm_head is None:
        rows = target.output.weight
        projection = rows if ids is None else rows[ids.to(rows.device)]
    elif source.vocabulary == "whole" and source.draft_ids is not None:
        raise InputError(
            f"vocabulary=whole: this drafter's own head has {len(source.draft_ids)} rows, and no "
            "others were trained; set vocabulary=auto"
        )
    else:
        projection = drafter.lm_head.weight
    state = drafter.state_dict()
    return exported(
        source,
        Head(
            tensors={name: t for name, t in state.items() if name not in (_HEAD, _IDS)},
            projection=projection,
            block=drafter.layer_config(),
            layers=1,
            taps=(),
            flags=_FLAGS,
            query_norms=False,
            own_rope=False,
        ),
    )


# --- reading --------------------------------------------------------------------------------------


def read(head: Directory, target: Target, known: dict[str, Any]) -> Mtp:
    """The drafter of such a directory. One whose projection is the target's rows borrows them.

    Args:
        known: settings of the drafter that an export of drafttrain's has.
    Raises: InputError for what `export check=` with vLLM's eyes calls an error, and for whatever
        such a drafter for this target cannot be.
    """
    against = json.loads(target.config.to_json_string(use_diff=False))
    inspection = Inspection(
        head, engines.VLLM, READINGS[engines.VLLM], Directory(head.path, against, {}, ())
    )
    eagle3.check(inspection)
    refuse(inspection.findings, str(head.path))
    _refuse_another(head, target)
    rows, ids = target.output.weight, None
    if "d2t" in head.tensors:
        offsets = vocabulary.ids_of(head.read("d2t"))
        ids = vocabulary.read_ids(f"{head.path}: d2t", offsets, target.vocab_size)
        rows = rows[ids.to(rows.device)]
    own = known.get("own_head", _HEAD in head.tensors and not alike(head.read(_HEAD), rows))
    drafter = with_defaults(Mtp, target, **{**known, "own_head": own, "draft_ids": ids})
    named = any(name.startswith(NAMED) for name in head.tensors)
    shapes = {
        name: (name.replace(FIRST, NAMED, 1) if named else name, tuple(tensor.shape))
        for name, tensor in drafter.state_dict().items()
        if name != _IDS
    }
    taken = {theirs for theirs, _ in shapes.values()} | {_HEAD, _EMBEDDING, "d2t", "t2d"}
    if odd := sorted(head.tensors.keys() - taken):
        raise InputError(f"{head.path} holds {some(odd)}, which mtp does not have")
    state = {name: head.weight(*place) for name, place in shapes.items()}
    drafter.load_state_dict(state, strict=False)  # draft_ids, where there are any, are set already.
    return drafter.eval()


def _refuse_another(head: Directory, target: Target) -> None:
    """Raise InputError unless config.json says what the drafter computes, and the embedding is the
    target's."""
    config = head.config
    own = plain_config(target)
    facts = {name: (config.get(name), getattr(own, name)) for name in _SIZES}
    facts["RoPE"] = effective(config), effective({"rope_parameters": dict(own.rope_parameters)})
    for name, wanted in _FLAGS.items():
        facts[name] = bool(config.get(name) or inner(config).get(name)), wanted
    for name, (given, need) in facts.items():
        if given != need and given is not None:
            raise InputError(
                f"{head.path}: {name} is {str(given)[:60]}, which mtp for this target has as "
                f"{str(need)[:60]}"
            )
    if _EMBEDDING in head.tensors and (
        head.tensors[_EMBEDDING].dtype not in FLOATS
        or not alike(head.read(_EMBEDDING), target.embedding.weight)
    ):
        raise InputError(
            f"{head.path}: {_EMBEDDING} is not the target's own: mtp borrows the target's, and it "
            "is another one"
        )


LAYOUT = Layout(
    name="last_state",
    what="EAGLE-3 heads without captured states",
    turn=39,
    readings=READINGS,
    recognises=recognises,
    check=eagle3.check,
    drafters=(Mtp,),
    write=write,
    read=read,
    shape=settings_of("own_head"),
)
