"""What copying drafts from text costs a round, against one plain step of the target.

Usage: python scripts/bench/copying.py [--lengths 250 1000 4000] [--rounds 30] [--remember 100000]

The text is that of the shipped conversations, one after the other. A round takes in two tokens and
drafts; every ratio is taken inside this run. The target's step follows 250 tokens: after more it
takes longer, and the ratio falls. A drafter that remembers texts holds other conversations, of
which it was given twice as many tokens as it keeps.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable

import torch
from timing import count, interleaved, reported

from drafttrain.data.conversations import read_set
from drafttrain.data.datamodule import set_folder
from drafttrain.drafter.base import Committed
from drafttrain.drafter.ngram import NGram
from drafttrain.drafter.retrieval import Retrieval
from drafttrain.drafter.suffix import Suffix
from drafttrain.flow import Features
from drafttrain.nn.sampling import Policy
from drafttrain.target import load
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Growth, Tree
from drafttrain.wiring.defaults import with_defaults

WANTED = 0.05
TREES: dict[str, Growth] = {
    "chain of 10": Tree.chain(10),
    "tree of 25": Tree.eagle1_static(),
    "dynamic tree of 24": Dynamic(depth=6, top_k=8, total=24),
}


def committed_of(ids: torch.Tensor, start: int, end: int) -> Committed:
    part = ids[None, start:end]
    return Committed(Features(), part, torch.tensor([part.shape[1]]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=count, nargs="+", default=[250, 1000, 4000])
    parser.add_argument("--rounds", type=count, default=30)
    parser.add_argument("--remember", type=count, default=100_000)
    options = parser.parse_args()
    target = load.smollm2(dtype="auto", device="auto", attention="sdpa")
    conversations = read_set(set_folder("builtin:smollm2"))
    text = torch.from_numpy(conversations.ids.astype("int64"))
    cache = target.new_cache(1, 300)
    target.step(text[None, :250].to(target.device), cache)
    cache.commit(torch.tensor([250], device=target.device))

    @torch.inference_mode()
    def plain() -> None:
        target.head(target.step(text[None, 250:251].to(target.device), cache).hidden)

    jobs: dict[str, Callable[[], object]] = {"a plain step": plain}
    remembering = with_defaults(Suffix, target, remember=options.remember)
    rows, given = [], 0
    while given < 2 * options.remember:
        rows.append(conversations.row(len(conversations) - 1 - len(rows))[0].tolist())
        given += len(rows[-1])
    for line in filled(remembering, rows):
        print(line)
    drafters = {
        "NGram": with_defaults(NGram, target),
        "Suffix": with_defaults(Suffix, target),
        f"Suffix, {options.remember} tokens remembered": remembering,
    }
    for kind, drafter in drafters.items():
        for length in options.lengths:
            for name, tree in TREES.items():
                if isinstance(tree, drafter.growths):
                    jobs[f"{kind}, {length} tokens, {name}"] = round_of(drafter, text, length, tree)
    seconds = interleaved(jobs, rounds=options.rounds)
    step = seconds["a plain step"]
    for name, value in seconds.items():
        print(
            f"{name}: {value * 1e6:.0f} us, {value / step:.4f} of a plain step (at most {WANTED} "
            "is wanted)"
        )


def filled(drafter: Suffix, rows: list[list[int]]) -> list[str]:
    """Give it texts one after the other. Returns lines: what each half of them took a token, and
    the memory that they need, measured by giving them again."""
    lines, slowest = [], 0.0
    middle = len(rows) // 2
    for half, some in (
        ("while there is room", rows[:middle]),
        ("while the oldest leave", rows[middle:]),
    ):
        total = 0.0
        for row in some:
            start = time.perf_counter()
            drafter.remember_texts([row])
            took = time.perf_counter() - start
            total, slowest = total + took, max(slowest, took)
        lines.append(f"remembering a token {half}: {total / sum(map(len, some)) * 1e6:.1f} us")
    again = drafter.without_memory()
    tracemalloc.start()
    again.remember_texts(rows)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return [
        *lines,
        f"the slowest text: {slowest * 1e3:.1f} ms; memory: {held / drafter.remembers:.0f} bytes "
        "a token of the room",
    ]


def round_of(
    drafter: Retrieval, text: torch.Tensor, length: int, tree: Growth
) -> Callable[[], None]:
    state, place = drafter.open(1, 0), length
    drafter.propose(state, committed_of(text, 0, length), tree, Policy(), None)

    def draft() -> None:
        nonlocal place
        drafter.propose(state, committed_of(text, place, place + 2), tree, Policy(), None)
        place += 2

    return draft


if __name__ == "__main__":
    reported(main)
