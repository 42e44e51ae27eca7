"""EAGLE-3 (arXiv:2503.01840) and P-EAGLE as vLLM and SGLang read them.

x[i] is the residual stream after i of the target's blocks. `eagle_aux_hidden_state_layer_ids`
numbers it i at the top level, where vLLM reads it, and i - 1 inside `eagle_config`, where SGLang
does. Without it both guess x[2], x[N/2], x[N-3].

| tensor                           | shape     | |
| fc.weight                        | (d n·t)   | n captured states of width t |
| midlayer. or layers.0.self_attn. |           | a Llama block that reads 2d: |
|                                  |           | [input_layernorm(E(x)); hidden_norm(feature)] |
| ... hidden_norm, input_layernorm | (d)       | |
| ... post_attention_layernorm     | (d)       | |
| norm.weight                      | (d)       | before the head |
| lm_head.weight                   | (w d)     | w of draft_vocab_size |
| d2t, t2d                         | (w), (v)  | iff w < v |
| embed_tokens.weight              | (v d)     | where d is not t |
| mask_hidden                      | (1 1 n·t) | P-EAGLE |

Read from: vLLM 0.32 model_executor/models/llama_eagle3.py and v1/spec_decode, SGLang 0.5.23
srt/models/llama_eagle3.py and model_runner_components/spec_aux_hidden_state.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from drafttrain.layouts import engines, vocabulary
from drafttrain.layouts.block import Sizes, block_shapes, sizes_of
from drafttrain.layouts.directory import Directory
from drafttrain.layouts.engines import Reading
from drafttrain.layouts.inspection import EMBEDDINGS, Inspection, Shapes
from drafttrain.layouts.layout import Layout
from drafttrain.layouts.masks import MASKS, check_masks

KEY = "eagle_aux_hidden_state_layer_ids"
GUESSED = 3
"""States that an engine captures where nothing is said."""
_MOST_LAYERS = 64


@dataclass(frozen=True, kw_only=True)
class Reads(Reading):
    architectures: tuple[str, ...]
    nested_layers: bool = False
    """Does it read the numbers of captured states inside eagle_config?"""
    sizes_by_config: bool = False
    """Does it size fc by the number of states that config.json says, whatever the file has?"""
    needs_draft_size: bool = False
    """Must draft_vocab_size be there? A head that is not in the file then stays random."""
    passed_over: tuple[str, ...] = ()
    """Settings that change what is computed and that it does not read."""
    query_norms: bool = True
    """Does it have norms of queries and keys?"""
    parallel: bool = True
    """Does it draft in parallel, as P-EAGLE does?"""
    later_norm: str = "input_layernorm"
    """Its name for the norm of the stream in layers after the first."""


READINGS = {
    engines.VLLM: Reads(
        method="eagle3",
        architectures=(
            "LlamaForCausalLMEagle3",
            "Eagle3LlamaForCausalLM",
            "Eagle3Qwen3ForCausalLM",
            "Eagle3DeepseekV2ForCausalLM",
        ),
        sizes_by_config=True,
    ),
    engines.SGLANG: Reads(
        method="EAGLE3",
        architectures=("LlamaForCausalLMEagle3",),
        skips_unknown=True,
        nested_layers=True,
        needs_draft_size=True,
        passed_over=("norm_before_residual",),
        query_norms=False,
        parallel=False,
        later_norm="hidden_norm",
    ),
}


def recognises(head: Directory) -> bool:
    given = head.config.get("architectures")
    said = isinstance(given, list) and any("eagle3" in str(name).lower() for name in given)
    names = {name.removeprefix("model.") for name in head.tensors}
    return said or any(
        name.startswith("midlayer.") or name == "layers.0.hidden_norm.weight" for name in names
    )


def check(inspection: Inspection[Reads], *, complete: bool = False) -> None:
    """Args: complete: is the embedding always part of this layout?"""
    config, held = inspection.config, inspection.head.tensors
    inspection.files()
    inspection.architecture(inspection.reads.architectures)
    inspection.plain_weights(config)
    inspection.common_values(config)
    inspection.untied(config)
    inspection.activation(config)
    inspection.against_target(config, width=config.get("target_hidden_size") is None)
    _check_flags(inspection)
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
    states = _states(inspection, width)
    check_layers(inspection, config.get(KEY), _inner(config).get(KEY), states)
    _check_head(inspection, draft_size, vocab_size)
    vocabulary.check(inspection, vocab_size, draft_size)
    _check_parallel(inspection, states * width, vocab_size)
    expected, optional = _shapes(
        inspection, sizes, min(layers, _MOST_LAYERS), states * width, width
    )
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


# --- captured states ------------------------------------------------------------------------------


def check_layers(inspection: Inspection[Reads], top: Any, nested: Any, states: int) -> None:
    """Which states are captured, in both numberings.

    Args:
        top: numbers as vLLM reads them, x[i] as i; nested: as SGLang does, x[i] as i - 1; None
            where not given.
        states: how many the head's file was made for.
    """
    lists = {"top": top, "nested": nested}
    for name, found in lists.items():
        if found is not None and not (
            isinstance(found, list) and found and all(type(i) is int for i in found)
        ):
            inspection.add(
                "layers-value", f"{KEY} ({name}) is {str(found)[:60]}, needs a list of integers"
            )
            return
    if top is None and nested is None:
        inspection.add(
            "layers-missing",
            f"{KEY} is not given: engines capture x[2], x[N/2], x[N-3], whatever the head was "
            "trained on; write it at the top level and, one lower, in eagle_config",
            fatal=False,  # the states that its authors' code captures
        )
        return
    if top is None or nested is None:
        read = "nested" if inspection.reads.nested_layers else "top"
        other = "at the top level, one higher" if top is None else "in eagle_config, one lower"
        inspection.add(
            "layers-one-convention",
            f"{KEY} is given in one place only: write it {other} as well, which is where "
            f"{'vLLM' if top is None else 'SGLang'} reads it",
            fatal=lists[read] is None,
        )
    elif nested != [i - 1 for i in top]:
        inspection.add(
            "layers-conventions-disagree",
            f"{KEY} is {top} at the top level, {nested} in eagle_config: needs one lower",
        )
    given = top if top is not None else [i + 1 for i in nested]
    if any(b <= a for a, b in pairwise(given)):
        inspection.add(
            "layers-not-ascending",
            f"{given}: engines concatenate states in ascending order whatever is given here",
        )
    theirs = inspection.target_config
    count = theirs.get("num_hidden_layers") if theirs is not None else None
    if min(given) < 0 or (type(count) is int and max(given) > count):
        inspection.add(
            "layers-out-of-range",
            f"{given}: the target has x[0] to x[{count if type(count) is int else 'N'}]",
        )
    if len(given) != states:
        inspection.add("layers-count", f"{len(given)} states are named, fc reads {states}")


def _states(inspection: Inspection[Reads], width: int) -> int:
    """How many states fc reads, by its file; and whether vLLM sizes it so."""
    config, entry = inspection.config, inspection.head.tensors.get("fc.weight")
    inner = _inner(config).get(KEY)
    said = (
        config.get("num_aux_hidden_states")
        or (len(inner) if isinstance(inner, list) else None)
        or GUESSED
    )
    if entry is None or len(entry.shape) != 2 or entry.shape[1] % width:
        return said if type(said) is int and 0 < said < _MOST_LAYERS else GUESSED
    found = entry.shape[1] // width
    if found != said:
        inspection.add(
            "states-count",
            f"fc reads {found} states, {inspection.engine} makes it for {said}: write "
            f"num_aux_hidden_states: {found}",
            fatal=inspection.reads.sizes_by_config,
        )
    return found


def _inner(config: dict[str, Any]) -> dict[str, Any]:
    found = config.get("eagle_config")
    return found if isinstance(found, dict) else {}


# --- the rest -------------------------------------------------------------------------------------


def _check_flags(inspection: Inspection[Reads]) -> None:
    config = inspection.config
    if "target_hidden_size" in config and config["target_hidden_size"] is None:
        inspection.add(
            "target-hidden-size-null", "target_hidden_size is null: vLLM fails at it; leave it out"
        )
    title = inspection.engine.title
    for key in inspection.reads.passed_over:
        if config.get(key):
            inspection.add(
                "flag-not-read", f"{key} is true, which {title} does not read; serve with vLLM"
            )
    if not inspection.reads.query_norms and (
        "Qwen3" in str(config.get("architectures"))
        or any("q_norm" in name for name in inspection.head.tensors)
    ):
        inspection.add(
            "flag-not-read",
            f"queries and keys have norms, which {title}'s EAGLE-3 does not; serve with vLLM",
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
    inspection: Inspection[Reads], sizes: Sizes, layers: int, reads: int, width: int
) -> tuple[Shapes, Shapes]:
    config, d = inspection.config, (sizes.width,)
    qwen = "Qwen3" in str(config.get("architectures"))
    expected: Shapes = {"fc.weight": (sizes.width, reads), "norm.weight": d}
    optional: Shapes = {}
    for layer in range(layers):
        prefix = f"layers.{layer}."
        expected |= block_shapes(prefix, sizes, reads=2 * sizes.width if not layer else None)
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
        expected |= {f"fc_norm.{j}.weight": (width,) for j in range(reads // width)}
    if config.get("norm_before_fc") or _inner(config).get("norm_before_fc"):
        expected["input_norm.weight"] = (reads,)
    return expected, optional


def _as_named(shapes: Shapes, held: dict[str, Any]) -> Shapes:
    """The first layer is called midlayer in some files."""
    called = any(name.startswith("midlayer.") for name in held)
    return {
        name.replace("layers.0.", "midlayer.", 1) if called else name: shape
        for name, shape in shapes.items()
    }


LAYOUT = Layout(
    name="eagle3",
    what="EAGLE-3 heads",
    turn=40,
    readings=READINGS,
    recognises=recognises,
    check=check,
)
