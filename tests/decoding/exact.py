"""Acceptance rules measured exactly: every draft of a small table, every uniform on a grid, summed in rational numbers.

The rule under test is called as it stands, with float tensors. A uniform only ever meets fixed thresholds, so a grid of
mid-points whose size is a multiple of every threshold's denominator stands for the whole interval: no mid-point lies on
a threshold, and the share of points below one equals it.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from drafttrain.flow import Acceptance, Law, Proposal
from drafttrain.tree.topology import Tree

Vector = tuple[Fraction, ...]
Table = Callable[[tuple[int, ...]], Vector]
Text = tuple[int, ...]
Rule = Callable[[Tensor, Proposal, Tensor], Acceptance]


def vector(*entries: str) -> Vector:
    found = tuple(Fraction(entry) for entry in entries)
    assert sum(found) == 1
    return found


def markov(first: Vector, *rows: Vector) -> Table:
    """A table keyed by the last token; `first` where there is none."""
    return lambda prefix: rows[prefix[-1]] if prefix else first


def norm(weights: Sequence[Fraction]) -> Vector:
    return tuple(weight / sum(weights) for weight in weights)


def without(q: Vector, tried: Sequence[int]) -> Vector:
    """The next law of drawing without replacement, uniform over the rest once the support is used up."""
    if not tried:
        return q
    left = [Fraction(0) if token in tried else weight for token, weight in enumerate(q)]
    return norm(left if any(left) else [Fraction(token not in tried) for token in range(len(q))])


def draws(q: Vector, k: int, law: Law) -> Iterator[tuple[Text, Fraction]]:
    """Every way to draw k children from q, with its probability; under ONE_HOT the k likeliest."""
    if law is Law.ONE_HOT:
        yield tuple(sorted(range(len(q)), key=lambda token: -q[token])[:k]), Fraction(1)
        return
    for tokens in itertools.product(range(len(q)), repeat=k):
        chance = Fraction(1)
        for j, token in enumerate(tokens):
            chance *= (without(q, tokens[:j]) if law is Law.WOR else q)[token]
        if chance:
            yield tokens, chance


@dataclass(frozen=True)
class Case:
    """One possible draft."""

    chance: Fraction
    tokens: Text
    q: tuple[Vector, ...]
    """The law that each node is said to be drawn from, earlier siblings not yet left out."""
    law: Law
    tree: Tree

    def prefix(self, node: int) -> Text:
        return () if node < 0 else (*self.prefix(self.tree.parents[node]), self.tokens[node])


def siblings(chance: Fraction, tokens: Text, q: Vector | Sequence[Vector], law: Law) -> Case:
    """A one-level case; q is one law for all children or one for each."""
    laws = tuple(q) if isinstance(q[0], tuple) else (q,) * len(tokens)
    return Case(chance, tokens, laws, law, Tree.expansion([len(tokens)]))  # type: ignore[arg-type]


def cases(tree: Tree, q: Table, law: Law) -> Iterator[Case]:
    """Every draft that fills a tree."""

    def fill(parent: int, done: Case) -> Iterator[Case]:
        if parent == tree.size:
            yield done
            return
        k = len(tree.children(parent))
        here = q(done.prefix(parent))
        for tokens, chance in draws(here, k, law) if k else [((), Fraction(1))]:
            more = Case(done.chance * chance, done.tokens + tokens, done.q + (here,) * k, law, tree)
            yield from fill(parent + 1, more)

    yield from fill(-1, Case(Fraction(1), (), (), law, tree))


def grid(case: Case, p: Table) -> list[int]:
    """Grid sizes for the uniforms of the nodes and of the next token, by replaying the judgement in rationals."""
    sizes = [1] * (case.tree.size + 1)

    def visit(node: int) -> None:
        left = p(case.prefix(node))
        tried: list[int] = []
        for child in case.tree.children(node):
            token = case.tokens[child]
            if case.law is Law.ONE_HOT:
                drawn_from = tuple(Fraction(token == other) for other in range(len(left)))
            else:
                drawn_from = without(case.q[child], tried) if case.law is Law.WOR else case.q[child]
            keep = min(Fraction(1), left[token] / drawn_from[token])
            sizes[child] = keep.denominator
            if keep > 0:
                visit(child)
            if keep == 1:
                return
            left = norm([max(Fraction(0), a - b) for a, b in zip(left, drawn_from, strict=True)])
            tried.append(token)
        sizes[-1] = math.lcm(sizes[-1], *(edge.denominator for edge in itertools.accumulate(left)))

    visit(-1)
    return sizes


def measure(rule: Rule, drafts: Iterator[Case] | Sequence[Case], p: Table, sizes: Sequence[int] | None = None) -> tuple:
    """({emitted text: probability}, expected accepted tokens) of one round.

    Nodes of equal depth and rank share a uniform: only one of them is ever judged, since only one parent is accepted.
    `sizes` replaces the grids found by replaying, for rules with other thresholds.
    """
    law: dict[Text, Fraction] = defaultdict(Fraction)
    accepted = Fraction(0)
    for case in drafts:
        tree, n = case.tree, case.tree.size
        places = [*zip(tree.depths, tree.ranks, strict=True), (0, 0)]
        shared: dict[tuple[int, int], int] = {}
        for place, size in zip(places, sizes or grid(case, p), strict=True):
            shared[place] = math.lcm(shared.get(place, 1), size)
        axes = [(torch.arange(size, dtype=torch.float64) + 0.5) / size for size in shared.values()]
        points = torch.cartesian_prod(*axes).reshape(-1, len(axes))
        columns = list(shared)
        u = points[:, [columns.index(place) for place in places]]
        rows = len(u)
        laws = torch.tensor([[float(x) for x in p(case.prefix(node))] for node in range(-1, n)])
        proposal = Proposal(
            torch.tensor([case.tokens]).expand(rows, n),
            torch.tensor([tree.parents]).expand(rows, n),
            case.law,
            torch.tensor([[float(x) for x in q] for q in case.q]).expand(rows, n, -1),
            torch.arange(n).expand(rows, n),
        )
        kept = rule(laws.expand(rows, n + 1, -1), proposal, u)
        assert kept.fallbacks == 0
        found, times = torch.cat((kept.path, kept.next_token[:, None]), 1).unique(dim=0, return_counts=True)
        for (*path, following), count in zip(found.tolist(), times.tolist(), strict=True):
            nodes = [node for node in path if node >= 0]
            chance = case.chance * Fraction(count, rows)
            law[(*(case.tokens[node] for node in nodes), following)] += chance
            accepted += chance * len(nodes)
    return dict(law), accepted


def continued(law: dict[Text, Fraction], p: Table, length: int) -> dict[Text, Fraction]:
    """Cut or continue every text, by the target's own law, to the given length."""
    out: dict[Text, Fraction] = defaultdict(Fraction)
    for text, chance in law.items():
        if len(text) >= length:
            out[text[:length]] += chance
        else:
            longer = {(*text, token): chance * share for token, share in enumerate(p(text)) if share}
            for whole, part in continued(longer, p, length).items():
                out[whole] += part
    return dict(out)


def text_law(p: Table, length: int) -> dict[Text, Fraction]:
    """The target's own law of texts."""
    return continued({(): Fraction(1)}, p, length)
