"""MTP heads, which are inside the target's own checkpoint: the config promises them, the files must
hold them. `to=target` writes a tuned head into a copy of these files.

vLLM and SGLang choose the code by the target's architecture; a dense Llama or Qwen2 target has
none. Read from: vLLM 0.32 model_executor/models/*_mtp.py, SGLang 0.5.23 srt/models, transformers
5.24 generation/utils.py.
"""

from __future__ import annotations

import re
from typing import Any

from drafttrain.drafter.mtp import Mtp
from drafttrain.errors import InputError
from drafttrain.layouts import engines, patching
from drafttrain.layouts.directory import Directory
from drafttrain.layouts.engines import Reading
from drafttrain.layouts.inspection import Inspection
from drafttrain.layouts.layout import Layout
from drafttrain.layouts.writing import Exported, Source, stored
from drafttrain.packaging.checking import some
from drafttrain.target import native
from drafttrain.target.model import Target
from drafttrain.wiring.defaults import with_defaults

READINGS = {
    engines.VLLM: Reading(method="mtp", drafters=()),
    engines.SGLANG: Reading(method="NEXTN", drafters=()),
    engines.HF: Reading(drafters=()),
    engines.TARGET: Reading(method="mtp"),
}
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_AFTER = (
    "model.layers.{n}.enorm.weight",
    "model.layers.{n}.hnorm.weight",
    "model.layers.{n}.eh_proj.weight",
)
_QWEN = (
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.fc.weight",
    "mtp.norm.weight",
    "mtp.layers.{i}.input_layernorm.weight",
)
_MIMO = tuple(
    f"model.mtp_layers.{{i}}.{name}.weight"
    for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
)
_ERNIE = tuple(
    f"model.{name}.{{i}}.weight" for name in ("mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj")
)
FAMILIES: dict[str, tuple[str, ...]] = {
    "DeepseekV3ForCausalLM": _AFTER,
    "Glm4MoeForCausalLM": _AFTER,
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5MoeForCausalLM": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
    "MiMoForCausalLM": _MIMO,
    "Ernie4_5_MoeForCausalLM": _ERNIE,
}
"""Tensors of a head by the target's architecture; {i} counts heads, {n} counts on after the
target's layers."""
_ANY = re.compile(r"(^|\.)(mtp|mtp_layers|mtp_block|mtp_emb_norm|enorm|hnorm|eh_proj)(\.|$)")
_MOST_HEADS = 64


def recognises(head: Directory) -> bool:
    if "speculators_model_type" in head.config:
        return False
    text = _text(head.config)
    return any(type(text.get(key)) is int and text[key] > 0 for key in COUNTS) or any(
        map(_ANY.search, head.tensors)
    )


def check(inspection: Inspection[Reading]) -> None:
    config = _text(inspection.config)
    inspection.files()
    inspection.common_values(config)
    held = inspection.head.tensors
    promised = {
        key: config[key] for key in COUNTS if type(config.get(key)) is int and config[key] > 0
    }
    there = sorted(name for name in held if _ANY.search(name))
    if not promised:
        inspection.add(
            "mtp-unpromised",
            f"holds {some(there)}, but no {' or '.join(COUNTS)} above 0: engines pass over them",
        )
        return
    key, count = next(iter(promised.items()))
    given = inspection.config.get("architectures")
    family = given[0] if isinstance(given, list) and given and isinstance(given[0], str) else ""
    if family not in FAMILIES:
        inspection.add(
            "mtp-no-class",
            f"{key} is {count}, but engines have no MTP code for "
            f"{family[:60] or 'no architecture'}, only for {some(FAMILIES, 20)}",
        )
        return
    layers = config.get("num_hidden_layers")
    if count > _MOST_HEADS or type(layers) is not int:
        inspection.add("config-value", f"{key} is {count}, num_hidden_layers is {str(layers)[:40]}")
        return
    wanted = {name.format(i=i, n=layers + i) for i in range(count) for name in FAMILIES[family]}
    if missing := sorted(wanted - held.keys()):
        inspection.add(
            "mtp-missing",
            f"{key} promises {count}, but {some(missing)} are not there: only the trunk was "
            "saved; engines fail or guess at random",
        )


def _text(config: dict[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


# --- writing and reading --------------------------------------------------------------------------


def write(source: Source[Reading]) -> Exported:
    """Raises: InputError for a drafter of another layout, and a target that was not read from
    files."""
    drafter, target = source.drafter, source.target
    assert isinstance(drafter, Mtp)
    if drafter.native is None:
        raise InputError(
            "to=target: this package's module is not of a layout that targets are shipped with: "
            "give to=vllm, or train with drafter.native=shipped or new"
        )
    if drafter.lm_head is not None:
        raise InputError(
            "to=target: this drafter has a head of its own, engines project by the target's: train "
            "with drafter.own_head=false"
        )
    source.kept_ids(holds=False, why="engines draft from the target's full vocabulary")
    family, folder = native.family_of(target), native.directory_of(target)
    names = native.files_of(folder)
    state = drafter.native.state_dict()
    tensors = {p.name: p.part for p in native.places(family, target, state, set(names))}
    if not tensors.keys() & names.keys():  # a new head
        tensors |= native.copies(family, target)
    tensors = stored(tensors, source.dtype)
    notes = []
    if source.draft_ids is not None:
        notes.append(
            f"the package drafts from {len(source.draft_ids)} tokens, engines from all: they may "
            "propose others too"
        )
    return Exported(
        config={},
        tensors={},
        command=source.command(),
        copied=lambda out: patching.copy(folder, out, tensors, family.counts),
        notes=tuple(notes),
    )


def read(head: Directory, target: Target, known: dict[str, Any]) -> Mtp:
    """The drafter of a target's own directory, or of that of the model it was tuned from."""
    drafter = with_defaults(Mtp, target, **{**known, "native": "new"})
    assert drafter.native is not None
    native.load_shipped(target, drafter.native.state_dict(), head.path)
    return drafter.eval()


LAYOUT = Layout(
    name="mtp",
    what="MTP heads",
    turn=60,
    readings=READINGS,
    recognises=recognises,
    check=check,
    drafters=(Mtp,),
    write=write,
    read=read,
    shape=lambda drafter, head: {"native": "new"},
)
