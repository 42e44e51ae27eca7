"""How the target writes conversations: settings, checked without torch."""

from __future__ import annotations

import random
from dataclasses import dataclass

from drafttrain.checks import integer, shown
from drafttrain.data.shapes import Prompt
from drafttrain.errors import InputError
from drafttrain.nn.sampling import Policy


@dataclass(frozen=True, kw_only=True)
class SynthesisConfig:
    """How conversations are written. Defaults are in conf/synthesize.yaml."""

    temperatures: list[float]
    """Each row's answers take one of these, drawn with the row's seed; repeat a value to weight
    it."""
    top_k: int
    top_p: float
    max_answer: int
    """Tokens per answer, the end token included."""
    max_length: int
    """Tokens per conversation; a row is closed before it would be longer."""
    turns: list[int]
    """Answers per self-written conversation, drawn like the temperature."""
    user: Policy
    """How the target writes user turns."""
    max_user: int
    """Tokens per self-written user turn; one that does not end by then drops the row."""
    system: str | None
    """System text of self-written conversations; None leaves it to the template."""
    seed: int

    def __post_init__(self) -> None:
        if isinstance(self.user, dict):
            if odd := sorted(set(self.user) - {"temperature", "top_k", "top_p"}):
                raise InputError(
                    f"writing.user has no setting {shown(odd[0])}: synthesis takes temperature, "
                    "top_k and top_p"
                )
            object.__setattr__(self, "user", Policy(**self.user))
        if not isinstance(self.user, Policy):
            raise InputError(
                f"writing.user={shown(self.user)}: needs writing.user.temperature, .top_k and "
                ".top_p"
            )
        if not self.user.only_cuts:
            raise InputError(
                f"writing.user is {self.user}: synthesis takes temperature, top_k and top_p"
            )
        for name in ("temperatures", "turns"):
            values = getattr(self, name)
            if (
                not isinstance(values, list)
                or not values
                or not all(type(v) in (int, float) for v in values)
            ):
                raise InputError(
                    f"writing.{name}={shown(values)}: needs a list of at least one number"
                )
        if not all(type(turns) is int and turns >= 1 for turns in self.turns):
            raise InputError(f"writing.turns={shown(self.turns)}: needs integers of at least 1")
        for name, least in (("max_answer", 1), ("max_user", 1), ("max_length", 8)):
            integer(f"writing.{name}", getattr(self, name), least)
        integer("writing.seed", self.seed, 0, (1 << 63) - 1)
        if self.system is not None and not isinstance(self.system, str):
            raise InputError(f"writing.system={shown(self.system)}: needs text, or null")
        for temperature in self.temperatures:
            Policy(temperature, self.top_k, self.top_p)

    def chance(self, row: int, purpose: str) -> random.Random:
        return random.Random(f"{self.seed}/{row}/{purpose}")

    def drawn(self, row: int) -> tuple[float, int]:
        """What is drawn for a row: the temperature of its answers, and how many a conversation has
        that the target writes by itself."""
        choose = self.chance(row, "choices")
        return choose.choice(self.temperatures), choose.choice(self.turns)

    def answers(self, row: int, prompt: Prompt | None) -> int:
        """How many a row is to have."""
        return self.drawn(row)[1] if prompt is None else len(prompt.users)
