"""Acceptance and speed by really decoding. One definition each, used in the training loop, by
`evaluate` and in packages.

tau: tokens emitted per target pass, bonus included; the prefill and its own first token are not
counted. speedup: seconds per token of plain decoding over seconds per token of speculative
decoding; same loop, same prompts, interleaved, prefill included on both sides.
Intervals are 95 % bootstrap intervals over prompts; one prompt has none.
A drafter that remembers texts begins every measurement, and every way of decoding in a race,
without any, and keeps what that one decodes: the next prompts see it, as a server's would; in
batches, those of later batches. So tau depends there on the order of the prompts, and a prompt that
stands among them again is helped by its own answer. Rows say so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from drafttrain.decoding.loop import Output, decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.remembered import tokens_remembered, without_memory
from drafttrain.flow import Tally
from drafttrain.nn.sampling import Policy
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree

RESAMPLES = 1000
Prompts = Sequence[Sequence[int]]
Interval = tuple[float, float]
Watch = Callable[[Sequence[int], str], Iterable[int]]
"""(items, what is done) -> the items, shown to a person as they are worked through."""


def unwatched(items: Sequence[int], _what: str) -> Iterable[int]:
    """The items, shown to nobody."""
    return items


@dataclass(frozen=True)
class Measurement:
    """What decoding some prompts showed."""

    plan: Plan
    tallies: list[Tally]
    """One per prompt, without seconds."""
    tally: Tally
    """All prompts together, with seconds by stage."""
    tokens: list[int]
    """Tokens written per prompt, the prefill's first included."""
    seconds: list[float] = field(default_factory=list)
    """Wall seconds per prompt; empty where batches were decoded for acceptance alone."""
    plain_seconds: list[float] = field(default_factory=list)
    plain_tokens: list[int] = field(default_factory=list)
    guarantee: str = ""
    """As people shall read it; the plan's own where nothing is given."""
    same_as_plain: int | None = None
    """Prompts whose ids equal plain decoding's; None where that was not looked at."""
    rates: list[list[float | None]] | None = None
    """By depth and rank, how often a child was the accepted one, given that its parent was: what
    Sequoia's search reads. None where the tree has no fixed shape, or where that was not looked
    at."""
    remember: int = 0
    """Tokens of the texts decoded before in this measurement that the drafter could copy from."""
    repeated: int = 0
    """Prompts that had been decoded before in this measurement, where the drafter remembers
    texts."""
    outputs: list[Output] = field(default_factory=list)
    """What was written, one per prompt."""
    plain_stages: dict[str, float] = field(default_factory=dict)
    """Wall seconds of plain decoding by stage, as far as it was timed beside this."""

    @property
    def tau_interval(self) -> Interval | None:
        """95 % interval of tau over resampled prompts; None for one prompt."""
        return _bootstrap([t.emitted for t in self.tallies], [t.rounds for t in self.tallies])

    @property
    def accept_at_interval(self) -> list[Interval | None]:
        """Of accept@k, k = 1..; None where no prompt, or one alone, was offered a k-th draft."""
        return [
            _bootstrap(
                *([_at(getattr(t, name), k) for t in self.tallies] for name in ("kept", "offered"))
            )
            for k in range(len(self.tally.offered))
        ]

    @property
    def node_counts(self) -> list[dict[str, Any]] | None:
        """For each node of the tree its `parent` (-1 is the anchor), and in how many rounds it was
        accepted (`kept`) of those in which its parent was (`offered`), counted as in `rank_rates`.

        None for a tree without a fixed shape, and where no text was kept.
        """
        tree = self.plan.tree
        if not isinstance(tree, Tree) or not tree.size or not self.outputs:
            return None
        kept, offered = _by_node(tree, self.outputs)
        return [
            {"parent": parent, "kept": hit, "offered": of}
            for parent, hit, of in zip(tree.parents, kept, offered, strict=True)
        ]

    @property
    def speedup(self) -> float | None:
        """Plain decoding's seconds per token over these; None where none were measured."""
        if not sum(self.plain_tokens) or not sum(self.tokens) or not self.plain_seconds:
            return None
        plain = sum(self.plain_seconds) / sum(self.plain_tokens)
        return plain / (sum(self.seconds) / sum(self.tokens))

    @property
    def speedup_interval(self) -> Interval | None:
        """95 % interval over resampled prompts, each with its own plain seconds; None for one
        prompt."""
        if self.speedup is None or len(self.seconds) < 2:
            return None
        columns = np.array(
            [self.plain_seconds, self.plain_tokens, self.seconds, self.tokens], dtype=float
        )
        drawn = columns[:, _resampled(columns.shape[1])].sum(-1)
        return _middle(drawn[0] / drawn[1] / (drawn[2] / drawn[3]))

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens written per second, prefill included; None where no seconds were measured."""
        return sum(self.tokens) / sum(self.seconds) if sum(self.seconds) else None

    @property
    def plain_tokens_per_second(self) -> float | None:
        """The same of plain decoding."""
        return sum(self.plain_tokens) / sum(self.plain_seconds) if sum(self.plain_seconds) else None

    def row(self) -> dict[str, Any]:
        """Plain JSON values, None where nothing was measured."""
        tally, plan = self.tally, self.plan
        return {
            "temperature": plan.policy.temperature,
            "top_k": plan.policy.top_k,
            "top_p": plan.policy.top_p,
            "growth": plan.tree.kind,
            "tree": plan.tree.title,
            "nodes": plan.tree.size,
            "depth": plan.tree.max_depth,
            "rule": plan.rule_name,
            "tau": tally.tau,
            "tau_interval": _listed(self.tau_interval),
            "accepted_per_round": tally.accepted_per_round,
            "accept_at": tally.accept_at,
            "accept_at_interval": [_listed(interval) for interval in self.accept_at_interval],
            "accept_counts": [list(pair) for pair in zip(tally.kept, tally.offered, strict=True)],
            "reach": [kept / tally.rounds if tally.rounds else None for kept in tally.kept],
            "speedup": self.speedup,
            "speedup_interval": _listed(self.speedup_interval),
            "tokens_per_second": self.tokens_per_second,
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "seconds": dict(tally.seconds),
            "tokens": sum(self.tokens),
            "plain_seconds": dict(self.plain_stages) or None,
            "plain_tokens": sum(self.plain_tokens) or None,
            "prompts": len(self.tallies),
            "rounds": tally.rounds,
            "same_as_plain": self.same_as_plain,
            "guarantee": self.guarantee or plan.guarantee,
            "rank_rates": self.rates,
            "remember": self.remember,
            "repeated_prompts": self.repeated,
            "node_counts": self.node_counts,
        }


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
    """Decode prompts in batches and count. Seconds by stage are the batches' own and no base for a
    speed claim."""
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


def _with_memory(found: Measurement, drafter: Drafter | None, prompts: Prompts) -> Measurement:
    tokens = 0 if drafter is None else tokens_remembered(drafter)
    if not tokens:
        return found
    return replace(found, remember=tokens, repeated=len(prompts) - len(set(map(tuple, prompts))))


def tau_behind(best: Measurement, other: Measurement) -> tuple[float | None, Interval | None]:
    """By how much tau is lower than the best's, from the same prompts: resampled together, so that
    what makes a prompt easy for both does not widen the interval."""
    if best.tally.tau is None or other.tally.tau is None:
        return None, None
    columns = [
        [getattr(t, name) for t in one.tallies]
        for one in (best, other)
        for name in ("emitted", "rounds")
    ]
    drawn = np.array(columns, dtype=float)[:, _resampled(len(best.tallies))].sum(-1)
    good = (drawn[1] > 0) & (drawn[3] > 0)
    interval = (
        _middle((drawn[0] / drawn[1].clip(1) - drawn[2] / drawn[3].clip(1))[good])
        if len(best.tallies) > 1
        else None
    )
    return best.tally.tau - other.tally.tau, interval


def behind(best: Measurement, one: Measurement | None) -> dict[str, Any]:
    """How far tau is behind the best of its temperature, in this comparison."""
    gap, interval = (None, None) if one is None or one is best else tau_behind(best, one)
    return {
        "tau_behind_best": gap,
        "tau_behind_best_interval": None if interval is None else list(interval),
    }


def rank_rates(tree: Tree, outputs: Sequence[Output]) -> list[list[float | None]]:
    """By depth and rank, the share of rounds in which that child was the accepted one, of those
    whose parent was.

    An output's last round is left out, since a stop token or the limit may have cut it. None where
    there was no such round. A child that was not drafted, for which a drafter that copies text knew
    none, counts as one that was not accepted.
    """
    widths = [max(tree.ranks[node] for node in level) + 1 for level in tree.levels()]
    taken, offered = ([[0] * width for width in widths] for _ in range(2))
    for node, (hit, of) in enumerate(zip(*_by_node(tree, outputs), strict=True)):
        depth, rank = tree.depths[node] - 1, tree.ranks[node]
        taken[depth][rank] += hit
        offered[depth][rank] += of
    return [
        [hit / of if of else None for hit, of in zip(*row, strict=True)]
        for row in zip(taken, offered, strict=True)
    ]


def _by_node(tree: Tree, outputs: Sequence[Output]) -> tuple[list[int], list[int]]:
    """For each node, the rounds in which it was accepted and those in which its parent was; each
    output's last one left out."""
    kept, offered = ([0] * tree.size for _ in range(2))
    children = {node: tree.children(node) for node in (-1, *range(tree.size))}
    for output in outputs:
        for nodes in output.nodes[:-1]:
            for node in nodes:
                kept[node] += 1
            for parent in (-1, *nodes):
                for child in children[parent]:
                    offered[child] += 1
    return kept, offered


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
    """Decode each prompt alone, plainly and by every entrant in turn, the order rotating from
    prompt to prompt.

    Plain decoding is timed once for each target and sampling policy among the entrants, and shared
    by those entrants.

    Args:
        warmup: prompts decoded beforehand in every way and not counted.
    """
    entrants = [replace(one, plan=one.plan.made_by(one.drafter)) for one in entrants]
    jobs: list[Entrant] = []
    bases: dict[tuple[int, Policy], int] = {}
    for one in entrants:
        ground = (id(one.target), one.plan.policy)
        if ground not in bases:
            bases[ground] = len(jobs)
            jobs.append(Entrant(one.target, None, Plan(Tree.chain(0), one.plan.policy)))
    jobs += entrants
    results: list[list[tuple[Output, float]]] = [[] for _ in jobs]
    total = [Tally() for _ in jobs]

    def run(one: Entrant, number: int, limit: int) -> tuple[Output, Tally, float]:
        start = time.perf_counter()
        outputs, tally = decode(
            one.target,
            one.drafter if one.plan.tree.size else None,
            [prompts[number]],
            one.plan,
            max_new_tokens=limit,
            stop_ids=stop_ids,
            seed=seed,
            row_numbers=[number],
        )
        return outputs[0], tally, time.perf_counter() - start

    for one in _afresh(jobs):
        for number in range(min(warmup, len(prompts))):
            run(one, number, min(max_new_tokens - 1, 8))
    jobs = _afresh(jobs)
    for number in watch(range(len(prompts)), "prompts timed"):
        for shift in range(len(jobs)):
            job = (number + shift) % len(jobs)
            output, tally, seconds = run(jobs[job], number, max_new_tokens)
            results[job].append((output, seconds))
            total[job] += tally
    measurements = []
    for job, one in enumerate(entrants, start=len(bases)):
        plan, plain = one.plan, results[bases[id(one.target), one.plan.policy]]
        outputs = [output for output, _ in results[job]]
        same = (
            sum(a.ids == b.ids for (a, _), b in zip(plain, outputs, strict=True))
            if plan.policy.greedy
            else None
        )
        found = Measurement(
            plan,
            [output.tally for output in outputs],
            total[job],
            [len(output.ids) for output in outputs],
            [seconds for _, seconds in results[job]],
            [seconds for _, seconds in plain],
            [len(output.ids) for output, _ in plain],
            plan.guarantee_on(one.target),
            same,
            outputs=outputs,
            plain_stages=total[bases[id(one.target), one.plan.policy]].seconds,
        )
        measurements.append(_with_memory(found, one.drafter, prompts))
    return measurements


def _afresh(entrants: Sequence[Entrant]) -> list[Entrant]:
    """Each with a memory of its own, where it has one: what another way of decoding wrote is this
    one's text, too."""
    return [replace(one, drafter=one.drafter and without_memory(one.drafter)) for one in entrants]


def _resampled(prompts: int) -> np.ndarray:
    """(resamples prompts) indices, the same at every call."""
    return np.random.default_rng(0).integers(0, prompts, (RESAMPLES, prompts))


def _at(counts: Sequence[int], k: int) -> int:
    return counts[k] if k < len(counts) else 0


def _bootstrap(above: Sequence[float], below: Sequence[float]) -> Interval | None:
    """Interval of sum(above) / sum(below) over resampled prompts."""
    if not sum(below) or len(below) < 2:
        return None
    index = _resampled(len(below))
    denominators = np.asarray(below, dtype=float)[index].sum(1)
    good = denominators > 0
    return _middle(np.asarray(above, dtype=float)[index].sum(1)[good] / denominators[good])


def _middle(values: np.ndarray) -> Interval:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def _listed(interval: Interval | None) -> list[float] | None:
    return None if interval is None else list(interval)
