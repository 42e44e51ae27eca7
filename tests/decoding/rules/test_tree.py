"""The multi-step residual by exact enumeration: independent, without replacement, most likely,
several drafters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from drafttrain.decoding.rules import multi_step, one_hot
from drafttrain.flow import Proposal, Sampling
from drafttrain.tree.topology import Tree
from tests.decoding.exact import (
    Case,
    Vector,
    cases,
    constant,
    continued,
    draws,
    measure,
    pinned,
    siblings,
    text_distribution,
    vector,
)
from tests.decoding.rules.cases import (
    OTHER,
    TOY_2,
    F,
    P,
    Q,
    first_token,
    random_round,
    retried,
    row_of,
)
from tests.messages import said


def iid(k: int) -> list[Case]:
    return [
        siblings(chance, tokens, Q, Sampling.IID) for tokens, chance in draws(Q, k, Sampling.IID)
    ]


def wor(k: int) -> list[Case]:
    return [
        siblings(chance, tokens, Q, Sampling.WOR) for tokens, chance in draws(Q, k, Sampling.WOR)
    ]


def two_drafters(
    order: Callable[[list[tuple[int, Vector]]], list[tuple[int, Vector]]],
) -> list[Case]:
    found = []
    for x, y in itertools.product(range(4), repeat=2):
        judged = order([(x, Q), (y, OTHER)])
        tokens, distributions = zip(*judged, strict=True)
        found.append(siblings(Q[x] * OTHER[y], tokens, distributions, Sampling.IID))
    return found


def two_drafters_without_replacement() -> list[Case]:
    """The first drafter draws two different children, then the second one does, which may repeat
    them."""
    found = []
    for (mine, chance), (theirs, other) in itertools.product(
        draws(Q, 2, Sampling.WOR), draws(OTHER, 2, Sampling.WOR)
    ):
        found.append(siblings(chance * other, (*mine, *theirs), (Q, Q, OTHER, OTHER), Sampling.WOR))
    return found


def sampled_and_most_likely() -> list[Case]:
    """One drafter draws a child, another proposes its most likely one, a point mass."""
    point = tuple(F(token == 2) for token in range(4))
    return [siblings(Q[x], (x, 2), (Q, point), Sampling.IID) for x in range(4)]


def relabelled(
    found: list[Case],
    sampling: Sampling,
    tokens: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple,
) -> list[Case]:
    """The same drafts said to be drawn in another way, in another order, or fewer of them."""
    return [siblings(case.chance, tokens(case.tokens), Q, sampling) for case in found]


def distinct(tokens: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(tokens))


def by_confidence(tokens: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(tokens, key=lambda token: (-Q[token], token)))


RIGHT = {
    "one": (multi_step, iid(1), F(7, 10)),
    "independent, repeats kept": (multi_step, iid(2), F(41, 50)),
    "without replacement": (multi_step, wor(2), F(23, 25)),
    "top-2": (one_hot, [siblings(F(1), (0, 1), Q, Sampling.ONE_HOT)], F(1, 2)),
    "top-2, other order": (one_hot, [siblings(F(1), (1, 0), Q, Sampling.ONE_HOT)], F(1, 2)),
    "top-2 with a repeat": (one_hot, [siblings(F(1), (0, 0, 1), Q, Sampling.ONE_HOT)], F(1, 2)),
    "two drafters": (multi_step, two_drafters(list), F(22, 25)),
    "two drafters, other order": (multi_step, two_drafters(lambda found: found[::-1]), F(43, 50)),
    "independent, repeats dropped, judged as without replacement": (
        multi_step,
        relabelled(iid(2), Sampling.WOR, distinct),
        F(81, 100),
    ),
    "three without replacement, the first kept": (
        multi_step,
        relabelled(wor(3), Sampling.WOR, lambda t: t[:1]),
        F(7, 10),
    ),
    "two drafters, without replacement each": (
        multi_step,
        two_drafters_without_replacement(),
        None,
    ),
    "one draws, one proposes its most likely": (multi_step, sampled_and_most_likely(), None),
}


@pytest.mark.parametrize("name", RIGHT)
def test_one_node_is_exact(name: str) -> None:
    rule, drafts, expected = RIGHT[name]
    probs, accepted = measure(rule, drafts, constant(P))
    assert expected is None or accepted == expected
    assert first_token(probs) == P


def test_two_drafters_in_an_order_drawn_uniformly_are_exact() -> None:
    half = [
        measure(multi_step, two_drafters(order), constant(P))
        for order in (list, lambda found: found[::-1])
    ]
    assert sum(accepted for _, accepted in half) / 2 == F(87, 100)


@pytest.mark.parametrize("sampling", [Sampling.IID, Sampling.WOR, Sampling.ONE_HOT])
def test_acceptance_by_number_of_children(sampling: Sampling) -> None:
    expected = {
        Sampling.IID: [0.7, 0.82, 0.892, 0.9176],
        Sampling.WOR: [0.7, 0.92, 0.9633, 1.0],
        Sampling.ONE_HOT: [0.2, 0.5, 0.9, 1.0],
    }
    rule = one_hot if sampling is Sampling.ONE_HOT else multi_step
    for k, share in enumerate(expected[sampling], start=1):
        # Ties of q are broken by id, in the reference as in a stable top-k.
        found, accepted = measure(
            rule, cases(Tree.expansion([k]), constant(Q), sampling), constant(P)
        )
        assert round(float(accepted), 4) == share
        assert first_token(found) == P


@pytest.mark.parametrize(("k", "expected"), [(2, F(3, 10)), (3, F(19, 20)), (4, F(1))])
def test_draws_beyond_the_support_go_on_uniformly(k: int, expected: Fraction) -> None:
    p, q = vector(".1", ".2", ".3", ".4"), vector(".6", ".4", "0", "0")
    probs, accepted = measure(
        multi_step, cases(Tree.expansion([k]), constant(q), Sampling.WOR), constant(p)
    )
    assert accepted == expected
    assert first_token(probs) == p


@pytest.mark.parametrize(
    ("sampling", "rule", "expected"),
    [
        (Sampling.IID, multi_step, F(3757, 2500)),
        (Sampling.WOR, multi_step, F(2437, 1400)),
        (Sampling.ONE_HOT, one_hot, F(143, 100)),
    ],
)
def test_two_levels_with_context_are_exact(sampling: Sampling, rule, expected: Fraction) -> None:
    p, q = TOY_2
    found, accepted = measure(rule, cases(Tree.expansion([2, 2]), q, sampling), p)
    assert accepted == expected
    assert continued(found, p, 3) == text_distribution(p, 3)


# --- what a tree is worth (Chen et al. 2024, Proposition 3.4; Cai et al. 2024, section 2.3.3) ---

CHAIN_AND_SIBLING = Tree.from_paths([*([0] * k for k in range(1, 7)), [1]])
RATES = (".7", ".15", ".06", ".03")
BY_DEPTH = (
    (".60", ".11", ".05", ".03"),
    (".36", ".11", ".06", ".04"),
    (".22", ".10", ".06", ".04"),
)
NINE = Tree.from_paths([[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0], [0, 2], [3]])


@pytest.mark.parametrize(
    ("tree", "rates", "tokens"),
    [
        (Tree.chain(4), (RATES,) * 4, 2.7731),
        (CHAIN_AND_SIBLING, (RATES,) * 6, 3.20882),
        (
            Tree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1]]),
            (RATES,) * 3,
            2.96650,
        ),
        (NINE, BY_DEPTH, 2.19512),
    ],
    ids=["chain", "chain and sibling", "at most three deep", "rates by depth"],
)
def test_a_tree_is_worth_the_sum_of_its_paths_rates(tree: Tree, rates, tokens: float) -> None:
    """If the j-th child is the one accepted with a rate that is its own, tokens per round are 1 +
    the sum over nodes of the product of rates on the way. The most likely tokens as drafts make the
    rates the target's probabilities."""
    levels = [[F(rate) for rate in level] for level in rates]
    distributions = [(*level, 1 - sum(level)) for level in levels]
    last = tuple(F(1, 5) for _ in range(5))
    case = Case(F(1), tree.ranks, (last,) * tree.size, Sampling.ONE_HOT, tree)

    def p(prefix: tuple[int, ...]) -> Vector:
        return distributions[len(prefix)] if len(prefix) < len(distributions) else last

    breaks = []
    for node in range(tree.size):
        depth, rank = len(case.prefix(node)) - 1, tree.ranks[node]
        breaks.append([levels[depth][rank] / (1 - sum(levels[depth][:rank]))])
    _, accepted = pinned(one_hot, case, p, [*breaks, []], sharp=tree.size < 6)
    assert accepted + 1 == pytest.approx(tokens, abs=6e-6)
    worth = [F(1)]
    for path in tree.paths:
        score = F(1)
        for depth, rank in enumerate(path):
            score *= levels[depth][rank]
        worth.append(score)
    assert float(sum(worth)) == pytest.approx(tokens, abs=6e-6)


# --- mistakes, exactly ---


def joined(found: list[Case]) -> list[Case]:
    """Equal tokens of two drafters become one child, said to come from the first."""
    return [
        siblings(
            case.chance, distinct(case.tokens), case.q[: len(distinct(case.tokens))], Sampling.IID
        )
        for case in found
    ]


WRONG = {
    "retried against p": (
        retried,
        iid(2),
        (5, 5, 30),
        F(91, 100),
        (F(26, 100), F(29, 100), F(32, 100), F(13, 100)),
    ),
    "repeats dropped, judged as independent": (
        multi_step,
        relabelled(iid(2), Sampling.IID, distinct),
        None,
        F(41, 50),
        (F(1, 5), F(19, 60), F(23, 60), F(1, 10)),
    ),
    "without replacement, judged as independent": (
        multi_step,
        relabelled(wor(2), Sampling.IID),
        None,
        F(47, 50),
        (F(1, 5), F(1, 3), F(11, 30), F(1, 10)),
    ),
    "top-2 judged by p/q": (
        multi_step,
        [siblings(F(1), (0, 1), Q, Sampling.IID)],
        None,
        F(1),
        (F(2, 5), F(3, 5), F(0), F(0)),
    ),
    "sorted by q": (
        multi_step,
        relabelled(wor(2), Sampling.WOR, by_confidence),
        None,
        F(1049, 1200),
        (F(29, 90), F(223, 720), F(53, 144), F(0)),
    ),
    "shuffled": (
        multi_step,
        [
            siblings(case.chance / 2, order, Q, Sampling.WOR)
            for case in wor(2)
            for order in itertools.permutations(case.tokens)
        ],
        None,
        F(2249, 2400),
        (F(29, 180), F(457, 1440), F(571, 1440), F(1, 8)),
    ),
    "three drawn, the two most confident kept": (
        multi_step,
        relabelled(wor(3), Sampling.WOR, lambda tokens: by_confidence(tokens)[:2]),
        None,
        F(1459, 1575),
        (F(241, 630), F(173, 420), F(37, 180), F(0)),
    ),
    "two drafters' equal tokens joined": (
        multi_step,
        joined(two_drafters(list)),
        None,
        F(22, 25),
        (F(1, 5), F(117, 400), F(163, 400), F(1, 10)),
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
    probs, share = measure(rule, drafts, constant(P), *([sizes] if sizes else []))
    assert first_token(probs) == expected != P
    assert share == accepted


# --- what else must hold ---


@pytest.mark.parametrize("sampling", [Sampling.IID, Sampling.WOR, Sampling.ONE_HOT])
def test_rows_do_not_depend_on_each_other(sampling: Sampling) -> None:
    p, proposal, u = random_round(sampling)
    rule = one_hot if sampling is Sampling.ONE_HOT else multi_step
    together = rule(p, proposal, u)
    assert together.count.unique().numel() > 2
    for row in range(len(u)):
        single = rule(p[row : row + 1], row_of(proposal, row), u[row : row + 1])
        count = int(single.count)
        assert together.count[row] == count
        assert together.next_token[row] == single.next_token[0]
        assert together.path[row, :count].tolist() == single.path[0, :count].tolist()
        assert (together.path[row, count:] == -1).all()


def test_one_hot_is_multi_step_with_point_masses() -> None:
    p, proposal, u = random_round(Sampling.ONE_HOT)
    points = torch.nn.functional.one_hot(proposal.tokens, p.shape[-1]).float()
    apart = Proposal(
        proposal.tokens, proposal.parents, Sampling.IID, points, torch.arange(8).expand(120, 8)
    )
    mine, theirs = one_hot(p, proposal, u), multi_step(p, apart, u)
    for name in ("path", "count", "next_token"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name))


@pytest.mark.parametrize("sampling", [Sampling.IID, Sampling.WOR, Sampling.ONE_HOT])
def test_uniforms_of_nodes_never_reached_do_not_matter(sampling: Sampling) -> None:
    p, proposal, u = random_round(sampling)
    rule = one_hot if sampling is Sampling.ONE_HOT else multi_step
    kept = rule(p, proposal, u)
    reached = (proposal.parents == -1) | (
        proposal.parents[:, :, None] == kept.path[:, None, :]
    ).any(-1)
    other = u.clone()
    other[:, :-1] = torch.where(reached, u[:, :-1], 1 - u[:, :-1])
    again = rule(p, proposal, other)
    assert not torch.equal(other, u)
    for name in ("path", "count", "next_token"):
        assert torch.equal(getattr(kept, name), getattr(again, name))


def test_drafters_are_told_apart_by_their_row_of_q() -> None:
    """The second drafter's child may repeat the first one's token; drawn from one row that would be
    an error."""
    p, q = torch.full((1, 3, 3), 1 / 3), torch.tensor([[[0.8, 0.1, 0.1], [0.8, 0.1, 0.1]]])
    root, u = torch.tensor([[-1, -1]]), torch.full((1, 3), 0.9)
    apart = Proposal(torch.tensor([[0, 0]]), root, Sampling.WOR, q, torch.tensor([[0, 1]]))
    assert multi_step(p, apart, u).count.tolist() == [0]
    together = Proposal(torch.tensor([[0, 0]]), root, Sampling.WOR, q, torch.tensor([[0, 0]]))
    with pytest.raises(ValueError, match=said("decoding.undrawable")):
        multi_step(p, together, u)


def test_a_fallback_drops_the_remaining_siblings() -> None:
    short = 0.5 - 2.0**-20
    p = torch.tensor([[[0.5, short], [0.5, 0.5], [0.5, 0.5]]])
    root = torch.tensor([[-1, -1]])
    u = torch.tensor([[1 - 2.0**-40, 0.0, 0.25]], dtype=torch.float64)
    kept = multi_step(
        p,
        Proposal(torch.tensor([[1, 0]]), root, Sampling.IID, torch.full((1, 1, 2), 0.5), root + 1),
        u,
    )
    assert (kept.count.tolist(), kept.next_token.tolist(), kept.fallbacks) == ([0], [0], 1)
