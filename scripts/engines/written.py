"""Write a directory of each kind that the library speculators makes, by its own code. Run by its
own Python, without drafttrain.

Usage: <speculators' environment>/bin/python written.py target out

`target`: the directory of a model, whose embedding and head go into what is written, and whose name
it carries. `out`: gets a folder for each of KINDS. Weights of blocks are those that the library
begins training with.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

KINDS = ("eagle3", "peagle", "dflash", "dspark")
LAYERS = [2, 5, 8]
"""Captured, in the library's counting: the output of which block it is, from 1."""


def main(target: str, out: str) -> None:
    import speculators.models  # noqa: F401  fills the register
    import torch
    from speculators import SpeculatorModel
    from transformers import AutoConfig, LlamaConfig, Qwen3Config

    verifier = AutoConfig.from_pretrained(target)
    few = verifier.vocab_size // 4
    words = torch.arange(0, verifier.vocab_size, 4)[:few]
    t2d = torch.zeros(verifier.vocab_size, dtype=torch.bool)
    t2d[words] = True
    shared = {"verifier_name_or_path": target, "target_layer_ids": LAYERS, "mask_token_id": 0}
    shared |= {"norm_before_residual": False, "ttt_steps": 3}
    vocabularies: dict[str, dict[str, Any]] = {
        "reduced": {"draft_vocab_size": few, "t2d": t2d, "d2t": words - torch.arange(few)},
        "whole": {"draft_vocab_size": verifier.vocab_size},
    }
    for kind in KINDS:
        family = LlamaConfig if kind in ("eagle3", "peagle") else Qwen3Config
        sizes = (
            "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
            "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings",
            "rope_parameters",
        )  # fmt: skip
        block = family(
            num_hidden_layers=1, **{name: copy.deepcopy(getattr(verifier, name)) for name in sizes}
        )
        for vocabulary, more in vocabularies.items():
            torch.manual_seed(0)
            model = SpeculatorModel.registry[kind].from_training_args(
                copy.deepcopy(block), **shared, **more
            )
            model.save_pretrained(Path(out) / f"{kind}-{vocabulary}")


if __name__ == "__main__":
    main(*sys.argv[1:])
