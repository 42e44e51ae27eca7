"""Medusa heads by the names and the config of one engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drafttrain.drafter.medusa import Medusa
from drafttrain.errors import InputError
from drafttrain.layouts.medusa.facts import FILE, Reads
from drafttrain.layouts.writing import Exported, Source, stored
from drafttrain.target.naming import public


def write(source: Source[Reads]) -> Exported:
    """Raises: InputError for heads that this layout cannot hold."""
    drafter = source.drafter
    assert isinstance(drafter, Medusa)
    _refuse(source, drafter)
    word = str(source.dtype).removeprefix("torch.")
    config = {
        "hidden_size": source.target.width,
        "medusa_fc_bias": True,
        "dtype": word,
        "torch_dtype": word,
    }
    notes: tuple[str, ...] = ()
    if source.draft_ids is not None:
        notes = (
            f"the package drafts from {len(source.draft_ids)} tokens, these heads from all: they "
            "may propose others too",
        )
    return (_plain if source.reads.plain else _nested)(source, drafter, config, notes)


def _refuse(source: Source[Reads], drafter: Medusa) -> None:
    """Raises: InputError for heads that no engine loads."""
    target, engine = source.target, source.engine
    if getattr(target.output, "bias", None) is not None:
        raise InputError(
            f"to={engine}: the head of target {target.name} has a bias, which no engine's Medusa "
            "heads have"
        )
    source.kept_ids(holds=False, why="no engine loads Medusa heads with a reduced vocabulary")
    if drafter.projections is not None and source.draft_ids is not None:
        raise InputError(
            f"to={engine}: these heads learned {len(source.draft_ids)} of {target.vocab_size} "
            "tokens and have no rows for the others, and no engine loads a reduced vocabulary: "
            "train with draft_vocab=0, or with drafter.own_head=false, which proposes with the "
            "target's rows"
        )


def _nested(
    source: Source[Reads], drafter: Medusa, config: dict[str, Any], notes: tuple[str, ...]
) -> Exported:
    """By vLLM's names."""
    target = source.target
    tensors = {
        f"blocks.{j}.layers.{i}.{part}": tensor for (j, i, part), tensor in _blocks(drafter).items()
    }
    if drafter.projections is None:
        tensors["lm_head.weight"] = target.output.weight
    else:
        tensors |= {f"lm_heads.{j}.weight": row for j, row in enumerate(drafter.projections)}
    config |= {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "num_heads": drafter.count,
        "num_hidden_layers": drafter.config.blocks,
        "vocab_size": target.vocab_size,
        "original_lm_head": drafter.projections is None,
    }
    command = source.command(min(source.tokens, drafter.count))
    return Exported(config, stored(tensors, source.dtype), command, notes=notes)


def _plain(
    source: Source[Reads], drafter: Medusa, config: dict[str, Any], notes: tuple[str, ...]
) -> Exported:
    """By FasterDecoding's names."""
    target, blocks = source.target, _blocks(drafter)
    if source.reads.one_block:
        _refuse_several_blocks(source, drafter, blocks)
    tensors = {f"{j}.{i}.linear.{part}": tensor for (j, i, part), tensor in blocks.items()}
    for j in range(drafter.count):
        own = drafter.projections
        tensors[f"{j}.{drafter.config.blocks}.weight"] = (
            target.output.weight if own is None else own[j]
        )
    config |= {
        "medusa_num_heads": drafter.count,
        "medusa_num_layers": drafter.config.blocks,
        "base_model_name_or_path": public(target.name),
        "vocab_size": target.vocab_size,
    }
    notes += (
        "FasterDecoding's own code reads a pickle, which is not written here; make it in the "
        'directory once: python -c "'
        f"import torch; from safetensors.torch import load_file; torch.save(load_file('{FILE}'), "
        "'medusa_lm_head.pt')\"",
    )
    command = source.command()
    return Exported(config, stored(tensors, source.dtype), command, file=FILE, notes=notes)


def _blocks(drafter: Medusa) -> dict[tuple[int, int, str], Tensor]:
    """{(head, block, weight or bias): tensor}, both counted from 0."""
    heads: Any = drafter.heads
    found = {}
    for j, head in enumerate(heads):
        for i, block in enumerate(head):
            found[j, i, "weight"], found[j, i, "bias"] = block.linear.weight, block.linear.bias
    return found


def _refuse_several_blocks(
    source: Source[Reads], drafter: Medusa, blocks: dict[tuple[int, int, str], Tensor]
) -> None:
    for (j, i, part), tensor in blocks.items():
        if i and not torch.equal(tensor, blocks[j, 0, part]):
            raise InputError(
                f"to={source.engine}: each head has {drafter.config.blocks} blocks of its own, "
                f"{source.engine.title} repeats one: give "
                f"{source.others(lambda other: not other.one_block)}"
            )
