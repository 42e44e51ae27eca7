"""Joined rows teach what they teach one by one: loss, gradients, weights after updates, and
features of every source."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain import fit
from drafttrain.data.datamodule import ConversationData
from drafttrain.data.sequences import PackedSampler
from drafttrain.drafter.base import Drafter
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.early_exit import EarlyExit
from drafttrain.drafter.hydra_heads import HydraHeads
from drafttrain.drafter.medusa import Medusa
from drafttrain.drafter.selfspec import SelfSpec
from drafttrain.drafter.ssm import Ssm
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Features, Loss, Needs
from drafttrain.target import load
from drafttrain.target.features import OnlineFeatures
from drafttrain.target.model import Target
from drafttrain.target.stored import StoredFeatures
from drafttrain.training.course import Stream, TrainerConfig
from drafttrain.training.module import DraftModule
from drafttrain.training.optim import AdamW
from drafttrain.training.prepare import joined
from tests.drafter import make as drafters
from tests.messages import said
from tests.target.stores import make_store
from tests.training.parts import OPTIM, TRAINER, write_tiny_set
from tests.training.parts import fit as run

KINDS: dict[str, Any] = {
    "eagle1": lambda target: drafters.make(Eagle1, target, noise=0.0, classification=1.0),
    "medusa": lambda target: drafters.make(
        Medusa, target, heads=3, own_head=True, loss="forward_kl"
    ),
    "hydra_heads": lambda target: drafters.make(HydraHeads, target, heads=3),
    "ssm": lambda target: drafters.make(
        Ssm,
        target,
        layers=[0, 1],
        own=["norm", "head"],
        loss={"forward_kl": 1.0, "cross_entropy": 0.3},
    ),
    "early_exit": lambda target: drafters.make(
        EarlyExit, target, exit_layer=0, mlp=32, loss={"jsd": 1.0, "cross_entropy": 0.5}
    ),
}
SIZE = 80


def made(kind: str, target: Target) -> Drafter:
    """Weights that start as zero are moved, so that everything has a gradient."""
    torch.manual_seed(0)
    drafter: Drafter = KINDS[kind](target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return drafter


def judged(drafter: Drafter, batch: Batch) -> tuple[Loss, dict[str, Tensor]]:
    found = drafter.target.features(batch.input_ids, batch.lengths, drafter.needs, batch.packing)
    hidden = None if found.last_hidden is None else found.last_hidden.clone()
    features = Features(hidden, {layer: value.clone() for layer, value in found.layers.items()})
    drafter.zero_grad()
    loss = drafter.loss(batch, features)
    loss.total.backward()
    return loss, {
        name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_neox"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_single_rows(
    kind: str, family: str, data: ConversationData
) -> None:
    target = load.tiny(family=family, layers=2, width=32, vocab_size=256)
    drafter = made(kind, target)
    drafter.check_packing()
    places = [*range(9), ~9, *range(10, 14)]
    loss, expected = judged(drafter, data.batch(places))
    together, found = judged(drafter, data.joined(SIZE).batch(places))
    assert data.joined(SIZE).batch(places).input_ids.shape[0] < 9 and float(loss.count) > 50
    assert float(together.count) == float(loss.count)
    torch.testing.assert_close(together.total, loss.total, rtol=1e-5, atol=0)
    assert together.parts.keys() == loss.parts.keys()
    for name, (total, count) in loss.parts.items():
        torch.testing.assert_close(together.parts[name][0], total, rtol=1e-5, atol=1e-5)
        assert float(together.parts[name][1]) == float(count)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float(gradient.abs().max()) > 0, name
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max())
        )


def test_scaled_noise_is_by_the_row_s_own_length(target: Target, data: ConversationData) -> None:
    drafter = drafters.make(Eagle1, target, noise=1.0, noise_scaled=True)
    seen: list[Tensor] = []
    drafter.forward = lambda inputs, *more: seen.append(inputs) or inputs
    batch = data.joined(SIZE).batch([0, 1, 2])
    hidden = torch.zeros(*batch.input_ids.shape, target.width)
    drafter.loss(batch, Features(hidden), generator=torch.Generator().manual_seed(0))
    assert batch.packing is not None
    for number, length in enumerate(batch.row_lengths.tolist()):
        largest = float(seen[0][batch.packing.document_ids[:, :-2] == number].abs().max())
        assert 0.8 * 512 / length < largest <= 512 / length


@pytest.mark.parametrize("budgets", [{}, {"budget_gb": 0.0, "disk_gb": 0.0}])
def test_updates_of_joined_rows_make_the_same_weights(
    target: Target, data: ConversationData, budgets: dict[str, float]
) -> None:
    """An update is an epoch here, so that both have the same rows in each."""
    found = []
    for pack in (None, SIZE):
        config = TrainerConfig(**{**TRAINER, "batch_tokens": 1 << 12, "max_steps": 4, "pack": pack})
        sampler = config.sampler(data, seed=0, rank=0, world=1)
        torch.manual_seed(0)
        drafter = drafters.make(Eagle1, target, noise=0.0)
        said: list[str] = []
        rows = data
        if isinstance(sampler, PackedSampler):
            rows = joined(data, sampler, target, drafter, said.append)
            assert (
                said[0].startswith(f"rows are joined into sequences of {SIZE} tokens, ")
                and "dense mask" in said[0]
            )
        source = OnlineFeatures(
            target,
            drafter.needs,
            data=rows,
            groups=sampler.batches(0),
            keep_dtype="float32",
            **budgets,
        )
        module = DraftModule(drafter, source, AdamW(**OPTIM), config.course(sampler))
        run(module, Stream(rows, sampler, module.course))
        assert module.updates == 4 and source.rows_computed == len(data) * (4 if budgets else 1)
        found.append(
            (
                module.supervised,
                {name: value.clone() for name, value in drafter.state_dict().items()},
            )
        )
    assert found[0][0] == found[1][0]
    for name, value in found[0][1].items():
        torch.testing.assert_close(
            found[1][1][name], value, rtol=1e-5, atol=1e-5 * float(value.abs().max())
        )


def test_a_store_serves_joined_rows(target: Target, data: ConversationData, tmp_path: Path) -> None:
    needs = Needs(last_hidden=True, layers=(1,))
    store = make_store(target, data, tmp_path / "store", layers=(1,))
    source = StoredFeatures(target, needs, data=data, path=store)
    batch = data.joined(SIZE).batch([3, 0, 5, 1])
    found, expected = (
        source.features(batch),
        target.features(batch.input_ids, batch.lengths, needs, batch.packing),
    )
    assert found.last_hidden is not None and expected.last_hidden is not None
    for mine, theirs in (
        (found.last_hidden, expected.last_hidden),
        (found.layers[1], expected.layers[1]),
    ):
        torch.testing.assert_close(mine[batch.padding], theirs[batch.padding], rtol=1e-5, atol=1e-5)
        assert not mine[~batch.padding].any()
    source.close()


def test_features_that_are_not_finite_name_the_joined_row(
    target: Target, data: ConversationData, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = data.joined(SIZE)
    batch = rows.batch([0, 1, 2])
    inner = target.features

    def poisoned(*given: Any) -> Features:
        hidden = inner(*given).last_hidden.clone()  # type: ignore[union-attr]
        assert batch.packing is not None
        hidden[batch.packing.document_ids == 1] = float("nan")
        return Features(hidden)

    monkeypatch.setattr(target, "features", poisoned)
    with pytest.raises(
        InputError, match=said("training.rows_not_finite").format(rows=data.indices[1])
    ):
        OnlineFeatures(target, Needs(last_hidden=True), data=rows).features(batch)


def test_what_cannot_be_joined_is_refused(target: Target, data: ConversationData) -> None:
    with pytest.raises(InputError, match=r"trainer\.pack.*on_policy"):
        drafters.make(Ssm, target, layers=[0], on_policy=0.5).check_packing()
    with pytest.raises(InputError, match=said("training.not_joined")):
        SelfSpec.check_packing(SelfSpec.__new__(SelfSpec))
    for settings, fault in (
        ({"pack": 1}, "trainer.pack=1"),
        ({"pack": 99999999}, "trainer.pack=99999999"),
        ({"pack": 64, "batch_tokens": None, "batch_rows": 4}, "give trainer.batch_tokens"),
        ({"pack": 64, "batch_rows": 4}, "set trainer.batch_rows=null"),
    ):
        with pytest.raises(InputError, match=fault):
            TrainerConfig(**{**TRAINER, **settings})
    with pytest.raises(InputError, match=r"trainer\.pack=10"):
        TrainerConfig(**{**TRAINER, "pack": 10}).sampler(data, seed=0, rank=0, world=1)


@pytest.mark.parametrize("more", [[], ["--all"]])
def test_the_bench(
    target: Target,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
) -> None:
    bench = Path(__file__).resolve().parent.parent.parent / "scripts" / "bench"
    words = [
        "--target",
        "tiny",
        "--data",
        str(folder),
        "--pack",
        "64",
        "--batch-tokens",
        "128",
        "--tokens",
        "300",
        "--rounds",
        "1",
    ]
    monkeypatch.syspath_prepend(str(bench))
    monkeypatch.setattr(sys, "argv", ["packing.py", *words, *more])
    runpy.run_path(str(bench / "packing.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert (
        said.count("supervised of") == 2
        and said.count("ratio") == 3
        and "apart by dense; tiny-llama" in said
    )


def test_the_door(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = load.tiny()
    folder = write_tiny_set(target, tmp_path / "set")
    words = [
        "experiment=smoke",
        f"data.path={folder}",
        "trainer.max_steps=2",
        "eval.every=null",
        "eval.prompts=0",
    ]
    words += [
        "eval.sim_rows=0",
        "final.prompts=0",
        "final.speed_prompts=0",
        "trainer.pack=64",
        "trainer.batch_tokens=128",
    ]
    fit.main([*words, f"run_dir={tmp_path / 'run'}"])
    said = " ".join(capsys.readouterr().out.split())
    assert "rows are joined into sequences of 64 tokens" in said and "trained 2 updates" in said
    assert (tmp_path / "run" / "package" / "drafter.safetensors").exists()
