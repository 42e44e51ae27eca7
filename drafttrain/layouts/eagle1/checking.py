"""An EAGLE-1 head with the eyes of one engine."""

from __future__ import annotations

import os
from itertools import pairwise

from drafttrain.errors import InputError
from drafttrain.layouts import origin
from drafttrain.layouts.block import Sizes, block_shapes, sizes_of
from drafttrain.layouts.directory import FLOATS, Directory
from drafttrain.layouts.eagle1.facts import COMPUTED, READINGS, TOKEN_MAP, Embedding, FcBias, Reads
from drafttrain.layouts.engines import Engine
from drafttrain.layouts.inspection import EMBEDDINGS, Inspection, Shapes
from drafttrain.packaging.checking import read_json, some

_LARGEST_MAP = 16 << 20
_NO_NORM = "layers.0.input_layernorm.weight"
_QKV_BIASES = tuple(f"layers.0.self_attn.{name}_proj.bias" for name in "qkv")
_JUDGED = (_NO_NORM, "lm_head.weight", "norm.weight", "d2t", "t2d")
"""Tensors that have faults of their own."""


def recognises(head: Directory) -> bool:
    names, given = head.tensors, head.config.get("architectures")
    said = given[0] if isinstance(given, list) and given and isinstance(given[0], str) else ""
    return any(
        name.removeprefix("model.") in ("fc.weight", "fusion_fc.weight") for name in names
    ) or said.endswith("Eagle")


def default_engine(head: Directory) -> Engine | None:
    given = head.config.get("architectures")
    name = str(given[0]) if isinstance(given, list) and given else ""
    suffixes = {engine: reads.suffix for engine, reads in READINGS.items() if reads.suffix}
    return next((engine for engine, end in suffixes.items() if name.endswith(end)), None)


def check(inspection: Inspection[Reads]) -> None:
    config, held, reads = inspection.config, inspection.head.tensors, inspection.reads
    inspection.files()
    if reads.architectures:
        inspection.architecture(reads.architectures)
    inspection.plain_weights(config)
    inspection.common_values(config)
    inspection.untied(config)
    inspection.activation(config)
    inspection.against_target(config)
    if config.get("draft_vocab_size") not in (None, config.get("vocab_size")) or "d2t" in held:
        inspection.add(
            "draft-vocab-not-read",
            f"{inspection.engine} reads no draft vocabulary in an EAGLE-1 head, nor d2t: its head "
            "is the target's",
        )
    inspection.unprefixed()
    sizes = sizes_of(config, inspection)
    layers, vocab_size = (
        inspection.integer(config, "num_hidden_layers"),
        inspection.integer(config, "vocab_size"),
    )
    if sizes is None or layers is None or vocab_size is None or not held:
        return
    _check_layers(inspection, layers)
    _check_biases(inspection)
    _check_extras(inspection)
    if reads.token_map:
        _check_token_map(inspection, vocab_size)
    expected, optional = _shapes(inspection, sizes, layers, vocab_size)
    optional |= {
        name: held[name].shape
        for name in held
        if name in (*_JUDGED, *inspection.prefixed) or name.endswith(COMPUTED)
    }
    optional["fc.bias"] = (sizes.width,)
    inspection.compare(expected, optional)
    inspection.weights(("d2t", "t2d"))
    needed = reads.embedding is not Embedding.USED
    inspection.borrowed("embed_tokens.weight", EMBEDDINGS, "embedding", needed=needed)


def _shapes(
    inspection: Inspection[Reads], sizes: Sizes, layers: int, vocab_size: int
) -> tuple[Shapes, Shapes]:
    qkv, o = _attention_biases(inspection)
    expected: Shapes = {"fc.weight": (sizes.width, 2 * sizes.width)}
    for layer in range(min(layers, 64)):
        expected |= block_shapes(f"layers.{layer}.", sizes, qkv_bias=qkv, o_bias=o)
        expected[f"layers.{layer}.post_attention_layernorm.weight"] = (sizes.width,)
        if layer:
            expected[f"layers.{layer}.input_layernorm.weight"] = (sizes.width,)
    embedding: Shapes = {"embed_tokens.weight": (vocab_size, sizes.width)}
    if inspection.reads.embedding is Embedding.NEEDED:
        return expected | embedding, {}
    return expected, embedding


def _attention_biases(inspection: Inspection[Reads]) -> tuple[bool, bool]:
    """Those that the engine will look for: of queries, keys and values, and after the
    attention."""
    config, reads = inspection.config, inspection.reads
    if reads.qwen2 and "Qwen2" in str(config.get("architectures")):
        return True, False
    both = reads.attention_bias and any(bool(config.get(key)) for key in ("attention_bias", "bias"))
    return (bool(config["qkv_bias"]) if reads.qkv_bias and "qkv_bias" in config else both), both


def _check_layers(inspection: Inspection[Reads], layers: int) -> None:
    found = {name.split(".")[1] for name in inspection.head.tensors if name.startswith("layers.")}
    if found != {str(layer) for layer in range(min(layers, 64))}:
        inspection.add(
            "layer-count",
            f"num_hidden_layers is {layers}, the file has layers {some(sorted(found)) or 'none'}: "
            "it may be the target's number",
        )


def _check_biases(inspection: Inspection[Reads]) -> None:
    config, held = inspection.config, inspection.head.tensors
    reads, engine = inspection.reads, inspection.engine
    has = "fc.bias" in held
    if reads.fc_bias is FcBias.DROPPED and has and held["fc.bias"].dtype in FLOATS:
        zero = not bool(inspection.head.read("fc.bias").any())
        inspection.add(
            "fc-bias-dropped",
            f"fc.bias is there and {engine.title} drops it"
            + (", which changes nothing: it is zero" if zero else ": drafts are others"),
            fatal=not zero,
        )
    if reads.fc_bias is FcBias.NEEDED and not has:
        inspection.add(
            "fc-bias-missing",
            f"fc.bias is not there: {engine.title} leaves it at random values; write zeros",
        )
    if reads.fc_bias is FcBias.DECLARED and has != bool(config.get("bias", True)):
        inspection.add(
            "fc-bias-undeclared",
            f"bias is {config.get('bias', 'not given, which means true')}, fc.bias is "
            f"{'there' if has else 'not there'}: {engine.title} fails or leaves it random",
        )
    in_attention = any(name in held for name in _QKV_BIASES)
    if reads.attention_bias and config.get("bias") and not in_attention:
        inspection.add(
            "bias-read-as-attention",
            f"bias is true, meant for fc as EAGLE reads it; {engine} makes biases in attention of "
            "it, at random values: write false",
        )
    declared, _ = _attention_biases(inspection)
    if not declared and in_attention:
        need = "write qkv_bias: true" if reads.qkv_bias else f"architectures must be {reads.qwen2}"
        inspection.add(
            "attention-bias-undeclared",
            f"queries, keys and values have biases that {engine} does not look for: {need}",
        )


def _check_extras(inspection: Inspection[Reads]) -> None:
    held = inspection.head.tensors
    if _NO_NORM in held:
        inspection.add(
            "norm-before-attention",
            f"{_NO_NORM} is there: EAGLE-1's first block has no such norm; vLLM refuses the file, "
            "others drop what was trained",
        )
    if "norm.weight" in held:
        inspection.add("final-norm", "norm.weight is there: EAGLE-1 has no norm before the head")
    if "lm_head.weight" in held:
        inspection.add(
            "head-shipped",
            "lm_head.weight is there: vLLM refuses the file, others take the target's anyway",
            fatal=inspection.reads.refuses_head,
        )


def _check_token_map(inspection: Inspection[Reads], vocab_size: int) -> None:
    """The list of ids that an export has for SGLang, of which its pickle is made."""
    path = inspection.head.path / TOKEN_MAP
    if not os.path.lexists(path):
        return
    try:
        ids = read_json(path, _LARGEST_MAP, "a list of ids")
    except InputError as error:
        inspection.add("token-map-ids", str(error))
        return
    fits = isinstance(ids, list) and all(type(i) is int and 0 <= i < vocab_size for i in ids)
    if not fits or not ids or any(b <= a for a, b in pairwise(ids)):
        inspection.add(
            "token-map-ids",
            f"{TOKEN_MAP} needs a list of integers that ascend within 0..{vocab_size - 1}",
        )
        return
    package = origin.read_origin(inspection.head)
    if package is not None and package.draft_ids != ids:
        own = "none" if package.draft_ids is None else len(package.draft_ids)
        inspection.add(
            "token-map-differs",
            f"{TOKEN_MAP} has {len(ids)} ids, which are not those of {origin.FILE} ({own}): "
            f"{inspection.engine.title} drafts from others than were learned; export the package "
            "again",
        )
