"""A configuration once it is composed, recipes of its sections, and what a class takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ReadonlyConfigError

from drafttrain.errors import InputError
from drafttrain.runs import plain
from drafttrain.wiring.building import build
from drafttrain.wiring.composing import compose
from drafttrain.wiring.config import Config, Recipe
from drafttrain.wiring.parameters import is_open, parameters_of


class Guesser:
    """Its settings are one dataclass, as those of drafters are."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        heads: int
        rates: list[float] = field(default_factory=lambda: [0.5])
        bias: bool = True

    def __init__(self, target: str, **settings: Any) -> None:
        self.target, self.config = target, self.Config(**settings)


class Older:
    Config = "no dataclass"

    def __init__(self, target: str, heads: int = 3, **more: Any) -> None:
        self.heads, self.more = heads, more


def function(target: str, *, heads: int) -> Guesser:
    return Guesser(target, heads=heads)


NODE = {"_target_": f"{__name__}.Guesser", "heads": 2}


@pytest.mark.parametrize(
    ("call", "names", "opened"),
    [
        (Guesser, ["target", "heads", "rates", "bias"], False),
        (Older, ["target", "heads"], True),
        (function, ["target", "heads"], False),
    ],
)
def test_what_a_class_or_function_takes(
    call: Callable[..., Any], names: list[str], opened: bool
) -> None:
    assert list(parameters_of(call)) == names and is_open(call) == opened


def test_defaults_are_those_of_the_fields() -> None:
    found = parameters_of(Guesser)
    assert found["heads"].default is found["heads"].empty
    assert found["rates"].default == [0.5] and found["bias"].default is True


def test_a_class_with_one_dataclass_of_settings_is_built_and_checked() -> None:
    made = build(NODE, target="t")
    assert made.target == "t" and made.config == Guesser.Config(heads=2)
    with pytest.raises(InputError, match=r"node\.head: .*Did you mean node\.heads\?"):
        build({"_target_": NODE["_target_"], "head": 2}, target="t")
    with pytest.raises(InputError, match=r"Guesser also needs heads"):
        build({"_target_": NODE["_target_"]}, target="t")
    with pytest.raises(InputError, match=r"Guesser also needs target"):
        build(NODE)
    assert build({"_target_": f"{__name__}.Older", "other": 1}, target="t").more == {"other": 1}


def test_a_configuration_is_kept_as_it_was_composed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    cfg = compose("fit", ["experiment=quickstart", "logger=wandb"])
    config = Config.of(cfg)
    assert config.yaml == OmegaConf.to_yaml(cfg) and "${oc.env:WANDB_MODE" in config.yaml
    assert config.values == plain(cfg) and config.values["logger"]["mode"] == "disabled"
    with pytest.raises(ReadonlyConfigError):
        config.node.seed = 3


def test_what_is_settled_makes_another_configuration() -> None:
    cfg = OmegaConf.create(
        {"seed": 0, "target": {"dtype": "auto"}, "drafter": {"seed": "${seed}"}, "run_dir": None}
    )
    before = Config.of(cfg)
    after = before.settled({"seed": 7, "target.dtype": "float32"})
    cfg.seed, cfg.target.dtype = 7, "float32"
    assert after.yaml == OmegaConf.to_yaml(cfg) and after.values == plain(cfg)
    assert after.values["drafter"]["seed"] == 7, "what refers to it follows"
    assert before.values["seed"] == 0 and before.values["target"] == {"dtype": "auto"}


def test_a_recipe_builds_its_section() -> None:
    recipe: Recipe[Guesser] = Recipe(Config({"drafter": NODE, "joint": None}), "drafter")
    assert recipe(target="t", heads=5).config.heads == 5, "objects win over settings"
    assert recipe.kind is Guesser and recipe.takes("rates") and not recipe.takes("layers")
    assert recipe.get("heads") == 2 and recipe.get("rates") is None
    nothing: Recipe[Any] = Recipe(recipe.config, "joint")
    assert nothing() is None and nothing.get("rank") is None
    with pytest.raises(InputError, match=r"drafter\.x: Guesser has no setting x"):
        Recipe[Guesser](Config({"drafter": {**NODE, "x": 1}}), "drafter")(target="t")
