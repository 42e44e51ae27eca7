"""Medusa heads with the eyes of one engine."""

from __future__ import annotations

from typing import Any

import torch

from drafttrain.errors import InputError
from drafttrain.layouts import engines, vocabulary
from drafttrain.layouts.directory import FLOATS, Directory
from drafttrain.layouts.engines import Engine
from drafttrain.layouts.inspection import Inspection, Shapes
from drafttrain.layouts.medusa.facts import BLOCK, PLAIN, Reads, bare, counts
from drafttrain.packaging.checking import some

_TARGET_HEADS = ("lm_head.weight", "model.embed_tokens.weight")


def recognises(head: Directory) -> bool:
    config, given = head.config, head.config.get("architectures")
    said = isinstance(given, list) and any("Medusa" in str(name) for name in given)
    by_config = config.get("model_type") == "medusa" or any(
        key.startswith("medusa_") for key in config
    )
    return (
        said
        or by_config
        or any(
            BLOCK.fullmatch(plain) or PLAIN.fullmatch(plain) for plain in map(bare, head.tensors)
        )
    )


def default_engine(head: Directory) -> Engine | None:
    return engines.MEDUSA if "medusa_num_heads" in head.config else None


def check(inspection: Inspection[Reads]) -> None:
    config, reads, held = inspection.config, inspection.reads, inspection.head.tensors
    inspection.files()
    inspection.plain_weights(config)
    names = {bare(name): name for name in held}
    if reads.sizes_by_config:
        _check_keys(inspection)
        inspection.common_values(config)
    width = inspection.integer(
        config, "hidden_size", None if reads.sizes_by_config else _width(held)
    )
    heads, layers = counts(inspection, names)
    vocab_size = _vocab_size(inspection)
    if width is None or heads is None or layers is None or not held:
        return
    if heads > 64 or layers > 16:
        inspection.add("config-value", f"{heads} heads of {layers} blocks are no Medusa heads")
        return
    plain = any(PLAIN.fullmatch(name) for name in names)
    if reads.plain and not plain:
        inspection.add(
            "medusa-layout",
            "blocks.{j}.layers.{i} are vLLM's names; FasterDecoding's are {j}.{i}.linear",
        )
        return
    inspection.compare(*_shapes(inspection, names, width, heads, layers, vocab_size, plain))
    _check_biases(inspection, names)
    inspection.weights(("token_map",))
    if reads.token_map and "token_map" in held:
        _check_token_map(inspection, vocab_size)
    if reads.one_head and config.get("original_lm_head") and "token_map" not in held:
        inspection.borrowed("lm_head.weight", _TARGET_HEADS, "head", needed=True)
    if plain and layers > 1 and reads.one_block and not inspection.found("tensor-shape"):
        _check_shared(inspection, names, heads, layers)


def _width(held: dict[str, Any]) -> int | None:
    return next(
        (
            entry.shape[0]
            for name, entry in held.items()
            if PLAIN.fullmatch(bare(name)) and entry.shape
        ),
        None,
    )


def _check_keys(inspection: Inspection[Reads]) -> None:
    """What vLLM makes of a config: it renames keys, and falls back to sizes of another model."""
    config = inspection.config
    known = {"num_heads", "num_hidden_layers", "medusa_num_heads", "medusa_num_layers"}
    taken = [
        key
        for key in config
        if "num" in key and ("heads" in key or "layers" in key) and key not in known
    ]
    if taken:
        inspection.add(
            "medusa-renamed-keys",
            f"{some(taken)} in a Medusa config: {inspection.engine.title} takes any key with num "
            "and heads, or num and layers, for the heads' own",
        )
    if "hidden_size" not in config:
        inspection.add(
            "medusa-hidden-size", f"hidden_size is not given: {inspection.engine.title} takes 4096"
        )


def _vocab_size(inspection: Inspection[Reads]) -> int | None:
    config, theirs = inspection.config, inspection.target_config
    own = None if theirs is None else theirs.get("vocab_size")
    if not inspection.reads.sizes_by_config and "vocab_size" not in config:
        return own if type(own) is int else None
    mine = inspection.integer(config, "vocab_size")
    if own is not None and mine is not None and mine != own:
        inspection.add("vocabulary-size", f"vocab_size is {mine}, the target's is {str(own)[:40]}")
    if theirs is not None and config.get("hidden_size", theirs.get("hidden_size")) != theirs.get(
        "hidden_size"
    ):
        inspection.add(
            "width-differs", f"hidden_size is {str(config['hidden_size'])[:40]}, not the target's"
        )
    return mine


def _shapes(
    inspection: Inspection[Reads],
    names: dict[str, str],
    width: int,
    heads: int,
    layers: int,
    vocab_size: int | None,
    plain: bool,
) -> tuple[Shapes, Shapes]:
    """Expected and optional tensors, by the names that they have in this file."""
    config, held, reads = inspection.config, inspection.head.tensors, inspection.reads
    rows = vocab_size
    if config.get("truncated_vocab_size") is not None and reads.token_map:
        rows = inspection.integer(config, "truncated_vocab_size")
        if (
            rows is not None
            and vocab_size is not None
            and rows < vocab_size
            and "token_map" not in held
        ):
            inspection.add(
                "token-map-missing",
                f"drafts from {rows} of {vocab_size} tokens, but has no token_map: "
                f"{inspection.engine.title} stops",
            )
    expected: Shapes = {}
    optional: Shapes = {"token_map": held["token_map"].shape} if "token_map" in held else {}
    for j in range(heads):
        for i in range(layers):
            block = f"{j}.{i}.linear" if plain else f"blocks.{j}.layers.{i}"
            expected[f"{block}.weight"] = (width, width)
            (expected if plain else optional)[f"{block}.bias"] = (width,)
    heads_of = {f"{j}.{layers}.weight" if plain else f"lm_heads.{j}.weight" for j in range(heads)}
    if config.get("original_lm_head") and reads.one_head:
        heads_of = {"lm_head.weight"} if "lm_head.weight" in names else {min(heads_of)}
    elif reads.no_head and not any(name in names for name in heads_of):
        heads_of = set()  # TGI's second version proposes through the target's own head.
    if rows is not None:
        expected |= {name: (rows, width) for name in heads_of}
    return (
        {names.get(n, n): s for n, s in expected.items()},
        {names.get(n, n): s for n, s in optional.items()},
    )


def _check_biases(inspection: Inspection[Reads], names: dict[str, str]) -> None:
    if not inspection.reads.biases_by_flag:
        return
    biases = [name for bare, name in names.items() if bare.endswith(".bias")]
    if inspection.config.get("medusa_fc_bias"):
        if not biases:
            inspection.add(
                "tensor-missing", "medusa_fc_bias is true, but the blocks have no biases"
            )
        return
    kept = [
        name
        for name in biases
        if inspection.head.tensors[name].dtype in FLOATS and bool(inspection.head.read(name).any())
    ]
    if kept:
        inspection.add(
            "medusa-biases-dropped",
            f"{some(kept)}: {inspection.engine.title} drops biases unless medusa_fc_bias is true; "
            "write it",
        )


def _check_token_map(inspection: Inspection[Reads], vocab_size: int | None) -> None:
    if vocab_size is None:
        return
    try:
        ids = vocabulary.read_ids("token_map", inspection.head.read("token_map"), vocab_size)
    except InputError as error:
        inspection.add("token-map-ids", str(error))
        return
    size = inspection.config.get("truncated_vocab_size")
    if len(ids) != size:
        inspection.add(
            "token-map-not-read",
            f"token_map has {len(ids)} ids, truncated_vocab_size is {str(size)[:40]}: "
            f"{inspection.engine.title} reads the map only with that number",
        )
    elif len(ids) < vocab_size:
        inspection.add(
            "token-map-not-loaded",
            f"drafts from {len(ids)} of {vocab_size} tokens by a token_map, at which vLLM 0.32 "
            "stops (weights were not initialized): write heads with a row for every token",
        )


def _check_shared(
    inspection: Inspection[Reads], names: dict[str, str], heads: int, layers: int
) -> None:
    for j in range(heads):
        first = names.get(f"{j}.0.linear.weight")
        for i in range(1, layers):
            other = names.get(f"{j}.{i}.linear.weight")
            if (
                first
                and other
                and not torch.equal(inspection.head.read(first), inspection.head.read(other))
            ):
                inspection.add(
                    "medusa-shared-blocks",
                    f"head {j} has {layers} different blocks: {inspection.engine.title} repeats "
                    "one, the last read",
                )
                return
