"""Expected counts of a small table against every draft, every uniform number and every text that
there can be."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from drafttrain.decoding import rules
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.rules.given import masses
from drafttrain.decoding.rules.spectr import kept_of, overlap, smallest_rho
from drafttrain.decoding.simulated import simulate
from drafttrain.decoding.texts import KeptText
from drafttrain.drafter.growing import Growing, anchor_of
from drafttrain.flow import Needs, Sampling
from drafttrain.nn.sampling import Policy
from drafttrain.tree.candidates import Candidates
from drafttrain.tree.topology import Tree
from tests.decoding import exact

P = [
    exact.vector("1/2", "3/10", "1/5"),
    exact.vector("7/10", "1/5", "1/10"),
    exact.vector("1/10", "2/5", "1/2"),
]
Q = [
    exact.vector("1/5", "3/10", "1/2"),
    exact.vector("7/20", "1/4", "2/5"),
    exact.vector("1/5", "1/5", "3/5"),
]
"""The target's and the drafter's distributions, by the last token. Token 1 after 1 is drafted too
often, and a block that holds two of them still has tokens to keep."""
START, STOP, LENGTH = 0, 2, 5
"""The prompt's last token, the one that ends a text, and the most tokens of an answer."""


class TableTarget:
    """A target whose features are its tokens."""

    name, context, vocab_size, device = "table", 1000, 3, torch.device("cpu")

    def head(self, hidden: Tensor) -> Tensor:
        return hidden @ exact.floats(P)[0].log()


class TableDrafter(Growing):
    """A drafter that knows the last token."""

    needs = Needs(last_hidden=True)

    def __init__(self, target: TableTarget) -> None:
        torch.nn.Module.__init__(self)
        object.__setattr__(self, "target", target)

    @property
    def max_depth(self) -> None:
        return None

    def _after(self, tokens: Tensor) -> tuple[Tensor, Candidates]:
        return tokens[..., None].float(), Candidates(exact.floats(Q)[0].log()[tokens], 3)

    def open(self, rows: int, capacity: int) -> list[int]:
        return list(range(rows))

    def select(self, state: list[int], rows: Tensor) -> None:
        state[:] = [state[row] for row in rows.tolist()]

    def loss(self, *_args: object, **_more: object) -> None:
        raise NotImplementedError

    def extend(self, state: object, committed: object, depth: int) -> tuple[Tensor, Candidates]:
        return self._after(anchor_of(committed))  # type: ignore[arg-type]

    def expand(self, state: object, tokens: Tensor, *_: object) -> tuple[Tensor, Candidates]:
        return self._after(tokens)


def after(table: list[exact.Vector], anchor: int) -> exact.Table:
    return lambda prefix: table[(anchor, *prefix)[-1]]


def one_round(plan: Plan, anchor: int) -> dict[exact.Text, float]:
    """{what a round after this anchor writes: chance}, from every draft and uniform number."""
    p, q, tree = after(P, anchor), after(Q, anchor), plan.tree
    assert isinstance(tree, Tree)
    rule, found = rules.named(plan.rule_name), defaultdict(float)
    for case in exact.cases(tree, q, plan.sampling):
        one = replace(case, chance=Fraction(1))
        if plan.rule_name == "k_seq":
            texts = exact.pinned(rule, case, p, k_seq_breaks(case, p), sharp=False)[0]
        elif plan.rule_name == "block":
            texts = in_one_block(case, p)
        elif plan.rule_name == "sample_and_match":  # one number a depth; P's denominator is 10
            sizes = [10 if node <= tree.max_depth else 1 for node in range(tree.size + 1)]
            texts = exact.measure(rule, [one], p, sizes)[0]
        else:
            texts = exact.measure(rule, [one], p)[0]
        for text, chance in texts.items():
            found[text] += float(case.chance) * float(chance)
    return found


def in_one_block(case: exact.Case, p: exact.Table) -> dict[exact.Text, Fraction]:
    """By the recursion of the paper, which is far quicker than a grid."""
    block = exact.in_blocks(case, p)
    return {
        (*case.tokens[:kept], token): chance * share
        for kept, chance in enumerate(block.chances)
        for token, share in enumerate(block.following[kept])
    }


def k_seq_breaks(case: exact.Case, p: exact.Table) -> list[list[float]]:
    """The thresholds of every uniform number: of each node, and of what follows any of them."""
    breaks: list[list[float]] = [[] for _ in range(case.tree.size + 1)]
    for node in range(-1, case.tree.size):
        here = torch.tensor([[float(x) for x in p(case.prefix(node))]], dtype=torch.float64)
        children = case.tree.children(node)
        if children:
            q = torch.tensor([[float(x) for x in case.q[children[0]]]], dtype=torch.float64)
            k = torch.tensor([len(children)])
            rho = smallest_rho(here, q, k)
            beta = overlap(here, q, rho)
            for child in children:
                token = case.tokens[child]
                breaks[child].append(float(here[0, token] / (rho * q[0, token])))
            left = here - torch.minimum(q, here / rho) * (kept_of(beta, k) / beta)
            here = left.clamp(min=0) / left.clamp(min=0).sum()
        breaks[-1] += here.cumsum(1)[0].tolist()
    return breaks


def decoded(plan: Plan) -> dict[str, list[float]]:
    """What decoding counts on average, by every way in which every round may end."""
    rounds_after = [one_round(plan, anchor) for anchor in range(3)]
    depth = plan.tree.max_depth
    found = {"rounds": [0.0], "emitted": [0.0], "offered": [0.0] * depth, "kept": [0.0] * depth}

    def go_on(anchor: int, written: int, weight: float) -> None:
        if anchor == STOP or written == LENGTH:
            return
        room = LENGTH - written
        for text, chance in rounds_after[anchor].items():
            new, accepted, here = text[:room], len(text) - 1, weight * chance
            if STOP in new:
                new = new[: new.index(STOP) + 1]
            kept = min(accepted, len(new), room - 1)
            cut = kept < accepted or (new[-1] == STOP and len(new) == kept)
            found["rounds"][0] += here
            found["emitted"][0] += here * len(new)
            for k in range(min(depth, room - 1)):
                found["kept"][k] += here * (k < kept)
                found["offered"][k] += here * (k < kept or (k == kept and not cut))
            go_on(new[-1], written + len(new), here)

    for first, chance in enumerate(P[START]):
        go_on(first, 1, float(chance))
    return found


@lru_cache
def all_texts() -> tuple[list[KeptText], Tensor]:
    """Every answer that the target can give, and its chance."""
    answers, chances = [], []
    for ids in itertools.product(range(3), repeat=LENGTH):
        end = ids.index(STOP) + 1 if STOP in ids else LENGTH
        if STOP in ids[end:] or any(ids[end:]):
            continue  # one of the products for each answer
        answers.append(list(ids[:end]))
        pairs = itertools.pairwise((START, *ids[:end]))
        chances.append(float(math.prod((P[a][b] for a, b in pairs), start=Fraction(1))))
    eye = torch.eye(3)
    texts = [KeptText([1, START], ids, eye[[1, START, *ids]], {}) for ids in answers]
    return texts, torch.tensor(chances, dtype=torch.float64)


def computed(plan: Plan, seeds: int) -> dict[str, Tensor]:
    """The same from the expected counts of every text, by (seed, place)."""
    texts, chances = all_texts()
    assert float(chances.sum()) == pytest.approx(1)
    target = TableTarget()
    drafter = TableDrafter(target)
    found = []
    for seed in range(seeds):
        one = simulate(target, drafter, texts, plan, max_new_tokens=LENGTH, batch=500, seed=seed)
        assert one.impossible == 0
        found.append(one.texts)
    return {
        name: torch.stack(
            [
                chances @ torch.tensor([_listed(getattr(one, name)) for one in texts]).double()
                for texts in found
            ]
        )
        for name in ("rounds", "emitted", "offered", "kept")
    }


def _listed(value: float | list[float]) -> list[float]:
    return value if isinstance(value, list) else [value]


T, CHAIN, WIDE = Policy(1.0), Tree.chain(3), Tree.expansion([2, 1])
PLANS = {
    "ratio": Plan(CHAIN, T, rule="ratio"),
    "block": Plan(CHAIN, T, rule="block"),
    "multi_step, a chain": Plan(CHAIN, T, rule="multi_step"),
    "k_seq": Plan(Tree.expansion([2]), T, rule="k_seq"),
    "one_hot, a chain": Plan(CHAIN, T, sampled=False),
    "one_hot": Plan(WIDE, T, sampled=False),
    "sample_and_match": Plan(WIDE, T, rule="sample_and_match"),
}


@pytest.mark.parametrize("name", PLANS)
def test_expected_counts_are_those_of_decoding(name: str) -> None:
    wanted, found = decoded(PLANS[name]), computed(PLANS[name], 1)
    for what, values in wanted.items():
        assert found[what][0].tolist() == pytest.approx(values, rel=1e-5), what


DRAWN = {
    "without replacement": Plan(WIDE, T),
    "without replacement, of three": Plan(Tree.expansion([3]), T),
    "drawn and matched": Plan(WIDE, T, sampled=True, rule="sample_and_match"),
}


@pytest.mark.parametrize("name", DRAWN)
def test_expected_counts_are_right_on_average_where_siblings_are_drawn(name: str) -> None:
    wanted, found = decoded(DRAWN[name]), computed(DRAWN[name], 40)
    for what, values in wanted.items():
        error = found[what].std(0) / 40**0.5
        assert bool(((found[what].mean(0) - torch.tensor(values)).abs() <= 4 * error + 1e-6).all())
        assert float((error / torch.tensor(values)).max()) < 0.03


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("how", [Sampling.IID, Sampling.WOR])
def test_what_a_node_keeps_of_each_token(how: Sampling, k: int) -> None:
    """Against every draft and uniform number; with one child, nothing is drawn."""
    numbers = torch.rand(4000, k - 1, generator=torch.Generator().manual_seed(0))
    p, q, u = exact.constant(P[2]), exact.constant(Q[2]), numbers
    wanted = [0.0] * 3
    for case in exact.cases(Tree.expansion([k]), q, how):
        one = replace(case, chance=Fraction(1))
        for text, chance in exact.measure(rules.multi_step, [one], p)[0].items():
            if len(text) == 2:
                wanted[text[0]] += float(case.chance) * float(chance)
    rows = [exact.floats([x])[0].double().expand(4000, -1) for x in (P[2], Q[2])]
    drawn = how is Sampling.WOR and k > 1
    for token in range(3):
        of_token, total = masses(
            "multi_step", *rows, torch.full((4000,), token), k, how, u.double()
        )
        room = 4 * float(of_token.sum(1).std()) / 4000**0.5 if drawn else 0
        assert float(of_token.sum(1).mean()) == pytest.approx(wanted[token], abs=room + 1e-6)
        assert bool((of_token.sum(1) <= rows[0][:, token] + 1e-6).all())
        room = 4 * float(total.std()) / 4000**0.5 if drawn else 0
        assert float(total.mean()) == pytest.approx(sum(wanted), abs=room + 1e-6)
