"""Heads that drafttrain does not write, tiny, as engines and the library speculators take them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from drafttrain.layouts import eagle3, vocabulary
from tests.layouts.made import DROP, config, directory, put, tensors

V, W, H, MLP, STATES, LAYERS = 64, 16, 16, 24, 3, 8
"""Vocabulary, draft vocabulary, width, MLP, captured states, and the target's layers."""
IDS = torch.arange(1, 2 * W, 2)
ROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    "rope_theta": 1e5,
    "rope_scaling": None,
}
BLOCK: dict[str, Any] = {
    "hidden_size": H, "intermediate_size": MLP, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": V, "max_position_embeddings": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    **ROPE,
}  # fmt: skip


def block(
    prefix: str, reads: int = H, norms: tuple[str, ...] = (), q_norms: bool = False
) -> dict[str, Tensor]:
    shapes = {
        "self_attn.q_proj": (16, reads), "self_attn.k_proj": (8, reads),
        "self_attn.v_proj": (8, reads), "self_attn.o_proj": (H, 16),
        "mlp.gate_proj": (MLP, H), "mlp.up_proj": (MLP, H), "mlp.down_proj": (H, MLP),
        "post_attention_layernorm": (H,),
        **{name: (H,) for name in norms},
        **({"self_attn.q_norm": (8,), "self_attn.k_norm": (8,)} if q_norms else {}),
    }  # fmt: skip
    return {f"{prefix}{name}.weight": torch.ones(shape) for name, shape in shapes.items()}


def make_target(path: Path) -> Path:
    saved = {
        **BLOCK,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
    }
    chance = torch.Generator().manual_seed(0)
    return directory(
        path, saved, {"model.embed_tokens.weight": torch.randn(V, H, generator=chance)}
    )


def make_eagle3(path: Path, **changes: Any) -> Path:
    """Serves vLLM and SGLang alike."""
    saved = {
        **BLOCK, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "num_hidden_layers": 1, "draft_vocab_size": W,
        "tie_word_embeddings": False, eagle3.KEY: [2, 4, 5], "num_aux_hidden_states": STATES,
        "eagle_config": {"use_aux_hidden_state": True, eagle3.KEY: [1, 3, 4]}, **changes,
    }  # fmt: skip
    held = block("midlayer.", 2 * H, ("hidden_norm", "input_layernorm"))
    held |= {
        "fc.weight": torch.ones(H, STATES * H),
        "norm.weight": torch.ones(H),
        "lm_head.weight": torch.ones(W, H),
    }
    return directory(path, saved, held | vocabulary.maps_of(IDS, V))


def make_dflash(path: Path, **changes: Any) -> Path:
    saved = {
        **BLOCK, "architectures": ["DFlashDraftModel"], "model_type": "qwen3",
        "num_hidden_layers": 2, "block_size": 8,
        "num_target_layers": LAYERS, "layer_types": ["full_attention"] * 2,
        "tie_word_embeddings": False,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 4, 6]}, **changes,
    }  # fmt: skip
    held = {
        "fc.weight": torch.ones(H, STATES * H),
        "hidden_norm.weight": torch.ones(H),
        "norm.weight": torch.ones(H),
    }
    for layer in range(2):
        held |= block(f"layers.{layer}.", norms=("input_layernorm",), q_norms=True)
    return directory(path, saved, held)


def make_dspark(path: Path, **changes: Any) -> Path:
    saved: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"], "markov_rank": 4, "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True, "mask_token_id": 3, "target_layer_ids": [-1, 4, 6],
        **changes,
    }  # fmt: skip
    make_dflash(path, **saved)
    config(dflash_config=DROP)(path)
    put("markov_head.markov_w1.weight", V, 4)(path)
    put("markov_head.markov_w2.weight", V, 4)(path)
    put("confidence_head.proj.weight", 1, H + 4)(path)
    put("confidence_head.proj.bias", 1)(path)
    return path


def make_native(path: Path, **changes: Any) -> Path:
    """transformers' own layout of DFlash."""
    saved = {
        "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant",
        "mask_token_id": 3,
        "target_layer_ids": [1, 4, 6], **changes,
    }  # fmt: skip
    make_dflash(path, **saved)
    config(dflash_config=DROP)(path)
    tensors(lambda t: t.update({"encoder.fc.weight": t.pop("fc.weight")}))(path)
    tensors(lambda t: t.update({"encoder.output_norm_enc.weight": t.pop("hidden_norm.weight")}))(
        path
    )
    return path


def make_speculators(path: Path, kind: str) -> Path:
    outer: dict[str, Any] = {
        "speculators_model_type": kind, "speculators_version": "0.9.0",
        "tie_word_embeddings": False, "dtype": "float32",
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
    }  # fmt: skip
    layer = {**BLOCK, "num_hidden_layers": 1, "model_type": "llama"}
    if kind in ("eagle3", "peagle"):
        make_eagle3(path)
        saved = {
            **outer, "architectures": ["Eagle3DraftModel"], "draft_vocab_size": W,
            "norm_before_residual": False,
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
            saved |= {"architectures": ["PEagleDraftModel"], "mask_token_id": 3}
            put("mask_hidden", 1, 1, STATES * H)(path)
    else:
        (make_dspark if kind == "dspark" else make_dflash)(path)
        saved = {
            **outer, "architectures": ["DFlashDraftModel"], "draft_vocab_size": V,
            "aux_hidden_state_layer_ids": [2, 5, 7],
            "mask_token_id": 3, "block_size": 8, "sliding_window_non_causal": True,
            "markov_rank": 4,
            "enable_confidence_head": True, "confidence_head_with_markov": True,
            "transformer_layer_config": {
                **layer, "model_type": "qwen3", "num_hidden_layers": 2,
                "layer_types": ["full_attention"] * 2
            },
        }  # fmt: skip
    return directory(path, saved, load_file(path / "model.safetensors"))


def make_mtp(path: Path) -> Path:
    saved = {
        **BLOCK,
        "architectures": ["MiMoForCausalLM"],
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
    }
    parts = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    heads = {f"model.mtp_layers.0.{part}.weight": torch.ones(2) for part in parts}
    return directory(path, saved, {"model.embed_tokens.weight": torch.ones(V, H), **heads})


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
