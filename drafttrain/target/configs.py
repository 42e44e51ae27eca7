"""What of a target's config decides its logits, whatever file and schema it was read from."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from drafttrain.target import rotary

_VOLATILE = {
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
    "architectures",
}
_NOT_LOGITS = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
    *("initializer_range", "tie_word_embeddings", "pretraining_tp", "quantization_config"),
    *("output_attentions", "output_router_logits", "gradient_checkpointing", "attn_implementation"),
    *("torch_dtype", "use_cache"),
}
"""What a frozen target's logits do not depend on, or what another part says: tied weights show in
the weights."""
_ONLY_TRAINING = re.compile(r"drop(out)?(_prob)?$|pdrop$|(^|_)(aux|z)_loss_|jitter_noise$")


_ACTIVATION = re.compile(r"act(_fn)?$|activation(_function)?$")
_ALIASES = {"swish": "silu"}
_HEAD = "head_dim"
_WINDOW, _KINDS, _CONTEXT = "sliding_window", "layer_types", "context"
_OF_WINDOWS = ("use_sliding_window", "max_window_layers", "sliding_window_pattern")
"""What only says which layers have the window."""


def digest(*parts: bytes) -> str:
    """A short digest of some parts."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(len(part).to_bytes(8, "little"))
        sha.update(part)
    return sha.hexdigest()[:16]


def decisive(config: Any, model: Any = None) -> str:
    """What of a loaded config decides logits, as JSON.

    Args:
        model: of that config. A key that the family's config does not declare counts only where the
            model's own code names it; without a model it does not count.
    """
    from transformers import PreTrainedConfig

    base = set(getattr(PreTrainedConfig, "__dataclass_fields__", ()))
    own = set(getattr(type(config), "__dataclass_fields__", ())) - base
    code = "" if model is None else _code_of(type(model).__module__)
    found: dict[str, Any] = {"model_type": config.model_type}
    for name, value in config.to_dict().items():
        known = name in own or (name not in base and _names(code, name))
        beside = name in _NOT_LOGITS or name[0] == "_" or _ONLY_TRAINING.search(name)
        if known and value is not None and not beside:
            found[name] = _plain(value)
    if found.get(_WINDOW) is not None:
        found[_CONTEXT] = getattr(config, "max_position_embeddings", None)
    settings = found.get("rope_parameters")
    if isinstance(settings, dict) and settings:
        # By now they are here, whatever the file called them.
        found = {k: v for k, v in found.items() if k not in ("rope_theta", "rope_scaling")}
        found["rope_parameters"] = _rotary(settings)
        kinds = [one for one in settings.values() if isinstance(one, dict)] or [settings]
        if all(one.get("rope_type", "default") == "default" for one in kinds):
            found.pop("max_position_embeddings", None)  # Only a limit then.
        if model is not None:
            found |= rotary.settings_of(config, model, code)
    return json.dumps(_plainest(found), sort_keys=True)


def difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The first setting of two configs, as `decisive` records them, that differs, and how many more
    do. Empty where the logits are the same."""
    table = rotary.same(there, here)
    contexts = [one.get(_CONTEXT) for one in (there, here)]
    own = (
        _within(one, limit or max(contexts, key=lambda c: c or 0))
        for one, limit in zip((there, here), contexts, strict=True)
    )
    before, after = (_flat(rotary.without(_plainest(one), table=table)) for one in own)
    odd = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    if not odd:
        return ""
    said = [str(one.get(odd[0], "not given"))[:80] for one in (before, after)]
    more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
    return f"{odd[0]} {said[0]} there, {said[1]} here{more}"


def _within(settings: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """Settings without a sliding window that the context does not exceed, or that no layer
    has, and without what says of which layers it is.

    Args:
        context: positions; None where that was not recorded.
    """
    found = {k: v for k, v in settings.items() if k != _CONTEXT}
    window, kinds = found.get(_WINDOW), found.get(_KINDS)
    wide = type(window) is type(context) is int and window >= context
    if window is not None and not wide and not (kinds and "sliding_attention" not in kinds):
        return found
    found = {k: v for k, v in found.items() if k not in (_WINDOW, *_OF_WINDOWS)}
    rotary = found.get("rope_parameters")
    by_kind = isinstance(rotary, Mapping) and any(isinstance(v, Mapping) for v in rotary.values())
    plain = isinstance(kinds, list) and {*kinds} <= {"full_attention", "sliding_attention"}
    if plain and not by_kind:
        del found[_KINDS]
    return found


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        inner = isinstance(value, Mapping)
        found |= _flat(value, f"{before}{name}.") if inner else {f"{before}{name}": value}
    return found


def _plainest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without a head's width where it follows from others, and with one name for each
    activation."""
    found = {
        k: _ALIASES.get(v, v) if isinstance(v, str) and _ACTIVATION.search(k) else v
        for k, v in settings.items()
    }
    width, heads, head = (settings.get(k) for k in ("hidden_size", "num_attention_heads", _HEAD))
    if type(width) is type(heads) is int and heads and width // heads == head:
        del found[_HEAD]
    return found


@functools.lru_cache(maxsize=8)
def _code_of(module: str) -> str:
    with contextlib.suppress(OSError, TypeError):
        return inspect.getsource(sys.modules[module])
    return ""


def _names(code: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", code) is not None


def _plain(value: Any) -> Any:
    """Numbers as float32 has them, and as integers where they are."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        value = float(f"{value:.7g}")
        return int(value) if value.is_integer() and abs(value) < 1 << 53 else value
    return value if isinstance(value, (str, int, bool)) or value is None else str(value)


def _rotary(found: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings without the older name of their kind."""
    return {
        name: _rotary(value) if isinstance(value, dict) else value
        for name, value in found.items()
        if name != "type"
    }


def earlier_digests(config: Any) -> list[str]:
    """Digests that the config may have had: as its file says it now, and with rotary settings in
    the newer and the older schema."""
    settings = {
        k: v for k, v in config.to_dict().items() if k not in _VOLATILE and not k.startswith("_")
    }
    forms = [settings]
    if isinstance(found := settings.get("rope_parameters"), dict):
        plain = _rotary(found)
        older = {"type": plain["rope_type"]} if "rope_type" in plain else {}
        for number in (float, _plain):  # Numbers as 10000.0 and as 10000.
            spelt = {k: number(v) if _is_number(v) else v for k, v in plain.items()}
            forms += [{**settings, "rope_parameters": one} for one in (spelt, {**spelt, **older})]
    texts = (json.dumps(form, sort_keys=True, default=str) for form in forms)
    return sorted({digest(text.encode()) for text in texts})


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
