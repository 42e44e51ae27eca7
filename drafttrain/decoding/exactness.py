"""Is the text really the target's own? Greedy text against plain decoding, sampled text against the target's exact law.

Greedy: the same prompts decoded plainly and by a plan, token for token. Where they part, the target's logits of the two
tokens are compared, since in low precision two passes over one text may order two nearly equal logits differently.

Sampled: Pearson's goodness of fit of the first tokens behind a prompt, drawn many times by the decoding loop, against
probabilities that plain passes of the target give. A vocabulary is far too large for a cell per sequence, so sequences
are sorted into cells of at least a known probability (`Cells`). The statistic is summed over the prompts.

A test that finds nothing says little unless it would have found something. With n draws the noncentrality is n times
sum (r - p)^2 / p, at least 4 n TV(r, p)^2 by Cauchy-Schwarz, whatever the wrong law r: so a power is promised for every
difference of a given total variation distance, in the cells, on average over the prompts. A decoder known to be wrong,
which keeps every draft, is tested beside the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafttrain.decoding.loop import Plan, decode
from drafttrain.decoding.measure import Prompts, Watch, unwatched
from drafttrain.decoding.speculator import Speculator
from drafttrain.errors import InputError
from drafttrain.flow import Needs
from drafttrain.nn.cache import KVCache
from drafttrain.nn.sampling import Policy
from drafttrain.target.model import Pass, Target
from drafttrain.tree.topology import Tree

FALSE_ALARM = 0.01
"""Chance that a comparison of right rules reports any difference at all: Holm's correction spreads it over the plans."""
POWER = 0.9
TOKENS = 3
"""Length of the sequences whose law is tested. The first token is the prefill's, before any draft."""
LEAST_CELL = 1 / 8
"""Of the probability of the first token, the share that a cell holds at least."""
LEAST_EXPECTED = 10
LEAST_DRAWS = 40
"""Draws that a prompt needs at least."""
CONTROL = "control: every draft kept"
_LOOKED_AT = 24
"""Greedy tokens behind a prompt among which a place to draw at is chosen."""
_LOGITS = 1 << 24
"""Logits of a pass while drawing: bounds the rows side by side."""


def check_draws(draws: object, prompts: object) -> None:
    """Raises: InputError for a number of draws or prompts that no test can be made of."""
    if type(prompts) is not int or prompts < 1:
        raise InputError(f"exactness_prompts={prompts}: needs a whole number of at least 1")
    if type(draws) is not int or draws < LEAST_DRAWS * prompts:
        raise InputError(
            f"exactness_draws={draws}: {prompts} prompts need a whole number of at least {LEAST_DRAWS * prompts}, "
            f"{LEAST_DRAWS} for each"
        )


@torch.inference_mode()
def check(
    speculator: Speculator,
    prompts: Prompts,
    plans: Mapping[str, Plan],
    *,
    draws: int,
    places: int,
    max_new_tokens: int,
    batch: int = 8,
    seed: int = 0,
    watch: Watch = unwatched,
) -> dict[str, Any]:
    """Compare every plan with the target, greedy ones by their text, sampled ones by their law.

    Args:
        plans: by the name under which they are reported.
        draws: sequences drawn by every sampled plan, over all its prompts.
        places: how many prompts: the first ones for greedy text, the shortest ones, which cost least, for laws.
    Returns: {"greedy": rows, "law": rows}, plain JSON values; each row has a verdict.
    """
    check_draws(draws, places)
    drafting = {name: plan for name, plan in plans.items() if plan.tree.size}
    greedy = {name: plan for name, plan in drafting.items() if plan.policy.greedy}
    policies = list(dict.fromkeys(plan.policy for plan in drafting.values() if not plan.policy.greedy))
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "batch": batch}
    first = [list(prompt) for prompt in prompts[:places]]
    same = same_text(speculator, first, greedy, watch=watch, **settings) if greedy else []
    shortest = sorted((list(prompt) for prompt in prompts), key=len)[:places]
    rows = []
    for policy in policies:
        own = {name: plan for name, plan in drafting.items() if plan.policy == policy}
        rows += same_law(speculator, shortest, own, draws=draws, seed=seed, watch=watch)
    return {"greedy": same, "law": judged(rows)}


# --- greedy text -----------------------------------------------------------------------------------------------------------


def same_text(
    speculator: Speculator,
    prompts: Prompts,
    plans: Mapping[str, Plan],
    *,
    max_new_tokens: int,
    batch: int = 8,
    watch: Watch = unwatched,
) -> list[dict[str, Any]]:
    """A row for each plan: how many tokens equal plain decoding's, and where they first do not."""

    def write(plan: Plan, what: str) -> list[list[int]]:
        written: list[list[int]] = []
        for start in watch(range(0, len(prompts), batch), what):
            part = prompts[start : start + batch]
            outputs, _ = speculator.generate(part, max_new_tokens=max_new_tokens, plan=plan)
            written += [output.ids for output in outputs]
        return written

    plain = write(Plan(Tree.chain(0)), "exactness: plain text")
    rows = []
    for name, plan in plans.items():
        differences, compared = [], 0
        for number, (ours, theirs) in enumerate(zip(write(plan, f"exactness: {name}"), plain, strict=True)):
            place = _parting(ours, theirs)
            compared += len(theirs) if place is None else place + 1
            if place is not None:
                both = [ids[place] if place < len(ids) else None for ids in (theirs, ours)]
                found = _gap(speculator.target, [*prompts[number], *theirs[:place]], *both)
                differences.append({"prompt": number, "place": place, **found})
        # What rounding does not explain is shown first.
        differences.sort(key=lambda difference: difference["near_tie"])
        ties = all(difference["near_tie"] for difference in differences)
        verdict = "identical" if not differences else "parts at near-ties only" if ties else "DIFFERS"
        rows.append(
            {
                "label": name,
                "prompts": len(prompts),
                "same": len(prompts) - len(differences),
                "tokens": compared,
                "differences": differences,
                "verdict": verdict,
            }
        )
    return rows


def _parting(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first place at which two texts differ; None if they are one."""
    for place, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return place
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _gap(target: Target, ids: list[int], plain: int | None, drafted: int | None) -> dict[str, Any]:
    """The target's logits of the two tokens behind a text, and whether rounding can have exchanged them.

    Rounding is measured there: the largest difference of any logit between one pass over the whole text and a cached
    pass over its last token, and never below the spacing of numbers as large as the largest logit. The two tokens may
    each be off by so much.
    """
    tokens = {"plain": plain, "drafted": drafted}
    texts = {f"{name}_text": _text(target, token) for name, token in tokens.items()}
    if plain is None or drafted is None:
        return tokens | texts | {"gap": None, "rounding": None, "near_tie": False}
    whole = _last_logits(target, [ids])[0]
    stepped = whole
    if len(ids) > 1:
        device = target.device
        cache = target.new_cache(1, len(ids))
        target.step(torch.tensor([ids[:-1]], device=device), cache)
        cache.commit(torch.tensor([len(ids) - 1], device=device))
        last = target.step(torch.tensor([ids[-1:]], device=device), cache)
        stepped = target.head(last.hidden)[0, -1].double()
    spacing = torch.finfo(target.dtype).eps * float(whole.abs().max())
    rounding = max(float((whole - stepped).abs().max()), spacing)
    gap = float(whole[plain] - whole[drafted])
    return tokens | texts | {"gap": gap, "rounding": rounding, "near_tie": abs(gap) <= 2 * rounding}


def _text(target: Target, token: int | None) -> str | None:
    return None if token is None or target.tokenizer is None else target.tokenizer.decode([token])


def _last_logits(target: Target, rows: Sequence[Sequence[int]]) -> Tensor:
    """(b v) float64 logits behind texts of one length, by one plain causal pass."""
    ids = torch.tensor([list(row) for row in rows])
    hidden = target.features(ids, torch.full((len(ids),), ids.shape[1]), Needs(last_hidden=True)).last_hidden
    assert hidden is not None
    return target.head(hidden[:, -1]).double()


# --- the law of sampled text -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cells:
    """A partition of the sequences of a few tokens behind a prompt, with the target's own probability of each part.

    The first token is the prefill's, so only what follows the likeliest one is told apart: all other first tokens are one
    cell. From there on a likely token leads to the sequences behind it; the others are put together, likeliest first.
    """

    tables: dict[tuple[int, ...], Tensor]
    """{tokens so far: (v) int64 cell of every token, -1 where the next token decides}."""
    outside: dict[tuple[int, ...], Tensor]
    """{tokens so far: (v) bool, tokens that the target never draws there}. They are counted in a cell of small ones."""
    probs: Tensor
    """(cells) float64, adds up to 1."""

    @classmethod
    def of(cls, target: Target, prompt: Sequence[int], policy: Policy, draws: int, *, tokens: int = TOKENS) -> Cells:
        """Every cell but the first expects LEAST_EXPECTED of so many draws, or more, and holds at least LEAST_CELL of what the
        likeliest first token does."""
        least = 1.0
        tables: dict[tuple[int, ...], Tensor] = {}
        outside: dict[tuple[int, ...], Tensor] = {}
        masses, small = [0.0], 0  # cell 0: other first tokens, and what is too little for a cell of its own
        level: dict[tuple[int, ...], float] = {(): 1.0}
        for depth in range(tokens):
            deeper: dict[tuple[int, ...], float] = {}
            if not level:
                break
            logits = _last_logits(target, [[*prompt, *prefix] for prefix in level])
            for (prefix, mass), law in zip(level.items(), policy.probs(logits).double().cpu(), strict=True):
                falling, order = (mass * law / law.sum()).sort(descending=True)
                if not depth:
                    least = max(LEAST_CELL * float(falling[0]), LEAST_EXPECTED / draws)
                named = int((falling >= least).sum()) if depth else 1
                table = torch.full_like(order, small)
                for token, own in zip(order[:named].tolist(), falling[:named].tolist(), strict=True):
                    if depth + 1 < tokens:
                        table[token] = -1
                        deeper[prefix + (token,)] = own
                    else:
                        table[token] = len(masses)
                        masses.append(own)
                rest = falling[named:]
                left = float(rest.sum())
                if not depth or left < least:
                    masses[small] += left
                else:
                    # Every token is below `least`, so runs of at least twice as much never fall below it.
                    groups = max(1, int(left / (2 * least)))
                    group = ((rest.cumsum(0) - rest) / (left / groups)).long().clamp(0, groups - 1)
                    table[order[named:]] = group + len(masses)
                    masses += torch.zeros(groups, dtype=rest.dtype).index_add(0, group, rest).tolist()
                tables[prefix], outside[prefix] = table, law <= 0
            level = deeper
        return cls(tables, outside, torch.tensor(masses, dtype=torch.float64))._without_dust(draws)

    def _without_dust(self, draws: int) -> Cells:
        """Cell 0 joins the smallest other one if it expects too little for the chi-square law to hold."""
        if len(self.probs) == 1 or float(self.probs[0]) * draws >= LEAST_EXPECTED / 2:
            return self
        goal = 1 + int(self.probs[1:].argmin())
        probs = self.probs[1:].clone()
        probs[goal - 1] += self.probs[0]
        tables = {
            prefix: torch.where(table > 0, table - 1, torch.where(table == 0, goal - 1, -1))
            for prefix, table in self.tables.items()
        }
        return Cells(tables, self.outside, probs)

    def place(self, ids: Sequence[int]) -> tuple[int, bool]:
        """The cell of a sequence, and whether the target never draws it, as far as it was looked at."""
        for depth, token in enumerate(ids):
            prefix = tuple(ids[:depth])
            cell = int(self.tables[prefix][token])
            if cell >= 0:
                return cell, bool(self.outside[prefix][token])
        raise ValueError(f"a sequence of {len(ids)} tokens is too short for these cells")


class SharedPrompt(Target):
    """A target that reads a prompt given to every row of a batch once. What follows is read row by row."""

    def __init__(self, target: Target) -> None:
        self.__dict__.update(vars(target))

    def step(
        self,
        ids: Tensor,
        cache: KVCache,
        *,
        among: Tensor | None = None,
        depths: Tensor | None = None,
        layers: tuple[int, ...] = (),
    ) -> Pass:
        rows, s = ids.shape
        if among is not None or depths is not None or cache.longest or not bool((ids == ids[:1]).all()):
            return super().step(ids, cache, among=among, depths=depths, layers=layers)
        one = self.new_cache(1, s)
        out = super().step(ids[:1], one, layers=layers)
        for layer, (keys, values) in enumerate(zip(one.keys, one.values, strict=True)):
            cache.update(keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1), layer)
        wide = {layer: value.expand(rows, -1, -1) for layer, value in out.layers.items()}
        return Pass(out.hidden.expand(rows, -1, -1), wide)


def same_law(
    speculator: Speculator,
    prompts: Prompts,
    plans: Mapping[str, Plan],
    *,
    draws: int,
    seed: int = 0,
    watch: Watch = unwatched,
) -> list[dict[str, Any]]:
    """A row for each plan, all of one sampling policy, and one for the control; `judged` adds what needs all rows."""
    (policy,) = {plan.policy for plan in plans.values()}
    target = SharedPrompt(speculator.target)
    each = draws // len(prompts)
    places = []
    for prompt in prompts:
        where = undecided_place(target, prompt, policy)
        if where is not None:
            cells = Cells.of(target, where, policy, each)
            if len(cells.probs) > 1:
                places.append((where, cells))
    wrong = Plan(Tree.chain(min(2, speculator.drafter.max_depth or 2)), policy, sampled=True, rule="typical:0:0")
    control = f"T={policy.temperature:g} {CONTROL}"
    rows = []
    for name, plan in {**plans, control: wrong}.items():
        counts = [torch.zeros_like(cells.probs) for _, cells in places]
        outside = 0
        side = max(1, min(256, _LOGITS // ((plan.tree.size + 1) * target.vocab_size)))
        jobs = [(place, start) for place in range(len(places)) for start in range(0, each, side)]
        for job in watch(range(len(jobs)), f"exactness: {name}"):
            place, start = jobs[job]
            where, cells = places[place]
            numbers = range(place * each + start, place * each + min(start + side, each))
            outputs, _ = decode(
                target,
                speculator.drafter,
                [where] * len(numbers),
                plan,
                max_new_tokens=TOKENS,
                stop_ids=(),
                seed=seed,
                row_numbers=numbers,
            )
            for output in outputs:
                cell, never = cells.place(output.ids)
                counts[place][cell] += 1
                outside += never
        rows.append(
            {
                "label": name,
                "temperature": policy.temperature,
                "rule": plan.rule_name,
                "guarantee": plan.guarantee,
                "control": name == control,
                "outside": outside,
                **fit_of(counts, [cells.probs for _, cells in places]),
            }
        )
    return rows


def undecided_place(target: Target, prompt: Sequence[int], policy: Policy) -> list[int] | None:
    """The prompt with the part of its greedy answer behind which the target is sure of one token and least of the next.

    The first token of an answer is drawn before any draft: if it were open, the draws would scatter before a rule has
    had a say. None where the context has no room.
    """
    room = target.context - len(prompt) - TOKENS
    if room < 1:
        return None
    outputs, _ = decode(target, None, [prompt], Plan(Tree.chain(0)), max_new_tokens=min(_LOOKED_AT, room))
    answer = outputs[0].ids
    if len(answer) > 1 and answer[-1] in target.stop_ids:
        answer = answer[:-1]  # Behind its end nobody decodes.
    ids = torch.tensor([[*prompt, *answer]])
    hidden = target.features(ids, torch.tensor([ids.shape[1]]), Needs(last_hidden=True)).last_hidden
    assert hidden is not None
    laws = policy.probs(target.head(hidden[0, len(prompt) - 1 :])).double().cpu()  # answer+1 v
    sure = laws[:-1].gather(1, torch.tensor(answer)[:, None])[:, 0]
    open_ = 1 - laws[1:].square().sum(1)
    best = int((sure * open_).argmax())
    return [*prompt, *answer[:best]]


def fit_of(counts: Sequence[Tensor], probs: Sequence[Tensor]) -> dict[str, Any]:
    """Pearson's statistic summed over independent samples, and the mean total variation distance seen in the cells.

    The distance is of what was drawn, so chance alone makes it larger than 0. None where there is nothing to compare.
    """
    df = sum(len(law) - 1 for law in probs)
    draws = int(sum(float(count.sum()) for count in counts))
    common = {"draws": draws, "prompts": len(probs), "cells": sum(map(len, probs)), "df": df}
    if not df or not draws:
        return common | {"statistic": None, "p": None, "seen_distance": None}
    statistic = distance = 0.0
    for count, law in zip(counts, probs, strict=True):
        n = float(count.sum())
        statistic += float(((count - n * law) ** 2 / (n * law)).sum())
        distance += float((count - n * law).abs().sum()) / 2
    return common | {"statistic": statistic, "p": tail(statistic, df), "seen_distance": distance / draws}


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add Holm's p-values, what each test would have noticed, and a verdict. Only rules said to be exact share the correction.

    Power is stated at the strictest of Holm's levels, so that it holds whatever the other plans do.
    """
    exact = [row for row in rows if row["p"] is not None and row["guarantee"] == "distribution"]
    alarm = FALSE_ALARM / max(1, len(exact))
    corrected = holm([row["p"] for row in exact])
    own = {id(row): value for row, value in zip(exact, corrected, strict=True)}
    judged = []
    for row in rows:
        p = own.get(id(row), row["p"])
        tested = row["p"] is not None
        found = tested and p <= (FALSE_ALARM if id(row) in own else alarm)
        if not tested:
            verdict = "not tested: the target leaves no choice behind these prompts"
        elif row["control"]:
            verdict = "noticed, as it should be" if found else "NOT NOTICED"
        elif id(row) not in own:
            verdict = "differs, as is expected of an approximate rule" if found else "approximate; no difference found"
        else:
            verdict = "DIFFERS" if found else "no difference found"
        more = {"p_corrected": p, "false_alarm": alarm, "noticed_distance": None, "power": None, "verdict": verdict}
        if tested:
            more["noticed_distance"] = noticed_distance(row["df"], row["draws"], alarm)
        if tested and row["control"]:
            # What lies above the statistic's mean under the target's own law estimates the noncentrality.
            more["power"] = power(row["df"], max(0.0, row["statistic"] - row["df"]), alarm)
        judged.append(row | more)
    return judged


def words(found: dict[str, Any]) -> list[str]:
    """The findings in plain words, the alarming ones in capitals."""
    lines = []
    if found["greedy"]:
        equal = sum(row["verdict"] == "identical" for row in found["greedy"])
        tokens = sum(row["tokens"] for row in found["greedy"])
        lines.append(
            f"greedy: {equal} of {len(found['greedy'])} ways of drafting wrote plain decoding's text, {tokens} tokens compared"
        )
    for row in found["greedy"]:
        if row["differences"]:
            lines.append(f"{row['label']}: {row['verdict']}: {_difference(row['differences'][0])}")
    exact = [row for row in found["law"] if row["guarantee"] == "distribution" and row["p"] is not None]
    for row in exact:
        if row["verdict"] == "DIFFERS":
            lines.append(
                f"{row['label']}: DIFFERS from the target's law: chi-square {row['statistic']:.1f} with {row['df']} degrees of "
                f"freedom, p {row['p']:.2g}, corrected {row['p_corrected']:.2g}"
            )
    if exact and all(row["verdict"] == "no difference found" for row in exact):
        worst = max(row["noticed_distance"] for row in exact)
        lines.append(
            f"sampled: no difference from the target's law found in {len(exact)} ways of drafting; a difference of more than "
            f"{worst:.3f} (total variation, of the first {TOKENS} tokens in cells) would have been noticed with "
            f"{POWER:.0%} probability, at {FALSE_ALARM:.0%} false alarms over all of them"
        )
    for row in found["law"]:
        if row["outside"] and not row["control"]:
            lines.append(
                f"{row['label']}: {row['outside']} of {row['draws']} draws have tokens that the target's filtered law leaves "
                "out; in low precision its border moves with rounding"
            )
        if row["power"] is not None and row["verdict"] != "NOT NOTICED":
            lines.append(
                f"temperature {row['temperature']:g}: a decoder that keeps every draft was noticed (distance seen "
                f"{row['seen_distance']:.2f}); another run would notice it with about {row['power']:.0%} probability"
            )
        if row["control"] and row["verdict"] == "NOT NOTICED":
            lines.append(
                f"THE TEST IS WEAK at temperature {row['temperature']:g}: a decoder that keeps every draft was not told from "
                "the target; raise exactness_draws"
            )
        if row["p"] is None and not row["control"]:
            lines.append(f"{row['label']}: {row['verdict']}")
    return lines


def _difference(found: dict[str, Any]) -> str:
    def shown(name: str) -> str:
        token, text = found[name], found[f"{name}_text"]
        return "the end" if token is None else f"{token}" + ("" if text is None else f" {text!r}")

    where = f"prompt {found['prompt']}, token {found['place'] + 1}: {shown('plain')} plainly, {shown('drafted')} with drafts"
    if found["gap"] is None:
        return where
    tie = "a near-tie" if found["near_tie"] else "no near-tie"
    return f"{where}; their logits are {found['gap']:.3g} apart, rounding moves one by {found['rounding']:.2g}: {tie}"


# --- chi-square, central and not -------------------------------------------------------------------------------------------


def tail(x: float, df: float) -> float:
    """P(chi-square > x)."""
    return float(torch.special.gammaincc(*torch.tensor([df / 2, x / 2], dtype=torch.float64)))


def critical(df: int, alarm: float) -> float:
    """The x with tail(x, df) = alarm."""
    return _root(lambda x: alarm - tail(x, df))


def power(df: int, noncentrality: float, alarm: float) -> float:
    """Chance that a noncentral chi-square exceeds the critical value: a Poisson mixture of central ones."""
    half = noncentrality / 2
    terms = torch.arange(int(half + 12 * math.sqrt(half) + 40), dtype=torch.float64)
    weights = (torch.special.xlogy(terms, torch.tensor(half, dtype=torch.float64)) - half - torch.lgamma(terms + 1)).exp()
    limit = torch.full_like(terms, critical(df, alarm) / 2)
    return float((weights * torch.special.gammaincc(df / 2 + terms, limit)).sum())


def noticed_distance(df: int, draws: int, alarm: float, chance: float = POWER) -> float:
    """The total variation distance from which on a difference, of whatever kind, is noticed with this chance or more."""
    noncentrality = _root(lambda x: power(df, x, alarm) - chance)
    return min(1.0, math.sqrt(noncentrality / draws) / 2)


def holm(values: Sequence[float]) -> list[float]:
    """p-values corrected for their number, however they depend on each other (Holm 1979)."""
    corrected, worst = [0.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        worst = max(worst, min(1.0, (len(values) - rank) * values[place]))
        corrected[place] = worst
    return corrected


def _root(rising: Callable[[float], float]) -> float:
    """Where a rising function of x >= 0 crosses 0."""
    low, high = 0.0, 1.0
    while rising(high) < 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
