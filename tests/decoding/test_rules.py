"""Acceptance rules keep the target's law, exactly on small tables and by chi-square over rounds; mistakes show."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from scipy import stats
from torch import Tensor

from drafttrain.decoding.rules import GUARANTEES, RULES, greedy, multi_step, one_hot, ratio, rule_for
from drafttrain.errors import InputError
from drafttrain.flow import Acceptance, Law, Proposal
from drafttrain.nn.sampling import draw, draw_without_replacement
from drafttrain.tree.topology import Tree
from tests.decoding.exact import (
    Case,
    Table,
    Vector,
    cases,
    continued,
    draws,
    markov,
    measure,
    siblings,
    text_law,
    vector,
)

F = Fraction
P = vector(".2", ".3", ".4", ".1")
Q = vector(".5", ".2", ".2", ".1")
OTHER = vector(".1", ".1", ".5", ".3")
TOY_1 = (
    markov(vector(".5", ".3", ".2"), vector(".6", ".3", ".1"), vector(".2", ".5", ".3"), vector(".1", ".1", ".8")),
    markov(vector(".3", ".5", ".2"), vector(".4", ".4", ".2"), vector(".4", ".3", ".3"), vector(".3", ".3", ".4")),
)
TOY_2 = (
    markov(vector(".5", ".3", ".2"), vector(".6", ".3", ".1"), vector(".1", ".4", ".5"), vector(".1", ".1", ".8")),
    markov(vector(".3", ".5", ".2"), vector(".4", ".4", ".2"), vector(".7", ".1", ".2"), vector(".3", ".3", ".4")),
)


def constant(law: Vector) -> Table:
    return lambda prefix: law


def first_token(law: dict[tuple[int, ...], Fraction], v: int = 4) -> Vector:
    return tuple(sum((chance for text, chance in law.items() if text[0] == token), F(0)) for token in range(v))


# --- exact laws of chains (Leviathan et al. 2023) ---


@pytest.mark.parametrize("rule", [ratio, multi_step])
@pytest.mark.parametrize(
    ("p", "q", "residual"),
    [
        (P, Q, (F(0), F(1, 10), F(1, 5), F(0))),
        (vector(".4", ".35", ".25"), vector(".7", ".2", ".1"), (F(0), F(3, 20), F(3, 20))),
    ],
)
def test_one_step_accepts_the_overlap_and_adds_the_residual(rule, p: Vector, q: Vector, residual: Vector) -> None:
    law, accepted = measure(rule, cases(Tree.chain(1), constant(q), Law.IID), constant(p))
    assert accepted == F(7, 10) == sum(map(min, p, q))
    assert first_token(law, len(p)) == p
    kept = tuple(sum((c for t, c in law.items() if t[0] == x and len(t) == 2), F(0)) for x in range(len(p)))
    assert kept == tuple(map(min, p, q))
    assert tuple(law.get((x,), F(0)) for x in range(len(p))) == residual


@pytest.mark.parametrize("rule", [ratio, multi_step])
def test_chain_without_context_emits_the_geometric_sum(rule) -> None:
    p, q = constant(vector(".4", ".35", ".25")), constant(vector(".7", ".2", ".1"))
    law, accepted = measure(rule, cases(Tree.chain(3), q, Law.IID), p)
    assert accepted + 1 == F(2533, 1000) == (1 - F(7, 10) ** 4) / (1 - F(7, 10))
    assert continued(law, p, 4) == text_law(p, 4)


@pytest.mark.parametrize("rule", [ratio, multi_step])
def test_chain_with_context_is_exact(rule) -> None:
    p, q = TOY_1
    law, accepted = measure(rule, cases(Tree.chain(2), q, Law.IID), p)
    assert accepted == F(7, 5)
    assert continued(law, p, 3) == text_law(p, 3)


# --- exact laws of trees (Miao et al. 2023; Chen et al. 2024) ---


def iid(k: int) -> list[Case]:
    return [siblings(chance, tokens, Q, Law.IID) for tokens, chance in draws(Q, k, Law.IID)]


def wor(k: int) -> list[Case]:
    return [siblings(chance, tokens, Q, Law.WOR) for tokens, chance in draws(Q, k, Law.WOR)]


def two_drafters(order: Callable[[list[tuple[int, Vector]]], list[tuple[int, Vector]]]) -> list[Case]:
    found = []
    for x, y in itertools.product(range(4), repeat=2):
        judged = order([(x, Q), (y, OTHER)])
        tokens, laws = zip(*judged, strict=True)
        found.append(siblings(Q[x] * OTHER[y], tokens, laws, Law.IID))
    return found


def relabelled(found: list[Case], law: Law, tokens: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple) -> list[Case]:
    """The same drafts under another law, in another order, or fewer of them."""
    return [siblings(case.chance, tokens(case.tokens), Q, law) for case in found]


def distinct(tokens: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(tokens))


def by_confidence(tokens: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(tokens, key=lambda token: (-Q[token], token)))


RIGHT = {
    "independent, repeats kept": (multi_step, iid(2), F(41, 50)),
    "without replacement": (multi_step, wor(2), F(23, 25)),
    "top-2": (one_hot, [siblings(F(1), (0, 1), Q, Law.ONE_HOT)], F(1, 2)),
    "top-2, other order": (one_hot, [siblings(F(1), (1, 0), Q, Law.ONE_HOT)], F(1, 2)),
    "top-2 with a repeat": (one_hot, [siblings(F(1), (0, 0, 1), Q, Law.ONE_HOT)], F(1, 2)),
    "two drafters": (multi_step, two_drafters(list), F(22, 25)),
    "two drafters, other order": (multi_step, two_drafters(lambda found: found[::-1]), F(43, 50)),
    "independent, repeats dropped, judged as without replacement": (
        multi_step,
        relabelled(iid(2), Law.WOR, distinct),
        F(81, 100),
    ),
    "three without replacement, the first kept": (multi_step, relabelled(wor(3), Law.WOR, lambda t: t[:1]), F(7, 10)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_one_node_is_exact(name: str) -> None:
    rule, drafts, expected = RIGHT[name]
    law, accepted = measure(rule, drafts, constant(P))
    assert accepted == expected
    assert first_token(law) == P


def test_two_drafters_in_an_order_drawn_uniformly_are_exact() -> None:
    half = [measure(multi_step, two_drafters(order), constant(P)) for order in (list, lambda found: found[::-1])]
    assert sum(accepted for _, accepted in half) / 2 == F(87, 100)


@pytest.mark.parametrize("law", [Law.IID, Law.WOR, Law.ONE_HOT])
def test_acceptance_by_number_of_children(law: Law) -> None:
    expected = {
        Law.IID: [0.7, 0.82, 0.892, 0.9176],
        Law.WOR: [0.7, 0.92, 0.9633, 1.0],
        Law.ONE_HOT: [0.2, 0.5, 0.9, 1.0],
    }
    rule = one_hot if law is Law.ONE_HOT else multi_step
    for k, share in enumerate(expected[law], start=1):
        # Ties of q are broken by id, in the reference as in a stable top-k.
        found, accepted = measure(rule, cases(Tree.expansion([k]), constant(Q), law), constant(P))
        assert round(float(accepted), 4) == share
        assert first_token(found) == P


@pytest.mark.parametrize(("k", "expected"), [(2, F(3, 10)), (3, F(19, 20)), (4, F(1))])
def test_draws_beyond_the_support_go_on_uniformly(k: int, expected: Fraction) -> None:
    p, q = vector(".1", ".2", ".3", ".4"), vector(".6", ".4", "0", "0")
    law, accepted = measure(multi_step, cases(Tree.expansion([k]), constant(q), Law.WOR), constant(p))
    assert accepted == expected
    assert first_token(law) == p


@pytest.mark.parametrize(
    ("law", "rule", "expected"),
    [
        (Law.IID, multi_step, F(3757, 2500)),
        (Law.WOR, multi_step, F(2437, 1400)),
        (Law.ONE_HOT, one_hot, F(143, 100)),
    ],
)
def test_two_levels_with_context_are_exact(law: Law, rule, expected: Fraction) -> None:
    p, q = TOY_2
    found, accepted = measure(rule, cases(Tree.expansion([2, 2]), q, law), p)
    assert accepted == expected
    assert continued(found, p, 3) == text_law(p, 3)


# --- mistakes, exactly ---


def resampled_from_p(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """A mistake: after a refusal the token is drawn from p, not from the residual."""
    kept = ratio(p, proposal, u)
    rows = torch.arange(len(u))
    return Acceptance(kept.path, kept.count, draw(p[rows, kept.count], u[:, -1]))


def sharpened(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """A mistake: the ratio reads a colder q than the one drawn from; the residual reads the right one."""
    cold = proposal.q**2 / (proposal.q**2).sum(-1, keepdim=True)
    kept = ratio(p, Proposal(proposal.tokens, proposal.parents, Law.IID, cold, proposal.q_rows), u)
    rows, n = torch.arange(len(u)), proposal.size
    refused = kept.count < n
    q = proposal.q[rows, proposal.q_rows[rows, kept.count.clamp(max=n - 1)]]
    weights = p[rows, kept.count].double() - torch.where(refused[:, None], q, 0).double()
    return Acceptance(kept.path, kept.count, draw(weights.clamp(min=0), u[:, -1]))


def retried(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """A mistake, on one level: every child is judged by the original p, the last refusal leaves norm(max(0, p - q))."""
    rows = torch.arange(len(u))
    q = proposal.q[rows, proposal.q_rows[:, 0]].double()
    here = p[:, 0].double()
    keep = u[:, :-1] < here.gather(1, proposal.tokens) / q.gather(1, proposal.tokens)
    child = torch.where(keep.any(1), keep.int().argmax(1), -1)
    weights = torch.where(keep.any(1)[:, None], p[rows, child + 1].double(), (here - q).clamp(min=0))
    return Acceptance(child[:, None], (child >= 0).long(), draw(weights, u[:, -1]))


WRONG = {
    "resampled from p": (
        resampled_from_p,
        iid(1),
        (5, 10),
        F(7, 10),
        (F(26, 100), F(29, 100), F(32, 100), F(13, 100)),
    ),
    "sharpened q": (sharpened, iid(1), (125, 30), F(636, 1000), (F(17, 125), F(241, 750), F(166, 375), F(1, 10))),
    "retried against p": (
        retried,
        iid(2),
        (5, 5, 30),
        F(91, 100),
        (F(26, 100), F(29, 100), F(32, 100), F(13, 100)),
    ),
    "repeats dropped, judged as independent": (
        multi_step,
        relabelled(iid(2), Law.IID, distinct),
        None,
        F(41, 50),
        (F(1, 5), F(19, 60), F(23, 60), F(1, 10)),
    ),
    "without replacement, judged as independent": (
        multi_step,
        relabelled(wor(2), Law.IID),
        None,
        F(47, 50),
        (F(1, 5), F(1, 3), F(11, 30), F(1, 10)),
    ),
    "top-2 judged by p/q": (
        multi_step,
        [siblings(F(1), (0, 1), Q, Law.IID)],
        None,
        F(1),
        (F(2, 5), F(3, 5), F(0), F(0)),
    ),
    "sorted by q": (
        multi_step,
        relabelled(wor(2), Law.WOR, by_confidence),
        None,
        F(1049, 1200),
        (F(29, 90), F(223, 720), F(53, 144), F(0)),
    ),
    "shuffled": (
        multi_step,
        [
            siblings(case.chance / 2, order, Q, Law.WOR)
            for case in wor(2)
            for order in itertools.permutations(case.tokens)
        ],
        None,
        F(2249, 2400),
        (F(29, 180), F(457, 1440), F(571, 1440), F(1, 8)),
    ),
    "three drawn, the two most confident kept": (
        multi_step,
        relabelled(wor(3), Law.WOR, lambda tokens: by_confidence(tokens)[:2]),
        None,
        F(1459, 1575),
        (F(241, 630), F(173, 420), F(37, 180), F(0)),
    ),
    "two drafters ordered by their own confidence": (
        multi_step,
        two_drafters(lambda found: sorted(found, key=lambda one: -one[1][one[0]])),
        None,
        F(79, 100),
        (F(1, 5), F(29, 100), F(11, 25), F(7, 100)),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_node_shows_a_mistake(name: str) -> None:
    rule, drafts, sizes, accepted, expected = WRONG[name]
    law, share = measure(rule, drafts, constant(P), sizes)
    assert first_token(law) == expected != P
    assert share == accepted


# --- whole rounds, by chi-square ---

TARGET = torch.tensor([[0.2, 0.3, 0.4, 0.1], [0.5, 0.1, 0.2, 0.2], [0.1, 0.6, 0.1, 0.2], [0.25, 0.25, 0.2, 0.3]])
DRAFT = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.2, 0.4, 0.3, 0.1], [0.3, 0.3, 0.3, 0.1], [0.1, 0.2, 0.3, 0.4]])
ROWS = 100_000
Round = Callable[[Tensor, torch.Generator], tuple[Tensor, Acceptance]]


def uniform(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def grow(tree: Tree, law: Law, last: Tensor, generator: torch.Generator) -> Proposal:
    """Fill a tree from the draft table for rows whose last tokens are `last`."""
    text = torch.cat((last[:, None], last.new_zeros(len(last), tree.size)), 1)
    for node in range(-1, tree.size):
        children = tree.children(node)
        q = DRAFT[text[:, node + 1]]
        if not children:
            continue
        u = uniform(len(last), len(children), generator=generator)
        if law is Law.ONE_HOT:
            drawn = q.argsort(dim=-1, descending=True, stable=True)[:, : len(children)]
        elif law is Law.WOR:
            drawn = draw_without_replacement(q, u)
        else:
            drawn = torch.stack([draw(q, u[:, j]) for j in range(len(children))], 1)
        text[:, [child + 1 for child in children]] = drawn
    parents = torch.tensor(tree.parents).expand(len(last), -1)
    return Proposal(text[:, 1:], parents, law, DRAFT[text], parents + 1)


def judged(rule, proposal: Proposal, last: Tensor, generator: torch.Generator) -> tuple[Tensor, Acceptance]:
    p = TARGET[torch.cat((last[:, None], proposal.tokens), 1)]
    return proposal.tokens, rule(p, proposal, uniform(len(last), proposal.size + 1, generator=generator))


def rounds(rule, tree: Tree, law: Law, change: Callable[[Proposal], Proposal] = lambda proposal: proposal) -> Round:
    return lambda last, generator: judged(rule, change(grow(tree, law, last, generator)), last, generator)


def three_tokens(one_round: Round, seed: int) -> Tensor:
    """(64) how often each text of three tokens was written, starting behind token 0, by as many rounds as it takes."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.zeros(ROWS, 16, dtype=torch.int64)
    length = torch.ones(ROWS, dtype=torch.int64)
    while True:
        rows = (length < 4).nonzero()[:, 0]
        if not len(rows):
            break
        tokens, kept = one_round(text[rows, length[rows] - 1], generator)
        for step in range(kept.path.shape[1]):
            here = kept.count > step
            text[rows[here], length[rows[here]] + step] = tokens[here, kept.path[here, step]]
        text[rows, length[rows] + kept.count] = kept.next_token
        length[rows] += kept.count + 1
    return (text[:, 1:4] * torch.tensor([16, 4, 1])).sum(1).bincount(minlength=64)


def p_value(one_round: Round, seed: int = 0) -> float:
    law = TARGET[0][:, None, None] * TARGET[:, :, None] * TARGET[None]
    expected = law.flatten().double() / law.double().sum() * ROWS
    return float(stats.chisquare(three_tokens(one_round, seed).numpy(), expected.numpy()).pvalue)


FORK, TWO = Tree.expansion([2, 2]), Tree.expansion([2])


@pytest.mark.parametrize(
    "one_round",
    [
        rounds(ratio, Tree.chain(2), Law.IID),
        rounds(multi_step, FORK, Law.IID),
        rounds(multi_step, FORK, Law.WOR),
        rounds(one_hot, FORK, Law.ONE_HOT),
        rounds(multi_step, Tree.from_paths([[0], [1], [2], [0, 0], [0, 0, 0], [1, 0], [1, 1]]), Law.WOR),
    ],
    ids=["chain", "independent", "without replacement", "top-2", "irregular"],
)
def test_rounds_write_the_targets_law(one_round: Round) -> None:
    assert p_value(one_round) > 1e-3


def as_law(law: Law) -> Callable[[Proposal], Proposal]:
    return lambda found: Proposal(found.tokens, found.parents, law, found.q, found.q_rows)


def in_order(key: Callable[[Proposal], Tensor], keep: int = 2) -> Callable[[Proposal], Proposal]:
    """Children of a one-level tree sorted by a falling key, the first few kept."""

    def change(found: Proposal) -> Proposal:
        order = key(found).argsort(dim=-1, descending=True, stable=True)[:, :keep]
        return Proposal(
            found.tokens.gather(1, order), found.parents[:, :keep], found.law, found.q, found.q_rows[:, :keep]
        )

    return change


def confidence(found: Proposal) -> Tensor:
    return found.q[:, 0].gather(1, found.tokens)


def repeats_dropped(last: Tensor, generator: torch.Generator) -> tuple[Tensor, Acceptance]:
    found = grow(TWO, Law.IID, last, generator)
    repeated = found.tokens[:, 0] == found.tokens[:, 1]
    path, following = torch.empty(len(last), 1, dtype=torch.int64), torch.empty(len(last), dtype=torch.int64)
    for rows, n in ((repeated, 1), (~repeated, 2)):
        part = Proposal(found.tokens[rows, :n], found.parents[rows, :n], Law.IID, found.q[rows], found.q_rows[rows, :n])
        kept = judged(multi_step, part, last[rows], generator)[1]
        path[rows], following[rows] = kept.path, kept.next_token
    return found.tokens, Acceptance(path, (path >= 0).sum(1), following)


SHUFFLE = torch.Generator().manual_seed(7)


@pytest.mark.parametrize(
    "one_round",
    [
        rounds(resampled_from_p, Tree.chain(2), Law.IID),
        rounds(sharpened, Tree.chain(2), Law.IID),
        rounds(retried, TWO, Law.IID),
        repeats_dropped,
        rounds(multi_step, FORK, Law.WOR, as_law(Law.IID)),
        rounds(multi_step, FORK, Law.ONE_HOT, as_law(Law.IID)),
        rounds(multi_step, TWO, Law.WOR, in_order(confidence)),
        rounds(multi_step, TWO, Law.WOR, in_order(lambda found: torch.rand(found.tokens.shape, generator=SHUFFLE))),
        rounds(multi_step, Tree.expansion([3]), Law.WOR, in_order(confidence)),
    ],
    ids=[
        "resampled from p",
        "sharpened q",
        "retried against p",
        "repeats dropped",
        "without replacement, judged as independent",
        "top-2 judged by p/q",
        "sorted by q",
        "shuffled",
        "three drawn, the two most confident kept",
    ],
)
def test_rounds_notice_a_mistake(one_round: Round) -> None:
    assert p_value(one_round) < 1e-6


# --- greedy ---


def followed(argmax: list[int], tokens: list[int], parents: list[int]) -> list[int]:
    """The longest path of matching tokens, the first of equals: by trying every node."""
    best: list[int] = []
    for leaf in range(len(tokens)):
        path: list[int] = []
        node = leaf
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        if all(tokens[node] == argmax[parents[node] + 1] for node in path) and len(path) > len(best):
            best = path
    return best


def test_greedy_follows_the_argmaxes() -> None:
    tree = Tree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [1, 0, 0]])
    tokens = torch.tensor([[5, 6, 7, 8, 7, 9]] * 4)
    proposal = Proposal(tokens, torch.tensor([tree.parents] * 4), Law.UNKNOWN)
    argmax = torch.tensor(
        [
            [6, 0, 7, 0, 0, 9, 3],  # anchor, then nodes 0..5
            [5, 8, 0, 0, 2, 0, 0],
            [5, 1, 0, 0, 0, 0, 0],
            [4, 7, 7, 9, 9, 9, 9],
        ]
    )
    kept = greedy(argmax, proposal)
    assert kept.path.tolist() == [[1, 4, 5], [0, 3, -1], [0, -1, -1], [-1, -1, -1]]
    assert kept.count.tolist() == [3, 2, 1, 0]
    assert kept.next_token.tolist() == [3, 2, 1, 4]


def test_greedy_follows_the_repeat_with_the_longer_match() -> None:
    proposal = Proposal(torch.tensor([[5, 5, 1, 2]]), torch.tensor([[-1, -1, 0, 1]]), Law.IID)
    kept = greedy(torch.tensor([[5, 2, 2, 0, 9]]), proposal)
    assert kept.path.tolist() == [[1, 3]]
    assert kept.next_token.tolist() == [9]


def test_greedy_equals_its_brute_force_twin() -> None:
    generator = torch.Generator().manual_seed(1)
    b, n = 300, 9
    parents = random_parents(b, n, generator)
    tokens = torch.randint(2, (b, n), generator=generator)
    argmax = torch.randint(2, (b, n + 1), generator=generator)
    kept = greedy(argmax, Proposal(tokens, parents, Law.UNKNOWN))
    for row in range(b):
        path = followed(argmax[row].tolist(), tokens[row].tolist(), parents[row].tolist())
        assert kept.path[row, : len(path)].tolist() == path
        assert (kept.path[row, len(path) :] == -1).all()
        assert kept.count[row] == len(path)
        assert kept.next_token[row] == argmax[row, path[-1] + 1 if path else 0]


# --- edges ---


def random_parents(b: int, n: int, generator: torch.Generator) -> Tensor:
    limit = torch.arange(n) + 1
    return (torch.rand(b, n, generator=generator) * limit).long() - 1


def random_round(law: Law, b: int = 120, n: int = 8, v: int = 12, seed: int = 0) -> tuple[Tensor, Proposal, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    parents = random_parents(b, n, generator)
    p, q = (torch.randn(b, n + 1, v, generator=generator).mul(1.5).softmax(-1) for _ in range(2))
    q = (q + p) / 2
    order = torch.rand(b, n, v, generator=generator).argsort(-1)[..., 0]
    if law is not Law.IID:  # siblings get different tokens
        order = torch.stack([torch.randperm(v, generator=generator)[:n] for _ in range(b)])
    return p, Proposal(order, parents, law, q, parents + 1), torch.rand(b, n + 1, generator=generator)


def row_of(proposal: Proposal, row: int) -> Proposal:
    only = slice(row, row + 1)
    return Proposal(
        proposal.tokens[only], proposal.parents[only], proposal.law, proposal.q[only], proposal.q_rows[only]
    )


@pytest.mark.parametrize("law", [Law.IID, Law.WOR, Law.ONE_HOT])
def test_rows_do_not_depend_on_each_other(law: Law) -> None:
    p, proposal, u = random_round(law)
    rule = one_hot if law is Law.ONE_HOT else multi_step
    together = rule(p, proposal, u)
    assert together.count.unique().numel() > 2
    for row in range(len(u)):
        alone = rule(p[row : row + 1], row_of(proposal, row), u[row : row + 1])
        count = int(alone.count)
        assert together.count[row] == count
        assert together.next_token[row] == alone.next_token[0]
        assert together.path[row, :count].tolist() == alone.path[0, :count].tolist()
        assert (together.path[row, count:] == -1).all()


def test_ratio_rows_do_not_depend_on_each_other_and_agree_with_multi_step() -> None:
    p, proposal, u = random_round(Law.IID)
    chain = torch.arange(-1, 7).expand(120, 8)
    proposal = Proposal(proposal.tokens, chain, Law.IID, proposal.q, chain + 1)
    together, as_tree = ratio(p, proposal, u), multi_step(p, proposal, u)
    for name in ("path", "count", "next_token"):
        assert torch.equal(getattr(together, name), getattr(as_tree, name))
        alone = [getattr(ratio(p[r : r + 1], row_of(proposal, r), u[r : r + 1]), name) for r in range(120)]
        assert torch.equal(getattr(together, name), torch.cat(alone))


def test_one_hot_is_multi_step_with_point_masses() -> None:
    p, proposal, u = random_round(Law.ONE_HOT)
    points = torch.nn.functional.one_hot(proposal.tokens, p.shape[-1]).float()
    apart = Proposal(proposal.tokens, proposal.parents, Law.IID, points, torch.arange(8).expand(120, 8))
    mine, theirs = one_hot(p, proposal, u), multi_step(p, apart, u)
    for name in ("path", "count", "next_token"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name))


@pytest.mark.parametrize("law", [Law.IID, Law.WOR, Law.ONE_HOT])
def test_uniforms_of_nodes_never_reached_do_not_matter(law: Law) -> None:
    p, proposal, u = random_round(law)
    rule = one_hot if law is Law.ONE_HOT else multi_step
    kept = rule(p, proposal, u)
    reached = (proposal.parents == -1) | (proposal.parents[:, :, None] == kept.path[:, None, :]).any(-1)
    other = u.clone()
    other[:, :-1] = torch.where(reached, u[:, :-1], 1 - u[:, :-1])
    again = rule(p, proposal, other)
    assert not torch.equal(other, u)
    for name in ("path", "count", "next_token"):
        assert torch.equal(getattr(kept, name), getattr(again, name))


@pytest.mark.parametrize(
    ("rule", "law"), [(ratio, Law.IID), (multi_step, Law.IID), (multi_step, Law.WOR), (one_hot, Law.ONE_HOT)]
)
def test_probability_zero_is_refused_at_u_zero(rule, law: Law) -> None:
    p = torch.tensor([[[0.0, 0.4, 0.6], [0.2, 0.3, 0.5]]])
    q = torch.tensor([[[0.5, 0.3, 0.2]]])
    root = torch.tensor([[-1]])
    kept = rule(p, Proposal(torch.tensor([[0]]), root, law, q, root + 1), torch.zeros(1, 2))
    assert kept.count.tolist() == [0]
    assert kept.path.tolist() == [[-1]]
    assert kept.next_token.tolist() == [1]


@pytest.mark.parametrize("rule", [ratio, multi_step])
def test_a_residual_emptied_by_rounding_falls_back_to_p(rule) -> None:
    short = 0.5 - 2.0**-20
    p = torch.tensor([[[0.5, short], [0.5, 0.5]]] * 2)
    q = torch.tensor([[[0.5, 0.5]]] * 2)
    root = torch.tensor([[-1], [-1]])
    u = torch.tensor([[1 - 2.0**-40, 0.75], [0.1, 0.75]], dtype=torch.float64)
    kept = rule(p, Proposal(torch.tensor([[1], [1]]), root, Law.IID, q, root + 1), u)
    assert kept.count.tolist() == [0, 1]
    assert kept.next_token.tolist() == [1, 1]
    assert kept.fallbacks == 1


def test_a_fallback_in_a_tree_drops_the_remaining_siblings() -> None:
    short = 0.5 - 2.0**-20
    p = torch.tensor([[[0.5, short], [0.5, 0.5], [0.5, 0.5]]])
    root = torch.tensor([[-1, -1]])
    u = torch.tensor([[1 - 2.0**-40, 0.0, 0.25]], dtype=torch.float64)
    kept = multi_step(p, Proposal(torch.tensor([[1, 0]]), root, Law.IID, torch.full((1, 1, 2), 0.5), root + 1), u)
    assert (kept.count.tolist(), kept.next_token.tolist(), kept.fallbacks) == ([0], [0], 1)


def test_equal_laws_accept_everything() -> None:
    p, proposal, u = random_round(Law.IID)
    chain = torch.arange(-1, 7).expand(120, 8)
    kept = ratio(p, Proposal(proposal.tokens, chain, Law.IID, p, chain + 1), u)
    assert (kept.count == 8).all()
    assert torch.equal(kept.next_token, draw(p[:, 8], u[:, 8]))


@pytest.mark.parametrize(("rule", "law"), [(ratio, Law.IID), (multi_step, Law.WOR), (one_hot, Law.ONE_HOT)])
def test_an_empty_proposal_draws_from_the_target(rule, law: Law) -> None:
    p = torch.tensor([[[0.25, 0.75]], [[0.5, 0.5]]])
    nothing = torch.empty(2, 0, dtype=torch.int64)
    kept = rule(p, Proposal(nothing, nothing, law), torch.tensor([[0.3], [0.3]]))
    assert kept.path.shape == (2, 0)
    assert (kept.count.tolist(), kept.next_token.tolist()) == ([0, 0], [1, 0])
    assert greedy(p.argmax(-1), Proposal(nothing, nothing, law)).next_token.tolist() == [1, 0]


@pytest.mark.parametrize(("rule", "law"), [(ratio, Law.IID), (multi_step, Law.IID), (multi_step, Law.WOR)])
def test_a_token_that_q_cannot_draw_is_an_error(rule, law: Law) -> None:
    p, q = torch.full((1, 2, 3), 1 / 3), torch.tensor([[[0.0, 0.5, 0.5]]])
    root = torch.tensor([[-1]])
    with pytest.raises(ValueError, match="token 0 was drafted"):
        rule(p, Proposal(torch.tensor([[0]]), root, law, q, root + 1), torch.full((1, 2), 0.5))


def test_a_repeated_sibling_without_replacement_is_an_error() -> None:
    p, q = torch.full((1, 3, 3), 1 / 3), torch.tensor([[[0.8, 0.1, 0.1]]])
    root = torch.tensor([[-1, -1]])
    with pytest.raises(ValueError, match="token 0 was drafted"):
        multi_step(p, Proposal(torch.tensor([[0, 0]]), root, Law.WOR, q, root + 1), torch.full((1, 3), 0.9))


@pytest.mark.parametrize(
    ("rule", "law"),
    [
        (rule, law)
        for rule, fits in ((ratio, {Law.IID}), (multi_step, {Law.IID, Law.WOR}), (one_hot, {Law.ONE_HOT}))
        for law in Law
        if law not in fits
    ],
)
def test_a_rule_refuses_another_law(rule, law: Law) -> None:
    p, proposal, u = random_round(Law.WOR, b=2)
    with pytest.raises(InputError, match=f"this one is {law.value}"):
        rule(p, as_law(law)(proposal), u)


def test_a_rule_refuses_wrong_shapes() -> None:
    p, proposal, u = random_round(Law.IID, b=2)
    tokens, parents, q, rows = proposal.tokens, proposal.parents, proposal.q, proposal.q_rows
    with pytest.raises(InputError, match="needs a chain"):
        ratio(p, proposal, u)
    with pytest.raises(InputError, match="q and q_rows"):
        multi_step(p, Proposal(tokens, parents, Law.IID), u)
    with pytest.raises(InputError, match="got p of shape"):
        multi_step(p[:, 1:], proposal, u)
    with pytest.raises(InputError, match="got uniforms of shape"):
        multi_step(p, proposal, u[:, 1:])
    with pytest.raises(InputError, match="got q of shape"):
        multi_step(p, Proposal(tokens, parents, Law.IID, q[..., 1:], rows), u)
    with pytest.raises(InputError, match="got q_rows of shape"):
        multi_step(p, Proposal(tokens, parents, Law.IID, q, rows[:, 1:]), u)
    with pytest.raises(InputError, match="an earlier node"):
        multi_step(p, Proposal(tokens, parents.flip(1), Law.IID, q, rows), u)
    with pytest.raises(InputError, match="got tokens"):
        multi_step(p, Proposal(tokens, parents[:, 1:], Law.IID, q, rows), u)
    with pytest.raises(InputError, match="got argmaxes"):
        greedy(tokens, proposal)


def test_the_default_rule_follows_the_law() -> None:
    for law in Law:
        assert rule_for(law, greedy=True, is_chain=False) == "greedy"
    assert rule_for(Law.IID, greedy=False, is_chain=True) == "ratio"
    assert rule_for(Law.IID, greedy=False, is_chain=False) == "multi_step"
    assert rule_for(Law.WOR, greedy=False, is_chain=True) == "multi_step"
    assert rule_for(Law.ONE_HOT, greedy=False, is_chain=True) == "one_hot"
    with pytest.raises(InputError, match="law unknown"):
        rule_for(Law.UNKNOWN, greedy=False, is_chain=True)
    assert RULES.keys() == GUARANTEES.keys()
    assert {GUARANTEES[name] for name in RULES} == {"greedy", "distribution"}
