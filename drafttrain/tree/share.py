"""How the members of an ensemble share a budget of drafts: node by node to whoever adds most, by
what was measured.

Measured is, for every round of decoding, how far the target followed each member's own wide tree.
What smaller trees would have kept in the same rounds is then known exactly: a merged tree is
followed as far as the one that is followed furthest. Rounds would begin at other places with other
trees, which is not accounted for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from drafttrain.errors import InputError
from drafttrain.tree.forest import Forest
from drafttrain.tree.topology import Tree

Path = tuple[int, ...]
Followed = tuple[Path, ...]
"""Of one round, for each member the path of ranks that the target followed in its tree; () where it
refused all."""


def shared(rounds: Sequence[Followed], nodes: int) -> Forest:
    """Trees with at most `nodes` nodes together, chosen greedily.

    The next step always takes, of all paths that were followed somewhere, the one with the largest
    gain in kept drafts for each node that it needs: its ancestors, and on the way the siblings
    before them. It ends early where nothing adds anything.

    Raises: InputError if there is nothing to choose by.
    """
    if type(nodes) is not int or nodes < 1:
        raise InputError(f"{nodes} nodes to share: needs an integer of at least 1")
    if not rounds:
        raise InputError(
            "no round was decoded to share nodes by: give more prompts, or more tokens for each"
        )
    counts = Counter(rounds)
    trees: list[set[Path]] = [set() for _ in rounds[0]]
    while (room := nodes - sum(map(len, trees))) > 0:
        best: tuple[float, int, int, Path] | None = None
        now = kept(trees, counts)
        for member, tree in enumerate(trees):
            wanted = {
                one[member][:k] for one in counts for k in range(1, len(one[member]) + 1)
            } - tree
            for path in sorted(wanted):
                more = _needed(path) - tree
                if len(more) > room:
                    continue
                gain = kept([*trees[:member], tree | more, *trees[member + 1 :]], counts) - now
                value = (-gain / len(more), len(more), member, path)
                if gain and (best is None or value < best):
                    best = value
        if best is None:
            break
        _, _, member, path = best
        trees[member] |= _needed(path)
    return Forest(tuple(Tree.from_paths(tree) if tree else Tree.chain(0) for tree in trees))


def for_one(rounds: Sequence[Followed], nodes: int, member: int) -> Forest:
    """The same budget for one member, the others left out."""
    (tree,) = shared([(one[member],) for one in rounds], nodes).trees
    return Forest(
        tuple(tree if other == member else Tree.chain(0) for other in range(len(rounds[0])))
    )


def candidate_forests(rounds: Sequence[Followed], sizes: Iterable[int]) -> list[Forest]:
    """For every size the trees that share it, and that of each member by itself; each once, none
    without drafts."""
    found: dict[Forest, None] = {}
    for nodes in sizes:
        for forest in (
            shared(rounds, nodes),
            *(for_one(rounds, nodes, member) for member in range(len(rounds[0]))),
        ):
            found[forest] = None
    return [forest for forest in found if forest.size]


def expected(forest: Sequence[Tree], rounds: Sequence[Followed]) -> float:
    """Tokens that a round would have written with these trees, the target's own included."""
    return 1 + kept([set(tree.paths) for tree in forest], Counter(rounds)) / len(rounds)


def kept(trees: Sequence[set[Path]], counts: Counter[Followed]) -> int:
    """Drafts that would have been kept over all rounds."""
    total = 0
    for one, times in counts.items():
        total += times * max(_depth(path, tree) for path, tree in zip(one, trees, strict=True))
    return total


def _depth(path: Path, tree: set[Path]) -> int:
    return next((k for k in range(len(path)) if path[: k + 1] not in tree), len(path))


def _needed(path: Path) -> set[Path]:
    """The path, its ancestors, and the earlier siblings of each: a tree has no gaps."""
    return {(*path[:k], rank) for k in range(len(path)) for rank in range(path[k] + 1)}
