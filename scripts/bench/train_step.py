"""A training step with kept features against the sum of its unavoidable matrix products.

Usage: python scripts/bench/train_step.py [--rows 8] [--length 224] [--draft-vocab 8192] [--rounds
10]

The products are those of the step itself: forward, input gradient and weight gradient of every
linear layer (no input gradient for the first), scores and mixtures of attention, and for supervised
tokens the vocabulary products: the draft's logits, their gradient, the target's logits. Everything
else (norms, softmax, losses, optimiser) is overhead.
"""

from __future__ import annotations

import argparse

import torch
from timing import interleaved

from drafttrain.data.datamodule import collate
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.flow import Features
from drafttrain.target import load


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=224)
    parser.add_argument("--prompt", type=int, default=50)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    target = load.smollm2(dtype="float32", device="auto", attention="sdpa")
    d, device = target.width, target.device
    drafter = Eagle1(target, draft_ids=list(range(options.draft_vocab)), classification=1.0)
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=1e-4, fused=True)
    mask = torch.arange(options.length) >= options.prompt
    rows = [
        (torch.randint(0, target.vocab_size, (options.length,)), mask, i)
        for i in range(options.rows)
    ]
    batch = collate(rows)
    features = Features(torch.randn(options.rows, options.length, d, device=device))
    noise = torch.Generator(device="cpu").manual_seed(0)

    def step() -> None:
        loss = drafter.loss(batch, features, generator=noise)
        (loss.total / loss.count).backward()
        optimiser.step()
        optimiser.zero_grad()

    positions, taught = (
        options.rows * (options.length - 2),
        options.rows * (options.length - options.prompt),
    )
    config = target.config
    heads, kv, e, ff = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size,
    )
    linear = [(d, heads * e), (d, kv * e), (d, kv * e), (heads * e, d), (d, ff), (d, ff), (ff, d)]
    x = {
        width: torch.randn(positions, width, device=device)
        for width in {d, 2 * d, ff, heads * e, kv * e}
    }
    w = {shape: torch.randn(shape[1], shape[0], device=device) for shape in {*linear, (2 * d, d)}}
    vocabulary = torch.randn(options.draft_vocab, d, device=device)
    spoken, logits = (
        torch.randn(taught, d, device=device),
        torch.randn(taught, options.draft_vocab, device=device),
    )
    q = torch.randn(options.rows * heads, options.length - 2, e, device=device)
    scores = torch.randn(
        options.rows * heads, options.length - 2, options.length - 2, device=device
    )

    def products() -> None:
        for i, o in [(2 * d, d), *linear]:
            torch.mm(x[i], w[i, o].T)
            torch.mm(x[o].T, x[i])
            if i != 2 * d:
                torch.mm(x[o], w[i, o])
        for _ in range(3):  # forward, and two gradients of each of the two products
            torch.bmm(q, q.transpose(1, 2))
            torch.bmm(scores, q)
        torch.mm(spoken, vocabulary.T)
        torch.mm(spoken, vocabulary.T)
        torch.mm(logits, vocabulary)

    seconds = interleaved({"step": step, "products": products}, rounds=options.rounds)
    print(
        f"step {seconds['step'] * 1e3:.1f} ms, its matrix products {seconds['products'] * 1e3:.1f} "
        f"ms"
    )
    print(f"ratio {seconds['step'] / seconds['products']:.2f} (at most 1.50 is wanted)")
    print(
        f"{taught / seconds['step']:.0f} supervised tokens a second, {options.rows} rows of "
        f"{options.length} tokens"
    )


if __name__ == "__main__":
    main()
