"""DFlash and DSpark as vLLM, SGLang and transformers read them: a block of places drafted at once.

`target_layer_ids` numbers the residual stream after block i as i. Layers of the kind
sliding_attention are causal by default.

| tensor                           | shape        | |
| fc.weight                        | (d n·t)      | encoder.fc in transformers' own layout |
| hidden_norm.weight               | (d)          | encoder.output_norm_enc there |
| norm.weight                      | (d)          | |
| layers.i.                        |              | a Llama block with input and post-attention |
|                                  |              | norms and q_norm, k_norm (e) |
| lm_head.weight, d2t, t2d         |              | iff the draft vocabulary is reduced; only vLLM |
| markov_head.markov_w1, markov_w2 | (v r), (w r) | DSpark |

Read from: vLLM 0.32 model_executor/models/{qwen3_dflash,qwen3_dspark}.py, SGLang 0.5.23
srt/models/{dflash,dspark}.py, transformers 5.24 models/muse_glimmer_assistant.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from drafttrain.layouts import engines, vocabulary
from drafttrain.layouts.block import Sizes, block_shapes, sizes_of
from drafttrain.layouts.directory import Directory
from drafttrain.layouts.engines import Engine, Reading
from drafttrain.layouts.inspection import EMBEDDINGS, Inspection, Shapes
from drafttrain.layouts.layout import Layout
from drafttrain.layouts.masks import check_masks

NATIVE = "muse_glimmer_assistant"
"""transformers' model type of such a drafter."""
_NATIVE_NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
_MOST_LAYERS = 64


@dataclass(frozen=True, kw_only=True)
class Reads(Reading):
    native_only: bool = False
    """Does it load only transformers' own layout?"""
    sparks: tuple[str, ...] = ("Qwen3DSparkModel",)
    """Its architectures of DSpark."""
    guesses_vocabulary: bool = False
    """Does it take another model's vocabulary size where transformers' layout gives none?"""
    draft_vocabulary: bool = False
    """Does it read a reduced vocabulary?"""
    counts_target: bool = False
    """Does it need num_target_layers?"""
    markov: tuple[str, ...] | None = None
    """Kinds of Markov heads that it runs; None: all, by a markov_head_type that must be given."""
    second_runner: bool = False
    """Does only its second model runner serve DSpark?"""


READINGS = {
    engines.VLLM: Reads(
        method="dflash",
        guesses_vocabulary=True,
        draft_vocabulary=True,
        markov=("vanilla",),
        second_runner=True,
    ),
    engines.SGLANG: Reads(
        method="DFLASH",
        skips_unknown=True,
        sparks=("Qwen3DSparkModel", "DSparkDraftModel"),
        counts_target=True,
    ),
    engines.HF: Reads(skips_unknown=True, native_only=True),
}


def recognises(head: Directory) -> bool:
    given = str(head.config.get("architectures")).lower()
    # A parallel draft model may have a dflash_config too, for its mask id.
    said = "dflash_config" in head.config and "fc.weight" in head.tensors
    return said or "dflash" in given or "dspark" in given or head.config.get("model_type") == NATIVE


def default_engine(head: Directory) -> Engine | None:
    return engines.HF if head.config.get("model_type") == NATIVE else None


def check(inspection: Inspection[Reads], *, spark: bool | None = None) -> None:
    """Args: spark: is it DSpark? None asks the directory."""
    config, held, reads = inspection.config, inspection.head.tensors, inspection.reads
    spark = "dspark" in str(config.get("architectures")).lower() if spark is None else spark
    native = config.get("model_type") == NATIVE
    inspection.files()
    _check_kind(inspection, spark, native)
    inspection.plain_weights(config)
    inspection.common_values(config)
    inspection.untied(config)
    if native and "vocab_size" not in config:
        inspection.add(
            "config-key-missing",
            "vocab_size is not given: vLLM takes another model's",
            fatal=reads.guesses_vocabulary,
        )
    else:
        inspection.against_target(config, width=config.get("target_hidden_size") is None)
    sizes, layers = sizes_of(config, inspection), inspection.integer(config, "num_hidden_layers")
    vocab_size = inspection.integer(config, "vocab_size") if "vocab_size" in config else None
    inner = config.get("dflash_config")
    inner = inner if isinstance(inner, dict) else {}
    _check_mask(inspection, inner, vocab_size)
    _check_causal(inspection, inner, layers)
    if config.get("block_size", inner.get("block_size")) is None:
        inspection.add("block-size-missing", "block_size is not given: SGLang takes 16")
    ids = config.get("target_layer_ids", inner.get("target_layer_ids"))
    _check_layers(inspection, ids, -1 if spark else 0)
    if sizes is None or layers is None or not held or not isinstance(ids, list) or not ids:
        return
    draft_size = vocabulary.draft_size_of(config, inspection, vocab_size)
    vocabulary.check(inspection, vocab_size, draft_size, read=reads.draft_vocabulary)
    if reads.draft_vocabulary and draft_size != vocab_size and "lm_head.weight" not in held:
        inspection.add(
            "head-missing",
            f"drafts from {draft_size} of {vocab_size} tokens, but lm_head.weight is not there",
        )
    width = config.get("target_hidden_size")
    into = len(ids) * (width if type(width) is int and width > 0 else sizes.width)
    expected, optional = _shapes(sizes, min(layers, _MOST_LAYERS), into)
    rows = {"lm_head.weight": draft_size, "embed_tokens.weight": vocab_size}
    optional |= {
        name: (size or held[name].shape[0], sizes.width)
        for name, size in rows.items()
        if name in held
    }
    optional |= {name: held[name].shape for name in vocabulary.MAPS if name in held}
    if spark:
        more, may = _markov(inspection, sizes, vocab_size, draft_size)
        expected, optional = expected | more, optional | may
    inspection.compare(_as_named(expected, native), _as_named(optional, native))
    inspection.weights(vocabulary.MAPS)
    inspection.borrowed("embed_tokens.weight", EMBEDDINGS, "embedding", needed=spark)


def _check_kind(inspection: Inspection[Reads], spark: bool, native: bool) -> None:
    reads, config = inspection.reads, inspection.config
    if reads.native_only:
        if not native:
            inspection.add(
                "architecture", f"transformers loads such a drafter only as model_type {NATIVE}"
            )
        return
    if native:
        return
    inspection.architecture(reads.sparks if spark else ("DFlashDraftModel",))
    if config.get("model_type") != "qwen3":
        inspection.add(
            "model-type",
            f"model_type is {str(config.get('model_type'))[:40]}: needs qwen3 whatever the target "
            "is",
        )
    if reads.counts_target and type(config.get("num_target_layers")) is not int:
        inspection.missing("num_target_layers")


def _check_mask(
    inspection: Inspection[Reads], inner: dict[str, Any], vocab_size: int | None
) -> None:
    config = inspection.config
    if inner.get("mask_token_id") is None and config.get("mask_token_id") is None:
        inspection.add(
            "mask-token-missing",
            "mask_token_id is given neither in dflash_config nor at the top level",
        )
        return
    check_masks(inspection, vocab_size)


def _check_causal(inspection: Inspection[Reads], inner: dict[str, Any], layers: int | None) -> None:
    config = inspection.config
    kinds = config.get("layer_types")
    said = inner.get("causal") is not None or config.get("is_causal") is not None
    if config.get("model_type") == NATIVE and kinds is None:
        inspection.add(
            "layer-types-missing",
            "layer_types is not given: transformers takes sliding_attention for all layers",
        )
    elif isinstance(kinds, list):
        if layers is not None and len(kinds) != layers:
            inspection.add(
                "layer-types-missing", f"layer_types names {len(kinds)} of {layers} layers"
            )
        if "sliding_attention" in kinds and not said:
            inspection.add(
                "dflash-causal",
                "layers of sliding_attention are causal by default, which a block drafted at "
                "once is not: write causal: false in dflash_config, or true if it was trained so",
            )


def _check_layers(inspection: Inspection[Reads], ids: Any, least: int) -> None:
    if not (isinstance(ids, list) and ids and all(type(i) is int for i in ids)):
        inspection.add(
            "layers-missing",
            f"target_layer_ids is {str(ids)[:60]}: needs the numbers of the captured blocks",
        )
        return
    if any(b <= a for a, b in pairwise(ids)):
        inspection.add(
            "layers-not-ascending",
            f"{ids}: engines concatenate states in ascending order whatever is given here",
        )
    theirs = inspection.target_config
    count = (
        theirs.get("num_hidden_layers")
        if theirs is not None
        else inspection.config.get("num_target_layers")
    )
    if min(ids) < least or (type(count) is int and max(ids) >= count):
        last = count - 1 if type(count) is int else "N-1"
        inspection.add("layers-out-of-range", f"{ids}: the target's blocks are {least} to {last}")


def _shapes(sizes: Sizes, layers: int, reads: int) -> tuple[Shapes, Shapes]:
    d = (sizes.width,)
    expected: Shapes = {
        "fc.weight": (sizes.width, reads),
        "hidden_norm.weight": d,
        "norm.weight": d,
    }
    for layer in range(layers):
        prefix = f"layers.{layer}."
        expected |= block_shapes(prefix, sizes)
        expected |= {
            f"{prefix}{name}.weight": d for name in ("input_layernorm", "post_attention_layernorm")
        }
        expected |= {
            f"{prefix}self_attn.{name}.weight": (sizes.head_dim,) for name in ("q_norm", "k_norm")
        }
    return expected, {}


def _markov(
    inspection: Inspection[Reads], sizes: Sizes, vocab_size: int | None, draft_size: int | None
) -> tuple[Shapes, Shapes]:
    config, held, reads = inspection.config, inspection.head.tensors, inspection.reads
    rank, kind = (
        inspection.integer(config, "markov_rank"),
        config.get("markov_head_type", "vanilla"),
    )
    if reads.markov is not None:
        if kind not in reads.markov:
            inspection.add(
                "flag-not-read",
                f"markov_head_type is {str(kind)[:40]}, {inspection.engine.title} runs only "
                f"{', '.join(reads.markov)}; serve with SGLang",
            )
    elif "markov_head_type" not in config:
        inspection.missing("markov_head_type")
    if reads.second_runner:
        inspection.add(
            "runner",
            f"{inspection.engine.title} serves DSpark only by its second model runner, which "
            "needs Triton",
            fatal=False,
        )
    if any(name.startswith(("markov_w1", "markov_w2", "confidence_proj")) for name in held):
        inspection.add(
            "dspark-head-names",
            "ModelOpt's names: engines look for markov_head.markov_w1 and confidence_head.proj",
        )
    if rank is None or vocab_size is None or draft_size is None:
        return {}, {}
    expected: Shapes = {
        "markov_head.markov_w1.weight": (vocab_size, rank),
        "markov_head.markov_w2.weight": (draft_size, rank),
    }
    h = sizes.width
    more = {
        "gated": ("gate_proj", (rank, h + rank)),
        "rnn": ("joint_proj", (3 * rank, 2 * rank + h)),
    }.get(str(kind))
    if more:
        expected |= {
            f"markov_head.{more[0]}.weight": more[1],
            f"markov_head.{more[0]}.bias": (more[1][0],),
        }
    if config.get("enable_confidence_head"):
        into = h + rank if config.get("confidence_head_with_markov") else h
        expected |= {"confidence_head.proj.weight": (1, into), "confidence_head.proj.bias": (1,)}
    return expected, {}


def _as_named(shapes: Shapes, native: bool) -> Shapes:
    found = {}
    for name, shape in shapes.items():
        for theirs, plain in _NATIVE_NAMES.items():
            if native and name.startswith(plain):
                name = theirs + name.removeprefix(plain)
                break
        found[name] = shape
    return found


LAYOUT = Layout(
    name="dflash",
    what="DFlash and DSpark heads",
    turn=30,
    readings=READINGS,
    recognises=recognises,
    check=check,
    default_engine=default_engine,
)
