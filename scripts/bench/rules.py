"""How much more block verification keeps than the ratio rule, on the same drafted chains.

Usage: python scripts/bench/rules.py --package DIR [--k 4] [--temperature 1] [--prompts 100] [--new
48] [--seed 0] [--target NAME]

Held-out prompts are decoded one by one with chains of k and the ratio rule. In every round, what
each rule keeps of the chain on average over its uniform numbers is computed from the distributions
of target and draft. No number is drawn for the comparison, so that it needs far fewer prompts than
two runs side by side do. The average of the ratio rule is printed next to what it really kept; they
are equal up to chance.
"""

from __future__ import annotations

import argparse

import numpy as np
from rich.progress import track
from timing import count, reported
from torch import Tensor

import drafttrain
from drafttrain.data.conversations import read_set
from drafttrain.data.datamodule import set_folder
from drafttrain.decoding import rules
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.rules.chain import kept_on_average
from drafttrain.errors import InputError
from drafttrain.flow import Acceptance, Proposal
from drafttrain.nn.sampling import Policy
from drafttrain.target import load
from drafttrain.tree.topology import Tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--package", required=True)
    parser.add_argument("--k", type=count, default=4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--prompts", type=count, default=100)
    parser.add_argument("--new", type=count, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", default="smollm2", choices=["smollm2", "tiny"])
    words = parser.parse_args()
    if words.temperature <= 0:
        parser.error("--temperature: both rules judge sampled text, give one above 0")
    if min(words.k, words.prompts, words.new) < 1:
        parser.error("--k, --prompts and --new need at least 1")
    try:
        counts = measured(words)
        if not counts[:, 0].any():
            raise InputError("no prompt had a round of drafts: raise --new, or give other prompts")
    except InputError as error:
        parser.error(str(error))
    print(
        f"{len(counts)} prompts, {int(counts[:, 0].sum())} rounds, chain of {words.k}, temperature "
        f"{words.temperature:g}"
    )
    print(f"kept a round, ratio: {_ratio(counts, 1)}; really kept {_ratio(counts, 3)}")
    print(f"kept a round, block: {_ratio(counts, 2)}")
    print(
        f"block over ratio: {_ratio(np.stack([counts[:, 0], counts[:, 2] - counts[:, 1]], 1), 1)}"
    )


def measured(words: argparse.Namespace) -> np.ndarray:
    """(prompts 4) rounds, and kept over all of them: by ratio's average, by block's, really.

    Raises: InputError for a package, target or setting that cannot be used.
    """
    target = (
        load.tiny()
        if words.target == "tiny"
        else load.smollm2(dtype="float32", device="auto", attention="sdpa")
    )
    speculator = drafttrain.load(words.package, target)
    plan = Plan(Tree.chain(words.k), Policy(temperature=words.temperature), rule="ratio")

    rounds: list[tuple[float, float, int]] = []
    judged = rules.RULES["ratio"]

    def observed(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
        found = judged(p, proposal, u)
        averages = kept_on_average(p, proposal)
        rounds.extend(zip(*(kept.tolist() for kept in averages), found.count.tolist(), strict=True))
        return found

    rules.RULES["ratio"] = observed
    by_prompt = []
    try:
        for i, prompt in enumerate(
            track(_prompts(words.target, words.prompts), description="prompts decoded")
        ):
            speculator.generate([prompt], max_new_tokens=words.new, plan=plan, seed=words.seed + i)
            by_prompt.append(
                [len(rounds), *(sum(column) for column in zip(*rounds, strict=True))]
                if rounds
                else [0.0] * 4
            )
            rounds.clear()
    finally:
        rules.RULES["ratio"] = judged
    return np.array(by_prompt)


def _prompts(name: str, count: int) -> list[list[int]]:
    if name == "tiny":
        return [[5 + i, 6, 7] for i in range(count)]
    return read_set(set_folder("builtin:smollm2")).prompts(count)


def _ratio(counts: np.ndarray, column: int, resamples: int = 2000) -> str:
    """A mean a round, with its 95 % bootstrap interval over prompts."""
    drawn = np.random.default_rng(0).integers(len(counts), size=(resamples, len(counts)))
    found = counts[drawn][..., column].sum(1) / counts[drawn][..., 0].sum(1)
    low, high = np.quantile(found, [0.025, 0.975])
    return f"{counts[:, column].sum() / counts[:, 0].sum():.4f} ({low:.4f}..{high:.4f})"


if __name__ == "__main__":
    reported(main)
