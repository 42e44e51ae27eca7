"""How often each head's j-th choice is right, on rows set aside, and the tree of the most
likely paths made from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafttrain.data.datamodule import ConversationData
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.heads import VocabularyHeads
from drafttrain.errors import InputError
from drafttrain.training.module import Source
from drafttrain.tree.search import sparse
from drafttrain.tree.topology import Tree, check_size

RANKS = 10
"""Choices of a head that a tree may use (Cai et al. 2024, arXiv:2401.10774, section 2.3.3)."""


def check_calibrated(nodes: int, drafter: Drafter, where: str) -> None:
    """Raise InputError if a drafter's heads cannot fill a tree of that many nodes. Worth calling
    before long work."""
    check_size(nodes, where)
    ranks, room = min(RANKS, drafter.choices), 0
    for depth in range(1, (drafter.max_depth or 0) + 1):
        room += ranks**depth
        if room >= nodes:
            return
    raise InputError(
        f"{where}={nodes}: the {ranks} best choices of {drafter.max_depth} heads fill {room} nodes "
        "at most"
    )


@torch.no_grad()
def head_accuracy(
    drafter: VocabularyHeads, data: ConversationData, source: Source, ranks: int = RANKS
) -> list[list[float]]:
    """Share of the text's tokens that are head k's j-th choice, teacher-forced, by head and rank.

    Every head's hits are divided by the comparisons made for it: the public code divides by the
    first head's count, and so underrates the deeper ones.
    """
    if not isinstance(drafter, VocabularyHeads):
        raise InputError(f"{type(drafter).__name__} has no heads to count hits of")
    ranks = min(ranks, drafter.choices)
    hits = torch.zeros(0)
    counts = torch.zeros(0)
    for place in range(len(data)):
        batch = data.batch([place])
        found, compared = drafter.hits(batch, source.features(batch), ranks)
        hits, counts = (found, compared) if not len(hits) else (hits + found, counts + compared)
    return (hits.double() / counts.clamp_min(1)[:, None]).tolist()


def calibrated(accuracies: Sequence[Sequence[float]], nodes: int) -> Tree:
    """The tree of that many drafts with the most likely paths. Ranks of a head are taken by falling
    accuracy: few counts may leave a later one ahead by chance."""
    return sparse([sorted(row, reverse=True) for row in accuracies], nodes)
