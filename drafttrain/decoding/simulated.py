"""Acceptance at a temperature above 0, computed on texts that the target sampled at it.

**Why on such texts.** An exact rule writes texts with the target's distribution, so a text that the
target sampled is one that decoding might have written, with the same chance. Averages over texts of
what decoding does *given its text* are averages over decoding.

**A round, given the text.** Let a round start after the anchor y_s. What follows a round depends
on its tokens only, and after each kept draft the target's distribution holds again: so the chance
that the round keeps its first i drafts, given all of the text, is a product over places of the
chance that a place keeps the token that the text has there (`rules.given`; for the ratio rule
min(1, q(y_j) / p(y_j)), with p and q after the text's own tokens). Deterministic drafts, and those
of sample_and_match, which do not depend on the text's next tokens, are kept where the text has
them.

**Rounds.** W_s, the chance that a round starts after y_s, is 1 after the first token, and W_t =
sum_{s < t} W_s P(the round from s keeps t - s - 1 drafts): nothing is drawn to get from one round
to the next. Rounds are the sum of W; tokens are the text's. A draft k places after y_s counts as
kept with W_s P(k - 1 kept) times the chance that the place keeps any token at all, sum_v min(p, q)
for the ratio rule: the average over the text's next token of the chance that it is kept. This
leaves less to chance than the token itself, and needs that neither W_s nor whether the place counts
depends on that token: both are settled by the tokens before it.

Chance is left in two places, by a seed: which siblings were refused in trees drawn without
replacement, and which drafts sample_and_match is given. Every round has numbers of its own, and
what is added up is linear in each round's chances, so averages are right. tau and accept@k are
ratios of sums over texts, as those of decoding.

The drafter reads and drafts as in decoding; where drafts are drawn, it is asked for its
distributions after the text's own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.decoding.expected import Expected, Simulated
from drafttrain.decoding.measure import Watch, unwatched
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.rounds_given import Chances, Draws, Follows
from drafttrain.decoding.rules import guarantee_of
from drafttrain.decoding.texts import KeptText
from drafttrain.drafter.base import Committed, Drafter
from drafttrain.drafter.growing import Growing
from drafttrain.drafter.inside import Inside
from drafttrain.drafter.remembered import remember_texts, without_memory
from drafttrain.errors import InputError, NotFinite
from drafttrain.flow import Features
from drafttrain.nn import finite
from drafttrain.nn.sampling import Chance
from drafttrain.target.model import Target
from drafttrain.tree.confident import Confident
from drafttrain.tree.topology import Tree

_AT_ONCE = 1 << 26
"""Probabilities of the target that are held at one time: 256 MiB."""
_IMPOSSIBLE = 0.01
"""Share of tokens of probability 0 from which on texts are not taken for the target's."""


def cannot(plan: Plan, drafter: Drafter) -> str | None:
    """Why acceptance is not computed for a plan as this drafter carries it out; None where it
    is."""
    name = type(drafter).__name__
    if plan.misfit:
        return plan.misfit
    if not plan.tree.size:
        return "plain decoding drafts nothing"
    if plan.policy.greedy:
        return "at temperature 0 nothing is left to chance: decode"
    if plan.policy.processes:
        return "a policy that reads the text is decoded only"
    if guarantee_of(plan.rule_name) != "distribution":
        return (
            f"rule {plan.rule_name} writes other texts than the target's, so those of the target "
            "do not show what it keeps: decode, or give an exact rule"
        )
    if isinstance(drafter, Inside):
        return f"{name} drafts on the target's own cache, which is not kept: decode"
    if not _asks_along(plan):
        return None
    if not isinstance(drafter, Growing) or type(drafter).propose is not Growing.propose:
        return (
            f"{name} draws drafts in a way of its own, for which no chances are known: decode, or "
            "give rule=one_hot"
        )
    if not isinstance(plan.tree, Tree | Confident):
        return f"a {plan.tree.kind} tree of drawn drafts is decoded only"
    return None


def _asks_along(plan: Plan) -> bool:
    """Whether the drafter is asked for its distributions along the text, not for drafts."""
    return plan.draws and plan.rule_name != "sample_and_match"


@torch.inference_mode()
def simulate(
    target: Target,
    drafter: Drafter,
    texts: Sequence[KeptText],
    plan: Plan,
    *,
    max_new_tokens: int,
    batch: int = 8,
    seed: int = 0,
    watch: Watch = unwatched,
) -> Simulated:
    """Compute what decoding these texts with drafts keeps, see above.

    Args:
        target: serves its head only.
        texts: sampled with the plan's policy, and with the same `max_new_tokens`; a shorter one
            ended with a stop token.
        batch: texts side by side, fewer where vocabulary and texts are large.
    Raises: InputError for a plan that `cannot` be computed, texts that lack what the drafter
        reads or are not of such a target, and values that are not finite.
    """
    plan = plan.made_by(drafter)
    drafter = without_memory(drafter)
    drafter.check(plan.tree)
    reason = cannot(plan, drafter)
    if reason is not None:
        raise InputError(f"acceptance is not computed: {reason}")
    _check(texts, target, drafter, max_new_tokens)
    longest = max((len(text.answer) for text in texts), default=1)
    batch = max(1, min(batch, _AT_ONCE // (longest * target.vocab_size)))
    found, impossible = list[Expected](), 0
    for start in watch(range(0, len(texts), batch), "batches computed"):
        some = texts[start : start + batch]
        part = _Part(target, drafter, some, plan, start, max_new_tokens)
        found += part.run(seed)
        impossible += part.impossible
        remember_texts(drafter, [text.ids for text in some])
    places = sum(len(text.answer) for text in texts)
    if impossible > _IMPOSSIBLE * places:
        raise InputError(
            f"{impossible} of {places} tokens of the texts have probability 0 by their kept "
            "features: they were not sampled by this target with these settings; sample them again"
        )
    return Simulated(plan, found, impossible)


def _check(texts: Sequence[KeptText], target: Target, drafter: Drafter, limit: int) -> None:
    """Raise InputError for texts that cannot serve."""
    for number, text in enumerate(texts):
        if not text.prompt or not text.answer:
            raise InputError(f"text {number} has no prompt or no answer: needs both")
        if len(text.answer) > min(limit, target.context - len(text.prompt)):
            raise InputError(
                f"text {number} has an answer of {len(text.answer)} tokens, max_new_tokens is "
                f"{limit}: give the number that it was sampled with"
            )
        lacking = sorted(set(drafter.needs.layers) - text.layers.keys())
        if lacking:
            raise InputError(
                f"{type(drafter).__name__} reads layers {lacking} of the target, text {number} has "
                f"{sorted(text.layers)}: keep them when sampling"
            )
        rows = min(len(one) for one in (text.hidden, *text.layers.values()))
        if rows < len(text.ids) - 1:
            raise InputError(
                f"text {number} has features of {rows} tokens, needs {len(text.ids) - 1}: all but "
                "the last"
            )


class _Part:
    """Some texts side by side. Each row goes from one place where a round may start to the next."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        texts: Sequence[KeptText],
        plan: Plan,
        first: int,
        limit: int,
    ) -> None:
        """Args: first: number of the first text."""
        self.target, self.drafter, self.texts, self.plan = target, drafter, texts, plan
        self.first, device = first, target.device
        self.depth = plan.tree.max_depth
        self.prompts = torch.tensor([len(text.prompt) for text in texts], device=device)
        self.answers = torch.tensor([len(text.answer) for text in texts], device=device)
        self.limits = (target.context - self.prompts).clamp(max=limit)
        self.room = max(len(text.prompt) + limit for text in texts)
        s = max(len(text.ids) for text in texts)
        rows = [text.ids + text.ids[-1:] * (s - len(text.ids)) for text in texts]
        self.ids = torch.tensor(rows, device=device)  # b s
        self.hidden = _padded([text.hidden for text in texts], s - 1).to(device)
        self.layers = {
            layer: _padded([text.layers[layer] for text in texts], s - 1).to(device)
            for layer in drafter.needs.layers
        }
        self.probs, self.impossible = self._probs()

    def _probs(self) -> tuple[Tensor, int]:
        """(b a v) the target's distribution after answer token i, which judges token i + 1; and how
        many of these tokens it gives probability 0."""
        width = max(int(self.answers.max()) - 1, 1)
        b, v, impossible = len(self.texts), self.target.vocab_size, 0
        found = torch.empty(b, width, v, device=self.ids.device)
        for row, text in enumerate(self.texts):
            steps = torch.arange(width, device=self.ids.device).clamp(max=len(text.answer) - 1)
            places = (steps + len(text.prompt)).clamp(max=self.hidden.shape[1] - 1)
            logits = self.target.head(self.hidden[row, places])
            if not bool(finite.usable(logits).all()):
                origin = finite.trace(self.target, text.ids)
                raise finite.fault_of(self.target, origin, f"text {self.first + row}")
            found[row] = self.plan.policy.probs(logits)
            n = len(text.answer) - 1
            following = self.ids[row, len(text.prompt) + 1 : len(text.ids)]
            impossible += int((found[row, :n].gather(1, following[:, None]) <= 0).sum())
        return found, impossible

    def run(self, seed: int) -> list[Expected]:
        """The expected counts of every text."""
        b, device, depth = len(self.texts), self.ids.device, self.depth
        # A round may reach beyond the end by as much as it drafts.
        weights = torch.zeros(b, int(self.answers.max()) + depth + 2, dtype=torch.float64)
        weights = weights.to(device)
        weights[:, 0] = 1
        counts = torch.zeros(2, b, depth, dtype=torch.float64, device=device)
        capacity = self.room + max(self.plan.tree.size, self.plan.tree.reads) + 1
        state = self.drafter.open(b, capacity)
        # Never the numbers that a text was sampled with by the same seed: what is drawn here must
        # not know its tokens.
        chance = Chance.seeded(seed, [-1 - self.first - row for row in range(b)])
        kind = Draws if _asks_along(self.plan) else Follows
        rounds = kind(self.drafter, self.plan)
        rows = torch.arange(b, device=device)
        at, read = torch.zeros_like(rows), torch.zeros_like(rows)
        committed = None
        while True:
            places = (at < self.answers[rows] - 1).nonzero()[:, 0]
            if not len(places):
                break
            if len(places) < len(rows):
                rows, at, read = rows[places], at[places], read[places]
                self.drafter.select(state, places)
                chance = chance.select(places)
            committed = self._committed(rows, read, at, first=committed is None)
            read = self.prompts[rows] + at
            found = self._chances(rounds, state, committed, chance, rows, at)
            here = weights[rows, at]
            counts[0, rows] += here[:, None] * found.offered
            counts[1, rows] += here[:, None] * found.kept
            ends = (found.reached - torch.nn.functional.pad(found.reached[:, 1:], (0, 1))).clamp(0)
            for kept in range(depth + 1):
                weights[rows, at + 1 + kept] += here * ends[:, kept]
            at = _next(weights[rows], at)
        inside = torch.arange(weights.shape[1], device=device) < self.answers[:, None] - 1
        starts = (weights * inside).sum(1).tolist()
        offered, kept = counts.tolist()
        return [
            Expected(starts[row], len(text.answer) - 1, offered[row], kept[row])
            for row, text in enumerate(self.texts)
        ]

    def _committed(self, rows: Tensor, read: Tensor, at: Tensor, *, first: bool) -> Committed:
        """What the drafter has not read yet, up to the anchors.

        Args:
            read: (b) positions that it has read; at: (b) the anchors' places in the answers.
        """
        counts = self.prompts[rows] + at - read
        steps = torch.arange(int(counts.max()), device=read.device)
        places = (read[:, None] + steps).clamp(max=self.hidden.shape[1] - 1)  # b c
        own = rows[:, None], places
        features = Features(
            self.hidden[own] if self.drafter.needs.last_hidden else None,
            {layer: value[own] for layer, value in self.layers.items()},
        )
        tokens = self.ids[rows[:, None], places + 1]
        return Committed(features, tokens, counts, first=self.ids[rows, 0] if first else None)

    def _chances(
        self,
        rounds: Draws | Follows,
        state: object,
        committed: Committed,
        chance: Chance,
        rows: Tensor,
        at: Tensor,
    ) -> Chances:
        # As the loop counts: a draft of the last place before the limit is never of use, and none
        # is offered after a stop token.
        left = torch.minimum(self.answers[rows] - 1, self.limits[rows] - 2) - at
        steps = torch.arange(self.depth, device=at.device)
        places = (at[:, None] + steps).clamp(max=self.probs.shape[1] - 1)  # b k
        after = (self.prompts[rows][:, None] + places + 1).clamp(max=self.ids.shape[1] - 1)
        tokens = self.ids[rows[:, None], after]
        u = chance.uniform(rounds.numbers).to(at.device)
        usable = steps < left[:, None]
        try:
            return rounds.chances(
                state, committed, tokens, lambda k: self.probs[rows, places[:, k]], usable, u
            )
        except NotFinite as error:
            where = f"one of texts {self.first}..{self.first + len(self.texts) - 1}"
            raise finite.drafter_fault(self.drafter, self.drafter.dtype, where) from error


def _next(weights: Tensor, at: Tensor) -> Tensor:
    """(b) the first place after `at` where a round may start; the last one where there is none."""
    steps = torch.arange(weights.shape[1], device=at.device)
    possible = (weights > 0) & (steps > at[:, None])
    return torch.where(possible, steps, weights.shape[1] - 1).amin(1)


def _padded(values: Sequence[Tensor], s: int) -> Tensor:
    """(b s d) rows of any lengths, each filled up with its own last one."""
    rows = [value[:s] for value in values]
    return torch.stack([torch.cat((one, one[-1:].expand(s - len(one), -1))) for one in rows])
