"""F77, neighbours of a last hidden state from before the final norm: another layer, the next or the
last position, the norm twice, another row's; and what is near: scaled by 1.01 to 1.2, noise, some
dimensions or one of them zero, the first or the last token another, a mean of two layers, another
top token; and what is wrong only far into long rows, as where a table of positions ends.
In every encoding and dtype the right features pass: with a few large dimensions, widths
of 64 and 1024, other attention kernels and batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.data.conversations import Row, write_set
from drafttrain.data.datamodule import ConversationData
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Needs
from drafttrain.target import load
from drafttrain.target.encoding import ENCODINGS
from drafttrain.target.features import LAST, computed
from drafttrain.target.matching import AGREE, Bounds
from drafttrain.target.model import Target
from drafttrain.target.stored import StoredFeatures
from tests.target.stores import make_store, random_set

BOTH = Needs(last_hidden=True, layers=(1,))


@pytest.fixture(scope="module")
def target() -> Target:
    target = load.tiny()
    with torch.no_grad():  # Fresh norms are alike, and a second time they change nothing.
        target.base.norm.weight.copy_(torch.linspace(0.5, 3, target.width))
    return target


@pytest.fixture(scope="module")
def data(target: Target, tmp_path_factory: pytest.TempPathFactory) -> ConversationData:
    folder = random_set(target, tmp_path_factory.mktemp("matching") / "set")
    return ConversationData(path=str(folder), split="train")


Found = Mapping[str | int, Tensor]
Change = Callable[[Target, Batch, dict[str | int, Tensor]], Found]


def before_the_norm(target: Target, batch: Batch, found: dict[str | int, Tensor]) -> Found:
    deepest = len(target.decoder_layers) - 1
    return {**found, LAST: computed(target, batch, Needs(layers=(deepest,)))[deepest]}


def another_layer(target: Target, batch: Batch, found: dict[str | int, Tensor]) -> Found:
    return {**found, 1: computed(target, batch, Needs(layers=(0,)))[0]}


def embedded(target: Target, batch: Batch, found: dict[str | int, Tensor]) -> Found:
    """Layers counted from the embeddings on."""
    with torch.inference_mode():
        return {**found, 1: target.embedding(batch.input_ids)}


def normed_twice(target: Target, batch: Batch, found: dict[str | int, Tensor]) -> Found:
    with torch.inference_mode():
        return {**found, LAST: target.base.norm(found[LAST])}


def shifted(places: int) -> Change:
    def change(_target: Target, batch: Batch, found: dict[str | int, Tensor]) -> Found:
        found = {name: value.clone() for name, value in found.items()}
        for row, length in enumerate(batch.lengths.tolist()):
            found[LAST][row, :length] = found[LAST][row, :length].roll(places, 0)
        return found

    return change


def another_row(_target: Target, _batch: Batch, found: dict[str | int, Tensor]) -> Found:
    noise = torch.randn(found[LAST].shape, generator=torch.Generator().manual_seed(0))
    return {**found, LAST: noise}


def noisy_position_before(target: Target, batch: Batch, found: dict[str | int, Tensor]) -> Found:
    """Nearer to another place than to its own, and far from both."""
    moved = shifted(1)(target, batch, found)[LAST]
    noise = torch.randn(moved.shape, generator=torch.Generator().manual_seed(0))
    size = 0.45 * moved.norm(dim=-1, keepdim=True) / moved.shape[-1] ** 0.5
    return {**found, LAST: moved + size * noise}


WRONG: dict[str, tuple[Change, str]] = {
    "before the norm": (before_the_norm, "the last hidden state .*before the norm"),
    "another layer": (another_layer, "the output of layer 1 .*it is the output of layer 0"),
    "embeddings": (embedded, "the output of layer 1 .*it is what the first layer reads"),
    "norm twice": (normed_twice, "the last hidden state .*after the final norm a second time"),
    "next position": (shifted(-1), "it is that of the next position"),
    "position before": (shifted(1), "it is that of the position before"),
    "another row": (another_row, "it may be of another row"),
    "far from all": (noisy_position_before, "it is nothing else of this row"),
}


@pytest.mark.field("F77")
@pytest.mark.parametrize("name", WRONG)
def test_features_that_are_not_what_they_say_are_refused(
    name: str, target: Target, data: ConversationData, tmp_path: Path
) -> None:
    change, words = WRONG[name]

    def read(batch: Batch) -> Found:
        return change(target, batch, dict(computed(target, batch, BOTH)))

    path = make_store(target, data, tmp_path / "store", read=read, layers=[1])
    with pytest.raises(InputError, match=rf"features\.path=.*{words}.*drafttrain\.capture"):
        StoredFeatures(target, BOTH, data=data, path=path)


def refused(
    target: Target,
    data: ConversationData,
    folder: Path,
    change: Change,
    words: str,
    encoding: str = "float32",
    **batches: Any,
) -> None:
    def read(batch: Batch) -> Found:
        return change(target, batch, dict(computed(target, batch, BOTH)))

    path = make_store(target, data, folder, read=read, layers=[1], encoding=encoding, **batches)
    with pytest.raises(InputError, match=rf"{words}.*drafttrain\.capture"):
        StoredFeatures(target, BOTH, data=data, path=path)


def with_outliers(target: Target) -> Target:
    """As in large models, a few dimensions are far larger than the others."""
    with torch.no_grad():
        target.base.embed_tokens.weight[:, [3, 11]] *= 200
    return target


def scaled(factor: float) -> Change:
    return lambda _target, _batch, found: {**found, 1: found[1].float() * factor}


def noisy(share: float) -> Change:
    def change(_target: Target, _batch: Batch, found: dict[str | int, Tensor]) -> Found:
        value = found[1].float()
        chance = torch.Generator().manual_seed(0)
        size = share * value.norm(dim=-1, keepdim=True) / value.shape[-1] ** 0.5
        return {**found, 1: value + size * torch.randn(value.shape, generator=chance)}

    return change


def zeroed(*dimensions: int) -> Change:
    def change(_target: Target, _batch: Batch, found: dict[str | int, Tensor]) -> Found:
        return {**found, 1: found[1].index_fill(-1, torch.tensor(dimensions), 0)}

    return change


def last_token_zero(_target: Target, batch: Batch, found: dict[str | int, Tensor]) -> Found:
    value = found[LAST].clone()
    value[torch.arange(len(value)), batch.lengths - 1] = 0
    return {**found, LAST: value}


def first_token_replaced(_target: Target, _batch: Batch, found: dict[str | int, Tensor]) -> Found:
    value = found[1].clone()
    value[:, 0] = value[:, 3]
    return {**found, 1: value}


def mean_of_layers(target: Target, batch: Batch, _found: dict[str | int, Tensor]) -> Found:
    every = computed(target, batch, Needs(last_hidden=True, layers=(0, 2)))
    return {LAST: every[LAST], 1: (every[0] + every[2]) / 2}


NEAR: dict[str, tuple[Change, str]] = {
    "1.01": (scaled(1.01), r"layer 1 .*it is 1\.0\d+ times what it should be"),
    "0.99": (scaled(0.99), r"layer 1 .*it is 0\.9[89]\d* times what it should be"),
    "1.2": (scaled(1.2), r"layer 1 .*it is 1\.(2|19)\d* times what it should be"),
    "noise 0.1": (noisy(0.1), "layer 1 .*beyond what its encoding loses.* noise"),
    "noise 0.2": (noisy(0.2), "layer 1 .*beyond what its encoding loses.* noise"),
    "three dimensions": (zeroed(5, 20, 33), "3 of 64 dimensions differ: 5, 20, 33; the other"),
    "one dimension": (zeroed(20), "1 of 64 dimensions differ: 20; the other dimensions are right"),
    "last token": (last_token_zero, r"1 of \d+ tokens differ: \d+; the other tokens are right"),
    "first token": (first_token_replaced, r"1 of \d+ tokens differ: 0; the other tokens are right"),
    "mean of layers": (mean_of_layers, "layer 1 .*(mean of layers|other weights)"),
}


@pytest.mark.field("F77")
@pytest.mark.parametrize("name", NEAR)
@pytest.mark.parametrize("encoding", sorted(ENCODINGS))
def test_features_that_are_only_near_are_refused(
    encoding: str, name: str, target: Target, data: ConversationData, tmp_path: Path
) -> None:
    change, words = NEAR[name]
    refused(target, data, tmp_path / "store", change, words, encoding)


@pytest.mark.field("F77")
@pytest.mark.parametrize("name", NEAR)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_they_are_refused_in_half_precision_too(
    dtype: str, name: str, data: ConversationData, tmp_path: Path
) -> None:
    encoding = "fp8" if dtype == "bfloat16" else "float32"
    half = load.tiny(dtype=dtype)
    refused(half, data, tmp_path / "store", NEAR[name][0], "is not what the target", encoding)


@pytest.mark.field("F77")
def test_a_third_of_the_tokens_is_more_than_rounding_moves(
    data: ConversationData, tmp_path: Path
) -> None:
    """Each of them is near enough to be one that rounding moved."""

    def change(target: Target, batch: Batch, found: dict[str | int, Tensor]) -> Found:
        value = found[1].clone()
        value[:, ::3] = noisy(0.2)(target, batch, found)[1][:, ::3].to(value)
        return {**found, 1: value}

    half = load.tiny(dtype="bfloat16")
    refused(half, data, tmp_path / "store", change, r"layer 1 .*tokens differ: 0, 3, 6", "bf16")


def noise_in_small_values(_target: Target, _batch: Batch, found: dict[str | int, Tensor]) -> Found:
    value = found[1].float()
    size = 0.2 * value.abs().median(-1, keepdim=True).values
    chance = torch.Generator().manual_seed(0)
    return {**found, 1: value + size * torch.randn(value.shape, generator=chance)}


@pytest.mark.field("F77")
@pytest.mark.parametrize(
    ("change", "encoding", "width"),
    [
        (noise_in_small_values, "bf16", 64),  # Of the length it is nothing.
        (last_token_zero, "int8", 64),  # Small values are written as zero.
        (zeroed(20), "bf16", 1024),  # Of a token it is nothing.
    ],
)
def test_large_values_and_wide_vectors_hide_nothing(
    change: Change, encoding: str, width: int, tmp_path: Path
) -> None:
    target = with_outliers(load.tiny(dtype="bfloat16", width=width, layers=2))
    folder = random_set(target, tmp_path / "set", rows=6)
    data = ConversationData(path=str(folder), split="train")
    refused(target, data, tmp_path / "store", change, "is not what the target", encoding)


def test_each_bound_is_of_the_dtype() -> None:
    """A float32 target's is 1e-3 throughout; those of the others are in units of its rounding."""
    full, half = Bounds.of(torch.float32), Bounds.of(torch.float16)
    assert {full.near, full.far, full.dimension, full.gain} == {1e-3}
    assert Bounds.of(torch.bfloat16).near == 16 / 256 and half.far == 128 / 2048
    assert half.gain == 1e-3 and half.dimension == 64 / 2048


def other_top(target: Target, _batch: Batch, found: dict[str | int, Tensor]) -> Found:
    """Moved as little as gives another top token, where that is little."""
    hidden, rows = found[LAST].float(), target.output.weight.float()
    (first, second), ids = (
        target.head(found[LAST]).float().topk(2).values.unbind(-1),
        (target.head(found[LAST]).topk(2).indices),
    )
    apart = rows[ids[..., 1]] - rows[ids[..., 0]]
    needed = 1.3 * (first - second) / apart.norm(dim=-1).square()
    moved = needed[..., None] * apart
    small = moved.norm(dim=-1) < 0.05 * hidden.norm(dim=-1)
    return {**found, LAST: torch.where(small[..., None], hidden + moved, hidden)}


@pytest.mark.field("F77")
def test_a_near_state_that_gives_other_top_tokens_is_refused(
    data: ConversationData, tmp_path: Path
) -> None:
    words = rf"through the head only \d+ of \d+ tokens .*at least {AGREE:.0%} are needed"
    half = load.tiny(dtype="bfloat16", sharpness=1.0)
    refused(half, data, tmp_path / "store", other_top, words)


@pytest.mark.field("F77")
def test_a_wrong_state_is_reported_with_what_the_head_makes_of_it(
    target: Target, data: ConversationData, tmp_path: Path
) -> None:
    words = r"before the norm.*; through the head \d+ of \d+ tokens are the target's own top"
    refused(target, data, tmp_path / "store", before_the_norm, words)


def test_a_last_state_that_is_recomputed_is_compared_as_its_layer(
    target: Target, data: ConversationData, tmp_path: Path
) -> None:
    """Its own encoding's loss is that of the layer's output, from before the norm."""
    deepest, needs = len(target.decoder_layers) - 1, Needs(last_hidden=True)
    for factor in (1.0, 1.05):

        def read(batch: Batch, factor: float = factor) -> Found:
            found = computed(target, batch, Needs(layers=(deepest,)))
            return {deepest: found[deepest] * factor}

        path = make_store(
            target,
            data,
            tmp_path / str(factor),
            read=read,
            last_hidden=False,
            layers=[deepest],
            encoding="fp8",
        )
        if factor == 1:
            StoredFeatures(target, needs, data=data, path=path).close()
            continue
        with pytest.raises(InputError, match=f"layer {deepest} .*1\\.05 times"):
            StoredFeatures(target, needs, data=data, path=path)


@pytest.mark.field("F77")
@pytest.mark.parametrize("wrong", range(9))
def test_every_shard_is_looked_at(wrong: int, tmp_path: Path) -> None:
    """One of them was written by another version; its checksum is right."""
    target = load.tiny(layers=2)
    rows = [Row(i, tuple(range(3, 27)), ((4, 24),), ("stop",)) for i in range(10)]
    about = {"target": {"name": target.name, "fingerprint": target.fingerprint}}
    write_set(tmp_path / "set", rows, manifest=about, held_out=1)
    data = ConversationData(path=str(tmp_path / "set"), split="train")

    def change(_target: Target, batch: Batch, found: dict[str | int, Tensor]) -> Found:
        value = found[1].clone()
        value[batch.row_ids == data.indices[wrong]] *= 1.1
        return {**found, 1: value}

    words = rf"layer 1 of row {data.indices[wrong]} .*1\.1 times"
    refused(target, data, tmp_path / "store", change, words, batch_rows=1, shard_mb=0.001)


def after(start: int) -> Change:
    """Right up to there, as of a pass whose positions do not go on."""

    def change(_target: Target, _batch: Batch, found: dict[str | int, Tensor]) -> Found:
        value = found[1].clone()
        value[:, start:] = value[:, start - 1 : start]
        return {**found, 1: value}

    return change


@pytest.mark.field("F77")
@pytest.mark.parametrize("start", [512, 30])
def test_the_longest_row_is_compared_whole(start: int, tmp_path: Path) -> None:
    """Short rows, and the first 512 tokens of any, are right."""
    target = load.tiny(layers=2, max_position_embeddings=1024)
    lengths = [40, 20, 20, 530 if start == 512 else 44, 20, 20]
    rows = [
        Row(i, tuple(3 + k % 300 for k in range(n)), ((4, n),), ("stop",))
        for i, n in enumerate(lengths)
    ]
    about = {"target": {"name": target.name, "fingerprint": target.fingerprint}}
    write_set(tmp_path / "set", rows, manifest=about, held_out=1)
    data = ConversationData(path=str(tmp_path / "set"), split="train")
    words = rf"layer 1 of row 3 .*tokens differ: {start}, .*the other tokens are right"
    refused(target, data, tmp_path / "store", after(start), words, batch_tokens=600)


@pytest.mark.field("F77")
@pytest.mark.parametrize("encoding", ["float32", "bf16", "int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_features_pass_in_every_encoding(
    encoding: str, dtype: str, data: ConversationData, tmp_path: Path
) -> None:
    target = load.tiny(dtype=dtype)
    path = make_store(target, data, tmp_path / "store", encoding=encoding, layers=[1])
    StoredFeatures(target, BOTH, data=data, path=path).close()


@pytest.mark.field("F77")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("width", "layers"), [(64, 6), (1024, 2)])
def test_right_features_of_another_kernel_and_batch_pass(
    width: int, layers: int, dtype: str, tmp_path: Path
) -> None:
    here, there = (
        with_outliers(load.tiny(dtype=dtype, attention=backend, width=width, layers=layers))
        for backend in ("sdpa", "eager")
    )
    folder = random_set(here, tmp_path / "set", rows=6)
    rows = ConversationData(path=str(folder), split="train")
    for encoding in ENCODINGS:
        path = make_store(
            here,
            rows,
            tmp_path / encoding,
            read=lambda batch: computed(there, batch, BOTH),
            layers=[1],
            encoding=encoding,
            batch_tokens=30,
            shard_mb=0.05,
        )
        StoredFeatures(here, BOTH, data=rows, path=path).close()
