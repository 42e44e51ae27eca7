"""What is checked and chosen before a drafter is trained for a target, and how a tuned target is
laid out after it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafttrain.data.datamodule import ConversationData
from drafttrain.errors import InputError
from drafttrain.nn import packed
from drafttrain.nn.packed import PackedLinear
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.training.pairing import check_device, check_set, draft_vocabulary, lay_out


def test_a_set_must_be_the_targets_own_and_fit(target: Target, folder: Path) -> None:
    data, held_out = ConversationData(folder), ConversationData(folder, split="held_out")
    check_set(target, data, held_out, "here")
    check_set(target, data, None, "here")
    with pytest.raises(InputError, match=r"data\.path=here belongs to another target"):
        check_set(load.tiny(seed=1), data, None, "here")
    held_out.lengths = [*held_out.lengths, target.context + 1]
    with pytest.raises(
        InputError,
        match=f"rows of up to {target.context + 1} tokens.*set data.max_length={target.context}",
    ):
        check_set(target, data, held_out, "here")


def test_training_is_where_the_target_is(target: Target) -> None:
    for accelerator in ("auto", "cpu"):
        check_device(target, accelerator)
    with pytest.raises(InputError, match=r"trainer\.accelerator=gpu, and the target is on cpu"):
        check_device(target, "gpu")


@pytest.mark.field("F14", "F17")
def test_the_draft_vocabulary_is_that_of_all_labels(target: Target, folder: Path) -> None:
    whole, part = ConversationData(folder), ConversationData(folder, limit_rows=2)
    ids, told = draft_vocabulary(target, whole, None, 20)
    assert torch.equal(draft_vocabulary(target, part, None, 20)[0], ids)
    counts = whole.label_counts(target.vocab_size)
    assert len(ids) == 20 and set(target.stop_ids) <= set(ids.tolist())
    assert (
        f"20 of {target.vocab_size} ids, {float(counts[ids].sum() / counts.sum()):.1%} of training "
        f"labels" in told
    )
    held_out = ConversationData(folder, split="held_out")
    assert (
        "held-out" not in told
        and "of held-out labels" in draft_vocabulary(target, whole, held_out, 20)[1]
    )


def test_a_target_is_laid_out_as_its_loading_would_have_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def layers() -> int:
        return sum(isinstance(module, PackedLinear) for module in target.model.modules())

    target = load.tiny()
    for pack in (None, False):
        lay_out(target, pack)
        assert not layers()
    seen: list[int] = []

    def should_pack(setting: str | bool, size: int) -> bool:
        seen.append(size)
        return setting == "auto"

    monkeypatch.setattr(packed, "should_pack", should_pack)
    lay_out(target, "auto")
    assert seen == [sum(4 * p.numel() for p in load.tiny().model.parameters())] and layers()
