"""What boost-tuning makes: the members as one drafter, what was found of each, and how they share a
budget of drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drafttrain.data.datamodule import ConversationData
from drafttrain.decoding.measure import Watch, unwatched
from drafttrain.decoding.members import followed
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.speculator import Speculator
from drafttrain.drafter.ensemble import Ensemble
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Needs
from drafttrain.runs import masked
from drafttrain.target.features import FeatureSource, LiveFeatures
from drafttrain.target.model import Target
from drafttrain.training.answering import replays_of
from drafttrain.training.boost import Boost
from drafttrain.training.job import Job
from drafttrain.training.prepare import Ready, Training, usable_prompts
from drafttrain.training.references import references
from drafttrain.training.run import Run
from drafttrain.training.tuning import Collective
from drafttrain.tree.choice import SHARING
from drafttrain.tree.share import for_one, shared
from drafttrain.tree.topology import Growth, Tree


class Borrowed(LiveFeatures):
    """Features that several fits read one after the other, and that none of them closes."""

    def __init__(self, source: FeatureSource, target: Target, needs: Needs) -> None:
        super().__init__(target, needs)
        self.source = source

    def features(self, batch: Batch) -> Features:
        return self.source.features(batch)

    def describe(self) -> str:
        return "features: those of the complete run"


@dataclass(kw_only=True)
class Boosted(Ready):
    """An ensemble that was fitted in one run."""

    found: Collective
    trainings: Sequence[Training]
    """Of the models that were fitted, the one left out too."""

    @property
    def updates(self) -> int:
        return sum(one.updates for one in self.trainings)

    @property
    def trained_length(self) -> int:
        return max(one.trained_length for one in self.trainings)

    def facts(self) -> dict[str, Any]:
        return {
            "members": [one.facts() for one in self.trainings],
            "marking": self.found.marking,
            "ended": self.found.ended,
        }

    def report(self) -> dict[str, Any]:
        return {"members": self.found.rows, "ended": self.found.ended}


def procedure_facts(
    config: dict[str, Any], target: Target, data: ConversationData
) -> dict[str, Any]:
    """What decides which rows each model is fitted on.

    A run is only resumed where all of it is the same. Each fit has facts of its own too.
    """
    names = ("drafter", "draft_vocab", "init_from", "optim", "seed")
    ends = ("share_new_tokens", "nodes")  # of what is only measured at the end
    facts: dict[str, Any] = {
        "target": target.fingerprint,
        "data": data.set.digest,
        "rows": {
            name: value
            for name, value in config["data"].items()
            if name not in ("_target_", "path")
        },
        "boost": {name: value for name, value in config["boost"].items() if name not in ends},
        **{name: config[name] for name in names},
    }
    found: dict[str, Any] = masked(facts)
    return found


def note_member(run: Run, number: int, row: Mapping[str, Any]) -> None:
    """A model's line into the run's metrics, by its number."""
    numbers = {
        f"boost/{name}": float(value)
        for name, value in row.items()
        if isinstance(value, int | float)
    }
    numbers |= {
        f"boost/overlap_{other}": value for other, value in enumerate(row["overlap"], start=1)
    }
    for logger in run.loggers:
        logger.log_metrics(numbers, number)


def together(
    job: Job,
    found: Collective,
    trainings: Sequence[Training],
    *,
    watch: Watch,
    say: Callable[[str], None],
) -> Boosted:
    """The members as one drafter, and the trees that it is measured with."""
    settings = job.settings
    ensemble, final = Ensemble(job.target, members=found.members), settings.final
    speculator = Speculator(job.target, ensemble, Plan(settings.tree))
    boost, rows = settings.boost, job.calibration
    if boost is not None and boost.nodes is not None and rows is not None:
        shares = share_nodes(speculator, rows, boost, seed=job.seed, watch=watch)
        kept = "; ".join(f"{name}: {tree.title}" for name, tree in shares.items())
        say(f"drafts are shared: {kept or 'nothing was kept'}")
        final = dataclasses.replace(
            final, acceptance={**final.acceptance, **shares}, speed={**final.speed, **shares}
        )
        for tree in [*shares.values()][:1]:
            speculator.plan = Plan(tree).made_by(ensemble)
    prompts, categories = usable_prompts(job.target, job.data, settings, say)
    speculator.replays = replays_of(speculator, prompts, settings, job.data.set, say)
    return Boosted(
        config=job.config,
        settings=dataclasses.replace(settings, final=final),
        run=job.run,
        target=job.target,
        drafter=ensemble,
        speculator=speculator,
        prompts=prompts,
        categories=categories,
        found=found,
        trainings=trainings,
    )


def prompts_to_share_on(target: Target, rows: ConversationData, config: Boost) -> list[list[int]]:
    """First prompts of rows that leave room in the target's context. Worth calling before any fit.

    Raises: InputError if none does.
    """
    room = config.share_new_tokens
    prompts = [
        one.prompt
        for one in references(target, rows, 1)
        if len(one.prompt) + room <= target.context
    ]
    if not prompts:
        raise InputError(
            f"no row set aside leaves {room} tokens of the target's context: lower "
            "boost.share_new_tokens"
        )
    return prompts


def share_nodes(
    speculator: Speculator,
    rows: ConversationData,
    config: Boost,
    *,
    seed: int,
    watch: Watch = unwatched,
) -> dict[str, Growth]:
    """Trees by name. The first shares `config.nodes` drafts among the members; then each member has
    one of as many drafts that it grows by itself, since more drafts keep more whoever makes them.

    Args:
        rows: whose prompts are decoded; no member was fitted on them.
    """
    ensemble, target, nodes = speculator.drafter, speculator.target, config.nodes
    assert isinstance(ensemble, Ensemble) and nodes is not None
    narrow = min(member.choices for member in ensemble.drafters)
    wide = Tree.from_paths([path for path in SHARING.paths if max(path) < narrow])
    prompts = prompts_to_share_on(target, rows, config)
    rounds = followed(
        target,
        ensemble,
        prompts,
        wide,
        max_new_tokens=config.share_new_tokens,
        seed=seed,
        watch=watch,
    )
    count = len(ensemble.drafters)
    found: dict[str, Growth] = {f"together_{nodes}": shared(rounds, nodes)}
    for member in range(count if count > 1 else 0):
        found[f"member_{member + 1}_alone_{nodes}"] = for_one(rounds, nodes, member)
    return {name: tree for name, tree in found.items() if tree.size}
