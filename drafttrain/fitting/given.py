"""What a fit is given: rows, the frozen target, and a drafter to begin with."""

from __future__ import annotations

import contextlib
import inspect
import time
from typing import Any

from omegaconf import DictConfig

from drafttrain import companions
from drafttrain.data.conversations import HELD_OUT
from drafttrain.data.datamodule import ConversationData
from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError
from drafttrain.fitting.saying import say
from drafttrain.fitting.settings import kind_of, reads_store, trains_target
from drafttrain.packaging.beginning import read_beginning, take_weights
from drafttrain.processes import rank, world_size
from drafttrain.reporting.console import clock, track
from drafttrain.runs import seed_everything
from drafttrain.target.adapter import Trained
from drafttrain.target.model import Target
from drafttrain.target.store import Store
from drafttrain.target.stored import share
from drafttrain.training.pairing import check_device, check_set, draft_vocabulary
from drafttrain.training.prepare import Settings
from drafttrain.wiring.building import build, named_by

STANDALONE = {
    "limit_tokens": None,
    "limit_rows": None,
    "temperatures": None,
    "labels": "answers",
    "set_aside": 0,
}
"""Held-out rows are answers of all temperatures, whatever part of the set is trained on."""
ASIDE = {"take_set_aside": True, "limit_tokens": None, "limit_rows": None, "labels": "answers"}


def read_data(cfg: DictConfig) -> tuple[ConversationData, ConversationData | None]:
    """Training rows, and held-out ones if the set has any. Raises InputError if there is nothing to
    learn from."""
    companions.at("reads the data")
    data: ConversationData = build(cfg.data, split="train")
    held_out = None
    if data.set.indices(HELD_OUT):
        with contextlib.suppress(InputError):  # Rows without a supervised token within max_length.
            held_out = build(cfg.data, split="held_out", **STANDALONE)
    say(data.summary())
    say(
        "held_out: no rows, so nothing is measured by decoding"
        if held_out is None
        else held_out.summary()
    )
    return data, held_out


def check_batches(cfg: DictConfig, settings: Settings, data: ConversationData) -> None:
    """Raise InputError if the rows cannot be put into batches or sequences, before the target is
    loaded."""
    if kind_of(cfg).learns:
        settings.trainer.sampler(data, seed=cfg.seed, rank=rank(), world=world_size())


def read_calibration(cfg: DictConfig, settings: Settings) -> ConversationData | None:
    """Rows set aside, greedy ones where there are some, since a greedy target is what trees are
    compared with."""
    shares = settings.boost is not None and settings.boost.nodes is not None
    if not (settings.final.calibrates or shares):
        return None
    if not cfg.data.set_aside:
        raise InputError(
            "final.calibrated needs rows that are not trained on: set data.set_aside, to 64 for "
            "instance"
        )
    try:
        rows: ConversationData = build(cfg.data, split="train", **ASIDE | {"temperatures": [0.0]})
    except InputError:
        rows = build(cfg.data, split="train", **ASIDE | {"temperatures": None})
    say(f"set aside to calibrate trees: {rows.summary()}")
    return rows


def check_store(cfg: DictConfig, data: ConversationData) -> None:
    """Look at a store of features before the target is loaded. With target.dtype=auto the target
    then has the store's dtype."""
    if not reads_store(cfg):
        return
    if not cfg.features.path:
        raise InputError("needs features.path=<folder of a store>")
    store = Store(str(cfg.features.path))
    store.check_data(data)
    if cfg.features.verify:
        for number in track(
            share(store.shards_of(data)), description="reads the store through", unit="shard"
        ):
            store.verify(number)
    store.close()
    if cfg.target.get("dtype") == "auto":
        cfg.target.dtype = store.fingerprint.get("dtype", "auto")


def load_target(
    cfg: DictConfig, data: ConversationData, held_out: ConversationData | None
) -> Target:
    """The target, checked against the set that it must have written."""
    companions.at("loads the target")
    began = time.monotonic()
    takes = inspect.signature(named_by(cfg.target)).parameters
    objects: dict[str, Any] = {"work": "throughput"} if "work" in takes else {}
    if trains_target(cfg) and "pack" in takes:
        objects["pack"] = (
            False  # An adapter needs plain linears; the tuned target is packed at the end.
        )
    target: Target = build(cfg.target, **objects)
    check_set(target, data, held_out, str(cfg.data.path))
    check_device(target, cfg.trainer.accelerator)
    where = f"{target.name}, {target.dtype}, {target.device}".replace("torch.", "")
    say(f"target: {where}, loaded in {clock(time.monotonic() - began)}")
    return target


def make_drafter(
    cfg: DictConfig, target: Target, data: ConversationData, held_out: ConversationData | None
) -> Drafter:
    """The drafter, with the same weights on every process and in every run of one seed."""
    objects: dict[str, Any] = {"target": target}
    given = None
    if cfg.init_from is not None:
        given = read_beginning(str(cfg.init_from), target, kind_of(cfg), cfg.draft_vocab)
        ids = getattr(given, "draft_ids", None)
        objects |= {} if ids is None else {"draft_ids": ids}
    elif cfg.draft_vocab:
        objects["draft_ids"], told = draft_vocabulary(target, data, held_out, cfg.draft_vocab)
        say(told)
    seed_everything(cfg.seed)
    drafter: Drafter = build(cfg.drafter, **objects)
    if given is not None:
        take_weights(drafter, given, str(cfg.init_from))
        say(f"begins with the weights of {cfg.init_from}")
    say(
        "; ".join(
            f"{name}: {value}"
            for name, value in {"drafter": type(drafter).__name__, **drafter.describe()}.items()
        )
    )
    return drafter


def make_adapter(
    cfg: DictConfig, settings: Settings, target: Target, drafter: Drafter
) -> Trained | None:
    """What is trained of the target, where anything is; the same at first on every process."""
    if settings.joint is None:
        return None
    settings.joint.check(drafter)
    adapter = settings.joint.adapter(target, seed=cfg.seed)
    say("target: stays frozen (joint.rank=0)" if adapter is None else adapter.describe())
    return adapter
