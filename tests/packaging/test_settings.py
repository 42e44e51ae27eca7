"""Settings in a package: those of a drafter's `Config`, or, without one, of its constructor."""

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


class Signed:
    def __init__(
        self,
        target: Any,
        *,
        draft_ids: list[int] | None = None,
        width: int = 3,
        noise: float = 0.1,
        bias: bool = False,
        divergence: str = "kl",
        layers: Sequence[int] = (),
        loss: Mapping[str, float] | None = None,
    ) -> None: ...


GIVEN: dict[str, Any] = {
    "width": 2,
    "noise": 0.5,
    "bias": True,
    "divergence": "kl",
    "layers": [1],
    "loss": None,
}
KINDS: list[Any] = [Described, Signed]


def test_a_config_and_a_constructor_say_the_same() -> None:
    described, signed = (json_types_of(kind) for kind in KINDS)
    assert described == signed and list(described) == ["draft_ids", *GIVEN]
    assert described["noise"] == (int, float) and described["loss"] == ()


@pytest.mark.parametrize("kind", KINDS)
def test_settings_are_exactly_those_of_the_class(kind: Any) -> None:
    node = {"_target_": "x", **GIVEN}
    assert checked_settings(node, kind, "here") == GIVEN
    assert checked_settings({**node, "noise": 1, "more": 5}, kind, "here", also=("more",))
    for name, value in (
        ("width", 2.5),
        ("width", True),
        ("noise", "x"),
        ("bias", 1),
        ("divergence", 3),
        ("layers", "12"),
    ):
        with pytest.raises(InputError, match=rf"here\.{name} is "):
            checked_settings({**node, name: value}, kind, "here")
    for odd in ({**node, "draft_ids": [1]}, {n: v for n, v in node.items() if n != "loss"}):
        with pytest.raises(InputError, match=r"draft_ids|loss"):
            checked_settings(odd, kind, "here")
