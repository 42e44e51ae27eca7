"""Plain generation for many rows at once: slots that are refilled as rows finish.

Each row is a script: a Python generator that yields `Segment`s (tokens to read, then tokens to
write) and receives the ids written. Conversations with several turns stay in their slot, so nothing
is read twice or re-encoded.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from drafttrain.errors import NotFinite
from drafttrain.nn import finite
from drafttrain.nn.cache import KVCache
from drafttrain.nn.sampling import Policy, draw
from drafttrain.target.model import Pass


@dataclass(frozen=True)
class Segment:
    """Tokens to read, then tokens to write."""

    read: list[int]
    limit: int
    """At most this many ids are written; 0 only reads."""
    policy: Policy
    stop_ids: tuple[int, ...]
    """Writing ends after any of these; the stop id is part of what was written."""


class Writer(Protocol):
    """What writes: the target, or a drafter that is a language model."""

    @property
    def device(self) -> torch.device: ...

    def new_cache(self, rows: int, capacity: int) -> KVCache: ...

    def step(self, ids: Tensor, cache: KVCache) -> Pass: ...

    def head(self, hidden: Tensor) -> Tensor: ...


Script = Generator[Segment, list[int], None]


class Full(Exception):
    """Thrown into a script whose next segment does not fit its slot: it keeps what it has and ends.

    Not GeneratorExit, which an unfinished script also sees when the run itself is broken off.
    """


@dataclass
class _Slot:
    script: Script
    chance: random.Random
    segment: Segment
    pending: list[int]
    """Ids still to be read, the next input first."""
    text: list[int] = field(default_factory=list)
    """Ids that were read."""
    written: list[int] = field(default_factory=list)
    total: int = 0


def run(
    target: Writer, scripts: Iterator[tuple[Script, random.Random]], *, slots: int, capacity: int
) -> Iterator[int]:
    """Drive scripts to their end, `slots` of them at a time; yields the number of ids written after
    every pass.

    Args:
        scripts: pairs of a script and its own source of chance, so that a row's text depends on its
            seed only, up to the rounding of differently shaped products: hardly ever in float32,
            but visibly in low precision (`synthesis.is_reproducible`).
        capacity: entries a slot's cache holds; a row that would need more is ended (its script sees
            `Full`).
    Raises: NotFinite for logits that no token can be chosen from; the script sees it first.
    """
    refill = max(1, slots // 8)  # free slots to wait for before new rows are read in
    cache = target.new_cache(slots, capacity)
    table: list[_Slot | None] = [None] * slots
    prefixes = _Prefix(target, capacity)
    exhausted = False
    while True:
        free = [i for i, slot in enumerate(table) if slot is None]
        if not exhausted and (len(free) >= refill or len(free) == slots):
            new: list[_Slot] = []
            while len(new) < len(free):
                pair = next(scripts, None)
                if pair is None:
                    exhausted = True
                    break
                script, chance = pair
                first = next(script, None)
                if first is not None:
                    new.append(_Slot(script, chance, first, list(first.read)))
            if new:
                rows = torch.tensor(free[: len(new)], device=target.device)
                cache.assign(rows, prefixes.read([slot.pending[:-1] for slot in new]))
                for row, slot in zip(rows.tolist(), new, strict=True):
                    slot.text = slot.pending[:-1]
                    slot.total = len(slot.text)
                    slot.pending = slot.pending[-1:]
                    table[row] = slot
        active = [i for i, slot in enumerate(table) if slot is not None]
        if not active:
            if exhausted:
                return
            continue
        if exhausted and len(active) <= len(table) // 2:
            cache.select(torch.tensor(active, device=target.device))
            table = [table[i] for i in active]
            active = list(range(len(table)))
        yield _step(target, cache, table, active)


def _step(target: Writer, cache: KVCache, table: list[_Slot | None], active: list[int]) -> int:
    """One pass: every active slot reads one id and, unless more ids wait, writes one."""
    ids = torch.zeros(len(table), 1, dtype=torch.int64)
    counts = torch.zeros(len(table), dtype=torch.int64)
    for i in active:
        slot = table[i]
        assert slot is not None
        ids[i, 0] = slot.pending.pop(0)
        slot.text.append(int(ids[i, 0]))
        counts[i] = 1
        slot.total += 1
    hidden = target.step(ids.to(target.device), cache).hidden[:, 0]  # b d
    cache.commit(counts.to(target.device))
    writers = [i for i in active if not table[i].pending]  # type: ignore[union-attr]
    if not writers:
        return 0
    with torch.inference_mode():
        logits = target.head(hidden[torch.tensor(writers, device=target.device)]).float()
    slots = [slot for i in writers if (slot := table[i]) is not None]
    usable = finite.usable(logits)
    if not bool(usable.all()):
        slot = slots[int((~usable).nonzero()[0])]
        slot.script.throw(NotFinite("no token can be chosen from these logits", slot.text))
    uniforms = [slot.chance.random() for slot in slots]
    chosen = choose(logits, [slot.segment.policy for slot in slots], uniforms)
    written = 0
    for i, slot, token in zip(writers, slots, chosen, strict=True):
        if slot.segment.limit:
            slot.written.append(token)
            written += 1
            full = slot.total + 2 > cache.capacity
            if (
                token not in slot.segment.stop_ids
                and len(slot.written) < slot.segment.limit
                and not full
            ):
                slot.pending = [token]
                continue
        if not _advance(slot, cache.capacity):
            table[i] = None
    if None in table:
        # An empty slot restarts at length 0, so that it neither overruns nor widens the attention
        # of the others.
        lengths = cache.lengths.clone()
        lengths[torch.tensor([slot is None for slot in table], device=lengths.device)] = 0
        cache.set_lengths(lengths)
    return written


def _advance(slot: _Slot, capacity: int) -> bool:
    """Give the written ids to the script and take its next segment; False when the row has
    ended."""
    written, slot.written = slot.written, []
    try:
        segment = slot.script.send(written)
    except StopIteration:
        return False
    # The last written id was chosen but not read yet.
    slot.segment, slot.pending = segment, [*written[-1:], *segment.read]
    if slot.total + len(slot.pending) + 1 > capacity:
        try:
            slot.script.throw(Full())
        except (StopIteration, Full):
            pass
        return False
    return True


class _Prefix:
    """Reads new rows' first tokens; rows that all start alike are read once and copied."""

    def __init__(self, target: Writer, capacity: int) -> None:
        self.target, self.capacity = target, capacity
        self.known: tuple[list[int], KVCache] | None = None

    def read(self, prompts: list[list[int]]) -> KVCache:
        if all(prompt == prompts[0] for prompt in prompts):
            if self.known is None or self.known[0] != prompts[0]:
                self.known = (prompts[0], self._read(prompts[:1]))
            cache = self.known[1]
            copy = self.target.new_cache(1, self.capacity)
            copy.keys, copy.values = list(cache.keys), list(cache.values)
            copy.set_lengths(cache.lengths)
            copy.select(torch.zeros(len(prompts), dtype=torch.int64, device=self.target.device))
            return copy
        return self._read(prompts)

    def _read(self, prompts: list[list[int]]) -> KVCache:
        longest = max(map(len, prompts))
        cache = self.target.new_cache(len(prompts), max(longest, 1))
        if longest:
            ids = torch.tensor(
                [p + (p[-1:] or [0]) * (longest - len(p)) for p in prompts],
                device=self.target.device,
            )
            self.target.step(ids, cache)
            cache.commit(torch.tensor([len(p) for p in prompts], device=self.target.device))
        return cache


def choose(logits: Tensor, policies: list[Policy], uniforms: list[float]) -> list[int]:
    """One token per row by inverse transform on the row's own uniform number.

    The distribution is the policy's. With top-k, only the k most likely are looked at, which makes
    it fast for many rows.

    Args:
        logits: (b v) float32.
    """
    chosen = logits.argmax(-1).tolist()
    groups: dict[Policy, list[int]] = {}
    for row, policy in enumerate(policies):
        if not policy.greedy:
            groups.setdefault(policy, []).append(row)
    for policy, rows in groups.items():
        part = logits[torch.tensor(rows, device=logits.device)]
        u = torch.tensor([uniforms[row] for row in rows], dtype=torch.float64, device=logits.device)
        k = min(policy.top_k, part.shape[-1]) or part.shape[-1]
        ids = None
        if policy.top_k or policy.top_p < 1:
            part, ids = part.topk(k, dim=-1)
        probs = (part / policy.temperature).softmax(-1)
        if policy.top_p < 1:
            # Keep the token that crosses the threshold.
            probs = probs.masked_fill(probs.cumsum(-1) - probs >= policy.top_p, 0)
        place = draw(probs, u)[:, None]
        picked = place if ids is None else ids.gather(1, place)
        for row, token in zip(rows, picked[:, 0].tolist(), strict=True):
            chosen[row] = token
    return chosen
