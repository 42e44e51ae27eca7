"""A chain that ends by confidence: decided by the distribution, before the token is drawn."""

from __future__ import annotations

import inspect

import pytest
import torch

from drafttrain.errors import InputError
from drafttrain.flow import Sampling
from drafttrain.nn.sampling import Policy
from drafttrain.tree.confident import Confident, chain, goes_on, grow_confident
from drafttrain.tree.topology import Tree
from tests.tree.toy import Toy


@pytest.mark.parametrize("drawn", [True, False])
def test_each_row_ends_before_its_first_unsure_token(drawn: bool) -> None:
    toy, tree, policy = Toy(9), Confident(k=5, stop_below=0.55), Policy(1.0) if drawn else Policy()
    generator = torch.Generator().manual_seed(1)
    anchors = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    u = torch.rand(40, 5, generator=generator, dtype=torch.float64) if drawn else None
    found = grow_confident(
        toy, [], anchors[:, None], toy.candidates(anchors[:, None]), tree, policy, u
    )
    assert found.sampling is (Sampling.IID if drawn else Sampling.ONE_HOT)
    assert found.counts is not None and found.size == found.counts.max()
    assert set(found.counts.tolist()) >= {0, 1, 2, 5}
    for row, count in enumerate(found.counts.tolist()):
        path = [token - 1 for token in found.tokens[row].tolist()]
        for depth in range(min(count + 1, 5)):
            here = toy.log_probs(anchors[row], tuple(path[:depth])).exp()
            assert (here.max() >= 0.55) == (depth < count)
            if depth < count and not drawn:
                assert here.argmax() == path[depth]
            elif depth < count:
                torch.testing.assert_close(found.q[row, found.q_rows[row, depth], 1:].float(), here)
    apart = [
        grow_confident(
            toy,
            [],
            anchors[i : i + 1, None],
            toy.candidates(anchors[i : i + 1, None]),
            tree,
            policy,
            u[i : i + 1] if drawn else None,
        )
        for i in range(40)
    ]
    for row, one in enumerate(apart):
        assert one.size == found.counts[row] and torch.equal(
            one.tokens[0], found.tokens[row, : one.size]
        )
    assert toy.asked[:4] == [1] * 4


def test_the_decision_sees_no_token() -> None:
    assert list(inspect.signature(goes_on).parameters) == ["logits", "stop_below"]


def test_settings() -> None:
    assert chain(4) == chain(4, 0.0) == Tree.chain(4)
    assert chain(0, 0.5) == Tree.chain(0)
    tree = chain(4, 0.5)
    assert tree == Confident(k=4, stop_below=0.5)
    assert (tree.kind, tree.title, tree.is_chain, tree.size, tree.reads) == (
        "chain",
        "chain 4 above 0.5",
        True,
        4,
        4,
    )
    assert tree.within(2) == tree.capped(2) == Confident(k=2, stop_below=0.5)
    assert tree.capped(0) == Tree.chain(0)
    bad = (
        (-1, 0.5, "tree.k is -1"),
        (2, 1.0, "stop_below is 1.0"),
        (2, -0.1, "below"),
        (2, "a", "'a'"),
        (2, [], "below"),
    )
    for k, stop_below, said in bad:
        with pytest.raises(InputError, match=said):
            chain(k, stop_below)  # type: ignore[arg-type]
