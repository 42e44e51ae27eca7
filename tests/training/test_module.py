"""An update only depends on supervised tokens: not on how they are split, padded or spread, and
never on none at all."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.data.datamodule import ConversationData, collate
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Loss
from drafttrain.target.features import OnlineFeatures
from drafttrain.target.model import Target
from drafttrain.training.course import Course, TrainerConfig
from drafttrain.training.module import DraftModule, loss_of
from drafttrain.training.optim import AdamW
from tests.messages import said
from tests.training.parts import (
    OPTIM,
    TRAINER,
    Direct,
    Fixed,
    Memory,
    Watch,
    drafter_of,
    fit,
    module_for,
    same,
    tiny,
    weights_of,
)


def gradients(target: Target, batches: list[Batch]) -> dict[str, Tensor]:
    """What one window's update sees, before clipping."""
    drafter = drafter_of(target, noise=0.0)
    seen: dict[str, Tensor] = {}

    class Spy(AdamW):
        def clip(self, parameters: Any, norm: Any) -> None:
            seen.update(
                {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}
            )

    course = Course(batches=len(batches), accumulate=len(batches), steps=1)
    module = DraftModule(drafter, Direct(target, drafter), Spy(**OPTIM), course)
    fit(module, Fixed(batches, course))
    return seen


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys() and a
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], rtol=1e-6, atol=1e-6 * float(b[name].abs().max())
        )


@pytest.mark.field("F72")
def test_what_moments_are_divided_by_is_above_what_float32_rounds_to_nothing() -> None:
    """With a gradient of 0, 0 would be divided by 0."""
    for eps in (1e-50, 1e-30):
        with pytest.raises(InputError, match=f"optim.eps={eps}: needs at least 1e-20"):
            AdamW(**{**OPTIM, "eps": eps})
    AdamW(**{**OPTIM, "eps": 1e-20})


@pytest.mark.field("F33")
def test_accumulation_and_padding_do_not_change_the_gradient(
    target: Target, data: ConversationData
) -> None:
    rows = [(*data.row(i), data.indices[i]) for i in (0, 1, 2, 3)]
    short = [(ids[:12], mask[:12], row) for ids, mask, row in rows[:1]] + rows[1:]
    complete = gradients(target, [collate(short)])
    close(gradients(target, [collate([row]) for row in short]), complete)
    close(gradients(target, [collate(short[:1]), collate(short[1:])]), complete)
    close(gradients(target, [collate(short, pad_to_multiple=64)]), complete)


@pytest.mark.field("F31")
def test_a_batch_without_labels_weighs_nothing(target: Target, data: ConversationData) -> None:
    rows = [(*data.row(i), data.indices[i]) for i in (0, 1)]
    masked = [(ids, torch.zeros_like(mask), row) for ids, mask, row in rows]
    expected = gradients(target, [collate(rows)])
    for place in (0, 1, 2):
        batches = [collate(rows[:1]), collate(rows[1:])]
        batches.insert(place, collate(masked[:1]))
        close(gradients(target, batches), expected)


@pytest.mark.field("F31")
def test_a_window_without_labels_makes_no_update(target: Target, data: ConversationData) -> None:
    drafter = drafter_of(target)
    ids, mask = data.row(0)
    full, none = collate([(ids, mask, 0)]), collate([(ids, torch.zeros_like(mask), 0)])
    course = Course(batches=5, epochs=1)
    module = DraftModule(
        drafter,
        Direct(target, drafter),
        AdamW(**OPTIM | {"weight_decay": 0.1}),
        course,
        log_every=1,
    )
    logger, watch = Memory(), Watch()
    fit(module, Fixed([none, full, none, full, none], course), watch, logger=logger)
    assert (module.updates, module.empty_windows, module.position) == (2, 3, 5)
    assert len(watch.rates) == 2
    assert all(math.isfinite(value) for _, row in logger.rows for value in row.values())
    assert sum(logger.values("train/batches_without_labels").values()) == 2
    before = weights_of(module)
    empty = DraftModule(
        drafter, Direct(target, drafter), AdamW(**OPTIM), Course(batches=2, epochs=1)
    )
    fit(empty, Fixed([none, none], empty.course))
    assert same(before, weights_of(empty)) and empty.updates == 0


@pytest.mark.field("F47")
def test_logged_values_are_means_over_the_window_s_tokens(
    target: Target, data: ConversationData
) -> None:
    module, stream = module_for(
        data, target, accumulate=2, max_steps=6, log_every=3, batch_tokens=320, noise=0.0
    )
    seen: list[tuple[float, float, float]] = []
    inner = module.drafter.loss

    def loss(batch: Batch, features: Features, *, generator: torch.Generator | None = None) -> Loss:
        found = inner(batch, features, generator=generator)
        seen.append((float(found.total), float(found.count), float(found.parts["accuracy"][0])))
        return found

    module.drafter.loss = loss  # type: ignore[method-assign]
    logger = Memory()
    fit(module, stream, logger=logger)
    course = module.course
    edges = [k + 1 for k in range(len(seen)) if course.closes(k)]
    first, second = seen[: edges[2]], seen[edges[2] : edges[5]]
    for step, part in ((3, first), (6, second)):
        tokens = sum(count for _, count, _ in part)
        assert logger.values("train/loss")[step] == pytest.approx(
            sum(total for total, _, _ in part) / tokens, rel=1e-6
        )
        assert logger.values("train/accuracy")[step] == pytest.approx(
            sum(right for _, _, right in part) / tokens
        )
    assert module.supervised == sum(count for _, count, _ in seen)


@pytest.mark.field("F19")
@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_rate_follows_updates_and_ends_on_the_last(
    target: Target, data: ConversationData, schedule: str
) -> None:
    module, stream = module_for(
        data, target, optim={"schedule": schedule, "warmup": 3}, accumulate=2, max_steps=9
    )
    watch = Watch()
    fit(module, stream, watch)
    assert len(watch.rates) == 9 < len(watch.rows)
    peak = OPTIM["lr"]
    assert watch.rates[:3] == pytest.approx([peak / 3, 2 * peak / 3, peak])
    assert watch.rates[-1] == pytest.approx(peak if schedule == "constant" else 0.1 * peak)
    assert all(a >= b for a, b in zip(watch.rates[2:], watch.rates[3:], strict=False))


def test_rate_settings_that_need_a_length_are_refused() -> None:
    with pytest.raises(InputError, match=r"optim\.horizon"):
        AdamW(**OPTIM).resolve(None)
    assert AdamW(**OPTIM | {"schedule": "constant"}).resolve(None)(100) == 1.0
    assert AdamW(**OPTIM | {"warmup": 0.1}).resolve(50).warmup == 5
    with pytest.raises(InputError, match=r"optim\.schedule=cos"):
        AdamW(**OPTIM | {"schedule": "cos"})
    with pytest.raises(InputError, match=said("training.endless")):
        TrainerConfig(**TRAINER | {"max_steps": None})


# The kind: a run that the clock ends stops in the middle of its schedule, or has none. Neighbours:
# warm-up in updates and as a share, an end by updates that comes first, parts of a resumed run.
def test_a_schedule_by_the_clock_ends_with_the_run() -> None:
    settings = OPTIM | {"horizon": "clock", "warmup": 0.1, "schedule": "linear", "end_factor": 0.0}
    with pytest.raises(InputError, match=r"optim\.horizon=clock .* give trainer\.max_minutes"):
        AdamW(**settings).resolve(100)
    rate = AdamW(**settings).resolve(None, 200.0)
    assert [rate(7, at) for at in (10, 20, 110, 200, 300)] == pytest.approx([0.5, 1, 0.5, 0, 0])
    cosine = AdamW(**settings | {"schedule": "cosine", "end_factor": 0.2}).resolve(None, 200.0)
    assert cosine(0, 110) == pytest.approx(0.6) and cosine(0, 201) == pytest.approx(0.2)
    by_updates = AdamW(**settings).resolve(10, 200.0)
    assert [by_updates(n, 30.0) for n in (0, 4, 9)] == pytest.approx([17 / 18, 5 / 9, 0])
    counted = AdamW(**settings | {"warmup": 4}).resolve(None, 200.0)
    assert [counted(n, 50.0) for n in (0, 1, 3, 9)] == pytest.approx([0.25, 0.5, 0.75, 0.75])
    constant = AdamW(**settings | {"schedule": "constant"}).resolve(None, 200.0)
    assert [constant(0, at) for at in (10, 20, 200)] == pytest.approx([0.5, 1, 1])
    assert rate.shortfall(None) == by_updates.shortfall(10) == ""
    assert rate.facts()["clock"] == 200.0
    assert "clock" not in AdamW(**OPTIM).resolve(9, 200.0).facts()
    for odd in ("hour", 0, [1]):
        with pytest.raises(InputError, match=r"optim\.horizon=.* or clock for the end of"):
            AdamW(**OPTIM | {"horizon": odd})


def test_a_run_follows_the_clock_that_it_had_in_all_its_parts(
    target: Target, data: ConversationData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reading of the clock is a second later than the one before."""
    optim = {"horizon": "clock", "warmup": 0, "schedule": "linear", "end_factor": 0.0}
    module, stream = module_for(data, target, optim=optim, max_steps=None, max_minutes=0.5)
    module.seconds_before = 15.0
    ticks = itertools.count()
    monkeypatch.setattr("drafttrain.training.module.time.monotonic", lambda: next(ticks))
    watch, logger = Watch(), Memory()
    fit(module, stream, watch, logger=logger)
    assert module.stopped == "time" and module.seconds_before >= 30
    assert 0.3 < watch.rates[0] / OPTIM["lr"] < 0.5 and watch.rates[-1] == 0.0
    assert all(a > b for a, b in itertools.pairwise(watch.rates))
    assert set(logger.values("train/lr").values()) <= set(watch.rates)


# The kind: a schedule that teaches little or nothing, of which nobody is warned. Neighbours: one
# update, warm-up beyond the end, an end factor of 0, a horizon that is long over.
@pytest.mark.field("F83")
def test_a_schedule_that_misses_its_rate_is_said() -> None:
    def shortfall(updates: int | None, **more: Any) -> str:
        settings = {**OPTIM, "warmup": 0, "end_factor": 0.0, **more}
        return AdamW(**settings).resolve(updates).shortfall(updates)

    assert "the only update has rate 0, and nothing is learned" in shortfall(1)
    assert "the only update has at most 10%" in shortfall(1, end_factor=0.1)
    assert "warm-up of 50 updates is longer than the run of 4" in shortfall(4, warmup=50)
    assert "whose rate ends at 8% of optim.lr" in shortfall(4, warmup=50)
    assert shortfall(1, schedule="constant") == shortfall(4, warmup=4) == shortfall(12) == ""
    assert shortfall(None, schedule="constant", warmup=50) == ""


def test_batches_are_of_the_update_and_split_over_accumulation(data: ConversationData) -> None:
    complete, parts = TrainerConfig(**TRAINER), TrainerConfig(**TRAINER | {"accumulate": 2})
    updates = [
        c.course(c.sampler(data, seed=0, rank=0, world=1)).updates_per_epoch
        for c in (complete, parts)
    ]
    assert abs(updates[0] - updates[1]) <= 1
    with pytest.raises(InputError, match=said("training.longest_row")):
        TrainerConfig(**TRAINER | {"batch_tokens": max(data.lengths) - 1}).sampler(
            data, seed=0, rank=0, world=1
        )


def test_a_micro_batch_holds_at_least_one_row(data: ConversationData) -> None:
    """However many processes share an update: what runs on one runs on all of them."""
    config = TrainerConfig(**TRAINER | {"batch_tokens": max(data.lengths)})
    samplers = [config.sampler(data, seed=0, rank=r, world=4) for r in range(4)]
    rows = [
        place
        for sampler in samplers
        for batch in sampler.batches(0)
        for place in batch
        if place >= 0
    ]
    assert sorted(rows) == list(range(len(data)))
    assert len({len(sampler) for sampler in samplers}) == 1


def test_the_clock_ends_a_run_without_a_length(target: Target, data: ConversationData) -> None:
    module, stream = module_for(
        data, target, optim={"schedule": "constant"}, max_steps=None, max_minutes=0.5 / 60
    )
    fit(module, stream)
    assert module.stopped == "time" and module.updates > 0 and not module.finished
    took = module.seconds
    time.sleep(0.02)
    assert module.seconds == took >= 0.5, "what follows training is not counted"


@pytest.mark.field("F58")
def test_nothing_is_compiled_for_any_length(target: Target, data: ConversationData) -> None:
    """Batches of many widths, and no switch for it."""
    batches = TrainerConfig(**TRAINER).sampler(data, seed=0, rank=0, world=1).batches(0)
    assert len({data.batch(places).input_ids.shape for places in batches}) > 1
    from torch._dynamo.utils import counters

    counters.clear()
    module, stream = module_for(data, target, max_steps=6)
    fit(module, stream)
    assert module.updates == 6 and not counters["frames"] and not counters["stats"]
    with pytest.raises(TypeError, match="compile"):
        TrainerConfig(**TRAINER, compile=True)


@pytest.mark.field("F34")
def test_weights_are_float32_and_move_at_small_rates(
    target: Target, data: ConversationData
) -> None:
    module, stream = module_for(
        data, target, optim={"lr": 1e-5, "schedule": "constant", "warmup": 0}, max_steps=3
    )
    before = weights_of(module)
    fit(module, stream)
    moved = [(before[n] != w).float().mean() for n, w in weights_of(module).items() if w.dim() == 2]
    assert min(moved) > 0.9
    drafter = drafter_of(target).to(torch.bfloat16)
    with pytest.raises(InputError, match=said("training.low_precision")):
        DraftModule(drafter, Direct(target, drafter), AdamW(**OPTIM), Course(batches=1, steps=1))


def test_a_loss_that_is_not_finite_stops_the_run(target: Target, data: ConversationData) -> None:
    module, stream = module_for(data, target)
    module.drafter.loss = spoilt_at(2, module)  # type: ignore[method-assign]
    with pytest.raises(InputError, match=said("training.not_finite")):
        fit(module, stream)
    assert all(torch.isfinite(value).all() for value in weights_of(module).values())


# The kind: a run whose numbers are not finite is blamed on its rate where the target is at fault.
# Its features may be finite and its head not, the layers may be damaged where the features were
# kept before; a loss, or three gradients; and an adapter that grew too large is no fault of the
# target's.
@pytest.mark.field("F71")
@pytest.mark.parametrize("part", ["the head", "layer 1"])
def test_a_target_that_spoils_the_loss_is_named(part: str, data: ConversationData) -> None:
    target = tiny()
    module, stream = module_for(data, target, batch_tokens=100)
    for places in module.source._groups:  # type: ignore[attr-defined]
        module.source.features(data.batch(places))
    damaged = target.output if part == "the head" else target.decoder_layers[1].mlp.up_proj
    with torch.no_grad():
        damaged.weight[5] = torch.nan  # type: ignore[index, union-attr]
    if part != "the head":
        module.drafter.loss = spoilt_at(0, module)  # type: ignore[method-assign]
    words = (
        rf"the loss of update 0 is nan\. target .* row \d+ of the set, position \d+ .* first in "
        rf"{part}; weights of {part} are not finite: get its files again; no checkpoint"
    )
    with pytest.raises(InputError, match=words) as found:
        fit(module, stream)
    assert "optim.lr" not in str(found.value)


@pytest.mark.field("F71")
def test_a_gradient_that_the_target_spoils_is_named_so_too(data: ConversationData) -> None:
    target = tiny()
    module, stream = module_for(data, target)
    module.source.features(data.batch(range(len(data))))
    with torch.no_grad():
        target.output.weight[5] = torch.nan

    def loss(batch: Batch, features: Features, *, generator: torch.Generator | None = None) -> Loss:
        weight = next(module.drafter.parameters()).sum()
        return Loss((weight - weight).abs().sqrt(), torch.tensor(3.0), {})

    module.drafter.loss = loss  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"3 times in a row\. target .* first in the head"):
        fit(module, stream)


def spoilt_at(update: int, module: DraftModule) -> Any:
    def loss(batch: Batch, features: Features, *, generator: torch.Generator | None = None) -> Loss:
        found = Eagle1.loss(module.drafter, batch, features, generator=generator)
        factor = math.nan if module.updates == update else 1.0
        return Loss(found.total * factor, found.count, found.parts)

    return loss


def test_checkpointed_weights_are_only_the_drafter_s(
    target: Target, data: ConversationData
) -> None:
    module, _ = module_for(data, target)
    assert {name.partition(".")[0] for name in module.state_dict()} == {"drafter"}
    assert not any(value is target.embedding.weight for value in module.state_dict().values())
    assert sum(p.numel() for p in module.parameters()) == sum(
        p.numel() for p in module.drafter.parameters()
    )


def test_every_parameter_takes_part_and_no_bit_changes(
    target: Target, data: ConversationData
) -> None:
    """What a batch says nothing about has a gradient of 0 and not none; everything else is as the
    drafter's own loss gives it."""
    batch = data.batch([0, 1])
    features = OnlineFeatures(target, Eagle1.needs, data=data, spill_dir=None).features(batch)

    def gradients_of(through: bool, spare: bool) -> tuple[Tensor, dict[str, Tensor | None]]:
        drafter = drafter_of(target).train()
        if spare:
            drafter.spare = torch.nn.Linear(3, 2)
        noise = torch.Generator().manual_seed(1)
        if through:
            loss = loss_of(drafter, batch, features, noise)
        else:
            loss = drafter.loss(batch, features, generator=noise)
        loss.total.backward()
        return loss.total.detach(), {name: p.grad for name, p in drafter.named_parameters()}

    value, own = gradients_of(through=False, spare=False)
    for spare in (False, True):
        again, found = gradients_of(through=True, spare=spare)
        assert again.equal(value)
        for name, grad in found.items():
            assert grad is not None, name
            assert grad.equal(own[name]) if name in own else not grad.any(), name
