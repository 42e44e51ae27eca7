"""Trees filled from continuations at hand: which become nodes, and that none is made up."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from drafttrain.flow import Sampling
from drafttrain.tree.confident import Confident
from drafttrain.tree.copied import Copied, copied, proposal_of
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.topology import Growth, Tree

Trie = dict[int, tuple[float, "Trie"]]


class Known:
    """A trie of continuations: token to share and what follows, in the order of their ranks."""

    def children(self, node: Trie, most: int) -> list[tuple[int, float, Trie]]:
        return [(token, share, below) for token, (share, below) in node.items()][:most]


TRIE: Trie = {
    5: (0.5, {6: (0.75, {7: (1.0, {})}), 8: (0.25, {})}),
    9: (0.3, {5: (1.0, {5: (1.0, {5: (1.0, {})})})}),
    4: (0.2, {}),
}


def tree_of(found: Copied) -> tuple[list[int], list[int], list[int]]:
    return found.tokens, found.parents, found.places


@pytest.mark.parametrize(
    ("tree", "tokens", "parents", "places"),
    [
        (Tree.chain(2), [5, 6], [-1, 0], [0, 1]),
        (Tree.chain(9), [5, 6, 7], [-1, 0, 1], [0, 1, 2]),
        (Tree.expansion([2, 1, 1]), [5, 9, 6, 5, 7, 5], [-1, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]),
        # The third child has no children, the first has two of the three that were asked for.
        (Tree.expansion([4, 3]), [5, 9, 4, 6, 8, 5], [-1, -1, -1, 0, 0, 1], [0, 1, 2, 4, 5, 7]),
        (Tree.chain(0), [], [], []),
        (Confident(k=9, stop_below=0.6), [], [], []),
        (Confident(k=9, stop_below=0.5), [5, 6, 7], [-1, 0, 1], [0, 1, 2]),
        (Confident(k=2, stop_below=0.1), [5, 6], [-1, 0], [0, 1]),
        # 5: .5, 5 6: .375, 5 6 7: .375, 9: .3 and all behind it: .3, 4: .2, 5 8: .125
        (Dynamic(depth=3, top_k=3, total=5), [5, 6, 7, 9, 5], [-1, 0, 1, -1, 3], [0, 1, 2, 3, 4]),
        (
            Dynamic(depth=2, top_k=3, total=12),
            [5, 6, 9, 5, 4, 8],
            [-1, 0, -1, 2, -1, 0],
            [0, 1, 2, 3, 4, 5],
        ),
        (Dynamic(depth=2, top_k=1, total=2), [5, 6], [-1, 0], [0, 1]),
    ],
)
def test_continuations_become_nodes(
    tree: Growth, tokens: list[int], parents: list[int], places: list[int]
) -> None:
    assert tree_of(copied(Known(), TRIE, tree)) == (tokens, parents, places)
    assert tree_of(copied(Known(), None, tree)) == ([], [], []), "no match, no drafts"


def test_a_growth_that_nobody_knows_is_not_guessed() -> None:
    with pytest.raises(TypeError, match="no way to copy"):
        copied(Known(), TRIE, object())  # type: ignore[arg-type]


def random_trie(chance: random.Random, depth: int) -> Trie:
    tokens = chance.sample(range(20), chance.randint(0, 4)) if depth else []
    weights = sorted((chance.randint(1, 9) for _ in tokens), reverse=True)
    return {
        t: (w / sum(weights), random_trie(chance, depth - 1))
        for t, w in zip(tokens, weights, strict=True)
    }


def every_path(
    trie: Trie, value: float, path: tuple[int, ...], top_k: int
) -> list[tuple[float, tuple[int, ...]]]:
    found = []
    for token, (share, below) in itertools.islice(trie.items(), top_k):
        found += [
            (value * share, (*path, token)),
            *every_path(below, value * share, (*path, token), top_k),
        ]
    return found


def test_a_dynamic_tree_holds_the_most_valuable_paths() -> None:
    """Of all paths, found by walking everything, those of the largest products; among equals the
    shallower."""
    chance = random.Random(0)
    for _ in range(200):
        trie = random_trie(chance, 4)
        depth = chance.randint(1, 4)
        tree = Dynamic(depth=depth, top_k=3, total=chance.randint(depth, 3 + (depth - 1) * 9))
        found = copied(Known(), trie, tree)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(found.tokens, found.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        known = [
            (value, path) for value, path in every_path(trie, 1.0, (), 3) if len(path) <= tree.depth
        ]
        assert len(set(paths)) == len(paths) == min(tree.total, len(known))
        values = {path: value for value, path in known}
        best = sorted((-value, len(path)) for value, path in known)[: tree.total]
        kept = sorted((-values[path], len(path)) for path in paths)
        assert [depth for _, depth in kept] == [depth for _, depth in best]
        assert [value for value, _ in kept] == pytest.approx([value for value, _ in best])


def test_rows_of_different_sizes_make_one_proposal() -> None:
    rows = [
        copied(Known(), TRIE, tree)
        for tree in (Tree.chain(3), Tree.chain(0), Tree.expansion([4, 3]))
    ]
    found = proposal_of(rows, torch.device("cpu"))
    assert (
        found.sampling is Sampling.ONE_HOT
        and found.size == 6
        and found.counts is not None
        and found.places is not None
    )
    assert found.counts.tolist() == [3, 0, 6]
    assert found.tokens.tolist() == [[5, 6, 7, 0, 0, 0], [0] * 6, [5, 9, 4, 6, 8, 5]]
    assert found.parents.tolist() == [[-1, 0, 1, -1, -1, -1], [-1] * 6, [-1, -1, -1, 0, 0, 1]]
    assert found.places[2].tolist() == [0, 1, 2, 4, 5, 7]
    empty = proposal_of([Copied(), Copied()], torch.device("cpu"))
    assert empty.tokens.shape == empty.parents.shape == (2, 0) and empty.tokens.dtype == torch.int64
