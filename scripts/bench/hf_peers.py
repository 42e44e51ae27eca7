"""Decoding with drafts here and in transformers: the same target, prompts and, where there is one,
the same small drafter.

Usage: python scripts/bench/hf_peers.py [--target smollm2] [--package DIR] [--prompts 8] [--new 64]
[--drafts 3] [--ngram 3]

Plain decoding of both and prompt lookup of both; with the package of a small language model
(drafter=ssm) also that model as a drafter here and as `assistant_model` there. Greedy in float32,
so that all of them must write the same ids. Every prompt is decoded in every way before the next
one, the order rotating; every ratio is taken inside this run, its 95 % interval over prompts.

`predicted` is the speed if nothing but the target's passes took time: as many passes, over as many
positions each, as were really made, at the price that a pass over that many positions has here. The
speed that is seen is lower, since drafting and the loop take time, too.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import count, interleaved, reported

import drafttrain
from drafttrain.data.conversations import read_set
from drafttrain.data.datamodule import set_folder
from drafttrain.decoding.loop import decode
from drafttrain.decoding.measure import Measurement
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.ngram import NGram
from drafttrain.flow import Tally
from drafttrain.packaging.manifest import STANDALONE, STANDALONE_TENSORS
from drafttrain.reporting.console import table
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree
from drafttrain.wiring.defaults import with_defaults

PLAIN = Plan(Tree.chain(0))
WARMUP = 8


@dataclass
class Way:
    """A way of decoding, and its results."""

    name: str
    run: Callable[[list[int], int], list[int]]
    """(prompt, most new tokens) -> new ids"""
    ids: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    widths: list[list[int]] = field(default_factory=list)
    """For each prompt, positions of every pass of the target, the one that reads the prompt
    first."""

    @property
    def tokens(self) -> list[int]:
        return [len(ids) for ids in self.ids]

    @property
    def tokens_a_pass(self) -> float:
        return sum(self.tokens) / sum(map(len, self.widths))

    def against(self, base: Way) -> Measurement:
        """Its speed-up over another way."""
        return Measurement(PLAIN, [], Tally(), self.tokens, self.seconds, base.seconds, base.tokens)


def here(
    target: Target, drafter: Drafter | None, plan: Plan
) -> Callable[[list[int], int], list[int]]:
    return lambda prompt, limit: (
        decode(target, drafter, [prompt], plan, max_new_tokens=limit)[0][0].ids
    )


def there(
    target: Target, config: Any = None, **settings: Any
) -> Callable[[list[int], int], list[int]]:
    """`generate` of transformers.

    Args:
        config: generation settings of the assistant.
    """

    def run(prompt: list[int], limit: int) -> list[int]:
        if config is not None:
            settings["assistant_model"].generation_config = copy.deepcopy(config)
        ids = torch.tensor([prompt], device=target.device)
        stops = list(target.stop_ids)
        out = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=limit,
            eos_token_id=stops or None,
            pad_token_id=stops[0] if stops else 0,
            **settings,
        )
        return out[0, len(prompt) :].tolist()

    return run


def ways_of(
    target: Target, folder: str | None, drafts: int, ngram: int
) -> tuple[list[Way], list[tuple[str, Way, Way]]]:
    """All ways, plain decoding of both first, and which of ours has which peer."""
    chain = Plan(Tree.chain(drafts))
    copies = with_defaults(NGram, target, max_ngram=ngram).eval()
    ours, theirs = (
        Way("drafttrain, plain", here(target, None, PLAIN)),
        Way("transformers, plain", there(target)),
    )
    lookup = Way(f"drafttrain, ngram, {drafts} drafts", here(target, copies, chain))
    settings = {"prompt_lookup_num_tokens": drafts, "max_matching_ngram_size": ngram}
    peer = Way(f"transformers, prompt lookup, {drafts} drafts", there(target, **settings))
    ways, pairs = (
        [ours, theirs, lookup, peer],
        [("plain", ours, theirs), ("prompt lookup", lookup, peer)],
    )
    if folder is None:
        return ways, pairs
    from transformers import AutoModelForCausalLM

    speculator = drafttrain.load(folder, target, dtype="float32")
    path = Path(folder).expanduser() / STANDALONE
    assistant = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, use_safetensors=True
    )
    assistant = assistant.to(target.device).eval().requires_grad_(False)
    fixed = copy.deepcopy(assistant.generation_config)
    fixed.num_assistant_tokens, fixed.num_assistant_tokens_schedule = drafts, "constant"
    fixed.assistant_confidence_threshold = 0.0
    own = copy.deepcopy(assistant.generation_config)
    mine = Way(f"drafttrain, ssm, {drafts} drafts", here(target, speculator.drafter, chain))
    peer = Way(
        f"transformers, assistant, {drafts} drafts", there(target, fixed, assistant_model=assistant)
    )
    ways += [mine, peer]
    pairs.append(("small model", mine, peer))
    plan = Plan(speculator.plan.tree)
    packaged = Way(
        f"drafttrain, ssm, the package's {plan.tree.title}", here(target, speculator.drafter, plan)
    )
    defaults = Way(
        "transformers, assistant, its defaults", there(target, own, assistant_model=assistant)
    )
    if plan.tree.size:
        ways.append(packaged)
        pairs.append(("small model, as each would have it", packaged, defaults))
    return [*ways, defaults], pairs


@contextlib.contextmanager
def noted(target: Target, widths: list[int]) -> Iterator[None]:
    """While it lasts, positions of every pass of the target are noted."""

    def note(_module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named.get("input_ids", given[0] if given else None)
        widths.append((named["inputs_embeds"] if ids is None else ids).shape[1])

    handle = target.base.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def race(target: Target, ways: Sequence[Way], prompts: Sequence[list[int]], new: int) -> None:
    for way in ways:
        way.run(prompts[0], min(new, WARMUP))
    for number, prompt in enumerate(prompts):
        for shift in range(len(ways)):
            way = ways[(number + shift) % len(ways)]
            widths: list[int] = []
            with noted(target, widths):
                start = time.perf_counter()
                ids = way.run(prompt, new)
                way.seconds.append(time.perf_counter() - start)
            way.ids.append(ids)
            way.widths.append(widths)


@torch.inference_mode()
def prices(
    target: Target, ways: Sequence[Way], prompts: Sequence[list[int]], rounds: int = 5
) -> dict[str, float]:
    """Seconds that the passes of each way take, by the time of a pass over that many positions
    here."""
    reading = [widths[0] for way in ways for widths in way.widths]
    checking = [width for way in ways for widths in way.widths for width in widths[1:]] or [1]
    widest = max(max(reading), max(checking))
    context = max(1, min(max(map(len, prompts)), target.context - widest - 1))
    cache = target.new_cache(1, context + widest + 1)
    empty = target.new_cache(1, widest + 1)
    ids = torch.arange(max(context, widest), device=target.device)[None] % target.vocab_size
    target.step(ids[:, :context], cache)
    cache.commit(torch.tensor([context], device=target.device))
    # Reading a prompt needs the vocabulary only at its end, checking drafts at every position.
    jobs: dict[str, Callable[[], object]] = {}
    places = {"read": _spread(reading), "check": _spread(checking)}
    for n in places["read"]:
        jobs[f"read {n}"] = lambda n=n: target.head(target.step(ids[:, :n], empty).hidden[:, -1])
    for n in places["check"]:
        jobs[f"check {n}"] = lambda n=n: (
            target.head(target.step(ids[:, :n], cache).hidden).argmax(-1).tolist()
        )
    seconds = interleaved(jobs, rounds=rounds, warmup=1)

    def price(kind: str, widths: Sequence[int]) -> float:
        known = [seconds[f"{kind} {n}"] for n in places[kind]]
        return float(np.interp(widths, places[kind], known).sum())

    return {
        way.name: price("read", [widths[0] for widths in way.widths])
        + price("check", [width for widths in way.widths for width in widths[1:]])
        for way in ways
    }


def _spread(widths: Sequence[int], most: int = 8) -> list[int]:
    """The smallest, the largest, and some between them; all of them where they are few."""
    found = sorted(set(widths))
    return (
        found
        if len(found) <= most
        else sorted({found[round(i * (len(found) - 1) / (most - 1))] for i in range(most)})
    )


def prompts_for(name: str, count: int) -> tuple[Target, list[list[int]]]:
    if name == "tiny":
        target = load.tiny()
        chance = torch.Generator().manual_seed(0)
        parts = [
            torch.randint(3, target.vocab_size, (8,), generator=chance).tolist()
            for _ in range(count)
        ]
        return target, [part * 3 for part in parts]
    target = load.smollm2(dtype="float32", device="auto", attention="sdpa")
    return target, read_set(set_folder("builtin:smollm2")).prompts(count)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", choices=["smollm2", "tiny"], default="smollm2")
    parser.add_argument("--package", help="of a drafter=ssm that holds a directory of transformers")
    parser.add_argument("--prompts", type=count, default=8)
    parser.add_argument("--new", type=count, default=64)
    parser.add_argument("--drafts", type=count, default=3, help="drafted tokens a round")
    parser.add_argument(
        "--ngram", type=count, default=3, help="longest match that prompt lookup looks for"
    )
    options = parser.parse_args()
    if min(options.prompts, options.new, options.drafts, options.ngram) < 1:
        parser.error("--prompts, --new, --drafts and --ngram need at least 1")
    if options.package and not (Path(options.package).expanduser() / STANDALONE_TENSORS).is_file():
        parser.error(
            f"--package {options.package} holds no {STANDALONE}/: train a drafter=ssm with "
            "export_assistant=true"
        )
    return options


def main() -> None:
    options = arguments()
    target, prompts = prompts_for(options.target, options.prompts)
    ways, pairs = ways_of(target, options.package, options.drafts, options.ngram)
    race(target, ways, prompts, options.new)
    price = prices(target, ways, prompts)
    plain = ways[0]
    rows = []
    for way in ways:
        found = way.against(plain)
        same = sum(a == b for a, b in zip(way.ids, plain.ids, strict=True))
        predicted = price[plain.name] / sum(plain.tokens) / (price[way.name] / sum(way.tokens))
        rate = found.tokens_per_second
        rows.append(
            [
                way.name,
                rate,
                way.tokens_a_pass,
                predicted,
                found.speedup,
                found.speedup_interval,
                f"{same}/{len(prompts)}",
            ]
        )
    threads = f"{torch.get_num_threads()} threads"
    title = (
        f"{target.name}, float32, {threads}, {len(prompts)} prompts, at most {options.new} new "
        "tokens"
    )
    columns = ("", "tokens/s", "tokens a pass", "predicted", "seen", "95 %", "same text")
    table(f"{title}; speed over drafttrain's plain decoding", columns, rows)
    rows = []
    for name, ours, theirs in pairs:
        found = ours.against(theirs)
        predicted = price[theirs.name] / sum(theirs.tokens) / (price[ours.name] / sum(ours.tokens))
        rows.append([name, predicted, found.speedup, found.speedup_interval])
    table("drafttrain over transformers: speed", ("", "predicted", "seen", "95 %"), rows)
    odd = [way.name for way in ways if way.ids != plain.ids]
    print(
        f"NOT the text of plain decoding: {', '.join(odd)}"
        if odd
        else "all of them wrote the same text"
    )


if __name__ == "__main__":
    reported(main)
