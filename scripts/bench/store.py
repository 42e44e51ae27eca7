"""Stores of features by encoding: bytes a token, how fast they are read against what training
takes, and what they cost in tau.

Usage: python scripts/bench/store.py [--fit] [--last-layer] [--batches 8] [--rounds 5] [settings of
fit ...]

Settings are those of drafttrain.fit; without any, a part of experiment=quickstart. The target reads
the rows once; all stores are made of what it gave in float32. Reading is timed from the memory in
which the system keeps files, in turn with the training steps that would use it. With --last-layer
the last hidden state is also recomputed from the last layer, which is then what is stored. With
--fit every store is trained from, and the target itself: tau on the same held-out prompts is
compared with that of bf16, and the losses of all updates with those of features=online.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from timing import count, interleaved, reported
from torch import Tensor

from drafttrain import fit
from drafttrain.data.datamodule import ConversationData
from drafttrain.drafter.base import Drafter
from drafttrain.fitting import given, settings
from drafttrain.flow import Batch, Needs
from drafttrain.reporting.loggers import read_metrics
from drafttrain.target.encoding import ENCODINGS
from drafttrain.target.features import LAST, computed
from drafttrain.target.filling import Batches, StoreFolder, planned, settings_of
from drafttrain.target.model import Target
from drafttrain.target.shards import Contents, stamp_of
from drafttrain.target.stored import StoredFeatures
from drafttrain.training.course import TrainerConfig
from drafttrain.wiring.building import build
from drafttrain.wiring.composing import compose

PART = [
    "experiment=quickstart",
    "data.limit_tokens=24000",
    "trainer.max_epochs=2",
    "trainer.log_every=1",
    "eval.every=null",
]
PART += ["final.prompts=100", "final.acceptance.static_25=null", "final.speed_prompts=0"]


def write(
    target: Target,
    data: ConversationData,
    out: Path,
    contents: Contents,
    batches: Batches,
    read: Callable[[Batch], Mapping[str | int, Tensor]],
) -> Path:
    """A store of what `read` gives."""
    settings = settings_of(
        {"name": target.name, "fingerprint": target.fingerprint}, data, contents, batches
    )
    folder, plan = StoreFolder(out), planned(data, contents, batches, stamp_of(settings))
    folder.create()
    folder.check_room(folder.needed(plan, plan.shards))
    journal = folder.open_journal(0)
    for _ in folder.fill(plan, plan.shards, data, journal, read):
        pass
    journal.close()
    folder.finish(plan, settings, {})
    folder.clear()
    return out


def make_stores(
    target: Target,
    data: ConversationData,
    needs: Needs,
    place: Path,
    batches: Batches,
    last_layer: bool,
) -> dict[str, Path]:
    """{name: store}, those in float32 first."""
    deepest = len(target.decoder_layers) - 1
    every = Needs(
        needs.last_hidden, tuple(sorted({*needs.layers, *([deepest] if last_layer else [])}))
    )
    kept = Contents(
        width=target.width, last_hidden=every.last_hidden, layers=every.layers, encoding="float32"
    )
    source = write(
        target, data, place / "source", kept, batches, lambda batch: computed(target, batch, every)
    )
    reader = StoredFeatures(target, every, data=data, path=source, verify=False)

    def read(batch: Batch) -> dict[str | int, Tensor]:
        found = reader.features(batch)
        return {**found.layers, **({} if found.last_hidden is None else {LAST: found.last_hidden})}

    ways = {"": needs}
    if last_layer and needs.last_hidden:
        ways[" of the last layer"] = Needs(False, every.layers)
    stores = {}
    for encoding in ENCODINGS:
        for suffix, way in ways.items():
            contents = Contents(
                width=target.width,
                last_hidden=way.last_hidden,
                layers=way.layers,
                encoding=encoding,
            )
            name = encoding + suffix
            stores[name] = write(
                target, data, place / name.replace(" ", "-"), contents, batches, read
            )
    size = {
        name: sum(path.stat().st_size for path in store.glob("shard-*"))
        for name, store in stores.items()
    }
    for name, total in size.items():
        ratio = total / size["bf16"]
        print(
            f"{name}: {total / data.tokens:.1f} bytes a token, {ratio:.3f} of bf16 (at most 0.5 is "
            "wanted)"
        )
    return stores


def reading(
    target: Target,
    drafter: Drafter,
    data: ConversationData,
    places: list[list[int]],
    stores: dict[str, Path],
    rounds: int,
) -> None:
    """Seconds to read batches against seconds to train on them."""
    batches = [data.batch(group) for group in places]
    sources = {
        name: StoredFeatures(target, drafter.needs, data=data, path=path)
        for name, path in stores.items()
    }
    given = [sources["float32"].features(batch) for batch in batches]
    optimiser = torch.optim.AdamW(
        [p for p in drafter.parameters() if p.requires_grad], lr=1e-5, fused=True
    )

    def train() -> None:
        for batch, features in zip(batches, given, strict=True):
            loss = drafter.loss(batch.to(target.device), features)
            (loss.total / loss.count.clamp_min(1)).backward()
            optimiser.step()
            optimiser.zero_grad()

    def read(source: StoredFeatures) -> None:
        for batch in batches:
            source.features(batch)

    jobs: dict[str, Callable[[], object]] = {"training": train}
    for name, source in sources.items():
        jobs[name] = lambda source=source: read(source)
    seconds = interleaved(jobs, rounds=rounds, warmup=1)
    tokens = sum(int(batch.lengths.sum()) for batch in batches)
    print(
        f"training takes {tokens / seconds['training']:,.0f} tokens a second, {len(batches)} "
        f"batches of {tokens} tokens"
    )
    for name in sources:
        ratio = seconds["training"] / seconds[name]
        print(
            f"{name}: read at {tokens / seconds[name]:,.0f} tokens a second, {ratio:.1f} times "
            "that (above 5 is wanted)"
        )


def training(words: list[str], stores: dict[str, Path], place: Path) -> None:
    """Train online and from every store; tau and losses by encoding."""
    taus: dict[str, dict[str, tuple[float, list[float]]]] = {}
    losses: dict[str, list[float]] = {}
    ways: dict[str, list[str]] = {"online": []}
    ways |= {name: ["features=store", f"features.path={store}"] for name, store in stores.items()}
    for name, more in ways.items():
        run = place / f"run-{name.replace(' ', '-')}"
        fit.main([*words, f"run_dir={run}", *more])
        rows: list[dict[str, Any]] = json.loads((run / "package" / "metrics.json").read_text())[
            "rows"
        ]
        taus[name] = {
            row["label"]: (row["tau"], row["tau_interval"])
            for row in rows
            if row["measured"] == "acceptance"
        }
        losses[name] = [
            row["train/loss"] for row in read_metrics(run / "metrics.csv") if "train/loss" in row
        ]
    for name, found in taus.items():
        for label, (tau, (low, high)) in found.items():
            ratio = tau / taus["bf16"][label][0]
            print(
                f"{name}, {label}: tau {tau:.3f} ({low:.3f}..{high:.3f}), {ratio:.3f} of bf16 (at "
                "least 0.99 is wanted)"
            )
    for name, curve in losses.items():
        gaps = [abs(a / b - 1) for a, b in zip(curve, losses["online"], strict=True)]
        print(
            f"{name}: losses of {len(curve)} updates within {max(gaps):.2%} of online's, "
            f"{sum(gaps) / len(gaps):.3%} on average; the last {curve[-1]:.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--last-layer", action="store_true")
    parser.add_argument("--batches", type=count, default=8)
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    words = options.words or PART
    cfg = compose("fit", words)
    data: ConversationData = build(cfg.data, split="train")
    target: Target = build(cfg.target, work="throughput")
    drafter = given.make_drafter(settings.read_settings(cfg), target, data, None)
    trainer: TrainerConfig = build(cfg.trainer)
    places = trainer.sampler(data, seed=cfg.seed, rank=0, world=1).batches(0)
    with tempfile.TemporaryDirectory(prefix="drafttrain-store-") as folder:
        # Batches for the target are larger than those of training.
        batches = Batches(
            batch_tokens=max(4096, *data.lengths), batch_rows=None, seed=cfg.seed, shard_mb=None
        )
        stores = make_stores(target, data, drafter.needs, Path(folder), batches, options.last_layer)
        reading(target, drafter, data, places[: options.batches], stores, options.rounds)
        if options.fit:
            training(words, stores, Path(folder))


if __name__ == "__main__":
    reported(main)
