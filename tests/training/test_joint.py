"""Heads and target together: the loss, the rates, what is trained, and that a stopped run goes on
as if it had not been."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from drafttrain.data.datamodule import ConversationData, collate
from drafttrain.drafter.medusa import Medusa
from drafttrain.errors import InputError
from drafttrain.flow import Batch
from drafttrain.nn import losses
from drafttrain.target.features import LiveFeatures
from drafttrain.target.model import Target
from drafttrain.training.checkpoint import read_checkpoint
from drafttrain.training.course import Course, Stream, TrainerConfig
from drafttrain.training.joint import Joint, JointModule, self_distillation
from drafttrain.training.optim import AdamW
from tests.drafter import make as drafters
from tests.messages import said
from tests.target.adapters import stirred
from tests.training.parts import OPTIM, TRAINER, Fixed, Watch, drafter_of, fit, keeper, same, tiny

JOINT: dict[str, Any] = {
    "rank": 4,
    "alpha": 8.0,
    "dropout": 0.0,
    "linears": "all",
    "lambda_0": 0.2,
    "ramp": "constant",
    "head_lr_factor": 4.0,
    "chunk": 16,
}


def heads_of(target: Target, **settings: Any) -> Medusa:
    drafter = drafters.make(
        Medusa, target, **{"heads": 3, "own_head": True, "chunk": 16, **settings}
    )
    with torch.no_grad():
        for number, p in enumerate(drafter.parameters()):
            p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    return drafter


def module_of(
    course: Course, optim: AdamW | None = None, target: Target | None = None, **settings: Any
) -> JointModule:
    """Of a target of its own."""
    target = target or tiny()
    joint = Joint(**{**JOINT, **settings})
    drafter = heads_of(target)
    adapter = joint.adapter(target, seed=0)
    source = LiveFeatures(target, drafter.needs)
    return JointModule(
        drafter,
        source,
        optim or AdamW(**OPTIM),
        course,
        target=target,
        adapter=adapter,
        joint=joint,
    )


def run_of(
    data: ConversationData, trainer: dict[str, Any], **settings: Any
) -> tuple[JointModule, Stream]:
    config = TrainerConfig(**{**TRAINER, **trainer})
    sampler = config.sampler(data, seed=0, rank=0, world=1)
    module = module_of(config.course(sampler), **settings)
    return module, Stream(data, sampler, module.course)


def batch_of(data: ConversationData, *places: int) -> Batch:
    return collate([(*data.row(i), data.indices[i]) for i in places])


def everything(module: JointModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def plain_loss(module: JointModule, batch: Batch, weight: float) -> tuple[float, float, int]:
    """Position by position, with all logits at once."""
    target, drafter = module.target, module.drafter
    assert module.adapter is not None and isinstance(drafter, Medusa)
    with torch.no_grad():
        hidden = target.hidden(batch.input_ids)
        now = target.head(hidden).log_softmax(-1)
        with module.adapter.off():
            before = target.head(target.hidden(batch.input_ids)).log_softmax(-1)
        kl = heads = 0.0
        count = 0
        for b in range(len(batch.lengths)):
            for place in range(1, int(batch.lengths[b])):
                if not batch.loss_mask[b, place]:
                    continue
                count += 1
                p, q = before[b, place - 1], now[b, place - 1]
                kl += float((p.exp() * (p - q)).sum())
                for k in range(1, drafter.count + 1):
                    if place >= k + 1:
                        logits = drafter.project(
                            drafter.outputs(hidden[b : b + 1, : place - k], batch.input_ids, k)[
                                :, -1
                            ],
                            k,
                        )
                        heads += 0.8**k * float(
                            functional.cross_entropy(logits, batch.input_ids[b, place][None])
                        )
    return kl + weight * heads, kl, count


@pytest.mark.field("F71")
def test_an_adapter_that_grew_too_large_is_no_fault_of_the_target(data: ConversationData) -> None:
    module, stream = run_of(data, {"max_steps": 2})
    assert module.adapter is not None
    with torch.no_grad():
        for weight in module.adapter.parameters():
            weight.fill_(1e30)
    with pytest.raises(InputError, match=r"loss of update 0 is nan \(rows .*: lower optim\.lr"):
        fit(module, stream)


def test_the_loss_is_kl_to_the_original_plus_the_weighted_heads(data: ConversationData) -> None:
    module = module_of(Course(batches=4, epochs=1), lambda_0=0.3)
    assert module.adapter is not None
    stirred(module.adapter)
    batch = batch_of(data, 0, 1, 2)
    loss, _ = module.judge(batch)
    total, kl, count = plain_loss(module, batch, 0.3)
    assert (
        float(loss.count) == count == sum(int(data.row(i)[1][1:].sum()) for i in (0, 1, 2))
        and kl > 0.1
    )
    assert float(loss.parts["kl"][0]) == pytest.approx(kl, rel=1e-4)
    assert float(loss.total.detach()) == pytest.approx(total, rel=1e-4)
    assert [float(value) for value in loss.parts["lambda_0"]] == pytest.approx([0.3, 1.0])
    # Normalised by supervised tokens: padding and prompts do not dilute it.
    wide, _ = module.judge(
        collate([(*data.row(i), data.indices[i]) for i in (0, 1, 2)], pad_to_multiple=64)
    )
    assert float((wide.total / wide.count).detach()) == pytest.approx(
        float((loss.total / loss.count).detach()), rel=1e-5
    )


def test_both_parts_teach_the_adapter(data: ConversationData) -> None:
    """Gradients of the chunked loss are those of all logits at once, for the adapter too."""
    module = module_of(Course(batches=4, epochs=1), lambda_0=0.3)
    assert module.adapter is not None
    stirred(module.adapter)
    batch = batch_of(data, 0, 1)
    loss, _ = module.judge(batch)
    found = torch.autograd.grad(loss.total, list(module.adapter.parameters()))
    target, drafter = module.target, module.drafter
    assert isinstance(drafter, Medusa)
    with torch.no_grad(), module.adapter.off():
        p = target.head(target.hidden(batch.input_ids)).softmax(-1)
    hidden = target.hidden(batch.input_ids)
    q = target.head(hidden).log_softmax(-1)
    row, place = batch.loss_mask.nonzero(as_tuple=True)
    total = functional.kl_div(q[row, place - 1], p[row, place - 1], reduction="sum")
    for k in range(1, drafter.count + 1):
        z = drafter.project(drafter.outputs(hidden, batch.input_ids, k), k)
        kept = place >= k + 1
        labels = batch.input_ids[row[kept], place[kept]]
        total = total + 0.3 * 0.8**k * functional.cross_entropy(
            z[row[kept], place[kept] - k - 1], labels, reduction="sum"
        )
    expected = torch.autograd.grad(total, list(module.adapter.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


def test_the_loss_of_the_target_is_zero_at_the_start(data: ConversationData) -> None:
    module = module_of(Course(batches=4, epochs=1), lambda_0=0.0)
    loss, _ = module.judge(batch_of(data, 0, 1))
    assert abs(float(loss.parts["kl"][0])) < 1e-4 and float(loss.parts["heads"][0]) > 1


def test_no_more_than_a_chunk_of_logits_exists(
    data: ConversationData, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(Course(batches=4, epochs=1))
    rows: list[int] = []
    inner = Target.finish_logits

    def finish(self: Target, logits: Tensor) -> Tensor:
        rows.append(logits[..., 0].numel())
        return inner(self, logits)

    monkeypatch.setattr(Target, "finish_logits", finish)
    module.judge(batch_of(data, 0, 1, 2, 3))
    assert max(rows) == 16 < int(batch_of(data, 0, 1, 2, 3).loss_mask.sum())


def test_only_adapter_and_heads_are_trained_and_saved(data: ConversationData) -> None:
    module, stream = run_of(data, {"max_steps": 3})
    target = module.target
    ours = {id(p) for p in module.parameters()}
    frozen = {n: p.clone() for n, p in target.model.named_parameters() if id(p) not in ours}
    before = everything(module)
    fit(module, stream)
    after = everything(module)
    assert {name.partition(".")[0] for name in after} == {"drafter", "adapter"}
    assert all(not torch.equal(before[name], after[name]) for name in after)
    assert same(frozen, {n: p for n, p in target.model.named_parameters() if n in frozen})
    assert len(frozen) == len(list(tiny().model.parameters()))


def test_every_head_parameter_learns_at_its_multiple(data: ConversationData) -> None:
    """Biases too, which the public code forgets."""

    class Rates(Watch):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            super().on_train_batch_end(trainer, pl_module, *rest)
            seen.append(
                {
                    id(p): group["lr"]
                    for group in trainer.optimizers[0].param_groups
                    for p in group["params"]
                }
            )

    seen: list[dict[int, float]] = []
    module, stream = run_of(data, {"max_steps": 5}, head_lr_factor=3.0)
    watch = Rates()
    fit(module, stream, watch)
    assert module.adapter is not None and len(seen) == 5
    heads = dict(module.drafter.named_parameters())
    assert any(name.endswith("bias") for name in heads)
    for update, rates in enumerate(seen):
        base = OPTIM["lr"] * module.rate(update)
        assert {rates[id(p)] for p in module.adapter.parameters()} == {base}
        assert {rates[id(p)] for p in heads.values()} == {base * 3.0}
        assert len(rates) == len(heads) + len(list(module.adapter.parameters()))


def test_ramp() -> None:
    sine, constant = (
        Joint(**{**JOINT, "lambda_0": 0.5, "ramp": ramp}) for ramp in ("sine", "constant")
    )
    assert [sine.weight(u, 4) for u in range(5)] == pytest.approx(
        [0, 0.5 * math.sin(math.pi / 8), 0.5 * math.sqrt(0.5), 0.5 * math.sin(3 * math.pi / 8), 0.5]
    )
    assert [constant.weight(u, n) for u, n in ((0, 4), (3, 4), (9, None))] == [0.5] * 3


def test_the_ramp_follows_updates(data: ConversationData) -> None:
    module, stream = run_of(
        data, {"max_steps": 4, "accumulate": 2, "batch_tokens": 320}, ramp="sine", lambda_0=1.0
    )
    seen: list[tuple[int, float]] = []
    inner = module.judge

    def judge(batch: Batch) -> Any:
        loss, ready = inner(batch)
        seen.append((module.updates, float(loss.parts["lambda_0"][0])))
        return loss, ready

    module.judge = judge  # type: ignore[method-assign]
    fit(module, stream)
    assert {u for u, _ in seen} == {0, 1, 2, 3} and len(seen) > 4
    assert all(weight == pytest.approx(math.sin(math.pi / 8 * u), abs=1e-6) for u, weight in seen)


def test_accumulation_does_not_change_the_gradient(data: ConversationData) -> None:
    def gradients(batches: list[Batch]) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}

        class Spy(AdamW):
            def clip(self, parameters: Any, norm: Any) -> None:
                seen.update(
                    {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
                )

        course = Course(batches=len(batches), accumulate=len(batches), steps=1)
        module = module_of(course, Spy(**OPTIM))
        assert module.adapter is not None
        stirred(module.adapter)
        fit(module, Fixed(batches, course))
        assert len(seen) == len(list(module.parameters()))
        return seen

    rows = [(*data.row(i), data.indices[i]) for i in (0, 1, 2)]
    ids, mask, number = rows[0]
    empty = collate([(ids, torch.zeros_like(mask), number)])
    complete = gradients([collate(rows)])
    for split in ([collate([row]) for row in rows], [collate(rows[:1]), empty, collate(rows[1:])]):
        for name, value in gradients(split).items():
            torch.testing.assert_close(
                value, complete[name], rtol=1e-4, atol=1e-4 * float(complete[name].abs().max())
            )


def test_stopped_in_mid_epoch_and_resumed(data: ConversationData, tmp_path: Path) -> None:
    """With dropout: weights of adapter and heads, and their optimiser's state, are those of a run
    that was not stopped."""
    trainer: dict[str, Any] = {"accumulate": 2, "max_steps": 7, "batch_tokens": 320}
    settings: dict[str, Any] = {"dropout": 0.3, "ramp": "sine"}
    complete, stream = run_of(data, trainer, **settings)
    fit(complete, stream, keeper(tmp_path / "complete"))
    first, stream = run_of(data, trainer, **settings)
    fit(first, stream, Watch(stop_at=3), keeper(tmp_path / "parts"))
    assert first.stopped == "signal" and 3 <= first.updates < 7
    torch.manual_seed(99)
    second, stream = run_of(data, trainer, **settings)
    second.continue_from(read_checkpoint(tmp_path / "parts" / "last.ckpt"))
    stream.position = second.position
    fit(second, stream, keeper(tmp_path / "parts"))
    assert same(everything(second), everything(complete))
    mine, theirs = (
        read_checkpoint(tmp_path / name / "last.ckpt")["optimiser"]
        for name in ("parts", "complete")
    )
    assert [group["lr"] for group in mine["param_groups"]] == [
        group["lr"] for group in theirs["param_groups"]
    ]
    for number, state in theirs["state"].items():
        assert all(torch.equal(mine["state"][number][name], value) for name, value in state.items())
    calm, stream = run_of(data, trainer, **settings | {"dropout": 0.0})
    fit(calm, stream)
    assert not same(everything(calm), everything(complete)), "dropout is on while learning"


def test_rank_0_and_no_weight_leave_everything_as_it_was(data: ConversationData) -> None:
    module, stream = run_of(data, {"max_steps": 3}, rank=0, lambda_0=0.0)
    state, before = (
        {n: v.clone() for n, v in module.target.model.state_dict().items()},
        everything(module),
    )
    fit(module, stream)
    assert module.updates == 3 and same(before, everything(module))
    assert same(state, dict(module.target.model.state_dict())) and same(
        state, dict(tiny().model.state_dict())
    )
    assert module.target.fingerprint == tiny().fingerprint


def test_an_empty_batch_has_no_loss_and_reaches_every_weight(data: ConversationData) -> None:
    module = module_of(Course(batches=4, epochs=1))
    ids, mask = data.row(0)
    loss, _ = module.judge(collate([(ids, torch.zeros_like(mask), 0)]))
    assert float(loss.total.detach()) == float(loss.count) == 0
    loss.total.backward()
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


def test_distillation_stays_within_its_chunk(data: ConversationData) -> None:
    target = tiny()
    batch = batch_of(data, 0, 1)
    hidden = target.hidden(batch.input_ids)
    other = hidden + 0.1
    sums = [
        float(self_distillation(target, other, hidden, batch, chunk=chunk)[0])
        for chunk in (1, 7, 1000)
    ]
    assert sums == pytest.approx([sums[0]] * 3, rel=1e-5) and sums[0] > 0
    row, place = batch.loss_mask.nonzero(as_tuple=True)
    plain = losses.forward_kl(
        target.head(other[row, place - 1]), target.head(hidden[row, place - 1])
    ).sum()
    assert sums[0] == pytest.approx(float(plain), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"rank": -1}, "joint.rank=-1"),
        ({"rank": 1.5}, "joint.rank=1.5"),
        ({"alpha": 0}, "joint needs alpha"),
        ({"dropout": 1.0}, "and dropout below 1"),
        ({"ramp": "linear"}, "joint.ramp=linear"),
        ({"linears": "q_proj"}, "joint.linears=q_proj"),
        ({"linears": []}, "joint.linears"),
        ({"lambda_0": float("nan")}, "joint.lambda_0=nan"),
        ({"chunk": 0}, "joint.chunk=0"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(InputError, match=fault.replace(".", r"\.")):
        Joint(**{**JOINT, **settings})


def test_what_cannot_be_trained_jointly(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = Joint(**JOINT)
    with pytest.raises(InputError, match=said("training.no_heads")):
        joint.check(drafter_of(tiny()))
    with pytest.raises(InputError, match=r"joint\.ramp=sine"):
        Joint(**{**JOINT, "ramp": "sine"}).check_length(None)
    joint.check_length(None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=said("training.needs_peft")):
        Joint(**JOINT)
    Joint(**{**JOINT, "rank": 0})
