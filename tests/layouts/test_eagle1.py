"""EAGLE-1 for vLLM, SGLang and EAGLE's code: there and back bit for bit, computed as engines do,
every fault by its name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.errors import InputError
from drafttrain.export import export_package
from drafttrain.flow import Needs
from drafttrain.layouts import eagle1, engines, origin
from drafttrain.layouts.directory import INDEX
from drafttrain.target import load
from drafttrain.target.model import Target
from tests.drafter import make as drafters
from tests.families import target_of
from tests.helpers import save_target
from tests.layouts.made import (
    DROP,
    Edit,
    both,
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
from tests.messages import said
from tests.packaging.made import packed

IDS = list(range(1, 201, 2))
ENGINES = engines.names(eagle1.LAYOUT.engines())
WIDTH = 64
KINDS: dict[str, Any] = {
    "llama": (LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding),
    "qwen2": (Qwen2Config, Qwen2DecoderLayer, Qwen2RotaryEmbedding),
}


def made(target: Target, **settings: Any) -> Eagle1:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return stirred(drafters.make(Eagle1, target, **settings))


def exported(
    folder: Path,
    target: Target,
    drafter: Eagle1,
    engine: str,
    dtype: str = "float32",
    **options: Any,
) -> Path:
    packed(folder / "package", drafter, target, dtype=dtype)
    export_package(folder / "package", target, engine, folder / "out", **options)
    return folder / "out"


@pytest.fixture(scope="module")
def tiny() -> Target:
    return load.tiny()


@pytest.mark.field("F41")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "settings", [{}, {"draft_ids": IDS, "noise": 0.2}], ids=["whole", "reduced"]
)
def test_there_and_back(
    engine: str, settings: dict[str, Any], tiny: Target, tmp_path: Path
) -> None:
    drafter = made(tiny, **settings)
    out = exported(tmp_path, tiny, drafter, engine)
    assert names(out) == {}
    again = read_back(out, tiny)
    assert same(drafter, again) and again.settings() == drafter.settings()
    folder = packed(tmp_path / "again", again, tiny)
    assert (folder / "drafter.safetensors").read_bytes() == (
        tmp_path / "package/drafter.safetensors"
    ).read_bytes()
    assert drafts(tiny, drafter) == drafts(tiny, again)
    (out / origin.FILE).unlink()  # as a foreign one
    assert names(out, engine) == {}
    foreign = read_back(out, tiny)
    assert torch.equal(foreign.fc.weight, drafter.fc.weight) and foreign.choices == 320
    assert all(
        torch.equal(a, b)
        for a, b in zip(foreign.layer.parameters(), drafter.layer.parameters(), strict=True)
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_other_families(engine: str, family: str, tmp_path: Path) -> None:
    target = load.tiny(family=family)
    drafter = made(target)
    out = exported(tmp_path, target, drafter, engine)
    assert names(out) == {} and same(drafter, read_back(out, target))
    saved = json.loads((out / "config.json").read_text())
    assert "sliding_window" not in saved
    if family == "qwen2":
        assert saved.get("qkv_bias", False) == (engine != "sglang")
        assert saved["architectures"] == (
            ["Qwen2ForCausalLMEagle"] if engine == "sglang" else ["LlamaForCausalLM"]
        )


@pytest.mark.parametrize(
    ("engine", "family", "scaling"),
    [
        ("vllm", "llama", None),
        ("sglang", "llama",
            {"rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 64}),
        ("sglang", "qwen2", {"rope_type": "default", "rope_theta": 1e6}),
        ("eagle", "llama", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("spelling", ["both", "old", "new"])
def test_the_file_computes_what_the_drafter_does(
    engine: str, family: str, scaling: dict[str, Any] | None, spelling: str, tmp_path: Path
) -> None:
    """As an engine does it: the block by config.json, [embedding; feature] into fc, no norm before
    attention, none after it."""
    more = {} if scaling is None else {"rope_parameters": scaling}
    target = load.tiny(family=family, **more)
    drafter = made(target)
    out = exported(tmp_path, target, drafter, engine)
    saved = json.loads((out / "config.json").read_text())
    held = load_file(out / "model.safetensors")
    for key in {"both": (), "old": ("rope_parameters",), "new": ("rope_theta", "rope_scaling")}[
        spelling
    ]:
        saved.pop(key)
    make_config, make_layer, make_rope = KINDS[saved["model_type"]]
    read = make_config(**{key: value for key, value in saved.items() if key != "model_type"})
    read._attn_implementation = "eager"
    layer, rope = make_layer(read, 0).eval(), make_rope(read)
    layer.input_layernorm = torch.nn.Identity()
    inner = {
        name.removeprefix("layers.0."): tensor
        for name, tensor in held.items()
        if name.startswith("layers.0.")
    }
    layer.load_state_dict(inner)
    ids = torch.randint(3, 320, (1, 80), generator=torch.Generator().manual_seed(2))
    hidden = target.features(ids, torch.tensor([80]), Needs(last_hidden=True)).last_hidden
    places = torch.arange(79)[None]
    with torch.inference_mode():
        assert hidden is not None
        x = torch.cat((target.embed(ids[:, 1:]), hidden[:, :-1]), -1) @ held["fc.weight"].T
        x = x + held.get("fc.bias", torch.zeros(WIDTH))
        mask = torch.full((79, 79), torch.finfo(torch.float32).min).triu(1)[None, None]
        theirs = layer(
            x, attention_mask=mask, position_ids=places, position_embeddings=rope(x, places)
        )
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        torch.testing.assert_close(
            theirs, drafter(hidden[:, :-1], ids[:, 1:], places), rtol=1e-4, atol=1e-4
        )


def test_names_and_config(tiny: Target, tmp_path: Path) -> None:
    """Columns of the embedding first; nothing borrowed in the file, no norm before attention; sizes
    are the target's."""
    drafter = made(tiny)
    out = exported(tmp_path, tiny, drafter, "vllm")
    held = load_file(out / "model.safetensors")
    ours = drafter.fc.weight.detach()
    assert torch.equal(held["fc.weight"][:, :WIDTH], ours[:, WIDTH:]) and torch.equal(
        held["fc.weight"][:, WIDTH:], ours[:, :WIDTH]
    )
    attention = [f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"]
    mlp = [f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    assert held.keys() == {
        "fc.weight",
        *attention,
        *mlp,
        "layers.0.post_attention_layernorm.weight",
    }
    saved = json.loads((out / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 320,
        "max_position_embeddings": 512, "tie_word_embeddings": False, "bias": False,
        "rope_theta": 10000.0,
        "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "dtype": "float32",
    }  # fmt: skip
    assert {key: saved[key] for key in expected} == expected
    assert "quantization_config" not in saved and "_name_or_path" not in saved
    assert exported(tmp_path / "eagle", tiny, drafter, "eagle")
    shipped = load_file(tmp_path / "eagle/out/model.safetensors")["embed_tokens.weight"]
    assert torch.equal(shipped, tiny.embedding.weight)


def test_biases_of_fc(tiny: Target, tmp_path: Path) -> None:
    with_bias = made(tiny, bias=True)
    packed(tmp_path / "package", with_bias, tiny)
    with pytest.raises(InputError, match=r"bias in fc.*to=sglang"):
        export_package(tmp_path / "package", tiny, "vllm", tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    for engine in ("sglang", "eagle"):
        out = (
            export_package(tmp_path / "package", tiny, engine, tmp_path / engine)
            and tmp_path / engine
        )
        assert names(out) == {} and same(with_bias, read_back(out, tiny))
        assert json.loads((out / "config.json").read_text())["bias"] == (engine == "eagle")
    none = exported(tmp_path / "none", tiny, made(tiny), "sglang")
    assert torch.equal(load_file(none / "model.safetensors")["fc.bias"], torch.zeros(WIDTH))
    zero = made(tiny, bias=True)
    with torch.no_grad():
        zero.fc.bias.zero_()
    assert "fc.bias" not in load_file(
        exported(tmp_path / "zero", tiny, zero, "vllm") / "model.safetensors"
    )


@pytest.mark.field("F98", "F74")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", ["qwen3_moe", "olmo2", "gemma3_text"])
def test_plain_blocks_of_any_family(engine: str, family: str, tmp_path: Path) -> None:
    """The file is a Llama block of its own sizes, comes back as it was, and computes the same."""
    target = target_of(family)
    drafter = made(target)
    assert drafter.plain
    if engine == "eagle" and family == "gemma3_text":
        with pytest.raises(InputError, match=r"^to=eagle: .* heads .* width"):
            exported(tmp_path, target, drafter, engine)
        return
    out = exported(tmp_path, target, drafter, engine)
    assert names(out) == {} and same(drafter, read_back(out, target))
    saved = json.loads((out / "config.json").read_text())
    expected = drafter.layer_config()
    for key in ("intermediate_size", "head_dim", "num_key_value_heads", "rms_norm_eps"):
        assert saved[key] == getattr(expected, key), key
    assert (saved["hidden_act"], saved["model_type"]) == ("silu", "llama")
    assert not saved["attention_bias"]


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_neox"])
def test_blocks_that_no_engine_runs(family: str, tmp_path: Path) -> None:
    target = load.tiny(family=family)
    packed(tmp_path / "package", made(target), target)
    with pytest.raises(InputError, match=said("layouts.block-not-run")):
        export_package(tmp_path / "package", target, "vllm", tmp_path / "out")


@pytest.mark.parametrize(
    ("engine", "settings", "message"),
    [
        ("eagle", {"attention_bias": True}, r"^to=eagle: .* biases .*to=vllm"),
        ("sglang", {"mlp_bias": True}, r"^to=sglang: .* biases .*to=vllm"),
        ("vllm", {"hidden_act": "gelu"}, r"^to=vllm: .* gelu, .* silu"),
        ("eagle", {"head_dim": 8}, r"^to=eagle: .* heads .* width.*to=vllm"),
        (
            "eagle",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
            "RoPE of type dynamic",
        ),
    ],
)
def test_what_one_engine_does_not_run(
    engine: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    target = load.tiny(**settings)
    packed(tmp_path / "package", made(target), target)
    with pytest.raises(InputError, match=message):
        export_package(tmp_path / "package", target, engine, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_reduced_vocabularies(tiny: Target, tmp_path: Path) -> None:
    """SGLang takes a list of ids; in the others EAGLE-1 proposes from the target's full head,
    which the notes say."""
    packed(tmp_path / "package", made(tiny, draft_ids=IDS), tiny)
    found = export_package(tmp_path / "package", tiny, "sglang", tmp_path / "sglang")
    assert json.loads((tmp_path / "sglang" / eagle1.TOKEN_MAP).read_text()) == IDS
    assert "--speculative-token-map" in found.command and "torch.save" in found.notes[0]
    found = export_package(
        tmp_path / "package", tiny, "sglang", tmp_path / "whole", vocabulary="whole"
    )
    assert not (tmp_path / "whole" / eagle1.TOKEN_MAP).exists() and "token-map" not in found.command
    assert read_back(tmp_path / "whole", tiny).choices == 320
    found = export_package(tmp_path / "package", tiny, "vllm", tmp_path / "vllm")
    assert (
        "drafts from 100 tokens" in found.notes[0]
        and read_back(tmp_path / "vllm", tiny).choices == 100
    )
    with pytest.raises(InputError, match=r"vocabulary=reduced: EAGLE-1 in vllm.*to=sglang"):
        export_package(tmp_path / "package", tiny, "vllm", tmp_path / "no", vocabulary="reduced")
    packed(tmp_path / "package", made(tiny), tiny)
    with pytest.raises(InputError, match="vocabulary=reduced"):
        export_package(tmp_path / "package", tiny, "sglang", tmp_path / "no", vocabulary="reduced")


def test_dtypes(tiny: Target, tmp_path: Path) -> None:
    drafter = made(tiny)
    half = exported(tmp_path / "a", tiny, drafter, "vllm", dtype="bfloat16")
    assert {t.dtype for t in load_file(half / "model.safetensors").values()} == {torch.bfloat16}
    saved = json.loads((half / "config.json").read_text())
    assert saved["dtype"] == saved["torch_dtype"] == "bfloat16"
    assert torch.equal(read_back(half, tiny).fc.weight, drafter.fc.weight.bfloat16().float())
    other = exported(tmp_path / "b", tiny, drafter, "eagle", dtype="bfloat16")
    assert names(other) == {} and read_back(other, tiny) is not None, (
        "an embedding in bfloat16 is still the target's"
    )
    export_package(tmp_path / "a/package", tiny, "vllm", tmp_path / "f16", dtype="float16")
    assert {t.dtype for t in load_file(tmp_path / "f16/model.safetensors").values()} == {
        torch.float16
    }
    with torch.no_grad():
        drafter.fc.weight[0, 0] = 1e6
    packed(tmp_path / "large", drafter, tiny)
    with pytest.raises(InputError, match=r"fc\.weight as float16.*dtype=float32"):
        export_package(tmp_path / "large", tiny, "vllm", tmp_path / "no", dtype="float16")
    assert not (tmp_path / "no").exists()


def test_a_token_map_of_other_ids_than_the_packages(tiny: Target, tmp_path: Path) -> None:
    out = exported(tmp_path, tiny, made(tiny, draft_ids=IDS), "sglang")
    assert names(out) == {}
    map_of(out, IDS[:-1])
    assert names(out) == {"token-map-differs": True}
    (out / origin.FILE).unlink()
    assert names(out) == {}
    # What the export's own note says to make of it.
    torch.save(IDS, out / "hot_token_ids.pt")
    assert names(out) == {"pickle-beside-safetensors": False}
    (out / "pytorch_model.bin").write_bytes(b"\x80")
    assert names(out) == {"pickle-beside-safetensors": True}


def test_an_index_that_is_right(good: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(good / "vllm", tmp_path / "head"))
    index_of(path, "model.safetensors")
    assert names(path, "vllm") == {}


# --- faults ---------------------------------------------------------------------------------------


def map_of(path: Path, ids: Any) -> None:
    (path / eagle1.TOKEN_MAP).write_text(json.dumps(ids))


def index_of(path: Path, file: Any) -> None:
    held = load_file(path / "model.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(held, file)}))


QKV = {
    f"layers.0.self_attn.{name}_proj.bias": torch.zeros(64 if name == "q" else 32) for name in "qkv"
}
ONLY_NEW = both(config(rope_theta=DROP), config(rope_parameters__rope_theta=5e5))
FAULTS: dict[str, tuple[str, Edit, str, bool]] = {
    "norm": ("vllm", put("layers.0.input_layernorm.weight", 64), "norm-before-attention", True),
    "head in vLLM": ("vllm", put("lm_head.weight", 320, 64), "head-shipped", True),
    "head in SGLang": ("sglang", put("lm_head.weight", 320, 64), "head-shipped", False),
    "final norm": ("vllm", put("norm.weight", 64), "final-norm", True),
    "bias dropped": ("vllm", put("fc.bias", 64), "fc-bias-dropped", True),
    "bias of zeros dropped": ("vllm", put("fc.bias", 64, value=0.0), "fc-bias-dropped", False),
    "bias random": ("sglang", drop("fc.bias"), "fc-bias-missing", True),
    "bias undeclared": ("eagle", config(bias=DROP), "fc-bias-undeclared", True),
    "bias read as attention's": ("vllm", config(bias=True), "bias-read-as-attention", True),
    "attention biases": (
        "vllm", tensors(lambda t: t.update(QKV)), "attention-bias-undeclared", True,
    ),
    "SGLang's name": (
        "vllm", config(architectures=["LlamaForCausalLMEagle"]), "architecture", True,
    ),
    "vLLM's name": ("sglang", config(architectures=["LlamaForCausalLM"]), "architecture", True),
    "no name": ("vllm", config(architectures=[]), "architecture", True),
    "tied": ("sglang", config(tie_word_embeddings=True), "tied-embeddings", True),
    "tied in vLLM": ("vllm", config(tie_word_embeddings=True), "tied-embeddings", False),
    "quantised": (
        "vllm", config(quantization_config={"quant_method": "fp8"}), "quantised-config", True,
    ),
    "all of the target's layers": ("vllm", config(num_hidden_layers=3), "layer-count", True),
    "missing": ("vllm", drop("layers.0.mlp.down_proj.weight"), "tensor-missing", True),
    "missing embedding": ("eagle", drop("embed_tokens.weight"), "tensor-missing", True),
    "unknown in vLLM": ("vllm", put("verifier_norm.weight", 64), "tensor-unknown", True),
    "unknown in SGLang": ("sglang", put("verifier_norm.weight", 64), "tensor-unknown", False),
    "shape": ("vllm", put("fc.weight", 64, 64), "tensor-shape", True),
    "dtype": (
        "vllm", tensors(lambda t: t.update({"fc.weight": torch.zeros(64, 128, dtype=torch.int8)})),
        "tensor-dtype", True,
    ),
    "NaN": ("vllm", put("fc.weight", 64, 128, value=float("nan")), "not-finite", True),
    "prefix": (
        "vllm", tensors(lambda t: t.update({"model.fc.weight": t.pop("fc.weight")})),
        "model-prefix", True,
    ),
    "embedding": ("vllm", put("embed_tokens.weight", 320, 64), "embedding-shipped", False),
    "a map": (
        "vllm", tensors(lambda t: t.update(d2t=torch.zeros(8, dtype=torch.int64))),
        "draft-vocab-not-read", True,
    ),
    "a draft vocabulary": ("sglang", config(draft_vocab_size=8), "draft-vocab-not-read", True),
    "activation": ("vllm", config(hidden_act="gelu"), "activation", True),
    "a size that is none": ("vllm", config(hidden_size="64"), "config-value", True),
    "a size beyond all": ("vllm", config(intermediate_size=10**30), "config-value", True),
    "no sizes": ("vllm", config(intermediate_size=DROP), "config-key-missing", True),
    "a model type that is none": ("eagle", config(model_type=None), "config-value", True),
    "a dtype that is none": ("vllm", config(torch_dtype="bf16"), "config-value", True),
    "a scaling that is a text": ("sglang", config(rope_scaling="linear"), "config-value", True),
    "RoPE that is a list": ("eagle", config(rope_parameters=[1e4]), "config-value", True),
    "positions beyond all": ("vllm", config(max_position_embeddings=1e308), "config-value", True),
    "old spelling": ("vllm", ONLY_NEW, "rope-old-spelling-missing", False),
    "old spelling in EAGLE": ("eagle", ONLY_NEW, "rope-old-spelling-missing", True),
    "no RoPE": ("vllm", config(rope_theta=DROP, rope_parameters=DROP), "rope-theta-missing", False),
    "two bases": ("vllm", config(rope_theta=5e5), "rope-spellings-disagree", True),
    "scaling lost": (
        "eagle", config(rope_parameters__rope_type="linear", rope_parameters__factor=2.0),
        "rope-scaling-lost", True,
    ),
    "two scalings": (
        "vllm", config(rope_scaling={"type": "linear", "factor": 2.0}), "rope-spellings-disagree",
        True,
    ),
    "a pickle": (
        "eagle", lambda p: (p / "pytorch_model.bin").write_bytes(b"\x80"),
        "pickle-beside-safetensors", True,
    ),
    "only pickles": (
        "eagle", lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin"),
        "pickled-weights", True,
    ),
    "a shard lost": (
        "vllm", lambda p: (p / INDEX).write_text('{"weight_map": {"lost": "a"}}'), "shard-missing",
        True,
    ),
    "another shard": ("vllm", lambda p: index_of(p, "b.safetensors"), "shard-missing", True),
    "a shard elsewhere": (
        "vllm", lambda p: index_of(p, "../head/model.safetensors"), "shard-missing", True,
    ),
    "a shard that is a number": ("vllm", lambda p: index_of(p, 1), "shard-missing", True),
    "a map of negative ids": ("sglang", lambda p: map_of(p, [-1, 2]), "token-map-ids", True),
    "a map beyond the vocabulary": ("sglang", lambda p: map_of(p, [1, 320]), "token-map-ids", True),
    "a map with an id twice": ("sglang", lambda p: map_of(p, [1, 2, 2]), "token-map-ids", True),
    "a map that does not ascend": ("sglang", lambda p: map_of(p, [2, 1]), "token-map-ids", True),
    "a map of halves": ("sglang", lambda p: map_of(p, [0.5, 1]), "token-map-ids", True),
    "a map of truths": ("sglang", lambda p: map_of(p, [False, True]), "token-map-ids", True),
    "a map that is no list": ("sglang", lambda p: map_of(p, {"1": 2}), "token-map-ids", True),
    "a map longer than the vocabulary": (
        "sglang", lambda p: map_of(p, list(range(321))), "token-map-ids", True,
    ),
    "a map of nothing": ("sglang", lambda p: map_of(p, []), "token-map-ids", True),
    "a map that is no JSON": (
        "sglang", lambda p: (p / eagle1.TOKEN_MAP).write_text("[1,"), "token-map-ids", True,
    ),
    "a map that is a pipe": (
        "sglang", lambda p: os.mkfifo(p / eagle1.TOKEN_MAP), "token-map-ids", True,
    ),
    "nothing": ("vllm", lambda p: (p / "model.safetensors").unlink(), "weights-missing", True),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One export for each engine, and the target's directory."""
    folder = tmp_path_factory.mktemp("good")
    packed(folder / "package", made(tiny), tiny)
    for engine in ENGINES:
        export_package(folder / "package", tiny, engine, folder / engine)
        (folder / engine / origin.FILE).unlink()
    tiny.model.save_pretrained(folder / "target")
    return folder


@pytest.mark.field("F41")
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_by_name(fault: str, good: Path, tmp_path: Path) -> None:
    engine, edit, name, fatal = FAULTS[fault]
    path = Path(shutil.copytree(good / engine, tmp_path / "head"))
    assert name not in names(path, engine)
    edit(path)
    assert names(path, engine).get(name) is fatal, names(path, engine)


@pytest.mark.parametrize(
    ("edit", "name", "engine", "fatal"),
    [
        (config(vocab_size=256), "vocabulary-size", "vllm", True),
        (config(hidden_size=32), "width-differs", "vllm", True),
        (config(max_position_embeddings=64), "positions-short", "sglang", True),
        (config(max_position_embeddings=64), "positions-short", "vllm", False),
        (
            config(rope_theta=5e5, rope_parameters__rope_theta=5e5),
            "rope-differs-from-target",
            "vllm",
            True,
        ),
        (put("embed_tokens.weight", 320, 64), "embedding-differs", "eagle", True),
        (put("embed_tokens.weight", 320, 64), "embedding-differs", "vllm", True),
    ],
)
def test_faults_next_to_the_target(
    edit: Edit, name: str, engine: str, fatal: bool, good: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(good / engine, tmp_path / "head"))
    assert names(path, engine, good / "target") == {}
    edit(path)
    assert names(path, engine, good / "target").get(name) is fatal


def test_the_engine_is_found(good: Path, tmp_path: Path, tiny: Target) -> None:
    """By the export's own word; of a foreign one by its architecture."""
    assert "architecture" in names(good / "sglang", "vllm") and names(good / "sglang") == {}
    out = exported(tmp_path, tiny, made(tiny), "eagle")
    assert names(out) == {}
    with pytest.raises(InputError, match=r"^to=medusa: .* vllm and sglang and eagle"):
        names(out, "medusa")


# --- foreign heads --------------------------------------------------------------------------------


def as_speculators(path: Path) -> None:
    """What speculators 0.1 wrote of such a head."""
    saved = json.loads((path / "config.json").read_text())
    renamed = {"fc.": "fusion_fc.", "layers.0.": "transformer."}

    def rename(held: dict[str, torch.Tensor]) -> None:
        for name in list(held):
            for ours, theirs in renamed.items():
                if name.startswith(ours):
                    held[theirs + name.removeprefix(ours)] = held.pop(name)

    tensors(rename)(path)
    verifier = {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}
    outer = {
        "architectures": ["EagleSpeculator"], "speculators_model_type": "eagle",
        "layernorms": False, "fusion_bias": False,
        "transformer_layer_config": saved,
        "speculators_config": {"algorithm": "eagle", "verifier": verifier},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(outer))


def test_a_speculators_directory(good: Path, tmp_path: Path, tiny: Target) -> None:
    path = Path(shutil.copytree(good / "vllm", tmp_path / "head"))
    plain = read_back(path, tiny)
    as_speculators(path)
    assert same(plain, read_back(path, tiny))
    assert "speculators-type" in names(path)
    config(layernorms=True)(path)
    with pytest.raises(InputError, match="layernorms: true"):
        read_back(path, tiny)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (config(rope_theta=DROP, rope_parameters__rope_theta=5e5), "500000, .* 10000"),
        (config(hidden_size=32), "hidden_size is 32, .* 64"),
        (config(rms_norm_eps=0.1), r"rms_norm_eps is 0\.1"),
        (put("fc.weight", 64, 64), r"fc\.weight is F32 \[64, 64\], .*\[64, 128\]"),
        (put("fc.weight", 64, 128, value=float("inf")), said("layouts.not-finite")),
        (drop("layers.0.mlp.up_proj.weight"), r"layers\.0\.mlp\.up_proj\.weight"),
        (put("layers.0.input_layernorm.weight", 64), r"layers\.0\.input_layernorm\.weight"),
        (put("layers.1.mlp.up_proj.weight", 128, 64), r"layers\.1\.mlp"),
        (put("embed_tokens.weight", 320, 64), r"embed_tokens\.weight"),
        (put("lm_head.weight", 320, 64), r"lm_head\.weight"),
        (put("hidden_layernorm.weight", 64), "hidden_layernorm"),
        (
            tensors(lambda t: t.update({"fc.weight": torch.zeros(64, 128, dtype=torch.int8)})),
            r"fc\.weight is I8 \[64, 128\], .*F32",
        ),
    ],
)
def test_heads_that_cannot_be_taken_over(
    edit: Edit, message: str, good: Path, tmp_path: Path, tiny: Target
) -> None:
    path = Path(shutil.copytree(good / "vllm", tmp_path / "head"))
    edit(path)
    with pytest.raises(InputError, match=message):
        read_back(path, tiny)


def test_a_released_head_with_its_embedding_in_float16(
    good: Path, tmp_path: Path, tiny: Target
) -> None:
    """As EAGLE's authors publish them: everything in float16, the embedding with it, only
    `rope_theta`."""
    path = Path(shutil.copytree(good / "eagle", tmp_path / "head"))
    tensors(lambda t: t.update({name: tensor.half() for name, tensor in t.items()}))(path)
    config(rope_parameters=DROP, rope_scaling=DROP)(path)
    assert names(path, "eagle", good / "target") == {}
    assert torch.equal(
        read_back(path, tiny).fc.weight, read_back(good / "eagle", tiny).fc.weight.half().float()
    )


def test_an_export_is_only_of_its_target(tiny: Target, tmp_path: Path) -> None:
    out = exported(tmp_path, tiny, made(tiny), "vllm")
    with pytest.raises(InputError, match=said("layouts.another-target")):
        read_back(out, load.tiny(seed=1))


def test_the_saved_target_agrees(tmp_path: Path, target: Target) -> None:
    """A target with a tokenizer, compared by its own directory."""
    out = exported(tmp_path, target, made(target), "vllm")
    assert names(out, "vllm", save_target(target, tmp_path / "target")) == {}
