"""Acceptance rules measured exactly: every draft of a small table, every uniform on a grid, summed
in rational numbers.

The rule under test is called as it is, with float tensors. A uniform only ever meets fixed
thresholds, so a grid of mid-points whose size is a multiple of every threshold's denominator
means the full interval: no mid-point is on a threshold, and the share of points below one equals
it.
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

from drafttrain.flow import Acceptance, Proposal, Sampling
from drafttrain.tree.topology import Tree

Vector = tuple[Fraction, ...]
Sizes = Callable[["Case", "Table"], Sequence[int]]
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


def floats(vectors: Sequence[Vector]) -> Tensor:
    return torch.tensor([[[float(x) for x in vector] for vector in vectors]])


def constant(probs: Vector) -> Table:
    return lambda prefix: probs


def norm(weights: Sequence[Fraction]) -> Vector:
    return tuple(weight / sum(weights) for weight in weights)


def without(q: Vector, tried: Sequence[int]) -> Vector:
    """The next distribution of drawing without replacement, uniform over the rest once the support
    is used up."""
    if not tried:
        return q
    left = [Fraction(0) if token in tried else weight for token, weight in enumerate(q)]
    return norm(left if any(left) else [Fraction(token not in tried) for token in range(len(q))])


def draws(q: Vector, k: int, sampling: Sampling) -> Iterator[tuple[Text, Fraction]]:
    """Every way to draw k children from q, with its probability; under ONE_HOT the k most likely
    ones."""
    if sampling is Sampling.ONE_HOT:
        yield tuple(sorted(range(len(q)), key=lambda token: -q[token])[:k]), Fraction(1)
        return
    for tokens in itertools.product(range(len(q)), repeat=k):
        chance = Fraction(1)
        for j, token in enumerate(tokens):
            chance *= (without(q, tokens[:j]) if sampling is Sampling.WOR else q)[token]
        if chance:
            yield tokens, chance


@dataclass(frozen=True)
class Case:
    """One possible draft."""

    chance: Fraction
    tokens: Text
    q: tuple[Vector, ...]
    """The distribution that each node is said to be drawn from, earlier siblings not yet left
    out."""
    sampling: Sampling
    tree: Tree

    def prefix(self, node: int) -> Text:
        return () if node < 0 else (*self.prefix(self.tree.parents[node]), self.tokens[node])

    @property
    def q_rows(self) -> list[int]:
        """Siblings that name the same distribution share a row: they were drawn together."""
        return [
            next(
                other
                for other in self.tree.children(self.tree.parents[node])
                if self.q[other] == self.q[node]
            )
            for node in range(self.tree.size)
        ]

    def drawn_from(self, child: int) -> Vector:
        """The distribution of one child, given the siblings before it."""
        if self.sampling is Sampling.ONE_HOT:
            return tuple(
                Fraction(self.tokens[child] == token) for token in range(len(self.q[child]))
            )
        if self.sampling is not Sampling.WOR:
            return self.q[child]
        before = [node for node in range(child) if self.q_rows[node] == self.q_rows[child]]
        return without(self.q[child], [self.tokens[node] for node in before])

    def proposal(self, rows: int) -> Proposal:
        n = self.tree.size
        return Proposal(
            torch.tensor([self.tokens]).expand(rows, n),
            torch.tensor([self.tree.parents]).expand(rows, n),
            self.sampling,
            floats(self.q).expand(rows, n, -1),
            torch.tensor([self.q_rows]).expand(rows, n),
        )

    def distributions(self, p: Table) -> Tensor:
        """(1 n+1 v) what the target says after the anchor and after each node."""
        return floats([p(self.prefix(node)) for node in range(-1, self.tree.size)])


def siblings(
    chance: Fraction, tokens: Text, q: Vector | Sequence[Vector], sampling: Sampling
) -> Case:
    """A one-level case; q is one distribution for all children or one for each."""
    distributions = tuple(q) if isinstance(q[0], tuple) else (q,) * len(tokens)
    tree = Tree.expansion([len(tokens)])
    return Case(chance, tokens, distributions, sampling, tree)  # type: ignore[arg-type]


def cases(tree: Tree, q: Table, sampling: Sampling) -> Iterator[Case]:
    """Every draft that fills a tree."""

    def fill(parent: int, done: Case) -> Iterator[Case]:
        if parent == tree.size:
            yield done
            return
        k = len(tree.children(parent))
        here = q(done.prefix(parent))
        for tokens, chance in draws(here, k, sampling) if k else [((), Fraction(1))]:
            more = Case(
                done.chance * chance, done.tokens + tokens, done.q + (here,) * k, sampling, tree
            )
            yield from fill(parent + 1, more)

    yield from fill(-1, Case(Fraction(1), (), (), sampling, tree))


def grid(case: Case, p: Table) -> list[int]:
    """Grid sizes for the uniforms of the nodes and of the next token, by replaying the judgement in
    rationals."""
    sizes = [1] * (case.tree.size + 1)

    def visit(node: int) -> None:
        left = p(case.prefix(node))
        for child in case.tree.children(node):
            token, drawn_from = case.tokens[child], case.drawn_from(child)
            keep = min(Fraction(1), left[token] / drawn_from[token])
            sizes[child] = keep.denominator
            if keep > 0:
                visit(child)
            if keep == 1:
                return
            left = norm([max(Fraction(0), a - b) for a, b in zip(left, drawn_from, strict=True)])
        sizes[-1] = math.lcm(sizes[-1], *edges_of(left))

    visit(-1)
    return sizes


def edges_of(probs: Sequence[Fraction]) -> list[int]:
    """Grid sizes that hold the edges between the tokens of a distribution."""
    return [edge.denominator for edge in itertools.accumulate(probs)]


@dataclass(frozen=True)
class Block:
    """Block verification of one draft, in rationals and straight from the recursion of the
    paper."""

    b: tuple[Fraction, ...]
    h: tuple[Fraction, ...]
    following: tuple[Vector, ...]
    """The distribution of the next token after i kept tokens; any distribution where h is 0."""

    @property
    def chances(self) -> list[Fraction]:
        """Probability of keeping exactly i tokens: the largest i whose trial succeeds."""
        return [
            h * math.prod([1 - later for later in self.h[i + 1 :]], start=Fraction(1))
            for i, h in enumerate(self.h)
        ]


def in_blocks(case: Case, p: Table) -> Block:
    n = case.tree.size
    b, h, following = [Fraction(1)], [], []
    for i in range(n):
        b.append(
            min(
                Fraction(1),
                b[i] * p(case.prefix(i - 1))[case.tokens[i]] / case.q[i][case.tokens[i]],
            )
        )
    for i in range(n):
        here = p(case.prefix(i - 1))
        left = [max(Fraction(0), b[i] * x - y) for x, y in zip(here, case.q[i], strict=True)]
        h.append(sum(left) / (sum(left) + 1 - b[i]) if sum(left) + 1 - b[i] else Fraction(1))
        following.append(norm(left) if any(left) else here)
    return Block(tuple(b), (*h, b[n]), (*following, p(case.prefix(n - 1))))


def block_grid(case: Case, p: Table) -> list[int]:
    """`grid` for block verification."""
    found = in_blocks(case, p)
    ends = [probs for probs, chance in zip(found.following, found.chances, strict=True) if chance]
    return [
        *(h.denominator for h in found.h[1:]),
        math.lcm(*(size for probs in ends for size in edges_of(probs))),
    ]


def pinned(
    rule: Rule,
    case: Case,
    p: Table,
    breaks: Sequence[Sequence[Fraction | float]],
    *,
    sharp: bool = True,
) -> tuple[dict[Text, float], float]:
    """`measure` for one draft of a rule whose thresholds fit no grid: {text: probability}, expected
    accepted tokens.

    Args:
        breaks: for each uniform the thresholds it may meet.
        sharp: try each interval between two of them close to both its ends, so that a threshold off
            by more than 1e-6 changes the outcome; otherwise in its middle, which costs less.
    """
    axes, weights = [], []
    for found in breaks:
        ends = sorted({0.0, 1.0, *(float(one) for one in found if 0 < one < 1)})
        pairs = [(low, high) for low, high in itertools.pairwise(ends) if high - low > 4e-6]
        points = [
            (low + 1e-6, high - 1e-6) if sharp else ((low + high) / 2,) for low, high in pairs
        ]
        axes.append(torch.tensor([x for some in points for x in some], dtype=torch.float64))
        shares = [
            (high - low) / len(some)
            for (low, high), some in zip(pairs, points, strict=True)
            for _ in some
        ]
        weights.append(torch.tensor(shares, dtype=torch.float64))
    u = torch.cartesian_prod(*axes).reshape(-1, len(axes))
    weight = torch.cartesian_prod(*weights).reshape(-1, len(axes)).prod(1)
    kept = rule(case.distributions(p).expand(len(u), -1, -1), case.proposal(len(u)), u)
    assert kept.fallbacks == 0
    found, place = torch.cat((kept.path, kept.next_token[:, None]), 1).unique(
        dim=0, return_inverse=True
    )
    sums = torch.zeros(len(found), dtype=torch.float64).index_add_(0, place, weight)
    probs: dict[Text, float] = defaultdict(float)
    for (*path, following), share in zip(found.tolist(), sums.tolist(), strict=True):
        probs[(*(case.tokens[node] for node in path if node >= 0), following)] += share
    return dict(probs), float((kept.count * weight).sum())


def measure(
    rule: Rule,
    drafts: Iterator[Case] | Sequence[Case],
    p: Table,
    sizes: Sizes | Sequence[int] = grid,
) -> tuple:
    """({emitted text: probability}, expected accepted tokens) of one round.

    Nodes of equal depth and rank share a uniform: only one of them is ever judged, since only one
    parent is accepted. `sizes` gives the grids; the default replays the judgement of the multi-step
    residual, of which a chain is a case.
    """
    probs: dict[Text, Fraction] = defaultdict(Fraction)
    accepted = Fraction(0)
    for case in drafts:
        tree = case.tree
        places = [*zip(tree.depths, tree.ranks, strict=True), (0, 0)]
        shared: dict[tuple[int, int], int] = {}
        for place, size in zip(places, sizes(case, p) if callable(sizes) else sizes, strict=True):
            shared[place] = math.lcm(shared.get(place, 1), size)
        axes = [(torch.arange(size, dtype=torch.float64) + 0.5) / size for size in shared.values()]
        points = torch.cartesian_prod(*axes).reshape(-1, len(axes))
        columns = list(shared)
        u = points[:, [columns.index(place) for place in places]]
        rows = len(u)
        kept = rule(case.distributions(p).expand(rows, -1, -1), case.proposal(rows), u)
        assert kept.fallbacks == 0
        found, times = torch.cat((kept.path, kept.next_token[:, None]), 1).unique(
            dim=0, return_counts=True
        )
        for (*path, following), count in zip(found.tolist(), times.tolist(), strict=True):
            nodes = [node for node in path if node >= 0]
            chance = case.chance * Fraction(count, rows)
            probs[(*(case.tokens[node] for node in nodes), following)] += chance
            accepted += chance * len(nodes)
    return dict(probs), accepted


def continued(probs: dict[Text, Fraction], p: Table, length: int) -> dict[Text, Fraction]:
    """Cut or continue every text, by the target's own distribution, to the given length."""
    out: dict[Text, Fraction] = defaultdict(Fraction)
    for text, chance in probs.items():
        if len(text) >= length:
            out[text[:length]] += chance
        else:
            longer = {
                (*text, token): chance * share for token, share in enumerate(p(text)) if share
            }
            for ended, part in continued(longer, p, length).items():
                out[ended] += part
    return dict(out)


def text_distribution(p: Table, length: int) -> dict[Text, Fraction]:
    """The target's own distribution of texts."""
    return continued({(): Fraction(1)}, p, length)
