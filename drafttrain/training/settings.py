"""What a run measures and keeps: settings, checked without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drafttrain.checks import integer, replay_words, shown
from drafttrain.errors import InputError
from drafttrain.tree.topology import Growth

if TYPE_CHECKING:
    from drafttrain.drafter.base import Drafter


DECODED = 16
"""Prompts that an evaluation decodes where none are named and acceptance cannot be replayed."""


DECODED_LAST = 100
"""The same at the end of a run."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How often and how much is decoded while training."""

    every: int | None
    """Updates between evaluations; None evaluates only at the end."""
    prompts: int | None
    """Held-out prompts that acceptance is measured on, shared out over the processes; 0 measures
    nothing, None takes all where it is replayed, and `DECODED` where it must be decoded."""
    replay: bool
    """Count acceptance on the target's kept answers, where they can stand in for it? False decodes
    at every evaluation."""
    answers: str | None
    """Folder of a conversation set with the target's answers at temperature 0; None: those of the
    run's own set that are such, and others written once into the cache folder."""
    checked: int
    """Prompts that are really decoded at every evaluation where acceptance is replayed, to compare
    the counts; others each time."""
    max_new_tokens: int
    batch: int
    """Prompts decoded at once."""
    sim_rows: int
    """Held-out rows for the teacher-forced estimates."""
    speed_prompts: int
    """Prompts decoded one by one, plainly and with drafts in turn, for `val/speedup`; 0 leaves it
    out."""
    speed_every: int | None
    """Measure speed at every n-th evaluation and at the end; None is only at the end."""
    patience: int | None
    """Evaluations without a better val/tau, beyond its noise, after which the run ends; None never
    ends it."""
    turns: int | None = None
    """Of a held-out conversation, decoded here and at the end of the run; None is all."""

    def __post_init__(self) -> None:
        least = {"checked": 0, "max_new_tokens": 1, "batch": 1, "sim_rows": 0, "speed_prompts": 0}
        for name, low in least.items():
            integer(f"eval.{name}", getattr(self, name), low)
        integer("eval.prompts", self.prompts, 0, null="all")
        replay_words(self.replay, self.answers, "eval.")
        never = {"every": "only at the end", "speed_every": "only at the end", "patience": "never"}
        never["turns"] = "all"
        for name, null in never.items():
            integer(f"eval.{name}", getattr(self, name), 1, null=null)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and how many stay."""

    every: int | None
    """Updates between them; None writes one at each evaluation, and at the end."""
    keep: int
    """Numbered ones to keep in addition to last and best, the newest; a link costs no room while it
    is the newest."""

    def __post_init__(self) -> None:
        integer("checkpoint.every", self.every, 1, null="one at each evaluation")
        integer("checkpoint.keep", self.keep)


@dataclass(frozen=True, kw_only=True)
class FinalConfig:
    """What is measured at the end of a run, greedily."""

    prompts: int | None
    """Held-out prompts for acceptance; None takes all where it is replayed, and `DECODED_LAST`
    where it must be decoded."""
    samples: int
    """How many of their answers are kept as samples; they are held-out text, so they stay in the
    run's folder."""
    max_new_tokens: int
    batch: int
    acceptance: Mapping[str, Growth | None]
    """Trees by name; None leaves one out."""
    speed_prompts: int
    """Held-out prompts for speed, decoded one by one, plainly and by each tree in turn."""
    speed_new_tokens: int
    speed: Mapping[str, Growth | None]
    calibrated: Sequence[int] = ()
    """Nodes of further trees for acceptance: the most likely paths, by the accuracy of the
    drafter's heads on rows set aside."""
    calibrated_speed: Sequence[int] = ()
    """The same, for speed."""
    change_rows: int = 32
    """Held-out rows on which a target that was trained jointly is compared with the original; 0
    compares none."""

    def __post_init__(self) -> None:
        integer("final.prompts", self.prompts, 0, null="all")
        least = {
            "samples": 0,
            "max_new_tokens": 1,
            "batch": 1,
            "speed_prompts": 0,
            "speed_new_tokens": 1,
        }
        for name, low in {**least, "change_rows": 0}.items():
            integer(f"final.{name}", getattr(self, name), low)
        for name in ("acceptance", "speed"):
            trees = getattr(self, name)
            if not isinstance(trees, Mapping):
                raise InputError(f"final.{name}={trees}: needs trees by name, {{}} for none")
            for label, tree in trees.items():
                if not (tree is None or (isinstance(tree, Growth) and tree.size)):
                    raise InputError(
                        f"final.{name}.{label}={tree}: needs a tree that drafts something, or null "
                        "to leave it out"
                    )
        for name in ("calibrated", "calibrated_speed"):
            sizes = getattr(self, name)
            if not isinstance(sizes, list | tuple) or not all(
                type(size) is int and size >= 1 for size in sizes
            ):
                raise InputError(
                    f"final.{name}={shown(sizes)}: needs a list of numbers of nodes, [] for none"
                )

    @property
    def calibrates(self) -> bool:
        return bool(self.calibrated or self.calibrated_speed)

    def check(self, drafter: Drafter) -> None:
        """Refuse before training what could not be measured after it."""
        from drafttrain.drafter.heads import VocabularyHeads
        from drafttrain.training.calibrate import check_calibrated

        if self.calibrates and not isinstance(drafter, VocabularyHeads):
            raise InputError(
                f"final.calibrated: {type(drafter).__name__} has no heads whose accuracy could "
                "make a tree; set final.calibrated and final.calibrated_speed to []. python -m "
                "drafttrain.tune makes trees for any drafter"
            )
        for name in ("calibrated", "calibrated_speed"):
            for size in getattr(self, name):
                check_calibrated(size, drafter, f"final.{name}")
        for table in ("acceptance", "speed"):
            for name, tree in getattr(self, table).items():
                if tree is not None:
                    drafter.check(tree, f"final.{table}.{name}")
