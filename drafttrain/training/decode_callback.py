"""Decode held-out prompts with the live weights while training, through the runtime object that
packages use.

`val/*` is measured by decoding; `sim/*` is teacher-forced on held-out text, and named apart because
it is not the same thing. Nothing here touches training: modes and every source of chance are put
back as they were.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from drafttrain.data.datamodule import ConversationData
from drafttrain.decoding.clock import STAGES
from drafttrain.decoding.intervals import Interval, bootstrap
from drafttrain.decoding.plan import Plan
from drafttrain.decoding.speculator import Speculator
from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Tally
from drafttrain.processes import rank, world_size
from drafttrain.training.module import DraftModule, Source, over_processes
from drafttrain.training.settings import DECODED, EvalConfig


def _show_nothing(metrics: Mapping[str, float | None], updates: int) -> None:
    pass


T = TypeVar("T")


def share(items: Sequence[T]) -> Sequence[T]:
    """What this process takes of all processes' prompts."""
    return items[rank() :: world_size()]


def measured(prompts: Sequence[T], speculator: Speculator, config: EvalConfig) -> Sequence[T]:
    """The held-out prompts that evaluations measure acceptance on."""
    count = config.prompts
    if count is None and not speculator.replays_plan():
        count = DECODED
    return prompts[:count]


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation counted with one plan."""

    tallies: list[Tally]
    """Of each prompt."""
    seconds: dict[str, float]
    """By stage, over all processes; of no meaning where acceptance was replayed."""
    differs: int | None
    """Prompts that were really decoded and counted otherwise; None where all were decoded."""

    @property
    def tally(self) -> Tally:
        """Of all prompts."""
        total = Tally()
        for one in self.tallies:
            total += one
        return total

    @property
    def counts(self) -> list[tuple[int, int]]:
        """Per prompt, (tokens emitted, rounds)."""
        return [(one.emitted, one.rounds) for one in self.tallies]

    @property
    def interval(self) -> Interval | None:
        """95 % interval of tau over resampled prompts."""
        return bootstrap(
            [one.emitted for one in self.tallies], [one.rounds for one in self.tallies]
        )


class DecodeCallback(Callback):
    """Measures every `config.every` updates and at the end.

    Logs for the first plan `val/tau` with its 95 % interval over prompts, `val/tau_low` and
    `val/tau_high`, `val/accepted_per_round`, `val/accept@k` and its count `val/accept@k_count`
    (rounds in which position k was drafted after accepted ones), `val/rounds`, and where measured
    `val/speedup`; for every further plan the same under `val/<name>/`. Where the speculator has the
    target's answers, these are counted on them (`decoding.replaying`), and some prompts are really
    decoded, others each time: `val/replay_differs` of them counted otherwise. Where prompts are
    decoded, `val/seconds_<stage>` too. From teacher-forced passes it logs `sim/loss`,
    `sim/forced_tau`, and `sim/<part>` for every part of the drafter's loss, `sim/accuracy`
    included. What could not be measured is left out: never NaN, never 0.

    `sim/forced_tau`: 1 + the mean number of consecutive right guesses, up to the depth of the first
    plan's tree, starting at each supervised token of held-out text. Every guess reads the target's
    true features, which a drafter deep in a draft does not have. It is not the `sim/tau` of
    `evaluate`, which is the tau that a rule would have.

    Args:
        speculator: the runtime; its decoding copy is refreshed from the live weights.
        prompts: ids to decode from, over all processes: each process takes its share, see `share`.
        plans: name to plan; the first one decides what is best.
        held_out, source: rows and features for the teacher-forced estimates.
        show: draws a picture of what was measured, given it and the number of updates.
    """

    def __init__(
        self,
        speculator: Speculator,
        prompts: Sequence[Sequence[int]],
        plans: Mapping[str, Plan],
        config: EvalConfig,
        *,
        held_out: ConversationData | None = None,
        source: Source | None = None,
        seed: int = 0,
        show: Callable[[Mapping[str, float | None], int], None] = _show_nothing,
    ) -> None:
        if not plans:
            raise InputError("eval needs a tree to decode with")
        self.speculator, self.plans, self.config = speculator, dict(plans), config
        self.seed, self.show = seed, show
        self.prompts = [list(prompt) for prompt in measured(prompts, speculator, config)]
        rows = (
            min(config.sim_rows, len(held_out))
            if held_out is not None and source is not None
            else 0
        )
        self.sim = (
            _SimRows(held_out, source, rows)
            if held_out is not None and source is not None and rows
            else None
        )
        self.measured_at: int | None = None
        """Updates at the last evaluation."""
        self.evaluations = 0
        self.caught_up = False
        """Was an evaluation made at the start, since the run had been stopped before it was
        done?"""
        self.found: Evaluated | None = None
        """By the last evaluation, with the first plan."""
        self.seconds = 0.0
        """Wall seconds spent here so far."""

    @property
    def tau(self) -> float | None:
        """Of the last evaluation, by the first plan; None where it could not be measured."""
        return None if self.found is None else self.found.tally.tau

    @property
    def measures(self) -> str:
        """What is measured: evaluations of the same can be compared prompt by prompt."""
        plan, config = next(iter(self.plans.values())), self.config
        what = [self.prompts, config.max_new_tokens, plan.tree.title, plan.rule_name]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, DraftModule)
        self.caught_up = (
            pl_module.updates > 0 and self._due(pl_module) and self.measured_at != pl_module.updates
        )
        if self.caught_up:
            self.measure(pl_module, last=pl_module.finished)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, DraftModule)
        # Whoever sent a signal does not wait for an evaluation: the resumed run makes it.
        if pl_module.just_updated and pl_module.stopped != "signal" and self._due(pl_module):
            self.measure(pl_module, last=pl_module.updates == pl_module.course.updates)

    def _due(self, module: DraftModule) -> bool:
        return self.config.every is not None and module.updates % self.config.every == 0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, DraftModule)
        if (
            pl_module.stopped != "signal"
            and pl_module.updates
            and self.measured_at != pl_module.updates
        ):
            self.measure(pl_module, last=True)

    def measure(self, module: DraftModule, *, last: bool = False) -> dict[str, float | None]:
        """Measure and log now. Every process must come here together."""
        began = time.monotonic()
        config = self.config
        number = self.evaluations + 1
        fast = config.speed_prompts and (
            last or (config.speed_every and number % config.speed_every == 0)
        )
        metrics: dict[str, float | None] = {}
        found: Evaluated | None = None
        with (
            module.gathered(),
            undisturbed(module.drafter),
            torch.autocast(module.device.type, enabled=False),
        ):
            self.speculator.refresh(module.drafter)
            for place, (name, plan) in enumerate(self.plans.items()):
                prefix = "val/" if place == 0 else f"val/{name}/"
                one = self._accepted(plan, module.device)
                found = found or one
                metrics |= {prefix + key: value for key, value in _numbers(one).items()}
                if fast and self.prompts and rank() == 0:
                    metrics[prefix + "speedup"] = self._speed(plan)
            if self.sim is not None:
                depth = max(1, next(iter(self.plans.values())).tree.max_depth)
                metrics |= self.sim.measure(module.drafter, depth, module.device)
        self.evaluations, self.found, self.measured_at = number, found, module.updates
        self.seconds += time.monotonic() - began
        if module.seconds:
            metrics["val/share_of_time"] = self.seconds / module.seconds
        module.report(metrics)
        if rank() == 0:
            self.show(metrics, module.updates)
        return metrics

    def _accepted(self, plan: Plan, device: torch.device) -> Evaluated:
        """Measure this process's share; the counts of all processes are put together."""
        mine, config = share(self.prompts), self.config
        settings: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "batch": config.batch}
        settings["seed"] = self.seed
        tallies, tally, differs = [], Tally(), None
        replayed = self.speculator.replays_plan(plan)
        if mine:
            found = self.speculator.measure_acceptance(mine, plan, **settings)
            tallies, tally = found.tallies, found.tally
        if replayed:
            differs = 0
            checked = self._checked(len(mine))
            if checked:
                again = self.speculator.measure_acceptance(
                    [mine[place] for place in checked], plan, decoding=True, **settings
                )
                for place, real in zip(checked, again.outputs, strict=True):
                    differs += real != found.outputs[place]
        return _over_processes(
            Evaluated(tallies, tally.seconds, differs), len(self.prompts), plan, device
        )

    def _checked(self, mine: int) -> list[int]:
        """Which of this process's prompts are decoded to compare; others at each evaluation."""
        count = len(share(range(self.config.checked)))
        first = self.evaluations * count
        return sorted({(first + i) % mine for i in range(count)}) if mine else []

    def _speed(self, plan: Plan) -> float | None:
        config = self.config
        (found,) = self.speculator.measure_speed(
            self.prompts[: config.speed_prompts],
            [plan],
            max_new_tokens=config.max_new_tokens,
            seed=self.seed,
        )
        return found.speedup

    # For checkpoints: an undisturbed run and a resumed one log alike.
    def state_dict(self) -> dict[str, Any]:
        return {
            "measured_at": self.measured_at,
            "evaluations": self.evaluations,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.measured_at, self.evaluations = state_dict["measured_at"], state_dict["evaluations"]
        self.seconds = state_dict["seconds"]


class _SimRows:
    """Held-out rows, teacher-forced."""

    def __init__(
        self, data: ConversationData, source: Source, rows: int, width: int = 4096
    ) -> None:
        self.data, self.source = data, source
        order = sorted(range(rows)[rank() :: world_size()], key=lambda i: data.lengths[i])
        self.groups: list[list[int]] = []
        for i in order:
            last = self.groups[-1] if self.groups else []
            if last and (len(last) + 1) * data.lengths[i] <= width:
                last.append(i)
            else:
                self.groups.append([i])

    def measure(
        self, drafter: Drafter, depth: int, device: torch.device
    ) -> dict[str, float | None]:
        drafter.eval()
        names = drafter.loss_parts
        sums = torch.zeros(2 + len(names), 2, dtype=torch.float64)
        with torch.no_grad():
            for group in self.groups:
                batch = self.data.batch(group)
                features = self.source.features(batch)
                batch = batch.to(device)
                loss = drafter.loss(batch, features)
                pairs = [
                    _runs(drafter, batch, features, depth),
                    (loss.total, loss.count),
                    *(loss.parts[name] for name in names),
                ]
                sums += torch.stack(
                    [torch.stack([value.double().cpu() for value in pair]) for pair in pairs]
                )
        (runs, starts), *pairs = over_processes(sums.to(device)).tolist()
        found = {"sim/forced_tau": 1 + runs / starts if starts else None}
        for name, (total, count) in zip(("loss", *names), pairs, strict=True):
            found[f"sim/{name}"] = total / count if count else None
        return found


def _runs(drafter: Drafter, batch: Batch, features: Any, depth: int) -> tuple[Tensor, Tensor]:
    """Sum over supervised starts of the consecutive right guesses from there, at most `depth`; and
    the number of starts."""
    guesses = drafter.guesses(batch, features)
    none = torch.zeros((), device=batch.input_ids.device)
    if guesses is None:
        return none, none
    starts = batch.loss_mask & (guesses[:, :, 0] >= 0)
    hits = batch.loss_mask[:, :, None] & (guesses == batch.input_ids[:, :, None])  # b s k
    run, total = starts, none
    for k in range(depth):
        ahead = nn.functional.pad(hits[:, k:, min(k, hits.shape[-1] - 1)], (0, k))
        run = run & ahead
        total = total + run.sum()
    return total, starts.sum()


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Put back every module's mode and every random state afterwards, bit for bit."""
    modes = {part: part.training for part in module.modules()}
    devices = (
        list(range(torch.accelerator.device_count())) if torch.accelerator.is_available() else []
    )
    kind = torch.accelerator.current_accelerator() if devices else None
    device_states = (
        torch.get_device_module(kind).get_rng_state_all()
        if kind is not None and kind.type == "cuda"
        else None
    )
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if device_states is not None:
            torch.get_device_module(kind).set_rng_state_all(device_states)
        for part, mode in modes.items():
            part.training = mode


def _numbers(found: Evaluated) -> dict[str, float | None]:
    tally = found.tally
    low, high = found.interval or (None, None)
    numbers: dict[str, float | None] = {
        "tau": tally.tau,
        "tau_low": low,
        "tau_high": high,
        "accepted_per_round": tally.accepted_per_round,
        "rounds": tally.rounds or None,
    }
    for k, value in enumerate(tally.accept_at, start=1):
        numbers[f"accept@{k}"] = value
        numbers[f"accept@{k}_count"] = tally.offered[k - 1] or None
    if found.differs is not None:
        return {**numbers, "replay_differs": found.differs}
    numbers |= {
        f"seconds_{stage}": found.seconds.get(stage) if tally.rounds else None for stage in STAGES
    }
    return numbers


def _over_processes(found: Evaluated, prompts: int, plan: Plan, device: torch.device) -> Evaluated:
    """The shares of all processes, put together in the order of the prompts.

    Args:
        prompts: of all of them.
    """
    depth = plan.tree.max_depth
    counts = torch.zeros(prompts, 4 + 2 * depth, dtype=torch.float64)
    for place, tally in zip(share(range(prompts)), found.tallies, strict=False):
        counts[place] = torch.tensor(_packed(tally, depth), dtype=torch.float64)
    rest = [found.seconds.get(stage, 0.0) for stage in STAGES] + [found.differs or 0]
    sums = over_processes(
        torch.cat((counts.flatten(), torch.tensor(rest, dtype=torch.float64))).to(device)
    )
    *seconds, differs = sums[-len(rest) :].tolist()
    tallies = [_unpacked(row) for row in sums[: -len(rest)].reshape(counts.shape).tolist()]
    return Evaluated(
        tallies,
        dict(zip(STAGES, seconds, strict=True)),
        None if found.differs is None else int(differs),
    )


def _packed(tally: Tally, depth: int) -> list[int]:
    def filled(counts: list[int]) -> list[int]:
        return counts + [0] * (depth - len(counts))

    head = [tally.rounds, tally.drafted, tally.accepted, tally.emitted]
    return [*head, *filled(tally.offered), *filled(tally.kept)]


def _unpacked(values: list[float]) -> Tally:
    depth = (len(values) - 4) // 2
    rounds, drafted, accepted, emitted, *places = (int(n) for n in values)
    return Tally(rounds, drafted, accepted, emitted, offered=places[:depth], kept=places[depth:])
