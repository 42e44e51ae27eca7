"""Settings in a package: those of a drafter's `Config`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from drafttrain.errors import InputError
from drafttrain.packaging.settings import checked_settings, json_types_of


@dataclass(frozen=True, kw_only=True)
class Config:
    draft_ids: Sequence[int] | None
    width: int
    noise: float
    bias: bool
    divergence: str
    layers: Sequence[int]
    loss: Mapping[str, float] | None


class Described:
    Config: ClassVar[type] = Config

    def __init__(self, target: Any, **settings: Any) -> None:
        self.config = Config(**settings)


KIND: Any = Described
GIVEN: dict[str, Any] = {
    "width": 2,
    "noise": 0.5,
    "bias": True,
    "divergence": "kl",
    "layers": [1],
    "loss": None,
}


def test_a_config_says_the_types_of_settings() -> None:
    found = json_types_of(KIND)
    assert list(found) == ["draft_ids", *GIVEN]
    assert found["noise"] == (int, float) and found["loss"] == ()


def test_settings_are_exactly_those_of_the_class() -> None:
    node = {"_target_": "x", **GIVEN}
    assert checked_settings(node, KIND, "here") == GIVEN
    assert checked_settings({**node, "noise": 1, "more": 5}, KIND, "here", also=("more",))
    for name, value in (
        ("width", 2.5),
        ("width", True),
        ("noise", "x"),
        ("bias", 1),
        ("divergence", 3),
        ("layers", "12"),
    ):
        with pytest.raises(InputError, match=rf"here\.{name} is "):
            checked_settings({**node, name: value}, KIND, "here")
    for odd in ({**node, "draft_ids": [1]}, {n: v for n, v in node.items() if n != "loss"}):
        with pytest.raises(InputError, match=r"draft_ids|loss"):
            checked_settings(odd, KIND, "here")
