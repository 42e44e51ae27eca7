"""The identity of a target: short digests of what a drafter depends on, so that nothing made for
another target is used."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

from drafttrain.errors import InputError

SAMPLE = 65536
"""Elements read of each tensor: all of a small one, an even spread over a large one."""

IDENTITY = ("config", "weights", "tokenizer", "chat_template", "quantisation")
"""Parts that must agree. `dtype` is recorded too, but a drafter also works with its target in
another dtype."""

ADAPTER = "adapter"
"""A further part, only in the fingerprint of a target that was tuned."""

PROBE = "The quick brown fox, 12345 \n\tnaïve ünïcödé 🙂."
"""A tokenizer is identified by its ids of this text."""

_VOLATILE = {
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
    "architectures",
}


def digest(*parts: bytes) -> str:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(len(part).to_bytes(8, "little"))
        sha.update(part)
    return sha.hexdigest()[:16]


def of_config(config: Any) -> str:
    settings = {
        k: v for k, v in config.to_dict().items() if k not in _VOLATILE and not k.startswith("_")
    }
    return digest(json.dumps(settings, sort_keys=True, default=str).encode())


def of_weights(model: nn.Module) -> str:
    """Names, shapes and an even sample of the values, rounded to bfloat16 so that the loading dtype
    does not matter."""
    sha = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        stride = max(1, flat.numel() // SAMPLE)
        sample = flat[::stride].to("cpu")
        if sample.is_floating_point():
            sample = sample.to(torch.bfloat16).view(torch.int16)
        sha.update(f"{name}{tuple(tensor.shape)}".encode())
        sha.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def of_tokenizer(tokenizer: Any | None) -> str:
    if tokenizer is None:
        return "none"
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    probe = json.dumps(tokenizer(PROBE)["input_ids"])
    return digest(vocabulary.encode("utf-8", "surrogatepass"), probe.encode())


def of_template(tokenizer: Any | None) -> str:
    template = getattr(tokenizer, "chat_template", None)
    return digest(json.dumps(template, sort_keys=True).encode()) if template else "none"


def refuse_other(
    given: dict[str, str], here: dict[str, str], what: str, *, dtype: bool = False
) -> None:
    """Raise InputError naming the parts of two fingerprints that differ.

    Args:
        given: the fingerprint stored in `what` (a package, a store, a conversation set).
        here: the fingerprint of the target in use.
        dtype: also require the same dtype (stored features have the precision of the pass that made
            them).
    """
    parts = (*IDENTITY, "dtype") if dtype else IDENTITY
    missing = [part for part in parts if part not in given]
    if missing:
        raise InputError(
            f"{what}: its target fingerprint lacks {', '.join(missing)}; make it again"
        )
    there, own = ({ADAPTER: "none", **marks} for marks in (given, here))
    other = [part for part in (*parts, ADAPTER) if there[part] != own[part]]
    if other:
        detail = "; ".join(f"{part} {there[part]} there, {own[part]} here" for part in other)
        raise InputError(
            f"{what} belongs to another target ({detail}): use the target it was made with, or "
            "make it again"
        )
