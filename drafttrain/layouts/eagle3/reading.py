"""The drafter of an EAGLE-3 head from elsewhere."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from drafttrain.drafter.eagle3 import Eagle3
from drafttrain.errors import InputError
from drafttrain.layouts import engines, vocabulary
from drafttrain.layouts.block import sizes_of
from drafttrain.layouts.directory import FLOATS, Directory
from drafttrain.layouts.eagle3 import nested
from drafttrain.layouts.eagle3.checking import check
from drafttrain.layouts.eagle3.facts import (
    FIRST,
    FLAGS,
    KEY,
    NAMED,
    READINGS,
    SPECULATORS_TYPE,
    captures,
    guessed,
    inner,
)
from drafttrain.layouts.inspection import Inspection, alike, refuse
from drafttrain.layouts.rope import effective
from drafttrain.nn.plain import plain_config
from drafttrain.target.model import Target
from drafttrain.wiring.defaults import default_settings, with_defaults

log = logging.getLogger(__name__)

_BORROWED = "embed_tokens.weight"
_PROJECTION = "lm_head.weight"
_OF_SERVING = (
    "architecture",
    "embedding-shipped",
    "layers-one-convention",
    "positions-short",
    "rope-differs-from-target",
    "rope-old-spelling-missing",
    "states-count",
    "tied-embeddings",
    "verifier-path",
)
"""Findings that matter to an engine only, or that are looked at here."""
_STRICT = ("t2d-missing", "d2t-for-whole-vocabulary")
"""Warnings of engines that drafttrain takes for errors."""
_SHAPE = ("taps", "layers", "mlp", "heads", "kv_heads", "qk_norm", "own_head", "rotary", *FLAGS)


def judge(head: Directory) -> None:
    """What `export check=` calls an error, as far as it shows without the target.

    Raises: InputError.
    """
    _judged(_plain(head), None)


def read(head: Directory, target: Target, known: dict[str, Any]) -> Eagle3:
    """The drafter of a foreign head. One whose projection is the target's rows borrows them.

    Args:
        known: settings of the drafter that an export of drafttrain's has.
    Raises: InputError for whatever such a drafter cannot be: another width than the target's,
        an embedding of its own, drafting in parallel.
    """
    head = _plain(head)
    _judged(head, target)
    _refuse_embedding(head, target)
    ids = _ids(head, target)
    said = _said(head, target)
    rows = target.output.weight
    rows = rows if ids is None else rows[ids.to(rows.device)]
    held = _PROJECTION in head.tensors
    own = known.get("own_head", held and not alike(head.read(_PROJECTION), rows))
    if own and not held:
        raise InputError(f"{head.path} lacks {_PROJECTION}, but its drafter has one of its own")
    settings = known or _settings(head, said, target)
    drafter = with_defaults(Eagle3, target, **{**settings, "own_head": own, "draft_ids": ids})
    _refuse_another(head, said, drafter)
    state = {
        name: head.weight(_theirs(name, head), tuple(tensor.shape))
        for name, tensor in drafter.state_dict().items()
        if name != "draft_ids"
    }
    drafter.load_state_dict(state, strict=False)  # draft_ids, where there are any, are set already.
    return drafter.eval()


def shape(drafter: Eagle3, head: Directory) -> Mapping[str, Any]:
    """Settings with which `fit` builds it, where they are not the defaults."""
    defaults, own = default_settings(Eagle3), drafter.settings()
    return {name: own[name] for name in _SHAPE if own[name] != defaults[name]}


# --- what is refused ------------------------------------------------------------------------------


def _plain(head: Directory) -> Directory:
    """Without the library speculators' nesting."""
    if SPECULATORS_TYPE not in head.config:
        return head
    if not isinstance(head.config.get(nested.BLOCK), dict):
        raise InputError(f"{head.path}: {nested.BLOCK} is not a mapping")
    if "norm_before_residual" not in head.config:
        raise InputError(
            f"{head.path}: [norm-order-unsaid] norm_before_residual is not given: vLLM takes true, "
            "the library false; write what it was trained with"
        )
    return dataclasses.replace(head, config=nested.plain(head.config))


def _judged(head: Directory, target: Target | None) -> None:
    """Refuse what `export check=` with vLLM's eyes calls an error; what it warns of is said once
    the target is there.

    Raises: InputError.
    """
    against = None
    if target is not None:
        config = json.loads(target.config.to_json_string(use_diff=False))
        against = Directory(head.path, config, {}, ())
    inspection = Inspection(head, engines.VLLM, READINGS[engines.VLLM], against)
    check(inspection)
    if "mask_hidden" in head.tensors:
        inspection.add(
            "parallel-drafting", "mask_hidden is there: heads that draft in parallel are P-EAGLE's"
        )
    if not captures(head.config):
        inspection.add(
            "states-needed", "use_aux_hidden_state is false: it reads no inner layers, eagle3 does"
        )
    found = [finding for finding in inspection.findings if finding.name not in _OF_SERVING]
    # Half of a map cannot be compared with the other half.
    refuse(
        (dataclasses.replace(f, fatal=f.fatal or f.name in _STRICT) for f in found), str(head.path)
    )
    if target is not None:
        for finding in found:
            log.warning("%s: [%s] %s", head.path, finding.name, finding.said)


def _refuse_embedding(head: Directory, target: Target) -> None:
    """Raise InputError if the file has another embedding than the target, whose is borrowed."""
    if _BORROWED not in head.tensors:
        return
    if head.tensors[_BORROWED].dtype not in FLOATS or not alike(
        head.read(_BORROWED), target.embedding.weight
    ):
        raise InputError(
            f"{head.path}: [embedding-differs] {_BORROWED} is not the target's own: eagle3 borrows "
            "the target's, and it is another one"
        )


def _refuse_another(head: Directory, said: dict[str, Any], drafter: Eagle3) -> None:
    """Raise InputError unless the drafter computes what config.json says.

    Args:
        said: as of `_said`.
    """
    config, own = drafter.layer_config(), drafter.config
    rope = effective({"rope_parameters": dict(config.rope_parameters)})
    facts = {
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_act,
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": config.head_dim,
        "num_hidden_layers": own.layers,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        KEY: [tap + 1 for tap in drafter.taps],
        "RoPE": rope,
        "q_norm": own.qk_norm,
        **{name: getattr(own, name) for name in FLAGS},
    }
    for key, value in facts.items():
        if said.get(key, value) != value:
            raise InputError(
                f"{head.path}: {key} is {str(said[key])[:60]}, which eagle3 for this target has as "
                f"{str(value)[:60]}"
            )


# --- what it becomes ------------------------------------------------------------------------------


def _said(head: Directory, target: Target) -> dict[str, Any]:
    """What config.json and the names of tensors say of what is computed, by the keys of a
    config."""
    config, deeper = head.config, inner(head.config)
    inspection = Inspection(head, engines.VLLM, READINGS[engines.VLLM])
    sizes = sizes_of(config, inspection)
    refuse(inspection.findings, str(head.path))
    assert sizes is not None
    keys = ("rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias")
    given = {key: config[key] for key in keys if config.get(key)}
    return {
        **given,
        "head_dim": sizes.head_dim,
        "num_hidden_layers": config["num_hidden_layers"],
        "intermediate_size": sizes.mlp,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        KEY: _states(config, len(target.decoder_layers)),
        "RoPE": effective(config),
        "q_norm": any(name.endswith("self_attn.q_norm.weight") for name in head.tensors),
        **{name: bool(config.get(name) or deeper.get(name)) for name in FLAGS},
    }


def _settings(head: Directory, said: dict[str, Any], target: Target) -> dict[str, Any]:
    """Those of a drafter that has what is said; where that is the target's own, so that it follows
    the target."""
    plain = plain_config(target)
    mlp, heads, kv_heads = (
        said[key] for key in ("intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    same = (heads, kv_heads) == (plain.num_attention_heads, plain.num_key_value_heads)
    mine, theirs = said["RoPE"], effective({"rope_parameters": dict(plain.rope_parameters)})
    if mine != theirs:
        log.warning(
            "%s: it turns by RoPE with a base of %g, the target with %g (or their scalings "
            "differ): taken over as it is",
            head.path,
            mine[0],
            theirs[0],
        )
    return {
        "taps": [i - 1 for i in said[KEY]],
        "layers": said["num_hidden_layers"],
        "mlp": 0 if mlp == plain.intermediate_size else mlp,
        "heads": 0 if same else heads,
        "kv_heads": 0 if same else kv_heads,
        "qk_norm": said["q_norm"],
        "rotary": None if mine == theirs else {"rope_theta": mine[0], **mine[1]},
        **{name: said[name] for name in FLAGS},
    }


def _states(config: Mapping[str, Any], layers: int) -> list[int]:
    """The i of the x[i] that are read."""
    top, deeper = config.get(KEY), inner(config).get(KEY)
    if top is not None:
        return list(top)
    return guessed(layers) if deeper is None else [i + 1 for i in deeper]


def _ids(head: Directory, target: Target) -> Tensor | None:
    if "d2t" not in head.tensors:
        return None
    ids = vocabulary.ids_of(head.read("d2t"))
    return vocabulary.read_ids(f"{head.path}: d2t", ids, target.vocab_size)


def _theirs(name: str, head: Directory) -> str:
    named = name.replace(FIRST, NAMED, 1) if name.startswith(FIRST) else name
    return named if named in head.tensors else name
