"""EAGLE-2's tree equals its brute-force twin, row by row; nothing in it can be drawn."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import Tensor

from drafttrain.errors import InputError
from drafttrain.flow import Sampling
from drafttrain.nn.sampling import Policy
from drafttrain.tree.dynamic import Dynamic, grow_dynamic
from drafttrain.tree.growth import grow
from drafttrain.tree.topology import Tree
from tests.messages import said
from tests.tree.toy import Path, Toy


def twin(toy: Toy, anchor: Tensor, depth: int, k: int, total: int) -> dict[Path, float]:
    """{path of draft ids: value} by the words of the paper: expand by value, rerank all, the
    shallower first among equals."""
    pool: dict[Path, float] = {}
    level: list[Path] = [()]
    for _ in range(depth):
        level_values: dict[Path, float] = {}
        for path in level:
            found = toy.log_probs(anchor, path).topk(k)
            for value, token in zip(found.values.tolist(), found.indices.tolist(), strict=True):
                level_values[(*path, token)] = pool.get(path, 0.0) + value
        pool |= level_values
        level = sorted(level_values, key=lambda path: -level_values[path])[:k]
    kept = sorted(pool, key=lambda path: (-pool[path], len(path)))[:total]
    return {path: pool[path] for path in kept}


def grown(toy: Toy, anchors: Tensor, tree: Dynamic) -> list[list[Path]]:
    """Paths of draft ids of every row's nodes, in index order."""
    found = grow_dynamic(toy, [], anchors[:, None], toy.candidates(anchors[:, None]), tree)
    assert found.sampling is Sampling.ONE_HOT and found.q is None and found.size == tree.size
    rows = []
    for tokens, parents in zip((found.tokens - 1).tolist(), found.parents.tolist(), strict=True):
        paths: list[Path] = []
        for place, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            assert -1 <= parent < place, "a parent is before its children, so it was kept"
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        rows.append(paths)
    return rows


@pytest.mark.parametrize(
    ("depth", "k", "total"), [(1, 3, 2), (2, 2, 6), (3, 1, 3), (4, 4, 12), (5, 3, 5), (6, 3, 30)]
)
@pytest.mark.parametrize("scale", [0.3, 2.0, 8.0])
def test_every_rows_tree_is_the_papers(depth: int, k: int, total: int, scale: float) -> None:
    toy = Toy(9, scale=scale)
    anchors = torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = grown(toy, anchors, Dynamic(depth=depth, top_k=k, total=total))
    for paths, anchor in zip(rows, anchors, strict=True):
        assert len(set(paths)) == total
        expected = twin(toy, anchor, depth, k, total)
        values = sorted(expected.values())
        if values == sorted(set(values)):
            assert set(paths) == set(expected)
    assert toy.asked == [k] * (depth - 1), "one pass of the drafter for each level but the first"
    if (total, scale) == (12, 8.0):
        assert len({tuple(len(path) for path in paths) for paths in rows}) > 1, (
            "rows differ in shape"
        )


def test_a_child_as_sure_as_its_parent_never_stays_without_it() -> None:
    toy = Toy(6, scale=400.0)  # probabilities round to 1 and values to 0
    anchors = torch.randn(64, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    values = [toy.log_probs(anchor, ()).max().item() for anchor in anchors]
    assert values.count(0.0) > 32
    for total in (4, 5, 7):
        grown(toy, anchors, Dynamic(depth=4, top_k=3, total=total))


def test_siblings_are_by_falling_probability() -> None:
    toy = Toy(9)
    anchors = torch.randn(4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for paths, anchor in zip(
        grown(toy, anchors, Dynamic(depth=3, top_k=4, total=20)), anchors, strict=True
    ):
        for above in {path[:-1] for path in paths}:
            here = toy.log_probs(anchor, above)
            children = [here[path[-1]].item() for path in paths if path[:-1] == above]
            assert children == sorted(children, reverse=True)


def test_its_tokens_cannot_be_drawn() -> None:
    """The values of nodes decide which stay: with drawn tokens that would be pruning by what was
    drawn."""
    assert not {"u", "policy", "generator", "chance"} & set(
        inspect.signature(grow_dynamic).parameters
    )
    toy, tree = Toy(9), Dynamic(depth=2, top_k=2, total=4)
    hidden = torch.zeros(1, 1, 6, dtype=torch.float64)
    with pytest.raises(InputError, match=said("tree.draws_none")):
        grow(toy, [], hidden, toy.candidates(hidden), tree, Policy(1.0), torch.zeros(1, 4))


def test_budget() -> None:
    paper = Dynamic(depth=6, top_k=10, total=60)
    assert (paper.candidates, paper.size, paper.max_depth, paper.max_children, paper.reads) == (
        510,
        60,
        6,
        10,
        50,
    )
    assert (paper.kind, paper.title, paper.is_chain, paper.can_draw) == (
        "dynamic",
        "dynamic 6x10x60",
        False,
        False,
    )
    assert paper.capped(2) == Dynamic(depth=2, top_k=10, total=60)
    assert paper.capped(1) == Dynamic(depth=1, top_k=10, total=10)
    assert paper.capped(9) == paper.within(3) == paper
    assert paper.capped(0) == paper.within(0) == Tree.chain(0)
    assert Dynamic(depth=3, top_k=1, total=3).is_chain
    assert paper.spec() == {"growth": "dynamic", "depth": 6, "top_k": 10, "total": 60}
    assert math.isclose(Dynamic(depth=8, top_k=10, total=59).candidates, 710)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"depth": 0, "top_k": 2, "total": 2}, "tree.depth is 0"),
        ({"depth": 2, "top_k": 2.5, "total": 4}, "tree.top_k is 2.5"),
        ({"depth": 2, "top_k": 2, "total": True}, "tree.total is True"),
        ({"depth": 5, "top_k": 8, "total": 4}, "tree.total is 4, below tree.depth 5.*give total=5"),
        ({"depth": 2, "top_k": 3, "total": 13}, "only 12 candidates"),
    ],
)
def test_impossible_budgets_are_refused(settings: dict, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Dynamic(**settings)
