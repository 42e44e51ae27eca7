"""Rows joined into sequences against rows padded in batches of like length: seconds per supervised
token, joined over padded.

Usage: python scripts/bench/packing.py [--target smollm2] [--data builtin:smollm2] [--pack 512]
                                       [--batch-tokens 2048] [--tokens 8192] [--rounds 3] [--all]

Both take the first batches of an epoch until they hold `--tokens` tokens, and are timed in turn:
the target's pass, then the drafter's step on given features. `--all` puts rows of any length into a
padded batch, as a loader that ignores lengths does. On an accelerator the target's pass
over joined rows uses `flex_attention`, if it can be built there.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

import torch
from timing import count, interleaved, reported

from drafttrain.data.datamodule import ConversationData, EpochSampler
from drafttrain.data.sequences import PackedSampler
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.flow import Batch, Features, Needs
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.wiring.defaults import with_defaults

Arms = dict[str, list[Batch]]


def taken(data: ConversationData, batches: list[list[int]], tokens: int) -> list[Batch]:
    found: list[Batch] = []
    while batches and sum(int(batch.lengths.sum()) for batch in found) < tokens:
        found.append(data.batch(batches.pop(0)))
    return found


def of_any_length(data: ConversationData, tokens: int) -> list[list[int]]:
    """Shuffled rows, cut into batches of at most `tokens` tokens, padding counted."""
    order = list(range(len(data)))
    random.Random(0).shuffle(order)
    batches: list[list[int]] = [[]]
    for row in order:
        longest = max(data.lengths[i] for i in [*batches[-1], row])
        if batches[-1] and longest * (len(batches[-1]) + 1) > tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", choices=("smollm2", "tiny"), default="smollm2")
    parser.add_argument("--data", default="builtin:smollm2")
    parser.add_argument("--pack", type=count, default=512)
    parser.add_argument("--batch-tokens", type=count, default=2048)
    parser.add_argument("--tokens", type=count, default=8192)
    parser.add_argument("--draft-vocab", type=count, default=8192)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--all", action="store_true")
    return parser.parse_args()


def arms_of(options: argparse.Namespace) -> Arms:
    """Batches of padded rows, and of joined ones."""
    data = ConversationData(options.data, max_length=options.pack)
    if options.all:
        padded = of_any_length(data, options.batch_tokens)
    else:
        padded = EpochSampler(data.lengths, batch_tokens=options.batch_tokens).batches(0)
    packed = PackedSampler(
        data.lengths, sequence=options.pack, sequences=max(1, options.batch_tokens // options.pack)
    ).batches(0)
    return {
        "padded": taken(data, padded, options.tokens),
        "joined": taken(data.joined(options.pack), packed, options.tokens),
    }


def jobs_of(target: Target, arms: Arms, draft_vocab: int) -> dict[str, Callable[[], object]]:
    """The target's pass and the drafter's step over the batches of each arm."""
    torch.manual_seed(0)
    ids = list(range(min(draft_vocab, target.vocab_size)))
    drafter = with_defaults(Eagle1, target, draft_ids=ids, classification=1.0)
    held = {
        name: [
            Features(torch.randn(*batch.input_ids.shape, target.width, device=target.device))
            for batch in batches
        ]
        for name, batches in arms.items()
    }

    def reads(name: str) -> Callable[[], object]:
        return lambda: [
            target.features(b.input_ids, b.lengths, Needs(last_hidden=True), b.packing)
            for b in arms[name]
        ]

    def steps(name: str) -> Callable[[], object]:
        def step() -> None:
            for batch, features in zip(arms[name], held[name], strict=True):
                drafter.zero_grad()
                drafter.loss(batch, features).total.backward()

        return step

    return {
        f"{what}, {name}": make(name)
        for what, make in (("features", reads), ("step", steps))
        for name in arms
    }


def show(arms: Arms, seconds: dict[str, float]) -> None:
    labels = {name: sum(int(b.loss_mask.sum()) for b in batches) for name, batches in arms.items()}
    for name, batches in arms.items():
        real = sum(int(b.lengths.sum()) for b in batches)
        held = sum(b.input_ids.numel() for b in batches)
        rows = sum(len(b.row_ids) for b in batches)
        print(
            f"{name}: {rows} rows, {labels[name]} supervised of {real} tokens, which fill "
            f"{real / held:.1%}"
        )
    for what in ("features", "step"):
        cost = {name: seconds[f"{what}, {name}"] / labels[name] for name in arms}
        print(
            f"{what}: {cost['padded'] * 1e6:.1f} us a supervised token padded, "
            f"{cost['joined'] * 1e6:.1f} joined, ratio {cost['joined'] / cost['padded']:.3f}"
        )
    both = {
        name: (seconds[f"features, {name}"] + seconds[f"step, {name}"]) / labels[name]
        for name in arms
    }
    print(f"both: ratio {both['joined'] / both['padded']:.3f} (below 1 joining pays)")


def main() -> None:
    options = arguments()
    where = {"dtype": "auto", "device": "auto", "attention": "sdpa", "work": "throughput"}
    target = load.tiny() if options.target == "tiny" else load.smollm2(**where)
    by = target.choose_isolation()
    arms = arms_of(options)
    jobs = jobs_of(target, arms, options.draft_vocab)
    seconds = interleaved(jobs, rounds=options.rounds, warmup=1)
    print(
        f"the target keeps joined rows apart by {by}; {target.name}, "
        f"{str(target.dtype).removeprefix('torch.')}, {target.device}"
    )
    show(arms, seconds)


if __name__ == "__main__":
    reported(main)
