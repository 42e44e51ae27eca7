"""Pearson's test of a distribution, its power, and the correction for several of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

POWER = 0.9


def fit_of(counts: Sequence[Tensor], probs: Sequence[Tensor]) -> dict[str, Any]:
    """Pearson's statistic summed over independent samples, and the mean total variation distance
    seen in the cells.

    The distance is of what was drawn, so chance makes it larger than 0. None where there is
    nothing to compare.
    """
    df = sum(len(p) - 1 for p in probs)
    draws = int(sum(float(count.sum()) for count in counts))
    common = {"draws": draws, "prompts": len(probs), "cells": sum(map(len, probs)), "df": df}
    if not df or not draws:
        return common | {"statistic": None, "p": None, "seen_distance": None}
    statistic = distance = 0.0
    for count, p in zip(counts, probs, strict=True):
        n = float(count.sum())
        statistic += float(((count - n * p) ** 2 / (n * p)).sum())
        distance += float((count - n * p).abs().sum()) / 2
    return common | {
        "statistic": statistic,
        "p": tail(statistic, df),
        "seen_distance": distance / draws,
    }


def tail(x: float, df: float) -> float:
    """P(chi-square > x)."""
    return float(torch.special.gammaincc(*torch.tensor([df / 2, x / 2], dtype=torch.float64)))


def critical(df: int, alarm: float) -> float:
    """The x with tail(x, df) = alarm."""
    return _root(lambda x: alarm - tail(x, df))


def power(df: int, noncentrality: float, alarm: float) -> float:
    """Chance that a noncentral chi-square exceeds the critical value: a Poisson mixture of central
    ones."""
    half = noncentrality / 2
    terms = torch.arange(int(half + 12 * math.sqrt(half) + 40), dtype=torch.float64)
    weights = (
        torch.special.xlogy(terms, torch.tensor(half, dtype=torch.float64))
        - half
        - torch.lgamma(terms + 1)
    ).exp()
    limit = torch.full_like(terms, critical(df, alarm) / 2)
    return float((weights * torch.special.gammaincc(df / 2 + terms, limit)).sum())


def noticed_distance(df: int, draws: int, alarm: float, chance: float = POWER) -> float:
    """The total variation distance from which on a difference, of any kind, is noticed with this
    chance or more."""
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
