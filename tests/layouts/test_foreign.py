"""Heads that drafttrain does not write: EAGLE-3, P-EAGLE, DFlash, DSpark, MTP, speculators'
directories; every known fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.errors import InputError
from drafttrain.layouts import eagle3, vocabulary
from tests.layouts.foreign import IDS, MAKERS, STATES, H, V, W, block, make_eagle3, make_target
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
from tests.messages import said

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


@pytest.mark.parametrize("against", [False, True], ids=["without the target", "with it"])
@pytest.mark.parametrize(("kind", "engine"), GOOD)
def test_good_directories(kind: str, engine: str, against: bool, tmp_path: Path) -> None:
    path = MAKERS[kind](tmp_path / "head")
    target = make_target(tmp_path / "target") if against else None
    if against and kind.endswith("eagle3") and "speculators" in kind:
        theirs = load_file(tmp_path / "target/model.safetensors")["model.embed_tokens.weight"]
        tensors(lambda t: t.update({"embed_tokens.weight": theirs}))(path)
    if against and kind == "speculators peagle":
        target = None  # its embedding is its own
    assert names(path, engine, target) == GOOD[kind, engine]


def ids(top: list[int] | object, nested: list[int] | object) -> Edit:
    return config(**{eagle3.KEY: top, f"eagle_config__{eagle3.KEY}": nested})


SECOND = tensors(lambda t: t.update(block("layers.1.", norms=("hidden_norm",))))
MAP = vocabulary.maps_of(IDS, V)
FAULTS: dict[str, tuple[str, str, Edit, str, bool]] = {
    # 1 the wrong captured layers
    "layers left out": ("eagle3", "vllm", ids(DROP, DROP), "layers-missing", False),
    "layers only for SGLang": (
        "eagle3", "vllm", ids(DROP, [1, 3, 4]), "layers-one-convention", True,
    ),
    "layers only for vLLM": (
        "eagle3", "sglang", ids([2, 4, 5], DROP), "layers-one-convention", True,
    ),
    "layers only for vLLM, in vLLM": (
        "eagle3", "vllm", ids([2, 4, 5], DROP), "layers-one-convention", False,
    ),
    "one convention in both places": (
        "eagle3", "vllm", ids([2, 4, 5], [2, 4, 5]), "layers-conventions-disagree", True,
    ),
    "layers in another order": (
        "eagle3", "vllm", ids([5, 4, 2], [4, 3, 1]), "layers-not-ascending", True,
    ),
    "layers beyond the target": (
        "eagle3", "vllm", ids([2, 4, 9], [1, 3, 8]), "layers-out-of-range", True,
    ),
    "layers below it": ("eagle3", "vllm", ids([-1, 4, 5], [-2, 3, 4]), "layers-out-of-range", True),
    "layers that are no numbers": (
        "eagle3", "vllm", ids(["2", 4, 5], [1, 3, 4]), "layers-value", True,
    ),
    "fewer layers than states": ("eagle3", "vllm", ids([2, 4], [1, 3]), "layers-count", True),
    "DFlash's layers beyond": (
        "dflash", "vllm", config(dflash_config__target_layer_ids=[1, 4, 8]), "layers-out-of-range",
        True,
    ),
    "DFlash's layers below": (
        "dflash", "vllm", config(dflash_config__target_layer_ids=[-1, 4, 6]), "layers-out-of-range",
        True,
    ),
    "DFlash's layers left out": (
        "dflash", "vllm", config(dflash_config__target_layer_ids=DROP), "layers-missing", True,
    ),
    "DFlash's layers in another order": (
        "dflash", "vllm", config(dflash_config__target_layer_ids=[6, 4, 1]), "layers-not-ascending",
        True,
    ),
    # 2 the draft vocabulary
    "no d2t": ("eagle3", "vllm", drop("d2t"), "d2t-missing", True),
    "ids in d2t": (
        "eagle3", "vllm", tensors(lambda t: t.update(d2t=IDS.clone())), "d2t-absolute", True,
    ),
    "d2t beyond": (
        "eagle3", "vllm", tensors(lambda t: t["d2t"][-1:].fill_(60)), "d2t-out-of-range", True,
    ),
    "t2d of another list": (
        "eagle3", "vllm", tensors(lambda t: t.update(t2d=t["t2d"].roll(1))), "t2d-disagrees", True,
    ),
    "d2t for SGLang's DFlash": (
        "dflash", "sglang", config(draft_vocab_size=W), "draft-vocab-not-read", True,
    ),
    "rows of the head": ("eagle3", "vllm", put("lm_head.weight", V, H), "tensor-shape", True),
    # 3 a stale embedding
    "a stale embedding": (
        "eagle3", "vllm", put("embed_tokens.weight", V, H), "embedding-differs", True,
    ),
    # 4 the head
    "no head in SGLang": ("eagle3", "sglang", drop("lm_head.weight"), "head-missing", True),
    "no head in vLLM": ("eagle3", "vllm", drop("lm_head.weight"), "head-missing", True),
    "no head in DSpark": (
        "dspark", "vllm", both(config(draft_vocab_size=W), tensors(lambda t: t.update(MAP))),
        "head-missing", True,
    ),
    # 5 what was copied of the target's config
    "tied": ("eagle3", "sglang", config(tie_word_embeddings=True), "tied-embeddings", True),
    "tied in vLLM": ("eagle3", "vllm", config(tie_word_embeddings=True), "tied-embeddings", False),
    "no draft vocabulary in SGLang": (
        "eagle3", "sglang", config(draft_vocab_size=DROP), "draft-vocab-missing", True,
    ),
    "a vocabulary below the target's": (
        "eagle3", "vllm", config(vocab_size=W), "vocabulary-size", True,
    ),
    # 6 RoPE
    "the base lost": (
        "eagle3", "vllm", config(rope_theta=DROP, rope_parameters=DROP), "rope-theta-missing", True,
    ),
    "another base": (
        "eagle3", "vllm", config(rope_theta=1e4, rope_parameters__rope_theta=1e4),
        "rope-differs-from-target", True,
    ),
    # 7 the context
    "a short context": (
        "eagle3", "sglang", config(max_position_embeddings=16), "positions-short", True,
    ),
    "a short context in vLLM": (
        "eagle3", "vllm", config(max_position_embeddings=16), "positions-short", False,
    ),
    # 9 other than three states
    "four states": (
        "eagle3", "vllm",
        both(put("fc.weight", H, 4 * H), ids([1, 2, 4, 5], DROP),
            config(num_aux_hidden_states=DROP)), "states-count", True,
    ),
    # 10 causal where a block is drafted at once
    "sliding layers": (
        "dflash", "vllm", config(layer_types=["sliding_attention", "full_attention"]),
        "dflash-causal", True,
    ),
    "speculators' default": (
        "speculators dflash", "vllm", config(sliding_window_non_causal=False), "dflash-causal",
        True,
    ),
    "layer types unsaid": ("native", "hf", config(layer_types=DROP), "layer-types-missing", True),
    # 12 MTP
    "only the trunk": (
        "mtp", "vllm", drop("model.mtp_layers.0.input_proj.weight"), "mtp-missing", True,
    ),
    "nothing promised": ("mtp", "vllm", config(num_nextn_predict_layers=0), "mtp-unpromised", True),
    "no class": ("mtp", "vllm", config(architectures=["LlamaForCausalLM"]), "mtp-no-class", True),
    "not stitched": (
        "speculators eagle3", "vllm", config(speculators_model_type="mtp"), "mtp-not-stitched",
        True,
    ),
    # 13 quantisation
    "quantised": (
        "eagle3", "vllm", config(quantization_config={"quant_method": "awq"}), "quantised-config",
        True,
    ),
    "quantised DFlash": (
        "dflash", "vllm", config(quantization_config={"quant_method": "awq"}), "quantised-config",
        True,
    ),
    # 14 mask ids beyond the vocabulary
    "a mask beyond": (
        "dflash", "vllm", config(dflash_config__mask_token_id=V), "mask-token-out-of-range", True,
    ),
    "no mask": (
        "dflash", "vllm", config(dflash_config__mask_token_id=DROP), "mask-token-missing", True,
    ),
    # 15 names and flags that an engine does not read
    "EAGLE-3's name": (
        "eagle3", "sglang", config(architectures=["Eagle3LlamaForCausalLM"]), "architecture", True,
    ),
    "taken for a model": (
        "eagle3", "vllm", config(architectures=["LlamaForCausalLM"]), "architecture", True,
    ),
    "the order of norms": (
        "eagle3", "sglang", config(norm_before_residual=True), "flag-not-read", True,
    ),
    "norms of queries": (
        "eagle3", "sglang", put("midlayer.self_attn.q_norm.weight", 8), "flag-not-read", True,
    ),
    "a width that is null": (
        "eagle3", "vllm", config(target_hidden_size=None), "target-hidden-size-null", True,
    ),
    "the order of norms unsaid": (
        "speculators eagle3", "vllm", config(norm_before_residual=DROP), "norm-order-unsaid", True,
    ),
    "another model type": ("dflash", "vllm", config(model_type="llama"), "model-type", True),
    "another Markov head": (
        "dspark", "vllm", config(markov_head_type="gated"), "flag-not-read", True,
    ),
    "Markov type unsaid": (
        "dspark", "sglang", config(markov_head_type=DROP), "config-key-missing", True,
    ),
    "ModelOpt's names": (
        "dspark", "vllm",
        tensors(lambda t: t.update(markov_w1=t.pop("markov_head.markov_w1.weight"))),
        "dspark-head-names", True,
    ),
    # tensors
    "a part lost": (
        "eagle3", "vllm", drop("midlayer.mlp.down_proj.weight"), "tensor-missing", True,
    ),
    "a part too many": ("eagle3", "vllm", put("verifier_norm.weight", H), "tensor-unknown", True),
    "a part too many in SGLang": (
        "eagle3", "sglang", put("verifier_norm.weight", H), "tensor-unknown", False,
    ),
    "a prefix": (
        "eagle3", "vllm", tensors(lambda t: t.update({"model.norm.weight": t.pop("norm.weight")})),
        "model-prefix", True,
    ),
    "a second layer": (
        "eagle3", "vllm", both(config(num_hidden_layers=2), SECOND), "second-layer-norm", True,
    ),
    "a norm that is promised": (
        "eagle3", "vllm", config(norm_before_fc=True), "tensor-missing", True,
    ),
    "norms that are promised": ("eagle3", "vllm", config(fc_norm=True), "tensor-missing", True),
    "no mask state": (
        "speculators peagle", "vllm", drop("mask_hidden"), "mask-hidden-missing", True,
    ),
    "no mask id": (
        "speculators peagle", "vllm", config(mask_token_id=DROP), "mask-token-missing", True,
    ),
    "a mask state in SGLang": (
        "eagle3", "sglang", put("mask_hidden", 1, 1, STATES * H), "parallel-drafting", True,
    ),
    "a mask state too small": (
        "speculators peagle", "vllm", put("mask_hidden", 1, 1, H), "tensor-shape", True,
    ),
    "no Markov head": (
        "dspark", "sglang", drop("markov_head.markov_w2.weight"), "tensor-missing", True,
    ),
    "no block size": ("dflash", "sglang", config(block_size=DROP), "block-size-missing", True),
    "no target layers": (
        "dflash", "sglang", config(num_target_layers=DROP), "config-key-missing", True,
    ),
    "no vocabulary": ("native", "vllm", config(vocab_size=DROP), "config-key-missing", True),
    "z-lab's in transformers": ("dflash", "hf", config(), "architecture", True),
    # speculators' own block
    "no verifier": (
        "speculators eagle3", "vllm", config(speculators_config__verifier=DROP),
        "speculators-key-missing", True,
    ),
    "no proposals": (
        "speculators eagle3", "vllm", config(speculators_config__proposal_methods=[]),
        "speculators-key-missing", True,
    ),
    "a verifier of this machine": (
        "speculators eagle3", "vllm",
        config(speculators_config__verifier={"name_or_path": "/home/x"}), "verifier-path", False,
    ),
    "a type of its own": (
        "speculators eagle3", "vllm", config(speculators_model_type="hydra"), "speculators-type",
        True,
    ),
    "a model type": (
        "speculators eagle3", "vllm", config(model_type="llama"), "speculators-model-type", False,
    ),
    "no size": (
        "speculators eagle3", "vllm", config(draft_vocab_size=DROP), "draft-vocab-missing", True,
    ),
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


@pytest.mark.parametrize("kind", ["dflash", "speculators peagle", "speculators dflash"])
def test_what_is_no_drafter_here_is_not_taken_over(kind: str, tmp_path: Path, target: Any) -> None:
    with pytest.raises(InputError, match=said("layouts.not-taken-over")):
        read_back(MAKERS[kind](tmp_path / "head"), target)


def test_what_is_no_head(tmp_path: Path) -> None:
    path = directory(tmp_path / "head", {"model_type": "bert"}, {"x": torch.ones(1)})
    with pytest.raises(InputError, match=said("layouts.no-head")):
        names(path)
