"""What a decoding round is made of, and complete decoding against plain decoding and transformers'
own modes.

Usage: python scripts/bench/decode.py [--package DIR] [--context 200] [--prompts 4] [--new 64]

First the cost of verifying n positions in units of one plain step, in float32 and bfloat16. With a
package, also the seconds of a draft and, on held-out prompts, decoding against plain decoding in
the same loop, against `model.generate`, and against its prompt lookup. Every ratio is taken inside
this run.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import torch
from timing import count, interleaved, refuse_long, reported

from drafttrain.packaging.manifest import read_config
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree

POSITIONS = (1, 2, 4, 6, 8, 12, 26)


def verification(context: int) -> None:
    for dtype in ("float32", "bfloat16"):
        target = load.smollm2(dtype=dtype, device="auto", attention="sdpa")
        refuse_long(target, context + max(POSITIONS))
        cache = target.new_cache(1, context + max(POSITIONS))
        target.step(torch.randint(0, 1000, (1, context), device=target.device), cache)
        cache.commit(torch.tensor([context], device=target.device))

        def verify(n: int, target=target, cache=cache) -> None:
            with torch.inference_mode():
                target.head(
                    target.step(
                        torch.ones(1, n, dtype=torch.int64, device=target.device), cache
                    ).hidden
                )

        seconds = interleaved({str(n): lambda n=n: verify(n) for n in POSITIONS}, rounds=7)
        plain = seconds["1"]
        row = ", ".join(f"{n}: {value / plain:.2f}" for n, value in seconds.items())
        print(
            f"{dtype}: a plain step {plain * 1e3:.1f} ms; verifying n positions costs (in plain "
            f"steps) {row}"
        )


def written(target: Target, ids: torch.Tensor, **settings: Any) -> int:
    """Tokens that transformers' own loop writes after a prompt."""
    return int(target.model.generate(ids, **settings).shape[1] - ids.shape[1])


def package(folder: str, prompts: int, new: int) -> None:
    import drafttrain
    from drafttrain.data.conversations import read_set
    from drafttrain.data.datamodule import set_folder
    from drafttrain.decoding.plan import Plan

    target = load.smollm2(dtype="auto", device="auto", attention="sdpa")
    speculator = drafttrain.load(folder, target)
    texts = read_set(set_folder("builtin:smollm2")).prompts(prompts)
    plans = [Plan(Tree.chain(k)) for k in (2, 3, 4, 5)] + [
        Plan(Tree.expansion([3, 2])),
        Plan(Tree.eagle1_static()),
    ]
    for measured in speculator.measure_speed(texts, plans, max_new_tokens=new):
        row = measured.row()
        stages = ", ".join(f"{stage} {value:.1f}" for stage, value in row["seconds"].items())
        print(
            f"{row['growth']} of {row['nodes']}: tau {row['tau']:.2f}, {row['speedup']:.2f}x plain "
            f"({stages} s)"
        )
    tokens: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for text in texts:
        ids = torch.tensor([text], device=target.device)
        common = {"max_new_tokens": new, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        modes = {
            "drafttrain": lambda text=text: len(
                speculator.generate([text], max_new_tokens=new)[0][0].ids
            ),
            "transformers": functools.partial(written, target, ids, **common),
            "transformers, prompt lookup 3": functools.partial(
                written, target, ids, prompt_lookup_num_tokens=3, **common
            ),
        }
        for name, job in modes.items():
            start = time.perf_counter()
            tokens[name] = tokens.get(name, 0) + int(job())
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
    base = seconds["transformers"] / tokens["transformers"]
    for name in tokens:
        print(
            f"{name}: {tokens[name] / seconds[name]:.1f} tokens/s, "
            f"{base / (seconds[name] / tokens[name]):.2f}x"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package")
    parser.add_argument("--context", type=count, default=200)
    parser.add_argument("--prompts", type=count, default=4)
    parser.add_argument("--new", type=count, default=64)
    options = parser.parse_args()
    if options.package:
        read_config(options.package)  # Before minutes of work.
    verification(options.context)
    if options.package:
        package(options.package, options.prompts, options.new)


if __name__ == "__main__":
    reported(main)
