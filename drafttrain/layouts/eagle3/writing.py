"""An EAGLE-3 drafter by the names and the config of one engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drafttrain.drafter.eagle3 import Eagle3
from drafttrain.errors import InputError
from drafttrain.layouts import vocabulary
from drafttrain.layouts.block import block_config, refuse_rope
from drafttrain.layouts.eagle3 import captured
from drafttrain.layouts.eagle3.facts import ARCHITECTURE, FIRST, FLAGS, NAMED, Reads, guessed
from drafttrain.layouts.eagle3.nested import nested
from drafttrain.layouts.writing import Exported, Source, stored

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Targets whose states every engine here captures."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """A drafter of this shape, whatever its class."""

    tensors: Mapping[str, Tensor]
    """By the names of this layout, layers as layers.0., later ones with input_layernorm only;
    without the projection to the vocabulary."""
    projection: Tensor
    """(w d), whose w are all of the vocabulary or the ids that are drafted from."""
    block: Any
    """The config that its layers are made by."""
    layers: int
    taps: tuple[int, ...]
    """Layers of the target, from 0, whose output it reads; none: what the target's head reads."""
    flags: Mapping[str, bool]
    """Of FLAGS."""
    query_norms: bool
    """Are there norms of queries and keys?"""
    own_rope: bool
    """Was it trained with another RoPE than the target's?"""


def write(source: Source[Reads]) -> Exported:
    """Raises: InputError for what this engine cannot run: norms, layers and states it does not
    read, RoPE it does not know."""
    drafter = source.drafter
    assert isinstance(drafter, Eagle3)
    return exported(source, head_of(drafter, source))


def head_of(drafter: Eagle3, source: Source[Reads]) -> Head:
    """Raises: InputError for a vocabulary that it cannot have."""
    given, own = drafter.config, "lm_head.weight"
    tensors = {
        name: tensor
        for name, tensor in drafter.state_dict().items()
        if name not in (own, "draft_ids")
    }
    if drafter.lm_head is None:
        projection = drafter.target.output.weight
        ids = _kept(source)
        projection = projection if ids is None else projection[ids.to(projection.device)]
    else:
        projection = drafter.lm_head.weight
        if source.vocabulary == "whole" and source.draft_ids is not None:
            raise InputError(
                f"vocabulary=whole: this drafter's own head has {len(source.draft_ids)} rows, and "
                "no others were trained; set vocabulary=auto"
            )
    return Head(
        tensors=tensors,
        projection=projection,
        block=drafter.layer_config(),
        layers=given.layers,
        taps=drafter.taps,
        flags={name: bool(getattr(given, name)) for name in FLAGS},
        query_norms=given.qk_norm,
        own_rope=given.rotary is not None,
    )


def _kept(source: Source[Reads]) -> Tensor | None:
    return source.kept_ids(holds=True, why="")


def exported(source: Source[Reads], head: Head) -> Exported:
    """Raises: as `write`."""
    target, reads, engine = source.target, source.reads, source.engine
    _refuse(source, head)
    ids = _kept(source)
    config = block_config(target, head.block) | {
        "model_type": "qwen3" if head.query_norms else "llama",
        "num_hidden_layers": head.layers,
        "draft_vocab_size": len(head.projection),
        "attention_bias": False,
        "mlp_bias": False,
        **captured.spelt(list(head.taps)),
        **head.flags,
    }
    if engine.only_silu and config["hidden_act"] != "silu":
        raise InputError(
            f"to={engine}: this head has the activation {config['hidden_act']}, {engine} runs only "
            "silu here"
        )
    refuse_rope(config, source, reads.ropes)
    first = reads.first_layer or NAMED
    tensors = _named(head, first)
    if ids is not None:
        tensors |= vocabulary.maps_of(ids, target.vocab_size)
    architecture = (
        reads.query_norms if head.query_norms else (*reads.architectures, ARCHITECTURE)[0]
    )
    word = str(source.dtype).removeprefix("torch.")
    config |= {"architectures": [architecture], "dtype": word, "torch_dtype": word}
    if reads.nests_block:
        tensors["embed_tokens.weight"] = target.embedding.weight
        config = nested(config, source)
    return Exported(
        config=config,
        tensors=stored(tensors, source.dtype),
        command=source.command(),
        notes=_notes(source),
        meant=("rope-differs-from-target",) if head.own_rope else (),
    )


def _named(head: Head, first: str) -> dict[str, Tensor]:
    """By the engine's names. Later layers have their one norm under the names of both engines."""
    found: dict[str, Tensor] = {}
    for name, tensor in head.tensors.items():
        found[name.replace(FIRST, first, 1) if name.startswith(FIRST) else name] = tensor
    for layer in range(1, head.layers):
        prefix = f"layers.{layer}."
        found[f"{prefix}hidden_norm.weight"] = found[f"{prefix}input_layernorm.weight"]
    return found | {"lm_head.weight": head.projection}


def _refuse(source: Source[Reads], head: Head) -> None:
    """Raise InputError for what this engine would compute in another way, without a word."""
    target, reads, engine = source.target, source.reads, source.engine

    def refuse(what: str, others: str) -> None:
        raise InputError(f"to={engine}: {what}; give {others}")

    if lost := [name for name in reads.passed_over if head.flags.get(name)]:
        refuse(
            f"this drafter has {', '.join(lost)}, which {engine.title} does not read",
            source.others(lambda other: not {*lost} & {*other.passed_over}),
        )
    if head.query_norms and not reads.query_norms:
        refuse(
            f"this drafter's queries and keys have norms, which {engine.title}'s EAGLE-3 does not",
            source.others(lambda other: bool(other.query_norms)),
        )
    if reads.one_layer and head.layers != 1:
        refuse(
            f"this drafter has {head.layers} layers, {engine.title} builds one",
            source.others(lambda other: not other.one_layer),
        )
    count = len(target.decoder_layers)
    ids = [tap + 1 for tap in head.taps]
    if reads.guessed_layers and ids != guessed(count):
        refuse(
            f"this drafter reads the layers {list(head.taps)} of the target, {engine.title} always "
            f"{[i - 1 for i in guessed(count)]}",
            source.others(lambda other: not other.guessed_layers),
        )
    if not reads.last_state and count in ids:
        refuse(
            f"this drafter reads layer {count - 1} of the target, the last one, which "
            f"{engine.title} does not capture",
            source.others(lambda other: other.last_state and not other.guessed_layers),
        )
    if reads.skips_square_fc and len(head.taps) == 1:
        refuse(
            f"this drafter reads one layer of the target, and {engine.title} then passes over fc",
            source.others(lambda other: not other.skips_square_fc),
        )
    if getattr(target.output, "bias", None) is not None:
        raise InputError(
            f"to={engine}: the head of target {target.name} has a bias, which no engine's EAGLE-3 "
            "has; the package itself decodes in transformers, by custom_generate"
        )


def _notes(source: Source[Reads]) -> tuple[str, ...]:
    family, engine = source.target.config.model_type, source.engine
    notes = list(source.reads.notes)
    if family not in FAMILIES:
        notes.append(
            f"the target is a {family}: whether {engine.title} hands out the states of its layers "
            "was not tried"
        )
    return tuple(notes)
