"""Acceptance that was computed on given texts: expected counts first, ratios and intervals last.

Named `sim/`: no draft was decoded. The ratios are those of `measurement`, of expectations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from drafttrain.decoding.intervals import Interval, bootstrap
from drafttrain.decoding.plan import Plan


@dataclass
class Expected:
    """What decoding counts (`Tally`), on average over all the ways in which it may write one
    text."""

    rounds: float = 0.0
    emitted: int = 0
    """Tokens that rounds wrote, all but the first: no chance in it."""
    offered: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Simulated:
    """What was computed on some texts."""

    plan: Plan
    texts: list[Expected]
    """One per text."""
    impossible: int = 0
    """Tokens of the texts that have probability 0 by the kept features."""

    @property
    def rounds(self) -> float:
        """Expected rounds of all texts."""
        return sum(text.rounds for text in self.texts)

    @property
    def tau(self) -> float | None:
        """Tokens emitted per expected target pass; None where no text went on after its first
        token."""
        return sum(text.emitted for text in self.texts) / self.rounds if self.rounds else None

    @property
    def tau_interval(self) -> Interval | None:
        """95 % interval of tau over resampled texts; None for one text."""
        return bootstrap([t.emitted for t in self.texts], [t.rounds for t in self.texts])

    @property
    def accepted_per_round(self) -> float | None:
        """Expected accepted drafts per round."""
        return sum(sum(text.kept) for text in self.texts) / self.rounds if self.rounds else None

    @property
    def accept_at(self) -> list[float | None]:
        """accept@k, k = 1..; None for a place that no text can reach."""
        places = zip(self._columns("kept"), self._columns("offered"), strict=True)
        return [sum(kept) / sum(offered) if sum(offered) else None for kept, offered in places]

    @property
    def accept_at_interval(self) -> list[Interval | None]:
        """95 % intervals of accept@k over resampled texts."""
        places = zip(self._columns("kept"), self._columns("offered"), strict=True)
        return [bootstrap(kept, offered) for kept, offered in places]

    def _columns(self, name: str) -> list[list[float]]:
        """By place, then by text."""
        rows: list[list[float]] = [getattr(text, name) for text in self.texts]
        return [list(column) for column in zip(*rows, strict=True)]

    def row(self) -> dict[str, Any]:
        """Plain JSON values."""
        plan, tau, at = self.plan, self.tau_interval, enumerate(self.accept_at, start=1)
        return {
            **plan.facts(),
            "texts": len(self.texts),
            "tokens": sum(text.emitted for text in self.texts),
            "impossible": self.impossible,
            "sim/tau": self.tau,
            "sim/tau_interval": _listed(tau),
            "sim/accepted_per_round": self.accepted_per_round,
            "sim/rounds": self.rounds,
            **{f"sim/accept@{k}": value for k, value in at},
            "sim/accept_at_interval": [_listed(one) for one in self.accept_at_interval],
        }


def _listed(interval: Sequence[float] | None) -> list[float] | None:
    return None if interval is None else list(interval)
