"""What a fit refuses by looking at its configuration alone, before long work starts."""

from __future__ import annotations

import inspect
import json
import typing
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from drafttrain import companions
from drafttrain.checks import integer, switch
from drafttrain.checks import shown as text_of
from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError
from drafttrain.packaging.beginning import check_beginning
from drafttrain.packaging.gathering import check_packages
from drafttrain.packaging.manifest import class_of
from drafttrain.processes import world_size
from drafttrain.runs import differences, plain
from drafttrain.target.stored import StoredFeatures
from drafttrain.training.course import TrainerConfig
from drafttrain.training.prepare import Settings
from drafttrain.training.trainer import check_trainer
from drafttrain.tree.forest import Forest
from drafttrain.tree.topology import check_size
from drafttrain.wiring.building import build, named_by

ONLY_LEARNING = {
    "resume": ("null", "there is no run to continue"),
    "joint": ("null", "a target cannot be trained with it"),
    "boost": ("null", "there is nothing to fit on what is left"),
    "init_from": ("null", "no weights can be taken over"),
    "export_assistant": ("false", "there is no language model to write"),
}
"""Settings that must be off for a drafter that learns nothing, and why."""
LARGEST_SEED = (1 << 32) - 1


def check_agreement(cfg: DictConfig) -> None:
    """Raise InputError unless every process on this machine was given the same settings: each would
    train something else, and what they put together would be none of it, or they would wait for
    each other without end."""
    if world_size() < 2:
        return
    given = companions.settings_of_all(_comparable(plain(cfg)))
    for other, theirs in given.items():
        found = differences(given[min(given)], theirs)
        if found:
            listed = "; ".join(
                f"{key} is {text_of(mine)} and {text_of(its)}"
                for key, (mine, its) in list(found.items())[:8]
            )
            who = f"ranks {min(given)} and {other}"
            raise InputError(
                f"{who} were started with different settings ({listed}): give all the same ones"
            )


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from a file. Which device a process has may be its own."""
    kept: dict[str, Any] = json.loads(json.dumps(config, default=str))
    if isinstance(kept.get("target"), dict):
        kept["target"].pop("device", None)
    return kept


def read_settings(cfg: DictConfig) -> Settings:
    """Everything that can be refused by looking at the configuration alone."""
    integer("seed", cfg.seed, 0, LARGEST_SEED)
    integer("draft_vocab", cfg.draft_vocab)
    switch("export_assistant", cfg.export_assistant)
    kind = kind_of(cfg)
    if cfg.draft_vocab and "draft_ids" not in inspect.signature(kind).parameters:
        raise InputError(
            f"draft_vocab={cfg.draft_vocab}: {kind.__name__} has no draft vocabulary, set it to 0"
        )
    if not kind.learns:
        refuse_learning(cfg, kind.__name__)
    if "packages" in cfg.drafter:
        check_packages(plain(cfg)["drafter"]["packages"])
    train_target = trains_target(cfg)
    trainer: TrainerConfig = build(cfg.trainer)
    if trainer.batch_tokens is None and trainer.batch_rows is None:
        raise InputError("give trainer.batch_tokens or trainer.batch_rows")
    if trainer.accelerator not in ("auto", "cpu", "gpu", "mps"):
        raise InputError(f"trainer.accelerator={trainer.accelerator}: give auto, cpu, gpu or mps")
    if trainer.accelerator == "gpu" and not torch.accelerator.is_available():
        raise InputError("trainer.accelerator=gpu: no accelerator was found here, give cpu or auto")
    check_trainer(trainer, joint=cfg.joint is not None, boost=cfg.boost is not None)
    settings = Settings(
        trainer,
        build(cfg.optim),
        build(cfg.eval),
        build(cfg.checkpoint),
        build(cfg.final),
        build(cfg.tree),
        build(cfg.joint),
        build(cfg.boost),
        build(cfg.search),
    )
    if settings.boost is not None:
        settings.boost.check_kind(kind)
        refuse_with_boost(cfg)
        check_together(settings, settings.boost.members)
    if settings.search is not None:
        settings.search.check(kind)
    if not settings.tree.size:
        raise InputError("the tree is empty: give tree=chain tree.k=4, or tree=static")
    if train_target and cfg.target.get("pack", False) not in ("auto", False):
        raise InputError(
            f"target.pack={cfg.target.pack}: packed weights cannot be trained jointly, set "
            f"target.pack=auto or false"
        )
    if cfg.joint is not None and reads_store(cfg):
        raise InputError(
            "features=store: a target that is trained too (joint) changes, and its features with "
            "it; set features=online"
        )
    if cfg.init_from is not None:
        check_beginning(str(cfg.init_from))
    return settings


def kind_of(cfg: DictConfig) -> type[Drafter]:
    """The drafter's class, named by itself or as what a function makes. Raises InputError for
    another thing, and for a class that a package could not name."""
    kind = named_by(cfg.drafter)
    if not isinstance(kind, type):
        kind = typing.get_type_hints(kind).get("return")
    if not (isinstance(kind, type) and issubclass(kind, Drafter)):
        raise InputError(
            f"drafter._target_={text_of(cfg.drafter._target_)} is no drafter: give "
            f"drafter=<choice>, see --help"
        )
    told = f"drafter._target_={text_of(cfg.drafter._target_)} could be trained and not packaged"
    class_of(
        f"{kind.__module__}.{kind.__qualname__}", f"{told}, put its file into drafttrain/drafter"
    )
    return kind


def refuse_learning(cfg: DictConfig, name: str) -> None:
    """Raise InputError if settings of training are given to a drafter that learns nothing."""
    for key, (off, why) in ONLY_LEARNING.items():
        if cfg[key] not in (None, False):
            given = f"{key}={cfg[key]}" if isinstance(cfg[key], str) else key
            raise InputError(f"{given}: {name} learns nothing, so {why}; set {key}={off}")


def check_together(settings: Settings, members: int) -> None:
    """Raise InputError if trees that each of so many models grows are together more than one pass
    can check."""
    tables = {"acceptance": settings.final.acceptance, "speed": settings.final.speed}
    named = {
        f"final.{table}.{name}": tree
        for table, trees in tables.items()
        for name, tree in trees.items()
    }
    for where, tree in {"the tree": settings.tree, **named}.items():
        if tree is not None and not isinstance(tree, Forest):
            check_size(members * tree.size, f"{where}, grown by each of boost.members={members}")


def refuse_with_boost(cfg: DictConfig) -> None:
    """Raise InputError for settings that several fits one after the other cannot serve."""
    if cfg.joint is not None:
        raise InputError(
            "boost fits several drafters to one frozen target, joint=lora would change it: set "
            "joint=null"
        )
    if world_size() > 1:
        raise InputError(
            "boost fits one model after the other in one process: start it without accelerate "
            "launch"
        )
    if cfg.resume not in (None, "last"):
        raise InputError(
            f"resume={cfg.resume}: a run of boost has many checkpoints and knows where it was, "
            f"give resume=last"
        )
    if cfg.export_assistant:
        raise InputError(
            "export_assistant: what boost makes is several models, none of which stands for all; "
            "set it to false"
        )
    if cfg.boost.nodes is not None and not cfg.data.set_aside:
        raise InputError(
            "boost.nodes needs rows that are not trained on: set data.set_aside, to 16 for instance"
        )


def trains_target(cfg: DictConfig) -> bool:
    if cfg.joint is not None and not (OmegaConf.is_dict(cfg.joint) and "rank" in cfg.joint):
        raise InputError(
            f"joint={text_of(cfg.joint)}: give joint=lora, or null for a frozen target"
        )
    return cfg.joint is not None and bool(cfg.joint.rank)


def reads_store(cfg: DictConfig) -> bool:
    return named_by(cfg.features) is StoredFeatures
