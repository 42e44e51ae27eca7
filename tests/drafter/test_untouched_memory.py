"""No parameter of a new drafter is memory that nobody initialised.

F74's kind: a module that is made by its constructor only, where its family sets values later.
Tried: every drafter with weights, on dense families, on those with norms after the sub-layers, with
experts, routers and attention sinks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.drafter.base import Drafter
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.early_exit import EarlyExit
from drafttrain.drafter.hydra_heads import HydraHeads
from drafttrain.drafter.medusa import Medusa
from drafttrain.drafter.ssm import Ssm
from drafttrain.errors import InputError
from drafttrain.target import load
from drafttrain.target.model import Target
from tests.drafter.make import make
from tests.families import AFTER, EXPERTS, target_of

KINDS: list[tuple[type[Drafter], dict[str, Any]]] = [
    (Eagle1, {}),
    (EarlyExit, {"mlp": 16}),
    (Ssm, {"layers": 1, "own": ["embedding", "norm", "head"]}),
    (Medusa, {}),
    (HydraHeads, {}),
]
FAMILIES = [*load.TINY, *AFTER, *EXPERTS]


@pytest.fixture
def _stale_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the allocator hands out holds NaN, as memory that was used before may."""
    for place, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        plain = getattr(place, name)

        def stale(*given: Any, plain: Any = plain, **more: Any) -> Tensor:
            out: Tensor = plain(*given, **more)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        monkeypatch.setattr(place, name, stale)
    yield


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Target:
    family = request.param
    return load.tiny(family=family) if family in load.TINY else target_of(family)


@pytest.mark.field("F74")
@pytest.mark.usefixtures("_stale_memory")
@pytest.mark.parametrize(("kind", "settings"), KINDS, ids=[kind.__name__ for kind, _ in KINDS])
def test_every_parameter_is_set_by_the_seed(
    kind: type[Drafter], settings: dict[str, Any], target: Target
) -> None:
    def made(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return make(kind, target, **settings).state_dict()

    try:
        first, again, other = made(3), made(3), made(4)
    except InputError as error:
        assert kind is EarlyExit and "one by one" in str(error), error
        return
    assert first and all(bool(tensor.isfinite().all()) for tensor in first.values())
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())
