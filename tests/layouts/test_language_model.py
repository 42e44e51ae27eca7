"""Draft models: a directory that transformers loads and drafts with, there and back bit for bit,
faults by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from drafttrain.drafter.ssm import Ssm
from drafttrain.errors import InputError
from drafttrain.export import export_package
from drafttrain.layouts import origin
from drafttrain.target import load
from drafttrain.target.model import Target
from tests.drafter import make as drafters
from tests.helpers import save_target
from tests.layouts.made import (
    DROP,
    Edit,
    config,
    drafts,
    drop,
    names,
    put,
    read_back,
    same,
    stirred,
    tensors,
)
from tests.packaging.made import packed

ORIGINS: dict[str, dict[str, Any]] = {
    "cut": {"layers": [0, 2], "draft_ids": list(range(1, 201, 2)), "beta": 0.3},
    "cut, its own head": {"layers": [1], "own": ["norm", "head"]},
    "new": {"layers": 2, "width": 32, "heads": 2},
}


def made(target: Target, name: str = "new") -> Ssm:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return stirred(drafters.make(Ssm, target, **ORIGINS[name]))


@pytest.mark.field("F41")
@pytest.mark.parametrize(("name", "tied"), [*((name, False) for name in ORIGINS), ("cut", True)])
def test_there_and_back(name: str, tied: bool, tmp_path: Path) -> None:
    target = load.tiny(tie_word_embeddings=tied)
    drafter = made(target, name)
    packed(tmp_path / "package", drafter, target)
    export_package(tmp_path / "package", target, "hf", out := tmp_path / "out")
    target.model.save_pretrained(tmp_path / "target")
    assert names(out) == {} == names(out, "vllm", tmp_path / "target")
    again = read_back(out, target)
    assert same(drafter, again) and again.settings() == drafter.settings()
    assert drafts(target, drafter) == drafts(target, again)
    (out / origin.FILE).unlink()
    foreign = read_back(out, target)
    mine, theirs = drafter.state_dict(), foreign.state_dict()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine if key in theirs)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        torch.testing.assert_close(
            foreign.model(input_ids=ids).logits, drafter.model(input_ids=ids).logits
        )


@pytest.mark.parametrize("engine", ["hf", "vllm", "sglang"])
def test_transformers_drafts_with_it(engine: str, target: Target, tmp_path: Path) -> None:
    drafter = made(target, "cut")
    packed(tmp_path / "package", drafter, target)
    found = export_package(tmp_path / "package", target, engine, tmp_path / "out")
    assistant, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == target.tokenizer.get_vocab()
    )  # type: ignore[union-attr]
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    common: dict[str, Any] = {
        "max_new_tokens": 12,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    plain = target.model.generate(ids, **common)
    assert torch.equal(target.model.generate(ids, assistant_model=assistant, **common), plain)
    word = {"hf": "assistant_model", "vllm": '"method": "draft_model"', "sglang": "STANDALONE"}[
        engine
    ]
    assert word in found.command and "drafts from 100 tokens" in found.notes[0]
    assert names(tmp_path / "out", engine, save_target(target, tmp_path / "target")) == {}


def test_both_spellings_of_rope_and_nothing_of_this_machine(tmp_path: Path) -> None:
    target = load.tiny(rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0})
    packed(tmp_path / "package", made(target), target, dtype="bfloat16")
    export_package(tmp_path / "package", target, "hf", tmp_path / "out")
    saved = json.loads((tmp_path / "out/config.json").read_text())
    assert (
        saved["rope_theta"] == 5e5
        and saved["rope_scaling"]["type"] == saved["rope_parameters"]["rope_type"] == "linear"
    )
    for key in ("_name_or_path", "transformers_version", "auto_map", "quantization_config"):
        assert key not in saved
    assert saved["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(tmp_path / "out/model.safetensors").values()} == {
        torch.bfloat16
    }
    read = AutoConfig.from_pretrained(tmp_path / "out")
    assert read.rope_parameters["rope_theta"] == 5e5 and read.rope_parameters["factor"] == 2.0
    with pytest.raises(InputError, match="vocabulary=reduced"):
        packed(tmp_path / "package", made(target, "cut"), target)
        export_package(tmp_path / "package", target, "hf", tmp_path / "no", vocabulary="reduced")


@pytest.fixture(scope="module")
def good(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    packed(folder / "package", made(target), target)
    export_package(folder / "package", target, "hf", folder / "draft")
    (folder / "draft" / origin.FILE).unlink()
    save_target(target, folder / "target")
    return folder


def other_tokenizer(path: Path) -> None:
    saved = json.loads((path / "tokenizer.json").read_text())
    vocabulary = saved["model"]["vocab"]
    first, second = list(vocabulary)[5:7]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (path / "tokenizer.json").write_text(json.dumps(saved))


FAULTS: dict[str, tuple[Edit, str, bool]] = {
    "padded otherwise": (config(vocab_size=384), "vocabulary-size", True),
    "another tokenizer": (other_tokenizer, "tokenizer-differs", True),
    "no positions": (config(max_position_embeddings=0), "config-value", True),
    "a mask id beyond": (config(pard_token=320), "mask-token-out-of-range", True),
    "a nested mask id beyond": (
        config(dflash_config__mask_token_id=-1),
        "mask-token-out-of-range",
        True,
    ),
    "inherited quantisation": (
        config(quantization_config={"quant_method": "fp8"}),
        "quantised-config",
        True,
    ),
    "code of its own": (config(auto_map={"AutoConfig": "x.Y"}), "remote-code", False),
    "a layer more": (config(num_hidden_layers=3), "tensor-missing", True),
    "layers without end": (config(num_hidden_layers=10**9), "config-value", True),
    "no such family": (config(model_type="never"), "config-value", True),
    "no family": (config(model_type=DROP), "config-key-missing", True),
    "missing": (drop("model.layers.1.mlp.up_proj.weight"), "tensor-missing", True),
    "unknown": (put("model.stranger", 2), "tensor-unknown", True),
    "shape": (put("lm_head.weight", 300, 32), "tensor-shape", True),
    "infinite": (
        tensors(lambda t: t["lm_head.weight"][0, :1].fill_(torch.inf)),
        "not-finite",
        True,
    ),
    "two bases": (config(rope_theta=5e5), "rope-spellings-disagree", True),
}


@pytest.mark.field("F41")
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_by_name(fault: str, good: Path, tmp_path: Path) -> None:
    edit, name, fatal = FAULTS[fault]
    path = Path(shutil.copytree(good / "draft", tmp_path / "draft"))
    assert names(path, "vllm", good / "target") == {}
    edit(path)
    assert names(path, "vllm", good / "target").get(name) is fatal


def test_quantised_weights_may_say_so(good: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(good / "draft", tmp_path / "draft"))
    config(quantization_config={"quant_method": "fp8"})(path)
    put("model.layers.0.mlp.up_proj.weight_scale", 1)(path)
    assert "quantised-config" not in names(path)
