"""The decoding loop: propose, verify, accept, commit, until a stop token or the limit; neither is
overrun.

Plain decoding is the same loop with an empty proposal, on the same cache: the yardstick of every
speed measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from drafttrain.decoding import rules
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Committed, Drafter
from drafttrain.drafter.inside import Inside
from drafttrain.drafter.remembered import remember_texts
from drafttrain.errors import InputError
from drafttrain.flow import Acceptance, Features, Proposal, Sampling, Tally
from drafttrain.nn.processing import Text
from drafttrain.nn.sampling import Chance, draw
from drafttrain.target.model import Target
from drafttrain.tree.candidates import paths_to
from drafttrain.tree.topology import ancestor_mask, depths_of


@dataclass
class Output:
    """What one row was given and what came of it."""

    ids: list[int] = field(default_factory=list)
    """Generated ids, a stop token included."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """(emitted, of these accepted drafts) of every target pass, the prefill first."""
    nodes: list[tuple[int, ...]] = field(default_factory=list)
    """For every pass but the prefill, the nodes of the plan's tree that those drafts were."""
    finish: str = "length"
    """"stop", "length" (the limit asked for) or "context" (the target's own)."""
    tally: Tally = field(default_factory=Tally)
    """This row's counts; seconds are kept for the whole batch."""


Listener = Callable[[int, list[int], int], None]
"""(row, newly emitted ids, how many of the first of them were drafted)."""
Ends = Callable[[int, list[int]], bool]
"""(row, what it has written so far, the newest token last): does its text end there?"""


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
        stop_ids: end behind any of these; None takes the target's own.
        ends: asked behind every token that is kept, in order; a text ends where it says so, as
            behind a stop token.
        seed, row_numbers: a row's chance depends on (seed, its number) alone; numbers default to 0,
            1, ...
    Returns: one Output per prompt, and the batch's Tally with seconds by stage.
    Raises: InputError for an empty prompt or one that leaves no room in the target's context.
    """
    return _Decoding(
        target, drafter, prompts, plan, max_new_tokens, stop_ids, seed, row_numbers, listener, ends
    ).run()


class _Clock:
    """Seconds by stage; an accelerator is waited for, so that a stage holds its own work."""

    def __init__(self, device: torch.device) -> None:
        self._wait = device.type != "cpu"
        self._device = device
        self.seconds = {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "host": 0.0}
        self._last = time.perf_counter()

    def mark(self, stage: str) -> None:
        if self._wait:
            torch.accelerator.synchronize(self._device)
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now


@dataclass(frozen=True)
class _Drafts:
    """What one round drafted for one row, down to the depth that the row can use."""

    size: int
    behind: bool
    """Whether the last accepted node, or the anchor, has children among them."""
    nodes: tuple[int, ...]
    """The accepted ones, also those that a stop token or the limit cuts off."""


class _Decoding:
    """One call of `decode`. Rows that finish leave the batch; the rest go on."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        prompts: Sequence[Sequence[int]],
        plan: Plan,
        limit: int,
        stop_ids: Sequence[int] | None,
        seed: int,
        row_numbers: Sequence[int] | None,
        listener: Listener | None,
        ends: Ends | None,
    ) -> None:
        if limit < 0:
            raise InputError(f"max_new_tokens is {limit}: give 0 or more")
        for number, prompt in enumerate(prompts):
            if not len(prompt):
                raise InputError(
                    f"prompt {number} is empty: at least one token is needed to decode from"
                )
            if len(prompt) >= target.context:
                raise InputError(
                    f"prompt {number} has {len(prompt)} tokens, the target's context holds "
                    f"{target.context}: shorten it"
                )
            if not 0 <= min(prompt) <= max(prompt) < target.vocab_size:
                raise InputError(
                    f"prompt {number} has an id outside the target's vocabulary "
                    f"0..{target.vocab_size - 1}"
                )
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
        self.prompts = [list(prompt) for prompt in prompts]
        self.stop = frozenset(target.stop_ids if stop_ids is None else stop_ids)
        self.listener, self.ends = listener, ends
        self.chance = Chance.seeded(
            seed, list(row_numbers) if row_numbers is not None else len(prompts)
        )
        self.outputs = [Output() for _ in prompts]
        self.limits = [min(limit, target.context - len(prompt)) for prompt in self.prompts]
        self.wanted = limit
        self.clock = _Clock(target.device)

    @torch.inference_mode()
    def run(self) -> tuple[list[Output], Tally]:
        self.rows = [row for row, limit in enumerate(self.limits) if limit > 0]
        """Number of the row behind each place of the batch."""
        if self.rows:
            self._prefill()
        while self.rows:
            self._round()
        if self.drafter:
            pairs = zip(self.prompts, self.outputs, strict=True)
            texts = [prompt + output.ids for prompt, output in pairs if output.ids]
            remember_texts(self.drafter, texts)
            self.clock.mark("host")
        total = Tally()
        for output in self.outputs:
            total += output.tally
        total.seconds = self.clock.seconds
        return self.outputs, total

    def _prefill(self) -> None:
        device = self.target.device
        prompts = [self.prompts[row] for row in self.rows]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        s = int(lengths.max())
        longest = max(len(self.prompts[row]) + self.limits[row] for row in self.rows)
        capacity = longest + self.plan.tree.size + 1
        if isinstance(self.drafter, Inside):
            capacity += self.plan.tree.reads
        ids = torch.tensor([prompt + [0] * (s - len(prompt)) for prompt in prompts], device=device)
        self.cache = self.target.new_cache(len(prompts), capacity)
        needs = self.drafter.needs if self.drafter else None
        out = self.target.step(ids, self.cache, layers=needs.layers if needs else ())
        self.cache.commit(lengths)
        places = torch.arange(len(prompts), device=device)
        logits = self.target.head(out.hidden[places, lengths - 1])  # b v
        if self.plan.policy.processes:
            behind = ids.new_empty(len(prompts), 1, 0)
            made, nothing = self.plan.policy.processed(logits[:, None], self._text(), behind)
            if bool(nothing.any()):
                raise self._nothing_left(int(nothing.any(1).nonzero()[0]))
            logits = made[:, 0]
        if self.plan.policy.greedy:
            self.anchor = logits.argmax(-1)
        else:
            self.anchor = draw(
                self.plan.policy.probs(logits), self.chance.uniform(1)[:, 0].to(device)
            )
        if self.drafter:
            room = max(self.plan.tree.size, self.plan.tree.reads)
            self.state = self.drafter.open(len(prompts), longest + room + 1)
            if isinstance(self.drafter, Inside):
                self.drafter.attach(self.state, self.cache)
            tokens = torch.cat((ids[:, 1:], ids[:, :1]), 1)
            tokens[places, lengths - 1] = self.anchor
            hidden = out.hidden if self.drafter.needs.last_hidden else None
            self.committed = Committed(
                Features(hidden, dict(out.layers)), tokens, lengths, first=ids[:, 0]
            )
        self.clock.mark("prefill")
        self._emit([[token] for token in self.anchor.tolist()], [0] * len(prompts))
        self.clock.mark("host")

    def _round(self) -> None:
        device, b = self.target.device, len(self.rows)
        # A round emits one token more than it accepts: drafts deeper than a row's use could only be
        # thrown away.
        use = [self.limits[row] - len(self.outputs[row].ids) - 1 for row in self.rows]
        policy, tree = self.plan.policy, self.plan.tree
        if policy.greedy and max(use) < tree.max_depth:
            # A sampled row keeps its whole tree, or its text would depend on how far its neighbours
            # have come.
            tree = tree.within(max(use))
        u = None if policy.greedy else self.chance.uniform(2 * self.plan.tree.size + 1).to(device)
        text = self._text() if policy.processes else None
        if self.drafter and tree.size:
            committed = self.committed if text is None else replace(self.committed, text=text)
            number = u[:, : tree.size] if u is not None and self.plan.draws else None
            proposal = self.drafter.propose(
                self.state, committed, tree, policy, number, self.plan.sampling
            )
        else:
            empty = torch.empty(b, 0, dtype=torch.int64, device=device)
            proposal = Proposal(empty, empty, Sampling.ONE_HOT)
        self.clock.mark("draft")

        ids = torch.cat((self.anchor[:, None], proposal.tokens), 1)  # b n+1
        depths = depths_of(proposal.parents, tree.max_depth)
        tree_mask = ancestor_mask(proposal.parents, tree.max_depth)
        needs = self.drafter.needs if self.drafter else None
        out = self.target.step(
            ids,
            self.cache,
            tree_mask=tree_mask,
            depths=torch.nn.functional.pad(depths, (1, 0)),
            layers=needs.layers if needs else (),
            partial_pass=proposal.partial_pass,
        )
        logits = self.target.head(out.hidden)  # b n+1 v
        nothing = None
        if text is not None:
            logits, nothing = policy.processed(
                logits, text, paths_to(proposal.tokens, tree_mask, depths, tree.max_depth)
            )
        self.clock.mark("verify")

        accepted = self._judge(logits, proposal, u)
        path_tokens = (
            proposal.tokens.gather(1, accepted.path.clamp_min(0))
            if proposal.size
            else proposal.tokens
        )
        drafted, behind = _drafted(proposal, depths, accepted, torch.tensor(use, device=device))
        nodes = accepted.path
        if proposal.places is not None:
            nodes = proposal.places.gather(1, nodes.clamp_min(0))
        # One answer of the device for all that the host wants to know.
        k = path_tokens.shape[1]
        head = torch.stack((accepted.count, accepted.next_token, drafted, behind.long()), 1)
        answer = torch.cat((head, path_tokens, nodes), 1).tolist()
        emitted = [[*row[4 : 4 + row[0]], row[1]] for row in answer]
        if nothing is not None and bool(nothing.any()):
            self._check_choices(nothing, accepted, emitted)
        drafts = [
            _Drafts(row[2], bool(row[3]), tuple(row[4 + k : 4 + k + row[0]])) for row in answer
        ]
        stays = self._emit(emitted, [row[0] for row in answer], drafts)
        if stays:
            self._commit(out.hidden, out.layers, accepted, path_tokens, stays)
        else:
            self.rows = []
        self.clock.mark("host")

    def _text(self) -> Text:
        rows = self.rows
        answers = [self.outputs[row].ids for row in rows]
        return Text.of(
            [self.prompts[row] for row in rows], answers, sorted(self.stop), self.target.device
        )

    def _check_choices(
        self, nothing: Tensor, accepted: Acceptance, emitted: list[list[int]]
    ) -> None:
        """Raise InputError if a token that counts was chosen where the policy leaves nothing to
        choose.

        Args:
            nothing: (b n+1) bool, where that is so; nodes that cannot be reached, and those behind
                a stop token, are allowed it.
        """
        path = torch.nn.functional.pad(accepted.path + 1, (1, 0)).clamp_min(0)  # b 1+k
        for place, empty in enumerate(nothing.gather(1, path).tolist()):
            new, row = emitted[place], self.rows[place]
            end = next((i + 1 for i, token in enumerate(new) if token in self.stop), len(new))
            if any(empty[: min(end, self.limits[row] - len(self.outputs[row].ids), len(new))]):
                raise self._nothing_left(place)

    def _nothing_left(self, place: int) -> InputError:
        return InputError(
            f"the policy leaves no token to choose in row {self.rows[place]}: logit_bias, "
            f"min_new_tokens and the processors "
            "together rule all out, or a processor gives what is no number; loosen one of them"
        )

    def _accept(self, logits: Tensor, proposal: Proposal, u: Tensor | None) -> Acceptance:
        if self.plan.policy.greedy:
            return rules.greedy(logits.argmax(-1), proposal)
        assert u is not None
        p = self.plan.policy.probs(logits)
        if not proposal.size:
            nothing = proposal.tokens
            return Acceptance(
                nothing,
                torch.zeros(len(p), dtype=torch.int64, device=p.device),
                draw(p[:, 0], u[:, -1]),
            )
        return rules.named(self.rule)(p, proposal, u[:, -(proposal.size + 1) :])

    def _judge(self, logits: Tensor, proposal: Proposal, u: Tensor | None) -> Acceptance:
        """Accept, rows of one size at a time: a rule never sees padding, and a row's numbers depend
        on its own size alone."""
        sizes = [proposal.size] if proposal.counts is None else proposal.counts.unique().tolist()
        if proposal.counts is None or sizes == [proposal.size]:
            return self._accept(logits, proposal, u)
        path = proposal.tokens.new_full(proposal.tokens.shape, -1)
        count, following = torch.zeros_like(proposal.counts), torch.zeros_like(proposal.counts)
        fallbacks = 0
        for size in sizes:
            rows = (proposal.counts == size).nonzero()[:, 0]
            some = self._accept(
                logits[rows, : size + 1], proposal.part(rows, size), None if u is None else u[rows]
            )
            path[rows, : some.path.shape[1]] = some.path
            count[rows], following[rows] = some.count, some.next_token
            fallbacks += some.fallbacks
        return Acceptance(path, count, following, fallbacks)

    def _emit(
        self, tokens: list[list[int]], counts: list[int], drafts: list[_Drafts] | None = None
    ) -> list[int]:
        """Cut at a stop token and at the limit, record, and return the places of the rows that go
        on.

        Args:
            drafts: None for the prefill, which is no round.
        """
        stays = []
        for place, row in enumerate(self.rows):
            output, new, accepted = self.outputs[row], tokens[place], counts[place]
            room = self.limits[row] - len(output.ids)
            end = next(
                (
                    i + 1
                    for i, token in enumerate(new[:room])
                    if token in self.stop or self._ends(row, new[: i + 1])
                ),
                None,
            )
            stopped, full = end is not None and end <= room, len(new) >= room
            if stopped:
                new, output.finish = new[:end], "stop"
            elif full:
                new, output.finish = (
                    new[:room],
                    "length" if self.limits[row] == self.wanted else "context",
                )
            # A round's last place is the target's own, so drafts deeper than room - 1 could not
            # count. They are there only because neighbours have more room, and a row's counts must
            # not depend on its neighbours.
            kept = min(accepted, len(new), room - 1)
            output.ids += new
            output.runs.append((len(new), kept))
            if drafts is not None:
                own = drafts[place]
                output.nodes.append(own.nodes[:kept])
                # A draft that was accepted and cut off leaves nothing to refuse, nor does a stop
                # token that was drafted.
                behind = own.behind and kept == accepted and not (stopped and len(new) == kept)
                _count(
                    output.tally,
                    min(self.plan.tree.max_depth, room - 1),
                    own.size,
                    kept,
                    len(new),
                    behind,
                )
            if self.listener:
                self.listener(row, new, kept)
            if not (stopped or full):
                stays.append(place)
        if drafts is None and len(stays) < len(self.rows):
            self._keep(stays)
        return stays

    def _ends(self, row: int, new: list[int]) -> bool:
        return self.ends is not None and self.ends(row, self.outputs[row].ids + new)

    def _commit(
        self,
        hidden: Tensor,
        layers: dict[int, Tensor],
        accepted: Acceptance,
        tokens: Tensor,
        stays: list[int],
    ) -> None:
        """Move the accepted entries together and hand the drafter the true features of anchor and
        accepted drafts."""
        counts = accepted.count
        kept = torch.nn.functional.pad(accepted.path + 1, (1, 0)).clamp_min(
            0
        )  # b 1+k, index among the new entries
        self.cache.commit(counts + 1, kept)
        self.anchor = accepted.next_token
        if self.drafter:
            kept = kept[:, : int(counts.max()) + 1]
            behind = torch.nn.functional.pad(tokens[:, : kept.shape[1] - 1], (0, 1))
            behind = behind.scatter(1, counts[:, None], accepted.next_token[:, None])
            read = hidden if self.drafter.needs.last_hidden else None
            self.committed = Committed(_gather(read, layers, kept), behind, counts + 1)
        if len(stays) < len(self.rows):
            self._keep(stays)

    def _keep(self, stays: list[int]) -> None:
        self.rows = [self.rows[place] for place in stays]
        if not stays:
            return
        places = torch.tensor(stays, device=self.target.device)
        self.chance = self.chance.select(places)
        self.cache.select(places)
        self.anchor = self.anchor[places]
        if self.drafter:
            self.drafter.select(self.state, places)
            committed = self.committed
            features = Features(
                None
                if committed.features.last_hidden is None
                else committed.features.last_hidden[places],
                {layer: value[places] for layer, value in committed.features.layers.items()},
            )
            first = None if committed.first is None else committed.first[places]
            self.committed = Committed(
                features, committed.tokens[places], committed.counts[places], first=first
            )


def _gather(hidden: Tensor | None, layers: dict[int, Tensor], kept: Tensor) -> Features:
    def pick(value: Tensor) -> Tensor:
        return value.gather(1, kept[:, :, None].expand(-1, -1, value.shape[-1]))

    return Features(
        None if hidden is None else pick(hidden),
        {layer: pick(value) for layer, value in layers.items()},
    )


def _drafted(
    proposal: Proposal, depths: Tensor, accepted: Acceptance, use: Tensor
) -> tuple[Tensor, Tensor]:
    """What every row's own tree holds down to the depth that the row can use.

    Args:
        depths: (b n) of the nodes.
        use: (b) deepest draft that could still be emitted.
    Returns: (b) int64 nodes; (b) bool, whether the last accepted one, or the anchor, has children
    among them.
    """
    usable = depths <= use[:, None]  # b n
    if proposal.counts is not None:
        usable &= torch.arange(proposal.size, device=depths.device) < proposal.counts[:, None]
    path = torch.nn.functional.pad(accepted.path, (1, 0), value=-1)  # b 1+k, behind the anchor
    last = path.gather(1, accepted.count[:, None])  # b 1
    return usable.sum(1), (usable & (proposal.parents == last)).any(1)


def _count(
    tally: Tally, depth: int, drafted: int, accepted: int, emitted: int, behind: bool
) -> None:
    """Count one round of one row.

    Args:
        depth: deepest place that this row's plan and limit allow.
        behind: whether a node behind the accepted ones was drafted and refused.
    """
    tally.rounds += 1
    tally.drafted += drafted
    tally.accepted += accepted
    tally.emitted += emitted
    for counts in (tally.offered, tally.kept):
        counts.extend([0] * (depth - len(counts)))
    for k in range(depth):
        if k < accepted:
            tally.offered[k] += 1
            tally.kept[k] += 1
        elif k == accepted and behind:
            tally.offered[k] += 1
