"""Features kept, spilled or computed again are those of a direct pass, whatever the neighbours, the
order and the number of requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.data.datamodule import ConversationData, EpochSampler
from drafttrain.errors import InputError
from drafttrain.flow import Needs
from drafttrain.target import features as features_module
from drafttrain.target.features import OnlineFeatures
from drafttrain.target.model import Target
from tests.messages import said
from tests.training.parts import tiny, write_tiny_set

NEEDS = Needs(last_hidden=True, layers=(0, 1))


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny()


@pytest.fixture(scope="module")
def data(target: Target, tmp_path_factory: pytest.TempPathFactory) -> ConversationData:
    return ConversationData(
        write_tiny_set(target, tmp_path_factory.mktemp("set"), rows=14, held_out=2)
    )


def single(target: Target, data: ConversationData, place: int) -> dict[Any, Tensor]:
    """A row's features by a pass over that row only."""
    batch = data.batch([place])
    found = target.features(batch.input_ids, batch.lengths, NEEDS)
    assert found.last_hidden is not None
    return {
        "last_hidden": found.last_hidden[0],
        **{layer: value[0] for layer, value in found.layers.items()},
    }


def check(
    source: OnlineFeatures, data: ConversationData, places: Sequence[int], tolerance: float = 1e-5
) -> None:
    batch = data.batch(places)
    found = source.features(batch)
    assert found.last_hidden is not None and sorted(found.layers) == [0, 1]
    for name, value in (("last_hidden", found.last_hidden), *found.layers.items()):
        assert (
            value.shape == (*batch.input_ids.shape, source.target.width) and not value.requires_grad
        )
        assert not value.is_inference()
        for row, place in enumerate(places):
            i = place if place >= 0 else ~place
            n = data.lengths[i]
            reference = single(source.target, data, i)[name]
            torch.testing.assert_close(
                value[row, :n].float(), reference, rtol=tolerance, atol=tolerance * 10
            )
            assert not value[row, n:].any()


def make(
    data: ConversationData, target: Target, mode: str, folder: Path, **settings: Any
) -> OnlineFeatures:
    budgets = {
        "memory": {},
        "file": {"budget_gb": 0.0},
        "recompute": {"budget_gb": 0.0, "disk_gb": 0.0},
    }[mode]
    return OnlineFeatures(
        target,
        NEEDS,
        data=data,
        spill_dir=folder,
        **{"keep_dtype": "float32", **budgets, **settings},
    )


@pytest.mark.field("F38")
@pytest.mark.parametrize("mode", ["memory", "file", "recompute"])
@pytest.mark.parametrize("rows", [1, 4, 12])
def test_rows_are_never_mixed_up(
    target: Target, data: ConversationData, tmp_path: Path, mode: str, rows: int
) -> None:
    sampler = EpochSampler(data.lengths, batch_rows=rows)
    source = make(data, target, mode, tmp_path / "scratch", groups=sampler.batches(0))
    words = {"memory": "kept in memory", "file": "features.bin", "recompute": "again every epoch"}
    assert source.mode == mode
    assert words[mode] in source.describe() and " GB in float32" in source.describe()
    for epoch in (0, 1):
        for places in sampler.batches(epoch):
            check(source, data, places)
    check(source, data, range(len(data))[::-1])
    check(source, data, [3, 0, 3, ~1])
    if mode == "recompute":
        assert source.rows_computed == 3 * len(data) + 4
    else:
        assert source.rows_computed == len(data)  # later epochs do not pay again
    assert (tmp_path / "scratch" / "features.bin").exists() == (mode == "file")
    source.close()
    assert not (tmp_path / "scratch").exists()


@pytest.mark.field("F38")
@pytest.mark.parametrize("mode", ["memory", "file"])
def test_a_row_has_the_same_bits_whenever_it_is_asked_for(
    target: Target, data: ConversationData, tmp_path: Path, mode: str
) -> None:
    """A run resumed in a later epoch reads rows in another order than the run that was not
    stopped."""
    sampler = EpochSampler(data.lengths, batch_rows=3, seed=2)
    first = make(
        data, target, mode, tmp_path / "a", groups=sampler.batches(0), keep_dtype="bfloat16"
    )
    for places in sampler.batches(0):
        first.features(data.batch(places))
    later = make(
        data, target, mode, tmp_path / "b", groups=sampler.batches(0), keep_dtype="bfloat16"
    )
    for places in sampler.batches(3):
        one, two = first.features(data.batch(places)), later.features(data.batch(places))
        assert one.last_hidden is not None and two.last_hidden is not None
        assert one.last_hidden.dtype == torch.bfloat16 and torch.equal(
            one.last_hidden, two.last_hidden
        )
        assert all(torch.equal(one.layers[layer], two.layers[layer]) for layer in NEEDS.layers)


def test_two_processes_share_a_file(target: Target, data: ConversationData, tmp_path: Path) -> None:
    groups = EpochSampler(data.lengths, batch_rows=4).batches(0)
    one = make(data, target, "memory", tmp_path, groups=groups, shared=True)
    two = make(data, target, "memory", tmp_path, groups=groups, shared=True)
    assert one.mode == two.mode == "file"
    for places in groups[:2]:
        check(one, data, places)
    for places in groups:
        check(two, data, places)
    assert one.rows_computed + two.rows_computed == len(data)
    one.close(), two.close()


def test_only_what_is_needed_is_kept(target: Target, data: ConversationData) -> None:
    source = OnlineFeatures(target, Needs(layers=(1,)), data=data)
    found = source.features(data.batch([0, 1]))
    assert found.last_hidden is None and list(found.layers) == [1]
    assert source.bytes == data.tokens * target.width * 2
    with pytest.raises(InputError, match=said("target.no_such_layer")):
        OnlineFeatures(target, Needs(layers=(2,)), data=data)


def test_a_drafter_that_needs_nothing_makes_the_target_read_nothing(
    target: Target, data: ConversationData
) -> None:
    source = OnlineFeatures(target, Needs(), data=data)
    found = source.features(data.batch([0, 1]))
    assert found.last_hidden is None and not found.layers and source.rows_computed == 0
    assert "only from the text" in source.describe()


def test_a_full_disk_means_computing_again(
    target: Target, data: ConversationData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(features_module.os, "posix_fallocate", full)
    source = make(data, target, "file", tmp_path)
    assert source.mode == "recompute" and not list(tmp_path.iterdir())
    check(source, data, [0, 1])


@pytest.mark.field("F32")
def test_features_that_are_not_finite_name_their_rows(
    target: Target, data: ConversationData, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = OnlineFeatures(target, Needs(last_hidden=True), data=data)
    inner = target.features

    def poisoned(*given: Any) -> Any:
        found = inner(*given)
        hidden = found.last_hidden.clone()  # type: ignore[union-attr]
        hidden[1, 2, 3] = float("nan")
        return type(found)(hidden)

    monkeypatch.setattr(target, "features", poisoned)
    with pytest.raises(InputError, match=rf"row {data.indices[4]} of the set, {said('nn.again')}"):
        source.features(data.batch([3, 4, 5]))


@pytest.mark.field("F71")
@pytest.mark.parametrize("budget", [3.0, 0.0])
def test_features_that_what_keeps_them_cannot_hold_are_refused(
    data: ConversationData, budget: float
) -> None:
    target = tiny()
    with torch.no_grad():
        target.base.norm.weight[3] = 1e6
    batch = data.batch([3, 4])
    common: dict[str, Any] = {"data": data, "budget_gb": budget}
    source = OnlineFeatures(target, Needs(last_hidden=True), keep_dtype="float16", **common)
    rows = f"{data.indices[3]}, {data.indices[4]}"
    with pytest.raises(InputError, match=said("target.too_large_to_keep").format(rows=rows)):
        source.features(batch)
    kept = OnlineFeatures(target, Needs(last_hidden=True), **common).features(batch).last_hidden
    assert kept is not None and bool(kept.isfinite().all())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"keep_dtype": "int8"}, r"features\.keep_dtype"),
        ({"budget_gb": -1}, r"features\.budget_gb"),
    ],
)
def test_settings_are_checked(
    target: Target, data: ConversationData, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        OnlineFeatures(target, NEEDS, data=data, **settings)
