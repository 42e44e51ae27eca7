"""Greedy text against plain decoding, token for token, and what the target says where they part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from drafttrain.decoding.exactness.logits import last_logits
from drafttrain.decoding.loop import decode
from drafttrain.decoding.measure import Prompts, Watch, unwatched
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.speculator import Speculator
from drafttrain.drafter.remembered import without_memory
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree

_MOST = 100
"""Spacings of the largest logit that rounding can add up to."""


def same_text(
    speculator: Speculator,
    prompts: Prompts,
    plans: Mapping[str, Plan],
    *,
    max_new_tokens: int,
    batch: int = 8,
    watch: Watch = unwatched,
) -> list[dict[str, Any]]:
    """A row for each plan: how many tokens equal plain decoding's, and where they first do not."""

    def write(plan: Plan, what: str) -> list[list[int]]:
        written: list[list[int]] = []
        drafter = without_memory(speculator.drafter) if plan.tree.size else None
        for start in watch(range(0, len(prompts), batch), what):
            part = prompts[start : start + batch]
            outputs, _ = decode(
                speculator.target, drafter, part, plan, max_new_tokens=max_new_tokens
            )
            written += [output.ids for output in outputs]
        return written

    plain = write(Plan(Tree.chain(0)), "exactness: plain text")
    rows = []
    for name, plan in plans.items():
        differences, compared = [], 0
        for number, (ours, theirs) in enumerate(
            zip(write(plan, f"exactness: {name}"), plain, strict=True)
        ):
            place = _parting(ours, theirs)
            compared += len(theirs) if place is None else place + 1
            if place is not None:
                both = [ids[place] if place < len(ids) else None for ids in (theirs, ours)]
                found = gap_of(speculator.target, [*prompts[number], *theirs[:place]], *both)
                differences.append({"prompt": number, "place": place, **found})
        # What rounding does not explain is shown first.
        differences.sort(key=lambda difference: difference["near_tie"])
        ties = all(difference["near_tie"] for difference in differences)
        verdict = (
            "identical" if not differences else "parts at near-ties only" if ties else "DIFFERS"
        )
        rows.append(
            {
                "label": name,
                "prompts": len(prompts),
                "same": len(prompts) - len(differences),
                "tokens": compared,
                "differences": differences,
                "verdict": verdict,
            }
        )
    return rows


def _parting(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first place at which two texts differ; None if they are one."""
    for place, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return place
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def gap_of(
    target: Target, ids: list[int], plain: int | None, drafted: int | None
) -> dict[str, Any]:
    """The target's logits of the two tokens after a text, and whether rounding can have exchanged
    them.

    Rounding is measured there: the largest difference of any logit between one pass over the full
    text and a cached pass over its last token, and never below the spacing of numbers as large as
    the largest logit. The two tokens may each be off by as much. Passes that differ by far more
    than that spacing do not compute the same thing, which is no rounding.
    """
    tokens = {"plain": plain, "drafted": drafted}
    texts = {f"{name}_text": _text(target, token) for name, token in tokens.items()}
    if plain is None or drafted is None:
        return tokens | texts | {"gap": None, "rounding": None, "near_tie": False}
    full = last_logits(target, [ids])[0]
    stepped = full
    if len(ids) > 1:
        device = target.device
        cache = target.new_cache(1, len(ids))
        target.step(torch.tensor([ids[:-1]], device=device), cache)
        cache.commit(torch.tensor([len(ids) - 1], device=device))
        last = target.step(torch.tensor([ids[-1:]], device=device), cache)
        stepped = target.head(last.hidden)[0, -1].double()
    spacing = torch.finfo(target.dtype).eps * float(full.abs().max())
    rounding = min(max(float((full - stepped).abs().max()), spacing), _MOST * spacing)
    gap = float(full[plain] - full[drafted])
    return tokens | texts | {"gap": gap, "rounding": rounding, "near_tie": abs(gap) <= 2 * rounding}


def _text(target: Target, token: int | None) -> str | None:
    return None if token is None or target.tokenizer is None else target.tokenizer.decode([token])
