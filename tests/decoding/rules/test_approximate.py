"""Typical acceptance against a plain walk over paths, and on the numbers of its definition (Cai et
al. 2024, Medusa)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from drafttrain.decoding.rules import GUARANTEES, approximate, typical
from drafttrain.errors import InputError
from drafttrain.flow import Acceptance, Proposal, Sampling
from drafttrain.tree.topology import Tree
from tests.decoding.rules.cases import random_round, row_of
from tests.messages import said


def accepted_tokens(probs: list[float], **thresholds: float) -> list[int]:
    """The tokens that a distribution keeps, each drafted by itself."""
    v = len(probs)
    p = torch.tensor([[probs, probs]], dtype=torch.float64).expand(v, 2, v)
    tokens, root = torch.arange(v)[:, None], torch.full((v, 1), -1)
    kept = typical(p, Proposal(tokens, root, Sampling.UNKNOWN), torch.zeros(v, 2), **thresholds)
    return [token for token in range(v) if kept.count[token]]


@pytest.mark.parametrize(
    ("probs", "entropy", "threshold", "kept"),
    [
        ([0.5, 0.3, 0.15, 0.05], 1.1421, 0.09, [0, 1, 2]),
        ([0.25] * 4, 1.3863, 0.075, [0, 1, 2, 3]),
        ([0.05] * 20, 2.9957, 0.015, list(range(20))),
        ([0.9, 0.05, 0.03, 0.02], 0.4280, 0.09, [0]),
        ([1.0, 0.0, 0.0, 0.0], 0.0, 0.09, [0]),
    ],
)
def test_distributions_and_their_thresholds(
    probs: list[float], entropy: float, threshold: float, kept: list[int]
) -> None:
    found = -sum(one * math.log(one) for one in probs if one)
    assert found == pytest.approx(entropy, abs=5e-5)
    assert min(0.09, 0.3 * math.exp(-found)) == pytest.approx(threshold, abs=1e-6)
    assert accepted_tokens(probs) == kept


def test_the_entropy_counts_from_ten_thirds_of_a_choice() -> None:
    """delta exp(-H) falls below epsilon once exp(H) exceeds delta / epsilon: at H = 1.204 nats."""
    assert math.log(approximate.DELTA / approximate.EPSILON) == pytest.approx(1.204, abs=1e-3)
    probs = [0.3 - 1e-9, 0.3, 0.3, 0.1 + 1e-9]
    assert accepted_tokens(probs, delta=10.0) == [0, 1, 2, 3]
    assert accepted_tokens(probs, epsilon=0.1 + 1e-6, delta=10.0) == [0, 1, 2]
    assert accepted_tokens(probs, epsilon=1.0, delta=0.35) == [0, 1, 2, 3]  # exp(-H) is .2688 here
    assert accepted_tokens(probs, epsilon=1.0, delta=0.4) == [0, 1, 2]
    assert accepted_tokens(probs, epsilon=1.0, delta=1.2) == []
    assert accepted_tokens(probs, epsilon=0.0, delta=0.0) == [0, 1, 2, 3]
    assert accepted_tokens([0.5, 0.5, 0.0], epsilon=0.0) == [0, 1], (
        "a probability of 0 is never typical"
    )


def reference(
    p: Tensor, proposal: Proposal, epsilon: float = 0.09, delta: float = 0.3
) -> tuple[list[int], int]:
    """One row, by trying the path to every node."""
    best: list[int] = []
    most = 0.0
    for leaf in range(proposal.size):
        path: list[int] = []
        node = leaf
        while node >= 0:
            path.insert(0, node)
            node = int(proposal.parents[0, node])
        chances = []
        for node in path:
            probs = p[0, int(proposal.parents[0, node]) + 1].double()
            chance = float(probs[proposal.tokens[0, node]])
            entropy = -float((probs * probs.log()).sum())
            if not chance > min(epsilon, delta * math.exp(-entropy)):
                break
            chances.append(math.log(chance))
        if len(chances) == len(path) and (len(path), sum(chances)) > (
            len(best),
            most if best else -math.inf,
        ):
            best, most = path, sum(chances)
    return best, int(p[0, best[-1] + 1 if best else 0].argmax())


def unlike_the_reference(rule) -> int:
    wrong = 0
    for sampling in (Sampling.IID, Sampling.ONE_HOT):
        p, proposal, u = random_round(sampling, b=300, n=8, v=9, seed=5)
        kept = rule(p, proposal, u)
        for row in range(len(u)):
            path, following = reference(p[row : row + 1], row_of(proposal, row))
            padded = path + [-1] * (kept.path.shape[1] - len(path))
            mine = (kept.path[row].tolist(), int(kept.count[row]), int(kept.next_token[row]))
            wrong += mine != (padded, len(path), following)
    return wrong


def test_trees_of_many_shapes_agree_with_the_reference() -> None:
    assert unlike_the_reference(typical) == 0


def in_bits(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """The entropy is taken in bits: exp(-H / ln 2) instead of exp(-H), here as a distribution
    sharpened to that effect."""
    entropy = torch.special.entr(p.double()).sum(-1).mean()
    return typical(p, proposal, u, delta=0.3 * math.exp(float(entropy - entropy / math.log(2))))


def swapped(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """epsilon and delta change places."""
    return typical(p, proposal, u, epsilon=0.3, delta=0.09)


def late_by_one(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    """Each token is judged by the distribution after it."""
    return typical(torch.cat((p[:, 1:], p[:, -1:]), 1), proposal, u)


def bonus_from_the_anchor(p: Tensor, proposal: Proposal, u: Tensor) -> Acceptance:
    kept = typical(p, proposal, u)
    return Acceptance(kept.path, kept.count, p[:, 0].argmax(-1))


@pytest.mark.parametrize("mistake", [in_bits, swapped, late_by_one, bonus_from_the_anchor])
def test_mistakes_show(mistake) -> None:
    assert unlike_the_reference(mistake) > 10


def test_the_longest_path_wins_then_the_likelier_one() -> None:
    tree = Tree.from_paths([[0], [1], [2], [1, 0], [2, 0]])
    proposal = Proposal(
        torch.tensor([[0, 1, 2, 0, 0]]), torch.tensor([tree.parents]), Sampling.ONE_HOT
    )
    p = torch.tensor(
        [
            [
                [0.5, 0.2, 0.3],
                [0.4, 0.3, 0.3],
                [0.6, 0.3, 0.1],
                [0.5, 0.2, 0.3],
                [0.1, 0.8, 0.1],
                [0.1, 0.1, 0.8],
            ]
        ]
    )
    kept = typical(p, proposal, torch.zeros(1, 6))
    assert kept.path.tolist() == [[2, 4]], (
        ".3 x .5 beats .2 x .6; node 0 is likelier, but nothing follows it"
    )
    assert kept.next_token.tolist() == [2]
    p[0, 2] = torch.tensor([0.9, 0.05, 0.05])
    kept = typical(p, proposal, torch.zeros(1, 6))
    assert kept.path.tolist() == [[1, 3]], ".2 x .9 beats .3 x .5"
    assert kept.next_token.tolist() == [1]


def test_it_does_not_keep_the_targets_distribution_and_says_so() -> None:
    """A token of probability .3 is always kept: the total variation of the first token is .7."""
    p = torch.tensor([[[0.5, 0.3, 0.2]] * 2]).expand(50, 2, 3)
    proposal = Proposal(
        torch.ones(50, 1, dtype=torch.int64), torch.full((50, 1), -1), Sampling.ONE_HOT
    )
    kept = typical(p, proposal, torch.rand(50, 2, generator=torch.Generator().manual_seed(0)))
    assert (kept.count == 1).all() and (kept.next_token == 0).all()
    assert GUARANTEES["typical"] == "approximate"


def test_rows_do_not_depend_on_each_other_and_no_chance_is_used() -> None:
    p, proposal, u = random_round(Sampling.WOR)
    together, again = typical(p, proposal, u), typical(p, proposal, 1 - u)
    for row in range(len(u)):
        single = typical(p[row : row + 1], row_of(proposal, row), u[row : row + 1])
        count = int(single.count)
        assert (together.count[row], together.next_token[row]) == (count, single.next_token[0])
        assert together.path[row, :count].tolist() == single.path[0, :count].tolist()
    assert torch.equal(together.path, again.path) and torch.equal(
        together.next_token, again.next_token
    )


@pytest.mark.parametrize(
    "thresholds", [{"epsilon": -0.1}, {"delta": math.inf}, {"delta": math.nan}]
)
def test_thresholds_below_nothing_are_refused(thresholds: dict[str, float]) -> None:
    with pytest.raises(InputError, match=said("decoding.threshold")):
        accepted_tokens([0.5, 0.5], **thresholds)
