"""Which settings of a config make another target.

F93, neighbours of the older rotary schema: defaults that are written out, factors of 1, limits of
every kind of scaling, where a scaling begins; a head's width that follows from others; two names of
one activation; a sliding window that the context does not exceed, or that no layer has. What
changes logits is named.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from drafttrain.target import configs, fingerprint, load, rotary
from drafttrain.target.model import Target
from tests.families import model_of


def rope(kind: str = "default", **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, "rope_type": kind, **settings}}


YARN = {"factor": 2.0, "original_max_position_embeddings": 256}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0} | {
    "original_max_position_embeddings": 128
}
EXPLICIT = {"beta_fast": 32, "beta_slow": 1, "truncate": True} | {
    "attention_factor": 0.1 * math.log(2) + 1
}
LONGER = {"max_position_embeddings": 1024}
IDS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
WINDOW = {"use_sliding_window": True, "sliding_window": 24, "num_key_value_heads": 4} | IDS
SAME: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "yarn's defaults": ("llama", rope("yarn", **YARN), rope("yarn", **YARN, **EXPLICIT)),
    "yarn's limit": ("llama", rope("yarn", **YARN), rope("yarn", **YARN) | LONGER),
    "dynamic's original": (
        "llama",
        rope("dynamic", factor=2.0),
        rope("dynamic", factor=2.0, original_max_position_embeddings=512),
    ),
    "linear's limit": ("llama", rope("linear", factor=2.0), rope("linear", factor=2.0) | LONGER),
    "linear by 1": ("llama", rope(), rope("linear", factor=1.0)),
    "llama3's limit": ("llama", rope("llama3", **LLAMA3), rope("llama3", **LLAMA3) | LONGER),
    "the whole head": ("llama", rope(), rope(partial_rotary_factor=1.0)),
    "a factor of 1": ("llama", rope(), rope(factor=1.0)),
    "no window within the context": (
        "mistral",
        WINDOW | {"sliding_window": None},
        WINDOW | {"sliding_window": 512},
    ),
    "a window of no layer": (
        "qwen2",
        WINDOW | {"use_sliding_window": False},
        WINDOW | {"max_window_layers": 2},
    ),
    "windows of some layers": (
        "qwen2",
        WINDOW | {"sliding_window": 512, "max_window_layers": 1},
        WINDOW | {"sliding_window": 900, "max_window_layers": 0},
    ),
    "swish": ("llama", {"hidden_act": "silu"}, {"hidden_act": "swish"}),
} | {
    f"{family}'s head": (family, IDS, {"head_dim": 8} | IDS)
    for family in ("phi3", "olmo2", "granite", "starcoder2")
}
OTHER: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "truncate": (
        "llama",
        rope("yarn", **YARN),
        rope("yarn", **YARN, truncate=False),
        "rope_parameters.truncate not given there, False here",
    ),
    "attention": (
        "llama",
        rope("yarn", **YARN),
        rope("yarn", **YARN, attention_factor=1.2),
        "rope_parameters.attention_factor not given there, 1.2 here",
    ),
    "linear": (
        "llama",
        rope("linear", factor=2.0),
        rope("linear", factor=4.0),
        "rope_parameters.factor 2 there, 4 here",
    ),
    "llama3": (
        "llama",
        rope("llama3", **LLAMA3),
        rope("llama3", **LLAMA3 | {"low_freq_factor": 2.0}),
        "rope_parameters.low_freq_factor 1 there, 2 here",
    ),
    "where dynamic begins": (
        "llama",
        rope("dynamic", factor=2.0),
        rope("dynamic", factor=2.0) | {"max_position_embeddings": 40},
        "max_position_embeddings 512 there, 40 here",
    ),
    "a part of the head": (
        "glm",
        {"head_dim": 8, "num_key_value_heads": 4, "partial_rotary_factor": 0.5} | IDS,
        {"head_dim": 8, "num_key_value_heads": 4, "partial_rotary_factor": 1.0} | IDS,
        "rope_parameters.partial_rotary_factor 0.5 there, 1 here",
    ),
    "window": (
        "mistral",
        WINDOW,
        WINDOW | {"sliding_window": None},
        "sliding_window 24 there, not given here",
    ),
    "layers with a window": (
        "qwen2",
        WINDOW | {"max_window_layers": 0},
        WINDOW | {"max_window_layers": 1},
        "layer_types ['sliding_attention', 'sliding_attention'] there",
    ),
    "gelu": (
        "llama",
        {"hidden_act": "silu"},
        {"hidden_act": "gelu"},
        "hidden_act silu there, gelu here",
    ),
}


@pytest.mark.field("F93")
@pytest.mark.parametrize("name", [*SAME, *OTHER])
def test_configs_count_as_their_logits_do(name: str) -> None:
    family, *settings = SAME[name] if name in SAME else OTHER[name][:3]
    one, other = (Target(model_of(family, "sdpa", **given), None, name) for given in settings)
    ids = torch.arange(3, 90)[None]
    assert torch.equal(one.hidden(ids), other.hidden(ids)) == (name in SAME)
    words = fingerprint.difference("config", one.fingerprint, other.fingerprint)
    if name in SAME:
        assert words == ""
    else:
        assert words.startswith(f"config: {OTHER[name][3]}")
    assert not fingerprint.difference("config", one.fingerprint, one.fingerprint)


@pytest.mark.field("F93")
def test_a_window_counts_by_the_context_of_its_own_config() -> None:
    """And where that was not recorded, as in earlier versions, by that of the other."""
    found = {
        name: json.loads(configs.decisive(model_of("mistral", **IDS, **settings).config))
        for name, settings in {
            "wide": {"sliding_window": 512},
            "none": {"sliding_window": None},
            "longer": {"sliding_window": 512, **LONGER},
        }.items()
    }
    earlier = {k: v for k, v in found["wide"].items() if k != "context"}
    assert not configs.difference(found["wide"], found["none"])
    assert not configs.difference(earlier, found["wide"])
    assert configs.difference(earlier, found["longer"]) == ""
    assert "sliding_window not given there, 512 here" in configs.difference(
        found["none"], found["longer"]
    )


@pytest.mark.field("F93")
def test_a_config_without_a_table_is_compared_by_its_settings() -> None:
    """As the first fingerprints in words were recorded."""
    now = load.tiny(**rope("linear", factor=2.0)).fingerprint
    kept = {k: v for k, v in json.loads(now["config"]).items() if k != rotary.NAME}
    before = {**now, "config": json.dumps(kept)}
    assert rotary.NAME in now["config"] and not fingerprint.difference("config", before, now)
    changed = {**before, "config": before["config"].replace('"factor": 2', '"factor": 4')}
    assert "rope_parameters.factor 4 there, 2 here" in fingerprint.difference(
        "config", changed, now
    )


def test_settings_that_a_family_reads_besides_its_table_still_count() -> None:
    """Some families scale attention by a factor that the table has only as a ratio."""
    model = load.tiny(**rope("yarn", **YARN, mscale=1.0, mscale_all_dim=1.0)).model
    code = 'x = self.config.rope_parameters.get("mscale_all_dim", 0)'
    one, other = (
        {"rope_parameters": {}, **rotary.settings_of(model.config, model, text)}
        for text in (code, "")
    )
    assert rotary.same(one, other)
    assert "mscale_all_dim 1.0 there, not given here" in configs.difference(one, other)


@pytest.mark.field("F93")
def test_a_limit_of_plain_positions_decides_nothing() -> None:
    """Nor where no table of them can be made."""
    one, other = (load.tiny(**more).model.config for more in ({}, LONGER))
    assert configs.decisive(one) == configs.decisive(other)


@pytest.mark.field("F93")
def test_every_spelling_that_an_earlier_version_recorded_is_known() -> None:
    config = load.tiny(**rope("linear", factor=2.0)).model.config
    kept = {k: v for k, v in config.to_dict().items() if k not in configs._VOLATILE}
    for number in (float, int):
        newer = {"rope_theta": number(10000), "rope_type": "linear", "factor": number(2)}
        for rotary_settings in (newer, {**newer, "type": "linear"}):
            form = {k: v for k, v in kept.items() if k[0] != "_"}
            form["rope_parameters"] = rotary_settings
            text = json.dumps(form, sort_keys=True, default=str)
            assert configs.digest(text.encode()) in configs.earlier_digests(config)
