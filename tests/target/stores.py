"""Small conversation sets and stores for tests, made without a door."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from drafttrain.data.conversations import Row, write_set
from drafttrain.data.datamodule import ConversationData
from drafttrain.flow import Batch
from drafttrain.target.features import computed
from drafttrain.target.filling import Batches, Plan, StoreFolder, planned, settings_of
from drafttrain.target.model import Target
from drafttrain.target.shards import Contents, stamp_of


def random_set(
    target: Target,
    folder: Path,
    *,
    rows: int = 14,
    held_out: int = 2,
    longest: int = 24,
    seed: int = 0,
) -> Path:
    """Random ids; half of each row is supervised."""
    chance = random.Random(seed)
    written = []
    for number in range(rows):
        ids = tuple(
            chance.randrange(3, target.vocab_size) for _ in range(chance.randint(6, longest))
        )
        written.append(Row(number, ids, ((len(ids) // 2, len(ids)),), ("stop",)))
    write_set(
        folder,
        written,
        manifest={"target": {"name": target.name, "fingerprint": target.fingerprint}},
        held_out=held_out,
    )
    return folder


def started_store(
    target: Target,
    data: ConversationData,
    out: Path,
    *,
    last_hidden: bool = True,
    layers: Sequence[int] = (),
    encoding: str = "float32",
    **batches: Any,
) -> tuple[StoreFolder, Plan, dict[str, Any]]:
    """A folder in which nothing is written but its settings; these are returned too."""
    contents = Contents(
        width=target.width, last_hidden=last_hidden, layers=tuple(layers), encoding=encoding
    )
    common: dict[str, Any] = {"batch_tokens": 64, "batch_rows": None, "seed": 0, "shard_mb": 0.004}
    about = {"name": target.name, "fingerprint": target.fingerprint}
    settings = settings_of(about, data, contents, Batches(**common | batches))
    folder = StoreFolder(out)
    folder.create()
    folder.record(settings)
    return (
        folder,
        planned(data, contents, Batches(**common | batches), stamp_of(settings)),
        settings,
    )


def make_store(
    target: Target,
    data: ConversationData,
    out: Path,
    *,
    read: Callable[[Batch], Mapping[str | int, Tensor]] | None = None,
    **settings: Any,
) -> Path:
    """A finished store of several shards. `read` stands in for the target's pass."""
    folder, plan, recorded = started_store(target, data, out, **settings)
    journal = folder.open_journal(0)
    for _ in folder.fill(
        plan,
        plan.shards,
        data,
        journal,
        read or (lambda batch: computed(target, batch, plan.contents.needs)),
    ):
        pass
    journal.close()
    folder.finish(plan, recorded, {"date": "today"})
    folder.clear()
    return out
