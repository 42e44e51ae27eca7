"""Rules that keep what the target says: greedy token for token, sample-and-match in
distribution."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from drafttrain.decoding.rules import greedy, one_hot, sample_and_match
from drafttrain.flow import Acceptance, Proposal, Sampling
from drafttrain.nn.sampling import draw
from drafttrain.tree.topology import Tree
from tests.decoding.exact import (
    Case,
    cases,
    constant,
    continued,
    edges_of,
    measure,
    text_distribution,
)
from tests.decoding.rules.cases import (
    TOY_2,
    F,
    P,
    Q,
    first_token,
    random_parents,
    random_round,
    row_of,
)


def followed(argmax: list[int], tokens: list[int], parents: list[int]) -> list[int]:
    """The longest path of matching tokens, the first of equals: by trying every node."""
    best: list[int] = []
    for leaf in range(len(tokens)):
        path: list[int] = []
        node = leaf
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        if all(tokens[node] == argmax[parents[node] + 1] for node in path) and len(path) > len(
            best
        ):
            best = path
    return best


def test_greedy_follows_the_argmaxes() -> None:
    tree = Tree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [1, 0, 0]])
    tokens = torch.tensor([[5, 6, 7, 8, 7, 9]] * 4)
    proposal = Proposal(tokens, torch.tensor([tree.parents] * 4), Sampling.UNKNOWN)
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
    proposal = Proposal(torch.tensor([[5, 5, 1, 2]]), torch.tensor([[-1, -1, 0, 1]]), Sampling.IID)
    kept = greedy(torch.tensor([[5, 2, 2, 0, 9]]), proposal)
    assert kept.path.tolist() == [[1, 3]]
    assert kept.next_token.tolist() == [9]


def unlike_brute_force(rule) -> int:
    """Rows of random trees where a rule does not do what trying every path does."""
    generator = torch.Generator().manual_seed(1)
    b, n = 300, 9
    parents = random_parents(b, n, generator)
    tokens = torch.randint(2, (b, n), generator=generator)
    argmax = torch.randint(2, (b, n + 1), generator=generator)
    kept = rule(argmax, Proposal(tokens, parents, Sampling.UNKNOWN))
    wrong = 0
    for row in range(b):
        path = followed(argmax[row].tolist(), tokens[row].tolist(), parents[row].tolist())
        padded = path + [-1] * (kept.path.shape[1] - len(path))
        following = int(argmax[row, path[-1] + 1 if path else 0])
        mine = (kept.path[row].tolist(), int(kept.count[row]), int(kept.next_token[row]))
        wrong += mine != (padded, len(path), following)
    return wrong


def test_greedy_equals_its_brute_force_twin() -> None:
    assert unlike_brute_force(greedy) == 0


def late_by_one(argmax: Tensor, proposal: Proposal) -> Acceptance:
    """Each node is compared with the argmax after it."""
    return greedy(torch.cat((argmax[:, 1:], argmax[:, -1:]), 1), proposal)


def first_child_only(argmax: Tensor, proposal: Proposal) -> Acceptance:
    """Siblings after the first are never looked at."""
    parents = proposal.parents
    repeats = (parents[:, :, None] == parents[:, None, :]).tril(-1).any(-1)
    return greedy(
        argmax, Proposal(torch.where(repeats, -1, proposal.tokens), parents, proposal.sampling)
    )


def bonus_from_the_last_row(argmax: Tensor, proposal: Proposal) -> Acceptance:
    """The next token is the argmax after the last node drafted, not after the last one kept."""
    kept = greedy(argmax, proposal)
    return Acceptance(kept.path, kept.count, argmax[:, -1])


@pytest.mark.parametrize("mistake", [late_by_one, first_child_only, bonus_from_the_last_row])
def test_greedy_mistakes_show(mistake) -> None:
    assert unlike_brute_force(mistake) > 30


# --- sample and match ---


def places(case: Case, p) -> list[int]:
    """Grid sizes for a rule whose number k draws the token k + 1 places after the anchor."""
    sizes = [1] * (case.tree.size + 1)
    for node in range(-1, case.tree.size):
        depth = len(case.prefix(node))
        sizes[depth] = math.lcm(sizes[depth], *edges_of(p(case.prefix(node))))
    return sizes


@pytest.mark.parametrize("sampling", [Sampling.IID, Sampling.ONE_HOT])
def test_a_chain_is_exact_and_keeps_the_targets_own_draws(sampling: Sampling) -> None:
    p, q = TOY_2
    found, accepted = measure(sample_and_match, cases(Tree.chain(2), q, sampling), p, places)
    assert continued(found, p, 3) == text_distribution(p, 3)
    expected = F(0)
    for case in cases(Tree.chain(2), q, sampling):
        first = p(())[case.tokens[0]]
        expected += case.chance * first * (1 + p(case.tokens[:1])[case.tokens[1]])
    assert accepted == expected


@pytest.mark.parametrize(
    ("k", "share"), [(1, F(1, 4)), (2, F(42, 100)), (3, F(54, 100)), (4, F(64, 100))]
)
def test_acceptance_by_number_of_independent_children(k: int, share: Fraction) -> None:
    """The chance that the target's own draw is among them: below what the multi-step residual
    keeps."""
    drafts = list(cases(Tree.expansion([k]), constant(Q), Sampling.IID))
    found = [measure_one_level(case) for case in drafts]
    accepted = sum(case.chance * one for case, (_, one) in zip(drafts, found, strict=True))
    assert round(float(accepted), 2) == float(share)
    probs = [
        sum(case.chance * one[x] for case, (one, _) in zip(drafts, found, strict=True))
        for x in range(4)
    ]
    assert tuple(probs) == P


def measure_one_level(case: Case) -> tuple[tuple[Fraction, ...], Fraction]:
    """Distribution of the first token and share accepted, over a grid for the only number that
    matters there."""
    n, size = case.tree.size, 10
    u = torch.full((size, n + 1), 0.5, dtype=torch.float64)
    u[:, 0] = (torch.arange(size) + 0.5) / size
    kept = sample_and_match(
        case.distributions(constant(P)).expand(size, -1, -1), case.proposal(size), u
    )
    tokens = torch.cat((torch.tensor([case.tokens]).expand(size, n), kept.next_token[:, None]), 1)
    first = tokens.gather(1, torch.where(kept.count > 0, kept.path[:, 0], n)[:, None])[:, 0]
    return tuple(F(int((first == x).sum()), size) for x in range(4)), F(int(kept.count.sum()), size)


def test_a_deterministic_draft_is_kept_as_often_as_by_one_hot() -> None:
    p, q = TOY_2
    drafts = list(cases(Tree.chain(2), q, Sampling.ONE_HOT))
    (_, mine), (_, theirs) = (
        measure(sample_and_match, drafts, p, places),
        measure(one_hot, drafts, p),
    )
    assert mine == theirs


def test_repeated_siblings_are_all_followed() -> None:
    p = torch.tensor([[[0.0, 1.0, 0.0]] * 3 + [[0.0, 0.0, 1.0]] * 2])
    proposal = Proposal(
        torch.tensor([[1, 1, 0, 1]]), torch.tensor([[-1, -1, 0, 1]]), Sampling.UNKNOWN
    )
    kept = sample_and_match(p, proposal, torch.full((1, 5), 0.5))
    assert kept.path.tolist() == [[1, 3]]
    assert kept.next_token.tolist() == [2]


def test_rows_are_followed_by_their_own_draws() -> None:
    """Against the same walk, row by row: trees of different shapes, and nothing but the row's own
    numbers."""
    p, proposal, u = random_round(Sampling.IID, v=3)
    together = sample_and_match(p, proposal, u)
    assert together.count.unique().numel() > 2
    for row in range(len(u)):
        drawn = [-1] * 9
        for node in range(-1, 8):
            depth, above = 0, node
            while above >= 0:
                depth, above = depth + 1, int(proposal.parents[row, above])
            drawn[node + 1] = int(draw(p[row, node + 1][None], u[row, depth][None])[0])
        # Repeats of a token follow one text; only there the walk takes the first node's
        # distribution for all.
        single = sample_and_match(p[row : row + 1], row_of(proposal, row), u[row : row + 1])
        assert (
            together.count[row] == single.count[0]
            and together.next_token[row] == single.next_token[0]
        )
        siblings = [
            (int(a), int(t))
            for a, t in zip(proposal.parents[row], proposal.tokens[row], strict=True)
        ]
        if len(set(siblings)) == len(siblings):
            path = followed(drawn, proposal.tokens[row].tolist(), proposal.parents[row].tolist())
            assert together.path[row, : len(path)].tolist() == path and together.count[row] == len(
                path
            )
            assert together.next_token[row] == drawn[path[-1] + 1 if path else 0]


def test_unknown_drafts_keep_the_distribution() -> None:
    """Whatever proposes: here a drafter that always says what is least likely."""
    p, _ = TOY_2
    drafts = [Case(F(1), (2, 0), ((F(0),) * 3,) * 2, Sampling.UNKNOWN, Tree.chain(2))]
    found, _ = measure(sample_and_match, drafts, p, places)
    assert continued(found, p, 3) == text_distribution(p, 3)
    assert first_token(found, 3) == p(())
