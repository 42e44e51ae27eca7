"""What a fit refuses by looking only at its configuration, before long work starts."""

from __future__ import annotations

import typing
from typing import Any

import torch
from omegaconf import DictConfig

from drafttrain import runs
from drafttrain.checks import shown as text_of
from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError
from drafttrain.fitting.first import check_values
from drafttrain.fitting.parts import Parts
from drafttrain.fitting.trees import check_rooms, cut_defaults
from drafttrain.packaging.beginning import check_beginning
from drafttrain.packaging.gathering import check_packages
from drafttrain.packaging.manifest import class_of
from drafttrain.processes import world_size
from drafttrain.target import load
from drafttrain.target.features import FeatureSource
from drafttrain.target.stored import StoredFeatures
from drafttrain.training.course import TrainerConfig
from drafttrain.training.job import Settings
from drafttrain.training.trainer import check_trainer
from drafttrain.tree.forest import Forest
from drafttrain.tree.topology import check_size
from drafttrain.wiring.config import Config, Recipe
from drafttrain.wiring.parameters import parameters_of, settings_of

ONLY_LEARNING = {
    "resume": ("null", "there is no run to continue"),
    "joint": ("null", "a target cannot be trained with it"),
    "boost": ("null", "there is nothing to fit on what is left"),
    "init_from": ("null", "no weights can be taken over"),
    "export_assistant": ("false", "there is no language model to write"),
}
"""Settings that must be off for a drafter that learns nothing, and why."""
Values = dict[str, Any]
"""A configuration as plain values."""


def read_settings(cfg: DictConfig) -> Parts:
    """The parts of a fit, once everything was refused that its configuration shows to be wrong.

    Raises: InputError.
    """
    config = Config.of(cfg)
    values = config.values
    check_values(values)
    kind = kind_of(Recipe(config, "drafter"))
    learns = kind.learns  # Only here is the class asked: there is no drafter yet.
    check_vocabulary(kind, values)
    if not learns:
        refuse_learning(values, kind.__name__)
    if "packages" in values["drafter"]:
        check_packages(values["drafter"]["packages"])
    check_joint(values)
    for section in ("drafter", "features"):
        Recipe[Any](config, section).check()
    load.check_settings(values["target"])
    settings = build_settings(config)
    check_trees(settings, Recipe(config, "drafter"))
    parts = Parts.of(config, settings, kind, learns)
    if settings.boost is not None:
        settings.boost.check_kind(kind)
        refuse_with_boost(parts)
        check_together(settings, settings.boost.members)
    if settings.search is not None:
        settings.search.check(kind)
    if not settings.tree.size:
        raise InputError("the tree is empty: give tree=chain tree.k=4, or tree=static")
    refuse_with_joint(parts)
    if parts.init_from is not None:
        check_beginning(parts.init_from)
    return parts


def kind_of(drafter: Recipe[Drafter]) -> type[Drafter]:
    """The drafter's class, named by itself or as what a function makes.

    Raises: InputError for another thing, and for a class that a package could not name.
    """
    named = text_of(drafter.get("_target_"))
    kind = drafter.kind
    if not isinstance(kind, type):
        kind = typing.get_type_hints(kind).get("return")
    if not (isinstance(kind, type) and issubclass(kind, Drafter)):
        raise InputError(
            f"drafter._target_={named} is no drafter: give drafter=<choice>, see --help"
        )
    class_of(
        f"{kind.__module__}.{kind.__qualname__}",
        f"drafter._target_={named} could be trained and not packaged, put its file into "
        "drafttrain/drafter",
    )
    return kind


def check_vocabulary(kind: type[Drafter], values: Values) -> None:
    """Raise InputError for a draft vocabulary that drafters of a class cannot have."""
    if values["draft_vocab"] and "draft_ids" not in parameters_of(kind):
        raise InputError(
            f"draft_vocab={values['draft_vocab']}: {kind.__name__} has no draft vocabulary, set it "
            "to 0"
        )


def check_trees(settings: Settings, drafter: Recipe[Drafter]) -> None:
    """Raise InputError for a tree that the command names and drafters of these settings cannot
    fill."""
    kind = drafter.kind
    own = {field.name: drafter.get(field.name) for field in settings_of(kind)}
    deepest = kind.deepest(kind.Config(**own)) if own else None
    choices = drafter.config.values["draft_vocab"] or None
    cut, _ = cut_defaults(settings, deepest, runs.current.overrides)
    check_rooms(cut, deepest, choices)


def check_joint(values: Values) -> None:
    """Raise InputError for joint=<no section of that kind>."""
    joint = values["joint"]
    if joint is not None and not (isinstance(joint, dict) and "rank" in joint):
        raise InputError(f"joint={text_of(joint)}: give joint=lora, or null for a frozen target")


def build_settings(config: Config) -> Settings:
    """The sections that check themselves."""
    trainer: TrainerConfig = Recipe[TrainerConfig](config, "trainer")()
    if trainer.batch_tokens is None and trainer.batch_rows is None:
        raise InputError("give trainer.batch_tokens or trainer.batch_rows")
    if trainer.accelerator not in ("auto", "cpu", "gpu", "mps"):
        raise InputError(f"trainer.accelerator={trainer.accelerator}: give auto, cpu, gpu or mps")
    if trainer.accelerator == "gpu" and not torch.accelerator.is_available():
        raise InputError("trainer.accelerator=gpu: no accelerator was found here, give cpu or auto")
    values = config.values
    check_trainer(trainer, joint=values["joint"] is not None, boost=values["boost"] is not None)
    names = ("optim", "eval", "checkpoint", "final", "tree", "joint", "boost", "search")
    settings = Settings(trainer, **{name: Recipe[Any](config, name)() for name in names})
    settings.optim.check_installed()
    return settings


def refuse_learning(values: Values, name: str) -> None:
    """Raise InputError if settings of training are given to a drafter that learns nothing."""
    for key, (off, why) in ONLY_LEARNING.items():
        if values[key] not in (None, False):
            given = f"{key}={values[key]}" if isinstance(values[key], str) else key
            raise InputError(f"{given}: {name} learns nothing, so {why}; set {key}={off}")


def check_together(settings: Settings, members: int) -> None:
    """Raise InputError if the trees that all members grow are together more than one pass can
    check."""
    tables = {"acceptance": settings.final.acceptance, "speed": settings.final.speed}
    named = {
        f"final.{table}.{name}": tree
        for table, trees in tables.items()
        for name, tree in trees.items()
    }
    for where, tree in {"the tree": settings.tree, **named}.items():
        if tree is not None and not isinstance(tree, Forest):
            check_size(members * tree.size, f"{where}, grown by each of boost.members={members}")


def refuse_with_boost(parts: Parts) -> None:
    """Raise InputError for settings that several fits one after the other cannot serve."""
    boost = parts.settings.boost
    if parts.settings.joint is not None:
        raise InputError(
            "boost fits several drafters to one frozen target, joint=lora would change it: set "
            "joint=null"
        )
    if world_size() > 1:
        raise InputError(
            "boost fits one model after the other in one process: start it without accelerate "
            "launch"
        )
    if parts.resume not in (None, "last"):
        raise InputError(
            f"resume={parts.resume}: a run of boost has many checkpoints and knows where it was, "
            "give resume=last"
        )
    if parts.export_assistant:
        raise InputError(
            "export_assistant: boost makes several models, and none of them replaces all; set it "
            "to false"
        )
    if boost is not None and boost.nodes is not None and not parts.data.get("set_aside"):
        raise InputError(
            "boost.nodes needs rows that are not trained on: set data.set_aside, to 16 for instance"
        )


def refuse_with_joint(parts: Parts) -> None:
    """Raise InputError for settings that a target which is trained too cannot serve."""
    pack = parts.config.values["target"].get("pack", False)
    if parts.settings.trains_target and pack not in ("auto", False):
        raise InputError(
            f"target.pack={pack}: packed weights cannot be trained jointly, set target.pack=auto "
            "or false"
        )
    if parts.settings.joint is not None and reads_store(parts.features):
        raise InputError(
            "features=store: a target that is trained too (joint) changes, and its features with "
            "it; set features=online"
        )


def reads_store(features: Recipe[FeatureSource]) -> bool:
    """Are features read from a store?"""
    return features.kind is StoredFeatures
