"""How a capture reads rows: a setting, checked without torch."""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Which rows the target reads together, and how large shards are."""

    batch_tokens: int | None
    batch_rows: int | None
    seed: int
    shard_mb: float | None

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "batch_rows"):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and value >= 1):
                raise InputError(f"{name}={value}: needs an integer of at least 1, or null")
        if self.batch_tokens is None and self.batch_rows is None:
            raise InputError("give batch_tokens or batch_rows")
        if type(self.seed) is not int or self.seed < 0:
            raise InputError(f"seed={self.seed}: needs an integer of at least 0")
        size = self.shard_mb
        if size is not None and (
            isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size < 1 << 30
        ):
            raise InputError(f"shard_mb={size}: needs a number above 0, or null")
