"""Rows that were joined into a sequence give what they give by themselves: the masks place by
place, and passes of every family."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from drafttrain.errors import InputError
from drafttrain.flow import Needs, Packing
from drafttrain.nn import isolation
from drafttrain.target import load
from drafttrain.target.model import Target
from tests.messages import said

LENGTHS = ((30, 9, 21), (3, 40))
"""Of the rows in two sequences of 64; some exceed the window of the sliding families."""
SIZE = 64


def packing(lengths: tuple[tuple[int, ...], ...] = LENGTHS, size: int = SIZE) -> Packing:
    documents = torch.full((len(lengths), size), -1)
    positions = torch.zeros(len(lengths), size, dtype=torch.int64)
    number = 0
    for sequence, rows in enumerate(lengths):
        start = 0
        for n in rows:
            documents[sequence, start : start + n] = number
            positions[sequence, start : start + n] = torch.arange(n)
            number, start = number + 1, start + n
    return Packing(documents, positions)


def brute(found: Packing, window: int | None) -> Tensor:
    """(b s s) by the rule in words."""
    documents = found.document_ids.tolist()
    b, s = found.document_ids.shape
    mask = torch.zeros(b, s, s, dtype=torch.bool)
    for sequence in range(b):
        for reading in range(s):
            for read in range(reading + 1):
                near = window is None or reading - read < window
                mask[sequence, reading, read] = (
                    documents[sequence][reading] == documents[sequence][read] and near
                )
    return mask


@pytest.mark.parametrize("window", [None, 1, 12])
def test_both_masks_are_the_rule_place_by_place(window: int | None) -> None:
    from torch.nn.attention.flex_attention import create_mask

    found = packing()
    expected = brute(found, window)
    assert torch.equal(isolation.dense(found, window=window)[:, 0], expected)
    b, s = found.document_ids.shape
    assert torch.equal(
        create_mask(isolation.rule(found, window), b, 1, s, s, device="cpu")[:, 0], expected
    )
    assert torch.equal(isolation.dense(found, 50, window)[:, 0], expected[:, :50, :50])
    assert bool(expected.any(-1).all()), "every place reads something, so that no softmax is empty"


def test_blocks_hold_every_place_that_may_be_read_and_few_others() -> None:
    lengths = ((200, 50, 130), (400,))
    found = packing(lengths, 512)
    made = isolation.blocks(found)
    held = made.to_dense()[:, 0].bool()  # b 4 4, blocks of 128
    needed = (
        isolation.dense(found)[:, 0].unflatten(1, (4, 128)).unflatten(3, (4, 128)).any(4).any(2)
    )
    assert torch.equal(held, needed) and 0 < made.sparsity() < 100


@pytest.mark.slow
def test_flex_attention_with_the_blocks_is_attention_with_the_dense_mask() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    found = packing()
    q, k, v = torch.randn(3, 2, 2, SIZE, 16, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It says that it is slow without a compiler.
        flexible = flex_attention(q, k, v, block_mask=isolation.blocks(found, 12))
    expected = scaled_dot_product_attention(q, k, v, attn_mask=isolation.dense(found, window=12))
    torch.testing.assert_close(flexible, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", load.TINY)
def test_joined_rows_have_the_features_of_single_rows(family: str) -> None:
    target = load.tiny(family=family, layers=2, width=32, vocab_size=128)
    needs = Needs(last_hidden=True, layers=(0, 1))
    assert target.choose_isolation() == "dense"
    found, chance = packing(), torch.Generator().manual_seed(1)
    ids = torch.randint(3, 128, found.document_ids.shape, generator=chance)
    joined = target.features(ids, torch.tensor([60, 43]), needs, found)
    assert joined.last_hidden is not None
    for number in range(5):
        place = found.document_ids == number
        row = ids[place][None]
        single = target.features(row, torch.tensor([row.shape[1]]), needs)
        assert single.last_hidden is not None
        torch.testing.assert_close(
            joined.last_hidden[place], single.last_hidden[0], rtol=1e-5, atol=1e-5
        )
        for layer in needs.layers:
            torch.testing.assert_close(
                joined.layers[layer][place], single.layers[layer][0], rtol=1e-5, atol=1e-5
            )


def test_a_model_that_mixes_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = load.tiny(layers=1, width=32, vocab_size=64)
    own = Target.full_pass
    monkeypatch.setattr(Target, "full_pass", lambda self, ids, packing=None: own(self, ids))
    with pytest.raises(InputError, match=said("nn.rows_mixed")):
        target.choose_isolation()

    def broken(self: Target, ids: Tensor, packing: Packing | None = None) -> Tensor:
        if packing is not None:
            raise ValueError("too many values to unpack")
        return own(self, ids)

    monkeypatch.setattr(Target, "full_pass", broken)
    with pytest.raises(InputError, match=r"trainer\.pack: .*\(too many values to unpack\)"):
        target.choose_isolation()


def test_flex_is_for_passes_without_gradients_and_leaves_no_trace() -> None:
    from torch.nn.attention.flex_attention import BlockMask

    target = load.tiny(layers=1, width=32, vocab_size=64)
    attention: Any = target.decoder_layers[0].self_attn
    target.isolates_by = isolation.FLEX
    with target.packing_inputs(packing()) as words:
        assert isinstance(words["attention_mask"], Tensor)
        assert target.model.config._attn_implementation == "sdpa"
    with (
        pytest.raises(ZeroDivisionError),
        torch.no_grad(),
        target.packing_inputs(packing()) as words,
    ):
        assert isinstance(words["attention_mask"], BlockMask)
        assert target.model.config._attn_implementation == "flex_attention"
        assert attention.config._attn_implementation == "flex_attention"
        _ = 1 / 0
    assert attention.config._attn_implementation == "sdpa"
