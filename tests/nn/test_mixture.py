"""A mixture of losses in chunks against the direct computation."""

from __future__ import annotations

import pytest
import torch

from drafttrain.errors import InputError
from drafttrain.nn import losses
from drafttrain.nn.mixture import TEXT, Mixture, is_best, mixed
from tests.messages import said

WEIGHTS = {
    TEXT: 0.3,
    "forward_kl": 0.5,
    "reverse_kl": 1.5,
    "jsd": 2.0,
    "total_variation": 0.7,
    "acceptance_log": 0.0,
}


def direct(
    logits: torch.Tensor, goal: torch.Tensor, labels: torch.Tensor, mixture: Mixture
) -> dict[str, torch.Tensor]:
    p, q = goal.softmax(-1), logits.softmax(-1)
    m = mixture.beta * p + (1 - mixture.beta) * q
    known = labels >= 0
    values = {
        TEXT: -(q.gather(1, labels.clamp_min(0)[:, None])[:, 0].log() * known),
        "forward_kl": (p * (p / q).log()).sum(-1),
        "reverse_kl": (q * (q / p).log()).sum(-1),
        "jsd": mixture.beta * (p * (p / m).log()).sum(-1)
        + (1 - mixture.beta) * (q * (q / m).log()).sum(-1),
        "total_variation": (p - q).abs().sum(-1) / 2,
    }
    return {name: values[name].sum() for name in mixture.names}


def test_the_label_is_best_where_no_token_is_more_likely() -> None:
    logits = torch.tensor([[2.0, 1.0], [1.0, 2.0], [3.0, 3.0], [5.0, 1.0]])
    assert is_best(logits, torch.tensor([0, 0, 1, -1])).tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("beta", [0.5, 0.1, 0.9])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_values_and_gradients_are_those_of_the_direct_computation(chunk: int, beta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    draft, frozen = (torch.randn(13, d, generator=generator) for d in (5, 4))
    hidden, teacher = torch.randn(7, 5, generator=generator), torch.randn(7, 4, generator=generator)
    labels = torch.tensor([0, 3, -1, 12, 5, -1, 7])
    mixture = Mixture(WEIGHTS, beta)
    assert mixture.names == (TEXT, "forward_kl", "reverse_kl", "jsd", "total_variation")

    one, weight = hidden.clone().requires_grad_(), draft.clone().requires_grad_()
    parts = direct(one @ weight.T, teacher @ frozen.T, labels, mixture)
    expected = torch.stack([WEIGHTS[name] * value for name, value in parts.items()]).sum()
    (0.3 * expected).backward()

    other, mine = hidden.clone().requires_grad_(), draft.clone().requires_grad_()
    found = mixed(
        other,
        labels,
        lambda h: h @ mine.T,
        mixture,
        teacher=teacher,
        teacher_head=lambda h: h @ frozen.T,
        trained=[mine],
        chunk=chunk,
    )
    (0.3 * found.total).backward()
    torch.testing.assert_close(found.total, expected)
    assert found.sums.keys() == parts.keys()
    for name, value in parts.items():
        torch.testing.assert_close(found.sums[name], value.detach())
    assert other.grad is not None and mine.grad is not None
    torch.testing.assert_close(other.grad, one.grad)
    torch.testing.assert_close(mine.grad, weight.grad)
    assert torch.equal(found.choices, (hidden @ draft.T).argmax(-1))
    with torch.no_grad():
        calm = mixed(
            other,
            labels,
            lambda h: h @ mine.T,
            mixture,
            teacher=teacher,
            teacher_head=lambda h: h @ frozen.T,
            chunk=chunk,
        )
    torch.testing.assert_close(calm.total, expected.detach())
    assert not calm.total.requires_grad


def test_positions_may_count_differently() -> None:
    """Only in the total and its gradient: the sums of single losses are plain ones."""
    generator = torch.Generator().manual_seed(1)
    hidden, goal = (torch.randn(5, 6, generator=generator) for _ in range(2))
    labels, weights = torch.tensor([0, 3, -1, 5, 2]), torch.tensor([0.5, 0.0, 2.0, 1.0, 0.25])
    mixture = Mixture({TEXT: 0.5, "forward_kl": 2.0})
    one = hidden.clone().requires_grad_()
    text = losses.cross_entropy(one, labels.clamp_min(0)) * (labels >= 0)
    divergence = losses.forward_kl(one, goal)
    expected = (weights * (0.5 * text + 2.0 * divergence)).sum()
    expected.backward()
    other = hidden.clone().requires_grad_()
    found = mixed(
        other,
        labels,
        lambda h: h,
        mixture,
        teacher=goal,
        teacher_head=lambda h: h,
        weights=weights,
        chunk=2,
    )
    found.total.backward()
    torch.testing.assert_close(found.total, expected)
    assert one.grad is not None and other.grad is not None
    torch.testing.assert_close(other.grad, one.grad)
    torch.testing.assert_close(found.sums[TEXT], text.detach().sum())
    torch.testing.assert_close(found.sums["forward_kl"], divergence.detach().sum())


def test_the_text_needs_no_distribution_of_the_target() -> None:
    mixture = Mixture({TEXT: 1.0, "forward_kl": 0.0})
    assert not mixture.reads_target_probs and mixture.reads_text
    hidden = torch.randn(4, 6, requires_grad=True)
    found = mixed(hidden, torch.tensor([0, 1, -1, 5]), lambda h: h, mixture)
    torch.testing.assert_close(
        found.total, losses.cross_entropy(hidden, torch.tensor([0, 1, 0, 5]))[[0, 1, 3]].sum()
    )
    with pytest.raises(ValueError, match=said("nn.no_teacher")):
        mixed(hidden, torch.zeros(4, dtype=torch.int64), lambda h: h, Mixture({"forward_kl": 1.0}))


def test_no_positions_give_zero() -> None:
    hidden = torch.zeros(0, 4, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.int64)
    found = mixed(
        hidden,
        nothing,
        lambda h: h,
        Mixture({"reverse_kl": 1.0}),
        teacher=torch.zeros(0, 4),
        teacher_head=lambda h: h,
    )
    found.total.backward()
    assert (
        float(found.total.detach()) == 0.0
        and found.choices.shape == (0,)
        and hidden.grad is not None
    )


@pytest.mark.parametrize(
    ("weights", "beta", "named"),
    [
        ({"mse": 1.0}, 0.5, "loss mse"),
        ({}, 0.5, said("nn.no_weight")),
        ({"jsd": 0.0}, 0.5, said("nn.no_weight")),
        ({"jsd": float("nan")}, 0.5, "jsd=nan"),
        ({"jsd": True}, 0.5, "jsd=True"),
        ({"jsd": "much"}, 0.5, "jsd=much"),
        ([("jsd", 1.0)], 0.5, r"loss=\["),
        ({"jsd": 1.0}, 0.0, "beta=0.0"),
        ({"jsd": 1.0}, 1.0, "beta=1.0"),
    ],
)
def test_bad_mixtures_are_refused(weights: dict[str, float], beta: float, named: str) -> None:
    with pytest.raises(InputError, match=named):
        Mixture(weights, beta)
