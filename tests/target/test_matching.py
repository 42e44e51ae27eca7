"""F77, neighbours of a last hidden state from before the final norm: another layer, the next or the
last position, the norm twice, another row's; in every encoding and dtype the right features pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafttrain.data.datamodule import ConversationData
from drafttrain.errors import InputError
from drafttrain.flow import Batch, Needs
from drafttrain.target import load
from drafttrain.target.features import LAST, computed
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


WRONG: dict[str, tuple[Change, str]] = {
    "before the norm": (before_the_norm, "the last hidden state .*before the norm"),
    "another layer": (another_layer, "the output of layer 1 .*it is the output of layer 0"),
    "norm twice": (normed_twice, "the last hidden state .*after the final norm a second time"),
    "next position": (shifted(-1), "it is that of the next position"),
    "position before": (shifted(1), "it is that of the position before"),
    "another row": (another_row, "it may be of another row"),
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


@pytest.mark.field("F77")
@pytest.mark.parametrize("encoding", ["float32", "bf16", "int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_features_pass_in_every_encoding(
    encoding: str, dtype: str, data: ConversationData, tmp_path: Path
) -> None:
    target = load.tiny(dtype=dtype)
    path = make_store(target, data, tmp_path / "store", encoding=encoding, layers=[1])
    StoredFeatures(target, BOTH, data=data, path=path).close()
