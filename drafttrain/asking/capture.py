"""What capture is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig, ListConfig

from drafttrain.checks import path_of
from drafttrain.errors import InputError
from drafttrain.target.batches import Batches

ENCODINGS = ("float32", "bf16", "int8", "fp8")
"""As `drafttrain.target.encoding` knows them."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the door is given, apart from target and data."""

    out: str
    last_hidden: bool
    layers: tuple[int, ...]
    recompute_last: bool
    encoding: str
    resume: bool
    batches: Batches


def read_settings(cfg: DictConfig) -> Settings:
    """Everything that can be refused by looking only at the configuration."""
    if not str(cfg.out or "").strip():
        raise InputError("needs out=<folder of the store>")
    path_of("out", cfg.out)
    for key in ("last_hidden", "recompute_last", "resume"):
        if not isinstance(cfg[key], bool):
            raise InputError(f"{key}={cfg[key]}: needs true or false")
    if str(cfg.encoding) not in ENCODINGS:
        raise InputError(f"encoding={cfg.encoding}: give one of {', '.join(ENCODINGS)}")
    layers = cfg.layers
    if not isinstance(layers, ListConfig) or not all(
        type(layer) is int and layer >= 0 for layer in layers
    ):
        raise InputError(
            f"layers={layers}: needs a list of decoder layers, counted from 0, such as [2,15,27], "
            "or []"
        )
    if len(set(layers)) < len(layers):
        raise InputError(f"layers={layers}: a layer is named twice")
    if not cfg.last_hidden and not layers:
        raise InputError("nothing would be kept: set last_hidden=true, or name layers")
    return Settings(
        out=str(cfg.out),
        last_hidden=cfg.last_hidden,
        layers=tuple(sorted(layers)),
        recompute_last=cfg.recompute_last,
        encoding=str(cfg.encoding),
        resume=cfg.resume,
        batches=Batches(
            batch_tokens=cfg.batch_tokens,
            batch_rows=cfg.batch_rows,
            seed=cfg.seed,
            shard_mb=cfg.shard_mb,
        ),
    )
