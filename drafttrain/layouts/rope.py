"""RoPE's settings in both spellings. transformers 5 writes only `rope_parameters`; older readers
know `rope_theta` and `rope_scaling` at the top level, and fall back to a base of 10000 without a
word."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drafttrain.errors import InputError
from drafttrain.layouts.engines import Engine
from drafttrain.layouts.finding import Finding

FALLBACK = 10000.0


def both_spellings(config: Any) -> dict[str, Any]:
    """`rope_parameters`, `rope_theta` and `rope_scaling` of a transformers config whose layers all
    turn alike.

    Raises: InputError for layers that turn in different ways, or not at all.
    """
    found = getattr(config, "rope_parameters", None)
    if not isinstance(found, Mapping) or not isinstance(found.get("rope_theta"), int | float):
        raise InputError(
            f"{config.model_type} has no single RoPE for all of its layers, which no engine's head "
            "layout can hold"
        )
    new = {name: value for name, value in found.items() if value is not None}
    new["rope_type"] = kind = new.get("rope_type", new.pop("type", "default"))
    old = {"type": kind, **{name: value for name, value in new.items() if name != "rope_theta"}}
    return {
        "rope_parameters": new,
        "rope_theta": new["rope_theta"],
        "rope_scaling": None if kind == "default" else old,
    }


def effective(config: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """What a reader of both spellings takes: the base, and the scaling without its base; {} where
    there is none."""
    parameters = config.get("rope_parameters")
    parameters = parameters if isinstance(parameters, Mapping) else {}
    if kinds := [kind for kind in parameters.values() if isinstance(kind, Mapping)]:
        # Of layers of several kinds a head has the one that reads everything.
        parameters = parameters.get("full_attention") or kinds[0]
    scaling = config.get("rope_scaling")
    theta = parameters.get("rope_theta", config.get("rope_theta", FALLBACK))
    kind = _scaling(scaling) or _scaling(parameters)
    return float(theta) if isinstance(theta, int | float) else FALLBACK, kind


def faults(
    config: Mapping[str, Any], target: Mapping[str, Any] | None, engine: Engine
) -> Iterator[Finding]:
    """The two spellings agree, what this engine reads is there, and it is the target's."""
    new = config.get("rope_parameters")
    has_new = isinstance(new, Mapping) and "rope_theta" in new
    has_old = "rope_theta" in config
    if not has_new and not has_old:
        yield Finding(
            "rope-theta-missing",
            f"neither rope_parameters nor rope_theta: engines take {FALLBACK:g} without a word; "
            "write both",
            fatal=target is not None and effective(target)[0] != FALLBACK,
        )
    elif not has_old and effective(config)[0] != FALLBACK:
        yield Finding(
            "rope-old-spelling-missing",
            f"rope_theta is not at the top level: older readers take {FALLBACK:g} instead of "
            f"{effective(config)[0]:g}",
            fatal=engine.old_rope,
        )
    if isinstance(new, Mapping):
        if has_new and has_old and new["rope_theta"] != config["rope_theta"]:
            yield Finding(
                "rope-spellings-disagree",
                f"rope_parameters has a base of {str(new['rope_theta'])[:20]}, rope_theta is "
                f"{str(config['rope_theta'])[:20]}",
            )
        mine, old = _scaling(new), _scaling(config.get("rope_scaling"))
        if mine and not old:
            yield Finding(
                "rope-scaling-lost",
                f"rope_parameters scales ({mine['rope_type']}), rope_scaling says nothing: older "
                "readers do not scale",
                fatal=engine.old_rope,
            )
        elif old and mine != old:
            yield Finding(
                "rope-spellings-disagree", "rope_parameters and rope_scaling describe two scalings"
            )
    if target is not None and effective(config) != effective(target):
        (theta, scaling), (own, theirs) = effective(config), effective(target)
        yield Finding(
            "rope-differs-from-target",
            f"a base of {theta:g} ({scaling.get('rope_type', 'no scaling')}), the target's is "
            f"{own:g} ({theirs.get('rope_type', 'no scaling')}): right only if it was trained so",
        )


def _scaling(found: Any) -> dict[str, Any]:
    """A scaling by its new names without its base; {} for the default."""
    if not isinstance(found, Mapping):
        return {}
    kind = found.get("rope_type", found.get("type", "default"))
    if kind in (None, "default"):
        return {}
    rest = {
        name: value
        for name, value in found.items()
        if name not in ("rope_type", "type", "rope_theta")
    }
    return {"rope_type": kind, **rest}
