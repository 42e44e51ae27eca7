"""How far the target follows each member of an ensemble, seen while the ensemble decodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from drafttrain.decoding.loop import Output, decode
from drafttrain.decoding.measure import Prompts, Watch, unwatched
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Committed
from drafttrain.drafter.ensemble import Ensemble, EnsembleState
from drafttrain.errors import InputError
from drafttrain.flow import Proposal, Sampling
from drafttrain.nn.sampling import Policy
from drafttrain.target.model import Target
from drafttrain.tree.forest import Forest
from drafttrain.tree.share import Followed, Path
from drafttrain.tree.topology import Growth, Tree


def followed(
    target: Target,
    drafter: Ensemble,
    prompts: Prompts,
    tree: Growth,
    *,
    max_new_tokens: int,
    policy: Policy | None = None,
    batch: int = 8,
    seed: int = 0,
    stand_in: Target | None = None,
    watch: Watch = unwatched,
) -> list[Followed]:
    """Decode, and return for every round how far the text went along each member's own tree.

    Left out are rounds so near to the limit that they could not use the full depth of a tree, and
    an output's last round, which a stop token may have cut.

    Args:
        tree: a fixed shape, or a forest of them.
        stand_in: decodes instead of the target, see `target.replay`.
    Raises: InputError for trees of changing shape, in which a path of ranks means nothing.
    """
    watched = _Watched(target, members=drafter.without_memory().drafters)
    forest = watched.shaped(tree)
    if not isinstance(forest, Forest) or not all(isinstance(one, Tree) for one in forest.trees):
        raise InputError(f"{tree.title}: what members add is measured in trees of fixed shape")
    plan, found = Plan(forest, policy or Policy()), list[Followed]()
    for start in watch(range(0, len(prompts), batch), "batches decoded"):
        part = prompts[start : start + batch]
        watched.notes = []
        numbers = range(start, start + len(part))
        outputs, _ = decode(
            stand_in or target,
            watched,
            part,
            plan,
            max_new_tokens=max_new_tokens,
            seed=seed,
            row_numbers=numbers,
        )
        for row, output in enumerate(outputs):
            found += _rounds_of(row, output, watched.notes, max_new_tokens - 1 - forest.max_depth)
    return found


class _Watched(Ensemble):
    """An ensemble that notes what its members propose."""

    notes: list[_Note]

    def drafts(
        self,
        state: EnsembleState,
        committed: Committed,
        forest: Forest,
        policy: Policy,
        u: Tensor | None,
        sampling: Sampling,
    ) -> list[Proposal | None]:
        made = super().drafts(state, committed, forest, policy, u, sampling)
        self.notes.append(_Note(list(state.rows), forest, made))
        return made


class _Note:
    """What was proposed in one round."""

    def __init__(
        self, rows: list[int], forest: Forest, proposals: Sequence[Proposal | None]
    ) -> None:
        self.rows, self.forest = rows, forest
        self.proposals: list[list[Any] | None] = [
            None if one is None else _listed(one) for one in proposals
        ]

    def followed(self, row: int, text: Sequence[int]) -> Followed:
        """How far each member's tree goes along a text."""
        place = self.rows.index(row)
        found: list[Path] = []
        for tree, rows in zip(self.forest.trees, self.proposals, strict=True):
            at, depth, last = -1, 0, -1
            assert isinstance(tree, Tree)
            nodes = [] if rows is None else rows[place]
            # Parents come before their children, so that one pass goes as far as the text leads.
            for number, (token, parent, shape) in enumerate(nodes):
                if parent == at and depth < len(text) and token == text[depth]:
                    at, depth, last = number, depth + 1, shape
            found.append(tree.paths[last] if depth else ())
        return tuple(found)


def _listed(one: Proposal) -> list[Any]:
    """For each row (token, parent, node of the shape) of every real node."""
    places = one.places
    b, n = one.tokens.shape
    shapes = [list(range(n))] * b if places is None else places.tolist()
    counts = [n] * b if one.counts is None else one.counts.tolist()
    rows = zip(one.tokens.tolist(), one.parents.tolist(), shapes, counts, strict=True)
    return [
        list(zip(tokens[:c], parents[:c], shape[:c], strict=True))
        for tokens, parents, shape, c in rows
    ]


def _rounds_of(row: int, output: Output, notes: Sequence[_Note], latest: int) -> list[Followed]:
    """Of one output, all rounds but its last that began after at most `latest` tokens."""
    found: list[Followed] = []
    mine = [note for note in notes if row in note.rows]
    place = output.runs[0][0] if output.runs else 0
    for note, (emitted, _) in zip(mine, output.runs[1:-1], strict=False):
        if place > latest:
            break
        found.append(note.followed(row, output.ids[place:]))
        place += emitted
    return found
