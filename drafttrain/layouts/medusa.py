"""Medusa's heads (arXiv:2401.10774) as vLLM reads them, and as FasterDecoding's code, TGI and
TensorRT-LLM do.

| vLLM                         | FasterDecoding           | shape | |
| blocks.{j}.layers.{i}.weight | {j}.{i}.linear.weight    | (d d) | residual blocks of head j = 0.. |
| blocks.{j}.layers.{i}.bias   | {j}.{i}.linear.bias      | (d)   | read by vLLM with medusa_fc_bias alone |
| lm_heads.{j}.weight          | {j}.{L}.weight           | (v d) | or one lm_head.weight with original_lm_head, vLLM alone |
| token_map                    | -                        | (w)   | int64 ids of a reduced vocabulary; not written |

Head j guesses x_{t+2+j} from h_t. FasterDecoding's code makes all blocks of a head one shared
module. vLLM renames every key of a config that holds "num" with "heads" or "layers"; it has code
for a token_map, but its loader stops at one, which it takes for a weight that the file lacks. Read
from: vLLM 0.32 model_executor/models/medusa.py and transformers_utils/configs/medusa.py,
FasterDecoding/Medusa medusa/model/medusa_model.py, TensorRT-LLM's load_medusa_hf.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafter.medusa import Medusa
from drafttrain.errors import InputError
from drafttrain.layouts import vocabulary
from drafttrain.layouts.directory import FLOATS, Directory
from drafttrain.layouts.inspection import Inspection, Shapes, alike
from drafttrain.layouts.writing import Exported, Source, stored, vllm_command
from drafttrain.packaging.checking import some
from drafttrain.target.model import Target
from drafttrain.target.naming import public

ENGINES = ("vllm", "medusa")
FILE = "medusa_lm_head.safetensors"
_PLAIN = re.compile(r"(\d{1,3})\.(\d{1,2})\.linear\.(weight|bias)")
_PLAIN_HEAD = re.compile(r"(\d{1,3})\.(\d{1,2})\.weight")
_BLOCK = re.compile(r"blocks\.(\d{1,3})\.layers\.(\d{1,2})\.(weight|bias)")
_HEAD = re.compile(r"lm_heads\.(\d{1,3})\.weight")
_TARGET_HEADS = ("lm_head.weight", "model.embed_tokens.weight")


# --- writing --------------------------------------------------------------------------------------


def write(source: Source) -> Exported:
    """Raises: InputError for heads that this layout cannot hold."""
    drafter, target, engine = source.drafter, source.target, source.engine
    assert isinstance(drafter, Medusa)
    if getattr(target.output, "bias", None) is not None:
        raise InputError(
            f"to={engine}: the head of target {target.name} has a bias, which no engine's Medusa "
            f"heads have"
        )
    source.kept_ids(holds=False, why="no engine loads Medusa heads that speak a reduced vocabulary")
    if drafter.projections is not None and source.draft_ids is not None:
        raise InputError(
            f"to={engine}: these heads learned {len(source.draft_ids)} of {target.vocab_size} "
            f"tokens and have no rows for the "
            "others, and no engine loads a reduced vocabulary: train with draft_vocab=0, or with "
            "drafter.own_head=false, which "
            "speaks with the target's rows"
        )
    blocks = _blocks(drafter)
    word = str(source.dtype).removeprefix("torch.")
    config = {
        "hidden_size": target.width,
        "medusa_fc_bias": True,
        "dtype": word,
        "torch_dtype": word,
    }
    notes: tuple[str, ...] = ()
    if source.draft_ids is not None:
        notes = (
            f"the package drafts from {len(source.draft_ids)} tokens, these heads from all: they "
            f"may propose others too",
        )
    if engine == "vllm":
        tensors = {
            f"blocks.{j}.layers.{i}.{part}": tensor for (j, i, part), tensor in blocks.items()
        }
        tensors |= _vllm_heads(drafter, target)
        config |= {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "num_heads": drafter.count,
            "num_hidden_layers": drafter.blocks,
            "vocab_size": target.vocab_size,
            "original_lm_head": drafter.projections is None,
        }
        command = vllm_command("medusa", min(source.tokens, drafter.count))
        return Exported(config, stored(tensors, source.dtype), command, notes=notes)
    _refuse_shared_blocks(drafter, blocks)
    tensors = {f"{j}.{i}.linear.{part}": tensor for (j, i, part), tensor in blocks.items()}
    for j in range(drafter.count):
        own = drafter.projections
        tensors[f"{j}.{drafter.blocks}.weight"] = target.output.weight if own is None else own[j]
    config |= {
        "medusa_num_heads": drafter.count,
        "medusa_num_layers": drafter.blocks,
        "base_model_name_or_path": public(target.name),
        "vocab_size": target.vocab_size,
    }
    notes += (
        "FasterDecoding's own code reads a pickle, which is not written here; make it in the "
        'directory once: python -c "'
        f"import torch; from safetensors.torch import load_file; torch.save(load_file('{FILE}'), "
        f"'medusa_lm_head.pt')\"",
    )
    command = "text-generation-launcher --model-id {out}  # TensorRT-LLM converts the directory by its examples/medusa"
    return Exported(config, stored(tensors, source.dtype), command, file=FILE, notes=notes)


def _blocks(drafter: Medusa) -> dict[tuple[int, int, str], Tensor]:
    """{(head, block, weight or bias): tensor}, both counted from 0."""
    heads: Any = drafter.heads
    found = {}
    for j, head in enumerate(heads):
        for i, block in enumerate(head):
            found[j, i, "weight"], found[j, i, "bias"] = block.linear.weight, block.linear.bias
    return found


def _vllm_heads(drafter: Medusa, target: Target) -> dict[str, Tensor]:
    if drafter.projections is not None:
        return {f"lm_heads.{j}.weight": weight for j, weight in enumerate(drafter.projections)}
    return {"lm_head.weight": target.output.weight}


def _refuse_shared_blocks(drafter: Medusa, blocks: dict[tuple[int, int, str], Tensor]) -> None:
    for (j, i, part), tensor in blocks.items():
        if i and not torch.equal(tensor, blocks[j, 0, part]):
            raise InputError(
                f"to=medusa: each head has {drafter.blocks} blocks of its own, FasterDecoding's "
                f"code repeats one: give to=vllm"
            )


# --- checking -------------------------------------------------------------------------------------


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
            _BLOCK.fullmatch(plain) or _PLAIN.fullmatch(plain) for plain in map(_bare, head.tensors)
        )
    )


def default_engine(head: Directory) -> str:
    return "medusa" if "medusa_num_heads" in head.config else "vllm"


def check(inspection: Inspection) -> None:
    config, engine, held = inspection.config, inspection.engine, inspection.head.tensors
    inspection.files()
    inspection.plain_weights(config)
    names = {_bare(name): name for name in held}
    if engine == "vllm":
        _check_keys(inspection)
        inspection.common_values(config)
    width = (
        inspection.integer(config, "hidden_size")
        if engine == "vllm"
        else inspection.integer(config, "hidden_size", _width(held))
    )
    heads, layers = _counts(inspection)
    vocab_size = _vocab_size(inspection)
    if width is None or heads is None or layers is None or not held:
        return
    if heads > 64 or layers > 16:
        inspection.add("config-value", f"{heads} heads of {layers} blocks are no Medusa heads")
        return
    plain = any(_PLAIN.fullmatch(name) for name in names)
    if engine == "medusa" and not plain:
        inspection.add(
            "medusa-layout",
            "blocks.{j}.layers.{i} are vLLM's names; FasterDecoding's are {j}.{i}.linear",
        )
        return
    inspection.compare(
        *_shapes(inspection, names, width, heads, layers, vocab_size, plain), skips_unknown=True
    )
    _check_biases(inspection, names)
    inspection.weights(("token_map",))
    if engine == "vllm" and "token_map" in held:
        _check_token_map(inspection, vocab_size)
    if engine == "vllm" and config.get("original_lm_head") and "token_map" not in held:
        inspection.borrowed("lm_head.weight", _TARGET_HEADS, "head", needed=True)
    if plain and layers > 1 and engine == "medusa" and not inspection.found("tensor-shape"):
        _check_shared(inspection, names, heads, layers)


def _bare(name: str) -> str:
    return name.replace("medusa_heads.", "").replace("medusa_head.", "")


def _width(held: dict[str, Any]) -> int | None:
    return next(
        (
            entry.shape[0]
            for name, entry in held.items()
            if _PLAIN.fullmatch(_bare(name)) and entry.shape
        ),
        None,
    )


def _check_keys(inspection: Inspection) -> None:
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
            f"{some(taken)} in a Medusa config: vLLM takes any key with num and heads, or num and "
            f"layers, for the heads' own",
        )
    if "hidden_size" not in config:
        inspection.add("medusa-hidden-size", "hidden_size is not given: vLLM takes 4096")


def _counts(inspection: Inspection) -> tuple[int | None, int | None]:
    config = inspection.config
    heads = "num_heads" if "num_heads" in config else "medusa_num_heads"
    layers = (
        "num_hidden_layers"
        if "num_hidden_layers" in config and heads == "num_heads"
        else "medusa_num_layers"
    )
    return inspection.integer(config, heads), inspection.integer(config, layers, 1)


def _vocab_size(inspection: Inspection) -> int | None:
    config, theirs = inspection.config, inspection.target_config
    own = None if theirs is None else theirs.get("vocab_size")
    if inspection.engine == "medusa" and "vocab_size" not in config:
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
    inspection: Inspection,
    names: dict[str, str],
    width: int,
    heads: int,
    layers: int,
    vocab_size: int | None,
    plain: bool,
) -> tuple[Shapes, Shapes]:
    """Expected and optional tensors, by the names that they have in this file."""
    config, held = inspection.config, inspection.head.tensors
    rows = vocab_size
    if config.get("truncated_vocab_size") is not None and inspection.engine == "vllm":
        rows = inspection.integer(config, "truncated_vocab_size")
        if (
            rows is not None
            and vocab_size is not None
            and rows < vocab_size
            and "token_map" not in held
        ):
            inspection.add(
                "token-map-missing",
                f"drafts from {rows} of {vocab_size} tokens, but has no token_map: vLLM stops",
            )
    expected: Shapes = {}
    optional: Shapes = {"token_map": held["token_map"].shape} if "token_map" in held else {}
    for j in range(heads):
        for i in range(layers):
            block = f"{j}.{i}.linear" if plain else f"blocks.{j}.layers.{i}"
            expected[f"{block}.weight"] = (width, width)
            (expected if plain else optional)[f"{block}.bias"] = (width,)
    heads_of = {f"{j}.{layers}.weight" if plain else f"lm_heads.{j}.weight" for j in range(heads)}
    if config.get("original_lm_head") and inspection.engine == "vllm":
        heads_of = {"lm_head.weight"} if "lm_head.weight" in names else {min(heads_of)}
    elif inspection.engine == "medusa" and not any(name in names for name in heads_of):
        heads_of = set()  # TGI's second version speaks through the target's own head.
    if rows is not None:
        expected |= {name: (rows, width) for name in heads_of}
    return (
        {names.get(n, n): s for n, s in expected.items()},
        {names.get(n, n): s for n, s in optional.items()},
    )


def _check_biases(inspection: Inspection, names: dict[str, str]) -> None:
    if inspection.engine != "vllm":
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
            f"{some(kept)}: vLLM drops biases unless medusa_fc_bias is true; write it",
        )


def _check_token_map(inspection: Inspection, vocab_size: int | None) -> None:
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
            f"token_map has {len(ids)} ids, truncated_vocab_size is {str(size)[:40]}: vLLM reads "
            f"the map only with that number",
        )
    elif len(ids) < vocab_size:
        inspection.add(
            "token-map-not-loaded",
            f"drafts from {len(ids)} of {vocab_size} tokens by a token_map, at which vLLM 0.32 "
            f"stops (weights were not "
            "initialized): write heads with a row for every token",
        )


def _check_shared(inspection: Inspection, names: dict[str, str], heads: int, layers: int) -> None:
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
                    f"head {j} has {layers} different blocks: FasterDecoding's code repeats one, "
                    f"the last read",
                )
                return


# --- reading --------------------------------------------------------------------------------------


def read(head: Directory, target: Target, known: dict[str, Any]) -> Medusa:
    """The drafter of foreign heads, in either engine's names. Heads that speak with the target's
    own rows borrow them.

    Args:
        known: settings of the drafter that a directory of drafttrain's tells; ids of a reduced
            vocabulary among them are those of heads that borrow, where the layout has no place for
            them.
    Raises: InputError.
    """
    names = {_bare(name): name for name in head.tensors}
    found = [match for name in names if (match := _BLOCK.fullmatch(name) or _PLAIN.fullmatch(name))]
    if not found:
        raise InputError(
            f"{head.path} holds no Medusa blocks: blocks.0.layers.0.weight or 0.0.linear.weight"
        )
    plain = found[0].re is _PLAIN
    count, blocks = (1 + max(int(match[place]) for match in found) for place in (1, 2))
    width = target.width
    ids, order = _ids(head, target)
    rows = target.vocab_size if ids is None else len(ids)
    named, state = {"token_map", *vocabulary.MAPS}, {}
    for j in range(count):
        for i in range(blocks):
            block = f"{j}.{i}.linear" if plain else f"blocks.{j}.layers.{i}"
            named |= {f"{block}.weight", f"{block}.bias"}
            state[f"heads.{j}.{i}.linear.weight"] = head.weight(
                names.get(f"{block}.weight", f"{block}.weight"), (width, width)
            )
            bias = names.get(f"{block}.bias")
            state[f"heads.{j}.{i}.linear.bias"] = (
                torch.zeros(width) if bias is None else head.weight(bias, (width,))
            )
    speak, there = _heads(head, names, count, blocks, plain)
    odd = sorted(names.keys() - named - there)
    if odd:
        raise InputError(
            f"{head.path} holds {some(odd)}, which no Medusa head of {count} heads with {blocks} "
            f"blocks has"
        )
    projections = [head.weight(name, (rows, width))[order] for name in speak]
    borrowed = all(alike(head.read(name)[order], _rows(target, ids)) for name in speak)
    own = known.get("own_head", not borrowed)
    if own and not speak:
        raise InputError(f"{head.path} holds no projections, but its drafter has some of its own")
    if not own and not borrowed:
        raise InputError(
            f"{head.path} holds projections that are not the target's, but its drafter borrows the "
            f"target's"
        )
    kept = known.get("draft_ids") if ids is None and not own else ids
    drafter = Medusa(
        target, **{**known, "heads": count, "blocks": blocks, "own_head": own, "draft_ids": kept}
    )
    if own:
        every = projections * (count if len(projections) == 1 else 1)
        state |= {f"projections.{j}": weight for j, weight in enumerate(every)}
    drafter.load_state_dict(state, strict=False)  # draft_ids, where there are any, are set already.
    return drafter.eval()


def _ids(head: Directory, target: Target) -> tuple[Tensor | None, Tensor]:
    """(w) ids of a token map, or of speculators' d2t, ascending, and (w) the order in which a
    head's rows are taken for them."""
    if "token_map" in head.tensors:
        ids = vocabulary.read_ids(
            f"{head.path}: token_map", head.read("token_map"), target.vocab_size
        )
    elif "d2t" in head.tensors and len(head.tensors["d2t"].shape) == 1:
        offsets = head.read("d2t")
        ids = vocabulary.read_ids(
            f"{head.path}: d2t", vocabulary.ids_of(offsets), target.vocab_size
        )
    else:
        return None, torch.arange(target.vocab_size)
    return ids.sort().values, ids.argsort()


def _heads(
    head: Directory, names: dict[str, str], count: int, blocks: int, plain: bool
) -> tuple[list[str], set[str]]:
    """Names in the file of each head's projection, none where all borrow the target's; and these
    names without a prefix."""
    every = [f"{j}.{blocks}.weight" if plain else f"lm_heads.{j}.weight" for j in range(count)]
    there = [name for name in (*every, "lm_head.weight") if name in names]
    if "lm_head.weight" in there or (head.config.get("original_lm_head") and there):
        shared = "lm_head.weight" if "lm_head.weight" in there else there[0]
        return [names[shared]], set(there)
    if there and len(there) < count:
        raise InputError(f"{head.path} has projections for {len(there)} of {count} heads")
    return [names[name] for name in there], set(there)


def _rows(target: Target, ids: Tensor | None) -> Tensor:
    weight: Tensor = target.output.weight
    return weight if ids is None else weight[ids.to(weight.device)]
