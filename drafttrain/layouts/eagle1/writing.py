"""An EAGLE-1 drafter by the names and the config of one engine."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.errors import InputError
from drafttrain.layouts.block import block_config, refuse_rope
from drafttrain.layouts.eagle1.facts import TOKEN_MAP, Embedding, FcBias, Reads
from drafttrain.layouts.inspection import MADE_MAP
from drafttrain.layouts.writing import Exported, Source, stored

FAMILIES = ("llama", "mistral", "qwen2")
"""Targets whose own block is Llama's, with biases of queries, keys and values at most."""


def write(source: Source[Reads]) -> Exported:
    """Raises: InputError for what this engine cannot run: other families, biases it does not read,
    RoPE it does not know."""
    drafter, target, reads, engine = source.drafter, source.target, source.reads, source.engine
    assert isinstance(drafter, Eagle1)
    if not drafter.plain and target.config.model_type not in FAMILIES:
        raise InputError(
            f"to={engine}: target {target.name} is a {target.config.model_type}, whose block no "
            f"engine's EAGLE-1 runs (they run those of {', '.join(FAMILIES)}); the package itself "
            "decodes in transformers, by custom_generate"
        )
    block = drafter.layer_config()
    config = block_config(target, block) | _family(source, block)
    tensors = _tensors(drafter)
    _settle_bias(tensors, config, source)
    _check_block(config, source)
    if reads.embedding is Embedding.NEEDED:
        tensors["embed_tokens.weight"] = target.embedding.weight
    ids = source.kept_ids(
        holds=reads.token_map,
        why=f"EAGLE-1 in {engine} drafts from the target's full head; "
        f"{source.others(lambda other: other.token_map)} takes a list of ids",
    )
    word = str(source.dtype).removeprefix("torch.")
    more: dict[str, Any] = {} if ids is None else {"speculative-token-map": f"{{out}}/{MADE_MAP}"}
    return Exported(
        config={**config, "dtype": word, "torch_dtype": word},
        tensors=stored(tensors, source.dtype),
        texts={} if ids is None else {TOKEN_MAP: json.dumps(ids.tolist()) + "\n"},
        command=source.command(**more),
        notes=_notes(source, ids),
    )


def _notes(source: Source[Reads], ids: Tensor | None) -> tuple[str, ...]:
    """Args: ids: of the draft vocabulary that is written."""
    engine, notes = source.engine, []
    if source.draft_ids is not None and ids is None and source.vocabulary == "auto":
        notes.append(
            f"the package drafts from {len(source.draft_ids)} tokens; EAGLE-1 in {engine} drafts "
            "from the target's whole head, which may propose others too"
        )
    assert isinstance(source.drafter, Eagle1)
    if source.drafter.plain:
        notes.append(
            f"the block is Llama's, the target is a {source.target.config.model_type}: whether "
            f"{engine.title} drafts with EAGLE-1 for such a target was not tried"
        )
    notes += source.reads.notes
    if ids is not None:
        notes.append(
            f"{engine.title} reads the draft vocabulary from a pickle, which is not written here. "
            'Make it in the directory once: python -c "import json, torch; '
            f"torch.save(json.load(open('{TOKEN_MAP}')), '{MADE_MAP}')\""
        )
    return tuple(notes)


def _tensors(drafter: Eagle1) -> dict[str, Tensor]:
    """By the engines' names, embedding first."""
    d = drafter.target.width
    found = {}
    for name, tensor in drafter.state_dict().items():
        if name.startswith("layer."):
            found[f"layers.0.{name.removeprefix('layer.')}"] = tensor
    weight = drafter.fc.weight.detach()
    found["fc.weight"] = torch.cat((weight[:, d:], weight[:, :d]), 1)
    if drafter.fc.bias is not None:
        found["fc.bias"] = drafter.fc.bias
    return found


def _family(source: Source[Reads], config: Any) -> dict[str, Any]:
    """The engine's name for the block, and its biases.

    Args:
        config: that the block was made by.
    """
    target, engine, reads = source.target, source.engine, source.reads
    qwen = config.model_type == "qwen2"
    both, mlp = (
        bool(getattr(config, "attention_bias", False)),
        bool(getattr(config, "mlp_bias", False)),
    )
    if (both and not reads.attention_bias) or (mlp and not reads.mlp_bias):
        raise InputError(
            f"to={engine}: target {target.name} has biases in its blocks that {engine} does not "
            f"read; {source.others(lambda other: other.mlp_bias)} does"
        )
    if engine.only_silu and config.hidden_act != "silu":
        raise InputError(
            f"to={engine}: target {target.name} has the activation {config.hidden_act}, {engine} "
            "runs only silu here"
        )
    found: dict[str, Any] = {"attention_bias": both, "mlp_bias": mlp}
    if qwen and reads.qwen2:
        return {"model_type": "qwen2", "architectures": [reads.qwen2], "use_sliding_window": False}
    if qwen:
        found["qkv_bias"] = True
    return found | {"architectures": [*reads.architectures, "LlamaForCausalLM"][:1]}


def _settle_bias(tensors: dict[str, Tensor], config: dict[str, Any], source: Source[Reads]) -> None:
    """`fc.bias` as the engine needs it. `bias` in a config means fc's in EAGLE, and attention's in
    vLLM and SGLang."""
    bias, engine, use = tensors.get("fc.bias"), source.engine, source.reads.fc_bias
    if use is FcBias.DROPPED and bias is not None:
        if bool(bias.any()):
            raise InputError(
                f"to={engine}: this drafter has a bias in fc, which {engine.title} drops: give "
                f"{source.others(lambda other: other.fc_bias is not FcBias.DROPPED)}, or train "
                "with drafter.bias=false"
            )
        del tensors["fc.bias"]
    if use is FcBias.NEEDED and bias is None:
        tensors["fc.bias"] = torch.zeros(config["hidden_size"])
    config["bias"] = use is FcBias.DECLARED and "fc.bias" in tensors


def _check_block(config: dict[str, Any], source: Source[Reads]) -> None:
    """Raises: InputError for a block that this engine's code cannot be."""
    engine, reads = source.engine, source.reads
    if reads.square and (
        config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]
    ):
        raise InputError(
            f"to={engine}: this target's attention heads do not make up its width, which "
            f"{engine.title} needs: give {source.others(lambda other: not other.square)}"
        )
    refuse_rope(config, source, reads.ropes)
