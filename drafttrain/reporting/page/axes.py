"""Axes of drawings, and where values are between them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from drafttrain.reporting.page.markup import Markup, brief
from drafttrain.reporting.page.svg import WIDTH, path, text, upward


@dataclass(frozen=True)
class Axis:
    low: float
    high: float
    name: str
    integers: bool = False
    """Marks are at integers only."""

    def ticks(self, most: int) -> list[float]:
        """About `most` round values between the ends, or fewer."""
        span = self.high - self.low
        step = 10.0 ** math.floor(math.log10(span / most))
        step *= next(times for times in (1, 2, 5, 10, 20) if span / (step * times) <= most)
        if self.integers:
            step = max(1.0, round(step))
        first = math.ceil(self.low / step - 1e-9)
        count = math.floor(self.high / step + 1e-9) - first + 1
        return [(first + k) * step for k in range(count)]

    def widened(self) -> Axis:
        """With ends that are not too close to what is drawn, and never one value."""
        low, high = self.low, self.high
        if high - low <= 1e-9 * max(1.0, abs(low), abs(high)):
            room = max(0.5, 1e-9 * abs(high))
            low, high = low - room, high + room
        elif not self.integers and not (low == 0.0 and high == 1.0):
            room = 0.06 * (high - low)
            low, high = (low if low == 0.0 else low - room), high + room
        return Axis(low, high, self.name, self.integers)


class Frame:
    """Where values are in a drawing, and its axes.

    Args:
        x: across; y: upright, by itself one without marks.
        padded: leave room between the ends and what is drawn.
    """

    def __init__(
        self,
        x: Axis,
        y: Axis | None = None,
        *,
        width: float = WIDTH,
        height: float = 230.0,
        left: float = 46.0,
        right: float = 12.0,
        top: float = 10.0,
        foot: float = 40.0,
        padded: bool = True,
    ) -> None:
        self.width, self.height = width, height
        self.left, self.right, self.top, self.foot = left, right, top, foot
        y = y or Axis(0.0, 1.0, "")
        self.across, self.up = (x.widened(), y.widened()) if padded else (x, y)

    def x(self, value: float) -> float:
        return self.left + (value - self.across.low) / (self.across.high - self.across.low) * (
            self.width - self.left - self.right
        )

    def y(self, value: float) -> float:
        room = self.height - self.top - self.foot
        return self.height - self.foot - (value - self.up.low) / (self.up.high - self.up.low) * room

    def drawn(self, *, upright: bool = True, lines: bool = True) -> list[Markup]:
        """The axes.

        Args:
            upright: with the y axis.
            lines: with faint lines at the marks of the x axis, where there is no y axis.
        """
        return [*(self._upright() if upright else ()), *self._across(lines and not upright)]

    def _upright(self) -> list[Markup]:
        """The y axis: a line across at each mark, and its name."""
        parts = []
        for value in self.up.ticks(5):
            at = self.y(value)
            parts.append(path(self._level(at), "rule"))
            parts.append(text(_shown(value), self.left - 6, at + 4, "tick", anchor="end"))
        base = self.height - self.foot
        return [*parts, upward(self.up.name, self.top + (base - self.top) / 2)]

    def _across(self, lines: bool) -> list[Markup]:
        """The x axis, with its marks and its name."""
        base, parts = self.height - self.foot, []
        for value in self.across.ticks(max(4, int((self.width - self.left - self.right) / 40))):
            at = self.x(value)
            if lines:
                parts.append(path(f"M{brief(at)} {brief(self.top)} V{brief(base)}", "rule"))
            parts.append(path(f"M{brief(at)} {brief(base)} v4", "axis"))
            parts.append(text(_shown(value), at, base + 16, "tick", anchor="middle"))
        centre = self.left + (self.width - self.left - self.right) / 2
        name = text(self.across.name, centre, self.height - 6, "name", anchor="middle")
        return [*parts, path(self._level(base), "axis"), name]

    def _level(self, y: float) -> str:
        return f"M{brief(self.left)} {brief(y)} H{brief(self.width - self.right)}"


def _shown(value: float) -> str:
    """A mark of an axis."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:g}" if abs(value) < 1e-3 else f"{value:.4g}"
