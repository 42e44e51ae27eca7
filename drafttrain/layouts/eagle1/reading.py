"""The drafter of an EAGLE-1 head from elsewhere."""

from __future__ import annotations

import json
from dataclasses import astuple
from typing import Any

import torch

from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.errors import InputError
from drafttrain.layouts import engines
from drafttrain.layouts.block import Sizes, sizes_of
from drafttrain.layouts.directory import FLOATS, Directory
from drafttrain.layouts.eagle1.facts import COMPUTED, READINGS
from drafttrain.layouts.inspection import Inspection, alike, refuse
from drafttrain.layouts.rope import effective
from drafttrain.packaging.checking import some
from drafttrain.target.model import Target
from drafttrain.wiring.defaults import with_defaults

_SPECULATORS = {"fusion_fc.": "fc.", "transformer.": "layers.0."}


def read(head: Directory, target: Target, known: dict[str, Any]) -> Eagle1:
    """The drafter of a foreign head. A bias of zeros is none.

    Args:
        known: settings of the drafter that an export of drafttrain's has.
    Raises: InputError for whatever such a drafter cannot be: other sizes than the target's, more
        layers, norms or embeddings of its own, another RoPE.
    """
    config = _layer_config(head)
    names = {_ours(name): name for name in head.tensors if not name.endswith(COMPUTED)}
    _refuse_sizes(head, config, target)
    _refuse_own_vocabulary(head, names, target)
    _refuse_other_sizes(head, config, target.config)
    d = target.width
    bias = head.weight(names["fc.bias"], (d,)) if "fc.bias" in names else torch.zeros(d)
    drafter = with_defaults(
        Eagle1, target, **{**known, "bias": known.get("bias", False) or bool(bias.any())}
    )
    _refuse_another_block(head, config, drafter.layer_config())
    shapes = {
        _theirs(name): tuple(t.shape)
        for name, t in drafter.state_dict().items()
        if name not in ("draft_ids", "fc.bias")
    }
    odd = sorted(
        names.keys() - shapes.keys() - {"fc.bias", "embed_tokens.weight", "lm_head.weight"}
    )
    if odd or len(names) != sum(not name.endswith(COMPUTED) for name in head.tensors):
        what = some(odd) if odd else "a tensor under two names"
        raise InputError(
            f"{head.path} holds {what}: EAGLE-1 has one block of the target's kind, without a norm "
            "before its attention"
        )
    found = {name: head.weight(names.get(name, name), shape) for name, shape in shapes.items()}
    state = {name: found[_theirs(name)] for name in drafter.state_dict() if _theirs(name) in found}
    if drafter.config.bias:
        state["fc.bias"] = bias
    state["fc.weight"] = torch.cat((state["fc.weight"][:, d:], state["fc.weight"][:, :d]), 1)
    drafter.load_state_dict(state, strict=False)  # draft_ids, where there are any, are set already.
    return drafter.eval()


def _layer_config(head: Directory) -> dict[str, Any]:
    if "speculators_model_type" not in head.config:
        return head.config
    inner = head.config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise InputError(f"{head.path}: transformer_layer_config is not a mapping")
    if head.config.get("layernorms"):
        raise InputError(
            f"{head.path} has norms of its own (layernorms: true), which eagle1 does not have"
        )
    return inner


def _ours(name: str) -> str:
    name = name.removeprefix("model.")
    for theirs, plain in _SPECULATORS.items():
        if name.startswith(theirs):
            return plain + name.removeprefix(theirs)
    return name


def _theirs(name: str) -> str:
    return name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else name


def _refuse_sizes(head: Directory, config: dict[str, Any], target: Target) -> None:
    """Raise InputError for a head of another width or vocabulary than the target's."""
    for key, mine in (("hidden_size", target.width), ("vocab_size", target.vocab_size)):
        if config.get(key, mine) != mine:
            raise InputError(
                f"{head.path}: {key} is {str(config[key])[:40]}, the target's is {mine}: it is "
                "another target's head"
            )


def _refuse_another_block(head: Directory, config: dict[str, Any], own: Any) -> None:
    """Raise InputError unless the block's config is the drafter's, which it will be computed
    with."""
    facts = {
        "rms_norm_eps": getattr(own, "rms_norm_eps", None),
        "hidden_act": getattr(own, "hidden_act", None),
    }
    for key, value in facts.items():
        if config.get(key, value) != value:
            raise InputError(
                f"{head.path}: {key} is {str(config[key])[:40]}, the target's is {value}: eagle1 "
                "takes the target's"
            )
    if (mine_rope := effective(config)) != (
        theirs := effective(json.loads(own.to_json_string(use_diff=False)))
    ):
        raise InputError(
            f"{head.path} turns by RoPE with a base of {mine_rope[0]:g}, the target with "
            f"{theirs[0]:g} (or their scalings differ): it was trained so, or its config.json lost "
            "rope_theta; correct that file if you know"
        )


def _refuse_other_sizes(head: Directory, config: dict[str, Any], own: Any) -> None:
    """Raise InputError unless config.json gives the block's sizes, as `export check=` asks, and
    they are those that it will be computed with: other heads have tensors of the same shapes.

    Args:
        own: config of the block that it becomes.
    """
    inspection = Inspection(head, engines.VLLM, READINGS[engines.VLLM])
    said, layers = sizes_of(config, inspection), inspection.integer(config, "num_hidden_layers")
    refuse(inspection.findings, str(head.path))
    assert said is not None
    heads = own.num_attention_heads
    theirs = Sizes(
        own.hidden_size,
        own.intermediate_size,
        heads,
        getattr(own, "num_key_value_heads", None) or heads,
        getattr(own, "head_dim", None) or own.hidden_size // heads,
    )
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    for key, value, need in zip((*keys, "head_dim"), astuple(said), astuple(theirs), strict=True):
        if value != need:
            raise InputError(
                f"{head.path}: {key} is {value}, the target's is {need}: eagle1 takes the target's"
            )
    if layers != 1:
        raise InputError(f"{head.path}: num_hidden_layers is {layers}, EAGLE-1 has one block")


def _refuse_own_vocabulary(head: Directory, names: dict[str, str], target: Target) -> None:
    """Raise InputError if the file has another embedding or head than the target, whose are
    borrowed."""
    for name, weight in (
        ("embed_tokens.weight", target.embedding.weight),
        ("lm_head.weight", target.output.weight),
    ):
        if name not in names:
            continue
        entry = head.tensors[names[name]]
        if (
            entry.shape != tuple(weight.shape)
            or entry.dtype not in FLOATS
            or not alike(head.read(names[name]), weight)
        ):
            raise InputError(
                f"{head.path}: {name} is not the target's own: eagle1 borrows the target's, and it "
                "is another one"
            )
