"""Acceptance and speed by really decoding; for the training loop, `evaluate` and packages.

A drafter that remembers texts starts every measurement, and every way of decoding in a race,
without any, and keeps what that one decodes: the next prompts see it, as a server's would; in
batches, those of later batches. So tau depends there on the order of the prompts, and a prompt that
occurs twice is helped by its own answer. Rows say so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from drafttrain.decoding.loop import decode
from drafttrain.decoding.measurement import Measurement, behind, rank_rates, tau_behind
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.record import Output
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.remembered import tokens_remembered, without_memory
from drafttrain.flow import Tally
from drafttrain.nn.sampling import Policy
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree

__all__ = [
    "Entrant",
    "Measurement",
    "Prompts",
    "Watch",
    "behind",
    "measure_acceptance",
    "measure_speed",
    "race",
    "rank_rates",
    "tau_behind",
    "unwatched",
]

Prompts = Sequence[Sequence[int]]
Watch = Callable[[Sequence[int], str], Iterable[int]]
"""(items, what is done) -> the items, shown to a person as they are worked through."""


def unwatched(items: Sequence[int], _what: str) -> Iterable[int]:
    """The items, shown to nobody."""
    return items


def measure_acceptance(
    target: Target,
    drafter: Drafter | None,
    prompts: Prompts,
    plan: Plan,
    *,
    max_new_tokens: int,
    batch: int = 8,
    seed: int = 0,
    stop_ids: Sequence[int] | None = None,
    watch: Watch = unwatched,
) -> Measurement:
    """Decode prompts in batches and count.

    Seconds by stage are those of the batches: no base for a claim of speed.
    """
    total, outputs, plan = Tally(), list[Output](), plan.made_by(drafter)
    drafter = drafter and without_memory(drafter)
    for start in watch(range(0, len(prompts), batch), "batches decoded"):
        part = prompts[start : start + batch]
        some, tally = decode(
            target,
            drafter,
            part,
            plan,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            seed=seed,
            row_numbers=range(start, start + len(part)),
        )
        outputs += some
        total += tally
    rates = (
        rank_rates(plan.tree, outputs) if isinstance(plan.tree, Tree) and plan.tree.size else None
    )
    tallies, tokens = [o.tally for o in outputs], [len(o.ids) for o in outputs]
    found = Measurement(
        plan,
        tallies,
        total,
        tokens,
        guarantee=plan.guarantee_on(target),
        rates=rates,
        outputs=outputs,
    )
    return _with_memory(found, drafter, prompts)


def measure_speed(
    target: Target,
    drafter: Drafter,
    prompts: Prompts,
    plans: Sequence[Plan],
    *,
    max_new_tokens: int,
    seed: int = 0,
    stop_ids: Sequence[int] | None = None,
    warmup: int = 1,
    watch: Watch = unwatched,
) -> list[Measurement]:
    """`race` between plans of one drafter."""
    return race(
        [Entrant(target, drafter, plan) for plan in plans],
        prompts,
        max_new_tokens=max_new_tokens,
        seed=seed,
        stop_ids=stop_ids,
        warmup=warmup,
        watch=watch,
    )


@dataclass(frozen=True)
class Entrant:
    """One way of decoding that takes part in a race."""

    target: Target
    drafter: Drafter | None
    """None where the plan drafts nothing."""
    plan: Plan

    @property
    def base(self) -> tuple[int, Policy]:
        """What its plain decoding depends on."""
        return id(self.target), self.plan.policy

    def plainly(self) -> Entrant:
        """The same target and policy without drafts."""
        return Entrant(self.target, None, Plan(Tree.chain(0), self.plan.policy))

    def without_memory(self) -> Entrant:
        """With a memory of its own, where it has one: what another way of decoding wrote would be
        this one's text, too."""
        return replace(self, drafter=self.drafter and without_memory(self.drafter))


@dataclass
class _Timed:
    """What one way of decoding did, prompt by prompt."""

    outputs: list[Output] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    total: Tally = field(default_factory=Tally)

    @property
    def tokens(self) -> list[int]:
        return [len(output.ids) for output in self.outputs]


def race(
    entrants: Sequence[Entrant],
    prompts: Prompts,
    *,
    max_new_tokens: int,
    seed: int = 0,
    stop_ids: Sequence[int] | None = None,
    warmup: int = 1,
    watch: Watch = unwatched,
) -> list[Measurement]:
    """Decode each prompt by itself, plainly and by every entrant in turn, the order rotating from
    prompt to prompt.

    Plain decoding is timed once for each target and sampling policy among the entrants, and shared
    by those entrants.

    Args:
        warmup: prompts decoded beforehand in every way and not counted.
    """
    entrants = [replace(one, plan=one.plan.made_by(one.drafter)) for one in entrants]
    bases: dict[tuple[int, Policy], Entrant] = {}
    for one in entrants:
        bases.setdefault(one.base, one.plainly())
    jobs = [*bases.values(), *entrants]
    settings = {"stop_ids": stop_ids, "seed": seed}
    for one in [job.without_memory() for job in jobs]:
        for number in range(min(warmup, len(prompts))):
            _run(one, prompts, number, _Timed(), min(max_new_tokens - 1, 8), **settings)
    jobs = [job.without_memory() for job in jobs]
    results = [_Timed() for _ in jobs]
    for number in watch(range(len(prompts)), "prompts timed"):
        for shift in range(len(jobs)):
            job = (number + shift) % len(jobs)
            _run(jobs[job], prompts, number, results[job], max_new_tokens, **settings)
    plain = dict(zip(bases, results, strict=False))
    return [
        _measurement(one, result, plain[one.base], prompts)
        for one, result in zip(entrants, results[len(bases) :], strict=True)
    ]


def _run(
    one: Entrant, prompts: Prompts, number: int, into: _Timed, limit: int, **settings: Any
) -> None:
    """Decode one prompt, and note what came of it."""
    start = time.perf_counter()
    outputs, tally = decode(
        one.target,
        one.drafter if one.plan.tree.size else None,
        [prompts[number]],
        one.plan,
        max_new_tokens=limit,
        row_numbers=[number],
        **settings,
    )
    into.seconds.append(time.perf_counter() - start)
    into.outputs.append(outputs[0])
    into.total += tally


def _measurement(one: Entrant, found: _Timed, plain: _Timed, prompts: Prompts) -> Measurement:
    """What an entrant did, next to plain decoding of the same prompts."""
    same = None
    if one.plan.policy.greedy:
        pairs = zip(plain.outputs, found.outputs, strict=True)
        same = sum(a.ids == b.ids for a, b in pairs)
    return _with_memory(
        Measurement(
            one.plan,
            [output.tally for output in found.outputs],
            found.total,
            found.tokens,
            found.seconds,
            plain.seconds,
            plain.tokens,
            one.plan.guarantee_on(
                one.target, differed=same is not None and same < len(found.outputs)
            ),
            same,
            outputs=found.outputs,
            plain_stages=plain.total.seconds,
        ),
        one.drafter,
        prompts,
    )


def _with_memory(found: Measurement, drafter: Drafter | None, prompts: Prompts) -> Measurement:
    """With what the drafter remembered of the texts that were decoded."""
    tokens = 0 if drafter is None else tokens_remembered(drafter)
    if not tokens:
        return found
    return replace(found, remember=tokens, repeated=len(prompts) - len(set(map(tuple, prompts))))
