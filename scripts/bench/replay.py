"""Acceptance on the target's kept answers against real decoding: the same counts, in what time?

Usage: python scripts/bench/replay.py --package DIR [--prompts 100] [--new 128] [--batch 16]
       [--dtype float32] [--target smollm2|tiny]

Held-out prompts are decoded by a chain of 4, a static and a dynamic tree of 25, and counted again
on the answers; prompts with other counts at any place are named. Seconds of writing the answers and
of reading their features are paid once for all trees and drafters.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from timing import count, reported

import drafttrain
from drafttrain.data.conversations import read_set
from drafttrain.data.datamodule import set_folder
from drafttrain.decoding.measure import measure_acceptance
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.replaying import Replays, obstacle
from drafttrain.errors import InputError
from drafttrain.packaging.manifest import read_config
from drafttrain.target import answers, load
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Growth, Tree

T = TypeVar("T")
TREES: dict[str, Growth] = {
    "chain of 4": Tree.chain(4),
    "static tree of 25": Tree.eagle1_static(),
    "dynamic tree of 25": Dynamic(depth=5, top_k=8, total=25),
}


def timed(job: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    return job(), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--package", required=True)
    parser.add_argument("--prompts", type=count, default=100)
    parser.add_argument("--new", type=count, default=128)
    parser.add_argument("--batch", type=count, default=16)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--target", choices=("smollm2", "tiny"), default="smollm2")
    words = parser.parse_args()
    read_config(words.package)  # Before minutes of work.
    tiny = words.target == "tiny"
    target = (
        load.tiny() if tiny else load.smollm2(dtype=words.dtype, device="auto", attention="sdpa")
    )
    drafter = drafttrain.load(words.package, target, dtype=words.dtype).drafter
    if reason := obstacle(drafter, Plan(TREES["chain of 4"])):
        raise InputError(f"--package {words.package}: {reason}")
    held_out = read_set(set_folder("builtin:smollm2")).prompts(words.prompts)
    prompts = [[i % 320 for i in ids] for ids in held_out] if tiny else held_out
    known, writing = timed(lambda: answers.write(target, prompts, words.new, slots=words.batch))
    replays = Replays(target, lambda: known)
    replay, reading = timed(lambda: replays.of(drafter.needs))
    print(
        f"{len(prompts)} prompts, at most {words.new} tokens, batches of {words.batch}, "
        f"{words.dtype}, {torch.get_num_threads()} threads\n"
        f"once: {writing:.1f} s for the answers, {reading:.1f} s for their features "
        f"({replay.kept.bytes / 1e6:.0f} MB)"
    )
    settings = {"max_new_tokens": words.new, "batch": words.batch}
    for name, tree in TREES.items():
        plan = Plan(tree)
        try:
            drafter.check(tree)
        except InputError as error:
            print(f"{name}: {error}")
            continue
        real, slow = timed(
            lambda plan=plan: measure_acceptance(target, drafter, prompts, plan, **settings)
        )
        found, fast = timed(lambda plan=plan: replays.measure(drafter, prompts, plan, **settings))
        pairs = zip(real.outputs, found.outputs, strict=True)
        other = [number for number, (one, two) in enumerate(pairs) if one != two]
        tally, interval = found.tally, found.tau_interval
        bounds = "" if interval is None else f" ({interval[0]:.3f}..{interval[1]:.3f})"
        print(
            f"{name}: tau {tally.tau:.3f}{bounds}, decoded {real.tally.tau:.3f}; other counts in "
            f"{len(other)} of {len(prompts)} prompts {other[:8] if other else ''}; "
            f"{slow:.1f} s decoding, {fast:.1f} s replaying, {slow / fast:.1f} times"
        )


if __name__ == "__main__":
    reported(main)
