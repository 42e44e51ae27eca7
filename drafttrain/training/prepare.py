"""Put the parts of a run together: batches, features, module, evaluation, checkpoints; and take
over what is resumed.

A drafter that learns nothing needs the first step alone: what is measured, and on which prompts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from drafttrain.data.datamodule import ConversationData
from drafttrain.data.sequences import PackedSampler
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.speculator import Speculator
from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError, first_line
from drafttrain.nn import isolation
from drafttrain.processes import rank, world_size
from drafttrain.target.adapter import Trained, tuned
from drafttrain.target.features import FeatureSource, LiveFeatures, OnlineFeatures
from drafttrain.target.model import Target
from drafttrain.training.boost import Boost
from drafttrain.training.checkpoint import CheckpointConfig, Keeper, refuse_full_disk
from drafttrain.training.course import Stream, TrainerConfig
from drafttrain.training.decode_callback import DecodeCallback, EvalConfig
from drafttrain.training.final import FinalConfig
from drafttrain.training.joint import Joint, JointModule
from drafttrain.training.module import DraftModule
from drafttrain.training.optim import AdamW
from drafttrain.training.resume import facts_of, refuse_other_run
from drafttrain.training.run import Run
from drafttrain.training.skips import SkipSearch
from drafttrain.tree.topology import Growth


@dataclass(frozen=True)
class Settings:
    """The parts of the configuration that check themselves."""

    trainer: TrainerConfig
    optim: AdamW
    eval: EvalConfig
    checkpoint: CheckpointConfig
    final: FinalConfig
    tree: Growth
    joint: Joint | None = None
    """How the target is trained too; None leaves it frozen."""
    boost: Boost | None = None
    """How several drafters are fitted one after the other; None fits one."""
    search: SkipSearch | None = None
    """How what a drafter leaves out of the target is searched; None takes it as given."""

    @property
    def unmeasured(self) -> Settings:
        """The same fit, of which nothing is decoded before it is done."""
        quiet = replace(
            self.eval, every=None, prompts=0, sim_rows=0, speed_prompts=0, patience=None
        )
        return replace(self, eval=quiet)


@dataclass(kw_only=True)
class Ready:
    """What can be measured and packaged."""

    config: dict[str, Any]
    settings: Settings
    run: Run
    target: Target
    drafter: Drafter
    speculator: Speculator
    prompts: list[list[int]]
    calibration: ConversationData | None = None
    """Rows set aside, where trees are to be calibrated on them."""

    @property
    def seed(self) -> int:
        seed: int = self.config["seed"]
        return seed

    @property
    def updates(self) -> int:
        """Made so far: none."""
        return 0

    @property
    def trained_length(self) -> int | None:
        """Tokens of the longest row in training."""
        return None

    def facts(self) -> dict[str, Any] | None:
        """How it was trained, plain JSON values; None if it was not."""
        return None

    def report(self) -> dict[str, Any]:
        """What the package's metrics shall say further, plain JSON values."""
        return {}


@dataclass(kw_only=True)
class Training(Ready):
    """What a run of training is made of."""

    module: DraftModule
    stream: Stream
    source: FeatureSource
    decode: DecodeCallback
    keeper: Keeper
    adapter: Trained | None = None
    """What is trained of the target."""

    @property
    def updates(self) -> int:
        return self.module.updates

    @property
    def trained_length(self) -> int:
        return max(self.stream.data.lengths)

    def facts(self) -> dict[str, Any]:
        module = self.module
        return {
            "updates": module.updates,
            "best_update": self.keeper.best_update,
            "epochs": module.course.epoch(module.position),
            "supervised_tokens_seen": int(module.supervised),
            "seconds": round(module.seconds, 1),
            "evaluation_seconds": round(self.decode.seconds, 1),
            "data": self.keeper.facts["data"],
        }

    def settle(self, pack: Callable[[Target], None]) -> None:
        """Take the adapter off the target, which is the original again, and go on with a tuned one,
        as the package will: what is measured from here on is what a reader of the package gets.

        Args:
            pack: lays a target's weights out for decoding.
        """
        if self.adapter is None:
            return
        found = self.adapter.adapter()
        self.adapter.remove()
        self.adapter = None
        self.target = tuned(self.target, found)
        pack(self.target)
        self.drafter = self.drafter.at(torch.float32, self.target)
        self.speculator = Speculator(self.target, self.drafter, self.speculator.plan)


def prepare_untrained(
    config: dict[str, Any],
    settings: Settings,
    run: Run,
    target: Target,
    drafter: Drafter,
    data: ConversationData,
    *,
    calibration: ConversationData | None = None,
    say: Callable[[str], None],
) -> Ready:
    """The drafter as it is, with prompts to measure it on. Arguments as in `prepare`."""
    drafter.check(settings.tree)
    settings.final.check(drafter)
    return Ready(
        config=config,
        settings=settings,
        run=run,
        target=target,
        drafter=drafter,
        speculator=Speculator(target, drafter, Plan(settings.tree)),
        prompts=usable_prompts(target, data, settings, say),
        calibration=calibration,
    )


def prepare(
    config: dict[str, Any],
    settings: Settings,
    run: Run,
    target: Target,
    drafter: Drafter,
    data: ConversationData,
    held_out: ConversationData | None,
    *,
    calibration: ConversationData | None = None,
    adapter: Trained | None = None,
    make_source: Callable[..., FeatureSource],
    show: Callable[[Mapping[str, float | None], int], None],
    say: Callable[[str], None],
) -> Training:
    """Put the parts together, and take over what is resumed.

    Args:
        config: the run's whole configuration.
        calibration: rows set aside, where trees are to be calibrated.
        adapter: what is trained of the target.
        show: draws what an evaluation found.
        make_source: builds the source of features from what only the run knows.
    """
    ready = prepare_untrained(
        config, settings, run, target, drafter, data, calibration=calibration, say=say
    )
    world, seed = world_size(), config["seed"]
    sampler = settings.trainer.sampler(data, seed=seed, rank=rank(), world=world)
    course = settings.trainer.course(sampler)
    parts = settings.trainer.accumulate * world
    least = settings.trainer.pack or max(data.lengths)
    if settings.trainer.batch_tokens is not None and settings.trainer.batch_tokens // parts < least:
        what = "a sequence" if settings.trainer.pack else "the longest row"
        say(
            f"{parts} micro-batches share trainer.batch_tokens={settings.trainer.batch_tokens}, "
            f"each less than {what} of {least} "
            "tokens: updates are larger than that"
        )
    if isinstance(sampler, PackedSampler):
        data = joined(data, sampler, target, drafter, say)
    first = [
        settings.trainer.sampler(data, seed=seed, rank=r, world=world).batches(0)
        for r in range(world)
    ]
    groups = [group for batches in first for group in batches if group[0] >= 0]
    shared = world > 1 and int(os.environ.get("LOCAL_WORLD_SIZE", world)) == world
    joint = settings.joint
    module: DraftModule
    source: FeatureSource
    sim: FeatureSource | None
    common: dict[str, Any] = {"seed": seed, "log_every": settings.trainer.log_every}
    if joint is not None:
        source = sim = LiveFeatures(target, drafter.needs)
        module = JointModule(
            drafter,
            source,
            settings.optim,
            course,
            target=target,
            adapter=adapter,
            joint=joint,
            **common,
        )
    else:
        source = make_source(
            target=target,
            needs=drafter.needs,
            data=data,
            groups=groups,
            spill_dir=run.scratch if shared or world == 1 else run.scratch / str(rank()),
            shared=shared,
        )
        sim = (
            None
            if held_out is None
            else kept_in_memory(target, drafter, held_out, config["features"])
        )
        module = DraftModule(drafter, source, settings.optim, course, **common)
    say(source.describe())
    decode = DecodeCallback(
        ready.speculator,
        ready.prompts,
        {"tree": ready.speculator.plan},
        settings.eval,
        held_out=held_out,
        source=sim,
        seed=seed,
        show=show,
    )
    facts = facts_of(config, target, data, module, world, source.facts())
    keeper = Keeper(
        run.checkpoints,
        settings.checkpoint,
        decode,
        patience=settings.eval.patience,
        facts=facts,
        settings=config,
    )
    stream = Stream(data, sampler, course)
    refuse_full_disk(run.folder, module)
    if run.resumed is not None:
        refuse_other_run(run.resumed, facts, config, say)
        try:
            module.continue_from(run.resumed)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise InputError(
                f"the checkpoint's weights do not fit ({first_line(error)}): give another "
                f"checkpoint"
            ) from error
        keeper.load_state_dict(run.resumed["keeper"])
        if run.resumed["decode"] is not None:
            decode.load_state_dict(run.resumed["decode"])
        stream.position = module.position
        say(f"goes on behind update {module.updates}, {course.epoch(module.position):.2f} epochs")
    return Training(
        **vars(ready),
        module=module,
        stream=stream,
        source=source,
        decode=decode,
        keeper=keeper,
        adapter=adapter,
    )


def joined(
    data: ConversationData,
    sampler: PackedSampler,
    target: Target,
    drafter: Drafter,
    say: Callable[[str], None],
) -> ConversationData:
    """Rows that are joined into sequences. Raises InputError if target or drafter would not keep
    them apart."""
    drafter.check_packing()
    by = target.choose_isolation()
    how = "a dense mask" if by == isolation.DENSE else "flex_attention"
    say(
        f"rows are joined into sequences of {sampler.sequence} tokens, {sampler.filled:.0%} "
        f"filled; the target keeps them apart "
        f"by {how}"
    )
    return data.joined(sampler.sequence)


def kept_in_memory(
    target: Target, drafter: Drafter, data: ConversationData, features: dict[str, Any]
) -> OnlineFeatures:
    """Held-out rows' features; few, so that evaluations after the first read them from memory."""
    dtype = features.get("keep_dtype", "bfloat16")
    return OnlineFeatures(target, drafter.needs, data=data, keep_dtype=dtype, spill_dir=None)


def usable_prompts(
    target: Target, data: ConversationData, settings: Settings, say: Callable[[str], None]
) -> list[list[int]]:
    """Held-out prompts that leave room in the target's context."""
    room = max(
        settings.eval.max_new_tokens, settings.final.max_new_tokens, settings.final.speed_new_tokens
    )
    prompts = [prompt for prompt in data.set.prompts() if prompt]
    usable = [prompt for prompt in prompts if len(prompt) + room <= target.context]
    if (
        prompts
        and not usable
        and (settings.eval.prompts or settings.final.prompts or settings.final.speed_prompts)
    ):
        raise InputError(
            f"none of the {len(prompts)} held-out prompts leaves {room} of the target's "
            f"{target.context} tokens of context: "
            "lower eval.max_new_tokens, final.max_new_tokens and final.speed_new_tokens"
        )
    if len(usable) < len(prompts):
        say(
            f"{len(prompts) - len(usable)} held-out prompts leave less than {room} tokens of the "
            f"context and are not decoded"
        )
    return usable
