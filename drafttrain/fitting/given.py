"""What a fit is given: rows, the frozen target, and a drafter to start with."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

from drafttrain import companions, runs
from drafttrain.checks import path_of
from drafttrain.data.conversations import HELD_OUT
from drafttrain.data.datamodule import ConversationData
from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError
from drafttrain.fitting.parts import Parts
from drafttrain.fitting.saying import say
from drafttrain.fitting.settings import reads_store
from drafttrain.fitting.trees import cut_defaults
from drafttrain.packaging.beginning import read_beginning, take_weights
from drafttrain.packaging.manifest import STORED
from drafttrain.processes import rank, world_size
from drafttrain.reporting.console import clock, track
from drafttrain.runs import seed_everything
from drafttrain.target.adapter import Trained
from drafttrain.target.answers import in_folder
from drafttrain.target.model import Target
from drafttrain.target.store import Store
from drafttrain.target.stored import share
from drafttrain.training.job import Job
from drafttrain.training.pairing import check_device, check_set, draft_vocabulary
from drafttrain.training.prepare import usable_prompts

ALL_HELD_OUT = {
    "limit_tokens": None,
    "limit_rows": None,
    "temperatures": None,
    "labels": "answers",
    "set_aside": 0,
}
"""Held-out rows are answers of all temperatures, whatever part of the set is trained on."""
ASIDE = {"take_set_aside": True, "limit_tokens": None, "limit_rows": None, "labels": "answers"}


def read_data(parts: Parts) -> tuple[ConversationData, ConversationData | None]:
    """Training rows, and held-out ones if the set has any.

    Raises: InputError if there is nothing to learn from.
    """
    companions.at("reads the data")
    data = parts.data(split="train")
    held_out = None
    if data.set.indices(HELD_OUT):
        with contextlib.suppress(InputError):  # Rows without a supervised token within max_length.
            held_out = parts.data(split="held_out", **ALL_HELD_OUT)
    say(data.summary())
    say(
        "held_out: no rows, so nothing is measured by decoding"
        if held_out is None
        else held_out.summary()
    )
    again = 0 if held_out is None else data.set.asked_also(data.indices)
    if again:
        say(
            f"WARNING: {again} of {len(data.set.indices(HELD_OUT))} held-out rows have the same "
            "prompt as a row that is trained on, so what is measured on them is no measure for new "
            "prompts: take repeated prompts out of the files, and make the set again"
        )
    return data, held_out


def check_batches(parts: Parts, data: ConversationData) -> None:
    """Raise InputError if the rows cannot be put into batches or sequences, before the target is
    loaded."""
    if parts.learns:
        trainer = parts.settings.trainer
        trainer.sampler(data, seed=parts.seed, rank=rank(), world=world_size())


def read_calibration(parts: Parts) -> ConversationData | None:
    """Rows set aside, greedy ones where there are some, since a greedy target is what trees are
    compared with."""
    boost = parts.settings.boost
    shares = boost is not None and boost.nodes is not None
    if not (parts.settings.final.calibrates or shares):
        return None
    if not parts.data.get("set_aside"):
        raise InputError(
            "final.calibrated needs rows that are not trained on: set data.set_aside, to 64 for "
            "instance"
        )
    try:
        rows = parts.data(split="train", **ASIDE | {"temperatures": [0.0]})
    except InputError:
        rows = parts.data(split="train", **ASIDE | {"temperatures": None})
    say(f"set aside to calibrate trees: {rows.summary()}")
    return rows


def check_store(parts: Parts, data: ConversationData) -> Parts:
    """Look at a store of features before the target is loaded.

    With target.dtype=auto the target then has the store's dtype.
    """
    if not reads_store(parts.features):
        return parts
    if not parts.features.get("path"):
        raise InputError("needs features.path=<folder of a store>")
    store = Store(str(parts.features.get("path")))
    store.check_data(data)
    if parts.features.get("verify"):
        for number in track(
            share(store.shards_of(data)), description="reads the store through", unit="shard"
        ):
            store.verify(number)
    store.close()
    if parts.target.get("dtype") != "auto":
        return parts
    return parts.settled({"target.dtype": store.fingerprint.get("dtype", "auto")})


def load_target(parts: Parts, data: ConversationData, held_out: ConversationData | None) -> Target:
    """The target, checked against the set that it must have written."""
    companions.at("loads the target")
    began = time.monotonic()
    objects: dict[str, Any] = {"work": "throughput"} if parts.target.takes("work") else {}
    if parts.settings.trains_target and parts.target.takes("pack"):
        # An adapter needs plain linears; the tuned target is packed at the end.
        objects["pack"] = False
    target = parts.target(**objects)
    check_target(parts, target, data, held_out)
    where = f"{target.name}, {target.dtype}, {target.device}".replace("torch.", "")
    say(f"target: {where}, loaded in {clock(time.monotonic() - began)}")
    return target


def check_target(
    parts: Parts, target: Target, data: ConversationData, held_out: ConversationData | None
) -> None:
    """Raise InputError unless a target wrote the set and is where training was asked for."""
    check_set(target, data, held_out, str(parts.data.get("path")))
    check_device(target, parts.settings.trainer.accelerator)


def check_beginning(parts: Parts, target: Target, data: ConversationData) -> None:
    """Raise InputError for a draft vocabulary or weights that a drafter cannot start with, and for
    a set of answers of another target, or that lacks some or has them too short."""
    settings = parts.settings
    if settings.eval.answers is not None:
        folder, prompts = path_of("eval.answers", settings.eval.answers), list[list[int]]()
        if settings.eval.prompts != 0 or settings.final.prompts != 0:
            prompts, _ = usable_prompts(target, data, settings, lambda _: None)
        in_folder(folder, target, prompts, settings.longest_answer)
    if parts.init_from is not None:
        read_beginning(parts.init_from, target, parts.kind, parts.draft_vocab)
    elif parts.draft_vocab:
        draft_vocabulary(target, data, None, parts.draft_vocab)


def make_drafter(
    parts: Parts, target: Target, data: ConversationData, held_out: ConversationData | None
) -> Drafter:
    """The drafter, with the same weights on every process and in every run of one seed."""
    objects: dict[str, Any] = {"target": target}
    given = None
    if parts.init_from is not None:
        given = read_beginning(parts.init_from, target, parts.kind, parts.draft_vocab)
        ids = getattr(given, "draft_ids", None)
        objects |= {} if ids is None else {"draft_ids": ids}
    elif parts.draft_vocab:
        objects["draft_ids"], words = draft_vocabulary(target, data, held_out, parts.draft_vocab)
        say(words)
    # What a run makes is in no configuration, and None where it was not made.
    made = [name for name in STORED if parts.drafter.takes(name)]
    objects |= {n: None for n in made if n not in objects and parts.drafter.get(n) is None}
    seed_everything(parts.seed)
    drafter = parts.drafter(**objects)
    if given is not None:
        take_weights(drafter, given, str(parts.init_from))
        say(f"starts with the weights of {parts.init_from}")
    facts = {"drafter": type(drafter).__name__, **drafter.describe()}
    say("; ".join(f"{name}: {value}" for name, value in facts.items()))
    if drafter.learns and (words := parts.settings.optim.describe(drafter)):
        say(words)
    return drafter


def fit_trees(parts: Parts, drafter: Drafter) -> Parts:
    """With default trees cut to what the drafter can fill."""
    settings, words = cut_defaults(parts.settings, drafter.max_depth, runs.current.overrides)
    if words:
        say(words)
    return replace(parts, settings=settings)


def make_adapter(job: Job) -> Trained | None:
    """What is trained of the target, where anything is; the same at first on every process."""
    joint = job.settings.joint
    if joint is None:
        return None
    joint.check(job.drafter)
    adapter = joint.adapter(job.target, seed=job.seed)
    say("target: stays frozen (joint.rank=0)" if adapter is None else adapter.describe())
    return adapter
