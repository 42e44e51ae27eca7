"""One verifying pass over a tree against the bare target's forward over as many positions after
the same context.

Usage: python scripts/bench/verify.py [--dtypes float32 bfloat16] [--context 200] [--rounds 15]

Verified are 32 nodes, the anchor and 31 drafts in five levels, as the decoding loop does it: tree
mask, depths, one pass through the row's cache, logits of every node. The bare forward is the
decoder of `transformers` over 32 tokens in causal order with the library's own cache; with its head
it is the complete model. Nothing is kept of either, so that every pass follows the same context.
Every ratio is taken inside this run.

Predicted before it was run: at most 1.6 times the bare decoder. The head by itself is about a
quarter of the embedded target's decoder (28 of 106 million weights), mask and cache are a copy
each.
"""

from __future__ import annotations

import argparse

import torch
from timing import count, interleaved, refuse_long, reported
from transformers import DynamicCache

from drafttrain.target import load
from drafttrain.tree.topology import Tree, ancestor_mask, depths_of

DTYPES = ("float32", "bfloat16", "float16")
WANTED = 1.6
TREE = Tree.expansion([1, 2, 2, 2, 2])


@torch.inference_mode()
def measure(dtype: str, context: int, rounds: int) -> dict[str, float]:
    target = load.smollm2(dtype=dtype, device="auto", attention="sdpa")
    device, nodes = target.device, TREE.size + 1
    refuse_long(target, context + nodes)
    before = torch.randint(0, target.vocab_size, (1, context), device=device)
    ids = torch.randint(0, target.vocab_size, (1, nodes), device=device)
    parents = torch.tensor([TREE.parents], device=device)
    cache = target.new_cache(1, context + nodes)
    target.step(before, cache)
    cache.commit(torch.tensor([context], device=device))
    own = DynamicCache()
    word = target._cache_word
    target.base(input_ids=before, use_cache=True, **{word: own})

    @torch.inference_mode()
    def verify() -> None:
        depths = torch.nn.functional.pad(depths_of(parents, TREE.max_depth), (1, 0))
        out = target.step(
            ids, cache, tree_mask=ancestor_mask(parents, TREE.max_depth), depths=depths
        )
        target.head(out.hidden)

    @torch.inference_mode()
    def bare(head: bool) -> None:
        out = target.base(input_ids=ids, use_cache=True, **{word: own})
        if head:
            target.head(out.last_hidden_state)
        own.crop(-nodes)

    jobs = {
        "bare decoder": lambda: bare(False),
        "bare decoder and head": lambda: bare(True),
        f"verified tree of {nodes} nodes": verify,
    }
    return interleaved(jobs, rounds=rounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=DTYPES)
    parser.add_argument("--context", type=count, default=200)
    parser.add_argument("--rounds", type=count, default=15)
    options = parser.parse_args()
    for dtype in options.dtypes:
        seconds = measure(dtype, options.context, options.rounds)
        print(f"{dtype}, {options.context} tokens before:")
        base, headed, _ = seconds.values()
        for name, value in seconds.items():
            print(
                f"  {name:28} {value * 1e3:7.1f} ms, {value / base:.2f} of bare, "
                f"{value / headed:.2f} with its head"
            )
    print(f"of the bare decoder, a verified tree is wanted to cost at most {WANTED:.2f}")


if __name__ == "__main__":
    reported(main)
