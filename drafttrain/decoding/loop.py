"""The decoding loop: propose, verify, accept, emit, commit, until a stop token or the limit.

No text goes past either of them. Plain decoding is the same loop with an empty proposal, on the
same cache: the yardstick of every speed measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafttrain.decoding import faults
from drafttrain.decoding.clock import Clock
from drafttrain.decoding.counting import Drafts, usable_drafts
from drafttrain.decoding.judging import judge
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.record import Ends, Listener, Output, Record
from drafttrain.drafter.base import Committed, Drafter
from drafttrain.drafter.inside import Inside
from drafttrain.drafter.remembered import remember_texts
from drafttrain.errors import InputError, NotFinite
from drafttrain.flow import Acceptance, Features, Proposal, Sampling, Tally
from drafttrain.nn import finite
from drafttrain.nn.processing import Text
from drafttrain.nn.sampling import Chance, draw
from drafttrain.target.model import Pass, Target
from drafttrain.tree.candidates import paths_to
from drafttrain.tree.topology import Growth, ancestor_mask, depths_of


def decode(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int] | None = None,
    seed: int = 0,
    row_numbers: Sequence[int] | None = None,
    listener: Listener | None = None,
    ends: Ends | None = None,
) -> tuple[list[Output], Tally]:
    """Decode a batch of prompts of any lengths.

    Args:
        drafter: None decodes plainly.
        max_new_tokens: exact limit per row, a stop token included.
        stop_ids: end after any of these; None takes the target's own.
        ends: asked after every token that is kept, in order; a text ends where it says so, as
            after a stop token.
        seed, row_numbers: a row's chance depends only on (seed, its number); numbers default to 0,
            1, ...
    Returns: one Output per prompt, and the batch's Tally with seconds by stage.
    Raises: InputError for an empty prompt or one that leaves no room in the target's context, and
        for values of target or drafter that are not finite.
    """
    if max_new_tokens < 0:
        raise InputError(f"max_new_tokens is {max_new_tokens}: give 0 or more")
    record = Record(
        target,
        prompts,
        limit=max_new_tokens,
        stop=frozenset(target.stop_ids if stop_ids is None else stop_ids),
        numbers=range(len(prompts)) if row_numbers is None else list(row_numbers),
        listener=listener,
        ends=ends,
    )
    return _Decoding(target, drafter, plan, record, seed).run()


@dataclass(frozen=True)
class _Round:
    """What a round proposes, for every row of the batch."""

    tree: Growth
    proposal: Proposal
    numbers: Tensor | None
    """(b 2n+1) uniform numbers of the round, for drafting and judging; None at temperature 0."""
    text: Text | None
    """The committed text, for a policy that reads it."""
    use: list[int]
    """Per row, the deepest draft that it could still emit."""


@dataclass(frozen=True)
class _Verified:
    """What the target says of a proposal."""

    out: Pass
    said: Tensor
    """(b n+1) the tokens that it chooses at temperature 0; else (b n+1 v) logits, after the
    policy's processors."""
    depths: Tensor
    """(b n) of the nodes."""
    nothing: Tensor | None
    """(b n+1) bool, where the policy leaves nothing to choose; None for one that reads no text."""


@dataclass(frozen=True)
class _Accepted:
    """What the rule keeps of a proposal: on the device, and as the host reads it."""

    acceptance: Acceptance
    path_tokens: Tensor
    """(b k) ids of the accepted path."""
    emitted: list[list[int]]
    """Per row, the accepted drafts and the token that follows them."""
    drafts: list[Drafts]


class _Decoding:
    """One call of `decode`. Rows that finish leave the batch; the rest go on."""

    def __init__(
        self, target: Target, drafter: Drafter | None, plan: Plan, record: Record, seed: int
    ) -> None:
        plan = plan.made_by(drafter)
        self.target, self.plan = target, plan
        self.drafter = drafter if plan.tree.size else None
        if drafter is None and plan.tree.size:
            raise InputError(
                "a tree of drafts needs a drafter: give one, or Tree.chain(0) for plain decoding"
            )
        if self.drafter:
            self.drafter.check(plan.tree)
        self.rule = plan.rule_name
        self.record, self.chance = record, Chance.seeded(seed, record.numbers)
        self.layers = self.drafter.needs.layers if self.drafter else ()
        self.clock = Clock(target.device)

    @torch.inference_mode()
    def run(self) -> tuple[list[Output], Tally]:
        self.rows = [row for row, limit in enumerate(self.record.limits) if limit > 0]
        """Number of the row at each place of the batch."""
        if self.rows:
            self._prefill()
        while self.rows:
            self._round()
        if self.drafter:
            remember_texts(self.drafter, self.record.texts())
            self.clock.mark("host")
        total = self.record.tally()
        total.seconds = self.clock.seconds
        return self.record.outputs, total

    # --- the prompts ------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Read the prompts, choose each answer's first token, and open the drafter's state."""
        device = self.target.device
        prompts = [self.record.prompts[row] for row in self.rows]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        s = int(lengths.max())
        longest = max(len(self.record.prompts[row]) + self.record.limits[row] for row in self.rows)
        # Filled up with a token of its own: masked values that are not finite still spread.
        ids = torch.tensor([row + row[-1:] * (s - len(row)) for row in prompts], device=device)
        capacity = longest + self.plan.tree.size + 1
        if isinstance(self.drafter, Inside):
            capacity += self.plan.tree.reads
        self.cache = self.target.open(prompts, capacity)
        out = self.target.step(ids, self.cache, layers=self.layers)
        self.cache.commit(lengths)
        places = torch.arange(len(prompts), device=device)
        self.anchor = self._first(out.at(lengths - 1))
        if self.drafter:
            self._open(self.drafter, longest)
            tokens = torch.cat((ids[:, 1:], ids[:, :1]), 1)
            tokens[places, lengths - 1] = self.anchor
            hidden = out.hidden if self.drafter.needs.last_hidden else None
            self.committed = Committed(
                Features(hidden, dict(out.layers)), tokens, lengths, first=ids[:, 0]
            )
        self.clock.mark("prefill")
        self._keep(self._emit([[token] for token in self.anchor.tolist()]))
        self.clock.mark("host")

    def _first(self, last: Pass) -> Tensor:
        """(b) the first token of every answer, from the pass over its prompt's last token."""
        policy, text = self.plan.policy, None
        if policy.processes:
            text = self._text()
        no_drafts = torch.empty(len(self.rows), 1, 0, dtype=torch.int64, device=last.hidden.device)
        said, nothing = self._said(last, text, no_drafts)
        if nothing is not None and bool(nothing.any()):
            raise self._nothing_left(int(nothing.any(1).nonzero()[0]))
        if policy.greedy:
            return said[:, 0]
        return draw(policy.probs(said[:, 0]), self.chance.uniform(1)[:, 0].to(said.device))

    def _open(self, drafter: Drafter, longest: int) -> None:
        """Open the drafter's state, for texts of at most `longest` tokens."""
        room = max(self.plan.tree.size, self.plan.tree.reads)
        self.state = drafter.open(len(self.rows), longest + room + 1)
        if isinstance(drafter, Inside):
            drafter.attach(self.state, self.cache)

    # --- a round ----------------------------------------------------------------------------------

    def _round(self) -> None:
        """Propose, verify, accept, emit, commit."""
        proposed = self._propose()
        verified = self._verify(proposed)
        accepted = self._accept(proposed, verified)
        stays = self._emit(accepted.emitted, accepted.drafts)
        self._commit(verified.out, accepted, stays)
        self.clock.mark("host")

    def _propose(self) -> _Round:
        """Let the drafter grow a tree after every row's anchor, no deeper than can be of use."""
        device, b = self.target.device, len(self.rows)
        # A round emits one token more than it accepts: drafts deeper than a row's use could only be
        # thrown away.
        use = [self.record.room(row) - 1 for row in self.rows]
        policy, tree = self.plan.policy, self.plan.tree
        if policy.greedy and max(use) < tree.max_depth:
            # A sampled row keeps its complete tree, or its text would depend on how far its
            # neighbours have come.
            tree = tree.within(max(use))
        u = None if policy.greedy else self.chance.uniform(2 * self.plan.tree.size + 1).to(device)
        text = self._text() if policy.processes else None
        if self.drafter and tree.size:
            committed = self.committed if text is None else replace(self.committed, text=text)
            number = u[:, : tree.size] if u is not None and self.plan.draws else None
            try:
                proposal = self.drafter.propose(
                    self.state, committed, tree, policy, number, self.plan.sampling
                )
            except NotFinite as error:
                raise faults.of_drafter(
                    self.drafter, self.target, self.record, self.rows
                ) from error
        else:
            empty = torch.empty(b, 0, dtype=torch.int64, device=device)
            proposal = Proposal(empty, empty, Sampling.ONE_HOT)
        self.clock.mark("draft")
        return _Round(tree, proposal, u, text, use)

    def _verify(self, proposed: _Round) -> _Verified:
        """Run the target once over the anchor and all nodes, each of which sees its own path."""
        proposal, deepest = proposed.proposal, proposed.tree.max_depth
        depths = depths_of(proposal.parents, deepest)
        tree_mask = ancestor_mask(proposal.parents, deepest)
        out = self.target.step(
            torch.cat((self.anchor[:, None], proposal.tokens), 1),  # b n+1
            self.cache,
            tree_mask=tree_mask,
            depths=pad(depths, (1, 0)),
            layers=self.layers,
            partial_pass=proposal.partial_pass,
        )
        paths = None
        if proposed.text is not None:
            paths = paths_to(proposal.tokens, tree_mask, depths, deepest)
        said, nothing = self._said(out, proposed.text, paths, proposal)
        self.clock.mark("verify")
        return _Verified(out, said, depths, nothing)

    def _said(
        self, out: Pass, text: Text | None, paths: Tensor | None, proposal: Proposal | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """What the target says after each token of a pass, as `judge` takes it, and where the
        policy leaves nothing to choose.

        Args:
            text, paths: the committed text and (b s k) the drafts that lead to each token, for a
                policy that reads them; None for one that does not.
            proposal: the drafts that were read, for the words of an error.
        """
        policy, nothing = self.plan.policy, None
        if policy.greedy and text is None:
            said = self.target.choices(out)
            faults.check(said >= 0, self.target, self.record, self.rows, proposal)
            return said, None
        logits = self.target.head(out.hidden)
        faults.check(finite.usable(logits), self.target, self.record, self.rows, proposal)
        if text is not None and paths is not None:
            logits, nothing = policy.processed(logits, text, paths)
        return (logits.argmax(-1) if policy.greedy else logits), nothing

    def _accept(self, proposed: _Round, verified: _Verified) -> _Accepted:
        """Judge the drafts, and read in one answer of the device all that the host needs."""
        proposal = proposed.proposal
        found = judge(verified.said, proposal, proposed.numbers, self.plan.policy, self.rule)
        nodes, path_tokens = found.path, proposal.tokens
        if proposal.size:
            path_tokens = proposal.tokens.gather(1, found.path.clamp_min(0))
        if proposal.places is not None:
            nodes = proposal.places.gather(1, nodes.clamp_min(0))
        use = torch.tensor(proposed.use, device=self.target.device)
        drafted, has_next = usable_drafts(proposal, verified.depths, found, use)
        head = torch.stack((found.count, found.next_token, drafted, has_next.long()), 1)
        answer = torch.cat((head, path_tokens, nodes), 1).tolist()
        k = path_tokens.shape[1]
        emitted = [[*row[4 : 4 + row[0]], row[1]] for row in answer]
        if verified.nothing is not None and bool(verified.nothing.any()):
            self._check_choices(verified.nothing, found, emitted)
        drafts = [
            Drafts(row[2], bool(row[3]), tuple(row[4 + k : 4 + k + row[0]])) for row in answer
        ]
        return _Accepted(found, path_tokens, emitted, drafts)

    def _emit(self, tokens: list[list[int]], drafts: list[Drafts] | None = None) -> list[int]:
        """Record the new tokens, up to a stop token or the limit; the places of the rows that go
        on.

        Args:
            tokens: per row, accepted drafts and the token that follows them.
            drafts: None for the prefill, which is no round.
        """
        deepest = self.plan.tree.max_depth
        stays = []
        for place, row in enumerate(self.rows):
            own = None if drafts is None else drafts[place]
            if self.record.emit(row, tokens[place], own, deepest):
                stays.append(place)
        return stays

    def _commit(self, out: Pass, accepted: _Accepted, stays: list[int]) -> None:
        """Move the accepted entries together, note the true features of anchor and accepted drafts
        for the drafter, and let finished rows go."""
        if not stays:
            self.rows = []
            return
        found = accepted.acceptance
        # b 1+k, index among the new entries
        kept = pad(found.path + 1, (1, 0)).clamp_min(0)
        self.cache.commit(found.count + 1, kept)
        self.anchor = found.next_token
        if self.drafter:
            kept = kept[:, : int(found.count.max()) + 1]
            tokens = pad(accepted.path_tokens[:, : kept.shape[1] - 1], (0, 1))
            tokens = tokens.scatter(1, found.count[:, None], found.next_token[:, None])
            hidden = out.hidden if self.drafter.needs.last_hidden else None
            self.committed = Committed(_gather(hidden, out.layers, kept), tokens, found.count + 1)
        self._keep(stays)

    def _keep(self, stays: list[int]) -> None:
        """Keep only some places of the batch."""
        if len(stays) == len(self.rows):
            return
        self.rows = [self.rows[place] for place in stays]
        if not stays:
            return
        places = torch.tensor(stays, device=self.target.device)
        self.chance = self.chance.select(places)
        self.cache.select(places)
        self.anchor = self.anchor[places]
        if self.drafter:
            self.drafter.select(self.state, places)
            self.committed = _rows_of(self.committed, places)

    # --- policies that read the text --------------------------------------------------------------

    def _text(self) -> Text:
        return self.record.text(self.rows, self.target.device)

    def _check_choices(self, nothing: Tensor, found: Acceptance, emitted: list[list[int]]) -> None:
        """Raise InputError if a token that counts was chosen where the policy leaves nothing to
        choose.

        Args:
            nothing: (b n+1) bool, where that is so; nodes that cannot be reached, and those after
                a stop token, are allowed it.
        """
        path = pad(found.path + 1, (1, 0)).clamp_min(0)  # b 1+k
        for place, empty in enumerate(nothing.gather(1, path).tolist()):
            new, row, stop = emitted[place], self.rows[place], self.record.stop
            end = next((i + 1 for i, token in enumerate(new) if token in stop), len(new))
            if any(empty[: min(end, self.record.room(row), len(new))]):
                raise self._nothing_left(place)

    def _nothing_left(self, place: int) -> InputError:
        return InputError(
            f"the policy leaves no token to choose in row {self.rows[place]}: logit_bias, "
            "min_new_tokens and the processors together rule all out, or a processor gives what "
            "is no number; loosen one of them"
        )


def _gather(hidden: Tensor | None, layers: dict[int, Tensor], kept: Tensor) -> Features:
    """The features of some places of a pass, (b s)."""

    def pick(value: Tensor) -> Tensor:
        return value.gather(1, kept[:, :, None].expand(-1, -1, value.shape[-1]))

    return Features(
        None if hidden is None else pick(hidden),
        {layer: pick(value) for layer, value in layers.items()},
    )


def _rows_of(committed: Committed, places: Tensor) -> Committed:
    """Only some rows of what became true."""
    hidden, first = committed.features.last_hidden, committed.first
    features = Features(
        None if hidden is None else hidden[places],
        {layer: value[places] for layer, value in committed.features.layers.items()},
    )
    return Committed(
        features,
        committed.tokens[places],
        committed.counts[places],
        first=None if first is None else first[places],
    )
