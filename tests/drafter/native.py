"""Tiny targets of the families that are shipped with a head of multi-token prediction, each in a
directory with a head of seeded weights, as released ones are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.drafter.mtp import Mtp
from drafttrain.target import load, native
from drafttrain.target.model import Target
from tests.drafter import make as drafters
from tests.families import model_of

_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "topk_group": 1}
_FULL = {"head_dim": 8, "layer_types": ["full_attention"] * 2, "num_key_value_heads": 2}
_SHARED = {**_FULL, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_ROUTED, "num_key_value_heads": 4, "n_group": 2, "q_lora_rank": 16,
            "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {**_ROUTED, "num_key_value_heads": 2, "head_dim": 8, "n_group": 1, "use_qk_norm": True},
    ),
    "qwen3_next": ("qwen3_next", _SHARED),
    "qwen3_5": ("qwen3_5_text", _FULL),
    "qwen3_5_moe": ("qwen3_5_moe_text", _SHARED),
    "mimo": ("qwen2", {"num_key_value_heads": 2}),
}  # fmt: skip
"""Of Qwen3-Next and Qwen3.5 those layers only that attend; the others' drafts cannot be rolled
back."""


def saved(folder: Path, family: str, *, shard: str = "10GB") -> Path:
    """The target, without a head."""
    kind, settings = FAMILIES[family]
    model = model_of(kind, "sdpa", bos_token_id=0, eos_token_id=1, pad_token_id=0, **settings)
    model.save_pretrained(folder, max_shard_size=shard)
    if family == "mimo":
        edit = json.loads((folder / "config.json").read_text())
        edit |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(edit))
    return folder


def loaded(folder: Path) -> Target:
    return load.hf(str(folder), dtype="float32", device="cpu", attention="sdpa", pack=False)


def head_of(target: Target, seed: int = 5) -> dict[str, Tensor]:
    """A head by the names of the files, experts one by one."""
    torch.manual_seed(seed)
    drafter = drafters.make(Mtp, target, native="new")
    assert drafter.native is not None
    state = {
        name: torch.randn(tensor.shape) * 0.2 + tensor
        for name, tensor in drafter.native.state_dict().items()
    }
    family = native.family_of(target)
    found = {p.name: p.part.clone() for p in native.places(family, target, state, set())}
    return found | {name: tensor.clone() for name, tensor in native.copies(family, target).items()}


def shipped(folder: Path, family: str, *, shard: str = "10GB") -> Path:
    """The target with a head in a file of its own, or in the one file that there is."""
    saved(folder, family, shard=shard)
    head = head_of(loaded(folder))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        save_file(head, folder / "mtp.safetensors", metadata={"format": "pt"})
        said = json.loads(index.read_text())
        said["weight_map"] |= dict.fromkeys(head, "mtp.safetensors")
        index.write_text(json.dumps(said))
    else:
        held = load_file(folder / "model.safetensors")
        save_file(held | head, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
