"""What adopt is asked for."""

from __future__ import annotations

from omegaconf import DictConfig

from drafttrain.checks import path_of
from drafttrain.errors import InputError
from drafttrain.tree.topology import MOST_NODES


def check_settings(cfg: DictConfig) -> None:
    for key in ("head", "out"):
        if not isinstance(cfg[key], str) or not cfg[key].strip():
            raise InputError(f"{key}={str(cfg[key])[:80]}: needs the path of a folder")
        path_of(key, cfg[key])
    for key, most in (("chain", MOST_NODES), ("trained_length", 1 << 31)):
        value = cfg[key]
        if not (value is None and key == "trained_length") and (
            type(value) is not int or not 1 <= value <= most
        ):
            raise InputError(f"{key}={str(value)[:40]}: needs an integer from 1 to {most}")
