"""A draft model: a directory of transformers, which vLLM (`draft_model`), SGLang (STANDALONE) and
transformers (`assistant_model`) load alike. It shares the target's vocabulary, id for id; it may be
of any family, with tied embeddings.

PARD's parallel draft models are the same with a mask id. Read from: vLLM 0.32
config/speculative.py, SGLang 0.5.23 srt/speculative/, transformers 5.24
generation/candidate_generator.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafter.ssm import Ssm
from drafttrain.errors import first_line
from drafttrain.layouts import engines, rope
from drafttrain.layouts.directory import FLOATS, Directory
from drafttrain.layouts.engines import Reading
from drafttrain.layouts.inspection import Inspection, Shapes, refuse
from drafttrain.layouts.layout import Layout
from drafttrain.layouts.masks import check_masks
from drafttrain.layouts.writing import Exported, Source, stored
from drafttrain.packaging.checking import read_json
from drafttrain.target.model import Target
from drafttrain.wiring.defaults import with_defaults

READINGS = {
    engines.VLLM: Reading(method="draft_model"),
    engines.SGLANG: Reading(method="STANDALONE", settings={"speculative-eagle-topk": 1}),
    engines.HF: Reading(method="assistant_model", skips_unknown=True),
}
_LEFT_OUT = ("_name_or_path", "transformers_version", "auto_map", "dtype", "torch_dtype")
_LARGEST_TOKENIZER = 64 << 20
_MOST_LAYERS = 1024
_QUANTISED = ("scale", "qweight", "qzeros", "absmax", "weight_packed")


# --- writing --------------------------------------------------------------------------------------


def write(source: Source[Reading]) -> Exported:
    drafter, target = source.drafter, source.target
    assert isinstance(drafter, Ssm)
    source.kept_ids(holds=False, why="a draft model proposes from the target's full vocabulary")
    network, tensors = drafter.standalone()
    config = {
        k: v
        for k, v in json.loads(network.to_json_string(use_diff=False)).items()
        if k not in _LEFT_OUT
    }
    if (
        isinstance(parameters := config.get("rope_parameters"), Mapping)
        and "rope_theta" in parameters
    ):
        config |= rope.both_spellings(network)
    word = str(source.dtype).removeprefix("torch.")
    notes = []
    if source.draft_ids is not None and source.vocabulary == "auto":
        notes.append(
            f"the package drafts from {len(source.draft_ids)} tokens, this model from all: it may "
            "propose others too"
        )
    if target.tokenizer is None:
        notes.append("the target has no tokenizer, so none was written")
    return Exported(
        config={**config, "dtype": word, "torch_dtype": word},
        tensors=stored(tensors, source.dtype),
        command=source.command(),
        tokenizer=True,
        notes=tuple(notes),
    )


# --- checking -------------------------------------------------------------------------------------


def recognises(head: Directory) -> bool:
    given = head.config.get("architectures")
    said = isinstance(given, list) and any(
        str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in given
    )
    return said or any(name.endswith("embed_tokens.weight") for name in head.tensors)


def check(inspection: Inspection[Reading]) -> None:
    config, held = inspection.config, inspection.head.tensors
    inspection.files()
    inspection.common_values(config)
    if config.get("auto_map"):
        inspection.add(
            "remote-code",
            "auto_map names Python code of its own: engines run it, or refuse",
            fatal=False,
        )
    _check_quantisation(inspection)
    vocab_size = inspection.integer(config, "vocab_size")
    _check_vocabulary(inspection, vocab_size)
    check_masks(inspection, vocab_size)
    if "rope_theta" in config or _of(config.get("rope_parameters"), "rope_theta") is not None:
        inspection.findings += rope.faults(config, None, inspection.engine)
    if not held:
        return
    expected, optional = _shapes(inspection)
    if expected:
        inspection.compare(expected, optional)
    inspection.weights(
        name
        for name, entry in held.items()
        if entry.dtype not in FLOATS and config.get("quantization_config")
    )


def _of(found: Any, key: str) -> Any:
    return found.get(key) if isinstance(found, Mapping) else None


def _check_quantisation(inspection: Inspection[Reading]) -> None:
    """A config may promise quantised weights only where the files hold some."""
    entries = inspection.head.tensors
    plain = all(entry.dtype in FLOATS for entry in entries.values()) and not any(
        name.endswith(_QUANTISED) for name in entries
    )
    if plain:
        inspection.plain_weights(inspection.config)


def _check_vocabulary(inspection: Inspection[Reading], vocab_size: int | None) -> None:
    theirs = inspection.target_config
    if theirs is None or vocab_size is None:
        return
    own = theirs.get("vocab_size")
    if own != vocab_size:
        inspection.add(
            "vocabulary-size",
            f"vocab_size is {vocab_size}, the target's is {str(own)[:40]}: padded otherwise, or "
            "another vocabulary; pad the embedding and the head, or use vLLM's "
            "use_heterogeneous_vocab",
        )
    assert inspection.target is not None
    mine, wanted = _tokens(inspection.head), _tokens(inspection.target)
    if mine is not None and wanted is not None and mine != wanted:
        odd = len(mine.items() ^ wanted.items())
        inspection.add(
            "tokenizer-differs",
            f"its tokenizer gives {odd} entries another id than the target's: drafts are ids",
        )


def _tokens(directory: Directory) -> dict[str, int] | None:
    """{token: id} of a tokenizer.json; None where there is none of that form."""
    path = directory.path / "tokenizer.json"
    if not path.is_file():
        return None
    found = read_json(path, _LARGEST_TOKENIZER, "a tokenizer")
    vocabulary = _of(_of(found, "model"), "vocab")
    added = _of(found, "added_tokens")
    if not isinstance(vocabulary, Mapping):
        return None
    more = {
        item["content"]: item["id"]
        for item in added or ()
        if isinstance(item, Mapping) and {"content", "id"} <= item.keys()
    }
    return {**{str(token): number for token, number in vocabulary.items()}, **more}


def _shapes(inspection: Inspection[Reading]) -> tuple[Shapes, Shapes]:
    """What transformers builds from this config, without memory or code of its own; nothing where
    it cannot."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {
        key: value
        for key, value in inspection.config.items()
        if key not in ("auto_map", "quantization_config")
    }
    if not isinstance(config.get("model_type"), str):
        inspection.add(
            "config-key-missing",
            "config.json lacks model_type, by which an engine chooses its code",
        )
        return {}, {}
    layers = config.get("num_hidden_layers", 1)
    if type(layers) is not int or not 0 < layers <= _MOST_LAYERS:
        inspection.add(
            "config-value", f"num_hidden_layers is {str(layers)[:40]}, needs 1 to {_MOST_LAYERS}"
        )
        return {}, {}
    try:
        built = AutoConfig.for_model(**config)
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(built, trust_remote_code=False)
    except Exception as error:
        inspection.add(
            "config-value",
            "no causal LM of transformers can be built from config.json: "
            f"{first_line(error)[:200]}",
        )
        return {}, {}
    heads = "num_attention_heads"
    spelt = (heads, built.attribute_map.get(heads, heads))
    if hasattr(built, heads) and not any(config.get(key) for key in spelt):
        inspection.missing(heads)  # No tensor's shape shows another number.
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    head = network.get_output_embeddings()
    tied = {
        f"{name}.weight"
        for name, module in network.named_modules()
        if module is head and built.tie_word_embeddings
    }
    return {n: s for n, s in shapes.items() if n not in tied}, {
        n: s for n, s in shapes.items() if n in tied
    }


# --- reading --------------------------------------------------------------------------------------


def read(head: Directory, target: Target, known: dict[str, Any]) -> Ssm:
    """The drafter of a directory of transformers.

    Args:
        known: settings of the drafter that an export of drafttrain's has, such as what it
            borrows of the target.
    Raises: InputError.
    """
    if not known:
        inspection = Inspection(head, engines.HF, READINGS[engines.HF])
        _shapes(inspection)
        lacking = [one for one in inspection.findings if one.name == "config-key-missing"]
        refuse(lacking, str(head.path))
        return with_defaults(Ssm, target, layers=None, path=str(head.path)).eval()
    drafter = with_defaults(Ssm, target, **{"layers": None, **known})
    state: dict[str, Tensor] = {}
    for name, tensor in drafter.state_dict().items():
        there = name.removeprefix("model.")
        if name != "draft_ids" and (there in head.tensors or not _is_tied(drafter, name)):
            state[name] = head.weight(there, tuple(tensor.shape))
    drafter.load_state_dict(
        state, strict=False
    )  # draft_ids are set already; a tied head is the embedding.
    return drafter.eval()


def _is_tied(drafter: Ssm, name: str) -> bool:
    tensors = drafter.state_dict(keep_vars=True)
    return any(other is tensors[name] for key, other in tensors.items() if key != name)


LAYOUT = Layout(
    name="language_model",
    what="draft models",
    turn=90,
    readings=READINGS,
    recognises=recognises,
    check=check,
    drafters=(Ssm,),
    write=write,
    read=read,
    shape=lambda drafter, head: {"layers": None, "path": head.path},
)
