"""EAGLE-3 for vLLM, SGLang, EAGLE's code and the library speculators: there and back bit for bit,
computed as engines do, taken over from elsewhere, every fault by its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from drafttrain.drafter.eagle3 import Eagle3
from drafttrain.errors import InputError
from drafttrain.export import export_package
from drafttrain.flow import Features, Needs
from drafttrain.layouts import eagle3, engines, origin, pairs
from drafttrain.layouts.directory import open_directory
from drafttrain.layouts.eagle3 import nested
from drafttrain.layouts.eagle3.facts import guessed
from drafttrain.target import load
from drafttrain.target.model import Target
from tests.drafter import make as drafters
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
from tests.packaging.made import packed

IDS = list(range(1, 201, 2))
ENGINES = engines.names(eagle3.LAYOUT.engines())
FIVE = [0, 2, 3, 5, 6]
NEW = {"fc_norm": True, "norm_output": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "three": {},
    "reduced": {"draft_ids": IDS},
    "borrowed": {"draft_ids": IDS, "own_head": False},
    "3.1, five": {"taps": FIVE, **NEW},
    "one": {"taps": [3], "own_head": False},
    "the last": {"taps": [1, 7]},
    "two layers": {"layers": 2, "norm_output": True},
    "sizes": {"heads": 2, "mlp": 48},
    "norms of all": {"norm_before_fc": True, "norm_before_residual": True},
    "qwen": {"qk_norm": True, "draft_ids": IDS},
    "own base": {"rotary": {"rope_theta": 5e5}},
}
REFUSED: dict[tuple[str, str], str] = {
    ("3.1, five", "eagle"): "fc_norm, norm_output, which EAGLE's code .*to=vllm or to=sglang",
    ("one", "sglang"): "one layer of the target, and SGLang then passes over fc.*to=vllm",
    ("the last", "sglang"): "reads layer 7 of the target, the last one.*to=vllm or to=specul",
    ("the last", "eagle"): r"reads the layers \[1, 7\] of the target",
    ("one", "eagle"): r"reads the layers \[3\] of the target, .* always \[1, 3, 4\]",
    ("two layers", "eagle"): "norm_output, which EAGLE's code does not read",
    ("norms of all", "sglang"): "norm_before_residual, which SGLang does not read.*to=vllm",
    ("norms of all", "eagle"): "norm_before_residual",
    ("qwen", "sglang"): "queries and keys have norms, .* SGLang.* to=vllm or to=speculators",
    ("qwen", "eagle"): "queries and keys have norms",
}


def made(target: Target, **settings: Any) -> Eagle3:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return stirred(drafters.make(Eagle3, target, **settings))


def exported(folder: Path, target: Target, drafter: Eagle3, engine: str, **options: Any) -> Path:
    packed(folder / "package", drafter, target, dtype="float32")
    export_package(folder / "package", target, engine, folder / "out", **options)
    return folder / "out"


@pytest.fixture(scope="module")
def tiny() -> Target:
    return load.tiny(layers=8)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", SETTINGS)
def test_there_and_back(kind: str, engine: str, tiny: Target, tmp_path: Path) -> None:
    drafter = made(tiny, **SETTINGS[kind])
    if (kind, engine) in REFUSED:
        with pytest.raises(InputError, match=rf"^to={engine}: .*{REFUSED[kind, engine]}"):
            exported(tmp_path, tiny, drafter, engine)
        assert not (tmp_path / "out").exists()
        return
    out = exported(tmp_path, tiny, drafter, engine)
    assert names(out) == {}
    again = read_back(out, tiny)
    assert same(drafter, again) and again.settings() == drafter.settings()
    assert drafts(tiny, drafter, 2) == drafts(tiny, again, 2)
    (out / origin.FILE).unlink()  # as a foreign one
    foreign = read_back(out, tiny)
    assert same(drafter, foreign)
    shape = eagle3.LAYOUT.shape(foreign, open_directory(out, "head"))
    rebuilt = drafters.make(Eagle3, tiny, draft_ids=foreign.config.draft_ids, **shape)
    assert rebuilt.layer_config().to_dict() == drafter.layer_config().to_dict()
    assert rebuilt.taps == drafter.taps


# --- what is in the file --------------------------------------------------------------------------


def test_names_and_config(tiny: Target, tmp_path: Path) -> None:
    drafter = made(tiny, draft_ids=IDS, **NEW)
    out = exported(tmp_path, tiny, drafter, "vllm")
    held = load_file(out / "model.safetensors")
    parts = [f"self_attn.{name}_proj" for name in "qkvo"]
    parts += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    parts += ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
    expected = {f"midlayer.{part}.weight" for part in parts}
    expected |= {f"fc_norm.{j}.weight" for j in range(3)}
    assert held.keys() == expected | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    saved = json.loads((out / "config.json").read_text())
    values = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 320, "draft_vocab_size": 100, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "attention_bias": False,
        eagle3.KEY: [2, 4, 5], "num_aux_hidden_states": 3,
        "eagle_config": {"use_aux_hidden_state": True, eagle3.KEY: [1, 3, 4]},
        "norm_before_residual": False, "fc_norm": True, "norm_before_fc": False,
        "norm_output": True, "rope_theta": 10000.0, "rope_scaling": None, "dtype": "float32",
    }  # fmt: skip
    assert {key: saved[key] for key in values} == values
    assert "target_hidden_size" not in saved and "quantization_config" not in saved


@pytest.mark.parametrize("own", [True, False], ids=["own head", "borrowed"])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "speculators"])
def test_the_draft_vocabulary(engine: str, own: bool, tiny: Target, tmp_path: Path) -> None:
    """Offsets, marks and rows, in every engine's file; whole only where all rows are known."""
    drafter = made(tiny, draft_ids=IDS, own_head=own)
    held = load_file(exported(tmp_path, tiny, drafter, engine) / "model.safetensors")
    assert held["d2t"].dtype == torch.int64 and held["t2d"].dtype == torch.bool
    assert (held["d2t"] + torch.arange(100)).tolist() == IDS
    assert held["t2d"].nonzero().flatten().tolist() == IDS
    rows = drafter.lm_head.weight if drafter.lm_head is not None else tiny.output.weight[IDS]
    assert torch.equal(held["lm_head.weight"], rows)
    if own:
        with pytest.raises(InputError, match=r"^vocabulary=whole: .* 100 rows"):
            export_package(
                tmp_path / "package", tiny, engine, tmp_path / "whole", vocabulary="whole"
            )
        return
    export_package(tmp_path / "package", tiny, engine, tmp_path / "whole", vocabulary="whole")
    held = load_file(tmp_path / "whole/model.safetensors")
    assert not {"d2t", "t2d"} & held.keys() and torch.equal(
        held["lm_head.weight"], tiny.output.weight
    )
    assert read_back(tmp_path / "whole", tiny).choices == 320


def test_a_later_layers_norm_is_there_for_both_engines(tiny: Target, tmp_path: Path) -> None:
    drafter = made(tiny, layers=2)
    held = load_file(exported(tmp_path, tiny, drafter, "vllm") / "model.safetensors")
    own = drafter.layers[1].input_layernorm.weight
    assert torch.equal(held["layers.1.input_layernorm.weight"], own)
    assert torch.equal(held["layers.1.hidden_norm.weight"], own)
    assert names(tmp_path / "out", "sglang") == {} == names(tmp_path / "out", "vllm")


def test_the_library_speculators(tiny: Target, tmp_path: Path) -> None:
    out = exported(tmp_path, tiny, made(tiny, taps=FIVE, qk_norm=True), "speculators", tokens=3)
    saved = json.loads((out / "config.json").read_text())
    assert (saved["architectures"], saved["speculators_model_type"]) == (
        ["Eagle3DraftModel"],
        "eagle3",
    )
    block = saved[nested.BLOCK]
    assert "model_type" not in saved and block["model_type"] == "qwen3"
    # vLLM's adapter reads the number of states only there.
    assert saved[eagle3.KEY] == [1, 3, 4, 6, 7] and block["num_aux_hidden_states"] == 5
    assert saved["norm_before_residual"] is False and saved["norm_before_fc"] is False
    assert "architectures" not in block and block["rope_theta"] == 10000.0
    inner = saved["speculators_config"]
    assert inner["proposal_methods"][0]["speculative_tokens"] == 3
    assert inner["verifier"] == {"name_or_path": tiny.name, "architectures": ["LlamaForCausalLM"]}
    held = load_file(out / "model.safetensors")
    assert torch.equal(held["embed_tokens.weight"], tiny.embedding.weight)
    assert not [name for name in held if name.startswith("midlayer.")]


# --- computed as engines do -----------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class AsEngines:
    """One file by its config.json, as vLLM's class of EAGLE-3 computes it."""

    def __init__(self, path: Path) -> None:
        self.config = json.loads((path / "config.json").read_text())
        self.held = {
            name.replace("midlayer.", "layers.0."): tensor
            for name, tensor in load_file(path / "model.safetensors").items()
        }
        keys = ("hidden_size", "num_attention_heads", "head_dim", "rope_parameters")
        self.rope = LlamaRotaryEmbedding(LlamaConfig(**{key: self.config[key] for key in keys}))
        self.eps = self.config["rms_norm_eps"]

    def combined(self, stream: list[Tensor]) -> Tensor:
        """x[0..N-1] to what the layer reads."""
        taken = [stream[i] for i in sorted(self.config[eagle3.KEY])]
        if self.config["fc_norm"]:
            taken = [
                rms(x, self.held[f"fc_norm.{j}.weight"], self.eps) for j, x in enumerate(taken)
            ]
        joined = torch.cat(taken, -1)
        if self.config["norm_before_fc"]:
            joined = rms(joined, self.held["input_norm.weight"], self.eps)
        return joined @ self.held["fc.weight"].T

    def layer(self, number: int, x: Tensor, embedded: Tensor, places: Tensor) -> Tensor:
        def held(name: str) -> Tensor:
            return self.held[f"layers.{number}.{name}.weight"]

        def norm(value: Tensor, name: str) -> Tensor:
            return rms(value, held(name), self.eps)

        read = norm(x, "input_layernorm") if number else norm(x, "hidden_norm")
        x = read if self.config["norm_before_residual"] and not number else x
        if not number:
            read = torch.cat((norm(embedded, "input_layernorm"), read), -1)
        heads, kv = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q, k, v = (
            (read @ held(f"self_attn.{name}_proj").T).unflatten(-1, (count, -1)).transpose(1, 2)
            for name, count in (("q", heads), ("k", kv), ("v", kv))
        )
        if self.config["architectures"] == ["Eagle3Qwen3ForCausalLM"]:
            q, k = norm(q, "self_attn.q_norm"), norm(k, "self_attn.k_norm")
        q, k = apply_rotary_pos_emb(q, k, *self.rope(x, places))
        k, v = repeat_kv(k, heads // kv), repeat_kv(v, heads // kv)
        scores = q @ k.transpose(-1, -2) / self.config["head_dim"] ** 0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
        x = x + out.transpose(1, 2).flatten(2) @ held("self_attn.o_proj").T
        y = norm(x, "post_attention_layernorm")
        gate, up = (y @ held(f"mlp.{name}_proj").T for name in ("gate", "up"))
        return x + (functional.silu(gate) * up) @ held("mlp.down_proj").T

    def __call__(self, x: Tensor, embedded: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Logits over the whole vocabulary, and what the next step reads."""
        for number in range(self.config["num_hidden_layers"]):
            x = self.layer(number, x, embedded, places)
        out = rms(x, self.held["norm.weight"], self.eps)
        logits = out @ self.held["lm_head.weight"].T
        if "d2t" in self.held:
            count = torch.arange(logits.shape[-1])
            wide = logits.new_full((*logits.shape[:-1], self.config["vocab_size"]), -torch.inf)
            wide[..., count + self.held["d2t"]] = logits
            logits = wide
        return logits, out if self.config["norm_output"] else x


@pytest.mark.parametrize("origin_of_positions", [0, 1])
@pytest.mark.parametrize("kind", SETTINGS)
def test_the_file_computes_what_the_drafter_does(
    kind: str, origin_of_positions: int, tiny: Target, tmp_path: Path
) -> None:
    """Two steps of it, whatever the place that positions are counted from."""
    drafter = made(tiny, **SETTINGS[kind])
    theirs = AsEngines(exported(tmp_path, tiny, drafter, "vllm"))
    ids = torch.randint(3, 320, (1, 24), generator=torch.Generator().manual_seed(2))
    features = tiny.features(ids, torch.tensor([24]), Needs(layers=tuple(range(8))))
    stream = [tiny.embed(ids), *(features.layers[layer] for layer in range(8))]
    places = torch.arange(22)[None]
    with torch.inference_mode():
        read = Features(layers={tap: features.layers[tap][:, :22] for tap in drafter.taps})
        mine = drafter.fuse(read.layers)
        x = theirs.combined([value[:, :22] for value in stream])
        torch.testing.assert_close(x, mine)
        for step in range(2):
            tokens = ids[:, 1 + step : 23 + step]
            out, fed = drafter(mine, tokens, places + step)
            logits, x = theirs(x, tiny.embed(tokens), places + step + origin_of_positions)
            torch.testing.assert_close(x, fed, rtol=1e-4, atol=1e-4)
            wide = drafter.candidates(drafter.logits(out))
            torch.testing.assert_close(
                logits[..., torch.as_tensor(drafter.config.draft_ids or range(320))],
                wide.logits,
                rtol=1e-4,
                atol=1e-4,
            )
            mine = fed


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "mistral"])
def test_other_families(engine: str, family: str, tmp_path: Path) -> None:
    target = load.tiny(family=family, layers=8, tie_word_embeddings=family != "mistral")
    drafter = made(target, qk_norm=family == "qwen3", own_head=False)
    out = exported(tmp_path, target, drafter, engine)
    assert names(out) == {} and same(drafter, read_back(out, target))
    saved = json.loads((out / "config.json").read_text())
    if engine == "vllm":
        llama = "LlamaForCausalLMEagle3"
        assert saved["architectures"] == ["Eagle3Qwen3ForCausalLM" if family == "qwen3" else llama]
    assert saved["tie_word_embeddings"] is False


def test_a_head_of_the_target_that_has_a_bias(tmp_path: Path) -> None:
    model: Any = load.tiny().model
    model.lm_head = torch.nn.Linear(64, 320)
    target = Target(model, None, "biased")
    with pytest.raises(InputError, match=r"^to=vllm: the head of target biased has a bias"):
        exported(tmp_path, target, made(target, taps=[0, 1]), "vllm")


# --- faults ---------------------------------------------------------------------------------------


def renamed(old: str, new: str) -> Edit:
    return tensors(
        lambda held: [held.update({n.replace(old, new): held.pop(n)}) for n in list(held)]
    )


def layers(top: Any, nested: Any, count: Any = DROP) -> Edit:
    places = {eagle3.KEY: top, f"eagle_config__{eagle3.KEY}": nested}
    return config(**places, num_aux_hidden_states=count)


FAULTS: dict[str, tuple[str, Edit, str, bool]] = {
    "norms unsaid": ("vllm", config(fc_norm=False), "norms-undeclared", True),
    "norms unsaid in SGLang": ("sglang", config(fc_norm=DROP), "norms-undeclared", True),
    "a fourth norm": ("vllm", put("fc_norm.3.weight", 64), "tensor-unknown", True),
    "norms in EAGLE": ("eagle", config(fc_norm=True), "flag-not-read", True),
    "fed back otherwise in EAGLE": ("eagle", config(norm_output=True), "flag-not-read", True),
    "a nested flag": ("sglang", config(eagle_config__norm_before_fc=True), "tensor-missing", True),
    "a nested flag in EAGLE": (
        "eagle", config(eagle_config__norm_before_fc=True), "flag-not-read", True,
    ),
    "other layers in EAGLE": ("eagle", layers([1, 4, 5], [0, 3, 4], 3), "layers-not-read", True),
    "five states in EAGLE": ("eagle", put("fc.weight", 64, 320), "states-count", True),
    "two layers in EAGLE": ("eagle", config(num_hidden_layers=2), "layer-count", True),
    "vLLM's name in EAGLE": (
        "eagle", renamed("midlayer.", "layers.0."), "first-layer-name", True,
    ),
    "no layers in EAGLE": ("eagle", layers(DROP, DROP, 3), "layers-missing", False),
    "one convention in EAGLE": ("eagle", layers([2, 4, 5], DROP, 3), "layers-one-convention",
        False),
    "no states, but fc": (
        "vllm", config(eagle_config__use_aux_hidden_state=False), "tensor-unknown", True,
    ),
    "one state in SGLang": (
        "sglang", both(put("fc.weight", 64, 64), layers([4], [3], 1)), "fc-not-run", True,
    ),
    "the last state in SGLang": ("sglang", layers([2, 4, 8], [1, 3, 7], 3), "layers-not-read",
        True),
    "a number of states in SGLang": ("sglang", layers([2, 4, 5], [1, 3, 4], 4), "states-count",
        True),
    "a layer twice": ("vllm", layers([2, 2, 5], [1, 1, 4], 3), "layers-not-ascending", True),
    "five states unnamed": (
        "vllm", both(put("fc.weight", 64, 320), layers(DROP, DROP, 5)), "layers-missing", True,
    ),
    "biases that are promised": ("vllm", config(attention_bias=True), "tensor-missing", True),
    "biases of an MLP": ("vllm", config(mlp_bias=True), "tensor-missing", True),
    "five states, numbered outside": (
        "speculators",
        both(put("fc.weight", 64, 320), layers([1, 3, 4, 6, 7], DROP, 5)), "states-count", True,
    ),
    "half of a map": ("vllm", drop("t2d"), "t2d-missing", False),
    "the other half": ("vllm", drop("d2t"), "d2t-missing", True),
    "no head in EAGLE": ("eagle", drop("lm_head.weight"), "head-missing", True),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One export for each engine, and the target's directory."""
    folder = tmp_path_factory.mktemp("good")
    for engine in ENGINES:
        flags = {} if engine == "eagle" else NEW
        packed(folder / "package", made(tiny, draft_ids=IDS, **flags), tiny, dtype="float32")
        export_package(folder / "package", tiny, engine, folder / engine)
        (folder / engine / origin.FILE).unlink()
    tiny.model.save_pretrained(folder / "target")
    return folder


def copied(good: Path, engine: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good / engine, tmp_path / "head"))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_by_name(fault: str, good: Path, tmp_path: Path) -> None:
    engine, edit, name, fatal = FAULTS[fault]
    path = copied(good, engine, tmp_path)
    eyes = None if engine == "speculators" else engine
    assert names(path, eyes, good / "target") == {}
    edit(path)
    found = names(path, eyes, good / "target")
    assert found.get(name) is fatal, found


def test_a_head_that_captures_no_states(good: Path, tmp_path: Path) -> None:
    """It reads what the target's own head reads, and has no fc."""
    path = copied(good, "vllm", tmp_path)
    norms = [f"fc_norm.{j}.weight" for j in range(3)]
    both(
        layers(DROP, DROP),
        config(eagle_config__use_aux_hidden_state=False, fc_norm=False),
        tensors(lambda held: [held.pop(name) for name in ("fc.weight", *norms)]),
    )(path)
    assert names(path, "vllm", good / "target") == {}


# --- heads from elsewhere -------------------------------------------------------------------------


def cast(dtype: torch.dtype) -> Edit:
    return tensors(
        lambda held: held.update({n: t.to(dtype) for n, t in held.items() if t.is_floating_point()})
    )


RELEASED: dict[str, tuple[str, Edit]] = {
    "as its authors name it": ("eagle", config(architectures=["LlamaForCausalLMEagle3"])),
    "by another name": ("eagle", config(architectures=["Eagle3LlamaForCausalLM"])),
    "without layers": ("eagle", layers(DROP, DROP)),
    "layers for SGLang only": ("sglang", layers(DROP, [1, 3, 4])),
    "layers for vLLM only": ("vllm", layers([2, 4, 5], DROP, 3)),
    "layers.0.": ("vllm", renamed("midlayer.", "layers.0.")),
    "old spelling": ("vllm", config(rope_parameters=DROP, rope_scaling=DROP)),
    "no head_dim": ("vllm", config(head_dim=DROP)),
    "tied in its config": ("vllm", config(tie_word_embeddings=True)),
    "a short context": ("vllm", config(max_position_embeddings=64)),
    "more in its config": ("vllm", config(pretraining_tp=1, initializer_range=0.02)),
}


@pytest.mark.parametrize("kind", RELEASED)
def test_released_heads(kind: str, good: Path, tmp_path: Path, tiny: Target) -> None:
    engine, edit = RELEASED[kind]
    path = copied(good, engine, tmp_path)
    edit(path)
    pairs.judge(open_directory(path, "head"))
    found = read_back(path, tiny)
    assert same(found, read_back(good / engine, tiny)) and found.taps == (1, 3, 4)


def test_half_precision_and_the_embedding_with_it(good: Path, tmp_path: Path, tiny: Target) -> None:
    path = copied(good, "eagle", tmp_path)
    embedding = tiny.embedding.weight.detach().clone()
    tensors(lambda held: held.update({"embed_tokens.weight": embedding}))(path)
    cast(torch.bfloat16)(path)
    own = read_back(good / "eagle", tiny).fc.weight
    assert torch.equal(read_back(path, tiny).fc.weight, own.bfloat16().float())
    put("embed_tokens.weight", 320, 64)(path)
    with pytest.raises(InputError, match=r"\[embedding-differs\] embed_tokens\.weight"):
        read_back(path, tiny)


def test_a_head_turned_by_another_base(
    good: Path, tmp_path: Path, tiny: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """As EAGLE's authors' heads turn by 10000 under targets that do not: it stays with the head."""
    path = copied(good, "vllm", tmp_path)
    config(rope_theta=5e5, rope_parameters__rope_theta=5e5)(path)
    found = read_back(path, tiny)
    assert found.config.rotary == {"rope_theta": 5e5} and "a base of 500000" in caplog.text
    again = exported(tmp_path / "again", tiny, found, "vllm")
    assert json.loads((again / "config.json").read_text())["rope_theta"] == 5e5
    config(rope_theta=DROP, rope_parameters=DROP)(path)
    other = load.tiny(layers=8, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    with pytest.raises(InputError, match=r"\[rope-theta-missing\]"):
        read_back(path, other)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5e5, r"rotary=500000\.0: needs a mapping with rope_theta"),
        ({"rope_type": "default"}, r"rotary\.rope_theta=None: needs a finite number above 0"),
        ({"rope_theta": 0}, r"rotary\.rope_theta=0"),
        ({"rope_theta": 1e4, "rope_type": "spiral"}, "rotary=.*spiral.*: transformers makes no"),
        ({"rope_theta": 1e4, "rope_type": "linear"}, "rotary=.*linear.*: transformers makes no"),
    ],
)
def test_rope_that_is_none(given: Any, message: str, tiny: Target) -> None:
    with pytest.raises(InputError, match=message):
        drafters.make(Eagle3, tiny, rotary=given)


def test_a_projection_that_is_the_targets(good: Path, tmp_path: Path, tiny: Target) -> None:
    path = copied(good, "vllm", tmp_path)
    rows = tiny.output.weight[IDS].detach().bfloat16()
    tensors(lambda held: held.update({"lm_head.weight": rows}))(path)
    assert read_back(path, tiny).lm_head is None
    both(drop("lm_head.weight"), drop("d2t"), drop("t2d"), config(draft_vocab_size=DROP))(path)
    found = read_back(path, tiny)
    assert found.lm_head is None and found.choices == 320


def shifted(held: dict[str, Tensor]) -> None:
    held["t2d"] = held["t2d"].roll(1)


EARLY: dict[str, tuple[Edit, str]] = {
    "half of a map": (drop("t2d"), "t2d-missing"),
    "the other half": (drop("d2t"), "d2t-missing"),
    "marks of other tokens": (tensors(shifted), "t2d-disagrees"),
    "maps of a whole vocabulary": (
        both(config(draft_vocab_size=320), put("lm_head.weight", 320, 64)),
        "d2t-for-whole-vocabulary",
    ),
    "a layer too few": (layers([2, 4], [1, 3], 3), "layers-count"),
    "a layer twice": (layers([2, 2, 4], [1, 1, 3], 3), "layers-not-ascending"),
    "another number of states": (layers([1, 2, 4, 5], [0, 1, 3, 4], 4), "layers-count"),
    "two numberings that differ": (layers([2, 4, 5], [2, 4, 5], 3), "layers-conventions-disagree"),
    "a layer below all": (layers([-1, 4, 5], [-2, 3, 4], 3), "layers-out-of-range"),
    "layers in words": (layers("all", DROP, 3), "layers-value"),
    "drafts in parallel": (put("mask_hidden", 1, 1, 192), "parallel-drafting"),
    "a part lost": (drop("midlayer.self_attn.q_proj.weight"), "tensor-missing"),
    "a stranger": (put("verifier_norm.weight", 64), "tensor-unknown"),
    "norms unsaid": (config(fc_norm=False), "norms-undeclared"),
    "no layers": (config(num_hidden_layers=DROP), "config-key-missing"),
    "no attention heads": (config(num_attention_heads=DROP), "config-key-missing"),
    "damaged": (put("norm.weight", 64, value=float("nan")), "not-finite"),
    "quantised": (config(quantization_config={"quant_method": "awq"}), "quantised-config"),
}
LATE: dict[str, tuple[Edit, str]] = {
    "a layer beyond": (layers([2, 4, 9], [1, 3, 8], 3), r"\[layers-out-of-range\].*x\[8\]"),
    "another width": (config(hidden_size=32), r"\[width-differs\]|\[tensor-shape\]"),
    "another vocabulary": (config(vocab_size=256), r"\[vocabulary-size\]|\[tensor-shape\]"),
    "another epsilon": (config(rms_norm_eps=0.1), r"rms_norm_eps is 0\.1"),
    "wider heads": (
        config(head_dim=32, num_attention_heads=2, num_key_value_heads=1), "head_dim is 32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", EARLY)
def test_heads_that_are_refused_before_the_target_is_read(
    kind: str, good: Path, tmp_path: Path
) -> None:
    edit, name = EARLY[kind]
    path = copied(good, "vllm", tmp_path)
    edit(path)
    with pytest.raises(InputError, match=rf"\[{name}\]") as error:
        pairs.judge(open_directory(path, "head"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", LATE)
def test_heads_of_other_targets(kind: str, good: Path, tmp_path: Path, tiny: Target) -> None:
    edit, message = LATE[kind]
    path = copied(good, "vllm", tmp_path)
    edit(path)
    with pytest.raises(InputError, match=message):
        read_back(path, tiny)


def test_what_an_export_says_of_itself_must_be_what_its_config_says(
    tiny: Target, tmp_path: Path
) -> None:
    out = exported(tmp_path, tiny, made(tiny, **NEW), "vllm")
    layers([2, 4, 6], [1, 3, 5], 3)(out)
    with pytest.raises(InputError, match=r"eagle_aux.* is \[2, 4, 6\], .* \[2, 4, 5\]"):
        read_back(out, tiny)


NESTED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "the order of norms": (config(norm_before_residual=DROP), r"\[norm-order-unsaid\]"),
    "no states": (
        config(transformer_layer_config__eagle_config={"use_aux_hidden_state": False}),
        r"\[states-needed\]",
    ),
    "no block": (config(transformer_layer_config="llama"), "transformer_layer_config"),
    "P-EAGLE": (config(speculators_model_type="peagle"), "of type peagle"),
}


@pytest.mark.parametrize("kind", NESTED)
def test_directories_of_speculators_that_are_refused(kind: str, good: Path, tmp_path: Path) -> None:
    edit, message = NESTED[kind]
    path = copied(good, "speculators", tmp_path)
    assert pairs.reader_of(open_directory(path, "head"))[0] is Eagle3
    edit(path)
    with pytest.raises(InputError, match=message):
        pairs.judge(open_directory(path, "head"))


def test_the_layers_that_engines_guess() -> None:
    """The same as the drafter's own choice, one higher."""
    from drafttrain.drafter.eagle3 import default_taps

    for count in range(7, 100):
        assert guessed(count) == [tap + 1 for tap in default_taps(count)]
