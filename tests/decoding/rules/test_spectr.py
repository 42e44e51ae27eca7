"""k-seq by exact enumeration where its rho is rational, by its thresholds elsewhere (SpecTr, Sun et
al. 2023)."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

import pytest
import torch

from drafttrain.decoding.rules import k_seq, multi_step, ratio
from drafttrain.decoding.rules.spectr import smallest_rho
from drafttrain.errors import InputError
from drafttrain.flow import Proposal, Sampling
from drafttrain.tree.topology import Tree
from tests.decoding.exact import (
    Case,
    Table,
    Vector,
    cases,
    constant,
    continued,
    measure,
    pinned,
    text_distribution,
    vector,
)
from tests.decoding.rules.cases import (
    TOY_2,
    F,
    P,
    Q,
    first_token,
    random_chain,
    random_round,
    row_of,
)
from tests.messages import said


def rho_of(p: Vector, q: Vector, k: int) -> float:
    rows = [torch.tensor([list(map(float, probs))], dtype=torch.float64) for probs in (p, q)]
    return float(smallest_rho(*rows, torch.tensor([k]))[0])


def test_two_drafts_with_a_rational_rho_are_exact() -> None:
    """beta = 1/2 at rho = 3/2: 1 - 1/4 = rho beta. Token 1 stays with (3/10) / (3/2 7/10) = 2/7."""
    p, q = vector(".7", ".3"), vector(".3", ".7")
    assert rho_of(p, q, 2) == pytest.approx(1.5, abs=1e-6)
    probs, accepted = measure(
        k_seq, cases(Tree.expansion([2]), constant(q), Sampling.IID), constant(p), (7, 7, 10)
    )
    assert accepted == F(3, 4)
    assert first_token(probs, 2) == p


@pytest.mark.parametrize(
    ("k", "rho", "share"),
    [(1, 1.0, 0.7), (2, 1.3831, 0.8532), (3, 1.6099, 0.9220), (4, 1.7730, 0.9546)],
)
def test_acceptance_by_number_of_drafts(k: int, rho: float, share: float) -> None:
    """The real code, held to its thresholds: the target's distribution, and a little more kept than
    by the multi-step residual."""
    found = rho_of(P, Q, k)
    assert found == pytest.approx(rho, abs=6e-5)
    probs, accepted = one_level(P, Q, k, found)
    assert accepted == pytest.approx(share, abs=6e-5)
    assert probs == pytest.approx(list(map(float, P)), abs=1e-6)
    theirs = measure(
        multi_step, cases(Tree.expansion([k]), constant(Q), Sampling.IID), constant(P)
    )[1]
    assert accepted > float(theirs) - 1e-6


def one_level(p: Vector, q: Vector, k: int, rho: float) -> tuple[list[float], float]:
    keep = [min(1.0, float(a) / (rho * float(b))) for a, b in zip(p, q, strict=True)]
    edges = edges_after(p, q, k, rho)
    probs, accepted = [0.0] * len(p), 0.0
    for case in cases(Tree.expansion([k]), constant(q), Sampling.IID):
        here, share = pinned(
            k_seq,
            case,
            constant(p),
            [*([keep[token]] for token in case.tokens), edges],
            sharp=k < 3,
        )
        accepted += float(case.chance) * share
        for text, chance in here.items():
            probs[text[0]] += float(case.chance) * chance
    return probs, accepted


def edges_after(p: Vector, q: Vector, k: int, rho: float) -> list[float]:
    """Edges of the residual, and of p, which follows an accepted child."""
    passed = [min(float(b), float(a) / rho) for a, b in zip(p, q, strict=True)]
    beta = sum(passed)
    left = [
        max(0.0, float(a) - one * (1 - (1 - beta) ** k) / beta)
        for a, one in zip(p, passed, strict=True)
    ]
    edges = []
    for probs in (left, list(map(float, p))):
        total = sum(probs)
        edges += [sum(probs[: i + 1]) / total for i in range(len(probs))] if total > 1e-9 else []
    return edges


def test_a_rho_below_the_least_is_no_distribution() -> None:
    """With rho = 1 and two drafts the residual would need a probability of -.06."""
    passed = [min(a, b) for a, b in zip(P, Q, strict=True)]
    beta = sum(passed)
    left = [a - one * (1 - (1 - beta) ** 2) / beta for a, one in zip(P, passed, strict=True)]
    assert min(left) == F(-6, 100)
    kept = {
        k: 1 - (1 - sum(min(a / k, b) for a, b in zip(P, Q, strict=True))) ** k for k in (2, 3, 4)
    }
    assert [round(float(kept[k]), 4) for k in (2, 3, 4)] == [
        0.75,
        0.7037,
        0.6836,
    ]  # rho = k, always a distribution


def test_two_levels_with_context_keep_the_distribution() -> None:
    p, q = TOY_2
    probs: dict[tuple[int, ...], float] = defaultdict(float)
    for case in cases(Tree.expansion([2, 1]), q, Sampling.IID):
        found, _ = pinned(k_seq, case, p, breaks_of(case, p, q), sharp=False)
        for text, chance in found.items():
            probs[text] += float(case.chance) * chance
    texts = continued({text: Fraction(chance) for text, chance in probs.items()}, p, 3)
    expected = text_distribution(p, 3)
    assert all(
        float(texts[text]) == pytest.approx(float(expected[text]), abs=1e-5) for text in expected
    )


def breaks_of(case: Case, p: Table, q: Table) -> list[list[float]]:
    breaks: list[list[float]] = []
    edges: list[float] = []
    for node in range(-1, case.tree.size):
        prefix, k = case.prefix(node), len(case.tree.children(node))
        rho = rho_of(p(prefix), q(prefix), k) if k else 1.0
        edges += edges_after(p(prefix), q(prefix), max(k, 1), rho)
        for child in case.tree.children(node):
            token = case.tokens[child]
            breaks.append([float(p(prefix)[token]) / (rho * float(q(prefix)[token]))])
    return [*breaks, edges]


@pytest.mark.parametrize("k", [1, 2, 5, 12])
def test_rho_is_the_least_that_is_enough(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    p, q = (
        torch.randn(200, 40, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
        for _ in range(2)
    )
    p[0] = q[0]
    p[1], q[1] = torch.eye(40, dtype=torch.float64)[:2]  # nothing in common
    rho = smallest_rho(p, q, torch.full((200,), k))

    def missing(rho: torch.Tensor) -> torch.Tensor:
        beta = torch.minimum(q, p / rho[:, None]).sum(-1).clamp(max=1)
        return 1 - (1 - beta) ** k - rho * beta

    assert bool(((rho >= 1) & (rho <= k)).all())
    assert bool((missing(rho) <= 1e-12).all())
    inner = rho > 1 + 1e-4
    assert inner.sum() > 190 or k == 1
    assert bool((missing(rho - 1e-5)[inner] > 0).all())
    assert rho[0] == pytest.approx(1.0, abs=1e-6)
    assert rho[1] == 1


def test_one_child_each_is_the_ratio_rule() -> None:
    p, proposal, u = random_chain()
    mine, theirs = k_seq(p, proposal, u), ratio(p, proposal, u)
    for name in ("path", "count", "next_token"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name))


def test_rows_do_not_depend_on_each_other() -> None:
    p, proposal, u = random_round(Sampling.IID)
    together = k_seq(p, proposal, u)
    assert together.count.unique().numel() > 2
    for row in range(len(u)):
        single = k_seq(p[row : row + 1], row_of(proposal, row), u[row : row + 1])
        count = int(single.count)
        assert (together.count[row], together.next_token[row]) == (count, single.next_token[0])
        assert together.path[row, :count].tolist() == single.path[0, :count].tolist()


def test_siblings_of_several_drafters_are_refused() -> None:
    p, q = torch.full((1, 3, 2), 0.5), torch.full((1, 2, 2), 0.5)
    root = torch.tensor([[-1, -1]])
    with pytest.raises(InputError, match=said("decoding.several_rows")):
        k_seq(
            p,
            Proposal(torch.tensor([[0, 1]]), root, Sampling.IID, q, torch.tensor([[0, 1]])),
            torch.full((1, 3), 0.5),
        )


def test_equal_distributions_accept_all_but_rounding() -> None:
    """What is refused by rounding is drawn from what is left, or from p: never an error."""
    p = torch.tensor([[[0.5, 0.25, 0.25]] * 3])
    root = torch.tensor([[-1, -1]])
    proposal = Proposal(torch.tensor([[0, 1]]), root, Sampling.IID, p[:, :1], root + 1)
    assert k_seq(p, proposal, torch.full((1, 3), 0.5)).count.tolist() == [1]
    most = torch.full((1, 3), 1 - 2.0**-53, dtype=torch.float64)
    assert int(k_seq(p, proposal, most).next_token[0]) in (0, 1, 2)
