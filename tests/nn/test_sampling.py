"""Sampling policies, draws by inverse of the cumulative weights, and chance that rows do not
share."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import pytest
import torch

from drafttrain.errors import InputError
from drafttrain.nn.sampling import Chance, Policy, draw, draw_without_replacement, untried
from tests.messages import said
from tests.nn.parts import logits_of


def filtered(logits: list[float], policy: Policy) -> list[float]:
    """One row by plain Python: temperature, top-k, top-p, each in one pass."""
    top = max(logits)
    weights = [math.exp((x - top) / policy.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = order[: policy.top_k] if policy.top_k else order
    total = sum(weights[token] for token in kept)
    reached, nucleus = 0.0, []
    for token in kept:
        nucleus.append(token)
        reached += weights[token] / total
        if reached >= policy.top_p:
            break
    total = sum(weights[token] for token in nucleus)
    return [weights[token] / total if token in nucleus else 0.0 for token in range(len(logits))]


@pytest.mark.parametrize(
    "policy",
    [
        Policy(1.0),
        Policy(0.5),
        Policy(1.0, top_k=7),
        Policy(0.7, top_k=1),
        Policy(1.0, top_p=0.8),
        Policy(1.3, top_k=12, top_p=0.6),
        Policy(2.0, top_k=900, top_p=0.999),
    ],
)
@pytest.mark.parametrize("v", [3, 40, 900])
def test_policy_equals_its_plain_twin(policy: Policy, v: int) -> None:
    logits = logits_of(2, 3, v)
    probs = policy.probs(logits)
    expected = [[filtered(row, policy) for row in rows] for rows in logits.double().tolist()]
    torch.testing.assert_close(probs, torch.tensor(expected), rtol=2e-5, atol=1e-7)


def test_top_p_keeps_the_token_that_crosses() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    for top_p, kept in ((0.4, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.8, 3), (1e-9, 1), (1.0, 4)):
        assert Policy(1.0, top_p=top_p).probs(logits).count_nonzero() == kept


def test_a_flat_law_is_cut_beyond_the_first_look() -> None:
    probs = Policy(1.0, top_p=0.75).probs(torch.zeros(2, 4000))
    assert probs.count_nonzero(dim=-1).tolist() == [3000, 3000]
    assert (probs[:, :3000] > 0).all()


def test_among_equals_the_lower_ids_stay() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 1.0])
    assert Policy(1.0, top_k=3).probs(logits).nonzero()[:, 0].tolist() == [0, 1, 2]
    assert Policy(1.0, top_p=0.5).probs(torch.zeros(4)).nonzero()[:, 0].tolist() == [0, 1]


def test_policy_is_float32_and_adds_up() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        probs = Policy(0.9, top_k=20, top_p=0.9).probs(logits_of(4, 50).to(dtype))
        assert probs.dtype == torch.float32
        torch.testing.assert_close(probs.sum(-1), torch.ones(4))


def test_masked_logits_stay_at_zero() -> None:
    logits = torch.tensor([0.0, -math.inf, 1.0, -math.inf])
    for policy in (
        Policy(1.0),
        Policy(1.0, top_k=3),
        Policy(1.0, top_p=0.99999),
        Policy(3.0, 4, 0.9),
    ):
        assert policy.probs(logits)[[1, 3]].tolist() == [0, 0]


def test_a_small_temperature_does_not_overflow() -> None:
    probs = Policy(1e-30).probs(torch.tensor([3e4, 2e4, -1e30]))
    assert probs.tolist() == [1, 0, 0]


def test_greedy_has_no_distribution() -> None:
    assert Policy().greedy
    assert not Policy(0.1).greedy
    with pytest.raises(InputError, match=r"temperature 0"):
        Policy().probs(torch.zeros(3))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": 1e-50}, "temperature is 1e-50"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"repetition_penalty": 10**400}, "repetition_penalty is 1000"),
        ({"logit_bias": {1: 10**400}}, "logit_bias of token 1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, float], named: str) -> None:
    with pytest.raises(InputError, match=named):
        Policy(**settings)  # type: ignore[arg-type]


def test_draw_follows_the_weights_exactly() -> None:
    weights = torch.tensor([2.0, 0.0, 3.0, 4.0, 1.0]) * 3.7  # any scale
    u = (torch.arange(100, dtype=torch.float64) + 0.5) / 100
    assert draw(weights.expand(100, -1), u).bincount(minlength=5).tolist() == [20, 0, 30, 40, 10]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draw_never_gives_weight_zero(dtype: torch.dtype) -> None:
    edges = torch.tensor(
        [0.0, 5e-324, 0.25, 0.5, 1 - 2.0**-24, 1 - 2.0**-53, 1.0], dtype=torch.float64
    )
    for weights in (
        [0, 0, 1, 0, 1, 0, 0],
        [0, 1e-30, 0, 1, 0],
        [0, 1, 0, 1e-30, 0],
        [1e-38, 0],
        [0, 1e30, 0],
    ):
        rows = torch.tensor(weights, dtype=dtype).expand(len(edges), -1)
        found = draw(rows, edges.to(dtype))
        assert (rows.gather(1, found[:, None]) > 0).all()


def test_draw_at_the_edges_of_a_large_vocabulary() -> None:
    weights = logits_of(3, 50_000).softmax(-1)
    weights[:, :17] = 0
    weights[:, -23:] = 0
    assert draw(weights, torch.zeros(3)).tolist() == [17] * 3
    found = draw(weights, torch.full((3,), 1 - 2.0**-53, dtype=torch.float64))
    assert (weights.gather(1, found[:, None]) > 0).all()
    assert (found >= 49_900).all()


@pytest.mark.parametrize("bad", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_draw_refuses_weights_that_are_no_distribution(bad: list[float]) -> None:
    with pytest.raises(ValueError, match=said("nn.no_distribution")):
        draw(torch.tensor([[0.5, 0.5], bad]), torch.tensor([0.5, 0.5]))


def test_draws_without_replacement_follow_their_distribution_exactly() -> None:
    q = [Fraction(5, 10), Fraction(2, 10), Fraction(2, 10), Fraction(1, 10)]
    first, second = 10, 360  # 360: every sum of q without one token is a multiple of 1/360
    u = torch.cartesian_prod(
        *((torch.arange(size, dtype=torch.float64) + 0.5) / size for size in (first, second))
    )
    found = draw_without_replacement(torch.tensor([[float(x) for x in q]]).expand(len(u), -1), u)
    times = Counter(map(tuple, found.tolist()))
    expected = {(x, y): q[x] * q[y] / (1 - q[x]) for x in range(4) for y in range(4) if x != y}
    assert {pair: Fraction(count, len(u)) for pair, count in times.items()} == expected


def test_draws_beyond_the_support_are_uniform_over_the_untried() -> None:
    u = torch.cartesian_prod(
        *[(torch.arange(size, dtype=torch.float64) + 0.5) / size for size in (5, 1, 2, 1)]
    )
    found = draw_without_replacement(torch.tensor([[0.6, 0.4, 0.0, 0.0]]).expand(len(u), -1), u)
    assert (found.sort(-1).values == torch.arange(4)).all()
    times = Counter(map(tuple, found.tolist()))
    assert times == {(0, 1, 2, 3): 3, (0, 1, 3, 2): 3, (1, 0, 2, 3): 2, (1, 0, 3, 2): 2}
    with pytest.raises(InputError, match=said("nn.too_many_children")):
        draw_without_replacement(torch.full((1, 4), 0.25), torch.zeros(1, 5))


def test_rows_reach_the_end_of_their_support_apart() -> None:
    probs = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.3, 0.2]])
    left = untried(probs, torch.tensor([[0], [0]]))
    torch.testing.assert_close(
        left, torch.tensor([[0.0, 0.5, 0.5], [0.0, 0.6, 0.4]], dtype=torch.float64)
    )
    assert probs[0].tolist() == [1, 0, 0]


def test_a_row_may_have_tried_less_than_its_neighbours() -> None:
    """Its places of "none" leave token 0 to be drawn, also where others tried it."""
    probs = torch.tensor([[0.5, 0.3, 0.2]] * 4)
    left = untried(probs, torch.tensor([[0, -1], [-1, 2], [-1, -1], [1, 0]]))
    expected = [[0, 0.6, 0.4], [0.625, 0.375, 0], [0.5, 0.3, 0.2], [0, 0, 1]]
    torch.testing.assert_close(left, torch.tensor(expected, dtype=torch.float64))
    used_up = untried(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[-1, 0]]))
    assert used_up.tolist() == [[0, 0.5, 0.5]]


def test_chance_of_a_row_is_its_own() -> None:
    together = Chance.seeded(3, 4)
    apart = [Chance.seeded(3, [row]) for row in range(4)]
    for k in (1, 5, 2):
        found = together.uniform(k)
        assert found.shape == (4, k)
        assert torch.equal(found, torch.cat([one.uniform(k) for one in apart]))
        assert ((found >= 0) & (found < 1)).all()


def test_chance_left_out_is_not_used_up() -> None:
    chance, same = Chance.seeded(3, 3), Chance.seeded(3, 3)
    picked = chance.uniform(2, torch.tensor([2, 0]))
    rest = same.uniform(2)
    assert torch.equal(picked, rest[[2, 0]])
    assert torch.equal(chance.uniform(2)[1], rest[1])
    some = torch.tensor([True, False, True])
    assert torch.equal(Chance.seeded(3, 3).uniform(2, some), Chance.seeded(3, 3).uniform(2)[some])
    assert chance.uniform(2, torch.zeros(3, dtype=torch.bool)).shape == (0, 2)


def test_chance_of_chosen_rows_shares_their_generators() -> None:
    chance, same = Chance.seeded(5, 3), Chance.seeded(5, 3)
    part = chance.select(torch.tensor([1]))
    assert len(part) == 1
    first, second = same.uniform(2), same.uniform(2)
    assert torch.equal(part.uniform(2), first[[1]])
    assert torch.equal(chance.uniform(2)[1], second[1])


def test_seeds_and_rows_give_different_numbers() -> None:
    found = torch.cat([Chance.seeded(seed, range(8)).uniform(1) for seed in range(8)])
    assert found.unique().numel() == 64


def test_one_generator_serves_all_rows() -> None:
    chance = Chance(torch.Generator().manual_seed(0), rows=3)
    expected = torch.rand((3, 2), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(chance.uniform(2), expected)
    assert chance.uniform(2, torch.tensor([1])).shape == (1, 2)
    assert len(chance.select(torch.tensor([0, 2]))) == 2
    with pytest.raises(InputError, match=said("nn.generators")):
        Chance([torch.Generator(), torch.Generator()], rows=3)
