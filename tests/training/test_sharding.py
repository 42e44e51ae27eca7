"""Two processes that share the work, or the drafter itself, make the weights of one, and write the
checkpoints of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.data.datamodule import ConversationData
from drafttrain.errors import InputError
from drafttrain.target.features import OnlineFeatures
from drafttrain.target.model import Target
from drafttrain.training.checkpoint import read_checkpoint
from drafttrain.training.course import Course, TrainerConfig
from drafttrain.training.module import DraftModule
from drafttrain.training.trainer import check_trainer
from tests import forked
from tests.messages import said
from tests.training import pair
from tests.training.parts import TRAINER, Direct, Fixed, fit, same, write_tiny_set


def left_by_two(folder: Path, target: Target, much: str) -> Path:
    write_tiny_set(target, folder / "set")
    forked.pair(pair.main, folder, much, said=folder / "said", TORCHELASTIC_RUN_ID="of torchrun")
    return folder


@pytest.fixture(scope="module")
def few(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left."""
    return left_by_two(tmp_path_factory.mktemp("few"), target, "few")


@pytest.fixture(scope="module")
def every(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of all drafters and strategies; takes a minute."""
    return left_by_two(tmp_path_factory.mktemp("every"), target, "all")


def single(
    kind: str, target: Target, data: ConversationData, steps: int = pair.STEPS
) -> DraftModule:
    """One process, whose windows hold the micro-batches of both."""
    shares = [pair.share(data, rank).from_step(0) for rank in range(pair.WORLD)]
    length = len(pair.share(data, 0))
    parts = [[next(one)[2] for one in shares] for _ in range(3 * length)]
    drafter = pair.made(kind, target)
    source = OnlineFeatures(target, drafter.needs, data=data, keep_dtype="float32")
    course = Course(
        batches=pair.WORLD * length, accumulate=pair.WORLD * pair.ACCUMULATE, steps=steps
    )
    module = DraftModule(drafter, source, pair.optimiser_of(kind), course)
    fit(module, Fixed([data.batch(places) for part in parts for places in part], course))
    return module


def close(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys() and expected
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert found[name].shape == value.shape and found[name].dtype == value.dtype
            size = float(value.float().abs().max())
            torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance * size)


def close_for_their_way(
    found: dict[str, Any], expected: dict[str, Any], start: dict[str, Any]
) -> None:
    """Muon rounds to bfloat16, where a gradient's last bit can make a step of another one."""
    assert found.keys() == expected.keys()
    for name, first in start.items():
        if first.is_floating_point():
            mine, other = found[f"drafter.{name}"], expected[f"drafter.{name}"]
            went = float((other - first).norm())
            assert went > 0 and float((mine - other).norm()) < 0.01 * went, name


def check_weights(kind: str, strategy: str, folder: Path, target: Target) -> None:
    module = single(kind, target, ConversationData(folder / "set"))
    state = read_checkpoint(folder / f"{kind}-{strategy}" / "last.ckpt")
    expected = {name: value.detach() for name, value in module.state_dict().items()}
    if kind == pair.MUON:
        close_for_their_way(state["weights"], expected, pair.made(kind, target).state_dict())
    else:
        close(state["weights"], expected)
    assert state["progress"]["updates"] == pair.STEPS == module.updates
    assert state["progress"]["supervised"] == module.supervised > 0
    for rank in range(2):
        left = torch.load(folder / f"{kind}-{strategy}-{rank}.pt", weights_only=True)
        assert same(
            left, {name.removeprefix("drafter."): value for name, value in state["weights"].items()}
        )


def check_forms(kind: str, folder: Path) -> None:
    ddp, fsdp = (
        read_checkpoint(folder / f"{kind}-{strategy}" / "last.ckpt") for strategy in ("ddp", "fsdp")
    )
    assert ddp.keys() == fsdp.keys() and all(
        type(value) is Tensor for value in fsdp["weights"].values()
    )
    close(fsdp["weights"], ddp["weights"])
    ours, theirs = fsdp["optimiser"], ddp["optimiser"]
    assert (
        ours["param_groups"] == theirs["param_groups"]
        and ours["state"].keys() == theirs["state"].keys()
    )
    for number, values in theirs["state"].items():
        assert float(values["exp_avg"].abs().max()) > 0
        close(ours["state"][number], values, 1e-4)


def check_going_on(first: str, second: str, folder: Path) -> None:
    calm, stopped, ended = (
        read_checkpoint(folder / name / "last.ckpt")
        for name in ("eagle1-ddp", f"started-{first}", f"ended-{second}")
    )
    assert 3 <= stopped["progress"]["updates"] < ended["progress"]["updates"] == pair.STEPS
    close(ended["weights"], calm["weights"])


def check_masked(strategy: str, folder: Path, target: Target) -> None:
    """One process at a time has labels, at last none has many."""
    data = ConversationData(folder / "set")
    drafter = pair.made("eagle1", target)
    batches = [
        batch
        for both in zip(*(pair.rows_of(data, rank) for rank in range(2)), strict=True)
        for batch in both
    ]
    course = Course(batches=8, accumulate=4, epochs=1)
    module = DraftModule(drafter, Direct(target, drafter), pair.OPTIMISER, course)
    fit(module, Fixed(batches, course))
    state = read_checkpoint(folder / f"masked-{strategy}" / "last.ckpt")
    assert state["progress"]["updates"] == module.updates == 2
    close(state["weights"], {name: value.detach() for name, value in module.state_dict().items()})


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "strategy"), pair.FEW)
def test_two_processes_make_the_weights_of_one(
    target: Target, few: Path, kind: str, strategy: str
) -> None:
    check_weights(kind, strategy, few, target)


@pytest.mark.processes
def test_checkpoints_are_of_one_form_and_a_run_goes_on_by_the_other_strategy(few: Path) -> None:
    check_forms("eagle1", few)
    check_going_on("ddp", "fsdp", few)


@pytest.mark.processes
def test_muon_goes_on_bit_for_bit_with_shared_matrices(few: Path) -> None:
    calm, stopped, ended = (
        read_checkpoint(few / f"{pair.MUON}-{name}" / "last.ckpt")
        for name in ("fsdp", "part-0", "part-1")
    )
    assert 3 <= stopped["progress"]["updates"] < ended["progress"]["updates"] == pair.STEPS
    assert same(ended["weights"], calm["weights"])
    moments, others = (one["optimiser"]["state"] for one in (ended, calm))
    assert moments.keys() == others.keys()
    assert all(same(values, others[number]) for number, values in moments.items())
    kept = [set(values) for values in moments.values()]
    assert {"momentum_buffer"} in kept and {"step", "exp_avg", "exp_avg_sq"} in kept


@pytest.mark.processes
def test_a_process_without_labels_hangs_nobody(target: Target, few: Path) -> None:
    check_masked("fsdp", few, target)


@pytest.mark.field("F72")
@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_gradient_that_one_process_finds_infinite_changes_no_weight(
    few: Path, strategy: str
) -> None:
    one, two = (torch.load(few / f"spoilt-{strategy}-{r}.pt", weights_only=True) for r in (0, 1))
    assert one["counts"] == two["counts"] == [2, 1] and same(one["weights"], two["weights"])
    assert all(value.isfinite().all() for value in one["weights"].values())


@pytest.mark.slow
@pytest.mark.processes
def test_every_drafter_by_every_strategy(target: Target, every: Path) -> None:
    for kind, strategy in pair.ALL:
        check_weights(kind, strategy, every, target)
    for kind in pair.KINDS:
        if kind != pair.MUON:
            check_forms(kind, every)
    for first, second in (("ddp", "fsdp"), ("fsdp", "ddp")):
        check_going_on(first, second, every)
        check_masked(first, every, target)


@pytest.mark.slow
@pytest.mark.processes
def test_mixed_precision_keeps_float32_weights(target: Target, every: Path) -> None:
    weights, data = (
        read_checkpoint(every / "mixed" / "last.ckpt")["weights"],
        ConversationData(every / "set"),
    )
    stopped = single("eagle1", target, data, 1).state_dict()
    for name, value in single("eagle1", target, data).state_dict().items():
        if value.is_floating_point():
            assert weights[name].dtype == torch.float32
            # Products in bfloat16 are off by some thousandths; the weights went far further than
            # that.
            off, went = (
                float((weights[name] - value).norm()),
                float((stopped[name] - value).norm()),
            )
            assert off < 0.5 * went, name


def test_bad_pairs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fsdp = TrainerConfig(**{**TRAINER, "strategy": "fsdp"})
    with pytest.raises(InputError, match=said("training.one_process")):
        check_trainer(fsdp, joint=False, boost=False)
    # What more processes cannot cure is said first.
    with pytest.raises(InputError, match=said("training.fsdp_with_boost")):
        check_trainer(fsdp, joint=False, boost=True)
    with pytest.raises(InputError, match=said("training.fsdp_with_joint")):
        check_trainer(fsdp, joint=True, boost=False)
    with pytest.raises(InputError, match=r"trainer\.strategy=deepspeed"):
        TrainerConfig(**{**TRAINER, "strategy": "deepspeed"})
    packed = TrainerConfig(**{**TRAINER, "pack": 64})
    with pytest.raises(InputError, match=said("training.pack_with_joint")):
        check_trainer(packed, joint=True, boost=False)
    with pytest.raises(InputError, match=said("training.pack_with_boost")):
        check_trainer(packed, joint=False, boost=True)
    check_trainer(packed, joint=False, boost=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_trainer(fsdp, joint=False, boost=False)
    with pytest.raises(InputError, match=said("training.fsdp_with_joint")):
        check_trainer(fsdp, joint=True, boost=False)
    with pytest.raises(InputError, match=r"trainer\.accelerator=mps"):
        check_trainer(
            TrainerConfig(**{**TRAINER, "strategy": "fsdp", "accelerator": "mps"}),
            joint=False,
            boost=False,
        )
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    check_trainer(fsdp, joint=False, boost=False)
    with pytest.raises(InputError, match="--use_fsdp"):
        check_trainer(TrainerConfig(**TRAINER), joint=False, boost=False)
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(InputError, match="--use_deepspeed"):
        check_trainer(fsdp, joint=False, boost=False)
