"""EAGLE-1 (arXiv:2401.15077) as vLLM, SGLang and its authors' code read it, and as older versions
of speculators wrote it.

| tensor                                   | shape  | |
| fc.weight                                | (d 2d) | columns of the embedding first, then the feature's; here it is the other way |
| fc.bias                                  | (d)    | vLLM drops it; where it is not there SGLang leaves it random |
| layers.0.self_attn., mlp.                |        | a Llama block without a norm before its attention |
| layers.0.post_attention_layernorm.weight | (d)    | |
| embed_tokens.weight                      | (v d)  | the target's: EAGLE's loader wants it, the others borrow it |

No final norm; the head is the target's. Engines differ in `architectures`, so that no directory
serves vLLM and SGLang alike. Read from: vLLM 0.32 model_executor/models/llama_eagle.py and
llama.py, SGLang 0.5.23 srt/models/{llama,qwen2}_eagle.py, SafeAILab/EAGLE eagle/model/cnets1.py,
speculators 0.1 models/eagle.py.
"""

from __future__ import annotations

import json
import os
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.errors import InputError
from drafttrain.layouts import origin
from drafttrain.layouts.block import Sizes, block_config, block_shapes, sizes_of
from drafttrain.layouts.directory import FLOATS, Directory
from drafttrain.layouts.inspection import MADE_MAP, Inspection, Shapes, alike
from drafttrain.layouts.rope import FALLBACK, effective
from drafttrain.layouts.writing import Exported, Source, sglang_command, stored, vllm_command
from drafttrain.packaging.checking import read_json, some
from drafttrain.target.model import Target

ENGINES = ("vllm", "sglang", "eagle")
FAMILIES = ("llama", "mistral", "qwen2")
"""Targets whose block is Llama's, with biases of queries, keys and values at most."""
TOKEN_MAP = "hot_token_ids.json"
_ARCHITECTURES = {
    "vllm": ("LlamaForCausalLM", "EagleLlamaForCausalLM"),
    "sglang": ("LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle", "MistralForCausalLMEagle"),
}
_LARGEST_MAP = 16 << 20
_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
)
_NO_NORM = "layers.0.input_layernorm.weight"
_QKV_BIASES = tuple(f"layers.0.self_attn.{name}_proj.bias" for name in "qkv")
_SPECULATORS = {"fusion_fc.": "fc.", "transformer.": "layers.0."}
_COMPUTED = "rotary_emb.inv_freq"
"""End of a name that older versions of transformers saved: engines pass over it, since it follows
from the config."""


# --- writing --------------------------------------------------------------------------------------


def write(source: Source) -> Exported:
    """Raises: InputError for what this engine cannot run: other families, biases it does not read,
    RoPE it does not know."""
    drafter, target, engine = source.drafter, source.target, source.engine
    assert isinstance(drafter, Eagle1)
    if target.config.model_type not in FAMILIES:
        raise InputError(
            f"to={engine}: target {target.name} is a {target.config.model_type}, whose block no "
            f"engine's EAGLE-1 runs (they run "
            f"those of {', '.join(FAMILIES)}); the package itself decodes in transformers, by "
            f"custom_generate"
        )
    config = block_config(target) | _family(target, engine)
    tensors = _tensors(drafter)
    _settle_bias(tensors, config, engine)
    if engine == "eagle":
        _check_eagle(config)
        tensors["embed_tokens.weight"] = target.embedding.weight
    ids = source.kept_ids(
        holds=engine == "sglang",
        why=f"EAGLE-1 in {engine} drafts from the target's whole head; to=sglang takes a list of "
        f"ids",
    )
    notes = []
    if source.draft_ids is not None and ids is None and source.vocabulary == "auto":
        notes.append(
            f"the package drafts from {len(source.draft_ids)} tokens; EAGLE-1 in {engine} drafts "
            f"from the target's whole head, "
            "which may propose others too"
        )
    if engine == "eagle":
        notes.append(
            "EAGLE's loader looks into model.safetensors.index.json of the target, which one in a "
            "single file lacks"
        )
    if ids is not None:
        notes.append(
            "SGLang reads the draft vocabulary from a pickle, which is not written here. Make it "
            "in the directory once: "
            f"python -c \"import json, torch; torch.save(json.load(open('{TOKEN_MAP}')), "
            f"'{MADE_MAP}')\""
        )
    word = str(source.dtype).removeprefix("torch.")
    return Exported(
        config={**config, "dtype": word, "torch_dtype": word},
        tensors=stored(tensors, source.dtype),
        texts={} if ids is None else {TOKEN_MAP: json.dumps(ids.tolist()) + "\n"},
        command=_command(engine, source.tokens, ids is not None),
        notes=tuple(notes),
    )


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


def _family(target: Target, engine: str) -> dict[str, Any]:
    """The engine's name for the block, and its biases."""
    config, qwen = target.config, target.config.model_type == "qwen2"
    both, mlp = (
        bool(getattr(config, "attention_bias", False)),
        bool(getattr(config, "mlp_bias", False)),
    )
    if (engine == "eagle" and both) or (engine != "vllm" and mlp):
        raise InputError(
            f"to={engine}: target {target.name} has biases in its blocks that {engine} does not "
            f"read; to=vllm does"
        )
    if engine != "eagle" and config.hidden_act != "silu":
        raise InputError(
            f"to={engine}: target {target.name} has the activation {config.hidden_act}, {engine} "
            f"runs silu alone here"
        )
    found: dict[str, Any] = {"attention_bias": both, "mlp_bias": mlp}
    if qwen and engine == "sglang":
        return {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLMEagle"],
            "use_sliding_window": False,
        }
    if qwen:
        found["qkv_bias"] = True
    return found | {
        "architectures": [
            _ARCHITECTURES[engine][0] if engine in _ARCHITECTURES else "LlamaForCausalLM"
        ]
    }


def _settle_bias(tensors: dict[str, Tensor], config: dict[str, Any], engine: str) -> None:
    """`fc.bias` as the engine wants it. `bias` in a config means fc's in EAGLE, and attention's in
    vLLM and SGLang."""
    bias = tensors.get("fc.bias")
    if engine == "vllm" and bias is not None:
        if bool(bias.any()):
            raise InputError(
                "to=vllm: this drafter has a bias in fc, which vLLM drops: give to=sglang or "
                "to=eagle, or train with "
                "drafter.bias=false"
            )
        del tensors["fc.bias"]
    if engine == "sglang" and bias is None:
        tensors["fc.bias"] = torch.zeros(config["hidden_size"])
    config["bias"] = engine == "eagle" and "fc.bias" in tensors


def _check_eagle(config: dict[str, Any]) -> None:
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise InputError(
            "to=eagle: this target's attention heads do not make up its width, which EAGLE's code "
            "needs: give to=vllm"
        )
    kind, theta = config["rope_parameters"]["rope_type"], config["rope_theta"]
    if kind != "default" and (kind != "linear" or theta != FALLBACK):
        raise InputError(
            f"to=eagle: EAGLE's code has no RoPE of type {kind} with a base of {theta:g}: give "
            f"to=vllm or to=sglang"
        )


def _command(engine: str, tokens: int, mapped: bool) -> str:
    if engine == "vllm":
        return vllm_command("eagle", tokens)
    if engine == "sglang":
        more = f" --speculative-token-map {{out}}/{MADE_MAP}" if mapped else ""
        return f"{sglang_command('EAGLE', tokens)} --speculative-eagle-topk 1 --speculative-draft-model-quantization unquant{more}"
    return "EaModel.from_pretrained(base_model_path='{target}', ea_model_path='{out}', use_eagle3=False)  # eagle.model.ea_model"


# --- checking -------------------------------------------------------------------------------------


def recognises(head: Directory) -> bool:
    names, given = head.tensors, head.config.get("architectures")
    said = given[0] if isinstance(given, list) and given and isinstance(given[0], str) else ""
    return any(
        name.removeprefix("model.") in ("fc.weight", "fusion_fc.weight") for name in names
    ) or said.endswith("Eagle")


def default_engine(head: Directory) -> str:
    given = head.config.get("architectures")
    return (
        "sglang"
        if isinstance(given, list) and given and str(given[0]).endswith("Eagle")
        else "vllm"
    )


def check(inspection: Inspection) -> None:
    config, held, engine = inspection.config, inspection.head.tensors, inspection.engine
    inspection.files()
    if engine in _ARCHITECTURES:
        inspection.architecture(_ARCHITECTURES[engine])
    inspection.plain_weights(config)
    inspection.common_values(config)
    inspection.untied(config)
    inspection.activation(config)
    inspection.against_target(config)
    if config.get("draft_vocab_size") not in (None, config.get("vocab_size")) or "d2t" in held:
        inspection.add(
            "draft-vocab-not-read",
            f"{engine} reads no draft vocabulary in an EAGLE-1 head, nor d2t: its head is the "
            f"target's",
        )
    prefixed = sorted(name for name in held if name.startswith("model."))
    if prefixed:
        inspection.add(
            "model-prefix",
            f"{some(prefixed)}: engines put model. before these names themselves; take it away",
        )
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
    if engine == "sglang":
        _check_token_map(inspection, vocab_size)
    named = {
        _NO_NORM,
        "lm_head.weight",
        "norm.weight",
        "d2t",
        "t2d",
        *prefixed,
    }  # have faults of their own
    expected, optional = _shapes(inspection, sizes, layers, vocab_size)
    optional |= {
        name: held[name].shape for name in held if name in named or name.endswith(_COMPUTED)
    }
    optional["fc.bias"] = (sizes.width,)
    inspection.compare(expected, optional, skips_unknown=engine == "sglang")
    inspection.weights(("d2t", "t2d"))
    inspection.borrowed("embed_tokens.weight", _EMBEDDINGS, "embedding", needed=engine != "vllm")


def _shapes(
    inspection: Inspection, sizes: Sizes, layers: int, vocab_size: int
) -> tuple[Shapes, Shapes]:
    qkv, o = _attention_biases(inspection)
    expected: Shapes = {"fc.weight": (sizes.width, 2 * sizes.width)}
    for layer in range(min(layers, 64)):
        expected |= block_shapes(f"layers.{layer}.", sizes, qkv_bias=qkv, o_bias=o)
        expected[f"layers.{layer}.post_attention_layernorm.weight"] = (sizes.width,)
        if layer:
            expected[f"layers.{layer}.input_layernorm.weight"] = (sizes.width,)
    embedding: Shapes = {"embed_tokens.weight": (vocab_size, sizes.width)}
    return (expected | embedding, {}) if inspection.engine == "eagle" else (expected, embedding)


def _attention_biases(inspection: Inspection) -> tuple[bool, bool]:
    """Those that the engine will look for: of queries, keys and values, and behind the
    attention."""
    config, engine = inspection.config, inspection.engine
    if engine == "eagle":
        return bool(config.get("qkv_bias")), False
    if inspection.engine == "sglang" and str(config.get("architectures")).find("Qwen2") >= 0:
        return True, False
    both = bool(config.get("attention_bias")) or bool(config.get("bias"))
    return (bool(config["qkv_bias"]) if engine == "vllm" and "qkv_bias" in config else both), both


def _check_layers(inspection: Inspection, layers: int) -> None:
    found = {name.split(".")[1] for name in inspection.head.tensors if name.startswith("layers.")}
    if found != {str(layer) for layer in range(min(layers, 64))}:
        inspection.add(
            "layer-count",
            f"num_hidden_layers is {layers}, the file has layers {some(sorted(found)) or 'none'}: "
            f"it may be the target's number",
        )


def _check_biases(inspection: Inspection) -> None:
    config, held, engine = inspection.config, inspection.head.tensors, inspection.engine
    has = "fc.bias" in held
    if engine == "vllm" and has and inspection.head.tensors["fc.bias"].dtype in FLOATS:
        zero = not bool(inspection.head.read("fc.bias").any())
        inspection.add(
            "fc-bias-dropped",
            "fc.bias is there and vLLM drops it"
            + (", which changes nothing: it is zero" if zero else ": drafts are others"),
            fatal=not zero,
        )
    if engine == "sglang" and not has:
        inspection.add(
            "fc-bias-missing",
            "fc.bias is not there: SGLang leaves it at random values; write zeros",
        )
    if engine == "eagle" and has != bool(config.get("bias", True)):
        inspection.add(
            "fc-bias-undeclared",
            f"bias is {config.get('bias', 'not given, which means true')}, fc.bias is "
            f"{'there' if has else 'not there'}: EAGLE's "
            "loader fails or leaves it random",
        )
    if (
        engine in ("vllm", "sglang")
        and config.get("bias")
        and not any(name in held for name in _QKV_BIASES)
    ):
        inspection.add(
            "bias-read-as-attention",
            f"bias is true, meant for fc as EAGLE reads it; {engine} makes biases in attention of "
            f"it, at random values: write "
            "false",
        )
    declared, _ = _attention_biases(inspection)
    if not declared and any(name in held for name in _QKV_BIASES):
        need = (
            "architectures must be Qwen2ForCausalLMEagle"
            if engine == "sglang"
            else "write qkv_bias: true"
        )
        inspection.add(
            "attention-bias-undeclared",
            f"queries, keys and values have biases that {engine} does not look for: {need}",
        )


def _check_extras(inspection: Inspection) -> None:
    held, engine = inspection.head.tensors, inspection.engine
    if _NO_NORM in held:
        inspection.add(
            "norm-before-attention",
            f"{_NO_NORM} is there: EAGLE-1's first block has no such norm; vLLM refuses the file, "
            f"others drop what was trained",
        )
    if "norm.weight" in held:
        inspection.add("final-norm", "norm.weight is there: EAGLE-1 has no norm before the head")
    if "lm_head.weight" in held:
        inspection.add(
            "head-shipped",
            "lm_head.weight is there: vLLM refuses the file, others take the target's anyway",
            fatal=engine == "vllm",
        )


def _check_token_map(inspection: Inspection, vocab_size: int) -> None:
    """The list of ids that an export has for SGLang, of which its pickle is made."""
    path = inspection.head.path / TOKEN_MAP
    if not os.path.lexists(path):
        return
    try:
        ids = read_json(path, _LARGEST_MAP, "a list of ids")
    except InputError as error:
        inspection.add("token-map-ids", str(error))
        return
    whole = isinstance(ids, list) and all(type(i) is int and 0 <= i < vocab_size for i in ids)
    if not whole or not ids or any(b <= a for a, b in pairwise(ids)):
        inspection.add(
            "token-map-ids",
            f"{TOKEN_MAP} needs a list of whole numbers that ascend within 0..{vocab_size - 1}",
        )
        return
    told = origin.read_origin(inspection.head)
    if told is not None and told.draft_ids != ids:
        own = "none" if told.draft_ids is None else len(told.draft_ids)
        inspection.add(
            "token-map-differs",
            f"{TOKEN_MAP} has {len(ids)} ids, which are not those of {origin.FILE} ({own}): SGLang "
            f"drafts from others than were "
            "learned; export the package again",
        )


# --- reading --------------------------------------------------------------------------------------


def read(head: Directory, target: Target, known: dict[str, Any]) -> Eagle1:
    """The drafter of a foreign head. A bias of zeros is none.

    Args:
        known: settings of the drafter that a directory of drafttrain's tells.
    Raises: InputError for whatever such a drafter cannot be: other sizes than the target's, more
        layers, norms or embeddings of its own, another RoPE.
    """
    config = _layer_config(head)
    names = {_ours(name): name for name in head.tensors if not name.endswith(_COMPUTED)}
    _refuse_another_target(head, config, target)
    _refuse_own_vocabulary(head, names, target)
    d = target.width
    bias = head.weight(names["fc.bias"], (d,)) if "fc.bias" in names else torch.zeros(d)
    drafter = Eagle1(target, **{**known, "bias": known.get("bias", False) or bool(bias.any())})
    shapes = {
        _theirs(name): tuple(t.shape)
        for name, t in drafter.state_dict().items()
        if name not in ("draft_ids", "fc.bias")
    }
    odd = sorted(
        names.keys() - shapes.keys() - {"fc.bias", "embed_tokens.weight", "lm_head.weight"}
    )
    if odd or len(names) != sum(not name.endswith(_COMPUTED) for name in head.tensors):
        what = some(odd) if odd else "a tensor under two names"
        raise InputError(
            f"{head.path} holds {what}: EAGLE-1 has one block of the target's kind, without a norm "
            f"before its attention"
        )
    found = {name: head.weight(names.get(name, name), shape) for name, shape in shapes.items()}
    state = {name: found[_theirs(name)] for name in drafter.state_dict() if _theirs(name) in found}
    if drafter.bias:
        state["fc.bias"] = bias
    state["fc.weight"] = torch.cat((state["fc.weight"][:, d:], state["fc.weight"][:, :d]), 1)
    drafter.load_state_dict(state, strict=False)  # draft_ids, where there are any, are set already.
    return drafter.eval()


def _layer_config(head: Directory) -> dict[str, Any]:
    if "speculators_model_type" not in head.config:
        return head.config
    inner = head.config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise InputError(f"{head.path}: transformer_layer_config is not a mapping")
    if head.config.get("layernorms"):
        raise InputError(
            f"{head.path} has norms of its own (layernorms: true), which eagle1 does not have"
        )
    return inner


def _ours(name: str) -> str:
    name = name.removeprefix("model.")
    for theirs, plain in _SPECULATORS.items():
        if name.startswith(theirs):
            return plain + name.removeprefix(theirs)
    return name


def _theirs(name: str) -> str:
    return name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else name


def _refuse_another_target(head: Directory, config: dict[str, Any], target: Target) -> None:
    """Raise InputError unless the block's config is the target's, which it will be computed
    with."""
    own = target.config
    for key, mine in (("hidden_size", target.width), ("vocab_size", target.vocab_size)):
        if config.get(key, mine) != mine:
            raise InputError(
                f"{head.path}: {key} is {str(config[key])[:40]}, the target's is {mine}: it is "
                f"another target's head"
            )
    facts = {
        "rms_norm_eps": getattr(own, "rms_norm_eps", None),
        "hidden_act": getattr(own, "hidden_act", None),
    }
    for key, value in facts.items():
        if config.get(key, value) != value:
            raise InputError(
                f"{head.path}: {key} is {str(config[key])[:40]}, the target's is {value}: eagle1 "
                f"takes the target's"
            )
    if (mine_rope := effective(config)) != (
        theirs := effective(json.loads(own.to_json_string(use_diff=False)))
    ):
        raise InputError(
            f"{head.path} turns by RoPE with a base of {mine_rope[0]:g}, the target with "
            f"{theirs[0]:g} (or their scalings differ): "
            "it was trained so, or its config.json lost rope_theta; correct that file if you know"
        )


def _refuse_own_vocabulary(head: Directory, names: dict[str, str], target: Target) -> None:
    """Raise InputError if the file has another embedding or head than the target, whose are
    borrowed."""
    for name, weight in (
        ("embed_tokens.weight", target.embedding.weight),
        ("lm_head.weight", target.output.weight),
    ):
        if name not in names:
            continue
        entry = head.tensors[names[name]]
        if (
            entry.shape != tuple(weight.shape)
            or entry.dtype not in FLOATS
            or not alike(head.read(names[name]), weight)
        ):
            raise InputError(
                f"{head.path}: {name} is not the target's own: eagle1 borrows the target's, and it "
                f"is another one"
            )
