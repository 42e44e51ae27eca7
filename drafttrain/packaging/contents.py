"""What a package is made of before it is written: its tensors by file, its config, its texts."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.standalone import Standalone
from drafttrain.errors import InputError
from drafttrain.files import json_text
from drafttrain.nn.spoilt import SPOILT, spoilt
from drafttrain.packaging.card import REQUIREMENTS, card, generate_file
from drafttrain.packaging.checking import some
from drafttrain.packaging.decoding import write_plan
from drafttrain.packaging.manifest import (
    ADAPTER,
    CARD,
    CONFIG,
    CUSTOM,
    DECODING,
    FORMAT,
    MEMBERS,
    METRICS,
    STANDALONE_CONFIG,
    STORED,
    TENSORS,
    class_of,
    needs_of,
    owned,
    place_of,
)
from drafttrain.target.adapter import Adapter
from drafttrain.target.fingerprint import in_mode_of
from drafttrain.target.model import Target
from drafttrain.target.naming import short
from drafttrain.version import version

LICENCES = {"smollm2": "Apache-2.0"}
"""Licences of targets that are known by name."""

# --- tensors --------------------------------------------------------------------------------------


def tensors_of(drafter: Drafter, target: Target, dtype: str) -> dict[str, Tensor]:
    """A drafter's own tensors as they are stored.

    Raises: InputError for weights that are not finite; ValueError for the target's own.
    """
    tensors = {name: _kept(tensor, dtype) for name, tensor in owned(drafter).items()}
    _refuse_odd(tensors, "drafter")
    for name, tensor in owned(drafter).items():
        _refuse_borrowed(name, tensor, target)
    return tensors


def files_of(
    tensors: Mapping[str, Tensor], drafter: Drafter, adapter: Adapter | None
) -> dict[str, dict[str, Tensor]]:
    """The tensors by file and by their name there, those of an adapter included."""
    files: dict[str, dict[str, Tensor]] = {TENSORS: {}}
    for name, tensor in tensors.items():
        file, there = place_of(name, drafter)
        files.setdefault(file, {})[there] = tensor
    if adapter is not None:
        _refuse_odd(adapter.tensors, "adapter")
        files[ADAPTER] = dict(adapter.tensors)
    return files


def language_model_of(
    drafter: Drafter, dtype: str, *, asked: bool
) -> tuple[str, dict[str, Tensor]] | None:
    """The config's text and the tensors of a drafter as a directory of transformers; None where
    the package has none.

    Args:
        asked: with copies of what the drafter borrows of the target. One that borrows nothing is
            always written so.
    """
    if not isinstance(drafter, Standalone) or not (asked or drafter.owns_all):
        return None
    found, tensors = drafter.standalone()
    config = copy.deepcopy(found)
    config.dtype = getattr(torch, dtype)
    return config.to_json_string(), {n: _kept(tensor, dtype) for n, tensor in tensors.items()}


def _kept(tensor: Tensor, dtype: str) -> Tensor:
    """A copy on the CPU; floating point in the dtype of stored weights."""
    kept = getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", kept).clone(memory_format=torch.contiguous_format)


def _refuse_odd(tensors: Mapping[str, Tensor], what: str) -> None:
    bad = spoilt(tensors)
    if bad:
        raise InputError(f"{SPOILT} {some(bad)} of the {what}: it is not packaged; train it again")


def _refuse_borrowed(name: str, tensor: Tensor, target: Target) -> None:
    """By whose memory it is: a weight of the drafter's own may have the target's values, as before
    its first update."""
    lent = [target.embedding.weight]
    if target.output is not None:
        lent.append(target.output.weight)
    for one in lent:
        if tensor.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() != 0:
            raise ValueError(
                f"{name} is the target's own embedding or head: it is borrowed, not packaged"
            )


# --- config.json ----------------------------------------------------------------------------------


def config_of(
    drafter: Drafter,
    target: Target,
    tensors: Mapping[str, Tensor],
    dtype: str,
    trained_length: int | None,
    licence: str | None,
    provenance: dict[str, Any],
    trained_on: Mapping[str, str] | None,
) -> dict[str, Any]:
    """config.json of a package, before paths are shortened; arguments as for `save_package`."""
    adapter, original = target.adapter, target.original or target
    config: dict[str, Any] = {
        "format": FORMAT,
        "made_with": f"drafttrain {version()}",
        "drafter": {
            "_target_": f"{type(drafter).__module__}.{type(drafter).__qualname__}",
            **_settings_of(drafter),
        },
        "needs": needs_of(drafter),
        "shape": {
            "width": target.width,
            "vocab_size": target.vocab_size,
            "draft_vocab": drafter.choices,
            "parameters": sum(t.numel() for t in tensors.values() if t.is_floating_point()),
            "dtype": dtype,
        },
        "trained_length": trained_length,
        "target": {
            "name": short(target.name),
            "model_type": target.config.model_type,
            "licence": licence or LICENCES.get(target.name),
            "fingerprint": in_mode_of(original.fingerprint, trained_on or {}),
        },
        "training": provenance,
    }
    if adapter is not None:
        config["adapter"] = _facts(adapter)
    for node in (config["drafter"], *config["drafter"].get(MEMBERS, ())):
        class_of(node["_target_"], "this drafter")
    return config


def _facts(adapter: Adapter) -> dict[str, Any]:
    return {
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "linears": list(adapter.linears),
        "parameters": adapter.size,
        "digest": adapter.digest,
    }


def _settings_of(drafter: Drafter) -> dict[str, Any]:
    """Settings apart from those that are stored as tensors."""
    found = _unstored(drafter.settings())
    if MEMBERS in found:
        found[MEMBERS] = [_unstored(member) for member in found[MEMBERS]]
    return found


def _unstored(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in STORED}


# --- texts ----------------------------------------------------------------------------------------


def texts_of(
    config: dict[str, Any], metrics: dict[str, Any], plan: Plan, language_model: str | None
) -> dict[str, str]:
    """Every text of a package by file.

    Args:
        language_model: the config's text of a drafter as a directory of transformers.
    """
    texts = {
        CONFIG: json_text(config),
        **texts_of_plan(config, metrics, plan, as_model=language_model is not None),
        METRICS: json_text(metrics),
        f"{CUSTOM}/generate.py": generate_file(tuned="adapter" in config),
        f"{CUSTOM}/requirements.txt": REQUIREMENTS,
    }
    if language_model is not None:
        texts[STANDALONE_CONFIG] = language_model
    return texts


def texts_of_plan(
    config: dict[str, Any], metrics: dict[str, Any], plan: Plan, *, as_model: bool
) -> dict[str, str]:
    """The files that say how a package decodes."""
    return {DECODING: write_plan(plan), CARD: card(config, metrics, plan, as_model=as_model)}
