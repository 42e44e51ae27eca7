"""An EAGLE-3 head with the eyes of one engine."""

from __future__ import annotations

import math
from collections.abc import Mapping

from drafttrain.layouts import vocabulary
from drafttrain.layouts.block import Sizes, block_shapes, sizes_of
from drafttrain.layouts.directory import Directory
from drafttrain.layouts.eagle3 import captured
from drafttrain.layouts.eagle3.facts import FIRST, NAMED, Reads, inner
from drafttrain.layouts.inspection import EMBEDDINGS, Inspection, Shapes
from drafttrain.layouts.masks import MASKS, check_masks
from drafttrain.packaging.checking import some

MOST_LAYERS = 64


def recognises(head: Directory) -> bool:
    given = head.config.get("architectures")
    said = isinstance(given, list) and any("eagle3" in str(name).lower() for name in given)
    names = {name.removeprefix("model.") for name in head.tensors}
    return said or any(
        name.startswith(NAMED) or name == f"{FIRST}hidden_norm.weight" for name in names
    )


def check(inspection: Inspection[Reads], *, complete: bool = False) -> None:
    """Args: complete: is the embedding always part of this layout?"""
    config, held = inspection.config, inspection.head.tensors
    inspection.files()
    if inspection.reads.architectures:
        inspection.architecture(inspection.reads.architectures)
    inspection.plain_weights(config)
    inspection.common_values(config)
    inspection.untied(config)
    inspection.activation(config)
    inspection.against_target(config, width=config.get("target_hidden_size") is None)
    _check_flags(inspection)
    _check_first(inspection)
    inspection.unprefixed()
    sizes = sizes_of(config, inspection)
    layers, vocab_size = (
        inspection.integer(config, "num_hidden_layers"),
        inspection.integer(config, "vocab_size"),
    )
    if sizes is None or layers is None or vocab_size is None or not held:
        return
    draft_size = vocabulary.draft_size_of(config, inspection, vocab_size)
    if inspection.reads.needs_draft_size and "draft_vocab_size" not in config:
        inspection.add(
            "draft-vocab-missing",
            f"draft_vocab_size is not given, which {inspection.engine.title} needs; write it, "
            "whatever it is",
        )
    width = (
        inspection.integer(config, "target_hidden_size", sizes.width)
        if config.get("target_hidden_size")
        else sizes.width
    )
    if draft_size is None or width is None:
        return
    states = captured.check(inspection, width)
    _check_head(inspection, draft_size, vocab_size)
    vocabulary.check(inspection, vocab_size, draft_size)
    _check_parallel(inspection, (states or 1) * width, vocab_size)
    if inspection.reads.one_layer and layers != 1:
        inspection.add(
            "layer-count",
            f"num_hidden_layers is {layers}: {inspection.engine.title} builds one layer; serve "
            "with vLLM or SGLang",
        )
    expected, optional = _shapes(inspection, sizes, min(layers, MOST_LAYERS), states, width)
    own = {"lm_head.weight": (draft_size, sizes.width)}
    embedding = {"embed_tokens.weight": (vocab_size, sizes.width)}
    if width == sizes.width:
        own |= embedding
    else:
        expected |= embedding
    _compare(inspection, expected, optional | own)
    inspection.weights(vocabulary.MAPS)
    inspection.borrowed(
        "embed_tokens.weight", EMBEDDINGS, "embedding", needed=complete or width != sizes.width
    )


def _compare(inspection: Inspection[Reads], expected: Shapes, optional: Shapes) -> None:
    """By the names of the file; maps and masks are optional, and names with a prefix have a fault
    of their own."""
    held = inspection.head.tensors
    named = {"d2t", "t2d", "mask_hidden", *inspection.prefixed}
    optional = optional | {name: held[name].shape for name in named if name in held}
    inspection.compare(_as_named(expected, held), _as_named(optional, held))


def _check_flags(inspection: Inspection[Reads]) -> None:
    config = inspection.config
    if "target_hidden_size" in config and config["target_hidden_size"] is None:
        inspection.add(
            "target-hidden-size-null", "target_hidden_size is null: vLLM fails at it; leave it out"
        )
    title, nested = inspection.engine.title, inner(config)
    for key in inspection.reads.passed_over:
        if config.get(key) or nested.get(key):
            inspection.add(
                "flag-not-read", f"{key} is true, which {title} does not read; serve with vLLM"
            )
    norms = sorted(n for n in inspection.head.tensors if n.startswith("fc_norm."))
    if norms and not config.get("fc_norm"):
        inspection.add(
            "norms-undeclared",
            f"{some(norms)} is there, fc_norm is not true: engines refuse the file or drop what "
            "was trained; write fc_norm: true",
        )
    if not inspection.reads.query_norms and (
        "Qwen3" in str(config.get("architectures"))
        or any("q_norm" in name for name in inspection.head.tensors)
    ):
        inspection.add(
            "flag-not-read",
            f"queries and keys have norms, which {title}'s EAGLE-3 does not; serve with vLLM",
        )


def _check_first(inspection: Inspection[Reads]) -> None:
    """The name of the first layer, where an engine knows one only."""
    known = inspection.reads.first_layer
    other = NAMED if known == FIRST else FIRST
    if known and (odd := sorted(n for n in inspection.head.tensors if n.startswith(other))):
        inspection.add(
            "first-layer-name",
            f"{some(odd)}: {inspection.engine.title} knows these as {known}*, and leaves its own "
            "at random values",
        )


def _check_head(inspection: Inspection[Reads], draft_size: int, vocab_size: int) -> None:
    if "lm_head.weight" in inspection.head.tensors:
        return
    if inspection.reads.needs_draft_size and inspection.config.get("draft_vocab_size") is not None:
        inspection.add(
            "head-missing",
            "lm_head.weight is not there while draft_vocab_size is given: "
            f"{inspection.engine.title}'s head stays random",
        )
    elif draft_size != vocab_size:
        inspection.add(
            "head-missing",
            f"lm_head.weight is not there, and the target's has {vocab_size} rows, not "
            f"{draft_size}",
        )


def _check_parallel(inspection: Inspection[Reads], size: int, vocab_size: int) -> None:
    """P-EAGLE: what takes the place of features that are not there yet."""
    entry, config = inspection.head.tensors.get("mask_hidden"), inspection.config
    said = next((key for key in MASKS if config.get(key) is not None), None)
    check_masks(inspection, vocab_size)
    if entry is None:
        if said or config.get("parallel_drafting"):
            inspection.add(
                "mask-hidden-missing",
                f"{said or 'parallel_drafting'} is given, but no mask_hidden: vLLM fails",
            )
        return
    if not inspection.reads.parallel:
        inspection.add(
            "parallel-drafting",
            f"mask_hidden is there, and {inspection.engine.title} has no parallel drafting; serve "
            "with vLLM",
        )
    if math.prod(entry.shape) != size:
        inspection.add("tensor-shape", f"mask_hidden is {list(entry.shape)}, needs {size} elements")
    if said is None:
        inspection.add(
            "mask-token-missing", f"mask_hidden is there, but no mask id: write {MASKS[0]}"
        )


def _shapes(
    inspection: Inspection[Reads], sizes: Sizes, layers: int, states: int, width: int
) -> tuple[Shapes, Shapes]:
    config, d = inspection.config, (sizes.width,)
    qwen = "Qwen3" in str(config.get("architectures"))
    biases = {
        "qkv_bias": inspection.reads.attention_bias and bool(config.get("attention_bias")),
        "mlp_bias": inspection.reads.mlp_bias and bool(config.get("mlp_bias")) and not qwen,
    }
    biases["o_bias"] = biases["qkv_bias"] and not qwen
    expected: Shapes = {"norm.weight": d}
    optional: Shapes = {}
    if states:
        expected["fc.weight"] = (sizes.width, states * width)
    for layer in range(layers):
        prefix = f"layers.{layer}."
        expected |= block_shapes(prefix, sizes, reads=None if layer else 2 * sizes.width, **biases)
        expected[f"{prefix}post_attention_layernorm.weight"] = d
        both = ("input_layernorm", "hidden_norm")
        needed = both if not layer else (inspection.reads.later_norm,)
        expected |= {f"{prefix}{name}.weight": d for name in needed}
        optional |= {f"{prefix}{name}.weight": d for name in both}
        if layer and any(
            f"{prefix}{name}.weight" not in inspection.head.tensors for name in needed
        ):
            inspection.add(
                "second-layer-norm",
                f"layer {layer}: vLLM reads input_layernorm there, SGLang hidden_norm; write the "
                "same vector under both names",
            )
        if qwen:
            expected |= {
                f"{prefix}self_attn.{name}.weight": (sizes.head_dim,)
                for name in ("q_norm", "k_norm")
            }
    if config.get("fc_norm"):
        expected |= {f"fc_norm.{j}.weight": (width,) for j in range(states)}
    if config.get("norm_before_fc") or inner(config).get("norm_before_fc"):
        expected["input_norm.weight"] = (states * width,)
    return expected, optional


def _as_named(shapes: Shapes, held: Mapping[str, object]) -> Shapes:
    """The first layer is called midlayer in some files."""
    called = any(name.startswith(NAMED) for name in held)
    return {
        name.replace(FIRST, NAMED, 1) if called else name: shape for name, shape in shapes.items()
    }
