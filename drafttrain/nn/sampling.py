"""Logits to probabilities, probabilities to tokens, and the only source of chance.

The tensor that `Policy.probs` returns is the one to draw from *and* the one to give to an
acceptance rule: a rule is exact only for the distribution that the token really came from
(Leviathan et al. 2023, arXiv:2211.17192, section 2.2).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from drafttrain.errors import InputError, NotFinite
from drafttrain.later import torch
from drafttrain.nn.processing import Processor, Text, biased, penalised, processed, unfinished

if TYPE_CHECKING:
    from torch import Tensor

_COLDEST = 1e-30
_HEAD = 512
"""Largest probabilities looked at first by top-p; a full sort follows only where they hold too
little."""


def check_seed(seed: object) -> int:
    """Raises: InputError for what is not an integer from 0 to 2^63 - 1."""
    if type(seed) is not int or not 0 <= seed < 1 << 63:
        raise InputError(f"seed={seed}: needs an integer of at least 0 and below 2^63")
    return seed


def fresh_seed() -> int:
    """One that nobody gave: another in every call. As in transformers, torch.manual_seed settles
    it."""
    return int(torch.randint(1 << 62, (1,)))


@dataclass(frozen=True)
class Policy:
    """How a distribution is made from logits, in the order of transformers: bias, penalty, least
    length, processors; then temperature, top-k, top-p, min-p. The defaults mean greedy decoding.
    """

    temperature: float = 0.0
    """0 is greedy: the argmax is compared, nothing is drawn."""
    top_k: int = 0
    """Keep this many of the most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest of the most likely tokens whose probabilities reach this sum; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the most likely one (arXiv:2407.01082); 0
    keeps all."""
    repetition_penalty: float = 1.0
    """Makes tokens that the text holds, prompt included, less likely (above 1) or more likely
    (below 1)."""
    min_new_tokens: int = 0
    """No stop token is chosen before an answer has this many tokens."""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    """Added to the logits of these tokens; -inf rules one out. Kept as pairs (token, bias) by
    rising token."""
    processors: tuple[Processor, ...] = ()
    """transformers' LogitsProcessors, or functions like them. Each is called with several texts of
    one length, unpadded, of any rows and nodes. What it makes of a text's logits must depend on
    that text only: it may keep no state."""

    def __post_init__(self) -> None:
        if not (_number(self.temperature) and 0 <= self.temperature < math.inf):
            raise InputError(
                f"temperature is {self.temperature}, needs a finite number of at least 0 (0 is "
                "greedy)"
            )
        if 0 < self.temperature < _COLDEST:
            raise InputError(
                f"temperature is {self.temperature}, less than float32 can divide by: give 0, "
                "which is greedy"
            )
        if (
            not _number(self.top_k)
            or not 0 <= self.top_k < math.inf
            or self.top_k != int(self.top_k)
        ):
            raise InputError(
                f"top_k is {self.top_k}, needs an integer of at least 0 (0 keeps every token)"
            )
        if not (_number(self.top_p) and 0 < self.top_p <= 1):
            raise InputError(
                f"top_p is {self.top_p}, needs a number above 0 and at most 1 (1 keeps every token)"
            )
        if not (_number(self.min_p) and 0 <= self.min_p <= 1):
            raise InputError(
                f"min_p is {self.min_p}, needs a number from 0 to 1 (0 keeps every token)"
            )
        if not (_number(self.repetition_penalty) and 0 < self.repetition_penalty < math.inf):
            raise InputError(
                f"repetition_penalty is {self.repetition_penalty}, needs a finite number above 0 "
                "(1 changes nothing)"
            )
        if type(self.min_new_tokens) is not int or self.min_new_tokens < 0:
            raise InputError(
                f"min_new_tokens is {self.min_new_tokens}, needs an integer of at least 0"
            )
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        if not isinstance(self.processors, list | tuple) or not all(map(callable, self.processors)):
            raise InputError(
                f"processors is {self.processors!r}, needs a tuple of transformers' "
                "LogitsProcessors"
            )
        object.__setattr__(self, "processors", tuple(self.processors))

    @property
    def greedy(self) -> bool:
        """Whether the argmax is taken and nothing is drawn."""
        return self.temperature == 0

    def simplest(self) -> Policy:
        """The same choices, with settings that greedy decoding never reads at their defaults: equal
        choices are then equal policies."""
        return replace(self, top_k=0, top_p=1.0, min_p=0.0) if self.greedy else self

    @property
    def processes(self) -> bool:
        """Whether logits must be `processed` before `probs` or an argmax; that needs a text."""
        return bool(
            self.repetition_penalty != 1
            or self.min_new_tokens
            or self.logit_bias
            or self.processors
        )

    @property
    def only_cuts(self) -> bool:
        """Whether nothing but temperature, top-k and top-p is set."""
        return not (self.min_p or self.processes)

    def processed(self, logits: Tensor, text: Text, drafted: Tensor) -> tuple[Tensor, Tensor]:
        """The logits after given texts, before temperature.

        Args:
            logits: (b m v) after m continuations of each row's text, any float type.
            drafted: (b m k) int64 the tokens of these continuations, -1 past their ends; k may be
                0.
        Returns: (b m v) float32; (b m) bool, where nothing is left to choose: the largest logit is
            not a finite number. There the logits are returned unprocessed, since only a choice of
            probability 0 leads there.
        Raises: InputError for a bias of a token that does not exist, or a processor that changes
            shapes.
        """
        raw = logits.float()
        made = biased(raw, self.logit_bias) if self.logit_bias else raw  # type: ignore[arg-type]
        if self.repetition_penalty != 1:
            made = penalised(made, text, drafted, self.repetition_penalty)
        if self.min_new_tokens:
            made = unfinished(made, text, drafted, self.min_new_tokens)
        if self.processors:
            made = processed(made, text, drafted, self.processors)
        nothing = ~made.amax(-1).isfinite()
        return torch.where(nothing[..., None], raw, made), nothing

    def probs(self, logits: Tensor) -> Tensor:
        """The distribution that this policy draws from.

        Exactly top_k tokens remain, and top-p keeps the token that crosses the threshold; of equal
        values the lower ids remain. Logits of -inf get probability 0 whatever the policy. Where the
        policy `processes`, call `processed` first.

        Args:
            logits: (... v), any float type.
        Returns: (... v) float32, each row adds up to 1.
        Raises: InputError under a greedy policy, which has no distribution: compare argmaxes.
        """
        if self.greedy:
            raise InputError(
                "a greedy policy (temperature 0) has no probabilities: compare argmaxes, or set "
                "temperature above 0"
            )
        logits = logits.float()
        # The largest logit goes first, so that a small temperature cannot overflow.
        scaled = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        if 0 < self.top_k < scaled.shape[-1]:
            last = scaled.topk(int(self.top_k), dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(~_largest(scaled, last, int(self.top_k)), -math.inf)
        probs = scaled.softmax(-1)
        if self.top_p < 1:
            probs = _nucleus(probs, self.top_p)
        if self.min_p:
            probs = torch.where(probs < self.min_p * probs.amax(-1, keepdim=True), 0, probs)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs


def _number(value: object) -> bool:
    """One that a float can hold, or an infinity, or NaN."""
    integer = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 1000
    return integer or isinstance(value, float)


def _pairs(bias: object) -> tuple[tuple[int, float], ...]:
    """Raises: InputError unless it maps token ids to numbers."""
    try:
        given: Any = bias.items() if isinstance(bias, Mapping) else bias
        pairs = [(token, value) for token, value in given]
    except (TypeError, ValueError):
        raise InputError(
            f"logit_bias is {bias!r}, needs token ids with numbers, such as {{5: -2.0}}"
        ) from None
    for token, value in pairs:
        if type(token) is not int or token < 0:
            raise InputError(f"logit_bias names token {token!r}, needs ids: integers of at least 0")
        if not _number(value) or math.isnan(value) or value == math.inf:
            raise InputError(
                f"logit_bias of token {token} is {value!r}, needs a finite number, or -inf to rule "
                "it out"
            )
    if len(dict(pairs)) < len(pairs):
        raise InputError(f"logit_bias is {bias!r}, names a token twice")
    return tuple(sorted((token, float(value)) for token, value in pairs))


def _largest(values: Tensor, last: Tensor, count: Tensor | int) -> Tensor:
    """(... v) bool: the `count` largest values, of which the smallest equals `last` (... 1); the
    lower ids win ties."""
    kept = values >= last
    if bool((kept.sum(-1, keepdim=True) == count).all()):
        return kept
    above = values > last
    return above | (kept & ((kept & ~above).cumsum(-1) <= count - above.sum(-1, keepdim=True)))


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """(... v): the fewest of the most likely tokens that reach top_p, renormalised."""
    flat = probs.reshape(-1, probs.shape[-1])  # ... v -> r v
    count, last = _cut(flat.topk(min(flat.shape[-1], _HEAD), dim=-1).values, top_p)
    short = (count > _HEAD)[:, 0]
    if bool(short.any()):
        count[short], last[short] = _cut(flat[short].sort(dim=-1, descending=True).values, top_p)
    kept = torch.where(_largest(flat, last, count), flat, 0)
    return (kept / kept.sum(-1, keepdim=True)).reshape(probs.shape)


def _cut(falling: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """How many of the descending probabilities (r m) it takes to reach top_p, m + 1 if all of them
    do not; and the last one taken."""
    count = 1 + (falling.double().cumsum(-1) < top_p).sum(-1, keepdim=True)
    return count, falling.gather(-1, count.clamp(max=falling.shape[-1]) - 1)


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """One index per row by the inverse of the cumulative weights: the first whose running sum
    exceeds u times all.

    Never an index of weight 0, also at u = 0, at u just below 1, and where a parallel running sum
    is not quite monotone.

    Args:
        weights: (b v) non-negative and finite; they need not add up to 1.
        u: (b) in [0, 1).
    Returns: (b) int64.
    Raises: NotFinite if a row's weights add up to 0, or to no finite number.
    """
    sums = weights.double().cumsum(-1)  # b v
    total = sums[:, -1:]
    if not bool(((total > 0) & total.isfinite()).all()):
        raise NotFinite(
            "draw needs weights that are finite, non-negative and not all 0 in every row"
        )
    v = weights.shape[-1]
    index = torch.arange(v, device=weights.device)
    positive = weights > 0
    first = torch.where(positive & (sums > u.to(sums)[:, None] * total), index, v).amin(-1)
    last = torch.where(positive, index, -1).amax(-1)  # serves u times total rounded up to the total
    return torch.minimum(first, last)


def untried(probs: Tensor, tried: Tensor) -> Tensor:
    """The distribution of the next draw without replacement: tried tokens at 0, the rest
    renormalised.

    Where the tried tokens hold all the probability, the distribution is uniform over the tokens not
    tried, as in Sequoia (Chen et al. 2024, arXiv:2402.12374, Algorithm 2). Drafting and verifying
    must agree on this, so both call this function.

    Args:
        probs: (b v), not changed.
        tried: (b j) int64 tokens drawn before, -1 for none; j may be 0, then `probs` is returned as
            it is, in float64.
    Returns: (b v) float64.
    """
    probs = probs.double()
    if tried.shape[-1] == 0:
        return probs
    place, left = tried.clamp(min=0), (tried < 0).double()
    # A product, so that a token both tried and named as the place of "none" ends at 0.
    probs = probs.scatter_reduce(-1, place, left, "prod")
    empty = probs.sum(-1) <= 0
    if bool(empty.any()):
        probs[empty] = torch.ones_like(probs[empty]).scatter_reduce(
            -1, place[empty], left[empty], "prod"
        )
    return probs / probs.sum(-1, keepdim=True)


def draw_without_replacement(probs: Tensor, u: Tensor) -> Tensor:
    """Draw k different tokens per row one after the other; a rule must check them in this order.

    Each draw leaves earlier tokens out and renormalises; a row whose support is used up goes on
    with the uniform distribution over the tokens not yet tried (Sequoia, arXiv:2402.12374,
    Algorithm 2).

    Args:
        probs: (b v).
        u: (b k) in [0, 1), one number per draw.
    Returns: (b k) int64.
    Raises: InputError if k exceeds v.
    """
    k, v = u.shape[-1], probs.shape[-1]
    if k > v:
        raise InputError(
            f"{k} draws without replacement asked of {v} tokens: ask for at most {v} children per "
            "node"
        )
    tokens = torch.empty((probs.shape[0], 0), dtype=torch.int64, device=probs.device)
    for j in range(k):
        token = draw(untried(probs, tokens), u[:, j])
        tokens = torch.cat((tokens, token[:, None]), dim=-1)
    return tokens


class Chance:
    """Uniform numbers for a batch. With a generator per row, a row's numbers do not depend on its
    neighbours."""

    def __init__(
        self, generators: torch.Generator | Sequence[torch.Generator], rows: int | None = None
    ) -> None:
        """Args: one generator per row, or a single one for all rows together with their number
        (`rows`, 1 unless given)."""
        if isinstance(generators, torch.Generator):
            self._shared: torch.Generator | None = generators
            self._own: tuple[torch.Generator, ...] = ()
            self._rows = 1 if rows is None else rows
        else:
            self._shared, self._own = None, tuple(generators)
            self._rows = len(self._own)
            if rows is not None and rows != self._rows:
                raise InputError(
                    f"{self._rows} generators given for {rows} rows: needs one per row, or a "
                    "single one for all"
                )

    @classmethod
    def seeded(cls, seed: int, rows: int | Sequence[int]) -> Chance:
        """A generator per row, fixed by the seed and the row's number: `rows` is their count, or
        lists the numbers."""
        numbers = range(rows) if isinstance(rows, int) else rows
        return cls(
            [torch.Generator().manual_seed(_mix(int(seed), int(number))) for number in numbers]
        )

    def __len__(self) -> int:
        return self._rows

    def uniform(self, k: int, rows: Tensor | None = None) -> Tensor:
        """Draw k numbers for each row.

        Args:
            k: numbers per row.
            rows: (b) int64 row indices, or (rows) bool; None is every row. Rows left out draw
                nothing.
        Returns: (b k) float64 in [0, 1), on the generators' device.
        """
        index = self._index(rows)
        if self._shared is not None:
            device = self._shared.device
            return torch.rand(
                (len(index), k), generator=self._shared, dtype=torch.float64, device=device
            )
        if not index:
            return torch.empty((0, k), dtype=torch.float64)
        own = (self._own[row] for row in index)
        return torch.stack(
            [torch.rand(k, generator=g, dtype=torch.float64, device=g.device) for g in own]
        )

    def select(self, rows: Tensor) -> Chance:
        """The chance of these rows. It shares their generators: numbers drawn here are used up
        there."""
        index = self._index(rows)
        if self._shared is not None:
            return Chance(self._shared, rows=len(index))
        return Chance([self._own[row] for row in index])

    def _index(self, rows: Tensor | None) -> list[int]:
        if rows is None:
            return list(range(self._rows))
        return (rows.nonzero().flatten() if rows.dtype == torch.bool else rows).tolist()


def _mix(seed: int, row: int) -> int:
    """A 63-bit seed: neighbouring seeds and rows give unrelated generators, and (1, 2) another than
    (2, 1)."""
    digest = hashlib.blake2b(f"{seed} {row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
