"""The identity of a target: what a drafter depends on, by meaning, so that nothing made for another
target is used, and nothing of the same one is refused.

A fingerprint is {part: text}. Config, tokenizer and chat template are kept in words (JSON), so that
a difference can be named. Earlier versions kept digests of them; these are in `earlier`, and what
was written then is still recognised by them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from drafttrain.errors import InputError
from drafttrain.processes import rank
from drafttrain.target import configs, modes, rounding, tokenising
from drafttrain.target.configs import decisive, digest, earlier_digests
from drafttrain.target.tokenising import PROBE

log = logging.getLogger(__name__)

SAMPLE = 65536
"""Elements read of each tensor: all of a small one, an even spread over a large one."""

IDENTITY = ("config", "weights", "tokenizer", "quantisation")
"""Parts that must agree."""
MODE = "chat_template"
"""The chat template and its arguments. What was made in another mode has other texts, of the same
ids and weights."""
RECORDED = ("config", "weights", "tokenizer", MODE, "quantisation")
"""Parts that every fingerprint has. `dtype` is recorded too, but a drafter also works with its
target in another dtype."""

ADAPTER = "adapter"
"""A further part, only in the fingerprint of a target that was tuned."""
HALF = "weights_float16"
"""The weights' digest after rounding to float16: what a target that is loaded in it has."""
SAMPLED = "weights_sample"
"""A few weights in bfloat16 or float16, see `rounding`: the two are compared by these."""
EARLIER = "earlier"
"""{part: digests} of forms that earlier versions recorded, as JSON."""

# --- the parts ------------------------------------------------------------------------------------


def of_weights(model: nn.Module, by: torch.dtype = torch.bfloat16) -> str:
    """Names, shapes and an even sample of the values, rounded to bfloat16 so that the loading dtype
    does not matter.

    Args:
        by: a dtype that they are rounded to first.
    """
    sha = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        stride = max(1, flat.numel() // SAMPLE)
        sample = flat[::stride].to("cpu")
        if sample.is_floating_point():
            sample = sample.to(by).to(torch.bfloat16).view(torch.int16)
        sha.update(f"{name}{tuple(tensor.shape)}".encode())
        sha.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def of_tokenizer(tokenizer: Any | None) -> str:
    """Every part of a tokenizer that decides ids; see `tokenising`."""
    return "none" if tokenizer is None else json.dumps(tokenising.parts_of(tokenizer))


def of_template(tokenizer: Any | None) -> str:
    """The mode of a target; see `modes`."""
    return json.dumps(found, sort_keys=True) if (found := modes.mode_of(tokenizer)) else "none"


def of_target(model: Any, config: Any, tokenizer: Any | None, dtype: torch.dtype) -> dict[str, str]:
    """The fingerprint of a target as it was loaded."""
    quantisation = getattr(model.config, "quantization_config", None)
    name = str(dtype).removeprefix("torch.")
    sampled = rounding.recorded(model, dtype)
    return {
        "config": decisive(config, model),
        "weights": of_weights(model),
        "tokenizer": of_tokenizer(tokenizer),
        MODE: of_template(tokenizer),
        "quantisation": "none" if quantisation is None else digest(str(quantisation).encode()),
        "dtype": name,
        HALF: of_weights(model, torch.float16),
        **({SAMPLED: sampled} if sampled else {}),
        EARLIER: earlier_of(tokenizer, config),
    }


# --- forms that earlier versions recorded ---------------------------------------------------------


def earlier_of(tokenizer: Any | None, config: Any = None) -> str:
    """The digests of the parts of a fingerprint that are kept in words now."""
    digests = {"tokenizer": [_earlier_tokenizer(tokenizer)], MODE: [_earlier_template(tokenizer)]}
    if config is not None:
        digests["config"] = earlier_digests(config)
    return json.dumps(digests)


def _earlier_tokenizer(tokenizer: Any | None) -> str:
    if tokenizer is None:
        return "none"
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    probe = json.dumps(tokenizer(PROBE)["input_ids"])
    return digest(vocabulary.encode("utf-8", "surrogatepass"), probe.encode())


def _earlier_template(tokenizer: Any | None) -> str:
    template = getattr(tokenizer, "chat_template", None)
    return digest(json.dumps(template, sort_keys=True).encode()) if template else "none"


# --- two of them ----------------------------------------------------------------------------------


def difference(
    part: str, given: Mapping[str, str], here: Mapping[str, str], own: Any = None
) -> str:
    """How two fingerprints differ in a part, in words; empty where they do not.

    Args:
        own: the tokenizer that is here, where it is at hand.
    """
    try:
        return _difference(part, given, here, own)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return f"{part}: it was edited and cannot be read"


def _difference(part: str, given: Mapping[str, str], here: Mapping[str, str], own: Any) -> str:
    there, mine = given.get(part, "none"), here.get(part, "none")
    if there == mine or (part == "weights" and _same_rounded(given, here)):
        return ""
    old, new = _form(there), _form(mine)
    if (old is None) != (new is None) and part in ("config", "tokenizer", MODE):
        # One was recorded by an earlier version.
        digests, known = (there, here) if old is None else (mine, given)
        if digests in _earlier(known).get(part, ()):
            return "" if part != MODE else _unrecorded(old, new)
    if old is None or new is None:
        advice = _in_float16(part, given, here)
        return f"{part} {_named(there)} there, {_named(mine)} here{advice}"
    if part == MODE:
        words = modes.difference(old, new)
    elif part == "tokenizer":
        words = tokenising.difference(old, new, own)
    else:
        words = configs.difference(old, new)
    return words and f"{part}: {words}"


def _form(text: str) -> dict[str, Any] | None:
    """A part that is kept in words; None for a digest, or for none."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text) if text.startswith("{") else None
        return found if isinstance(found, dict) else None
    return None


def _named(text: str) -> str:
    return text if _form(text) is None else "another"


def _in_float16(part: str, given: Mapping[str, str], here: Mapping[str, str]) -> str:
    """What to do where weights cannot be compared."""
    half = here.get("dtype") == "float16" and given.get("dtype") != "float16"
    recorded = SAMPLED if given.get("dtype") == "bfloat16" else HALF
    if part == "weights" and half and recorded not in given:
        return ", which says nothing in float16: compare with target.dtype=float32"
    samples = [
        rounding.kind_of(one.get(SAMPLED, ""), one.get("dtype", "")) for one in (given, here)
    ]
    brains = [values for kind, values in samples if kind == "bfloat16" and values]
    if part == "weights" and len(brains) == 2 and rounding.neighbours(*brains):
        return (
            ", though none differs by more than bfloat16 rounds: if one's files are in float16, "
            "give target.dtype=float32, and make with it what was made in bfloat16"
        )
    return ""


def _earlier(fingerprint: Mapping[str, str]) -> dict[str, Any]:
    return _form(fingerprint.get(EARLIER, "")) or {}


def _unrecorded(old: dict[str, Any] | None, new: dict[str, Any] | None) -> str:
    """The difference of two modes with one template, one of them recorded without its arguments,
    since there was no setting for any."""
    before, after = ({} if one is None else one.get("arguments") or {} for one in (old, new))
    words = modes.difference({"arguments": before}, {"arguments": after})
    return words and f"{MODE}: {words}"


def _same_rounded(given: Mapping[str, str], here: Mapping[str, str]) -> bool:
    """Are the weights the same once those of the other are rounded to float16, as one's are; or may
    both be roundings of the same?"""
    pairs = ((given, here), (here, given))
    if any(
        one.get("dtype") == "float16" and one.get("weights") == other.get(HALF, "")
        for one, other in pairs
    ):
        return True
    loaded = {given.get("dtype"), here.get("dtype")}
    return loaded == {*rounding.KINDS} and _samples_fit(given, here)


def _samples_fit(given: Mapping[str, str], here: Mapping[str, str]) -> bool:
    """Are the sampled values of one in bfloat16, of the other in float16, and may both be roundings
    of the same?"""
    samples = (
        rounding.kind_of(one.get(SAMPLED, ""), one.get("dtype", "")) for one in (given, here)
    )
    by_kind = dict(samples)
    brain, half = (by_kind.get(kind, "") for kind in rounding.KINDS)
    return bool(brain and half) and rounding.may_be_one(brain, half)


def _rounded_copy(given: Mapping[str, str], here: Mapping[str, str]) -> bool:
    """Were the files of one rounded to float16 from those of the other, or those of both from a
    third's to float16 and bfloat16, whatever dtype both were loaded in?"""
    if not difference("weights", given, here):
        return False
    pairs = ((given, here), (here, given))
    half = any(one.get("weights") == other.get(HALF, "") for one, other in pairs)
    return half or _samples_fit(given, here)


def refuse_other(
    given: dict[str, str],
    here: dict[str, str],
    what: str,
    *,
    dtype: bool = False,
    mode: bool = False,
    own: Any = None,
) -> None:
    """Raise InputError saying in which parts two fingerprints differ, and how. A difference that
    leaves ids and weights as they are is warned about, once.

    Args:
        given: the fingerprint stored in `what` (a package, a store, a conversation set).
        here: the fingerprint of the target in use.
        dtype: also require the same dtype (stored features have the precision of the pass that made
            them).
        mode: also require the same chat template and arguments (rows of one set have one form).
        own: the target's tokenizer, where it is at hand.
    """
    missing = [part for part in (*RECORDED, *(("dtype",) if dtype else ())) if part not in given]
    if missing:
        raise InputError(
            f"{what}: its target fingerprint lacks {', '.join(missing)}; make it again"
        )
    copied = not dtype and _rounded_copy(given, here)
    parts = [part for part in (*IDENTITY, ADAPTER) if part != "weights" or not copied]
    parts += [MODE] if mode else []
    if other := [words for part in parts if (words := difference(part, given, here, own))]:
        raise InputError(
            f"{what} belongs to another target ({'; '.join(other)}): use the target it was made "
            "with, or make it again"
        )
    there, mine = given.get("dtype"), here.get("dtype")
    if there != mine and dtype:
        raise InputError(
            f"{what} was made by this target in dtype {there}, it is loaded in {mine} here: set "
            f"target.dtype={there}, or make it again in another folder"
        )
    if there != mine and there and mine:
        warn(
            f"{what} was made with the target in {there}, here it is in {mine}: ids and drafters "
            f"fit any dtype, near ties may fall otherwise; target.dtype={there} is as it was made"
        )
    if copied:
        warn(
            f"{what} was made with a copy of this target's files of another precision, float16 "
            "against bfloat16 or float32: ids and drafters fit both, near ties may fall otherwise"
        )
    if not mode and (words := difference(MODE, given, here)):
        advice = mode_settings(given)
        warn(
            f"{what} was made in another mode ({words}): it fits this target, but fewer drafts may "
            f"be accepted where texts have another form"
            + (advice and f"; it was made with {advice}")
        )


def same(given: Mapping[str, str], here: Mapping[str, str]) -> bool:
    """Was it made by this target, in this dtype and mode?"""
    known = all(part in given for part in (*RECORDED, "dtype"))
    parts = (*IDENTITY, ADAPTER, MODE)
    return (
        known
        and given["dtype"] == here["dtype"]
        and not any(difference(part, given, here) for part in parts)
    )


def mode_settings(given: Mapping[str, str]) -> str:
    """A recorded mode as settings; empty where its template was given no arguments."""
    return modes.words(_form(given.get(MODE, "")) or {})


@functools.lru_cache(maxsize=256)
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def warn(text: str) -> None:
    """Say it on the first process, once."""
    if rank() == 0:
        _warn_once(text)


def in_mode_of(own: dict[str, str], data: Mapping[str, str]) -> dict[str, str]:
    """A target's fingerprint as a package keeps it: with the mode of the set that it was trained
    on."""
    if MODE not in data or not difference(MODE, data, own):
        return own
    earlier = {part: found for part, found in _earlier(own).items() if part != MODE}
    return {**own, MODE: data[MODE], EARLIER: json.dumps(earlier)}


def run_changes(before: Any, now: dict[str, str]) -> str:
    """What of a target would make a resumed run another one, in words; empty where nothing does.

    Args:
        before: the fingerprint in the checkpoint.
    """
    if not isinstance(before, dict):
        return "the checkpoint names no target"
    found = [difference(part, before, now) for part in (*IDENTITY, ADAPTER)]
    if before.get("dtype") != now.get("dtype"):
        found.append(f"dtype {before.get('dtype')} there, {now.get('dtype')} here")
    return "; ".join(words for words in found if words)
