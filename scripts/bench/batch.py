"""Tokens a second of speculative decoding side by side, against the same prompts one by one.

Usage: python scripts/bench/batch.py --package DIR [--batch 8] [--new 48] [--repeats 3]
       [--target smollm2|tiny]

Held-out prompts are decoded with the package's own tree and without an end token, so that every row
has its full length. Each row must get the same tokens as when it is decoded by itself. Drafting and
plain decoding are compared in this run; each ratio is taken inside it.
"""

from __future__ import annotations

import argparse

import torch
from timing import count, interleaved, reported

import drafttrain
from drafttrain.data.conversations import read_set
from drafttrain.data.datamodule import set_folder
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.remembered import without_memory
from drafttrain.target import load
from drafttrain.tree.topology import Tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--package", required=True)
    parser.add_argument("--batch", type=count, default=8)
    parser.add_argument("--new", type=count, default=48)
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--target", choices=("smollm2", "tiny"), default="smollm2")
    words = parser.parse_args()
    tiny = words.target == "tiny"
    target = load.tiny() if tiny else load.smollm2(dtype="float32", device="auto", attention="sdpa")
    speculator = drafttrain.load(words.package, target)
    held_out = read_set(set_folder("builtin:smollm2")).prompts(words.batch)
    prompts = [[i % 320 for i in ids] for ids in held_out] if tiny else held_out
    print(f"{len(prompts)} prompts, {words.new} tokens each, {torch.get_num_threads()} threads")
    for name, plan in {"drafts": speculator.plan, "plain": Plan(Tree.chain(0))}.items():
        texts: dict[str, list[list[int]]] = {}

        def decode(
            groups: list[list[list[int]]], key: str, plan: Plan = plan, texts: dict = texts
        ) -> None:
            texts[key] = []
            # Nothing of an earlier round is copied.
            speculator.drafter = without_memory(speculator.drafter)
            for group in groups:
                outputs, _ = speculator.generate(
                    group, max_new_tokens=words.new, plan=plan, stop_ids=()
                )
                texts[key] += [output.ids for output in outputs]

        seconds = interleaved(
            {
                "together": lambda: decode([prompts], "together"),
                "single": lambda: decode([[p] for p in prompts], "single"),
            },
            rounds=words.repeats,
            warmup=1,
        )
        same = sum(a == b for a, b in zip(texts["together"], texts["single"], strict=True))
        rate = len(prompts) * words.new / seconds["together"]
        ratio = seconds["single"] / seconds["together"]
        print(
            f"{name} ({plan.tree.title}): {rate:.0f} tokens/s together, {ratio:.2f} times those of "
            f"single rows; {same} of {len(prompts)} rows have the same text"
        )


if __name__ == "__main__":
    reported(main)
