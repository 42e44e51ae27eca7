"""What goes wrong in engines without a word, and what no export has, whatever its target tempts it
to copy."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import nn

from drafttrain.drafter.base import Drafter
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.eagle3 import Eagle3
from drafttrain.drafter.medusa import Medusa
from drafttrain.drafter.ssm import Ssm
from drafttrain.errors import InputError
from drafttrain.export import export_package
from drafttrain.layouts import medusa
from drafttrain.layouts.pairs import written
from drafttrain.target import load
from drafttrain.target.model import Target
from tests.drafter import make as drafters
from tests.layouts.made import DROP, config, directory, names, stirred
from tests.messages import said
from tests.packaging.made import packed

MAKERS: dict[type[Drafter], Callable[[Target], Drafter]] = {
    Eagle1: lambda target: drafters.make(Eagle1, target, draft_ids=list(range(1, 201, 2))),
    Eagle3: lambda target: drafters.make(Eagle3, target, draft_ids=list(range(1, 201, 2))),
    Medusa: lambda target: drafters.make(Medusa, target, heads=3),
    Ssm: lambda target: drafters.make(Ssm, target, layers=[0, 2]),
}
PAIRS = [
    (kind, engine.name)
    for layout in written()
    for kind in layout.drafters
    if kind in MAKERS
    for engine in layout.engines(kind)
]
METHODS = {
    (Eagle1, "vllm"): '"method": "eagle"', (Eagle1, "sglang"): "--speculative-algorithm EAGLE ",
    (Eagle1, "eagle"): "use_eagle3=False", (Eagle3, "vllm"): '"method": "eagle3"',
    (Eagle3, "sglang"): "--speculative-algorithm EAGLE3 ", (Eagle3, "eagle"): "use_eagle3=True",
    (Eagle3, "speculators"): "vllm serve ", (Medusa, "vllm"): '"method": "medusa"',
    (Medusa, "medusa"): "text-generation-launcher",
    (Ssm, "vllm"): '"method": "draft_model"', (Ssm, "sglang"): "STANDALONE",
    (Ssm, "hf"): "assistant_model=",
}  # fmt: skip


@pytest.fixture(scope="module")
def tempting() -> Target:
    """Tied, another base of RoPE, a long context: what heads must not take, or must not lose."""
    return load.tiny(
        layers=8,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        max_position_embeddings=4096,
    )


@pytest.mark.parametrize(("kind", "engine"), PAIRS)
def test_what_no_export_has(
    kind: type[Drafter], engine: str, tempting: Target, tmp_path: Path
) -> None:
    packed(tmp_path / "package", stirred(MAKERS[kind](tempting)), tempting)
    found = export_package(
        tmp_path / "package", tempting, engine, out := tmp_path / "out", tokens=2
    )
    saved = json.loads((out / "config.json").read_text())
    saved |= saved.get("transformer_layer_config", {})
    (file,) = out.glob("*.safetensors")
    held = load_file(file)
    assert (
        METHODS[kind, engine] in found.command
        and str(out) in found.command
        and shlex.split(found.command)
    )
    assert (
        not {"quantization_config", "compression_config", "auto_map", "_name_or_path"}
        & saved.keys()
    )
    # No map of a draft vocabulary in a place where it is another's, and no pickle.
    if kind is Eagle3:
        assert {"d2t", "t2d"} <= held.keys() and saved["draft_vocab_size"] == 100
        assert ("embed_tokens.weight" in held) == (engine == "speculators")
        assert "target_hidden_size" not in saved
    else:
        assert not {"d2t", "t2d"} & held.keys() and "draft_vocab_size" not in saved
    assert not [path for path in out.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".pkl")]
    # A draft model may tie its own two; a head that did would propose with its embedding.
    assert saved.get("tie_word_embeddings", False) == (kind is Ssm)
    if kind is not Medusa:
        assert (
            saved["rope_theta"] == saved["rope_parameters"]["rope_theta"] == 5e5
            and saved["rope_scaling"] is None
        )
        assert saved["max_position_embeddings"] == 4096
    if kind is Eagle1:
        assert "embed_tokens.weight" not in held or engine == "eagle"
        assert (
            not {"lm_head.weight", "norm.weight", "layers.0.input_layernorm.weight"} & held.keys()
        )
        assert saved["bias"] is False and ("fc.bias" in held) == (engine == "sglang")
    if kind is Medusa:
        assert saved["medusa_fc_bias"] is True and saved["hidden_size"] == 64
        assert not [key for key in saved if "num" in key and key.startswith("num_attention")]


@pytest.mark.parametrize("kind", [Eagle1, Eagle3, Medusa])
def test_heads_of_a_quantised_target_are_plain(kind: type[Drafter], tmp_path: Path) -> None:
    target = load.tiny(layers=8)
    target.model.config.quantization_config = {"quant_method": "fp8"}
    packed(tmp_path / "package", stirred(MAKERS[kind](target)), target)
    export_package(tmp_path / "package", target, "vllm", tmp_path / "out", tokens=2)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize("engine", ["vllm", "sglang", "eagle"])
def test_an_embedding_that_is_padded_otherwise_than_the_head(engine: str, tmp_path: Path) -> None:
    """Engines know one vocabulary size."""
    model: Any = load.tiny().model
    model.set_input_embeddings(nn.Embedding(384, 64))
    target = Target(model, None, "padded")
    packed(tmp_path / "package", stirred(drafters.make(Eagle1, target)), target)
    with pytest.raises(InputError, match=said("layouts.two-vocabularies")):
        export_package(tmp_path / "package", target, engine, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_fasterdecodings_heads_in_vllm(tmp_path: Path) -> None:
    """vLLM maps their names, but knows neither their width nor, without a word, their biases; a
    pickle is not read here."""
    target = load.tiny()
    packed(
        tmp_path / "package", stirred(drafters.make(Medusa, target, heads=2, own_head=True)), target
    )
    export_package(tmp_path / "package", target, "medusa", out := tmp_path / "out")
    assert names(out, "medusa") == {}
    held = load_file(out / medusa.FILE)
    bare = {"medusa_num_heads": 2, "medusa_num_layers": 1, "vocab_size": 320}
    path = directory(tmp_path / "bare", bare, held, medusa.FILE)
    assert names(path, "vllm").get("medusa-hidden-size") is True
    path = directory(tmp_path / "wide", {**bare, "hidden_size": 64}, held, medusa.FILE)
    assert names(path, "vllm") == {"medusa-biases-dropped": True}
    (path / medusa.FILE).rename(path / "medusa_lm_head.pt")
    assert names(path) == {"pickled-weights": True}


def test_a_draft_model_without_the_old_spelling_of_its_base(
    tempting: Target, tmp_path: Path
) -> None:
    """transformers 4 and 5 spell it in two places; a reader of the other one takes 10000 without a
    word."""
    packed(tmp_path / "package", stirred(MAKERS[Ssm](tempting)), tempting)
    export_package(tmp_path / "package", tempting, "sglang", out := tmp_path / "out")
    assert names(out, "sglang") == {}
    config(rope_theta=DROP)(out)
    assert names(out, "sglang") == {"rope-old-spelling-missing": True}
