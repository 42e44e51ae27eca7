"""Heads that drafttrain does not write: EAGLE-3, P-EAGLE, DFlash, DSpark, MTP, speculators'
directories; every known fault."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafttrain.errors import InputError
from drafttrain.layouts import eagle3, vocabulary
from tests.layouts.made import (
    DROP,
    Edit,
    both,
    config,
    directory,
    drop,
    names,
    put,
    read_back,
    tensors,
)

V, W, H, MLP, STATES, LAYERS = 64, 16, 16, 24, 3, 8
"""Vocabulary, draft vocabulary, width, MLP, captured states, and the target's layers."""
IDS = torch.arange(1, 2 * W, 2)
ROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    "rope_theta": 1e5,
    "rope_scaling": None,
}
BLOCK: dict[str, Any] = {
    "hidden_size": H, "intermediate_size": MLP, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "vocab_size": V, "max_position_embeddings": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, **ROPE,
}  # fmt: skip


def block(
    prefix: str, reads: int = H, norms: tuple[str, ...] = (), q_norms: bool = False
) -> dict[str, Tensor]:
    shapes = {
        "self_attn.q_proj": (16, reads), "self_attn.k_proj": (8, reads), "self_attn.v_proj": (8, reads),
        "self_attn.o_proj": (H, 16), "mlp.gate_proj": (MLP, H), "mlp.up_proj": (MLP, H), "mlp.down_proj": (H, MLP),
        "post_attention_layernorm": (H,),
        **{name: (H,) for name in norms}, **({"self_attn.q_norm": (8,), "self_attn.k_norm": (8,)} if q_norms else {}),
    }  # fmt: skip
    return {f"{prefix}{name}.weight": torch.ones(shape) for name, shape in shapes.items()}


def make_target(path: Path) -> Path:
    told = {
        **BLOCK,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
    }
    chance = torch.Generator().manual_seed(0)
    return directory(path, told, {"model.embed_tokens.weight": torch.randn(V, H, generator=chance)})


def make_eagle3(path: Path, **changes: Any) -> Path:
    """Serves vLLM and SGLang alike."""
    told = {
        **BLOCK, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": W,
        "tie_word_embeddings": False, eagle3.KEY: [2, 4, 5], "num_aux_hidden_states": STATES,
        "eagle_config": {"use_aux_hidden_state": True, eagle3.KEY: [1, 3, 4]}, **changes,
    }  # fmt: skip
    held = block("midlayer.", 2 * H, ("hidden_norm", "input_layernorm"))
    held |= {
        "fc.weight": torch.ones(H, STATES * H),
        "norm.weight": torch.ones(H),
        "lm_head.weight": torch.ones(W, H),
    }
    return directory(path, told, held | vocabulary.maps_of(IDS, V))


def make_dflash(path: Path, **changes: Any) -> Path:
    told = {
        **BLOCK, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "block_size": 8,
        "num_target_layers": LAYERS, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": False,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 4, 6]}, **changes,
    }  # fmt: skip
    held = {
        "fc.weight": torch.ones(H, STATES * H),
        "hidden_norm.weight": torch.ones(H),
        "norm.weight": torch.ones(H),
    }
    for layer in range(2):
        held |= block(f"layers.{layer}.", norms=("input_layernorm",), q_norms=True)
    return directory(path, told, held)


def make_dspark(path: Path, **changes: Any) -> Path:
    told: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"], "markov_rank": 4, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True, "mask_token_id": 3, "target_layer_ids": [-1, 4, 6], **changes,
    }  # fmt: skip
    make_dflash(path, **told)
    config(dflash_config=DROP)(path)
    put("markov_head.markov_w1.weight", V, 4)(path)
    put("markov_head.markov_w2.weight", V, 4)(path)
    put("confidence_head.proj.weight", 1, H + 4)(path)
    put("confidence_head.proj.bias", 1)(path)
    return path


def make_native(path: Path, **changes: Any) -> Path:
    """transformers' own layout of DFlash."""
    told = {
        "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant", "mask_token_id": 3,
        "target_layer_ids": [1, 4, 6], **changes,
    }  # fmt: skip
    make_dflash(path, **told)
    config(dflash_config=DROP)(path)
    tensors(lambda t: t.update({"encoder.fc.weight": t.pop("fc.weight")}))(path)
    tensors(lambda t: t.update({"encoder.output_norm_enc.weight": t.pop("hidden_norm.weight")}))(
        path
    )
    return path


def make_speculators(path: Path, kind: str) -> Path:
    outer: dict[str, Any] = {
        "speculators_model_type": kind, "speculators_version": "0.9.0", "tie_word_embeddings": False, "dtype": "float32",
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
    }  # fmt: skip
    layer = {**BLOCK, "num_hidden_layers": 1, "model_type": "llama"}
    if kind in ("eagle3", "peagle"):
        make_eagle3(path)
        told = {
            **outer, "architectures": ["Eagle3DraftModel"], "draft_vocab_size": W, "norm_before_residual": False,
            eagle3.KEY: [2, 4, 5], "transformer_layer_config": layer,
        }  # fmt: skip
        tensors(
            lambda t: [
                t.update({n.replace("midlayer", "layers.0"): t.pop(n)})
                for n in list(t)
                if n.startswith("mid")
            ]
        )(path)
        put("embed_tokens.weight", V, H)(path)
        if kind == "peagle":
            told |= {"architectures": ["PEagleDraftModel"], "mask_token_id": 3}
            put("mask_hidden", 1, 1, STATES * H)(path)
    else:
        (make_dspark if kind == "dspark" else make_dflash)(path)
        told = {
            **outer, "architectures": ["DFlashDraftModel"], "draft_vocab_size": V, "aux_hidden_state_layer_ids": [2, 5, 7],
            "mask_token_id": 3, "block_size": 8, "sliding_window_non_causal": True, "markov_rank": 4,
            "enable_confidence_head": True, "confidence_head_with_markov": True,
            "transformer_layer_config": {
                **layer, "model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2
            },
        }  # fmt: skip
    return directory(path, told, load_file(path / "model.safetensors"))


def make_mtp(path: Path) -> Path:
    told = {
        **BLOCK,
        "architectures": ["MiMoForCausalLM"],
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
    }
    parts = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    heads = {f"model.mtp_layers.0.{part}.weight": torch.ones(2) for part in parts}
    return directory(path, told, {"model.embed_tokens.weight": torch.ones(V, H), **heads})


MAKERS: dict[str, Callable[[Path], Path]] = {
    "eagle3": make_eagle3,
    "dflash": make_dflash,
    "dspark": make_dspark,
    "native": make_native,
    "mtp": make_mtp,
    **{
        f"speculators {kind}": partial(make_speculators, kind=kind)
        for kind in ("eagle3", "peagle", "dflash", "dspark")
    },
}
RUNNER = {"runner": False}
"""DSpark needs vLLM's second model runner."""
GOOD: dict[tuple[str, str], dict[str, bool]] = {
    ("eagle3", "vllm"): {},
    ("eagle3", "sglang"): {},
    ("dflash", "vllm"): {},
    ("dflash", "sglang"): {},
    ("dspark", "vllm"): RUNNER,
    ("dspark", "sglang"): {},
    ("native", "hf"): {},
    ("native", "vllm"): {},
    ("mtp", "vllm"): {},
    ("speculators eagle3", "vllm"): {},
    ("speculators peagle", "vllm"): {},
    ("speculators dflash", "vllm"): {},
    ("speculators dspark", "vllm"): RUNNER,
}


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside the target"])
@pytest.mark.parametrize(("kind", "engine"), GOOD)
def test_good_directories(kind: str, engine: str, beside: bool, tmp_path: Path) -> None:
    path = MAKERS[kind](tmp_path / "head")
    target = make_target(tmp_path / "target") if beside else None
    if beside and kind.endswith("eagle3") and "speculators" in kind:
        theirs = load_file(tmp_path / "target/model.safetensors")["model.embed_tokens.weight"]
        tensors(lambda t: t.update({"embed_tokens.weight": theirs}))(path)
    if beside and kind == "speculators peagle":
        target = None  # its embedding is its own
    assert names(path, engine, target) == GOOD[kind, engine]


def ids(top: list[int] | object, nested: list[int] | object) -> Edit:
    return config(**{eagle3.KEY: top, f"eagle_config__{eagle3.KEY}": nested})


SECOND = tensors(lambda t: t.update(block("layers.1.", norms=("hidden_norm",))))
MAP = vocabulary.maps_of(IDS, V)
FAULTS: dict[str, tuple[str, str, Edit, str, bool]] = {
    # 1 the wrong captured layers
    "layers left out": ("eagle3", "vllm", ids(DROP, DROP), "layers-missing", False),
    "layers for SGLang alone": ("eagle3", "vllm", ids(DROP, [1, 3, 4]), "layers-one-convention", True),
    "layers for vLLM alone": ("eagle3", "sglang", ids([2, 4, 5], DROP), "layers-one-convention", True),
    "layers for vLLM alone, in vLLM": ("eagle3", "vllm", ids([2, 4, 5], DROP), "layers-one-convention", False),
    "one convention in both places": ("eagle3", "vllm", ids([2, 4, 5], [2, 4, 5]), "layers-conventions-disagree", True),
    "layers in another order": ("eagle3", "vllm", ids([5, 4, 2], [4, 3, 1]), "layers-not-ascending", True),
    "layers beyond the target": ("eagle3", "vllm", ids([2, 4, 9], [1, 3, 8]), "layers-out-of-range", True),
    "layers below it": ("eagle3", "vllm", ids([-1, 4, 5], [-2, 3, 4]), "layers-out-of-range", True),
    "layers that are no numbers": ("eagle3", "vllm", ids(["2", 4, 5], [1, 3, 4]), "layers-value", True),
    "fewer layers than states": ("eagle3", "vllm", ids([2, 4], [1, 3]), "layers-count", True),
    "DFlash's layers beyond": ("dflash", "vllm", config(dflash_config__target_layer_ids=[1, 4, 8]), "layers-out-of-range", True),
    "DFlash's layers below": ("dflash", "vllm", config(dflash_config__target_layer_ids=[-1, 4, 6]), "layers-out-of-range", True),
    "DFlash's layers left out": ("dflash", "vllm", config(dflash_config__target_layer_ids=DROP), "layers-missing", True),
    "DFlash's layers in another order": (
        "dflash", "vllm", config(dflash_config__target_layer_ids=[6, 4, 1]), "layers-not-ascending", True,
    ),
    # 2 the draft vocabulary
    "no d2t": ("eagle3", "vllm", drop("d2t"), "d2t-missing", True),
    "ids in d2t": ("eagle3", "vllm", tensors(lambda t: t.update(d2t=IDS.clone())), "d2t-absolute", True),
    "d2t beyond": ("eagle3", "vllm", tensors(lambda t: t["d2t"][-1:].fill_(60)), "d2t-out-of-range", True),
    "t2d of another list": ("eagle3", "vllm", tensors(lambda t: t.update(t2d=t["t2d"].roll(1))), "t2d-disagrees", True),
    "d2t for SGLang's DFlash": ("dflash", "sglang", config(draft_vocab_size=W), "draft-vocab-not-read", True),
    "rows of the head": ("eagle3", "vllm", put("lm_head.weight", V, H), "tensor-shape", True),
    # 3 a stale embedding
    "a stale embedding": ("eagle3", "vllm", put("embed_tokens.weight", V, H), "embedding-differs", True),
    # 4 the head
    "no head in SGLang": ("eagle3", "sglang", drop("lm_head.weight"), "head-missing", True),
    "no head in vLLM": ("eagle3", "vllm", drop("lm_head.weight"), "head-missing", True),
    "no head in DSpark": (
        "dspark", "vllm", both(config(draft_vocab_size=W), tensors(lambda t: t.update(MAP))), "head-missing", True,
    ),
    # 5 what was copied of the target's config
    "tied": ("eagle3", "sglang", config(tie_word_embeddings=True), "tied-embeddings", True),
    "tied in vLLM": ("eagle3", "vllm", config(tie_word_embeddings=True), "tied-embeddings", False),
    "no draft vocabulary in SGLang": ("eagle3", "sglang", config(draft_vocab_size=DROP), "draft-vocab-missing", True),
    "a vocabulary below the target's": ("eagle3", "vllm", config(vocab_size=W), "vocabulary-size", True),
    # 6 RoPE
    "the base lost": ("eagle3", "vllm", config(rope_theta=DROP, rope_parameters=DROP), "rope-theta-missing", True),
    "another base": (
        "eagle3", "vllm", config(rope_theta=1e4, rope_parameters__rope_theta=1e4), "rope-differs-from-target", True,
    ),
    # 7 the context
    "a short context": ("eagle3", "sglang", config(max_position_embeddings=16), "positions-short", True),
    "a short context in vLLM": ("eagle3", "vllm", config(max_position_embeddings=16), "positions-short", False),
    # 9 other than three states
    "four states": (
        "eagle3", "vllm",
        both(put("fc.weight", H, 4 * H), ids([1, 2, 4, 5], DROP), config(num_aux_hidden_states=DROP)), "states-count", True,
    ),
    # 10 causal where a block is drafted at once
    "sliding layers": ("dflash", "vllm", config(layer_types=["sliding_attention", "full_attention"]), "dflash-causal", True),
    "speculators' default": ("speculators dflash", "vllm", config(sliding_window_non_causal=False), "dflash-causal", True),
    "layer types unsaid": ("native", "hf", config(layer_types=DROP), "layer-types-missing", True),
    # 12 MTP
    "the trunk alone": ("mtp", "vllm", drop("model.mtp_layers.0.input_proj.weight"), "mtp-missing", True),
    "nothing promised": ("mtp", "vllm", config(num_nextn_predict_layers=0), "mtp-unpromised", True),
    "no class": ("mtp", "vllm", config(architectures=["LlamaForCausalLM"]), "mtp-no-class", True),
    "not stitched": ("speculators eagle3", "vllm", config(speculators_model_type="mtp"), "mtp-not-stitched", True),
    # 13 quantisation
    "quantised": ("eagle3", "vllm", config(quantization_config={"quant_method": "awq"}), "quantised-config", True),
    "quantised DFlash": ("dflash", "vllm", config(quantization_config={"quant_method": "awq"}), "quantised-config", True),
    # 14 mask ids beyond the vocabulary
    "a mask beyond": ("dflash", "vllm", config(dflash_config__mask_token_id=V), "mask-token-out-of-range", True),
    "no mask": ("dflash", "vllm", config(dflash_config__mask_token_id=DROP), "mask-token-missing", True),
    # 15 names and flags that an engine does not read
    "EAGLE-3's name": ("eagle3", "sglang", config(architectures=["Eagle3LlamaForCausalLM"]), "architecture", True),
    "taken for a model": ("eagle3", "vllm", config(architectures=["LlamaForCausalLM"]), "architecture", True),
    "the order of norms": ("eagle3", "sglang", config(norm_before_residual=True), "flag-not-read", True),
    "norms of queries": ("eagle3", "sglang", put("midlayer.self_attn.q_norm.weight", 8), "flag-not-read", True),
    "a width that is null": ("eagle3", "vllm", config(target_hidden_size=None), "target-hidden-size-null", True),
    "the order of norms unsaid": ("speculators eagle3", "vllm", config(norm_before_residual=DROP), "norm-order-unsaid", True),
    "another model type": ("dflash", "vllm", config(model_type="llama"), "model-type", True),
    "another Markov head": ("dspark", "vllm", config(markov_head_type="gated"), "flag-not-read", True),
    "Markov type unsaid": ("dspark", "sglang", config(markov_head_type=DROP), "config-key-missing", True),
    "ModelOpt's names": (
        "dspark", "vllm", tensors(lambda t: t.update(markov_w1=t.pop("markov_head.markov_w1.weight"))), "dspark-head-names", True,
    ),
    # tensors
    "a part lost": ("eagle3", "vllm", drop("midlayer.mlp.down_proj.weight"), "tensor-missing", True),
    "a part too many": ("eagle3", "vllm", put("verifier_norm.weight", H), "tensor-unknown", True),
    "a part too many in SGLang": ("eagle3", "sglang", put("verifier_norm.weight", H), "tensor-unknown", False),
    "a prefix": ("eagle3", "vllm", tensors(lambda t: t.update({"model.norm.weight": t.pop("norm.weight")})), "model-prefix", True),
    "a second layer": ("eagle3", "vllm", both(config(num_hidden_layers=2), SECOND), "second-layer-norm", True),
    "a norm that is promised": ("eagle3", "vllm", config(norm_before_fc=True), "tensor-missing", True),
    "norms that are promised": ("eagle3", "vllm", config(fc_norm=True), "tensor-missing", True),
    "no mask state": ("speculators peagle", "vllm", drop("mask_hidden"), "mask-hidden-missing", True),
    "no mask id": ("speculators peagle", "vllm", config(mask_token_id=DROP), "mask-token-missing", True),
    "a mask state in SGLang": ("eagle3", "sglang", put("mask_hidden", 1, 1, STATES * H), "parallel-drafting", True),
    "a mask state too small": ("speculators peagle", "vllm", put("mask_hidden", 1, 1, H), "tensor-shape", True),
    "no Markov head": ("dspark", "sglang", drop("markov_head.markov_w2.weight"), "tensor-missing", True),
    "no block size": ("dflash", "sglang", config(block_size=DROP), "block-size-missing", True),
    "no target layers": ("dflash", "sglang", config(num_target_layers=DROP), "config-key-missing", True),
    "no vocabulary": ("native", "vllm", config(vocab_size=DROP), "config-key-missing", True),
    "z-lab's in transformers": ("dflash", "hf", config(), "architecture", True),
    # speculators' own block
    "no verifier": ("speculators eagle3", "vllm", config(speculators_config__verifier=DROP), "speculators-key-missing", True),
    "no proposals": (
        "speculators eagle3", "vllm", config(speculators_config__proposal_methods=[]), "speculators-key-missing", True,
    ),
    "a verifier of this machine": (
        "speculators eagle3", "vllm", config(speculators_config__verifier={"name_or_path": "/home/x"}), "verifier-path", False,
    ),
    "a type of its own": ("speculators eagle3", "vllm", config(speculators_model_type="hydra"), "speculators-type", True),
    "a model type": ("speculators eagle3", "vllm", config(model_type="llama"), "speculators-model-type", False),
    "no size": ("speculators eagle3", "vllm", config(draft_vocab_size=DROP), "draft-vocab-missing", True),
}  # fmt: skip


@pytest.mark.field("F41")
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_by_name(fault: str, tmp_path: Path) -> None:
    kind, engine, edit, name, fatal = FAULTS[fault]
    path, target = MAKERS[kind](tmp_path / "head"), make_target(tmp_path / "target")
    before = names(path, engine, target)
    assert name not in before or before == {"architecture": True} == {name: fatal}, before
    edit(path)
    assert names(path, engine, target).get(name) is fatal, names(path, engine, target)


@pytest.mark.parametrize(
    "values",
    [
        {"dtype": "bf16"},
        {"torch_dtype": "int8"},
        {"dtype": 16},
        {"rope_scaling": "linear"},
        {"rope_parameters": [1e4]},
        {"max_position_embeddings": 1e308},
        {"max_position_embeddings": "128"},
        {"max_position_embeddings": 0},
        {"max_position_embeddings": None},
    ],
    ids=str,
)
@pytest.mark.parametrize(("kind", "engine"), GOOD)
def test_values_that_engines_cannot_read(
    kind: str, engine: str, values: dict[str, Any], tmp_path: Path
) -> None:
    path = MAKERS[kind](tmp_path / "head")
    block = kind.startswith("speculators") and "dtype" not in values and "torch_dtype" not in values
    config(
        **{
            f"transformer_layer_config__{key}" if block else key: value
            for key, value in values.items()
        }
    )(path)
    assert names(path, engine).get("config-value") is True


@pytest.mark.parametrize("model_type", [3, None, ["llama"]], ids=str)
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "mtp", "speculators eagle3"])
def test_a_model_type_that_is_no_text(kind: str, model_type: Any, tmp_path: Path) -> None:
    path = MAKERS[kind](tmp_path / "head")
    config(model_type=model_type)(path)
    assert names(path, "vllm").get("config-value") is True


@pytest.mark.parametrize(("kind", "engine"), GOOD)
def test_values_that_engines_read(kind: str, engine: str, tmp_path: Path) -> None:
    path = MAKERS[kind](tmp_path / "head")
    config(dtype="bfloat16", torch_dtype="auto", rope_scaling=None)(path)
    assert names(path, engine) == GOOD[kind, engine]


def test_an_embedding_that_cannot_be_compared(tmp_path: Path) -> None:
    path = make_eagle3(tmp_path / "head")
    put("embed_tokens.weight", V, H)(path)
    assert names(path, "vllm") == {"embedding-shipped": False}


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "mtp", "speculators eagle3"])
def test_what_is_no_drafter_here_is_not_taken_over(kind: str, tmp_path: Path, target: Any) -> None:
    with pytest.raises(InputError, match="are taken over"):
        read_back(MAKERS[kind](tmp_path / "head"), target)


def test_what_is_no_head(tmp_path: Path) -> None:
    path = directory(tmp_path / "head", {"model_type": "bert"}, {"x": torch.ones(1)})
    with pytest.raises(InputError, match="is no head that is known here"):
        names(path)
