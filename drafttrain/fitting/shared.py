"""What several runs of one command share: rows, the target, and the features that it read.

Each is made by the first run that needs it and handed to the next one whose settings ask for the
very same; another one takes its place, and is freed, where they do not. Features are the same only
if the same rows are read in the same batches, since their last bits depend on the batch: so a run
ends with the weights that it would have by itself.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttrain.data.datamodule import ConversationData
from drafttrain.drafter.base import Drafter
from drafttrain.fitting.given import check_target, load_target, read_data
from drafttrain.fitting.opening import dtype_of, settle_device
from drafttrain.fitting.parts import Parts
from drafttrain.flow import Batch, Features
from drafttrain.target.features import FeatureSource
from drafttrain.target.model import Target
from drafttrain.training.judged import Judge
from drafttrain.training.prepare import kept_in_memory
from drafttrain.training.run import Run

READ, READ_HELD_OUT = "features", "held-out features"
Data = tuple[ConversationData, ConversationData | None]


@dataclass
class Shared:
    """Nothing: of a run that is the only one."""

    home: Path | None = None
    """The folder of all, where this run is a part; the one to resume."""
    judge: Judge | None = None
    """Of the run that is made now; None lets it train to its end."""

    def data(self, parts: Parts) -> Data:
        """Training rows and held-out ones, see `given.read_data`."""
        return read_data(parts)

    def settled(self, parts: Parts) -> Parts:
        """With what all runs have alike and one of them has settled."""
        return parts

    def target(
        self, parts: Parts, data: ConversationData, held_out: ConversationData | None
    ) -> Target:
        """The target, checked against the set, see `given.load_target`."""
        return load_target(parts, data, held_out)

    def features(self, parts: Parts) -> Callable[..., FeatureSource]:
        """What makes the source of features that training reads."""
        return parts.features

    def held_out_features(self, parts: Parts) -> Callable[..., FeatureSource]:
        """What makes the source of held-out rows' features."""
        return kept_in_memory


class Lent:
    """A source of features that a run reads, and does not close."""

    def __init__(self, source: FeatureSource) -> None:
        self.source = source

    def features(self, batch: Batch) -> Features:
        """See `FeatureSource`."""
        return self.source.features(batch)

    def describe(self) -> str:
        """See `FeatureSource`."""
        return f"{self.source.describe()}; shared by runs that read the same"

    def facts(self) -> dict[str, Any]:
        """See `FeatureSource`."""
        return self.source.facts()

    def close(self) -> None:
        """Nothing: the next run may read it too."""


class OfAll(Shared):
    """Of the runs of a sweep."""

    def __init__(self, home: Path, dtype: str | None) -> None:
        super().__init__(home)
        self.dtype = dtype
        """Of the target, as an earlier part of the sweep settled it."""
        self._made: dict[str, tuple[Any, Any]] = {}
        """{what: (settings that ask for it, itself)}"""
        Run(home).clear_scratch()  # A killed sweep left it.

    def data(self, parts: Parts) -> Data:
        return self._once("data", self._rows(parts), lambda: read_data(parts))

    def settled(self, parts: Parts) -> Parts:
        parts = settle_device(parts)
        if parts.target.get("dtype") != "auto":
            return parts
        self.dtype = self.dtype or dtype_of(parts, Run(self._folder))
        return parts.settled({"target.dtype": self.dtype})

    def target(
        self, parts: Parts, data: ConversationData, held_out: ConversationData | None
    ) -> Target:
        def load() -> Target:
            self._free(READ, READ_HELD_OUT)
            return load_target(parts, data, held_out)

        asked = (_text(parts.config.values["target"]), parts.settings.trains_target)
        found = self._once("target", asked, load)
        check_target(parts, found, data, held_out)
        return found

    def features(self, parts: Parts) -> Callable[..., FeatureSource]:
        def make(**given: Any) -> FeatureSource:
            names = ("needs", "groups", "shared")
            asked = [self._reading(parts, given["target"]), given["data"].sequence]
            asked += [given[name] for name in names]
            given["spill_dir"] = Run(self._folder).scratch
            return Lent(self._once(READ, asked, lambda: parts.features(**given)))

        return make

    def held_out_features(self, parts: Parts) -> Callable[..., FeatureSource]:
        def make(
            target: Target, drafter: Drafter, data: ConversationData, features: dict[str, Any]
        ) -> FeatureSource:
            # The batches in which they are read depend on how many are read.
            asked = [self._reading(parts, target), drafter.needs, parts.settings.eval.sim_rows]
            made = self._once(
                READ_HELD_OUT, asked, lambda: kept_in_memory(target, drafter, data, features)
            )
            return Lent(made)

        return make

    def free(self, *, target: bool = False) -> None:
        """Free what a run has left. Its target too, where the run may have changed it."""
        if target:
            self._free(READ, READ_HELD_OUT, "target")
        collect()

    def close(self) -> None:
        """Free everything."""
        self._free(*self._made)
        Run(self._folder).clear_scratch()
        collect()

    @property
    def _folder(self) -> Path:
        assert self.home is not None
        return self.home

    def _once(self, what: str, asked: Any, make: Callable[[], Any]) -> Any:
        """What is there already, if the very same is asked for."""
        if what not in self._made or self._made[what][0] != asked:
            self._free(what)
            self._made[what] = asked, make()
        return self._made[what][1]

    def _free(self, *names: str) -> None:
        for name in names:
            _, made = self._made.pop(name, (None, None))
            if made is not None and name in (READ, READ_HELD_OUT):
                made.close()
            del made

    def _rows(self, parts: Parts) -> str:
        return _text(parts.config.values["data"])

    def _reading(self, parts: Parts, target: Target) -> tuple[Any, ...]:
        """What decides what is read, the target itself included."""
        return self._rows(parts), _text(parts.config.values["features"]), id(target)


def collect() -> None:
    """Give back what nothing refers to: runs are full of circles."""
    import torch

    gc.collect()
    if torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()


def _text(values: Any) -> str:
    return json.dumps(values, sort_keys=True, default=str)
