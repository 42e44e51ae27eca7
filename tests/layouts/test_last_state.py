"""MTP from scratch as vLLM serves it: there and back bit for bit, computed as its class of EAGLE-3
does, refused where it would be another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.drafter.mtp import Mtp
from drafttrain.errors import InputError
from drafttrain.export import export_package
from drafttrain.flow import Needs
from drafttrain.layouts import last_state, origin, pairs
from drafttrain.layouts.directory import open_directory
from drafttrain.target import load
from drafttrain.target.model import Target
from tests.drafter import make as drafters
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
)
from tests.layouts.test_eagle3 import AsEngines
from tests.packaging.made import packed

IDS = list(range(1, 201, 2))
SETTINGS: dict[str, dict[str, Any]] = {
    "borrowed": {},
    "reduced": {"draft_ids": IDS},
    "own head": {"draft_ids": IDS, "own_head": True, "steps": 5},
}


def made(target: Target, **settings: Any) -> Mtp:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return stirred(drafters.make(Mtp, target, **settings))


def exported(folder: Path, target: Target, drafter: Mtp, **options: Any) -> Path:
    packed(folder / "package", drafter, target, dtype="float32")
    export_package(folder / "package", target, "vllm", folder / "out", **options)
    return folder / "out"


@pytest.fixture(scope="module")
def tiny() -> Target:
    return load.tiny()


@pytest.mark.parametrize("kind", SETTINGS)
def test_there_and_back(kind: str, tiny: Target, tmp_path: Path) -> None:
    drafter = made(tiny, **SETTINGS[kind])
    out = exported(tmp_path, tiny, drafter)
    assert names(out) == {} and last_state.recognises(open_directory(out, "head"))
    again = read_back(out, tiny)
    assert same(drafter, again) and again.settings() == drafter.settings()
    assert drafts(tiny, drafter) == drafts(tiny, again)
    (out / origin.FILE).unlink()  # as a foreign one
    foreign = read_back(out, tiny)
    assert same(drafter, foreign)
    assert last_state.LAYOUT.shape(foreign, open_directory(out, "head")) == {
        "own_head": drafter.config.own_head
    }


def test_names_and_config(tiny: Target, tmp_path: Path) -> None:
    out = exported(tmp_path, tiny, made(tiny, draft_ids=IDS), tokens=3)
    held = load_file(out / "model.safetensors")
    parts = [f"self_attn.{name}_proj" for name in "qkvo"]
    parts += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    parts += ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
    expected = {f"midlayer.{part}.weight" for part in parts}
    assert held.keys() == expected | {"norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert held["midlayer.self_attn.q_proj.weight"].shape == (64, 128)
    assert torch.equal(held["lm_head.weight"], tiny.output.weight[IDS])
    saved = json.loads((out / "config.json").read_text())
    values = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 64,
        "num_hidden_layers": 1, "vocab_size": 320, "draft_vocab_size": 100,
        "eagle_config": {"use_aux_hidden_state": False}, "norm_output": True,
        "norm_before_residual": False, "fc_norm": False, "norm_before_fc": False,
        "tie_word_embeddings": False,
    }  # fmt: skip
    assert {key: saved[key] for key in values} == values
    assert "target_hidden_size" not in saved and "num_aux_hidden_states" not in saved
    assert '"method": "eagle3"' in (out / "README.md").read_text()


@pytest.mark.parametrize("origin_of_positions", [0, 1])
@pytest.mark.parametrize("kind", SETTINGS)
def test_the_file_computes_what_the_drafter_does(
    kind: str, origin_of_positions: int, tiny: Target, tmp_path: Path
) -> None:
    """Three steps of it, from what the target's own head reads."""
    drafter = made(tiny, **SETTINGS[kind])
    theirs = AsEngines(exported(tmp_path, tiny, drafter))
    ids = torch.randint(3, 320, (1, 24), generator=torch.Generator().manual_seed(2))
    hidden = tiny.features(ids, torch.tensor([24]), Needs(last_hidden=True)).last_hidden
    mine = x = hidden[:, :21]
    places = torch.arange(21)[None]
    with torch.inference_mode():
        for step in range(3):
            tokens = ids[:, 1 + step : 22 + step]
            mine = drafter(mine, tokens, places + step)
            logits, x = theirs(x, tiny.embed(tokens), places + step + origin_of_positions)
            torch.testing.assert_close(x, mine, rtol=1e-4, atol=1e-4)
            kept = torch.as_tensor(drafter.config.draft_ids or range(320))
            torch.testing.assert_close(
                logits[..., kept], drafter.logits(mine), rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_other_families(family: str, tmp_path: Path) -> None:
    target = load.tiny(family=family, tie_word_embeddings=family != "mistral")
    drafter = made(target)
    out = exported(tmp_path, target, drafter)
    assert names(out) == {} and same(drafter, read_back(out, target))


def test_what_is_refused(tiny: Target, tmp_path: Path) -> None:
    capped = load.tiny(family="gemma2")
    with pytest.raises(InputError, match=r"^to=vllm: target tiny-gemma2 scales or caps its logits"):
        exported(tmp_path / "capped", capped, made(capped))
    own = made(tiny, draft_ids=IDS, own_head=True)
    with pytest.raises(InputError, match=r"^vocabulary=whole: .* 100 rows"):
        exported(tmp_path / "own", tiny, own, vocabulary="whole")
    with pytest.raises(InputError, match=r"^to=sglang: Mtp is not exported there: .* to=vllm"):
        pairs.pair_of(Mtp, "sglang", own.settings())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop("midlayer.hidden_norm.weight"), "midlayer.hidden_norm.weight"),
        (put("fc.weight", 64, 64), "fc.weight"),
        (put("midlayer.extra.weight", 64), "midlayer.extra.weight"),
        (put("norm.weight", 64, value=float("nan")), "norm.weight"),
        (put("embed_tokens.weight", 320, 64), "embed_tokens.weight"),
        (config(norm_output=DROP), "norm_output is False, .* True"),
        (config(norm_before_residual=True), "norm_before_residual is True, .* False"),
        (config(rms_norm_eps=0.1), "rms_norm_eps is 0.1"),
        (config(hidden_size=32), "hidden_size"),
        (config(rope_theta=5e5, rope_parameters__rope_theta=5e5), "a base of 500000|RoPE is .5000"),
    ],
)
def test_heads_that_cannot_be_taken_over(
    edit: Edit, message: str, tiny: Target, tmp_path: Path
) -> None:
    out = exported(tmp_path, tiny, made(tiny))
    edit(out)
    with pytest.raises(InputError, match=message):
        read_back(out, tiny)
