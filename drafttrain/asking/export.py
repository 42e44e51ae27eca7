"""What export is asked for."""

from __future__ import annotations

from omegaconf import DictConfig

from drafttrain.checks import path_of
from drafttrain.errors import InputError
from drafttrain.layouts import engines
from drafttrain.tree.topology import MOST_NODES

DTYPES = ("package", "float32", "bfloat16", "float16")
VOCABULARIES = ("auto", "whole", "reduced")


def check_settings(cfg: DictConfig) -> None:
    for key in ("package", "out", "check", "against"):
        if not (cfg[key] is None or isinstance(cfg[key], str)):
            raise InputError(f"{key}={str(cfg[key])[:80]}: needs the path of a folder")
        if cfg[key]:
            path_of(key, cfg[key])
    if cfg.check is not None:
        if cfg.package is not None or cfg.out is not None:
            raise InputError(
                "check looks at a directory and writes nothing: leave package and out away"
            )
        readers = engines.names(engines.readers())
        if cfg.to is not None and cfg.to not in readers:
            raise InputError(f"to={cfg.to}: give one of {', '.join(readers)}, or leave it out")
        return
    if cfg.against is not None:
        raise InputError(
            "against is what check compares with: give check=<directory>; an export is compared "
            "anyway"
        )
    for key, what in (
        ("package", "folder of a package"),
        ("to", "the engine"),
        ("out", "a new folder"),
    ):
        if not str(cfg[key] or "").strip():
            raise InputError(
                f"needs {key}=<{what}>: python -m drafttrain.export package=... to=... out=..., or "
                "check=<directory>"
            )
    if engines.named(cfg.to) is None:
        raise InputError(f"to={cfg.to}: give one of {', '.join(engines.names(engines.KNOWN))}")
    if cfg.dtype not in DTYPES:
        raise InputError(f"dtype={cfg.dtype}: give one of {', '.join(DTYPES)}")
    if cfg.vocabulary not in VOCABULARIES:
        raise InputError(f"vocabulary={cfg.vocabulary}: give one of {', '.join(VOCABULARIES)}")
    if cfg.tokens is not None and (
        type(cfg.tokens) is not int or not 1 <= cfg.tokens <= MOST_NODES
    ):
        raise InputError(
            f"tokens={str(cfg.tokens)[:40]}: needs an integer from 1 to {MOST_NODES}, or null, the "
            "tree's depth"
        )
