"""Put the parts of a run together: batches, features, module, evaluation, checkpoints; and take
over what is resumed.

A drafter that learns nothing needs only the first step: what is measured, and on which prompts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from drafttrain.data import named
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
from drafttrain.target.turns import turn_words
from drafttrain.training.answering import replays_of
from drafttrain.training.course import Course, Stream
from drafttrain.training.decode_callback import DecodeCallback
from drafttrain.training.job import Job, Settings
from drafttrain.training.joint import JointModule
from drafttrain.training.keeper import Keeper, refuse_full_disk
from drafttrain.training.module import DraftModule
from drafttrain.training.resume import facts_of, refuse_other_run
from drafttrain.training.run import Run

Say = Callable[[str], None]
Show = Callable[[Mapping[str, float | None], int], None]


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
    categories: list[str]
    """The kind of task of each; empty where they are too many to be kinds."""
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


def prepare_untrained(job: Job, say: Say) -> Ready:
    """The drafter as it is, with prompts to measure it on."""
    job.drafter.check(job.settings.tree)
    job.settings.final.check(job.drafter)
    speculator = Speculator(job.target, job.drafter, Plan(job.settings.tree))
    prompts, categories = usable_prompts(job.target, job.data, job.settings, say)
    speculator.replays = replays_of(speculator, prompts, job.settings, job.data.set, say)
    return Ready(
        config=job.config,
        settings=job.settings,
        run=job.run,
        target=job.target,
        drafter=job.drafter,
        speculator=speculator,
        prompts=prompts,
        categories=categories,
        calibration=job.calibration,
    )


def prepare(
    job: Job,
    *,
    adapter: Trained | None = None,
    make_source: Callable[..., FeatureSource],
    show: Show,
    say: Say,
) -> Training:
    """Put the parts together, and take over what is resumed.

    Args:
        adapter: what is trained of the target.
        make_source: builds the source of features from what only the run knows.
        show: draws what an evaluation found.
    """
    settings, run = job.settings, job.run
    ready = prepare_untrained(job, say)
    stream = stream_of(job, say)
    source, sim = sources_of(job, stream, make_source)
    module = module_of(job, stream.course, source, adapter)
    say(source.describe())
    decode = DecodeCallback(
        ready.speculator,
        ready.prompts,
        {"tree": ready.speculator.plan},
        settings.eval,
        held_out=job.held_out,
        source=sim,
        seed=job.seed,
        show=show,
    )
    keeper = Keeper(
        run.checkpoints,
        settings.checkpoint,
        decode,
        patience=settings.eval.patience,
        facts=facts_of(job.config, job.target, stream.data, module, world_size(), source.facts()),
        settings=job.kept,
    )
    refuse_full_disk(run.folder, module)
    training = Training(
        **vars(ready),
        module=module,
        stream=stream,
        source=source,
        decode=decode,
        keeper=keeper,
        adapter=adapter,
    )
    if run.resumed is not None:
        take_over(training, run.resumed, say)
    return training


def stream_of(job: Job, say: Say) -> Stream:
    """The run's micro-batches on this process, rows joined where that is asked for."""
    trainer, data = job.settings.trainer, job.data
    sampler = trainer.sampler(data, seed=job.seed, rank=rank(), world=world_size())
    parts = trainer.accumulate * world_size()
    least = trainer.pack or max(data.lengths)
    if trainer.batch_tokens is not None and trainer.batch_tokens // parts < least:
        what = "a sequence" if trainer.pack else "the longest row"
        say(
            f"{parts} micro-batches share trainer.batch_tokens={trainer.batch_tokens}, each less "
            f"than {what} of {least} tokens: updates are larger than that"
        )
    if isinstance(sampler, PackedSampler):
        data = joined(data, sampler, job.target, job.drafter, say)
    return Stream(data, sampler, trainer.course(sampler))


def sources_of(
    job: Job, stream: Stream, make_source: Callable[..., FeatureSource]
) -> tuple[FeatureSource, FeatureSource | None]:
    """Features of the rows that are trained on, and of the held-out ones where there are any."""
    if job.settings.joint is not None:
        live = LiveFeatures(job.target, job.drafter.needs)
        return live, live
    world = world_size()
    trainer, data = job.settings.trainer, stream.data
    first = [
        trainer.sampler(data, seed=job.seed, rank=r, world=world).batches(0) for r in range(world)
    ]
    shared = world > 1 and int(os.environ.get("LOCAL_WORLD_SIZE", world)) == world
    scratch = job.run.scratch
    source = make_source(
        target=job.target,
        needs=job.drafter.needs,
        data=data,
        groups=[group for batches in first for group in batches if group[0] >= 0],
        spill_dir=scratch if shared or world == 1 else scratch / str(rank()),
        shared=shared,
    )
    if job.held_out is None:
        return source, None
    return source, kept_in_memory(job.target, job.drafter, job.held_out, job.config["features"])


def module_of(
    job: Job, course: Course, source: FeatureSource, adapter: Trained | None
) -> DraftModule:
    """What is trained: the drafter, or the drafter and an adapter of the target."""
    settings = job.settings
    common: dict[str, Any] = {"seed": job.seed, "log_every": settings.trainer.log_every}
    if settings.joint is None:
        return DraftModule(job.drafter, source, settings.optim, course, **common)
    return JointModule(
        job.drafter,
        source,
        settings.optim,
        course,
        target=job.target,
        adapter=adapter,
        joint=settings.joint,
        **common,
    )


def take_over(training: Training, state: dict[str, Any], say: Say) -> None:
    """Go on where a checkpoint was. Raises InputError if it is another run's."""
    module = training.module
    refuse_other_run(state, training.keeper.facts, training.keeper.settings, say)
    try:
        module.continue_from(state)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"the checkpoint's weights do not fit ({first_line(error)}): give another checkpoint"
        ) from error
    training.keeper.load_state_dict(state["keeper"])
    if state["decode"] is not None:
        training.decode.load_state_dict(state["decode"])
    training.stream.position = module.position
    if training.run.resumed_from is not None:
        module.kept = training.run.resumed_from, module.updates
    epochs = module.course.epoch(module.position)
    say(f"goes on after update {module.updates}, {epochs:.2f} epochs")


def joined(
    data: ConversationData, sampler: PackedSampler, target: Target, drafter: Drafter, say: Say
) -> ConversationData:
    """Rows that are joined into sequences. Raises InputError if target or drafter would not keep
    them apart."""
    drafter.check_packing()
    by = target.choose_isolation()
    how = "a dense mask" if by == isolation.DENSE else "flex_attention"
    say(
        f"rows are joined into sequences of {sampler.sequence} tokens, {sampler.filled:.0%} "
        f"filled; the target keeps them apart by {how}"
    )
    return data.joined(sampler.sequence)


def kept_in_memory(
    target: Target, drafter: Drafter, data: ConversationData, features: dict[str, Any]
) -> OnlineFeatures:
    """Held-out rows' features; few, so that evaluations after the first read them from memory."""
    dtype = features.get("keep_dtype", "bfloat16")
    return OnlineFeatures(target, drafter.needs, data=data, keep_dtype=dtype, spill_dir=None)


def usable_prompts(
    target: Target, data: ConversationData, settings: Settings, say: Say
) -> tuple[list[list[int]], list[str]]:
    """Held-out prompts that leave room in the target's context: all first turns, then all second
    ones, and so on; and the kind of task of each."""
    room = settings.longest_answer
    most = settings.eval.turns
    asked = [one for one in data.set.asked() if one[2]]
    fitting = [
        (number, turn, prompt)
        for number, turn, prompt in asked
        if (most is None or turn <= most) and len(prompt) + room <= target.context
    ]
    prompts = [prompt for _, turn, prompt in asked if most is None or turn <= most]
    usable = [prompt for *_, prompt in fitting]
    categories, note = named.kinds(data.set.categories_asked([number for number, *_ in fitting]))
    if note:
        say(note)
    if (
        prompts
        and not usable
        and (
            settings.eval.prompts != 0
            or settings.final.prompts != 0
            or settings.final.speed_prompts
        )
    ):
        raise InputError(
            f"none of the {len(prompts)} held-out prompts leaves {room} of the target's "
            f"context of {target.context_words} tokens: lower eval.max_new_tokens, "
            "final.max_new_tokens and final.speed_new_tokens"
        )
    if len(usable) < len(prompts):
        say(
            f"{len(prompts) - len(usable)} held-out prompts leave less than {room} tokens of the "
            "context and are not decoded"
        )
    if any(turn > 1 for _, turn, _ in asked):
        taken = {
            name: turn_words([turn for _, turn, _ in fitting[:count]]) or "none"
            for name, count in (
                ("eval.prompts", settings.eval.prompts),
                ("final.prompts", settings.final.prompts),
            )
        }
        listed = "; ".join(f"{name} takes {words}" for name, words in taken.items())
        say(f"held-out prompts: {turn_words([turn for _, turn, _ in asked])}; {listed}")
    return usable, categories
