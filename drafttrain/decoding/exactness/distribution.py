"""The law of sampled text: sequences drawn by the decoding loop, counted in cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drafttrain.decoding.exactness.cells import TOKENS, Cells
from drafttrain.decoding.exactness.chi_square import fit_of
from drafttrain.decoding.loop import decode
from drafttrain.decoding.measure import Prompts, Watch, unwatched
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.speculator import Speculator
from drafttrain.drafter.remembered import without_memory
from drafttrain.flow import Needs, PartialPass
from drafttrain.nn.cache import KVCache
from drafttrain.nn.sampling import Policy
from drafttrain.target.model import Pass, Target
from drafttrain.tree.topology import Tree

CONTROL = "control: every draft kept"
_LOOKED_AT = 24
"""Greedy tokens behind a prompt among which a place to draw at is chosen."""
_LOGITS = 1 << 24
"""Logits of a pass while drawing: bounds the rows side by side."""


class SharedPrompt(Target):
    """A target that reads a prompt given to every row of a batch once. What follows is read row by
    row."""

    def __init__(self, target: Target) -> None:
        self.__dict__.update(vars(target))

    def step(
        self,
        ids: Tensor,
        cache: KVCache,
        *,
        tree_mask: Tensor | None = None,
        depths: Tensor | None = None,
        layers: tuple[int, ...] = (),
        partial_pass: PartialPass | None = None,
    ) -> Pass:
        rows, s = ids.shape
        if (
            tree_mask is not None
            or depths is not None
            or cache.longest
            or not bool((ids == ids[:1]).all())
        ):
            return super().step(
                ids,
                cache,
                tree_mask=tree_mask,
                depths=depths,
                layers=layers,
                partial_pass=partial_pass,
            )
        one = self.new_cache(1, s)
        out = super().step(ids[:1], one, layers=layers)
        for layer, (keys, values) in enumerate(zip(one.keys, one.values, strict=True)):
            cache.update(keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1), layer)
        wide = {layer: value.expand(rows, -1, -1) for layer, value in out.layers.items()}
        return Pass(out.hidden.expand(rows, -1, -1), wide)


def same_distribution(
    speculator: Speculator,
    prompts: Prompts,
    plans: Mapping[str, Plan],
    *,
    draws: int,
    seed: int = 0,
    watch: Watch = unwatched,
) -> list[dict[str, Any]]:
    """A row for each plan, all of one sampling policy, and one for the control; `judged` adds what
    needs all rows."""
    (policy,) = {plan.policy for plan in plans.values()}
    target = SharedPrompt(speculator.target)
    each = draws // len(prompts)
    places = []
    for prompt in prompts:
        where = undecided_place(target, prompt, policy)
        if where is not None:
            cells = Cells.of(target, where, policy, each)
            if len(cells.probs) > 1:
                places.append((where, cells))
    drafter = speculator.drafter
    wrong = Plan(
        Tree.chain(min(2, drafter.max_depth or 2)),
        policy,
        sampled=drafter.can_draw,
        rule="typical:0:0",
    )
    control = f"T={policy.temperature:g} {CONTROL}"
    rows = []
    for name, plan in {**plans, control: wrong}.items():
        counts = [torch.zeros_like(cells.probs) for _, cells in places]
        outside = 0
        side = max(1, min(256, _LOGITS // ((plan.tree.size + 1) * target.vocab_size)))
        jobs = [(place, start) for place in range(len(places)) for start in range(0, each, side)]
        own = without_memory(drafter)
        for job in watch(range(len(jobs)), f"exactness: {name}"):
            place, start = jobs[job]
            where, cells = places[place]
            numbers = range(place * each + start, place * each + min(start + side, each))
            outputs, _ = decode(
                target,
                own,
                [where] * len(numbers),
                plan,
                max_new_tokens=TOKENS,
                stop_ids=(),
                seed=seed,
                row_numbers=numbers,
            )
            for output in outputs:
                cell, never = cells.place(output.ids)
                counts[place][cell] += 1
                outside += never
        rows.append(
            {
                "label": name,
                "temperature": policy.temperature,
                "rule": plan.rule_name,
                "guarantee": plan.guarantee,
                "control": name == control,
                "outside": outside,
                **fit_of(counts, [cells.probs for _, cells in places]),
            }
        )
    return rows


def undecided_place(target: Target, prompt: Sequence[int], policy: Policy) -> list[int] | None:
    """The prompt with the part of its greedy answer behind which the target is sure of one token
    and least of the next.

    The first token of an answer is drawn before any draft: if it were open, the draws would scatter
    before a rule has had a say. None where the context has no room.
    """
    room = target.context - len(prompt) - TOKENS
    if room < 1:
        return None
    outputs, _ = decode(
        target, None, [prompt], Plan(Tree.chain(0)), max_new_tokens=min(_LOOKED_AT, room)
    )
    answer = outputs[0].ids
    if len(answer) > 1 and answer[-1] in target.stop_ids:
        answer = answer[:-1]  # Behind its end nobody decodes.
    ids = torch.tensor([[*prompt, *answer]])
    hidden = target.features(ids, torch.tensor([ids.shape[1]]), Needs(last_hidden=True)).last_hidden
    assert hidden is not None
    laws = policy.probs(target.head(hidden[0, len(prompt) - 1 :])).double().cpu()  # answer+1 v
    sure = laws[:-1].gather(1, torch.tensor(answer)[:, None])[:, 0]
    open_ = 1 - laws[1:].square().sum(1)
    best = int((sure * open_).argmax())
    return [*prompt, *answer[:best]]
