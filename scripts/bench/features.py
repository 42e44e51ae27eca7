"""The online feature pass against a bare forward pass of the target's decoder over the same
batches.

Usage: python scripts/bench/features.py [--rows 8] [--length 224] [--rounds 5]
"""

from __future__ import annotations

import argparse

import torch
from timing import count, interleaved, refuse_long, reported

from drafttrain.flow import Needs
from drafttrain.target import load


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=count, default=8)
    parser.add_argument("--length", type=count, default=224)
    parser.add_argument("--rounds", type=count, default=5)
    options = parser.parse_args()
    target = load.smollm2(dtype="auto", device="auto", attention="sdpa", work="throughput")
    refuse_long(target, options.length)
    ids = torch.randint(0, target.vocab_size, (options.rows, options.length), device=target.device)
    lengths = torch.full((options.rows,), options.length)

    @torch.inference_mode()
    def bare() -> None:
        target.base(input_ids=ids, use_cache=False)

    jobs = {
        "bare": bare,
        "last hidden": lambda: target.features(ids, lengths, Needs(last_hidden=True)),
        "last hidden and three layers": lambda: target.features(
            ids, lengths, Needs(True, (2, 15, 27))
        ),
    }
    seconds = interleaved(jobs, rounds=options.rounds, warmup=1)
    for name, value in seconds.items():
        print(
            f"{name}: {value * 1e3:.0f} ms, {value / seconds['bare']:.2f} of bare (at most 1.10 is "
            "wanted)"
        )


if __name__ == "__main__":
    reported(main)
