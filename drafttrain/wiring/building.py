"""Build the objects that a configuration names."""

from __future__ import annotations

import functools
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drafttrain.errors import InputError, first_line
from drafttrain.wiring.names import join, nearest
from drafttrain.wiring.parameters import is_open, parameters_of


def build(node: Any, /, **objects: Any) -> Any:
    """Build what a node's `_target_` names; nested nodes are built first, lists and dicts become
    plain ones.

    `objects` are handed over as they are (Hydra would copy dataclass instances into configs) and
    win over the node's own keys. A key the class does not take, or one it lacks, is an InputError;
    errors raised by the class itself come out unwrapped. A node with `_partial_: true` gives a
    `functools.partial`. None gives None.
    """
    if node is None:
        return None
    if isinstance(node, dict):
        node = OmegaConf.create(node, flags={"allow_objects": True})
    if isinstance(node, ListConfig):
        return [build(item) if OmegaConf.is_config(item) else item for item in node]
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise InputError(f"cannot build {node!r}: the node names no _target_")
    wants_partial = bool(node.get("_partial_", False))
    check_calls(node, tuple(objects))
    try:
        make = hydra.utils.instantiate(node, _convert_="all", _partial_=True)
    except InstantiationException as error:
        raise _unwrap(error) from None
    except OmegaConfBaseException as error:
        raise InputError(
            f"{node._get_full_key(None) or 'configuration'}: {first_line(error)}"
        ) from error
    call = functools.partial(make.func, *make.args, **{**make.keywords, **objects})
    return call if wants_partial else call()


def named_by(node: Any) -> Any:
    """What a node's `_target_` names; nothing is built. Raises InputError for a node that names
    nothing there is."""
    if (
        not isinstance(node, DictConfig)
        or OmegaConf.is_missing(node, "_target_")
        or "_target_" not in node
    ):
        raise InputError(f"cannot build {node!r}: the node names no _target_")
    where = node._get_full_key(None) or "node"
    try:
        return hydra.utils.get_object(node["_target_"])
    except Exception as error:
        raise InputError(
            f"{where}._target_={node['_target_']} cannot be imported: {first_line(error)}"
        ) from error


def _unwrap(error: BaseException) -> BaseException:
    cause: BaseException = error
    while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
        cause = cause.__cause__
    return InputError(str(cause)) if isinstance(cause, InstantiationException) else cause


def check_calls(node: DictConfig, extra: tuple[str, ...] = ()) -> None:
    """Refuse keys that a target does not take, before anything is built."""
    for key in node:
        child = None if OmegaConf.is_missing(node, key) else node[key]
        for inner in child if isinstance(child, ListConfig) else [child]:
            if isinstance(inner, DictConfig) and not inner._is_none():
                check_calls(inner)
    if "_target_" not in node:
        return
    where, target = node._get_full_key(None) or "node", named_by(node)
    if not callable(target):
        raise InputError(
            f"{where}._target_={node['_target_']} is {type(target).__name__}, nothing that can be "
            "built"
        )
    try:
        named, open_ended = parameters_of(target), is_open(target)
    except (TypeError, ValueError):
        return
    given = [str(k) for k in node if not (str(k).startswith("_") and str(k).endswith("_"))]
    for key in () if open_ended else (*given, *extra):
        if key not in named:
            near = nearest(key, named, limit=1)
            hint = f" Did you mean {where}.{near[0]}?" if near else ""
            raise InputError(
                f"{where}.{key}: {target.__name__} has no setting {key}.{hint} It takes: "
                f"{join(named)}"
            )
    if node.get("_partial_", False) or "_args_" in node:
        return
    lacking = [
        n for n, p in named.items() if p.default is p.empty and n not in given and n not in extra
    ]
    if lacking:
        raise InputError(f"{where}: {target.__name__} also needs {join(lacking)}")
