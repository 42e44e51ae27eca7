"""What ends decoding: values that are not finite, the target's or the drafter's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from drafttrain.decoding.record import Record
from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError
from drafttrain.flow import Proposal
from drafttrain.nn import finite
from drafttrain.target.model import Target
from drafttrain.tree.topology import ancestor_mask, depths_of


def check(
    usable: Tensor,
    target: Target,
    record: Record,
    rows: Sequence[int],
    proposal: Proposal | None = None,
) -> None:
    """Raise InputError where the target leaves no token to choose: its logits are not finite.

    Attention spreads NaN to all nodes of a tree, so what one draft gives ends the run, too.

    Args:
        usable: (b m) bool, can a token be chosen after each token of a pass?
        rows: number of the row at each place of the batch.
        proposal: the drafts that were read with the text.
    """
    if bool(usable.all()):
        return
    place = int((~usable).nonzero()[0, 0])
    ids, where = record.written(rows[place])
    found = finite.trace(target, ids)
    if found is None and proposal is not None:
        for draft in _paths(proposal, place):
            found = found or finite.trace(target, ids + draft)
        where += ", a draft after it" if found else ""
    raise finite.fault_of(target, found, where)


def of_drafter(drafter: Drafter, target: Target, record: Record, rows: Sequence[int]) -> InputError:
    """For scores of the drafter that are not finite in some row: the target is at fault where its
    own values are not, which the drafter reads."""
    texts = [record.written(row) for row in rows]
    for ids, where in texts:
        if found := finite.trace(target, ids):
            return finite.fault_of(target, found, where)
    where = texts[0][1] if len(texts) == 1 else f"one of {len(texts)} prompts with its answer"
    return finite.drafter_fault(drafter, drafter.dtype, where)


def _paths(proposal: Proposal, place: int) -> Iterable[list[int]]:
    """The tokens down to each node of a row."""
    parents = proposal.parents[place : place + 1]
    mask = ancestor_mask(parents, int(depths_of(parents, proposal.size).max()))[0, 1:, 1:]
    for node in range(proposal.size):
        yield proposal.tokens[place][mask[node]].tolist()
