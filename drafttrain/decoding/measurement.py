"""What decoding some prompts showed: counts first, ratios and intervals last. One definition of
each.

tau: tokens emitted per target pass, bonus included; the prefill and its own first token are not
counted. It is given in both ways that are in use: `tau` over all rounds, so that a long answer
counts more than a short one, and `tau_prompt_mean`, the mean of the prompts' own taus, in which all
prompts count alike. A prompt without a round, whose answer ended with the prefill's token, is in
neither, and is counted in `prompts_without_rounds`. accept@k is over rounds. speedup: seconds per
token of plain decoding over seconds per token of speculative decoding; same loop, same prompts,
interleaved, prefill included on both sides. Intervals are 95 % bootstrap intervals over the prompts
that have a round; one prompt has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from drafttrain.data.named import NO_CATEGORY
from drafttrain.decoding.intervals import Interval, bootstrap, middle, resampled
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.record import Output
from drafttrain.flow import Tally
from drafttrain.tree.topology import Tree


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
    """Wall seconds per prompt; empty where batches were decoded only for acceptance."""
    plain_seconds: list[float] = field(default_factory=list)
    plain_tokens: list[int] = field(default_factory=list)
    guarantee: str = ""
    """As people read it; the plan's own where nothing is given."""
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
    replayed: bool = False
    """Was it counted on the target's kept answers? Seconds are then no measure of decoding."""
    plain_stages: dict[str, float] = field(default_factory=dict)
    """Wall seconds of plain decoding by stage, where it was timed next to this."""

    @property
    def tau_interval(self) -> Interval | None:
        """95 % interval of tau over resampled prompts; None for one prompt."""
        return bootstrap([t.emitted for t in self.tallies], [t.rounds for t in self.tallies])

    @property
    def accept_at_interval(self) -> list[Interval | None]:
        """Of accept@k, k = 1..; None where no prompt, or only one, was offered a k-th draft."""
        return [
            bootstrap(
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
        drawn = columns[:, resampled(columns.shape[1])].sum(-1)
        return middle(drawn[0] / drawn[1] / (drawn[2] / drawn[3]))

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
            **plan.facts(),
            **taus(self.tallies),
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
            "replayed": self.replayed,
            "same_as_plain": self.same_as_plain,
            "guarantee": self.guarantee or plan.guarantee,
            "rank_rates": self.rates,
            "remember": self.remember,
            "repeated_prompts": self.repeated,
            "node_counts": self.node_counts,
        }


def taus(tallies: Sequence[Tally]) -> dict[str, Any]:
    """How many tokens a target pass gives, over the rounds of some prompts and as the mean of these
    prompts, with what it was counted on: plain JSON values, None where no prompt had a round."""
    total = Tally()
    for one in tallies:
        total += one
    own = [one.tau for one in tallies if one.tau is not None]
    interval = bootstrap([one.emitted for one in tallies], [one.rounds for one in tallies])
    return {
        "prompts": len(tallies),
        "prompts_without_rounds": len(tallies) - len(own),
        "rounds": total.rounds,
        "tau": total.tau,
        "tau_interval": _listed(interval),
        "tau_prompt_mean": fmean(own) if own else None,
        "tau_prompt_mean_interval": _listed(bootstrap(own, [1] * len(own))),
    }


def by_category(found: Measurement | None, categories: Sequence[str]) -> dict[str, Any]:
    """{"by_category": what `taus` gives of every kind of task}; empty where fewer than two kinds
    were measured.

    Args:
        categories: of every prompt; the measured ones are the first of them.
    """
    if found is None or not categories:
        return {}
    kinds: dict[str, list[Tally]] = {}
    for name, tally in zip(categories[: len(found.tallies)], found.tallies, strict=True):
        kinds.setdefault(name, []).append(tally)
    if len(kinds) < 2:
        return {}
    names = sorted(kinds, key=lambda name: (name == NO_CATEGORY, name))
    return {"by_category": [{"category": name, **taus(kinds[name])} for name in names]}


def with_speed(row: dict[str, Any], timed: Measurement) -> dict[str, Any]:
    """A row of acceptance, with the speed that was measured on fewer prompts."""
    found = timed.row()
    taken = (
        *("speedup", "speedup_interval", "tokens_per_second", "plain_tokens_per_second"),
        *("seconds", "tokens", "plain_seconds", "plain_tokens", "same_as_plain", "guarantee"),
    )
    return row | {name: found[name] for name in taken} | {"speed_prompts": found["prompts"]}


Counts = Sequence[tuple[int, int]]
"""Per prompt, (tokens emitted, rounds)."""


def counts_of(found: Measurement) -> list[tuple[int, int]]:
    return [(tally.emitted, tally.rounds) for tally in found.tallies]


def gain(of: Counts, over: Counts) -> tuple[float | None, Interval | None]:
    """By how much tau is higher than in another measurement of the same prompts, with its 95 %
    interval. Prompts are resampled in pairs, so that what makes one easy for both does not widen
    it. None where there was no round; no interval for one prompt."""
    if len(of) != len(over):
        raise ValueError(f"{len(of)} prompts against {len(over)}")
    columns = np.array([*zip(*of, strict=True), *zip(*over, strict=True)], dtype=float)  # 4 prompts
    sums = columns.sum(-1) if len(of) else np.zeros(4)
    if not sums[1] or not sums[3]:
        return None, None
    drawn = columns[:, resampled(len(of))].sum(-1)
    good = (drawn[1] > 0) & (drawn[3] > 0)
    values = drawn[0] / drawn[1].clip(1) - drawn[2] / drawn[3].clip(1)
    interval = middle(values[good]) if len(of) > 1 else None
    return float(sums[0] / sums[1] - sums[2] / sums[3]), interval


def tau_behind(best: Measurement, other: Measurement) -> tuple[float | None, Interval | None]:
    """By how much tau is lower than the best's, from the same prompts, see `gain`."""
    return gain(counts_of(best), counts_of(other))


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


def _at(counts: Sequence[int], k: int) -> int:
    return counts[k] if k < len(counts) else 0


def _listed(interval: Interval | None) -> list[float] | None:
    return None if interval is None else list(interval)
