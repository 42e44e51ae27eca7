"""A training step with kept features against the sum of its unavoidable matrix products.

Usage: python scripts/bench/train_step.py [--drafter eagle1] [--steps 1] [--rows 8] [--length 224]
[--draft-vocab 8192] [--rounds 10]

The products are those of the step itself: forward, input gradient and weight gradient of every
linear layer (no input gradient for the first), scores and mixtures of attention, and for supervised
tokens the vocabulary products: the draft's logits, their gradient, the target's logits. With
several steps, all but the target's logits are made once for each. Everything else (norms, softmax,
losses, optimiser) is overhead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from timing import count, interleaved, refuse_long, reported
from torch import Tensor

from drafttrain.data.datamodule import collate
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.eagle3 import Eagle3
from drafttrain.flow import Features
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.wiring.defaults import with_defaults

KINDS: dict[str, tuple[type[Drafter], dict[str, Any]]] = {
    "eagle1": (Eagle1, {"classification": 1.0}),
    "eagle3": (Eagle3, {"own_head": False, "fc_norm": True, "norm_output": True}),
}
WANTED = {"eagle1": 1.5, "eagle3": 1.35}
"""The most that a step should take, in its matrix products."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drafter", choices=sorted(KINDS), default="eagle1")
    parser.add_argument("--steps", type=count, default=1)
    parser.add_argument("--rows", type=count, default=8)
    parser.add_argument("--length", type=count, default=224)
    parser.add_argument("--prompt", type=count, default=50)
    parser.add_argument("--draft-vocab", type=count, default=8192)
    parser.add_argument("--rounds", type=count, default=10)
    options = parser.parse_args()
    if options.prompt >= options.length:
        parser.error("--prompt needs to be less than --length: nothing would be learned from")
    return options


def step_of(target: Target, options: argparse.Namespace) -> Callable[[], None]:
    """A training step on random rows and features."""
    kind, settings = KINDS[options.drafter]
    ids = list(range(options.draft_vocab))
    drafter = with_defaults(kind, target, draft_ids=ids, steps=options.steps, **settings)
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=1e-4, fused=True)
    mask = torch.arange(options.length) >= options.prompt
    rows = [
        (torch.randint(0, target.vocab_size, (options.length,)), mask, i)
        for i in range(options.rows)
    ]
    batch = collate(rows)
    shape = (options.rows, options.length, target.width)
    read = {layer: torch.randn(shape, device=target.device) for layer in drafter.needs.layers}
    features = Features(torch.randn(shape, device=target.device), read)
    noise = torch.Generator(device="cpu").manual_seed(0)

    def step() -> None:
        loss = drafter.loss(batch, features, generator=noise)
        (loss.total / loss.count).backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def products_of(target: Target, options: argparse.Namespace, taught: int) -> Callable[[], None]:
    """The matrix products of that step.

    Args:
        taught: supervised tokens.
    """
    rows, length = options.rows, options.length - 2
    d, config = target.width, target.config
    e, ff = config.head_dim, config.intermediate_size
    heads, kv = config.num_attention_heads * e, config.num_key_value_heads * e
    third = options.drafter == "eagle3"
    reads, first = (2 * d, (3 * d, d)) if third else (d, (2 * d, d))
    linear = [(reads, heads), (reads, kv), (reads, kv), (heads, d), (d, ff), (d, ff), (ff, d)]
    if not third and options.steps > 1:
        linear.append((2 * d, d))

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device=target.device)

    x = {width: made(rows * length, width) for width in {d, 2 * d, 3 * d, ff, heads, kv}}
    w = {shape: made(shape[1], shape[0]) for shape in {*linear, first}}
    vocabulary, proposed = made(options.draft_vocab, d), made(taught, d)
    logits = made(taught, options.draft_vocab)
    q = made(rows * config.num_attention_heads, length, e)
    scores = made(rows * config.num_attention_heads, length, length)

    def products() -> None:
        for i, o in ([first] if third or options.steps == 1 else []) + linear * options.steps:
            torch.mm(x[i], w[i, o].T)
            torch.mm(x[o].T, x[i])
            if (i, o) != first or (options.steps > 1 and not third):
                torch.mm(x[o], w[i, o])
        for _ in range(3 * options.steps):
            # forward, and two gradients of each of the two products
            torch.bmm(q, q.transpose(1, 2))
            torch.bmm(scores, q)
        torch.mm(proposed, vocabulary.T)
        for _ in range(options.steps):
            torch.mm(proposed, vocabulary.T)
            torch.mm(logits, vocabulary)

    return products


def main() -> None:
    options = arguments()
    target = load.smollm2(dtype="float32", device="auto", attention="sdpa")
    refuse_long(target, options.length)
    taught = options.rows * (options.length - options.prompt)
    jobs = {"step": step_of(target, options), "products": products_of(target, options, taught)}
    seconds = interleaved(jobs, rounds=options.rounds)
    step, products = seconds["step"], seconds["products"]
    print(f"step {step * 1e3:.1f} ms, its matrix products {products * 1e3:.1f} ms")
    print(f"ratio {step / products:.2f} (at most {WANTED[options.drafter]:.2f} is wanted)")
    print(
        f"{taught / step:.0f} supervised tokens a second, {options.rows} rows of {options.length} "
        "tokens"
    )


if __name__ == "__main__":
    reported(main)
