"""Whether decoding accepts what training's own accuracy promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from drafttrain.decoding.plan import Plan
from drafttrain.decoding.record import Output
from drafttrain.decoding.speculator import Speculator
from drafttrain.drafter.base import Drafter
from drafttrain.flow import Batch
from drafttrain.tree.topology import Tree


@torch.inference_mode()
def parity(
    speculator: Speculator, drafter: Drafter, prompts: Sequence[list[int]], limit: int
) -> dict[str, Any] | None:
    """Does decoding accept what training's own accuracy promises, at the same positions?

    The prompts are decoded greedily with a chain; where a round began, the first draft was kept or
    not. Fed as in training, the drafter guesses the tokens at the same positions of the same text.
    Apart from rounding both rates are one number; a gap means that decoding feeds the drafter
    something else than training does.

    Args:
        drafter: as training has it; the speculator holds its decoding copy.
        limit: new tokens at most.

    Returns: None if there was nothing to compare.
    """
    if not prompts or not drafter.learns:
        return None
    depth = min(4, drafter.max_depth or 4)
    outputs, _ = speculator.generate(prompts, max_new_tokens=limit, plan=Plan(Tree.chain(depth)))
    kept = right = rounds = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        ids, starts = prompt + output.ids, _starts(len(prompt), output)
        mask = torch.zeros(1, len(ids), dtype=torch.bool)
        mask[0, [place for place, _ in starts]] = True
        batch = Batch(torch.tensor([ids]), mask, torch.tensor([len(ids)]), torch.tensor([0]))
        features = speculator.target.features(batch.input_ids, batch.lengths, drafter.needs)
        guesses = drafter.guesses(batch, features)
        if guesses is None:
            return None
        compared = [
            (place, was_kept) for place, was_kept in starts if int(guesses[0, place, 0]) >= 0
        ]
        rounds += len(compared)
        kept += sum(was_kept for _, was_kept in compared)
        right += sum(int(guesses[0, place, 0]) == ids[place] for place, _ in compared)
    if not rounds:
        return None
    exact = {speculator.target.dtype, speculator.drafter.dtype} == {torch.float32}
    decoded, forced, allowed = kept / rounds, right / rounds, 0.01 if exact else 0.05
    return {
        "accept_at_1": decoded,
        "sim_accept_at_1": forced,
        "rounds": rounds,
        "gap": decoded - forced,
        "allowed_gap": allowed,
        "agree": abs(decoded - forced) <= allowed,
    }


def _starts(place: int, output: Output) -> list[tuple[int, bool]]:
    """(where it began, whether its first draft was kept) of every round of an output.

    Args:
        place: where the output begins.
    """
    starts = []
    for number, (emitted, accepted) in enumerate(output.runs):
        last = number == len(output.runs) - 1
        # The prefill is no round. A last round that kept nothing may have been cut before its
        # first draft counted.
        if number and not (last and not accepted):
            starts.append((place, accepted > 0))
        place += emitted
    return starts


def parity_words(found: dict[str, Any] | None) -> list[str]:
    """The finding in one line, a gap in capitals."""
    if found is None:
        return []
    facts = (
        f"first drafts accepted while decoding {found['accept_at_1']:.3f}, expected by training's "
        f"own accuracy at the same {found['rounds']} positions {found['sim_accept_at_1']:.3f}"
    )
    if found["agree"]:
        return [f"parity: {facts}: they agree"]
    return [
        f"PARITY GAP: {facts}: decoding feeds the drafter something else than training did; tau is "
        "lower than it could be"
    ]
